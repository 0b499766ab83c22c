"""`Model`: a trained recommender as one value.

It holds the method, the shared parameters, the clients' private parameters, and `ServingData`: the
catalogue, the users and their histories. It scores, recommends, explains, folds in users that
training has never seen, and is saved and loaded.
"""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import count, takewhile
from pathlib import Path
from typing import Any, Unpack, overload

import numpy as np
from numpy.typing import NDArray
from pydantic import ValidationError
from safetensors import SafetensorError
from safetensors.numpy import load, save

from hushrec.data.views import Ragged, TrainView, chunks
from hushrec.errors import ConfigError, InputError, RunError
from hushrec.io import usable_cores
from hushrec.io.codec import Array, Arrays, Rows, Stored, read_stored
from hushrec.io.files import atomic_folder, checked_path
from hushrec.kernels.ragged import top_k
from hushrec.methods.base import (
    POPULAR,
    Explains,
    ItemNeighbours,
    ItemPopularity,
    ItemTables,
    Method,
    Reason,
    Shared,
    check_explains,
    fold_in,
    method_class,
)
from hushrec.private import Private, PrivateStore, StoreConfig
from hushrec.serving.data import (
    LIST_COLUMNS,
    Filter,
    FilterOptions,
    Recommendation,
    ServingData,
    UserIndices,
    has_features,
    list_rows,
)
from hushrec.streams import Streams

FORMAT = "hushrec-model-2"
HEADER, SHARED, DATA = "model.json", "shared.safetensors", "data.safetensors"
PRIVATE = "private-{:06d}.safetensors"
"""Files of a saved model; those of private parameters are numbered."""
SCORES_BYTES = 32 * 2**20
"""Scores held at once by one thread."""
COPIES_BYTES = 64 * 2**20
"""Private parameters, and adapted copies of the shared ones, held at once by one thread."""

Scores = NDArray[np.float32]
Scorer = Callable[[Shared, Private, TrainView], Scores]
"""(shared parameters, private parameters, histories) -> scores, as `Method.score`."""


class Recommends(ABC):
    """`recommend` and `similar`, which a model has, and a run through its model."""

    @property
    @abstractmethod
    def _recommender(self) -> Model: ...

    @overload
    def recommend(  # type: ignore[overload-overlap]  # a string is one id, not a sequence of ids
        self,
        users: str | int,
        k: int = 10,
        history: Iterable[str | int] | None = None,
        features: Mapping[str, str] | None = None,
        threads: int | None = None,
        **chosen: Unpack[FilterOptions],
    ) -> list[Recommendation]: ...
    @overload
    def recommend(
        self,
        users: Iterable[str | int] | None = None,
        k: int = 10,
        *,
        threads: int | None = None,
        **chosen: Unpack[FilterOptions],
    ) -> Rows: ...
    def recommend(
        self,
        users: str | int | Iterable[str | int] | None = None,
        k: int = 10,
        history: Iterable[str | int] | None = None,
        features: Mapping[str, str] | None = None,
        threads: int | None = None,
        **chosen: Unpack[FilterOptions],
    ) -> list[Recommendation] | Rows:
        """Return the best k items that a user has not touched, for one user or for many.

        One id gives a list. Several ids, or none for all users, give a table with a row for each
        user and rank: ``run.recommend(k=5).to_pandas()``.

        A user that the model does not know is folded in from ``history``, item ids oldest first:
        their private parameters are trained on it, the shared parameters stay as they are.
        ``features`` are the user features of such a user. A user without a history, also with
        ``history=[]`` or one of unknown items only, gets the most popular items.

        ``only``, ``without``, ``where`` and ``seen`` say which items a list may hold:
        ``run.recommend("42", where=["genres=Comedy", "year>=1990"])``.
        """
        model = self._recommender
        filtered = Filter.of(model.data, chosen)
        if isinstance(users, str | int | np.integer):
            return model._list(str(users), k, history, features or {}, filtered)
        if history is not None or features:
            raise ConfigError("history and features belong to one user: give one id")
        ids = model.data.users.tolist() if users is None else [str(user) for user in users]
        lists = model.lists(model.indices(ids), k, filtered, threads or usable_cores())
        return Rows.of(
            LIST_COLUMNS,
            [row for user, lines in zip(ids, lists, strict=True) for row in list_rows(user, lines)],
        )

    def similar(self, item: str | int, k: int = 10) -> list[Recommendation]:
        """Return the k items nearest to an item.

        They are found by the method's weights from item to item, or by the cosine of item vectors;
        methods that have neither are refused.
        """
        return self._recommender._similar(item, k)


