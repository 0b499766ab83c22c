"""`Model`: a trained recommender as one value.

It holds the method, the shared parameters and the clients' private parameters, and `ServingData`:
the catalogue, the users and their histories. It scores, recommends, explains, and folds in users
that training has never seen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import overload

import numpy as np
from numpy.typing import NDArray

from hushrec.data.features import of_newcomer
from hushrec.data.interactions import StrArray
from hushrec.data.splitting import Split, join
from hushrec.data.views import Ragged, TrainView, chunks
from hushrec.errors import ConfigError
from hushrec.io.memory import usable_cores
from hushrec.io.rows import Rows
from hushrec.kernels.top_k import top_k
from hushrec.methods.base import Explains, Method, Private, Shared
from hushrec.private.store import PrivateStore
from hushrec.streams import Round, Streams

PASSES = 20
"""Training rounds of a new user on their own device."""
SCORES_BYTES = 32 * 2**20
"""Scores held at once by one thread."""
COPIES_BYTES = 64 * 2**20
"""Private parameters, and adapted copies of the shared ones, held at once by one thread."""
NO_USERS = np.zeros(0, np.int64)

UserIndices = NDArray[np.int64]
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


@dataclass(frozen=True, eq=False)
class ServingData:
    """Catalogue, users and histories that a model recommends with; users are named by index."""

    items: StrArray
    titles: StrArray | None
    """What to print for an item; None prints its id."""
    users: StrArray
    train: TrainView
    """Training interactions of every user; devices adapt on them."""
    later: Ragged
    """Items that each user touched outside of training, oldest first; they are history too."""
    trained: NDArray[np.bool_]
    """Whether a user takes part in training; the others are folded in."""
    top_value: float
    """Largest value of an interaction; each item in a new user's history gets it."""
    holders: NDArray[np.int32] | None = None
    """Silo of every user; None if every user is a client."""

    @classmethod
    def of(cls, split: Split) -> ServingData:
        """Return the data of a split; held-out items are part of the histories."""
        trained = np.zeros(split.n_users, bool)
        trained[split.training_users] = True
        return cls(
            items=split.data.items,
            titles=split.data.titles,
            users=split.data.users,
            train=split.train,
            later=join(split.valid, join(split.test, split.disliked)),
            trained=trained,
            top_value=float(split.data.value.max()),
            holders=split.holders,
        )

    def without_users(self) -> ServingData:
        """Return the catalogue alone."""
        return replace(
            self,
            users=self.users[:0],
            train=self.train.take(NO_USERS),
            later=Ragged.empty(0),
            trained=self.trained[:0],
            holders=None,
        )

    @cached_property
    def user_index(self) -> Mapping[str, int]:
        """Index of every user id."""
        return {user: index for index, user in enumerate(self.users.tolist())}

    @cached_property
    def item_index(self) -> Mapping[str, int]:
        """Index of every item id."""
        return {item: index for index, item in enumerate(self.items.tolist())}

    @cached_property
    def client_index(self) -> UserIndices:
        """Index of every user's client in the private store."""
        if self.holders is None:
            return np.arange(len(self.users))
        return np.unique(self.holders, return_inverse=True)[1]

    def title(self, item: int) -> str:
        """Return what to print for an item."""
        return str(self.items[item] if self.titles is None else self.titles[item])

    def history(self, users: UserIndices) -> TrainView:
        """Return everything that these users touched, held-out items included."""
        past, later = self.train.take(users), self.later.take(users)
        ones = Ragged(later.indptr, np.ones(len(later.values), np.float32))
        return _with_history(past, join(past.positives, later), join(past.values, ones))

    def new_user(self, history: Iterable[str | int], features: Mapping[str, str]) -> TrainView:
        """Return a client with this history (item ids, oldest first) and these user features."""
        index = self.item_index
        known = [index[str(item)] for item in history if str(item) in index]
        if not known:
            raise ConfigError("none of the items in the history is in the catalogue of this model")
        latest_first = list(dict.fromkeys(reversed(known)))
        client = replace(
            self.train.take(NO_USERS),
            users=np.array([len(self.users)], np.int32),
            user_features=of_newcomer(self.train.user_features, features),
        )
        indptr, items = np.array([0, len(latest_first)]), np.array(latest_first[::-1], np.int32)
        # An item that is named without a rating is taken as liked.
        values = np.full(len(latest_first), self.top_value, np.float32)
        return _with_history(client, Ragged(indptr, items), Ragged(indptr, values))


