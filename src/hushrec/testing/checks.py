"""Checks of arrays and parameters, small worlds whose answer is known, a federation of rounds."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hushrec.aggregation import ClientRows, ExactSum, Total, Update
from hushrec.data.interactions import Categorical, Features, Interactions, Numeric
from hushrec.data.views import Ragged, TrainView
from hushrec.federation.backends import THIS_MACHINE, Collected, InProcess, Machine
from hushrec.federation.client import Task
from hushrec.methods.base import Method, Shared
from hushrec.privacy.protection import Protection
from hushrec.private import (
    PerClient,
    PerClientRows,
    PerClientTable,
    Private,
    PrivateFields,
    PrivateStore,
)
from hushrec.streams import SecretRound, SecretStreams, Streams

Array = NDArray[Any]
N_USERS, N_ITEMS, N_GROUPS = 60, 60, 3
ROUNDING = 1e-3
"""Relative difference of float32 results up to which the order of additions may be the cause."""
PRODUCTS = (
    "that small a difference is rounding: the last bits of a matrix product (@, np.dot, np.einsum) "
    "depend on the number of its rows, so a client computes other bits in a larger batch. Compute "
    "one client at a time, as in [items @ vector for vector in vectors], or in a numba kernel, so "
    "that shapes are the same in any batch"
)
DEPENDS = (
    "that is more than rounding: a client's result may depend on its own data, its private "
    "parameters and the shared ones alone. Means or maxima over the batch, and random numbers that "
    "are not addressed by the client's number (now.streams.generator(purpose, now.number, "
    "int(client)) for client in view.clients), are the usual causes"
)


def check_numbers(array: Array, name: str) -> None:
    """Hold an array to be finite numbers."""
    assert array.dtype.kind in "fiub", f"'{name}' holds {array.dtype}, not numbers"
    assert np.isfinite(array).all(), f"'{name}' has NaN or infinite entries"


def check_shared(shared: Shared) -> None:
    """Hold shared parameters to be named arrays."""
    for name, array in shared.items():
        assert isinstance(name, str), f"names of shared parameters are strings, not {name!r}"
        assert isinstance(array, np.ndarray), f"'{name}' is a {type(array).__name__}, not an array"
        check_numbers(array, name)


def check_rows(batch: Any, clients: int, name: str) -> None:
    """Hold rows to fit their clients."""
    assert isinstance(batch, ClientRows), f"'{name}' is a {type(batch).__name__}, not ClientRows"
    shape = batch.indptr.shape
    assert shape == (clients + 1,), (
        f"'{name}': indptr has shape {shape}, where {clients} clients need ({clients + 1},)"
    )
    assert batch.indptr[0] == 0, f"'{name}': indptr starts at {batch.indptr[0]}, not at 0"
    assert (np.diff(batch.indptr) >= 0).all(), f"'{name}': indptr does not ascend"
    assert batch.indptr[-1] == len(batch.ids) == len(batch.rows), (
        f"'{name}': indptr ends at {batch.indptr[-1]}, with {len(batch.ids)} ids and "
        f"{len(batch.rows)} rows; all three must be equal"
    )
    assert batch.rows.ndim == 2, f"'{name}': rows have shape {batch.rows.shape}, not [ids, width]"
    check_numbers(batch.rows, name)


def check_private(private: Private, declared: PrivateFields, clients: int) -> None:
    """Hold private parameters to what was declared."""
    assert private.keys() == declared.keys(), (
        f"fit returns the private fields {sorted(private)}, and private_fields declares "
        f"{sorted(declared)}: they must be the same"
    )
    for name, spec in declared.items():
        value = private[name]
        if isinstance(spec, PerClientTable) and isinstance(value, ClientRows):
            check_rows(value, clients, name)
            assert value.rows.shape[1] == spec.initial.shape[1], f"'{name}' has another width"
        elif isinstance(spec, PerClient):
            assert isinstance(value, np.ndarray), f"'{name}' is not an array"
            shape = (clients, *spec.initial.shape)
            assert value.shape == shape, f"'{name}' has shape {value.shape}, declared {shape}"
            dtype = spec.initial.dtype
            assert value.dtype == dtype, f"'{name}' is {value.dtype}, declared is {dtype}"
            check_numbers(value, name)
        else:
            assert isinstance(spec, PerClientRows), f"'{name}' is PerClient or PerClientRows"
            check_rows(value, clients, name)
            assert isinstance(value, ClientRows)
            width = value.rows.shape[1]
            assert width == spec.width, f"'{name}' has width {width}, declared is {spec.width}"
            fits = (np.diff(value.indptr) <= spec.capacity).all()
            assert fits, f"'{name}' exceeds its declared capacity"


def check_scores(scores: Array, view: TrainView) -> None:
    """Hold scores to be a finite float32 for every client and item."""
    shape = (len(view), view.n_items)
    assert scores.shape == shape, f"scores are {scores.shape}, not [clients, items] = {shape}"
    assert scores.dtype == np.float32, f"scores are {scores.dtype}, not float32"
    assert np.isfinite(scores).all(), "some scores are NaN or infinite"


def check_same(first: Mapping[str, Any], second: Mapping[str, Any], what: str) -> None:
    """Hold two mappings equal to the bit."""
    assert first.keys() == second.keys(), f"{what}: {sorted(first)} against {sorted(second)}"
    for name in first:
        same = digest(first[name]) == digest(second[name])
        assert same, f"{what}: '{name}' differs {how_much(first[name], second[name])[0]}"


def check_batch(alone: Any, together: Any, what: str) -> None:
    """Hold a result of clients one by one equal, to the bit, to that of a batch of them all."""
    if digest(alone) != digest(together):
        words, relative = how_much(alone, together)
        why = PRODUCTS if relative <= ROUNDING else DEPENDS
        raise AssertionError(
            f"{what} one client at a time differ from those of a batch of all {words}; {why}"
        )


def how_much(one: Any, other: Any) -> tuple[str, float]:
    """Say how far the arrays of two values differ; return the relative difference too."""
    pairs = list(zip(arrays_in(one), arrays_in(other), strict=False))
    if any((a.shape, a.dtype) != (b.shape, b.dtype) for a, b in pairs):
        return "in shape or dtype", np.inf
    numbers = [(a.astype(np.float64), b.astype(np.float64)) for a, b in pairs]
    apart = max((float(np.abs(a - b).max(initial=0.0)) for a, b in numbers), default=0.0)
    size = max((float(np.abs(b).max(initial=0.0)) for _, b in numbers), default=0.0)
    return f"by up to {apart:.2g}, in numbers of up to {size:.2g}", apart / size if size else np.inf


def arrays_in(value: Any) -> Iterator[Array]:
    """Yield every array in a value, however deep."""
    if isinstance(value, np.ndarray):
        yield value
    elif isinstance(value, Mapping):
        for key in sorted(value):
            yield from arrays_in(value[key])
    elif isinstance(value, (tuple, list)):
        for part in value:
            yield from arrays_in(part)
    elif is_dataclass(value):
        for field in fields(value):
            yield from arrays_in(getattr(value, field.name))


def sum_of(updates: Iterable[Update]) -> Total:
    """Return the exact sum of some uploads."""
    summed = ExactSum(N_ITEMS)
    for update in updates:
        summed.add(update)
    return summed.total()


def digest(value: Any) -> str:
    """Return one digest of all arrays in a value."""
    hashed = hashlib.blake2b()
    for array in arrays_in(value):
        hashed.update(f"{array.dtype}{array.shape}".encode())
        hashed.update(np.ascontiguousarray(array).tobytes())
    return hashed.hexdigest()


def private_arrays(private: Private) -> Iterator[tuple[str, Array]]:
    """Yield the values that must not travel; ids of rows, which uploads name too, are left out."""
    for name, value in private.items():
        yield name, value.rows if isinstance(value, ClientRows) else np.asarray(value)


def secrets_in(values: Array) -> Iterator[bytes]:
    """Yield the bytes of each client's block, and of all, that cannot be equal by chance."""
    for block in (*values, values):
        if np.size(block) >= 3 and len(np.unique(block)) >= 3:
            yield np.ascontiguousarray(block).tobytes()


