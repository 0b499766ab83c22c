"""Client updates, losses and metrics, and their exact sums in fixed point.

An upload holds sparse rows of tables with one row per item (`ClientRows`), sparse rows under keys
of a declared space, for example pairs of items (`KeyedRows`), and dense arrays. The sum over
clients of keyed rows takes memory for the distinct keys only. The shape of an upload
(`UploadShape`) follows from public facts, never from a client's data.

In the sum every entry becomes a whole multiple of 2^-32, and whole numbers add exactly, in any
order. So a sum does not depend on threads, batches or silos, and it has the form that secure
aggregation needs. The step is a thousandth of what a float32 near 1 can resolve. A sum is filled as
uploads arrive and never holds one table per client. Sums of different threads or nodes are merged.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from hushrec.errors import ConfigError, DivergedError, MessageError
from hushrec.io.codec import HEADER_BYTES, ArrayGroup, ArraySpec, Count, Message, check_arrays
from hushrec.kernels import pairs as pair_kernels
from hushrec.kernels import ragged
from hushrec.kernels.pairs import STEPS_PER_UNIT as STEPS_PER_UNIT
from hushrec.kernels.pairs import FixedPoint as FixedPoint


@dataclass(frozen=True)
class UploadShape:
    """Names and sizes of the arrays that every client uploads; the same for all data."""

    n_rows: int
    tables: Mapping[str, int]
    """Width of each table of ``n_rows`` rows."""
    dense: Mapping[str, tuple[int, ...]]
    spaces: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """Number of keys, and width, of the rows of each key space."""
    grids: Mapping[str, FixedPoint] = field(default_factory=dict)
    """Fixed point of the key spaces that declare one."""

    @classmethod
    def of(cls, update: Update, n_rows: int) -> UploadShape:
        """Read the shape from an update; that of a batch of no clients will do."""
        if update.rows.keys() & update.dense.keys():
            raise ConfigError("a table and a dense array of an upload need different names")
        tables, spaces, grids = {}, {}, {}
        for name, rows in update.rows.items():
            if isinstance(rows, KeyedRows):
                spaces[name] = rows.space, rows.rows.shape[1]
                if rows.grid is not None:
                    grids[name] = rows.grid
            else:
                tables[name] = rows.rows.shape[1]
        dense = {name: array.shape[1:] for name, array in update.dense.items()}
        return cls(n_rows, tables, dense, spaces, grids)

    @property
    def sparse(self) -> dict[str, tuple[int, int]]:
        """Number of rows, and width, of every table and key space."""
        tables = {name: (self.n_rows, width) for name, width in self.tables.items()}
        return {**tables, **self.spaces}

    @property
    def whole(self) -> dict[str, tuple[int, ...]]:
        """Shape of every table, key space and dense array of one upload in dense form."""
        return {**self.sparse, **self.dense}

    @property
    def entries(self) -> int:
        """Count the numbers of one upload in dense form."""
        return sum(math.prod(shape) for shape in self.whole.values())

    @property
    def parts(self) -> int:
        """Count what `RowClip` bounds one by one: rows of tables and spaces, and dense arrays."""
        return sum(count for count, _ in self.sparse.values()) + len(self.dense)

    @property
    def nbytes(self) -> int:
        """Bytes of one upload in dense form, as float32."""
        return 4 * self.entries


OWN_WEIGHT = "weight"
"""A dense array of this name says how much each client counts: its weight, of 0 to 1, less a half.
Everything else in the upload was multiplied by the weight. Clipping bounds what there was before,
so that it leaves clients' weights as they are; an upload of zeros counts half."""


