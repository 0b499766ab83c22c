"""FedMix: experts that are sums, mixed on the device by weights that are sums as well.

Each expert (`methods.experts`) is a model of sums over clients that gives every item a few scores
from a device's own history: what follows what, what keeps company, what is popular, what year or
genre follows what. An item's share in what comes next is taken to be log-linear in the scores,

    P(j | history) ∝ exp( Σ_f w_f · x_f(history, j) ),      j untouched,

so a mixture cannot be much worse than its best expert, and a small network over the same scores
then corrects the order of the best candidates.

**Honest by construction.** A device holds its last ``held`` training items back. Experts are
counted without them; weights and network are fitted to find them; then experts are used as counted
with them. Validation items only tell which round is shipped.

The rounds, and what a device uploads in them:

1. *Count.* Each expert's sums over the history without the held items, and what those add. From
   the first the server learns the experts that are asked, from both together those that are served.
   Of a large catalogue in ``count_rounds`` rounds (`experts.counting`), of all others in one.
2. *Ask.* A device receives the former. For each held item it keeps the scores of that item, of the
   ``best`` untouched items by the experts' starting weights, and of ``others`` drawn from the
   rest, which stand for all of it. This stays on the device. It uploads sums of scores and of
   their squares, for the scales.
3. *Weights*, ``newton_rounds`` rounds: loss, gradient and Hessian at the weights that it is sent;
   the server takes damped Newton steps (`methods.newton`).
4. *Network*, ``network_rounds`` rounds, a device in one of ``turns`` of them: its gradient of the
   network, which the server follows by Adam (FedAdam: Reddi et al. 2021, with one local step).

So a device uploads its pairs once, and then a few kB a round; it downloads the experts twice.

Where noise is added to sums, one expert is left: noise leaves nothing to the others, and weights
would cost budget without finding more (`experiments/privacy-utility/tuning.md`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Annotated, Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from hushrec.aggregation import ClientRows, KeyedRows, Total, Update
from hushrec.config import Width
from hushrec.data.views import Ragged, TrainView, chunks
from hushrec.kernels import experts as kernels
from hushrec.kernels import mixture
from hushrec.kernels.draws import draw_each
from hushrec.methods.base import (
    Between,
    Explains,
    Fitted,
    Method,
    MethodConfig,
    OneOf,
    PerClientRows,
    Phase,
    Private,
    PrivateFields,
    SearchSpace,
    Shared,
    Traits,
    Tunable,
)
from hushrec.methods.shared.optimisers import Adam, first_trial, next_trial
from hushrec.methods.statistics.experts.base import (
    HEAD,
    HELD,
    Counting,
    Expert,
    ExpertsConfig,
    expert_class,
    model_of,
    shortened,
)
from hushrec.methods.statistics.fednext import PrivateFedNext
from hushrec.streams import Round, Streams

QUESTIONS = "questions"
SCORES_AT_ONCE = 2**20
"""Numbers of scores in memory together."""
ONE = np.zeros(0, np.int64)


class FedMixConfig(ExpertsConfig):
    """Options of FedMix."""

    experts: Annotated[tuple[str, ...], Field(min_length=1)] = (
        "following",
        "at-once",
        "company",
        "popular",
        "alike",
    )
    """Who speaks, by the names of `hushrec.experts`; whoever finds nothing to go by stays out."""
    count_rounds: Annotated[int, Field(ge=1)] = 1
    """Rounds that count. With more than one, the first is for items, the second for pairs of the
    ``dense_items`` most popular, the others for the rest: that takes less memory."""
    asked: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Share of the devices, drawn once, that fit weights and network: a few thousand will do."""
    held: Annotated[int, Field(ge=1)] = 2
    """How many of its last training items a device fits weights with."""
    apart: Annotated[int, Field(ge=0)] = 0
    """How many items lie between what a question is asked from and its held item. 0 asks what comes
    next; where items are to be found much later (``split.kind=time``), ask further ahead."""
    best: Annotated[int, Field(ge=1)] = 200
    """Candidates of a held item: the best ones by the starting weights."""
    others: Annotated[int, Field(ge=1)] = 56
    """And how many of the rest, drawn, which stand for all of it."""
    penalty: Annotated[float, Field(gt=0)] = 1e-4
    """Weight of the squared weights in the loss."""
    newton_rounds: Annotated[int, Field(ge=0)] = 6
    """Rounds that fit the weights."""
    network_rounds: Annotated[int, Field(ge=0)] = 40
    """Rounds that fit the network."""
    hidden: Width = 20
    """Width of its two hidden layers."""
    reranked: Annotated[int, Field(ge=2)] = 120
    """Candidates that it puts in order."""
    turns: Annotated[int, Field(ge=1)] = 4
    """A device takes part in one of so many rounds of the network."""
    lr: Annotated[float, Field(gt=0)] = 0.02
    """Rate of Adam."""
    decay: Annotated[float, Field(ge=0)] = 0.01
    """Weight decay of Adam."""


