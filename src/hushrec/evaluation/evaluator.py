"""The evaluation side: it owns the held-out items and asks a trained model to find them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, field_validator

from hushrec import kernels
from hushrec.aggregation.statistics import Evaluation
from hushrec.config import Clients, Settings
from hushrec.data.splitting import Part, Split
from hushrec.data.views import Ragged, TrainView, chunks
from hushrec.evaluation.groups import GateSums, Groups, group_means, popular_items, user_groups
from hushrec.evaluation.metrics import summarise, tally, user_metric
from hushrec.evaluation.ranking import Ranks, rank_full, rank_sampled, top_k
from hushrec.methods.base import Guided, Method, Private, Shared
from hushrec.private.store import PrivateStore
from hushrec.serving.fold_in import fold_in
from hushrec.streams import Streams

SCORES_BYTES = 32 * 2**20
"""Scores held at once by one thread."""
PATIENCE = 75
"""Looks without improvement that are borne unless told."""
COPIES_BYTES = 64 * 2**20
"""Private parameters, and adapted copies of the shared ones, held at once by one thread."""


class EvaluationConfig(Settings):
    """What is measured, how often, and what is selected by it."""

    every: Annotated[int, Field(ge=1)] = 1
    """Rounds between two looks at the validation items."""
    k: Annotated[tuple[Annotated[int, Field(ge=1)], ...], Field(min_length=1)] = (5, 10, 20)
    """Lengths of the list at which metrics are reported."""
    sampled: Annotated[int, Field(ge=1)] = 99
    """Size of the sampled candidate set that papers use, next to full ranking."""
    select: str = "ndcg@10"
    """The validation metric that selects the round."""
    select_on: Literal["full", "sampled"] = "full"
    """The candidate set on which it is measured."""
    patience: Annotated[int, Field(ge=0)] | None = None
    """Stop after this many looks without improvement; 0 runs all rounds.  [75; under privacy, where
    looks select nothing, 0]"""
    users: Clients = 0
    """Look at this many users only, drawn once; 0 looks at everybody."""

    @field_validator("select")
    @classmethod
    def _known_metric(cls, name: str) -> str:
        user_metric(name)
        return name

    def looks(self, rounds: int) -> frozenset[int]:
        """Return the rounds after which validation items are looked at: also the last one."""
        return frozenset([*range(self.every, rounds + 1, self.every), rounds])

    @property
    def most_stale(self) -> int:
        """Looks without improvement after which a run stops; 0 for never."""
        return PATIENCE if self.patience is None else self.patience

    @property
    def candidates(self) -> str:
        """Name of the candidate set that selects."""
        return "full" if self.select_on == "full" else self.sampled_name

    @property
    def sampled_name(self) -> str:
        """Name of the sampled candidate set."""
        return f"sampled{self.sampled}"

    @property
    def reported(self) -> dict[str, list[str]]:
        """Metrics that a look tells of each candidate set."""
        return {name: self.metric_names() for name in ("full", self.sampled_name)}

    def metric_names(self) -> list[str]:
        """Return the reported metrics."""
        kinds = ("hr", "ndcg", "recall", "precision", "mrr")
        names = [*(f"{kind}@{k}" for k in self.k for kind in kinds), "auc"]
        return names if self.select in names else [*names, self.select]


PartRanks = Mapping[str, Ranks]
"""Ranks by candidate set: ``full`` and ``sampled99``."""


Scorer = Callable[[Shared, Private, TrainView], NDArray[np.float32]]


class Evaluator:
    """Ranks held-out items for the users of a split."""

    def __init__(
        self,
        split: Split,
        config: EvaluationConfig,
        streams: Streams,
        threads: int,
        tolerant: bool = False,
    ) -> None:
        """Where ``tolerant``, scores that are no numbers are the worst, and stop nobody else."""
        self.split = split
        self.tolerant = tolerant
        self.config = config
        self.streams = streams
        self.threads = threads
        self.trains = np.zeros(split.n_users, bool)
        self.trains[split.training_users] = True
        clients = np.arange(split.n_users)
        if split.holders is not None:
            clients = np.unique(split.holders, return_inverse=True)[1]
        self._client = clients  # where each user's client lies in the store
        self._users = {part: self._choose_users(part) for part in ("valid", "test")}
        self._history = {part: split.history(part) for part in ("valid", "test")}
        self._samples: dict[Part, Ragged] = {}
        self._groups: dict[Part, Groups] = {}

    def rank(
        self,
        method: Method,
        shared: Shared,
        store: PrivateStore,
        part: Part,
        score: Scorer | None = None,
    ) -> PartRanks:
        """Rank the held-out items of a part among all items and among the sampled ones.

        ``score`` stands in for the method's own way to score.
        """
        if part not in self._samples:
            self._samples[part] = self._draw_samples(part)
        samples, targets = self._samples[part], self.split.heldout(part)

        def work(positions: NDArray[np.int64]) -> tuple[Ranks, Ranks]:
            users = self._users[part][positions]
            view = self._history[part].take(users)
            scores = self.scores(method, shared, store, users, view, score)
            aim, seen, drawn = targets.take(users), self.seen(users, view), samples.take(positions)
            return (
                rank_full(scores, view.users, seen.indptr, seen.values, aim.indptr, aim.values),
                rank_sampled(
                    scores, view.users, drawn.indptr, drawn.values, aim.indptr, aim.values
                ),
            )

        chunk = self.chunk(method, shared, store.bytes_per_user)
        stacks = chunks(np.arange(len(self._users[part])), chunk)
        with ThreadPoolExecutor(self.threads) as pool:
            parts = list(pool.map(work, stacks))
        store.release()
        return {
            "full": Ranks.concat([full for full, _ in parts]),
            self.config.sampled_name: Ranks.concat([sampled for _, sampled in parts]),
        }

    def tally(self, ranks: PartRanks) -> Evaluation:
        """Return what may leave this node of its users' ranks: sums and histograms."""
        names = self.config.metric_names()
        return Evaluation({candidates: tally(r, names) for candidates, r in ranks.items()})

    def summarise(self, ranks: PartRanks) -> dict[str, dict[str, float]]:
        """Return the mean of every metric for each candidate set."""
        names = self.config.metric_names()
        return {candidates: summarise(r, names) for candidates, r in ranks.items()}

    def groups(self, part: Part) -> Groups:
        """Return the groups of the users that are looked at in this part."""
        if part not in self._groups:
            self._groups[part] = user_groups(self.split.train, self._users[part])
        return self._groups[part]

    def group_means(self, ranks: PartRanks) -> dict[str, dict[str, float]]:
        """Return what full ranking gives each group of the users with validation items."""
        return group_means(ranks["full"], self.groups("valid"))

    def watch_gates(
        self, method: Method, shared: Shared, store: PrivateStore
    ) -> dict[str, Any] | None:
        """Return statistics of the gates as the clients hold them now; None without gates."""
        if not isinstance(method, Guided):
            return None
        popular, parts = popular_items(self.split.train), []
        for users in chunks(self._users["valid"], self.chunk(method, shared, store.bytes_per_user)):
            gates = method.gates(shared, self.private_of(method, shared, store, users))
            parts.append(GateSums.of(gates, popular))
        return GateSums.concat(parts).statistics(self.groups("valid")) if parts else None

    def top_items(
        self, method: Method, shared: Shared, store: PrivateStore, part: Part, count: int
    ) -> NDArray[np.int32]:
        """Return everybody's best items as a device would show them at this point in time."""

        def work(users: NDArray[np.int64]) -> NDArray[np.int32]:
            view = self._history[part].take(users)
            scores = self.scores(method, shared, store, users, view)
            return top_k(scores, view.positives.indptr, view.positives.values, count)[0]

        chunk = self.chunk(method, shared, store.bytes_per_user)
        with ThreadPoolExecutor(self.threads) as pool:
            lists = list(pool.map(work, chunks(self._users[part], chunk)))
        return np.concatenate(lists)

    def evaluated_users(self, part: Part) -> NDArray[np.int64]:
        """Return the users that are looked at in this part."""
        return self._users[part]

    def chunk(self, method: Method, shared: Shared, private_bytes: int = 1) -> int:
        """Return how many users are scored at once."""
        copies = private_bytes
        if method.adapts:
            copies += sum(array.nbytes for array in shared.values())
        return max(1, min(SCORES_BYTES // (4 * self.split.train.n_items), COPIES_BYTES // copies))

    def scores(
        self,
        method: Method,
        shared: Shared,
        store: PrivateStore,
        users: NDArray[np.int64],
        view: TrainView,
        score: Scorer | None = None,
    ) -> NDArray[np.float32]:
        """Score every item for these users, whose histories are ``view``, as their clients do.

        ``score`` stands in for the method's own way to score.
        """
        score, holders = score or method.score, self.split.holders
        if holders is None or not method.traits.silos:
            found = score(shared, self.private_of(method, shared, store, users), view)
            return self._told(found)
        order = np.argsort(holders[users], kind="stable")
        together = replace(view.take(order), holders=holders[users[order]])
        scores = np.empty((len(users), view.n_items), np.float32)
        clients = self._client[users[order]][together.client_indptr[:-1]]
        scores[order] = score(shared, store.read(clients), together)
        return self._told(scores)

    def _told(self, scores: NDArray[np.float32]) -> NDArray[np.float32]:
        if not self.tolerant or np.isfinite(scores).all():
            return scores
        return np.where(np.isfinite(scores), scores, np.finfo(np.float32).min)

    def private_of(
        self, method: Method, shared: Shared, store: PrivateStore, users: NDArray[np.int64]
    ) -> Private:
        """Return the private parameters that these users are served with."""
        private = self._kept_by(method, shared, store, users)
        return method.adapt(shared, private, self.split.train.take(users), self.streams)

    def _kept_by(
        self, method: Method, shared: Shared, store: PrivateStore, users: NDArray[np.int64]
    ) -> Private:
        if self.trains[users].all():
            return store.read(users)
        # Users that training left out adapt on their own device first, from their past alone.
        adapted = PrivateStore(store.fields, store.n_users)
        known, new = users[self.trains[users]], users[~self.trains[users]]
        adapted.write(known, store.read(known))
        view: TrainView = self.split.train.take(new)
        adapted.write(new, fold_in(method, shared, view, self.streams))
        return adapted.read(users)

    def seen(self, users: NDArray[np.int64], view: TrainView) -> Ragged:
        """Return what is no candidate: the history, and held-out items that are not to be found."""
        disliked = self.split.disliked
        if not len(disliked.values):
            return view.positives
        other = disliked.take(users)
        past = view.positives
        return Ragged(*kernels.sorted_union(past.indptr, past.values, other.indptr, other.values))

    def _choose_users(self, part: Part) -> NDArray[np.int64]:
        users = self.split.evaluated(part)
        if self.config.users == 0 or self.config.users >= len(users):
            return users
        generator = self.streams.generator(f"evaluation/users/{part}")
        return np.sort(generator.choice(users, self.config.users, replace=False))

    def _draw_samples(self, part: Part) -> Ragged:
        """Draw items the user never touches at all, as the papers do; the target joins later."""
        users = self._users[part]
        pos, test = self.split.history("test").positives.take(users), self.split.test.take(users)
        disliked = self.split.disliked.take(users)
        touched = kernels.sorted_union(pos.indptr, pos.values, test.indptr, test.values)
        touched = kernels.sorted_union(*touched, disliked.indptr, disliked.values)
        key = self.streams.key(f"evaluation/sample/{part}")
        n_items = self.split.train.n_items
        return Ragged(
            *kernels.draw_distinct_outside(
                key, self.split.train.users[users], *touched, n_items, self.config.sampled
            )
        )
