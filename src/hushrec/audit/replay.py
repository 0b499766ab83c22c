"""Replay: the run's own loop is played again and watched, with some of its users.

Canaries and soundness test the mechanism by itself. A defect may also lie around it: in the
client after the clip, in the loop, in the method. So `run_rounds` is played in three worlds:

* **A**: some of the run's users;
* **B**: the same without anybody's data, with the same noise; every sum is replaced by that which A
  released. Whatever the server makes of it must be the same bits: nothing else may reach it;
* **C**: as A, with another key, as another run has it.

In A and B some clients are trained alone. Without data they send nothing (or only their noise), and
with data no more than the bound further; validation scores are made up and fall, so that a choice
by them would ship the first round.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from itertools import combinations
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hushrec.aggregation import (
    RANK_BINS,
    STEPS,
    STEPS_PER_UNIT,
    Evaluation,
    ExactSum,
    Tally,
    Total,
)
from hushrec.data.splitting import Part, Split
from hushrec.data.views import Ragged
from hushrec.federation.backends import Collected, Machine, Simulation
from hushrec.federation.client import Download
from hushrec.federation.experiment import Experiment
from hushrec.federation.rounds import Callback, EvaluationRecord, run_rounds
from hushrec.federation.setup import SimulationSetup, set_up
from hushrec.io.codec import Arrays
from hushrec.methods.base import Shared
from hushrec.privacy.budgets import WEIGHT
from hushrec.privacy.clipping import BIT
from hushrec.privacy.plan import Plan
from hushrec.privacy.protection import Protection
from hushrec.streams import SecretRound, Streams

MOST_USERS, MOST_ROUNDS = 40, 30
"""Users and rounds of a replay; methods that plan their rounds keep them."""
ALONE, ALONE_ROUNDS = 8, 3
"""Clients that are trained alone, and first rounds in which they are."""
WINDOW, FEWEST = 2**14, 200
"""Numbers of an array that are compared, and fewest whose correlation says something."""
LARGEST_CORRELATION = 0.5
"""Of 200 independent numbers a larger one has a probability of 10^-13."""

Numbers = Mapping[str, NDArray[np.int64]]
"""Whole steps by array."""


@dataclass
class Log:
    """What was seen of one replay."""

    forced: Mapping[int, tuple[Total, Mapping[str, float]]] | None = None
    """Releases that take the place of the own ones."""
    released: dict[int, tuple[Total, Mapping[str, float]]] = field(default_factory=dict)
    noise: dict[int, Numbers] = field(default_factory=dict)
    """What was added to the sum of each round, in steps."""
    cohorts: dict[int, list[int]] = field(default_factory=dict)
    alone: dict[tuple[int, int], Numbers] = field(default_factory=dict)
    """The sum of one client alone, by round and client."""
    bounds: dict[int, float] = field(default_factory=dict)
    """Largest norm of an upload in each round, where one is claimed."""
    shared: dict[int, Shared] = field(default_factory=dict)
    """The server's parameters after each round."""
    queries: dict[int, float] = field(default_factory=dict)
    """The noised validation value of each round, where queries select."""
    selected: int = 0
    rounds: int = 0


@dataclass(frozen=True)
class WatchedProtection(Protection):
    """A protection whose sums are seen before and after their noise."""

    log: Log = field(default_factory=Log, compare=False)

    def finish(
        self, summed: ExactSum, secret: SecretRound, *, shared: bool = False
    ) -> tuple[Total, Protection]:
        """Finish as always, and keep what was added; a forced release takes its place."""
        before, seen = _beginning(summed), _SeenSum(summed.n_rows)
        seen.merge(summed)
        total, following = super().finish(seen, secret, shared=shared)
        number = len(self.log.released) + 1  # whatever number the streams were given
        self.log.noise[number] = _added(before, seen.steps)
        self.log.released[number] = total, following.state
        if self.log.forced is not None:
            total, state = self.log.forced[number]
            return total, following.with_state(state)
        return total, following


class _SeenSum(ExactSum):
    steps: Numbers

    def total(self) -> Total:
        self.steps = _beginning(self)
        return super().total()


