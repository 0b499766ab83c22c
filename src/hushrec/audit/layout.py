"""The layout of a run's uploads, round by round, and canaries that lie in it.

A `NoisedRound` is a round in which something is uploaded, with the protection that the run has in
it: its mechanisms, and the tables, key spaces and dense arrays that they cover.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hushrec.aggregation import ClientRows, ExactSum, KeyedRows, Total, Update, UploadShape
from hushrec.data.views import Ragged, TrainView
from hushrec.federation.client import Task
from hushrec.methods.base import Shared
from hushrec.privacy.accountant import Gaussian, Pure, sensitivity
from hushrec.privacy.clipping import AdaptiveClip, Clip, FlatClip, RowClip
from hushrec.privacy.noise import CentralGaussian, LocalNoise
from hushrec.privacy.plan import Plan
from hushrec.privacy.protection import Protection
from hushrec.streams import SecretRound

Values = NDArray[np.float64]
Places = Mapping[str, NDArray[np.int64]]
"""Entries of each array that a canary lies in, [canaries, entries of one], each in its own row."""


@dataclass(frozen=True)
class NoisedRound:
    """A round in which something is uploaded."""

    number: int
    protection: Protection

    @property
    def noise(self) -> CentralGaussian | LocalNoise:
        """The mechanism that noises."""
        noise = self.protection.mechanisms[-1]
        assert isinstance(noise, CentralGaussian | LocalNoise), "what else, there is no canary for"
        return noise

    @property
    def clip(self) -> Clip:
        """The clipping, without which there is no claim."""
        if isinstance(self.noise, CentralGaussian):
            return self.noise.clip
        layers = self.protection.mechanisms
        return next(layer for layer in layers if isinstance(layer, FlatClip | RowClip))

    @property
    def shape(self) -> UploadShape:
        """What is uploaded."""
        return self.noise.shape

    def of(self, shape: UploadShape) -> NoisedRound:
        """Return the same round with arrays of other sizes, as the mechanisms themselves do it."""
        return replace(self, protection=self.protection.for_shape(shape))

    def planned(self, plan: Plan) -> float:
        """Return the scale of noise that the account was charged for, whatever is added really."""
        apart = sensitivity(self.clip.whole_bound(self.shape), plan.neighbours)
        event = plan.event_of(self.number)
        if isinstance(event, Pure):
            return apart / event.epsilon
        return apart * self.update_multiplier(plan, event)

    def update_multiplier(self, plan: Plan, event: Gaussian) -> float:
        """Return an event's multiplier without what the bits of adaptive clipping take of it."""
        if not isinstance(self.clip, AdaptiveClip):
            return event.multiplier
        bits = self.clip.bit_noise / sensitivity(0.5, plan.neighbours)
        return float((event.multiplier**-2 - bits**-2) ** -0.5)


def noised_rounds(task: Task, plan: Plan, shared: Shared) -> list[NoisedRound]:
    """Return the rounds of a run that cost something.

    Where layouts follow from what was released, ``shared`` is what it came to.
    """
    state = plan.protection.state
    return [
        NoisedRound(number, task.protection_of(task.download(number, shared, state=state)).noising)
        for number in plan.uploads(range(1, plan.rounds + 1))
    ]


class WatchedSum(ExactSum):
    """A sum that remembers what it came to with its noise; all that is released is made of that."""

    seen: Total

    def total(self) -> Total:
        """Return the sum as numbers, and remember it."""
        self.seen = super().total()
        return self.seen


def noised_sum(stage: NoisedRound, sent: Update, secret: SecretRound) -> Total:
    """Return what a round's uploads come to with their noise, before anything is made of it."""
    summed = WatchedSum(stage.shape.n_rows)
    summed.add(sent)
    stage.protection.finish(summed, secret)
    return summed.seen


def written_out(total: Total, shape: UploadShape) -> dict[str, Values]:
    """Return every array of a sum whole and flat; what is not in the sum is zero."""
    out = {name: np.zeros(math.prod(size)) for name, size in shape.whole.items()}
    for name, (ids, rows) in total.rows.items():
        out[name].reshape(-1, rows.shape[1])[ids] = rows
    for name, array in total.dense.items():
        out[name] = array.reshape(-1)
    return out


def uploads(shape: UploadShape, places: Places, amounts: NDArray[Any]) -> Update:
    """Return uploads that are zero but for each canary's amount at each of its places."""
    count = len(amounts)
    rows, dense = {}, {}
    for name, (_, width) in shape.sparse.items():
        entries = places.get(name, np.zeros((count, 0), np.int64))
        each = entries.shape[1]
        values = np.zeros((entries.size, width), np.float32)
        values[np.arange(entries.size), entries.ravel() % width] = np.repeat(amounts, each)
        indptr, ids = each * np.arange(count + 1), entries.ravel() // width
        rows[name] = (
            KeyedRows(indptr, ids, values, space=shape.spaces[name][0])
            if name in shape.spaces
            else ClientRows(indptr, ids.astype(np.int32), values)
        )
    for name, size in shape.dense.items():
        array = np.zeros((count, math.prod(size)), np.float32)
        if name in places:
            array[np.arange(count)[:, None], places[name]] = amounts[:, None]
        dense[name] = array.reshape(count, *size)
    return Update(count, rows, dense)


def spread(names: Sequence[str], shape: UploadShape, most: int) -> Places:
    """Lay one canary over some arrays, in up to so many rows of each."""
    widths = {name: width for name, (_, width) in shape.sparse.items()}
    whole = shape.whole
    return {
        name: widths.get(name, 1)
        * np.arange(min(most, math.prod(whole[name]) // widths.get(name, 1)))[None]
        for name in names
    }


def clients(numbers: NDArray[np.int32], n_items: int, noise: Values | None = None) -> TrainView:
    """Return canaries with these numbers, who have data: who has none uploads nothing."""
    one = Ragged(np.arange(len(numbers) + 1), np.zeros(len(numbers), np.int32))
    return TrainView(numbers, n_items, one, one, one, noise=noise)