@dataclass(frozen=True)
class ClientRows:
    """Rows of a table, ragged by client: client c owns entries ``indptr[c]`` to ``indptr[c+1]``."""

    id_dtype: ClassVar[type[np.integer[Any]]] = np.int32

    indptr: NDArray[np.int64]
    ids: NDArray[np.int32] | NDArray[np.int64]
    """Row numbers of the table, int32; the keys of `KeyedRows` are int64."""
    rows: NDArray[np.float32]
    """[entries, width]"""
    base: NDArray[np.float32] | None = None
    """Where given, what is meant are the rows' differences from this table's. The sum takes them as
    it goes; `differences` writes them out."""

    def __post_init__(self) -> None:
        """Refuse ids of the wrong width: keys need a declared space."""
        if self.ids.dtype != self.id_dtype:
            raise TypeError(
                f"ids of {type(self).__name__} are {np.dtype(self.id_dtype)}, not "
                f"{self.ids.dtype}: row numbers of a table are int32 (ClientRows), keys of a "
                "declared space int64 (KeyedRows)"
            )

    def differences(self) -> ClientRows:
        """Return the rows with their differences written out, as they travel."""
        if self.base is None:
            return self
        return ClientRows(self.indptr, self.ids, self.rows - self.base[self.ids])

    @property
    def nbytes(self) -> int:
        """Size of ids and rows on the wire."""
        return self.ids.nbytes + self.rows.nbytes


@dataclass(frozen=True)
class KeyedRows(ClientRows):
    """Rows under the keys 0 to ``space - 1``, ragged by client.

    A secure sum and noise cover every key, so the number of keys is public and always declared.
    """

    id_dtype: ClassVar[type[np.integer[Any]]] = np.int64

    space: int = field(kw_only=True)
    """Number of keys that exist: n² for pairs of n items, 1 for one row per client."""
    grid: FixedPoint | None = field(default=None, kw_only=True)
    """The rows' fixed point, where one is declared."""

    @property
    def keeps_grid(self) -> bool:
        """Whether the rows are as declared."""
        if self.grid is None:
            return True
        unit, most = self.grid.unit, self.grid.most
        return bool(pair_kernels.keeps_grid(self.indptr, self.ids, self.rows, unit, most))


@dataclass(frozen=True)
class Update:
    """What a batch of clients uploads: sparse table deltas and dense deltas, [clients, …]."""

    clients: int
    rows: Mapping[str, ClientRows] = field(default_factory=dict)
    dense: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    whole: UploadShape | None = None
    """Where given, each upload is sent in dense form, in this shape, so that its size tells
    nothing; here, only its rows that are not zero are kept, whose exact sum is the same."""
    zeroed_out: int = 0
    """Uploads that held NaN or infinite values, and were zeroed out."""

    @property
    def nbytes(self) -> int:
        """Bytes of all the clients' messages together."""
        if self.whole is not None:
            return self.clients * self.whole.nbytes
        sparse = sum(rows.nbytes for rows in self.rows.values())
        return sparse + sum(array.nbytes for array in self.dense.values())


@dataclass(frozen=True)
class Steps:
    """Whole steps of the exact sum for every entry of some arrays: noise, which is no upload."""

    tables: Mapping[str, NDArray[np.int64]] = field(default_factory=dict)
    spaces: Mapping[str, NDArray[np.int64]] = field(default_factory=dict)
    """[keys, width] for every key of a space."""
    dense: Mapping[str, NDArray[np.int64]] = field(default_factory=dict)

    def plus(self, other: Steps) -> Steps:
        """Return the sum of both, which are of the same arrays."""

        def both(part: str) -> dict[str, NDArray[np.int64]]:
            theirs = getattr(other, part)
            return {name: array + theirs[name] for name, array in getattr(self, part).items()}

        return Steps(both("tables"), both("spaces"), both("dense"))


@dataclass(frozen=True)
class Total:
    """The sum over the clients of a round, as numbers."""

    clients: float
    """What a mean divides by: the number of uploads or, where that number could tell that somebody
    was there, the expected one."""
    rows: Mapping[str, tuple[NDArray[np.int64], NDArray[np.float64]]]
    """For each table: the touched row ids, ascending, and the sum of their deltas."""
    dense: Mapping[str, NDArray[np.float64]]
    noise_std: float = 0.0
    """Standard deviation of the Gaussian noise that every entry carries; public."""

    def table(self, name: str, *shape: int) -> NDArray[np.float64]:
        """Return the sum of a table in dense form; rows that nobody touched are 0."""
        out = np.zeros(shape)
        if name in self.rows:
            ids, summed = self.rows[name]
            out[ids] = summed
        return out