@dataclass(frozen=True, eq=False)
class Model(Recommends):
    """A trained recommender: method, shared and private parameters, users and catalogue."""

    method: Method
    shared: Shared
    private: PrivateStore
    data: ServingData
    streams: Streams
    """The seed's random streams, for fold-in and adaptation."""
    promises: bool = False
    """Whether privacy is promised: NaN and infinite scores become the lowest score, else they are
    errors, and nothing is listed by raw counts of interactions."""

    def __repr__(self) -> str:
        users, items = len(self.data.users), len(self.data.items)
        return f"<Model {self.method.name}: {users:,} users, {items:,} items>"

    @classmethod
    def restored(
        cls,
        method: Method,
        stored: tuple[Shared, Iterable[Arrays]],
        data: ServingData,
        streams: Streams,
        promises: bool,
        store: StoreConfig = StoreConfig(),  # noqa: B008 - a frozen value
    ) -> Model:
        """Return the model of stored parameters: the shared ones, and parts of the private ones.

        Parameters that do not fit the method and the data are refused.
        """
        (shared, parts), clients = stored, data.clients
        initial = method.init(clients, streams)
        declared = method.private_fields(clients, initial, streams)
        private = PrivateStore.create(declared, len(clients.clients), store, None)
        for name, array in method.serving(initial).items():
            kept = shared.get(name)
            if kept is None or kept.shape != array.shape or kept.dtype != array.dtype:
                raise RunError(f"the shared parameter '{name}' does not fit the data")
        try:
            for part in parts:
                private.restore(part)
        except (KeyError, ValueError, IndexError, TypeError) as error:
            raise RunError(f"the private parameters do not fit ({error!r})") from None
        return cls(method, shared, private, data, streams, promises)

    def save(self, path: str | Path) -> Path:
        """Write the model into a new folder, private parameters and histories included."""
        folder = checked_path(path)
        with atomic_folder(folder) as fresh:
            digests = {name: _write(fresh / name, arrays) for name, arrays in self._files()}
            header = {
                "format": FORMAT,
                "method": self.method.name,
                "under_noise": type(self.method) is method_class(self.method.name).under_noise,
                "options": self.method.config.model_dump(mode="json"),
                "seed": self.streams.seed,
                "promises": self.promises,
                "files": digests,
            }
            (fresh / HEADER).write_text(json.dumps(header, indent=1), "utf-8")
        return folder

    @classmethod
    def load(cls, path: str | Path) -> Model:
        """Read a model that `save` wrote; damaged files are refused."""
        folder = checked_path(path)
        header = read_stored(_Header, folder / HEADER)
        if header.format != FORMAT:
            raise RunError(f"{folder} is no model of this version of hushrec")
        names = takewhile(header.files.__contains__, map(PRIVATE.format, count()))
        found = method_class(header.method)
        if header.under_noise:
            found = found.under_noise or found
        try:
            method = found(found.Config.model_validate(header.options))
            shared, known = (_read(folder / name, header.files) for name in (SHARED, DATA))
            stored = shared, (_read(folder / name, header.files) for name in names)
            data, streams = ServingData.from_arrays(known), Streams(header.seed)
            return cls.restored(method, stored, data, streams, header.promises)
        except (InputError, ValidationError, SafetensorError) as error:
            raise RunError(f"{folder} is damaged: {error}") from None

    def _files(self) -> Iterator[tuple[str, Arrays]]:
        yield SHARED, self.shared
        yield DATA, self.data.to_arrays()
        for number, part in enumerate(self.private.tensors()):
            yield PRIVATE.format(number), part

    def without_users(self) -> Model:
        """Return the shared model alone, which serves new users."""
        return replace(self, private=PrivateStore({}, 0), data=self.data.without_users())

    # ------------------------------------------------------------ scores

    @property
    def batch_size(self) -> int:
        """Number of users that one thread scores at once."""
        copies = self.private.bytes_per_user
        if self.method.adapts:
            copies += sum(array.nbytes for array in self.shared.values())
        return max(1, min(SCORES_BYTES // (4 * len(self.data.items)), COPIES_BYTES // copies))

    def scores(self, users: UserIndices, history: TrainView, score: Scorer | None = None) -> Scores:
        """Score every item for users with these histories, as their clients do: [users, items].

        ``score`` replaces the method's own `Method.score`.
        """
        score, holders = score or self.method.score, self.data.holders
        if holders is None or not self.method.traits.silos:
            return self._finite(score(self.shared, self.private_of(users), history))
        order = np.argsort(holders[users], kind="stable")
        together = replace(history.take(order), holders=holders[users[order]])
        clients = self.data.client_index[users[order]][together.client_indptr[:-1]]
        scores = np.empty((len(users), history.n_items), np.float32)
        scores[order] = score(self.shared, self.private.read(clients), together)
        return self._finite(scores)

    def scores_of_new(self, history: TrainView) -> Scores:
        """Score every item for clients that training has never seen: [clients, items]."""
        return self._finite(self.method.score(self.shared, self._private_of_new(history), history))

    def _private_of_new(self, history: TrainView) -> Private:
        return self.method.adapt(self.shared, self.fold_in(history), history, self.streams)

    def fold_in(self, history: TrainView) -> Private:
        """Return private parameters of new clients, trained on their own histories alone."""
        return fold_in(self.method, self.shared, history, self.streams)

    def private_of(self, users: UserIndices) -> Private:
        """Return the private parameters that these users are scored with."""
        trained = self.data.trained[users]
        if trained.all() and not self.method.adapts:
            return self.private.read(users)
        past = self.data.train.take(users)
        private = self._kept(users, past, trained)
        return self.method.adapt(self.shared, private, past, self.streams)

    def _kept(self, users: UserIndices, past: TrainView, trained: NDArray[np.bool_]) -> Private:
        if trained.all():
            return self.private.read(users)
        if not trained.any():
            return self.fold_in(past)
        both = PrivateStore(self.private.fields, self.private.n_users)
        both.write(users[trained], self.private.read(users[trained]))
        both.write(users[~trained], self.fold_in(past.take(np.flatnonzero(~trained))))
        return both.read(users)

    def _finite(self, scores: Scores) -> Scores:
        if not self.promises or np.isfinite(scores).all():
            return scores
        return np.where(np.isfinite(scores), scores, np.finfo(np.float32).min)

    # ------------------------------------------------------------ recommendations

    @property
    def _recommender(self) -> Model:
        return self

    def _list(
        self,
        user: str,
        k: int,
        history: Iterable[str | int] | None,
        features: Mapping[str, str],
        chosen: Filter,
    ) -> list[Recommendation]:
        if history is not None:
            new = self.data.new_user(history, features)
            private = partial(self._private_of_new, new)
            return self._best(new, self.scores_of_new(new), k, chosen, new.positives, private)[0]
        if features:
            raise ConfigError(f"the data has the features of user '{user}': leave them out")
        return next(self.lists(self.indices([user]), k, chosen, threads=1))

    def explain(self, user: str | int, items: Sequence[str | int]) -> list[str]:
        """Return, for each item, the largest contribution to the user's score, in words.

        Methods whose scores are not sums of contributions are refused.
        """
        check_explains(self.method)
        mine, numbers = self.indices([user]), self.data.item_numbers(items).astype(np.int32)
        history, private = self.data.history(mine), partial(self.private_of, mine)
        return [self._because(why) for why in self.reasons(history, numbers[None], private)[0]]

    def reasons(
        self, history: TrainView, items: NDArray[np.int32], private: Callable[[], Private]
    ) -> list[list[Reason]]:
        """Return the largest contribution to each score, if any: items [clients, ranks]."""
        found = [[Reason()] * items.shape[1]] * len(items)
        if isinstance(self.method, Explains) and self.method.unexplained is None:
            found = self.method.contributions(self.shared, private(), history, items)
        popular = [POPULAR] * items.shape[1]
        without = self.without_history(history).tolist()
        return [popular if none else mine for none, mine in zip(without, found, strict=True)]

    def _because(self, reason: Reason) -> str:
        title = self.data.title(reason.item) if reason.item >= 0 else "items of the history"
        return reason.words.replace("{}", title)

    @cached_property
    def popularity(self) -> Scores | None:
        """Popularity of every item, for users without a history; None where nothing says it.

        It comes from the shared parameters or, where no privacy is promised, from the training
        interactions: no guarantee covers raw counts.
        """
        found = None
        if isinstance(self.method, ItemPopularity):
            found = self.method.item_popularity(self.shared)
        return self.data.popularity() if found is None and not self.promises else found

    def without_history(self, history: TrainView) -> NDArray[np.bool_]:
        """Return which clients get the popular items."""
        without = np.asarray(history.positives.lengths == 0)
        if self.popularity is None:
            return np.zeros_like(without)
        return without & ~has_features(history) if self.method.traits.from_features else without

    def list_scores(self, history: TrainView, scores: Scores) -> Scores:
        """Return what lists are sorted by: scores, or popularity for clients without a history."""
        without = self.without_history(history)
        if self.popularity is None or not without.any():
            return scores
        return np.where(without[:, None], self.popularity, scores)

    def indices(self, users: Sequence[str | int]) -> UserIndices:
        """Return the indices of user ids; unknown users are an error."""
        index = self.data.user_index
        for user in users:
            if str(user) not in index:
                unknown = f"user '{user}' is unknown to this model: give their items, oldest first,"
                raise ConfigError(
                    f"{unknown} as history=[…]; history=[] gives the popular items",
                    command=f"{unknown} with --history FILE; --new lists the popular items",
                )
        return np.array([index[str(user)] for user in users], np.int64)

    def lists(
        self,
        users: UserIndices,
        k: int,
        chosen: Filter,
        threads: int,
        past: Callable[[UserIndices], tuple[TrainView, Ragged]] | None = None,
    ) -> Iterator[list[Recommendation]]:
        """Yield the list of each user, a few batches at a time.

        ``past`` returns histories, and the items that are not listed, in place of the whole ones.
        """

        def work(batch: UserIndices) -> list[list[Recommendation]]:
            history = self.data.history(batch)
            seen = history.positives
            if past is not None:
                history, seen = past(batch)
            private = partial(self.private_of, batch)
            return self._best(history, self.scores(batch, history), k, chosen, seen, private)

        if len(users) == 1:  # a thread costs more than one user's list
            yield from work(users)
            return
        together = max(1, self.batch_size) * 4 * threads
        with ThreadPoolExecutor(threads) as pool:
            for some in chunks(users, together):
                for done in pool.map(work, chunks(some, self.batch_size)):
                    yield from done

    def _best(
        self,
        history: TrainView,
        scores: Scores,
        k: int,
        chosen: Filter,
        seen: Ragged,
        private: Callable[[], Private],
    ) -> list[list[Recommendation]]:
        """Return each client's best allowed items that are not seen; reasons need ``private``."""
        data = self.data
        items, values = chosen.top(self.list_scores(history, scores), seen, k)
        return [
            [
                Recommendation(str(data.items[item]), data.title(item), float(value), because)
                for item, value, because in zip(*listed, map(self._because, why), strict=True)
                if item >= 0
            ]
            for *listed, why in zip(
                items, values, self.reasons(history, items, private), strict=True
            )
        ]

    def _similar(self, item: str | int, k: int) -> list[Recommendation]:
        (number,) = self.data.item_numbers([item]).tolist()
        method, weights = self.method, None
        if isinstance(method, ItemNeighbours):
            weights = method.item_neighbours(self.shared, number)
        elif isinstance(method, ItemTables):
            # The table of a client that has done nothing is the server's.
            empty = self.fold_in(self.data.new_user([], {}))
            table = next(iter(method.item_tables(self.shared, empty).values()))
            units = table / np.maximum(np.linalg.norm(table, axis=1, keepdims=True), 1e-12)
            weights = units @ units[number]
        if weights is None:
            raise ConfigError(
                f"{method.name} has neither weights from item to item nor item vectors: similar "
                "items need fedmix, fednext, fedease or a method with an item table"
            )
        itself = Ragged(np.array([0, 1]), np.array([number], np.int32))
        (items,), (values,) = top_k(
            weights[None], itself.indptr, itself.values, min(int(k), len(weights))
        )
        return [
            Recommendation(str(self.data.items[near]), self.data.title(near), float(value))
            for near, value in zip(items.tolist(), values.tolist(), strict=True)
            if near >= 0 and value > 0
        ]


class _Header(Stored):
    """What model.json holds."""

    format: str
    method: str
    under_noise: bool
    options: dict[str, Any]
    seed: int
    promises: bool
    files: dict[str, str]
    """SHA-256 of every other file."""


def _write(file: Path, arrays: Arrays) -> str:
    content = save({name: np.ascontiguousarray(array) for name, array in arrays.items()})
    file.write_bytes(content)
    return hashlib.sha256(content).hexdigest()


def _read(file: Path, digests: Mapping[str, str]) -> dict[str, Array]:
    try:
        content = file.read_bytes()
    except OSError as error:
        raise RunError(f"{file.name} cannot be read: {error.strerror or error}") from None
    if hashlib.sha256(content).hexdigest() != digests.get(file.name):
        raise RunError(f"the digest of {file.name} is not the one in {HEADER}")
    return dict(load(content))