@dataclass(frozen=True, eq=False)
class Model:
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
        self,
        users: Iterable[str | int] | None = None,
        k: int = 10,
        history: None = None,
        features: None = None,
        threads: int | None = None,
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
        user and rank.

        A user that the model does not know is folded in from ``history``, item ids oldest first:
        their private parameters are trained on it, the shared parameters stay as they are.
        ``features`` are the user features of such a user.
        """
        if isinstance(users, str | int | np.integer):
            return self._list(str(users), k, history, features or {})
        if history is not None or features:
            raise ConfigError("history and features belong to one user: give one id")
        ids = self.data.users.tolist() if users is None else [str(user) for user in users]
        lists = self._lists(self.indices(ids), k, threads or usable_cores())
        return Rows.of(
            ("user", "rank", *(field.name for field in fields(Recommendation))),
            [
                (user, rank, *vars(line).values())
                for user, lines in zip(ids, lists, strict=True)
                for rank, line in enumerate(lines, 1)
            ],
        )

    def _list(
        self, user: str, k: int, history: Iterable[str | int] | None, features: Mapping[str, str]
    ) -> list[Recommendation]:
        if history is not None:
            new = self.data.new_user(history, features)
            return self._best(new, self.scores_of_new(new), k)[0]
        if features:
            raise ConfigError(f"the data has the features of user '{user}': leave them out")
        index = self.indices([user])
        past = self.data.history(index)
        return self._best(past, self.scores(index, past), k)[0]

    def explain(self, user: str | int, items: Sequence[str | int]) -> list[str]:
        """Return, for each item, the expert with the largest contribution to the user's score.

        The names are empty unless the method mixes experts.
        """
        history = self.data.history(self.indices([user]))
        try:
            asked = [self.data.item_index[str(item)] for item in items]
        except KeyError as unknown:
            raise ConfigError(f"item {unknown} is not in the catalogue of this model") from None
        return self.experts(history, np.array([asked], np.int32))[0]

    def experts(self, history: TrainView, items: NDArray[np.int32]) -> list[list[str]]:
        """Return the expert with the largest contribution to each score: items [clients, ranks]."""
        if isinstance(self.method, Explains):
            return self.method.voices(self.shared, history, items)
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


def fold_in(
    method: Method, shared: Shared, history: TrainView, streams: Streams, passes: int = PASSES
) -> Private:
    """Return private parameters of new clients after some rounds on their own devices.

    Nothing is uploaded, so nothing needs protection, and no noise is drawn.
    """
    declared = method.private_fields(history, shared, streams)
    store = PrivateStore(declared, len(history))
    everybody = np.arange(len(history))
    if declared:
        # A pooled method would train new clients on each other's data; each is alone here.
        for clients in chunks(everybody, 1 if method.traits.pooled else max(1, len(history))):
            own = history.take(clients)
            received = {
                **method.download(shared),
                **method.download_own(shared, own.clients.astype(np.int64)),
            }
            for number in range(passes):
                fitted = method.fit(received, store.read(clients), own, Round(number, streams))
                store.write(clients, fitted.private)
    return store.read(everybody)


def _with_history(client: TrainView, items: Ragged, values: Ragged) -> TrainView:
    """Return clients with these histories, oldest first, in place of their own."""
    order = np.arange(len(items.values)) - np.repeat(items.indptr[:-1], items.lengths)
    return replace(
        client,
        positives=items,
        times=Ragged(items.indptr, order),
        values=values,
        never_negative=None,
    )