class _KeyedSum:
    """An exact sum over 64-bit keys: few sorted runs, each at least twice the next one's size."""

    def __init__(self, *runs: tuple[NDArray[np.int64], NDArray[np.int64]]) -> None:
        self.runs = list(runs)

    def add(self, keys: NDArray[Any], rows: NDArray[Any]) -> bool:
        """Fold rows in; False if a number does not fit."""
        distinct, sums, fits = pair_kernels.sum_by_key(keys, rows)
        return bool(fits) and self._push(distinct, sums)

    def merge(self, other: _KeyedSum) -> bool:
        """Fold another sum in; False if a number does not fit."""
        return all(self._push(*run) for run in other.runs)

    def total(self) -> tuple[NDArray[np.int64], NDArray[np.int64], bool]:
        """Return the ascending keys, their sums in steps, and whether those fit."""
        keys, sums = self.runs[-1]
        ok = True
        for more in reversed(self.runs[:-1]):
            keys, sums, fits = pair_kernels.merge_sums(keys, sums, *more)
            ok &= bool(fits)
        return keys, sums, ok

    def _push(self, keys: NDArray[np.int64], sums: NDArray[np.int64]) -> bool:
        ok = True
        while self.runs and len(self.runs[-1][0]) < 2 * len(keys):
            keys, sums, fits = pair_kernels.merge_sums(*self.runs.pop(), keys, sums)
            ok &= bool(fits)
        self.runs.append((keys, sums))
        return ok


