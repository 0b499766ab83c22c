"""FedMix: an ensemble of experts that are learnt, and weighted, from sums over clients.

Each expert (`experts`) is a model that gives every item a few scores from a client's own history:
item transitions, co-occurrence, popularity, transitions between item categories. The probability of
the next item is log-linear in the scores,

    P(j | history) ∝ exp( Σ_f w_f · x_f(history, j) ),      j untouched,

so the ensemble cannot be much worse than its best expert. Small networks over the same scores then
rerank the best candidates, by their mean: a single one depends on where it started, and gains less.

**No leak between experts and weights.** A client holds out its last ``held_out`` training items.
Experts are learnt without them; weights and network are fitted to predict them; experts learnt with
them are then served. With ``hold_out=clients`` the clients that fit count nothing instead, so that
each table is counted and sent once. Validation items only select the round.

The phases, and what a client uploads in each:

1. *Count.* Each expert's sums over the history without the held-out items, and what those add. The
   server learns from the former the experts that weights are fitted with, and from both together
   the experts that are served. With ``count_rounds`` > 1, large catalogues are counted in several
   rounds (`experts.Counting`).
2. *Score candidates.* A client receives the experts learnt without held-out items. Each held-out
   item is a prediction task: the client keeps the scores of that item, of the ``top_candidates``
   untouched items with the highest scores by the starting weights, and of ``random_candidates``
   drawn from the rest, which stand for all of it. It uploads moments of the scores, for scaling,
   and loss, gradient and Hessian at the starting weights.
3. *Fit weights*, ``newton_rounds`` rounds: loss, gradient and Hessian at a few trial weights that
   it is sent; the server takes damped Newton steps (`shared.options`).
4. *Fit network*, ``network_rounds`` rounds: its gradient of each network; the server takes a step
   of Adam with each (FedAdam: Reddi et al. 2021, with one local step).

So a client uploads its pairs once, and then a few kB a round; it downloads the experts twice.

FedMix needs exact sums. Where noise is added to them, use FedNext: an ensemble over the same noised
sums gains no accuracy (`experiments/privacy-utility/tuning.md`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, model_validator

from hushrec.aggregation import ClientRows, KeyedRows, Total, Update
from hushrec.config import Count, Width
from hushrec.data.views import TrainView, chunks
from hushrec.errors import ConfigError
from hushrec.kernels import baskets, mixture
from hushrec.kernels.draws import draw_each
from hushrec.methods import base, forms
from hushrec.methods.base import Between, Fitted, OneOf, Phase, Reason, Scores, SearchSpace, Shared
from hushrec.methods.shared import options
from hushrec.methods.statistics import experts, pair_tables
from hushrec.methods.statistics.experts import HEAD, HELD_OUT, Expert, Model, flatten, unflatten
from hushrec.methods.statistics.pair_tables import PAIRS
from hushrec.private import PerClientRows, Private, PrivateFields, rows_in
from hushrec.streams import Round, Streams

CANDIDATES = "candidates"
SCORES_AT_ONCE = 2**20
"""Number of scores in memory at a time."""


class FedMixConfig(experts.ExpertsConfig):
    """Options of FedMix."""

    experts: Annotated[tuple[str, ...], Field(min_length=1)] = (
        "transitions",
        "recent-transitions",
        "cooccurrence",
        "popularity",
        "categories",
        "personal-frequency",
    )
    """Experts in the ensemble, by the names of `hushrec.experts`; inapplicable ones are skipped."""
    count_rounds: Count = 1
    """Rounds of counting. With more than one, the first counts items, the second pairs of the
    ``dense_items`` most popular ones, the others the remaining pairs, which takes less memory."""
    fit_fraction: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Fraction of the clients, drawn once, that fit weights and network: a few thousand suffice."""
    hold_out: Literal["items", "clients"] = "items"
    """What experts are learnt without before weights are fitted: each client's last items, which it
    counts apart, in a second sum; or all that the drawn clients have, which then never count. The
    latter uploads and downloads half as much, and needs ``fit_fraction`` below 1."""
    held_out: Count = 2
    """How many of its last training items a client holds out to fit weights and network; where the
    next basket is predicted (``split.kind=next-basket``), its last basket."""
    basket_items: Count = 6
    """How many items of the held-out basket a client predicts."""
    gap: NonNegativeInt = 0
    """Number of items between the history of a prediction task and its held-out item. 0 predicts
    the next item; use more where targets come much later (``split.kind=time``)."""
    top_candidates: Count = 200
    """Candidates of a task with the highest scores by the starting weights."""
    random_candidates: Count = 56
    """Candidates drawn from all other items, weighted to stand for them."""
    fit_neighbours: Count = 300
    """As ``neighbours``, of the experts that weights and network are fitted with."""
    penalty: PositiveFloat = 1e-4
    """Weight of the squared weights in the loss."""
    newton_rounds: NonNegativeInt = 3
    """Rounds that fit the weights; each tries steps of three dampings."""
    network_rounds: NonNegativeInt = 19
    """Rounds that fit the networks."""
    networks: Annotated[int, Field(ge=1, le=8)] = 3
    """Networks, from different starts; their mean reranks. Each adds its gradient to an upload."""
    hidden: Width = 20
    """Width of a network's two hidden layers."""
    reranked: Annotated[int, Field(ge=2)] = 120
    """Number of candidates that the networks rerank."""
    lr: PositiveFloat = 0.05
    """Learning rate of the networks' Adam."""
    decay: NonNegativeFloat = 0.01
    """Weight decay of Adam."""

    @model_validator(mode="after")
    def _somebody_counts(self) -> FedMixConfig:
        if self.hold_out == "clients" and self.fit_fraction == 1:
            raise ValueError(
                "hold_out = clients: those that fit do not count, so with fit_fraction = 1 nobody "
                "would; give a smaller fit_fraction, for example 0.2"
            )
        return self