class PrivateFedMix(PrivateFedNext):
    """FedMix under differential privacy: the expert that outweighs the noise, and no other."""

    name = "fedmix"


class FedMix(Method, Explains, Tunable):
    """A log-linear mixture of experts, and a small network over their scores."""

    name = "fedmix"
    Config: ClassVar[type[MethodConfig]] = FedMixConfig
    config: FedMixConfig
    under_noise = PrivateFedMix
    traits = Traits(every=8, exact_sums=True, batch_interactions=2**14)

    @property
    def search(self) -> SearchSpace:
        """How experts and weights are held small, and the network's size and pace."""
        return {
            "ridge": Between(10.0, 1000.0),
            "company_ridge": Between(30.0, 3000.0),
            "held": OneOf((1, 2, 3)),
            "penalty": Between(1e-6, 1e-2),
            "hidden": OneOf((10, 20, 40)),
            "lr": Between(0.005, 0.1),
            "decay": Between(1e-3, 0.1),
        }

    @property
    def phases(self) -> tuple[Phase, ...]:
        """Count, score candidates, fit weights, fit the network."""
        config, weights = self.config, "loss, gradient and Hessian of the weights"
        counts = [("count", 1, "sums of every expert, without the held-out items and with them")]
        if config.count_rounds > 1:
            counts = [
                ("count items", 1, "its items, and sums over them"),
                ("count pairs of popular items", 1, "sums over pairs of popular items"),
                ("count other pairs", config.count_rounds - 2, "sums over some other pairs"),
            ]
        planned = (
            *(Phase(*each, self._fit_counts, self._learn_experts, _head) for each in counts),
            Phase(
                "score candidates",
                1,
                "moments of the scores of its candidates",
                self._fit_candidates,
                self._learn_scales,
                self._asked_experts,
            ),
            Phase(
                "fit weights",
                config.newton_rounds,
                weights,
                self._fit_weights,
                self._learn_weights,
                _named("trial", "scale"),
            ),
            Phase(
                "fit network",
                config.network_rounds,
                "gradient of the network, in one of `turns` rounds",
                self._fit_network,
                self._learn_network,
                _named("weights", "start", "center", "scale", "network"),
            ),
        )
        # Devices score from their history alone: there is nothing to fold in.
        return tuple(replace(phase, personal=False) for phase in planned if phase.rounds)

    # ------------------------------------------------------------ shared and private

    def init(self, view: TrainView, streams: Streams) -> Shared:
        """Start from experts that have counted nothing, and from a network that says nothing."""
        shared: dict[str, Any] = {}
        if self.config.count_rounds > 1:
            shared[HEAD] = np.zeros(view.n_items, np.bool_)
        for expert in self._hearing(view):
            for name, array in expert.init(view).items():
                shared[f"{expert.name}/{name}"] = array
                shared[f"{HELD}{expert.name}/{name}"] = array
        start = np.array(
            [
                expert.start.get(score, 0.0)
                for expert, model in self.speaking(shared)
                for score in expert.scores(model)
            ]
        )
        shared |= {"start": start, "center": np.zeros(len(start) + 1, np.float32)}
        shared |= {"scale": np.ones(len(start) + 1, np.float32), **first_trial(start)}
        inputs, hidden = len(start) + 1, self.config.hidden
        generator = streams.generator("init/network")
        first = generator.standard_normal((inputs, hidden)) / np.sqrt(inputs)
        second = generator.standard_normal((hidden, hidden)) / np.sqrt(hidden)
        rest = np.zeros(hidden)
        parts = (first.ravel(), rest, second.ravel(), rest, rest, np.ones(1))
        network = np.concatenate(parts).astype(np.float32)
        return shared | {"network": network, **Adam.start(network)}

    def private_fields(self, view: TrainView, shared: Shared, streams: Streams) -> PrivateFields:
        """Keep the scores of the candidates of each held item."""
        capacity = self._asked(view, streams) * self._block(view.n_items)
        return {QUESTIONS: PerClientRows(capacity, len(shared["center"]) + 1)}

    def _asked_experts(self, shared: Shared) -> Shared:
        """Send the experts that do not know the held-out items, and what they weigh."""
        held = {name: array for name, array in shared.items() if name.startswith(HELD)}
        return {"weights": shared["weights"], **held}

    def serving(self, shared: Shared) -> Shared:
        """Leave out the experts that are only asked, and all that only the server needs."""
        own = ("center", "scale", "weights", "network")
        return {
            name: array
            for name, array in shared.items()
            if name in own or ("/" in name and not name.startswith((HELD, "adam/")))
        }

    # ------------------------------------------------------------ on the devices

    def _fit_counts(self, shared: Shared, private: Private, view: TrainView, now: Round) -> Fitted:
        held, counting = self._held(view.positives), self._counting(shared, now.number)
        rows = counting.count(self._hearing(view), view, held)
        return Fitted(Update(len(view), rows=rows), private)

    def _fit_candidates(
        self, shared: Shared, private: Private, view: TrainView, now: Round
    ) -> Fitted:
        kept = self._questions(shared, view, now)
        moments = mixture.score_moments(kept.indptr, kept.rows, self._block(view.n_items))
        rows = {"moments": _one_each(*moments)}
        return Fitted(Update(len(view), rows=rows), {QUESTIONS: kept})

    def _fit_weights(self, shared: Shared, private: Private, view: TrainView, now: Round) -> Fitted:
        asked, block = _rows(private), self._block(view.n_items)
        weights, scale = shared["trial"].astype(np.float32), shared["scale"]
        sums = mixture.newton_sums(asked.indptr, asked.rows, block, weights, scale)
        return self._fitted({"newton": _one_each(*sums)}, asked, now)

    def _fit_network(self, shared: Shared, private: Private, view: TrainView, now: Round) -> Fitted:
        asked, block = _rows(private), self._block(view.n_items)
        mine = draw_each(now.streams.key("turns"), view.users, np.zeros(len(view), np.int64))
        turn = (mine + np.uint64(now.number - 1)) % np.uint64(self.config.turns) == 0
        weights, *network = self.network(shared)
        both = np.stack([weights, (shared["start"] * shared["scale"][:-1]).astype(np.float32)])
        sums = mixture.network_sums(asked.indptr, asked.rows, block, turn, both, *network)
        return self._fitted({"network": _one_each(*sums)}, asked, now)

    def _fitted(self, rows: dict[str, KeyedRows], asked: ClientRows, now: Round) -> Fitted:
        """Keep the scores of the candidates, until nothing will be asked of them again."""
        clients = len(asked.indptr) - 1
        if now.number >= self.planned_rounds:
            nothing = np.zeros(clients + 1, np.int64)
            asked = ClientRows(nothing, asked.ids[:0], asked.rows[:0])
        return Fitted(Update(clients, rows=rows), {QUESTIONS: asked})

    def _questions(self, shared: Shared, view: TrainView, now: Round) -> ClientRows:
        """Score the candidates of every held item with the experts that do not know it."""
        held, block = self._asked(view, now.streams), self._block(view.n_items)
        width = len(shared["weights"]) + 1
        rows = np.zeros((held.sum() * block, width + 1), np.float32)
        rows[:, width] = mixture.NONE
        indptr = np.concatenate([[0], np.cumsum(held) * block])
        for back in range(1, int(held.max(initial=0)) + 1):
            asked = np.flatnonzero(held >= back)
            key = now.streams.key("candidates", back)
            for some, room in self._parts(asked, width - 1, view.n_items):
                mine = view.take(some)
                before = mine.positives.lengths - back
                earlier = shortened(mine, back + np.minimum(self.config.apart, before - 1))
                scores = self._scores(shared, earlier, HELD, room)
                prior = np.zeros((len(mine), view.n_items), np.float32)
                mixture.weigh(scores, shared["weights"].astype(np.float32), prior)
                for c in range(len(mine)):
                    items, past = mine.positives[c], earlier.positives[c]
                    found, log_weights = kernels.choose_candidates(
                        prior[c],
                        items[:-back],
                        items[-back],
                        self.config.best,
                        self.config.others,
                        key,
                        int(mine.users[c]),
                    )
                    start = indptr[some[c]] + (back - 1) * block
                    here = rows[start : start + len(found)]
                    here[:, : width - 1] = scores[c][:, found].T
                    here[:, width - 1] = np.log(len(past))
                    here[:, width] = log_weights
        ids = np.concatenate([np.arange(n * block) for n in held] or [ONE]).astype(np.int32)
        return ClientRows(indptr, ids, rows)

    # ------------------------------------------------------------ on the server

    def _learn_experts(self, shared: Shared, total: Total, number: int) -> Shared:
        """Learn the experts, and which items are popular."""
        counting = self._counting(shared, number)
        learnt = counting.learn(self.speaking(shared), shared, total)
        return {**shared, **learnt, **counting.most_popular(total, self.config.dense_items)}

    def _learn_scales(self, shared: Shared, total: Total, number: int) -> Shared:
        """Standardise the scores; the experts without the held-out items have done their work."""
        kept = {name: array for name, array in shared.items() if not name.startswith(HELD)}
        if "moments" not in total.rows:
            return kept
        _, ((count, *sums),) = total.rows["moments"]
        center, square = np.array(sums).reshape(2, -1) / max(count, 1e-6)
        spread = np.sqrt(np.maximum(square - center**2, 0.0))
        # A score that is the same for everybody tells nothing, and must not be blown up.
        scale = np.where(spread > 1e-6, spread, 1.0).astype(np.float32)
        kept |= {"center": center.astype(np.float32), "scale": scale}
        return {**kept, **first_trial(shared["weights"] * scale[:-1])}

    def _learn_weights(self, shared: Shared, total: Total, number: int) -> Shared:
        """Take a damped Newton step."""
        if "newton" not in total.rows:
            return shared
        sums = total.rows["newton"][1][0]
        return {**shared, **next_trial(shared, sums, self.config.penalty)}

    def _learn_network(self, shared: Shared, total: Total, number: int) -> Shared:
        """Take a step of Adam; the rate falls in the second half, so that the last steps settle."""
        if "network" not in total.rows:
            return shared
        questions, _, *gradient = total.rows["network"][1][0]
        left = (self.planned_rounds + 1 - number) / self.config.network_rounds
        adam = Adam(self.config.lr * min(1.0, 2 * left), self.config.decay)
        return {**shared, **adam.step(shared, np.array(gradient) / max(questions, 1.0))}

    # ------------------------------------------------------------ scoring

    def score(self, shared: Shared, private: Private, history: TrainView) -> NDArray[np.float32]:
        """Mix what the experts say, and let the network put the best in order."""
        out = np.zeros((len(history), history.n_items), np.float32)
        weights, center, scale, network, hidden, best = self.network(shared)
        everybody = np.arange(len(history))
        for some, room in self._parts(everybody, len(weights), history.n_items):
            mine = history.take(some)
            scores = self._scores(shared, mine, "", room)
            mixed = np.zeros((len(mine), history.n_items), np.float32)
            mixture.weigh(scores, weights / scale[:-1], mixed)
            if self.reranks(shared):
                lengths = np.log(np.maximum(mine.positives.lengths, 1)).astype(np.float32)
                past = mine.positives
                mixture.rerank(
                    mixed,
                    scores,
                    lengths,
                    past.indptr,
                    past.values,
                    center,
                    scale,
                    network,
                    hidden,
                    best,
                )
            out[some] = mixed
        return out

    def voices(
        self, shared: Shared, history: TrainView, items: NDArray[np.int32]
    ) -> list[list[str]]:
        """Name the expert whose scores lift each item most above the mean item."""
        weights = shared["weights"] / shared["scale"][:-1]
        out: list[list[str]] = []
        for client in range(len(history)):
            alone = history.take(np.array([client]))
            room = np.zeros((1, len(weights), history.n_items), np.float32)
            scores = self._scores(shared, alone, "", room)[0]
            said = weights[:, None] * (scores - scores.mean(axis=1, keepdims=True))
            speaking, end = self.speaking(shared), 0
            lifts = np.zeros((len(speaking), items.shape[1]))
            for n, (expert, model) in enumerate(speaking):
                size = len(expert.scores(model))
                lifts[n] = said[end : end + size, items[client]].sum(axis=0)
                end += size
            out.append([speaking[n][0].name for n in lifts.argmax(axis=0)])
        return out

    # ------------------------------------------------------------ what several of these use

    def _experts(self) -> list[Expert]:
        return [expert_class(name)(self.config) for name in self.config.experts]

    def _hearing(self, view: TrainView) -> list[Expert]:
        return [expert for expert in self._experts() if expert.hears(view)]

    def speaking(self, shared: Shared, prefix: str = "") -> list[tuple[Expert, Shared]]:
        """Return the experts that the shared parameters have models of, and those."""
        found: list[tuple[Expert, Shared]] = []
        for expert in self._experts():
            model = model_of(shared, f"{prefix}{expert.name}/")
            if model:
                found.append((expert, model))
        return found

    def _scores(
        self, shared: Shared, view: TrainView, prefix: str, room: NDArray[np.float32]
    ) -> NDArray[np.float32]:
        """Return what all experts say, in this room: [clients, scores, items]."""
        speaking = self.speaking(shared, prefix)
        sizes = [len(expert.scores(model)) for expert, model in speaking]
        out, end = room[: len(view)], 0
        out[:] = 0
        for (expert, model), size in zip(speaking, sizes, strict=True):
            expert.score(model, view, out[:, end : end + size])
            end += size
        return out

    def reranks(self, shared: Shared) -> bool:
        """Say whether the network has learnt anything: its output starts from zero weights."""
        return bool(shared["network"][-1 - self.config.hidden : -1].any())

    def network(self, shared: Shared) -> tuple[Any, ...]:
        """Return what the network's kernels take: weights, scales, and the network."""
        weights = shared["weights"].astype(np.float32)
        network = shared["center"], shared["scale"], shared["network"]
        return weights, *network, self.config.hidden, self.config.reranked

    def _held(self, past: Ragged) -> NDArray[np.int64]:
        """Return how many items each client holds back: one at least stays."""
        return np.clip(past.lengths - 1, 0, self.config.held)

    def _asked(self, view: TrainView, streams: Streams) -> NDArray[np.int64]:
        """Return how many questions each client has: its held items, or none if not drawn."""
        held = self._held(view.positives)
        if self.config.asked == 1:
            return held
        drawn = draw_each(streams.key("asked"), view.users, np.zeros(len(view), np.int64))
        return np.where(drawn < self.config.asked * 2.0**64, held, 0)

    def _counting(self, shared: Shared, number: int) -> Counting:
        """Return what a round counts."""
        head = shared.get(HEAD, np.zeros(0, np.bool_))
        return Counting(number - 1, self.config.count_rounds, head)

    def _block(self, n_items: int) -> int:
        """Return the most candidates that a held item has, itself included."""
        return min(1 + self.config.best + self.config.others, n_items)

    def _parts(
        self, clients: NDArray[np.int64], width: int, n_items: int
    ) -> Iterator[tuple[NDArray[np.int64], NDArray[np.float32]]]:
        """Yield clients that are scored together, and room for their scores, which is used again:
        memory that was never touched is slow."""
        count = max(1, SCORES_AT_ONCE // (width * n_items))
        room = np.empty((min(count, len(clients)), width, n_items), np.float32)
        for some in chunks(clients, count):
            yield some, room


def _one_each(has: NDArray[np.int64], rows: NDArray[np.float32]) -> KeyedRows:
    """Return one row for each client that has something to say, under the only key."""
    return KeyedRows(has, np.zeros(len(rows), np.int64), rows, space=1)


def _rows(private: Private) -> ClientRows:
    """Return the scores of each client's candidates."""
    rows = private[QUESTIONS]
    assert isinstance(rows, ClientRows)
    return rows


def _named(*names: str) -> Callable[[Shared], Shared]:
    """Return a download of some parameters."""
    return lambda shared: {name: shared[name] for name in names}


def _head(shared: Shared) -> Shared:
    """Send which items are popular, where counting takes several rounds."""
    return {HEAD: shared[HEAD]} if HEAD in shared else {}
