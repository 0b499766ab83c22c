"""What nodes sum securely, as one vector of whole numbers: of a round, and of a look.

It is all that a node's answer holds where sums are in the clear: counts, losses and metrics too.
Node and server find the same layout, each by itself, from public things and from what everybody is
asked; rows are written out, so that nothing of a vector tells which of them a node touched.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from hushrec.aggregate import UploadShape
from hushrec.aggregate.statistics import PLACES, Evaluation, Tally
from hushrec.client import Task, take_part
from hushrec.errors import ConfigError
from hushrec.federation.messages import LookRequest, TrainRequest
from hushrec.federation.sums import COUNTS, NodeSum
from hushrec.messages import Download
from hushrec.privacy.protection import Protection
from hushrec.secure import Layout

MOST_WORDS = 2**26
"""The longest vector: half a gigabyte, which every node sends and the server adds up."""
Vector = NDArray[np.int64]


@dataclass(frozen=True)
class RoundForm:
    """A `NodeSum` as a vector."""

    shape: UploadShape

    @cached_property
    def layout(self) -> Layout:
        """Names and shapes of what is in it."""
        return _layout({**_arrays(self.shape), "counts": (len(COUNTS),)}, ("loss",))

    def pack(self, found: NodeSum, nodes: int) -> Vector:
        """Return the vector of a node, which so many like it can be added to."""
        loss, sparse = found.loss, found.summed.to_arrays()
        counts = found.summed.clients, loss.clients, loss.lost, found.up_bytes, found.emptied
        arrays = {"counts": np.array(counts, np.int64)}
        for name, shape in _arrays(self.shape).items():
            arrays[name] = np.zeros(shape, np.int64)
            part, _, own = name.partition("/")
            if part == "dense":
                arrays[name] += sparse.pop(name, 0)
            elif name in sparse:
                arrays[name][sparse.pop(f"ids/{own}")] = sparse.pop(name)
        if sparse:
            raise ConfigError(f"the upload holds what its shape does not: {', '.join(sparse)}")
        return self.layout.pack(arrays, {"loss": loss.steps}, nodes)

    def unpack(self, vector: Vector) -> tuple[dict[str, int], dict[str, Vector]]:
        """Return the facts and the arrays of a sum of nodes, as a `NodeSum` has them."""
        whole, wide = self.layout.unpack(vector)
        counts = dict(zip(COUNTS, whole.pop("counts").tolist(), strict=True))
        arrays: dict[str, Vector] = {}
        for name, array in whole.items():
            part, _, own = name.partition("/")
            if part == "dense":
                arrays[name] = array
                continue
            ids = np.flatnonzero(array.any(1))
            arrays |= {f"ids/{own}": ids, name: array[ids]}
        nothing = not counts["clients"] and not any(array.any() for array in arrays.values())
        return {**counts, "loss": wide["loss"]}, {} if nothing else arrays


@dataclass(frozen=True)
class LookForm:
    """An `Evaluation` as a vector."""

    metrics: Mapping[str, list[str]]
    """Of each candidate set."""

    @cached_property
    def layout(self) -> Layout:
        """Names and shapes of what is in it."""
        arrays: dict[str, tuple[int, ...]] = {}
        for name in self.metrics:
            arrays |= {f"users/{name}": (1,), f"places/{name}": (PLACES,)}
        wide = [f"{name}/{each}" for name, metrics in self.metrics.items() for each in metrics]
        return _layout(arrays, tuple(wide))

    def pack(self, found: Evaluation, nodes: int) -> Vector:
        """Return the vector of a node, which so many like it can be added to."""
        arrays: dict[str, Vector] = {}
        wide: dict[str, int] = {}
        for name, metrics in self.metrics.items():
            tally = found.tallies[name]
            arrays |= {f"users/{name}": np.array([tally.users]), f"places/{name}": tally.places}
            wide |= {f"{name}/{each}": tally.sums.get(each, 0) for each in metrics}
        return self.layout.pack(arrays, wide, nodes)

    def unpack(self, vector: Vector) -> Evaluation:
        """Return what nodes looked at together."""
        arrays, wide = self.layout.unpack(vector)
        tallies = {}
        for name, metrics in self.metrics.items():
            users = int(arrays[f"users/{name}"][0])
            sums = {each: wide[f"{name}/{each}"] for each in metrics if users}
            tallies[name] = Tally(users, sums, arrays[f"places/{name}"].copy())
        return Evaluation(tallies)


def round_shape(task: Task, protection: Protection, download: Download) -> UploadShape:
    """Return what a sum of a round looks like: it is asked of no clients, so nobody decides it."""
    nobody = replace(task.nobody, noise=np.zeros(0))
    empty = download.to(np.zeros(0, np.int64))
    upload, _ = take_part(task, protection, empty, nobody, task.nobodys)
    update = protection.receive(upload.update, nobody.clients, download.round)
    return UploadShape.of(update, nobody.n_items)


def about(request: TrainRequest | LookRequest) -> str:
    """Say what everybody is told and asked in a sum: nodes that are not told the same have no sum.

    How many there are is part of it, as noise follows from that.
    """
    if isinstance(request, TrainRequest):
        said, what = replace(request.download, own={}), f"round {request.download.round}"
    else:
        said, what = request.serving, f"look at {request.part} after round {request.round}"
        what += " with selected parameters" if request.with_selected else ""
    digest = hashlib.blake2b(said.to_bytes(), digest_size=32).hexdigest()
    terms = request.terms
    people = f"{terms.training} of {terms.population}, {terms.largest_epsilon}"
    return f"{terms.run} ({people}): {what}: {digest}"


def _arrays(shape: UploadShape) -> dict[str, tuple[int, ...]]:
    """Return the names and shapes of a whole sum; of an open space, every pair of rows."""
    found: dict[str, tuple[int, ...]] = {
        f"rows/{name}": (shape.n_rows, width) for name, width in shape.tables.items()
    }
    for name, (keys, width) in shape.spaces.items():
        found[f"rows/{name}"] = (shape.n_rows**2 if keys is None else keys, width)
    return found | {f"dense/{name}": own for name, own in shape.dense.items()}


def _layout(arrays: Mapping[str, tuple[int, ...]], wide: tuple[str, ...]) -> Layout:
    layout = Layout(arrays, wide)
    if layout.length > MOST_WORDS:
        raise ConfigError(
            f"a secure sum of {layout.length:,} numbers is more than the {MOST_WORDS:,} that a "
            "node sends: use a method with smaller uploads, a shorter list of items, or sums in "
            "the clear"
        )
    return layout