class FedMix(
    base.Method,
    base.Explains,
    base.Exports,
    base.ItemNeighbours,
    base.ItemPopularity,
    base.Tunable,
):
    """A log-linear ensemble of experts, and a small network; under noise on sums use fednext."""

    name = "fedmix"
    Config: ClassVar[type[base.MethodConfig]] = FedMixConfig
    config: FedMixConfig
    traits = base.Traits(
        every=4,
        patience=8,
        exact_sums=True,
        training_only=frozenset({CANDIDATES}),
        batch_interactions=2**14,
    )

    search: ClassVar[SearchSpace] = {
        "ridge": Between(10.0, 1000.0),
        "cooccurrence_ridge": Between(30.0, 3000.0),
        "held_out": OneOf((1, 2, 3)),
        "penalty": Between(1e-6, 1e-2),
        "hidden": OneOf((10, 20, 40)),
        "lr": Between(0.005, 0.1),
        "decay": Between(1e-3, 0.1),
    }

    @property
    def phases(self) -> tuple[Phase, ...]:
        """Count, score candidates, fit weights, fit networks."""
        config = self.config
        sends = "sums of every expert, without the held-out items and with them"
        counts = [("count", 1, sends if config.hold_out == "items" else "sums of every expert")]
        if config.count_rounds > 1:
            counts = [
                ("count items", 1, "its items, and sums over them"),
                ("count pairs of popular items", 1, "sums over pairs of popular items"),
                ("count other pairs", config.count_rounds - 2, "sums over some other pairs"),
            ]
        sends = "moments of its candidates' scores; loss, gradient and Hessian of the start"
        candidates = ("score candidates", 1, sends)
        sends = "loss, gradient and Hessian of trial weights"
        weights = ("fit weights", config.newton_rounds, sends)
        networks = ("fit network", config.network_rounds, "gradient of every network")
        all_weights = ("weights", "start", "center", "scale", "networks")
        planned = (
            *(Phase(*each, self._fit_counts, self._learn_experts, _head) for each in counts),
            Phase(*candidates, self._fit_candidates, self._learn_scales, self._download_held_out),
            Phase(*weights, self._fit_weights, self._learn_weights, _named("trials", "scale")),
            Phase(*networks, self._fit_network, self._learn_network, _named(*all_weights)),
        )
        # Devices score from their history alone: there is nothing to fold in.
        return tuple(replace(phase, personal=False) for phase in planned if phase.rounds)

    # ------------------------------------------------------------ shared and private

    def init(self, view: TrainView, streams: Streams) -> Shared:
        """Start from experts without counts, and from networks with zero output weights."""
        applicable, config = self._applicable(view), self.config
        shared = pair_tables.empty_models(applicable, view, config.neighbours)
        start = np.array(
            [e.start.get(score, 0.0) for e in applicable for score in e.scores(shared[e.name])]
        )
        if config.hold_out == "items":
            shared[HELD_OUT] = pair_tables.empty_models(applicable, view, config.fit_neighbours)
        if config.count_rounds > 1:
            shared[HEAD] = np.arange(view.n_items) < config.dense_items  # as many as will be
        shared |= {"start": start, "center": np.zeros(len(start) + 1, np.float32)}
        shared |= {"scale": np.ones(len(start) + 1, np.float32), **options.first_trial(start)}
        generator, sizes = streams.generator("init/network"), (len(start) + 1, config.hidden)
        networks = mixture.first_networks(generator, config.networks, *sizes)
        return flatten({**shared, "networks": networks, "adam": options.first_moments(networks)})

    def private_fields(self, view: TrainView, shared: Shared, streams: Streams) -> PrivateFields:
        """Keep the scores of the candidates of each held-out item."""
        capacity = self._task_counts(view, streams) * self._block(view.n_items)
        return {CANDIDATES: PerClientRows(capacity, len(shared["center"]) + 1)}

    def _download_held_out(self, shared: Shared) -> Shared:
        """Send the experts learnt without held-out items, and the weights of their scores."""
        tree = unflatten(shared)
        apart = {HELD_OUT: tree[HELD_OUT]} if HELD_OUT in tree else self._models(tree)
        return flatten({"weights": shared["weights"], **apart})

    def serving(self, shared: Shared) -> Shared:
        """Leave out what only fitting needs: held-out experts and the optimisers' state."""
        own = {name: shared[name] for name in ("center", "scale", "weights", "networks")}
        return flatten({**own, **self._models(unflatten(shared))})

    # ------------------------------------------------------------ on the devices

    def _fit_counts(self, shared: Shared, private: Private, view: TrainView, now: Round) -> Fitted:
        counting, applicable = self._counting(shared, now.number), self._applicable(view)
        if self.config.hold_out == "clients":
            fitting = np.where(self._fits(view, now.streams), view.positives.lengths, 0)
            rows = counting.count(applicable, experts.shortened(view, fitting), None)
        else:
            rows = counting.count(applicable, view, self._held_out_counts(view))
        return Fitted(Update(len(view), rows=rows), private)

    def _fit_candidates(
        self, shared: Shared, private: Private, view: TrainView, now: Round
    ) -> Fitted:
        kept = self._score_candidates(shared, view, now)
        tasks, weights = (kept.indptr, kept.rows, self._block(view.n_items)), shared["weights"]
        start = mixture.newton_sums(
            *tasks, weights.astype(np.float32), np.ones(len(weights), np.float32)
        )
        rows = {"moments": _one_row(*mixture.score_moments(*tasks)), "newton": _one_row(*start)}
        return Fitted(Update(len(view), rows=rows), {CANDIDATES: kept})

    def _fit_weights(self, shared: Shared, private: Private, view: TrainView, now: Round) -> Fitted:
        tasks, block = rows_in(private, CANDIDATES), self._block(view.n_items)
        trials, scale = shared["trials"].astype(np.float32), shared["scale"]
        sums = [mixture.newton_sums(tasks.indptr, tasks.rows, block, w, scale) for w in trials]
        rows = _one_row(sums[0][0], np.hstack([one for _, one in sums]))
        return self._fitted({"newton": rows}, tasks, now)

    def _fit_network(self, shared: Shared, private: Private, view: TrainView, now: Round) -> Fitted:
        tasks, block = rows_in(private, CANDIDATES), self._block(view.n_items)
        weights, networks = self.reranker(shared)
        both = np.stack([weights, (shared["start"] * shared["scale"][:-1]).astype(np.float32)])
        sums = mixture.network_sums(tasks.indptr, tasks.rows, block, both, networks)
        return self._fitted({"networks": _one_row(*sums)}, tasks, now)

    def _fitted(self, rows: dict[str, KeyedRows], tasks: ClientRows, now: Round) -> Fitted:
        """Keep the scores of the candidates until the last round, which drops them."""
        clients = len(tasks.indptr) - 1
        if now.number >= self.planned_rounds:
            nothing = np.zeros(clients + 1, np.int64)
            tasks = ClientRows(nothing, tasks.ids[:0], tasks.rows[:0])
        return Fitted(Update(clients, rows=rows), {CANDIDATES: tasks})

    def _score_candidates(self, shared: Shared, view: TrainView, now: Round) -> ClientRows:
        """Score the candidates of every held-out item with the experts learnt without it."""
        held, block = self._task_counts(view, now.streams), self._block(view.n_items)
        width = len(shared["weights"]) + 1
        rows = np.zeros((held.sum() * block, width + 1), np.float32)
        rows[:, width] = mixture.NONE
        indptr = np.concatenate([[0], np.cumsum(held) * block])
        sizes = self.config.top_candidates, self.config.random_candidates
        active = self.active(shared, view, held_out=True)
        for back in range(1, int(held.max(initial=0)) + 1):
            clients, key = np.flatnonzero(held >= back), now.streams.key("candidates", back)
            for some, buffer in self._parts(clients, width - 1, view.n_items):
                mine = view.take(some)
                later = self._held_out_counts(mine) if view.repeats else np.full(len(mine), back)
                before = mine.positives.lengths - later
                earlier = experts.shortened(mine, later + np.minimum(self.config.gap, before - 1))
                scores = experts.score_all(active, earlier, buffer)
                prior = np.zeros((len(mine), view.n_items), np.float32)
                mixture.weigh(scores, shared["weights"].astype(np.float32), prior)
                for c in range(len(mine)):
                    items, user = mine.positives[c], int(mine.users[c])
                    # In a basket, the other items are no candidates, and those before it are.
                    others = items[-later[c] :] if view.repeats else items[:-back]
                    chosen, log_weights = mixture.choose_candidates(
                        prior[c], others, items[-back], *sizes, key, user
                    )
                    start = indptr[some[c]] + (back - 1) * block
                    here = rows[start : start + len(chosen)]
                    here[:, : width - 1] = scores[c][:, chosen].T
                    here[:, width - 1] = np.log(len(earlier.positives[c]))
                    here[:, width] = log_weights
        ids = np.arange(indptr[-1]) - np.repeat(indptr[:-1], held * block)
        return ClientRows(indptr, ids.astype(np.int32), rows)

    # ------------------------------------------------------------ on the server

    def _learn_experts(self, shared: Shared, total: Total, number: int) -> Shared:
        """Learn the experts, and the head of the catalogue."""
        counting, tree = self._counting(shared, number), unflatten(shared)
        apart, last = tree.pop(HELD_OUT, None), number == self.config.count_rounds
        served = pair_tables.long_models(self._experts(), tree)
        held_out = pair_tables.long_models(self._experts(), tree if apart is None else apart)
        learnt, without = counting.learn(served, held_out, total)
        tree |= pair_tables.counted_models(served, learnt, tree, last)
        if last:
            tree.pop(pair_tables.LONG, None)
        if apart is not None:
            tree[HELD_OUT] = pair_tables.counted_models(held_out, without, apart, last)
        return flatten({**tree, **counting.most_popular(total, self.config.dense_items)})

    def _learn_scales(self, shared: Shared, total: Total, number: int) -> Shared:
        """Find the scores' mean and scale, and the first trials; drop the held-out experts."""
        kept = flatten({n: part for n, part in unflatten(shared).items() if n != HELD_OUT})
        if "moments" not in total.rows:
            return kept
        _, ((count, *sums),) = total.rows["moments"]
        center, square = np.array(sums).reshape(2, -1) / max(count, 1e-6)
        spread = np.sqrt(np.maximum(square - center**2, 0.0))
        # A score that is the same for everybody tells nothing, and must not be blown up.
        scale = np.where(spread > 1e-6, spread, 1.0).astype(np.float32)
        kept |= {"center": center.astype(np.float32), "scale": scale}
        state = options.first_trial(shared["weights"] * scale[:-1])
        sums = options.rescaled(total.rows["newton"][1], scale[:-1])
        return {**kept, **options.next_trials(state, sums, self.config.penalty)}

    def _learn_weights(self, shared: Shared, total: Total, number: int) -> Shared:
        """Accept the best of the trials, and take damped Newton steps from there."""
        if "newton" not in total.rows:
            return shared
        sums = total.rows["newton"][1].reshape(len(shared["trials"]), -1)
        return {**shared, **options.next_trials(shared, sums, self.config.penalty)}

    def _learn_network(self, shared: Shared, total: Total, number: int) -> Shared:
        """Take a step of Adam; the rate falls in the second half, so that the last steps settle."""
        if "networks" not in total.rows:
            return shared
        tasks, *gradients = total.rows["networks"][1][0]
        left = (self.planned_rounds + 1 - number) / self.config.network_rounds
        rate, decay = self.config.lr * min(1.0, 2 * left), self.config.decay
        before, state = shared["networks"], unflatten(shared)["adam"]
        mean = np.reshape(gradients, before.shape) / max(tasks, 1.0)
        networks, state = options.adam_step(before, state, mean, rate, decay)
        return {**shared, **flatten({"networks": networks, "adam": state})}

    # ------------------------------------------------------------ scoring

    def score(self, shared: Shared, private: Private, history: TrainView) -> Scores:
        """Add up the weighted scores, and rerank the best candidates with the networks."""
        out = np.zeros((len(history), history.n_items), np.float32)
        weights, networks = self.reranker(shared)
        everybody, active = np.arange(len(history)), self.active(shared, history)
        for some, buffer in self._parts(everybody, len(weights), history.n_items):
            mine = history.take(some)
            scores = experts.score_all(active, mine, buffer)
            mixed = np.zeros((len(mine), history.n_items), np.float32)
            mixture.weigh(scores, weights / shared["scale"][:-1], mixed)
            if self.reranks(shared):
                lengths = np.log(np.maximum(mine.positives.lengths, 1)).astype(np.float32)
                mixture.rerank(mixed, scores, lengths, mine.seen.indptr, mine.seen.values, networks)
            out[some] = mixed
        return out

    def contributions(
        self, shared: Shared, private: Private, history: TrainView, items: NDArray[np.int32]
    ) -> list[list[Reason]]:
        """Find the expert whose scores lift each item most above the mean item."""
        weights, active = shared["weights"] / shared["scale"][:-1], self.active(shared, history)
        return experts.largest_lifts(active, weights, history, items)

    def item_neighbours(self, shared: Shared, item: int) -> Scores | None:
        """Add up the weights of the experts that have any, each over its largest one."""
        found = [expert.neighbours(model, item) for expert, model in self.active(shared)]
        tables = [one for one in found if one is not None]
        total = np.zeros(len(tables[0]) if tables else 0, np.float32)
        for one in tables:
            total += one / max(one.max(), np.float32(1e-12))
        return total if tables else None

    def item_popularity(self, shared: Shared) -> Scores | None:
        """Return the shares of the popularity expert, if it is one of the experts."""
        models = {expert.name: model for expert, model in self.active(shared)}
        return models["popularity"]["shares"] if "popularity" in models else None

    # ------------------------------------------------------------ what several of these use

    def _experts(self) -> list[Expert]:
        return [experts.expert_class(name)(self.config) for name in self.config.experts]

    def _applicable(self, view: TrainView) -> list[Expert]:
        found = [expert for expert in self._experts() if expert.is_applicable(view)]
        if not found:
            raise ConfigError(
                f"no expert of fedmix applies to this data: {', '.join(self.config.experts)} need "
                "features of items, or baskets; name others in 'experts'"
            )
        return found

    def active(
        self, shared: Shared, view: TrainView | None = None, *, held_out: bool = False
    ) -> list[tuple[Expert, Model]]:
        """Return each expert with its served model, or with that learnt without held-out items.

        They are the same with ``hold_out=clients``. Some experts need the view to score.
        """
        tree = unflatten(shared)
        models = tree.get(HELD_OUT, tree) if held_out else tree
        return pair_tables.ready_models(self._experts(), models, view)

    def _models(self, tree: Mapping[str, Any]) -> dict[str, Any]:
        """Return the served experts, and the index of their tables."""
        return {name: tree[name] for name in (*self.config.experts, PAIRS) if name in tree}

    def reranks(self, shared: Shared) -> bool:
        """Say whether networks have learnt anything: their outputs start from zero weights."""
        return bool(shared["networks"][:, -1 - self.config.hidden : -1].any())

    def reranker(self, shared: Shared) -> tuple[NDArray[np.float32], mixture.Reranker]:
        """Return the weights of the scores, and the networks, for the kernels."""
        networks = shared["center"], shared["scale"], shared["networks"]
        reranker = mixture.Reranker(*networks, self.config.hidden, self.config.reranked)
        return shared["weights"].astype(np.float32), reranker

    def device_form(self, shared: Shared, view: TrainView) -> forms.Ensemble:
        """Return the experts in parts, the weights and the networks."""
        experts = {}
        for expert, model in self.active(shared, view):
            parts = expert.parts(model)
            if parts is None:
                why = "cannot be exported: it has no Expert.parts"
                raise ConfigError(f"expert '{expert.name}' {why}")
            experts[expert.name] = expert.because or expert.name, parts
        weights, (center, scale, networks, hidden, best) = self.reranker(shared)
        reranked = best if self.reranks(shared) else 0
        return forms.Ensemble(experts, weights, center, scale, networks, hidden, reranked)

    def _held_out_counts(self, view: TrainView) -> NDArray[np.int64]:
        """Return the number of held-out items of each client; at least one item is not held out.

        Where items are bought again, they are those of the last basket.
        """
        past = view.positives
        if not view.repeats:
            return np.clip(past.lengths - 1, 0, self.config.held_out)
        last = baskets.last_baskets(view.times.indptr, view.times.values)
        return np.where(last < past.lengths, last, 0)

    def _task_counts(self, view: TrainView, streams: Streams) -> NDArray[np.int64]:
        """Return the number of prediction tasks of each client: none if it was not drawn."""
        most = self.config.basket_items if view.repeats else self.config.held_out
        held = np.minimum(self._held_out_counts(view), most)
        return np.where(self._fits(view, streams), held, 0)

    def _fits(self, view: TrainView, streams: Streams) -> NDArray[np.bool_]:
        """Say which clients are drawn to fit weights and network."""
        if self.config.fit_fraction == 1:
            return np.ones(len(view), np.bool_)
        drawn = draw_each(streams.key("asked"), view.users, np.zeros(len(view), np.int64))
        return np.asarray(drawn < self.config.fit_fraction * 2.0**64)

    def _counting(self, shared: Shared, number: int) -> experts.Counting:
        head = shared.get(HEAD, np.zeros(0, np.bool_))
        return experts.Counting(number - 1, self.config.count_rounds, head)

    def _block(self, n_items: int) -> int:
        """Return the largest number of candidates of a task, the held-out item included."""
        return min(1 + self.config.top_candidates + self.config.random_candidates, n_items)

    def _parts(
        self, clients: NDArray[np.int64], width: int, n_items: int
    ) -> Iterator[tuple[NDArray[np.int64], Scores]]:
        """Yield batches of clients and a buffer for their scores, which is reused: memory that was
        never touched is slow."""
        count = max(1, SCORES_AT_ONCE // (width * n_items))
        buffer = np.empty((min(count, len(clients)), width, n_items), np.float32)
        for some in chunks(clients, count):
            yield some, buffer


def _one_row(has: NDArray[np.int64], rows: NDArray[np.float32]) -> KeyedRows:
    """Return one row for each client that has any tasks, under the only key."""
    return KeyedRows(has, np.zeros(len(rows), np.int64), rows, space=1)


def _named(*names: str) -> Callable[[Shared], Shared]:
    """Return a download of some parameters."""
    return lambda shared: {name: shared[name] for name in names}


def _head(shared: Shared) -> Shared:
    """Send which items are popular, where counting takes several rounds."""
    return {HEAD: shared[HEAD]} if HEAD in shared else {}
