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
from dataclasses import dataclass, fields, replace
from itertools import count, takewhile
from pathlib import Path
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray
from pydantic import ValidationError
from safetensors import SafetensorError
from safetensors.numpy import load, save

from hushrec.data.views import TrainView, chunks
from hushrec.errors import ConfigError, InputError, RunError
from hushrec.io import usable_cores
from hushrec.io.codec import Array, Arrays, Rows, Stored, read_stored
from hushrec.io.files import atomic_folder, checked_path
from hushrec.kernels.ragged import top_k
from hushrec.methods.base import Explains, Method, Shared, method_class
from hushrec.private import Private, PrivateStore, StoreConfig
from hushrec.serving.data import ServingData, UserIndices
from hushrec.streams import Round, Streams

FORMAT = "hushrec-model-1"
HEADER, SHARED, DATA = "model.json", "shared.safetensors", "data.safetensors"
PRIVATE = "private-{:06d}.safetensors"
"""Files of a saved model; those of private parameters are numbered."""
PASSES = 20
"""Training rounds of a new user on their own device."""
SCORES_BYTES = 32 * 2**20
"""Scores held at once by one thread."""
COPIES_BYTES = 64 * 2**20
"""Private parameters, and adapted copies of the shared ones, held at once by one thread."""

Scores = NDArray[np.float32]
Scorer = Callable[[Shared, Private, TrainView], Scores]
"""(shared parameters, private parameters, histories) -> scores, as `Method.score`."""


@dataclass(frozen=True)
class Recommendation:
    """One item of a recommendation list."""

    item: str
    title: str
    score: float
    because: str = ""
    """Expert with the largest contribution to the score; empty unless the method mixes experts."""


class Recommends(ABC):
    """`recommend`, which a model has, and a run through its model."""

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
    ) -> list[Recommendation]: ...
    @overload
    def recommend(
        self, users: Iterable[str | int] | None = None, k: int = 10, *, threads: int | None = None
    ) -> Rows: ...
    def recommend(
        self,
        users: str | int | Iterable[str | int] | None = None,
        k: int = 10,
        history: Iterable[str | int] | None = None,
        features: Mapping[str, str] | None = None,
        threads: int | None = None,
    ) -> list[Recommendation] | Rows:
        """Return the best k items that a user has not touched, for one user or for many.

        One id gives a list. Several ids, or none for all users, give a table with a row for each
        user and rank: ``run.recommend(k=5).to_pandas()``.

        A user that the model does not know is folded in from ``history``, item ids oldest first:
        their private parameters are trained on it, the shared parameters stay as they are.
        ``features`` are the user features of such a user.
        """
        model = self._recommender
        if isinstance(users, str | int | np.integer):
            return model._list(str(users), k, history, features or {})
        if history is not None or features:
            raise ConfigError("history and features belong to one user: give one id")
        ids = model.data.users.tolist() if users is None else [str(user) for user in users]
        lists = model._lists(model.indices(ids), k, threads or usable_cores())
        return Rows.of(
            ("user", "rank", *(field.name for field in fields(Recommendation))),
            [
                (user, rank, *vars(line).values())
                for user, lines in zip(ids, lists, strict=True)
                for rank, line in enumerate(lines, 1)
            ],
        )


