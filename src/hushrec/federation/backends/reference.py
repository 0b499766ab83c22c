"""The reference backend: every client alone, with its own data and store, through bytes.

Slow and obvious. Nothing reaches a client but a `Download` in bytes, and nothing leaves it but an
`Upload` or an `Evaluation` in bytes, which the server validates. Every other backend must give the
same bits (`hushrec.testing.BackendContract`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from hushrec.aggregation import ExactSum
from hushrec.aggregation.statistics import Evaluation, LossSum
from hushrec.data.splitting import Part, Split
from hushrec.evaluation.evaluator import Evaluator
from hushrec.federation.backends.base import Collected
from hushrec.federation.client import Task, take_part
from hushrec.federation.experiment import Experiment
from hushrec.federation.messages import Download, Expected, Upload
from hushrec.io.codec import Arrays, payload
from hushrec.methods.base import Shared
from hushrec.privacy.protection import Protection
from hushrec.private.store import PrivateStore

ALONE = np.zeros(1, np.int64)


class Device:
    """One client: a device, or a silo of several users."""

    def __init__(
        self, task: Task, split: Split, experiment: Experiment, noise: NDArray[np.float64] | None
    ) -> None:
        self.task = task
        view = split.train_view(experiment.protocol)
        self.view = replace(view, noise=noise).prepared()
        fields = task.method.private_fields(self.view, task.initial, task.streams)
        self.store = PrivateStore(fields, 1)
        self.selected: PrivateStore | None = None
        tolerant = experiment.privacy.promises
        self.evaluator = Evaluator(split, experiment.evaluation, task.streams, 1, tolerant)

    def take_part(self, message: bytes) -> bytes:
        """Answer a download with an upload."""
        download = Download.from_bytes(message)
        protection = self.task.protection_of(download)
        kept = self.store.read(ALONE)
        upload, private = take_part(self.task, protection, download, self.view, kept)
        self.store.write(ALONE, private)
        return upload.to_bytes()

    def evaluate(self, message: bytes, part: Part, selected: bool) -> bytes:
        """Answer what is served with what the own held-out items gave."""
        serving, store = Download.from_bytes(message).common, self.store
        if selected:
            assert self.selected is not None, "a round was selected"
            store = self.selected
        ranks = self.evaluator.rank(self.evaluator.model(self.task.method, serving, store), part)
        return self.evaluator.tally(ranks).to_bytes()


class OneByOne:
    """Every client of a split by itself."""

    def __init__(
        self,
        task: Task,
        split: Split,
        experiment: Experiment,
        deviations: NDArray[np.float64] | None = None,
    ) -> None:
        """``deviations`` are of the noise that each client adds, where they differ."""
        self.task = task
        agreed = replace(task, protection=task.protection.on_device())
        owner = split.train.users if split.holders is None else split.holders
        self.devices = {}
        for client in np.unique(owner).tolist():
            own = split.take(np.flatnonzero(owner == client))
            noise = None if deviations is None else deviations[client : client + 1]
            self.devices[client] = Device(agreed, own, experiment, noise)
        config = experiment.evaluation
        self.metrics = config.reported

    def train(
        self, download: Download, protection: Protection, cohort: NDArray[np.int64]
    ) -> Collected:
        """Let the clients take part one after the other."""
        summed, loss = ExactSum(self.task.public.n_items), LossSum()
        up_bytes = down_bytes = zeroed_out = 0
        expected = Expected(
            download.round,
            protection.sent_shape(self.task.upload_shape(download.to(ALONE[:0])), download.round),
            whole=protection.sends_whole(download.round),
            norm=protection.norm_of(download.round),
        )
        for place, client in enumerate(cohort.tolist()):
            message = download.to(np.array([place])).to_bytes()
            answer = self.devices[client].take_part(message)
            upload = Upload.from_bytes(answer, expected)
            number = np.array([client], np.int32)
            summed.add(protection.receive(upload.update, number, download.round))
            loss = loss.merge(upload.loss)
            up_bytes, down_bytes = up_bytes + payload(answer), down_bytes + payload(message)
            zeroed_out += upload.update.zeroed_out
        return Collected(summed, loss, up_bytes, down_bytes, zeroed_out)

    def evaluate(self, serving: Shared, part: Part, *, selected: bool = False) -> Evaluation:
        """Merge what the clients say of their own held-out items."""
        message, merged = Download(0, serving).to_bytes(), Evaluation({})
        for device in self.devices.values():
            answer = device.evaluate(message, part, selected)
            merged = merged.merge(Evaluation.from_bytes(answer, self.metrics))
        return merged

    def keep_selected(self) -> None:
        """Let every client remember its own."""
        for device in self.devices.values():
            device.selected = device.store.snapshot(device.selected)

    def save(self, *, selected: bool) -> Iterator[Arrays]:
        """Yield nothing: clients keep what is theirs."""
        return iter(())

    def load(self, parts: Iterable[Arrays], *, selected: bool) -> None:
        """Put nothing back."""