_GROUPS = np.array(["low", "middle", "high"])


def taste_world(seed: int = 0) -> Interactions:
    """Make users who each touch items of one third of the catalogue only, equally popular."""
    generator, size = np.random.default_rng(seed), N_ITEMS // N_GROUPS
    liked = [
        user % N_GROUPS * size + generator.permutation(size)[: 9 + user % 4]
        for user in range(N_USERS)
    ]
    counts = [len(items) for items in liked]
    return Interactions(
        name="tastes",
        user=np.repeat(np.arange(N_USERS, dtype=np.int32), counts),
        item=np.concatenate(liked).astype(np.int32),
        value=np.ones(sum(counts), np.float32),
        time=np.concatenate([np.arange(count) for count in counts]),
        users=np.array([f"user-{k:02d}" for k in range(N_USERS)]),
        items=np.array([f"item-{k:02d}" for k in range(N_ITEMS)]),
        user_features=_group_of_users(N_USERS),
        item_features=_group_of_items(N_ITEMS),
        items_declared=True,
    )


def _group_of_users(count: int) -> Features:
    """Say which third of the catalogue each user likes."""
    taste = np.arange(count, dtype=np.int32) % N_GROUPS
    return {"taste": Categorical(taste, _GROUPS, declared=True)}


def _group_of_items(count: int) -> Features:
    """Say which third of the catalogue each item is in, and give it a number besides."""
    number = np.arange(count, dtype=np.int32)
    third = Categorical(np.minimum(number // (N_ITEMS // N_GROUPS), N_GROUPS - 1), _GROUPS)
    return {"third": third, "number": Numeric((number % 7).astype(np.float32), 0.0, 7.0)}


def clients_of(rows: list[list[int]], n_items: int = N_ITEMS) -> TrainView:
    """Make a batch of clients from their training items, oldest first."""
    indptr = np.cumsum([0, *(len(row) for row in rows)])
    items = np.array([item for row in rows for item in row], np.int32)
    return TrainView(
        users=np.arange(len(rows), dtype=np.int32),
        n_items=n_items,
        positives=Ragged(indptr, items),
        merged=all(len(set(row)) == len(row) for row in rows),
        times=Ragged(indptr, np.arange(len(items))),
        values=Ragged(indptr, np.ones(len(items), np.float32)),
        user_features=_group_of_users(len(rows)),
        item_features=_group_of_items(n_items),
    )


class Federation:
    """A method and its clients: rounds as `federation.rounds` plays them, nothing around them."""

    def __init__(
        self,
        method: Method,
        view: TrainView,
        *,
        store: PrivateStore | None = None,
        protection: Protection = Protection(),  # noqa: B008 - a frozen value
        machine: Machine = THIS_MACHINE,
        seed: int = 0,
    ) -> None:
        streams, public = Streams(seed), view.take(np.zeros(0, np.int64))
        self.task = Task(method, protection, streams, SecretStreams(seed), public)
        self.shared = method.init(view, streams)
        fields = method.private_fields(view, self.shared, streams)
        self.store = store or PrivateStore(fields, len(view.clients))
        self.backend = InProcess(self.task, view, self.store, machine=machine)
        self.state: Mapping[str, float] = protection.state
        self.number = 0

    def round(self, cohort: NDArray[np.int64] | None = None) -> Collected:
        """Play a round; without a cohort, everybody takes part."""
        self.number += 1
        if cohort is None:
            cohort = np.arange(len(self.backend.view.clients))
        download = self.task.download(self.number, self.shared, cohort, self.state)
        protection = self.task.protection_of(download.to(cohort[:0]))
        collected = self.backend.train(download, protection, cohort)
        secret = SecretRound(self.number, self.task.secret)
        total, following = protection.finish(collected.summed, secret)
        phase = self.task.method.phase_of(self.number)
        self.shared = phase.apply(self.shared, total, self.number)
        self.state = following.state
        return collected
