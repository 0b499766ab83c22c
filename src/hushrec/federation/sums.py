"""What a node sends back of a round: the exact sum of its clients' uploads, in whole steps.

The server knows from public things what the sum must look like and how large it can be, and counts
nothing else. Whole steps add up exactly, so it does not matter how users are spread over nodes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from hushrec.aggregate import ExactSum, UploadShape
from hushrec.aggregate.exact import STEPS_PER_UNIT
from hushrec.aggregate.statistics import LARGEST_LOSS, STEPS, LossSum
from hushrec.errors import MessageError
from hushrec.frame import HEADER_BYTES, LARGEST, Arrays, count_in, pack, text_in, unpack, whole_in
from hushrec.messages import SLACK

COUNTS = ("clients", "trained", "lost", "up_bytes", "emptied")
"""What a sum counts beside its arrays."""


@dataclass(frozen=True)
class ExpectedSum:
    """What a node's sum must be to count."""

    run: str
    round: int
    clients: int
    """Most clients that it may be of."""
    shape: UploadShape
    """Of the sum: names and shapes that follow from public things."""
    norm: float
    """Largest L2 norm of one client's part."""
    most_steps: int
    """Largest entry, so that no sum of so many nodes can overflow."""

    @property
    def most_bytes(self) -> int:
        """Size above which a message is not looked at."""
        keys = [self.shape.n_rows**2 if count is None else count for count, _ in self._sparse()]
        widths = [width for _, width in self._sparse()]
        rows = sum(8 * count * (width + 1) for count, width in zip(keys, widths, strict=True))
        dense = sum(8 * int(np.prod(shape)) for shape in self.shape.dense.values())
        return min(LARGEST, rows + dense + 2 * HEADER_BYTES)

    def _sparse(self) -> list[tuple[int | None, int]]:
        tables = [(self.shape.n_rows, width) for width in self.shape.tables.values()]
        return [*tables, *self.shape.spaces.values()]


@dataclass(frozen=True, eq=False)
class NodeSum:
    """The exact sum of what a node's clients upload in a round, and nothing of any of them."""

    run: str
    round: int
    summed: ExactSum
    loss: LossSum
    up_bytes: int
    """Of the uploads that were summed, as if each had travelled."""
    emptied: int

    def to_bytes(self) -> bytes:
        """Write the message."""
        facts = {"run": self.run, "round": self.round, "clients": self.summed.clients}
        facts |= {"loss": self.loss.steps, "trained": self.loss.clients, "lost": self.loss.lost}
        facts |= {"up_bytes": self.up_bytes, "emptied": self.emptied}
        return pack("sum", facts, self.summed.to_arrays())

    @classmethod
    def from_bytes(cls, data: bytes, expected: ExpectedSum) -> NodeSum:
        """Read it on the server; refuse whatever is not as expected."""
        facts, arrays = unpack("sum", data, expected.most_bytes)
        run, number = text_in(facts, "run"), count_in(facts, "round")
        if (run, number) != (expected.run, expected.round):
            raise MessageError(
                f"the sum is of round {number} of '{run}', not of round {expected.round} of "
                f"'{expected.run}'"
            )
        said = {name: count_in(facts, name) for name in COUNTS}
        return cls.of(expected, {**said, "loss": whole_in(facts, "loss")}, arrays)

    @classmethod
    def of(
        cls,
        expected: ExpectedSum,
        facts: Mapping[str, int],
        arrays: Arrays,
        *,
        noised: bool = False,
    ) -> NodeSum:
        """Make it of counts and arrays; refuse whatever is not as expected.

        Of a sum of many nodes, with noise of theirs in it, only the noise says how large it is.
        """
        clients = facts["clients"]
        if not 0 <= clients <= expected.clients:
            raise MessageError(
                f"the sum is of {clients} clients, and {expected.clients} were asked"
            )
        loss = LossSum(facts["loss"], facts["trained"], facts["lost"])
        if not 0 <= loss.lost <= loss.clients <= clients:
            raise MessageError("the sum counts more losses than clients")
        if abs(loss.steps) > clients * STEPS * int(LARGEST_LOSS):
            raise MessageError("the sum of losses is larger than losses can be")
        emptied, up_bytes = facts["emptied"], facts["up_bytes"]
        if not (0 <= emptied <= clients and 0 <= up_bytes < 2**60):
            raise MessageError("the sum counts what cannot be")
        _check_sum(arrays, clients, expected, noised)
        summed = ExactSum.from_arrays(expected.shape, clients, arrays)
        return cls(expected.run, expected.round, summed, loss, up_bytes, emptied)


def _check_sum(arrays: Arrays, clients: int, expected: ExpectedSum, noised: bool) -> None:
    shape = expected.shape
    tables = {name: (shape.n_rows, width) for name, width in shape.tables.items()}
    sparse: dict[str, tuple[int | None, int]] = {**tables, **shape.spaces}
    names = {f"{part}/{name}" for name in sparse for part in ("ids", "rows")}
    names |= {f"dense/{name}" for name in shape.dense}
    some = bool(clients or noised)  # of no clients, a sum has no arrays
    for name in sorted((names if some else set()) ^ arrays.keys()):
        what = "lacks" if name in names else "holds an array that nobody asked for:"
        raise MessageError(f"the sum {what} '{name}'")
    for name, array in arrays.items():
        if array.dtype != np.int64:
            raise MessageError(f"'{name}' is {array.dtype}, not whole steps")
    for name, own in shape.dense.items():
        if some and arrays[f"dense/{name}"].shape != own:
            raise MessageError(f"'{name}' has shape {arrays[f'dense/{name}'].shape}, not {own}")
    for name, (count, width) in sparse.items() if some else ():
        ids, rows = arrays[f"ids/{name}"], arrays[f"rows/{name}"]
        most = shape.n_rows**2 if count is None else count
        if ids.ndim != 1 or rows.shape != (len(ids), width):
            raise MessageError(f"'{name}' has ids {ids.shape} for rows {rows.shape}")
        if len(ids) and (ids[0] < 0 or ids[-1] >= most or (np.diff(ids) <= 0).any()):
            raise MessageError(f"'{name}' has rows twice, in no order, or that do not exist")
    _check_size(arrays, clients, expected, noised)


def _check_size(arrays: Arrays, clients: int, expected: ExpectedSum, noised: bool) -> None:
    """Refuse a sum that clients who keep to their bound cannot have."""
    square = 0.0
    for name, array in arrays.items():
        part, _, name = name.partition("/")
        if part == "ids":
            continue
        largest = max(abs(int(array.max(initial=0))), abs(int(array.min(initial=0))))
        if largest > expected.most_steps:
            raise MessageError(f"'{name}' is too large to sum")
        if noised:
            continue
        if name.startswith("privacy/"):  # what a mechanism adds is at most 1 of each client
            if largest > clients * STEPS_PER_UNIT * SLACK:
                raise MessageError(f"'{name}' is larger than {clients} clients can make it")
            continue
        flat = array.reshape(-1).astype(np.float64)
        square += float(flat @ flat)
    norm, most = np.sqrt(square) / STEPS_PER_UNIT, clients * expected.norm * SLACK
    if not norm <= most:
        raise MessageError(
            f"the sum has norm {norm:.6g}, more than the {most:.6g} that {clients} clients can have"
        )
