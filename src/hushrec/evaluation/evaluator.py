"""Evaluation: rank held-out items with a model, among all items and among sampled ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, field_validator

from hushrec.aggregation import Evaluation
from hushrec.config import Clients, Settings
from hushrec.data.splitting import Part, Split
from hushrec.data.views import Ragged, TrainView, chunks
from hushrec.evaluation import groups as grouping
from hushrec.evaluation.metrics import Ranks, rank_full, rank_sampled, summarise, tally, user_metric
from hushrec.io.codec import Tables
from hushrec.kernels import draws
from hushrec.kernels.ragged import top_k
from hushrec.methods.base import Guided, Method, Shared
from hushrec.methods.baselines import Popularity, distinct_items
from hushrec.private import PrivateStore
from hushrec.serving.data import ServingData
from hushrec.serving.model import Model, Scorer
from hushrec.streams import Streams


class EvaluationConfig(Settings):
    """Metrics, how often they are measured, and which one selects the round."""

    every: Annotated[int, Field(ge=1)] = 1
    """Rounds between two evaluations on the validation items."""
    k: Annotated[tuple[Annotated[int, Field(ge=1)], ...], Field(min_length=1)] = (5, 10, 20)
    """Lengths of the list at which metrics are reported."""
    sampled: Annotated[int, Field(ge=1)] = 99
    """Size of the sampled candidate set that papers use, next to full ranking."""
    select: str = "ndcg@10"
    """The validation metric that selects the round."""
    select_on: Literal["full", "sampled"] = "full"
    """The candidate set on which it is measured."""
    patience: Annotated[int, Field(ge=0)] | None = None
    """Stop after this many evaluations without improvement; 0 runs all rounds.  [what the method
    declares (fedmix: 8 rounds of its network), else 75; under privacy, where evaluations select
    nothing, 0]"""
    users: Clients = 0
    """Evaluate this many users only, drawn once; 0 evaluates all users."""

    @field_validator("select")
    @classmethod
    def _known_metric(cls, name: str) -> str:
        user_metric(name)
        return name

    def evaluation_rounds(self, rounds: int) -> frozenset[int]:
        """Return the rounds after which the model is evaluated; the last round is one of them."""
        return frozenset([*range(self.every, rounds + 1, self.every), rounds])

    @property
    def sampled_name(self) -> str:
        """Name of the sampled candidate set."""
        return f"sampled{self.sampled}"

    @property
    def candidates(self) -> str:
        """Name of the candidate set that selects the round."""
        return "full" if self.select_on == "full" else self.sampled_name

    def reported(self, repeats: bool) -> dict[str, list[str]]:
        """Return the metrics that an evaluation reports, by candidate set."""
        return {name: self.metric_names(repeats) for name in ("full", self.sampled_name)}

    def metric_names(self, repeats: bool) -> list[str]:
        """Return the reported metrics; those of baskets too where items are bought again."""
        kinds = ["hr", "ndcg", "recall", "precision", "mrr"]
        if repeats:
            kinds += ["f1", "recall_repeat", "recall_new"]
        names = [*(f"{kind}@{k}" for k in self.k for kind in kinds), "auc"]
        return names if self.select in names else [*names, self.select]


PartRanks = Mapping[str, Ranks]
"""Ranks by candidate set: ``full`` and ``sampled99``."""


class Evaluator:
    """Ranks the held-out items of the users of a split."""

    def __init__(
        self,
        split: Split,
        config: EvaluationConfig,
        streams: Streams,
        threads: int,
        tolerant: bool = False,
    ) -> None:
        """``tolerant`` is that of the models it makes (`Model.tolerant`)."""
        self.split, self.config, self.streams = split, config, streams
        self.threads, self.tolerant = threads, tolerant
        self.data = ServingData.of(split)
        self.users = {part: self._choose_users(part) for part in ("valid", "test")}
        self._history = {part: split.history(part) for part in ("valid", "test")}
        self._samples: dict[Part, Ragged] = {}
        self._groups: dict[Part, grouping.Groups] = {}

    def model(self, method: Method, shared: Shared, private: PrivateStore) -> Model:
        """Return the model of these parameters, for the users of the split."""
        return Model(method, shared, private, self.data, self.streams, self.tolerant)

    def rank(self, model: Model, part: Part, score: Scorer | None = None) -> PartRanks:
        """Rank held-out items among all and sampled items; ``score`` replaces `Method.score`."""
        if part not in self._samples:
            self._samples[part] = self._draw_samples(part)
        samples, targets = self._samples[part], self.split.heldout(part)

        def work(positions: NDArray[np.int64]) -> tuple[Ranks, Ranks]:
            users = self.users[part][positions]
            view = self._history[part].take(users)
            scores = model.scores(users, view, score)
            aim, seen, drawn = targets.take(users), self.seen(users, view), samples.take(positions)
            full = rank_full(scores, view.users, seen, aim)
            sampled = rank_sampled(scores, view.users, drawn, aim)
            if not view.repeats:
                return full, sampled
            repeated = _are_in(aim, view.positives)
            return replace(full, repeated=repeated), replace(sampled, repeated=repeated)

        batches = chunks(np.arange(len(self.users[part])), model.batch_size)
        with ThreadPoolExecutor(self.threads) as pool:
            parts = list(pool.map(work, batches))
        model.private.release()
        return {
            "full": Ranks.concat([full for full, _ in parts]),
            self.config.sampled_name: Ranks.concat([sampled for _, sampled in parts]),
        }

    def tally(self, ranks: PartRanks) -> Evaluation:
        """Return sums and histograms of ranks, the only thing about ranks that leaves a node."""
        names = self.config.metric_names(self.split.train.repeats)
        return Evaluation({candidates: tally(r, names) for candidates, r in ranks.items()})

    def summarise(self, ranks: PartRanks, metrics: Sequence[str] = ()) -> Tables:
        """Return the mean of each metric, by default the reported ones, for each candidate set."""
        names = metrics or self.config.metric_names(self.split.train.repeats)
        if self.tolerant:  # nobody to evaluate is no error
            return {candidates: tally(r, names).means() for candidates, r in ranks.items()}
        return {candidates: summarise(r, names) for candidates, r in ranks.items()}

    def groups(self, part: Part) -> grouping.Groups:
        """Return the groups of the users that are evaluated in this part."""
        if part not in self._groups:
            self._groups[part] = grouping.user_groups(self.split.train, self.users[part])
        return self._groups[part]

    def gate_statistics(self, model: Model) -> dict[str, Any] | None:
        """Return statistics of the gates that clients hold now; None without gates or users."""
        if not isinstance(model.method, Guided):
            return None
        popular, parts = grouping.popular_items(self.split.train), []
        for users in chunks(self.users["valid"], model.batch_size):
            gates = model.method.gates(model.shared, model.private_of(users))
            parts.append(grouping.gates_by_user(gates, popular))
        return grouping.gate_statistics(parts, self.groups("valid")) if parts else None

    def top_items(self, model: Model, part: Part, count: int) -> NDArray[np.int32]:
        """Return the best items of every evaluated user, histories as at the time of the part."""

        def work(users: NDArray[np.int64]) -> NDArray[np.int32]:
            view = self._history[part].take(users)
            seen = view.seen
            return top_k(model.scores(users, view), seen.indptr, seen.values, count)[0]

        with ThreadPoolExecutor(self.threads) as pool:
            lists = list(pool.map(work, chunks(self.users[part], model.batch_size)))
        return np.concatenate([np.empty((0, count), np.int32), *lists])

    def seen(self, users: NDArray[np.int64], view: TrainView) -> Ragged:
        """Return the items that are no candidates: histories and held-out non-relevant items.

        Where items are bought again, those of the history are candidates too.
        """
        disliked = self.split.disliked
        return view.seen.union(disliked.take(users)) if len(disliked.values) else view.seen

    def _choose_users(self, part: Part) -> NDArray[np.int64]:
        users = self.split.evaluated(part)
        if self.config.users == 0 or self.config.users >= len(users):
            return users
        generator = self.streams.generator(f"evaluation/users/{part}")
        return np.sort(generator.choice(users, self.config.users, replace=False))

    def _draw_samples(self, part: Part) -> Ragged:
        """Draw items that a user never touches, as papers do; targets are added when ranking.

        Where items are bought again, all items but the targets can be drawn.
        """
        users, split = self.users[part], self.split
        touched = self._history["test"].seen.take(users).union(split.test.take(users))
        touched = touched.union(split.disliked.take(users))
        if split.train.repeats:
            touched = touched.union(split.valid.take(users))
        drawn = draws.draw_distinct_outside(
            self.streams.key(f"evaluation/sample/{part}"),
            split.train.users[users],
            touched.indptr,
            touched.values,
            split.train.n_items,
            self.config.sampled,
        )
        return Ragged(*drawn)


def _are_in(targets: Ragged, past: Ragged) -> NDArray[np.int8]:
    """Return 1 for every target that is in the history of its user, else 0."""
    most = np.int64(max(targets.values.max(initial=0), past.values.max(initial=0))) + 1
    pairs = [np.repeat(np.arange(len(r)), r.lengths) * most + r.values for r in (targets, past)]
    return np.isin(*pairs).astype(np.int8)


def popularity_ranks(evaluator: Evaluator, part: Part) -> PartRanks:
    """Rank by the number of training users of an item: a baseline."""
    split = evaluator.split
    touched = distinct_items(split.train.positives.take(split.training_users))
    counts = np.bincount(touched.values, minlength=split.train.n_items).astype(np.float32)
    model = evaluator.model(Popularity(), {"counts": counts}, PrivateStore({}, split.n_users))
    return evaluator.rank(model, part)


def chance_ranks(ranks: PartRanks) -> PartRanks:
    """Return the ranks of constant scores, all candidates tied: a baseline."""
    out = {}
    for candidates, value in ranks.items():
        others = np.repeat(value.candidates, np.diff(value.indptr)) - 1
        out[candidates] = replace(value, ahead=np.zeros_like(value.ahead), tied=others)
    return out