class WatchedClients:
    """A backend that notes cohorts, trains some clients alone, and makes up falling scores."""

    def __init__(
        self,
        clients: Simulation,
        log: Log,
        watched: NDArray[np.int64],
        metrics: Mapping[str, list[str]],
    ) -> None:
        """``metrics`` are the reported ones by candidate set."""
        self.clients, self.log, self.watched, self.metrics = clients, log, watched, metrics
        self.evaluations = 0

    def train(
        self, download: Download, protection: Protection, cohort: NDArray[np.int64]
    ) -> Collected:
        """Train the watched ones alone, put their parameters back, then train the cohort."""
        number, clients = download.round, self.clients
        self.log.cohorts[number] = cohort.tolist()
        norm = protection.norm_of(number)
        acts = bool(protection.acting(number))
        if acts and norm is None:  # local noise is added to what was clipped
            norm = replace(protection, mechanisms=protection.mechanisms[:-1]).norm_of(number)
        if norm is not None:
            self.log.bounds[number] = norm
        watched = np.intersect1d(self.watched, cohort) if acts else cohort[:0]
        for client in watched if number <= ALONE_ROUNDS else cohort[:0]:
            alone, kept = np.array([client]), clients.store.snapshot(None)
            own = download.to(np.searchsorted(cohort, alone))
            summed = clients.train(own, protection, alone).summed
            # Weights of personal budgets carry no noise: the server knows them.
            sent = {name: array for name, array in _sent(summed).items() if name != WEIGHT}
            self.log.alone[number, int(client)] = sent
            clients.store = kept
        return clients.train(download, protection, cohort)

    def evaluate(self, serving: Shared, part: Part, *, selected: bool = False) -> Evaluation:
        """Return scores that fall from evaluation to evaluation."""
        self.evaluations += 1
        users, score = len(self.watched), STEPS // (1 + self.evaluations)
        counts = np.zeros(RANK_BINS, np.int64)
        return Evaluation(
            {
                candidates: Tally(users, dict.fromkeys(names, users * score), counts)
                for candidates, names in self.metrics.items()
            }
        )

    def keep_selected(self) -> None:
        """Nothing is kept."""

    def save(self, *, selected: bool) -> Iterator[Arrays]:
        """Yield nothing: there is no checkpoint."""
        return iter(())

    def load(self, parts: Iterable[Arrays], *, selected: bool) -> None:
        """Put nothing back."""


class _Listener(Callback):
    def __init__(self, log: Log) -> None:
        self.log = log

    def on_evaluation(self, evaluation: EvaluationRecord) -> None:
        self.log.shared[evaluation.round] = dict(evaluation.shared)
        if evaluation.noised is not None:
            self.log.queries[evaluation.round] = evaluation.noised


def replay(experiment: Experiment, split: Split, streams: Streams) -> dict[str, Any]:
    """Play the loop of a run in three worlds, and return what was played and the problems."""
    experiment, split = _smaller(experiment, split, streams)
    first = set_up(experiment, split)
    without = set_up(experiment, _emptied(split))
    # The same plan and the same noise; of the data nothing is left.
    task = replace(without.task, protection=first.task.protection, secret=first.task.secret)
    other = set_up(experiment, split)
    real = _play(first, Log())
    empty = _play(replace(without, plan=first.plan, task=task), Log(forced=real.released))
    again = _play(other, Log())
    problems = [
        *_problems_of_noise(real, again, empty),
        *_problems_of_cohorts(experiment, real, again),
        *_problems_of_uploads(first.plan, real, empty),
        *_problems_of_release(first.plan, real, empty),
    ]
    return {
        "rounds": real.rounds,
        "clients": len(first.clients),
        "uploads": len(real.alone),
        "problems": problems,
    }