@dataclass(frozen=True, eq=False)
class Model(Recommends):
    """A trained recommender: method, shared and private parameters, users and catalogue."""

    method: Method
    shared: Shared
    private: PrivateStore
    data: ServingData
    streams: Streams
    """The seed's random streams, for fold-in and adaptation."""
    tolerant: bool = False
    """Whether NaN and infinite scores become the lowest score; else they are errors."""

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
        tolerant: bool,
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
        return cls(method, shared, private, data, streams, tolerant)

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
                "tolerant": self.tolerant,
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
            return cls.restored(method, stored, data, streams, header.tolerant)
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
        private = self.fold_in(history)
        private = self.method.adapt(self.shared, private, history, self.streams)
        return self._finite(self.method.score(self.shared, private, history))

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
        if not self.tolerant or np.isfinite(scores).all():
            return scores
        return np.where(np.isfinite(scores), scores, np.finfo(np.float32).min)

    # ------------------------------------------------------------ recommendations

    @property
    def _recommender(self) -> Model:
        return self

    def _list(
        self, user: str, k: int, history: Iterable[str | int] | None, features: Mapping[str, str]
    ) -> list[Recommendation]:
        if history is not None:
            new = self.data.new_user(history, features)
            return self._best(new, self.scores_of_new(new), k)[0]
        if features:
            raise ConfigError(f"the data has the features of user '{user}': leave them out")
        return self._lists(self.indices([user]), k, threads=1)[0]

    def explain(self, user: str | int, items: Sequence[str | int]) -> list[str]:
        """Return, for each item, the expert with the largest contribution to the user's score.

        The names are empty unless the method mixes experts.
        """
        history = self.data.history(self.indices([user]))
        try:
            numbers = [self.data.item_index[str(item)] for item in items]
        except KeyError as unknown:
            raise ConfigError(f"item {unknown} is not in the catalogue of this model") from None
        return self.experts(history, np.array([numbers], np.int32))[0]

    def experts(self, history: TrainView, items: NDArray[np.int32]) -> list[list[str]]:
        """Return the expert with the largest contribution to each score: items [clients, ranks]."""
        if isinstance(self.method, Explains):
            return self.method.contributions(self.shared, history, items)
        return [[""] * items.shape[1]] * len(items)

    def indices(self, users: Sequence[str | int]) -> UserIndices:
        """Return the indices of user ids; unknown users are an error."""
        index = self.data.user_index
        for user in users:
            if str(user) not in index:
                raise ConfigError(
                    f"user '{user}' is unknown to this run; give their items with --history FILE"
                )
        return np.array([index[str(user)] for user in users], np.int64)

    def _lists(self, users: UserIndices, k: int, threads: int) -> list[list[Recommendation]]:
        def work(batch: UserIndices) -> list[list[Recommendation]]:
            history = self.data.history(batch)
            return self._best(history, self.scores(batch, history), k)

        with ThreadPoolExecutor(threads) as pool:
            return [one for done in pool.map(work, chunks(users, self.batch_size)) for one in done]

    def _best(self, history: TrainView, scores: Scores, k: int) -> list[list[Recommendation]]:
        """Return each client's best items that are not in its history."""
        data, seen = self.data, history.positives
        items, values = top_k(scores, seen.indptr, seen.values, min(int(k), len(data.items)))
        experts = self.experts(history, items)
        return [
            [
                Recommendation(str(data.items[item]), data.title(item), float(value), expert)
                for item, value, expert in zip(*listed, strict=True)
                if item >= 0
            ]
            for listed in zip(items, values, experts, strict=True)
        ]


class _Header(Stored):
    """What model.json holds."""

    format: str
    method: str
    under_noise: bool
    options: dict[str, Any]
    seed: int
    tolerant: bool
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


def fold_in(
    method: Method, shared: Shared, history: TrainView, streams: Streams, passes: int = PASSES
) -> Private:
    """Return private parameters of new clients after some rounds on their own devices.

    Nothing is uploaded, so nothing needs protection, and no noise is drawn.
    """
    declared = method.private_fields(history, shared, streams)
    store = PrivateStore(declared, len(history))
    everybody = np.arange(len(history))
    phases = [phase for phase in method.phases if phase.personal]
    if declared and phases:
        # A pooled method would train new clients on each other's data; each is alone here.
        for clients in chunks(everybody, 1 if method.traits.pooled else max(1, len(history))):
            own = history.take(clients)
            per_client = method.download_own(shared, own.clients.astype(np.int64))
            received = {**phases[-1].download(shared), **per_client}
            for number in range(passes):
                fitted = phases[-1].fit(received, store.read(clients), own, Round(number, streams))
                store.write(clients, fitted.private)
    return store.read(everybody)