class ExactSum:
    """Running sum of updates."""

    def __init__(self, n_rows: int) -> None:
        self.n_rows = n_rows
        self.clients = 0
        self._rows: dict[str, tuple[NDArray[np.int64], NDArray[np.bool_]]] = {}
        self._keyed: dict[str, _KeyedSum] = {}
        self._dense: dict[str, NDArray[np.int64]] = {}

    def add(self, update: Update) -> None:
        """Fold in the uploads of a batch of clients."""
        self.clients += update.clients
        for name, sent in update.rows.items():
            if isinstance(sent, KeyedRows):
                assert sent.base is None, "keys have no table to differ from"
                if sent.grid is not None and not sent.keeps_grid:
                    raise ConfigError(
                        f"the upload of '{name}' is not what the method declares, multiples of "
                        f"2^-{sent.grid.bits} up to {sent.grid.largest}: declare another grid, or "
                        "none"
                    )
                keyed = self._keyed.setdefault(name, _KeyedSum())
                self._check(keyed.add(sent.ids, sent.rows), name)
                continue
            if name not in self._rows:
                shape = (self.n_rows, sent.rows.shape[1])
                self._rows[name] = np.zeros(shape, np.int64), np.zeros(self.n_rows, np.bool_)
            total, touched = self._rows[name]
            base = sent.rows[:0] if sent.base is None else sent.base
            self._check(ragged.add_rows(total, touched, sent.ids, sent.rows, base), name)
        for name, array in update.dense.items():
            total = self._dense.setdefault(name, np.zeros(array.shape[1:], np.int64))
            flat = array.reshape(len(array), total.size)
            self._check(ragged.add_dense(total.reshape(-1), flat), name)

    def add_steps(self, steps: Steps) -> None:
        """Add whole steps to every entry of some arrays: exactly, as everything here."""
        noise = ExactSum(self.n_rows)
        noise._rows = {
            name: (table, np.ones(self.n_rows, np.bool_)) for name, table in steps.tables.items()
        }
        for name, rows in steps.spaces.items():
            noise._keyed[name] = _KeyedSum((np.arange(len(rows)), rows))
        noise._dense = dict(steps.dense)
        self.merge(noise)

    def merge(self, other: ExactSum) -> None:
        """Fold in another running sum, which is used up."""
        self.clients += other.clients
        for name, (total, touched) in other._rows.items():
            if name not in self._rows:
                self._rows[name] = total, touched
                continue
            mine, mine_touched = self._rows[name]
            ids = np.flatnonzero(touched)
            mine[ids] += total[ids]
            mine_touched[ids] = True
            self._check(bool((abs(mine[ids]) < 2**62).all()), name)
        for name, keyed in other._keyed.items():
            self._check(self._keyed.setdefault(name, _KeyedSum()).merge(keyed), name)
        for name, dense in other._dense.items():
            self._dense[name] = self._dense.get(name, np.zeros_like(dense)) + dense
            self._check(bool((abs(self._dense[name]) < 2**62).all()), name)

    def to_arrays(self) -> dict[str, NDArray[np.int64]]:
        """Return the sum in whole steps, for a message: the touched rows of tables and spaces."""
        arrays: dict[str, NDArray[np.int64]] = {}
        for name, (total, touched) in self._rows.items():
            ids = np.flatnonzero(touched)
            arrays |= {f"ids/{name}": ids, f"rows/{name}": total[ids]}
        for name, keyed in self._keyed.items():
            keys, steps, fits = keyed.total()
            self._check(fits, name)
            arrays |= {f"ids/{name}": keys, f"rows/{name}": steps}
        return arrays | {f"dense/{name}": array for name, array in self._dense.items()}

    @classmethod
    def from_arrays(
        cls, shape: UploadShape, clients: int, arrays: Mapping[str, NDArray[np.int64]]
    ) -> ExactSum:
        """Read back what `to_arrays` wrote, of uploads of this shape."""
        made = cls(shape.n_rows)
        made.clients = clients
        for name, array in arrays.items():
            part, _, name = name.partition("/")
            if part == "dense":
                made._dense[name] = array
            elif part == "rows" and name in shape.tables:
                total = np.zeros((shape.n_rows, shape.tables[name]), np.int64)
                touched, ids = np.zeros(shape.n_rows, np.bool_), arrays[f"ids/{name}"]
                total[ids], touched[ids] = array, True
                made._rows[name] = total, touched
            elif part == "rows":
                made._keyed[name] = _KeyedSum((arrays[f"ids/{name}"], array))
        return made

    def total(self) -> Total:
        """Return the sum as numbers."""
        arrays, rows = self.to_arrays(), {}
        for name in (*self._rows, *self._keyed):
            rows[name] = arrays[f"ids/{name}"], arrays[f"rows/{name}"] / STEPS_PER_UNIT
        dense = {name: array / STEPS_PER_UNIT for name, array in self._dense.items()}
        return Total(self.clients, rows, dense)

    @staticmethod
    def _check(ok: bool, name: str) -> None:
        if not ok:
            raise DivergedError(
                f"the update of '{name}' is not a number or too large to sum: training diverged; "
                "use a smaller learning rate"
            )


STEPS = 2**128
"""Metrics and losses are summed in whole steps of 1 / STEPS: exactly, so in any order."""
RANK_BINS = 32
"""Bins of the histogram of ranks: bin b counts ranks from 2^b on."""
LARGEST_LOSS = 2.0**100
"""A larger loss, or one that is NaN, counts as lost."""


def exact_sum(values: NDArray[np.float64]) -> int:
    """Return the sum of numbers in steps; bits of them below 2^-105 are dropped."""
    # The larger bits first, and of what is left the larger ones. Small numbers have none above.
    levels: tuple[int, ...] = (20, 62, 104)
    if np.abs(values).max(initial=0.0) >= 2.0**20:
        levels = (-64, -22, *levels)
    total = 0
    for shift in levels:
        whole = np.rint(values * 2.0**shift)
        values = values - whole * 2.0**-shift
        total += int(whole.astype(np.int64).sum()) << (128 - shift)
    return total