def _smaller(experiment: Experiment, split: Split, streams: Streams) -> tuple[Experiment, Split]:
    """Return an experiment of few rounds, and the split of few users, the most active included."""
    if split.holders is None and split.n_users > MOST_USERS:
        drawn = streams.generator("audit/replay").permutation(split.members)
        active = split.members[np.argsort(-split.train.positives.lengths[split.members])]
        users = np.concatenate([active[: ALONE // 2], drawn])
        _, order = np.unique(users, return_index=True)
        split = split.take(np.sort(users[np.sort(order)][:MOST_USERS]))
        numbers = np.arange(split.n_users, dtype=np.int32)  # they are the whole population
        split = replace(split, train=replace(split.train, users=numbers))
    clients = len(split.member_clients)
    cohort, method = experiment.cohort, experiment.make_method()
    if cohort.kind == "poisson":
        cohort = cohort.model_copy(update={"probability": 0.5})
    elif cohort.kind == "fixed":
        cohort = cohort.model_copy(update={"size": max(1, clients // 2)})
    planned = method.budget_shares or len(method.phases) > 1
    rounds = experiment.rounds if planned else min(experiment.rounds, MOST_ROUNDS)
    evaluation = experiment.evaluation.model_copy(update={"every": 1, "patience": None, "users": 0})
    privacy = experiment.privacy.model_copy(update={"noise_seed": None})
    changed = {"cohort": cohort, "rounds": rounds, "evaluation": evaluation, "privacy": privacy}
    return experiment.model_copy(update=changed), split


def _emptied(split: Split) -> Split:
    """Return the split without anybody's rows."""
    n, train = split.n_users, split.train
    return replace(
        split,
        data=split.data.select(np.zeros(len(split.data), np.bool_)),
        train=replace(
            train,
            positives=Ragged.empty(n),
            times=Ragged.empty(n, np.int64),
            values=Ragged.empty(n, np.float32),
        ),
        valid=Ragged.empty(n),
        test=Ragged.empty(n),
        disliked=Ragged.empty(n),
        training_users=split.training_users[:0],
    )


def _play(setup: SimulationSetup, log: Log) -> Log:
    given = setup.task.protection
    parts = {part.name: getattr(given, part.name) for part in fields(given)}
    task = replace(setup.task, protection=WatchedProtection(**parts, log=log))
    training, state = replace(setup, task=task).start(Machine(threads=1))
    experiment = setup.experiment
    lengths = np.diff(setup.view.positives.indptr[setup.view.client_indptr])[setup.clients]
    watched = setup.clients[np.argsort(-lengths, kind="stable")[:ALONE]]
    metrics = experiment.evaluation.reported(experiment.split.next_basket)
    backend: Any = WatchedClients(training.backend, log, np.sort(watched), metrics)
    run_rounds(replace(training, backend=backend), state, [_Listener(log)])
    log.selected, log.rounds = state.selected_round, state.round
    return log


# ------------------------------------------------------------ what must hold


def _problems_of_noise(real: Log, again: Log, empty: Log) -> Iterator[str]:
    """Noise neither repeats in another round nor in another run."""
    sources: list[tuple[str, dict[int, Numbers]]] = [("sum", real.noise)]
    for client in sorted({client for _, client in empty.alone}):
        mine = {number: sent for (number, who), sent in empty.alone.items() if who == client}
        sources.append(("upload of one client", mine))
    for what, by_round in sources:
        for (one, first), (two, second) in combinations(sorted(by_round.items()), 2):
            for name in _alike(first, second):
                yield (
                    f"replay: the noise on '{name}' in the {what} of round {one} is used again in "
                    f"round {two}"
                )
    for number, first in real.noise.items():
        for name in _alike(first, again.noise.get(number, {})):
            yield f"replay: two runs have the same noise on '{name}' in round {number}"
    for place, sent in real.alone.items():
        # Under local noise; two honest uploads of the same data have only the data in common.
        if place in empty.alone and _loud(empty.alone[place]):
            for name in _alike(sent, again.alone.get(place, {}), exactly=True):
                yield f"replay: two runs have the same noise on '{name}' of a client's upload"


def _problems_of_cohorts(experiment: Experiment, real: Log, again: Log) -> Iterator[str]:
    """Cohorts are drawn from the key of the run."""
    if experiment.cohort.kind != "all" and real.cohorts == again.cohorts:
        yield (
            "replay: two runs have the same cohorts, so who takes part follows from public "
            "numbers, and sampling amplifies nothing"
        )


def _problems_of_uploads(plan: Plan, real: Log, empty: Log) -> Iterator[str]:
    """Clients without data send nothing, and others move a sum by no more than the bound."""
    for (number, client), sent in real.alone.items():
        without = empty.alone.get((number, client))
        if without is None:
            continue
        if plan.trust != "nobody" and any(array.any() for array in without.values()):
            yield f"replay: a client without data uploads something in round {number}"
        bound = real.bounds.get(number)
        if bound is None:
            continue
        squares = bit = 0.0
        for name, array in sent.items():
            noise = without[name] if plan.trust == "nobody" else 0  # which is the same in both
            moved = (array - noise) / STEPS_PER_UNIT
            if name == BIT:
                bit = float(np.abs(moved).sum())
            else:
                squares += float((moved**2).sum())
        # Under local noise uploads travel in 32 bits, whose rounding does not cancel.
        largest = max((float(np.abs(a).max(initial=0)) for a in sent.values()), default=0.0)
        slack = 1e-6 + 2.0**-22 * largest / STEPS_PER_UNIT * sum(map(np.size, sent.values())) ** 0.5
        if np.sqrt(squares) > bound * (1 + 1e-6) + (slack if plan.trust == "nobody" else 0.0):
            yield (
                f"replay: a client's upload in round {number} moves the sum by "
                f"{np.sqrt(squares):.4g}, where {bound:.4g} is claimed"
            )
        if bit > 0.5 + 1e-9:
            yield f"replay: a client's bit in round {number} moves the count by {bit:.3g}"


def _problems_of_release(plan: Plan, real: Log, empty: Log) -> Iterator[str]:
    """What the server keeps follows from what was released, and so does the shipped round."""
    for number, shared in real.shared.items():
        beside = empty.shared.get(number, {})
        for name, array in shared.items():
            if name not in beside or array.tobytes() != beside[name].tobytes():
                yield (
                    f"replay: '{name}' after round {number} is not a function of the released "
                    "sums: data reach it on another way"
                )
    if plan.validation_queries is None:
        if real.selected != real.rounds or real.rounds != plan.rounds:
            yield (
                f"replay: round {real.selected} of {plan.rounds} is shipped, chosen by validation "
                "items without noise"
            )
    elif real.selected != max(real.queries, key=lambda number: real.queries[number], default=0):
        yield f"replay: round {real.selected} is shipped, which no noised validation query chose"


def _sent(summed: ExactSum) -> Numbers:
    """Return the numbers of a sum, in steps: those of touched rows, and of dense arrays."""
    arrays = {name.partition("/"): array for name, array in summed.to_arrays().items()}
    return {name: a.reshape(-1).copy() for (kind, _, name), a in arrays.items() if kind != "ids"}


def _beginning(summed: ExactSum) -> Numbers:
    """Return the first numbers of every array of a sum, in steps."""
    arrays, found = summed.to_arrays(), dict[str, NDArray[np.int64]]()
    for name, array in arrays.items():
        kind, _, own = name.partition("/")
        if kind == "dense":
            found[own] = array.reshape(-1)[:WINDOW].copy()
        elif kind == "rows":
            first, width = arrays[f"ids/{own}"], array.shape[1]
            found[own] = np.zeros(WINDOW, np.int64)
            near = first < WINDOW // width
            found[own][: WINDOW // width * width].reshape(-1, width)[first[near]] = array[near]
    return found


def _added(before: Numbers, after: Numbers) -> Numbers:
    return {name: array - before.get(name, 0) for name, array in after.items()}


def _loud(numbers: Numbers) -> bool:
    return any(array.any() for array in numbers.values())


def _alike(one: Numbers, two: Numbers, *, exactly: bool = False) -> Iterator[str]:
    """Yield the arrays that are the same, or nearly so but for their scale."""
    for name in sorted(one.keys() & two.keys()):
        a, b = (array[:WINDOW].astype(np.float64) for array in (one[name], two[name]))
        if a.shape != b.shape or not a.any() or not b.any():
            continue
        same = np.array_equal(a, b)
        if not exactly and a.size >= FEWEST:
            same = same or abs(float(np.corrcoef(a, b)[0, 1])) > LARGEST_CORRELATION
        if same:
            yield name