@dataclass(frozen=True)
class LossSum:
    """Mean losses of clients, summed exactly."""

    steps: int = 0
    clients: int = 0
    lost: int = 0
    """Clients whose loss is NaN or larger than `LARGEST_LOSS`."""

    @classmethod
    def of(cls, losses: NDArray[np.float64]) -> LossSum:
        """Sum up each client's mean loss."""
        valid = losses[np.abs(losses) < LARGEST_LOSS]
        return cls(exact_sum(valid), len(losses), len(losses) - len(valid))

    def merge(self, other: LossSum) -> LossSum:
        """Return the sum over both groups of clients."""
        clients, lost = self.clients + other.clients, self.lost + other.lost
        return LossSum(self.steps + other.steps, clients, lost)

    @property
    def mean(self) -> float | None:
        """The mean loss; None without a valid one."""
        valid = self.clients - self.lost
        return self.steps / (STEPS * valid) if valid else None


@dataclass(frozen=True)
class Tally:
    """Metrics of a node's users for one candidate set: sums and a histogram, no user's own."""

    users: int
    sums: Mapping[str, int]
    """Of each metric, in steps."""
    rank_counts: NDArray[np.int64]
    """Users by the rank of their best held-out item: bin b from 2^b on."""

    def merge(self, other: Tally) -> Tally:
        """Return the tally over both groups of users."""
        if not self.users or not other.users:
            return self if self.users else other
        sums = {name: total + other.sums[name] for name, total in self.sums.items()}
        return Tally(self.users + other.users, sums, self.rank_counts + other.rank_counts)

    def mean(self, name: str) -> float:
        """Return the mean of a metric; 0 over no users."""
        return self.sums[name] / (STEPS * max(1, self.users))

    def means(self) -> dict[str, float]:
        """Return the mean of every metric."""
        return {name: self.mean(name) for name in self.sums}


@dataclass(frozen=True)
class Evaluation:
    """An evaluation of a node's users on their held-out items."""

    tallies: Mapping[str, Tally]
    """By candidate set."""

    def merge(self, other: Evaluation) -> Evaluation:
        """Return the evaluation of both nodes' users."""
        merged = {**self.tallies}
        for name, tally in other.tallies.items():
            merged[name] = merged[name].merge(tally) if name in merged else tally
        return Evaluation(merged)

    @property
    def users(self) -> int:
        """Number of evaluated users."""
        return max((tally.users for tally in self.tallies.values()), default=0)

    def means(self) -> dict[str, dict[str, float]]:
        """Return the mean of every metric for each candidate set."""
        return {name: tally.means() for name, tally in self.tallies.items()}

    def to_bytes(self) -> bytes:
        """Encode the sums and histograms."""
        return _EvaluationMessage(
            {name: tally.users for name, tally in self.tallies.items()},
            {name: dict(tally.sums) if tally.users else {} for name, tally in self.tallies.items()},
            {name: tally.rank_counts for name, tally in self.tallies.items()},
        ).to_bytes()

    @classmethod
    def from_bytes(cls, data: bytes, names: Mapping[str, list[str]]) -> Evaluation:
        """Decode them; ``names`` are the metrics of each candidate set."""
        sent = _EvaluationMessage.from_bytes(data)
        if not sent.users.keys() == sent.sums.keys() == names.keys():
            raise MessageError("the evaluation is not of the candidate sets that were asked for")
        specs = dict.fromkeys(names, ArraySpec("int64", (RANK_BINS,)))
        check_arrays("evaluation", sent.rank_counts, specs)
        tallies = {}
        for candidates, metrics in names.items():
            users, sums = sent.users[candidates], sent.sums[candidates]
            if sorted(sums) != sorted(metrics if users else []):
                raise MessageError("the evaluation is not of the metrics that were asked for")
            if not all(0 <= value <= users * STEPS for value in sums.values()):
                raise MessageError("a metric lies between 0 and 1: the evaluation's does not")
            if sent.rank_counts[candidates].sum() != users:
                raise MessageError("the evaluation's ranks do not fit its users")
            own = {name: sums.get(name, 0) for name in metrics}
            tallies[candidates] = Tally(users, own, sent.rank_counts[candidates])
        return cls(tallies)


@dataclass(frozen=True)
class _EvaluationMessage(Message, kind="evaluation", most_bytes=4 * HEADER_BYTES):
    users: Mapping[str, Count]
    sums: Mapping[str, Mapping[str, int]]
    rank_counts: ArrayGroup
