"""Item inference: which items a curious server infers from a client's uploads.

Rounds of a method differ in what they upload, so every kind of round is attacked from its own
state, and the result is that of the kind that reveals most. A kind is a phase of the method, the
layout of its upload, and whether the round sends guidance (`Guided`). The rounds of the run are
replayed for a sample of clients, through the method and the client side of the privacy mechanisms:

* the first round of every kind, after all rounds before it;
* rounds of the phase of the selected model, from that model;
* the first rounds together (at most `TOGETHER`), whose uploads are read one after the other.

The server knows the method, what it sent, and how many items a client has (R); it names R items, so
precision and recall are one number, the R-precision. An upload is laid out by item: rows of tables,
arrays with an axis of items, the items of pair keys; from an array that holds values and not
differences, what was sent is subtracted. The rows that are not zero are the *support*. If they are
R or fewer, they are named; else the R with the highest score by one of three readings:

* *direction*: rows are projected on their leading direction: training moves a client's positives
  one way along its own vector and its negatives the other. The positives are the side whose size is
  nearer to R;
* *size*: the sum of absolute values of a row;
* *support*: in how many rounds the row is not zero; negatives are drawn anew in every round.

Over several rounds scores are summed; ties are broken by direction. The reading that names most is
reported. The items of a silo are those of all its users.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hushrec.aggregation import ExactSum, KeyedRows, Total, Update, UploadShape
from hushrec.api import Run
from hushrec.data.views import TrainView, chunks
from hushrec.evaluation.groups import bootstrap_interval
from hushrec.federation.backends import InProcess
from hushrec.federation.client import Task, take_part
from hushrec.federation.setup import make_task
from hushrec.methods.base import Shared, is_marked
from hushrec.privacy.plan import Plan
from hushrec.privacy.protection import Protection
from hushrec.private import PrivateStore
from hushrec.streams import SecretRound, Streams

TOGETHER = 10
"""Most rounds whose uploads are read together."""
TOGETHER_BYTES = 512 * 2**20
"""Memory for what is summed over those rounds; it bounds the number of clients."""
BATCH_CLIENTS = 256
BATCH_BYTES = 128 * 2**20
POWER_STEPS = 50
RAW, SENT, SUMMED = "raw upload", "protected upload", "sum after the round"
READINGS = ("direction", "size", "support")
NOTHING = "nothing to attack: this method uploads nothing"
NO_ITEMS = "no array of the upload has an entry per item or pair of items"

Table = NDArray[np.float64]
Scores = Mapping[str, NDArray[np.float64]]
"""Of every item, by the name of the reading."""
_Precision = tuple[float, int, float]


@dataclass(frozen=True)
class Kind:
    """Rounds of a run that upload alike."""

    phase: str
    marked: bool
    shape: UploadShape
    rounds: list[int] = field(default_factory=list, compare=False)

    @property
    def uploads(self) -> bool:
        """Whether clients upload anything."""
        return bool(self.shape.entries or self.shape.spaces)

    def names_items(self, shared: Shared) -> bool:
        """Say whether an upload can be laid out by item; ``shared`` gives the public head."""
        n_items, shape = self.shape.n_rows, self.shape
        keyed = (_items_of_keys(keys, shared, n_items) for keys, _ in shape.spaces.values())
        dense = any(n_items in size for size in shape.dense.values())
        return bool(shape.tables) or dense or any(items is not None for items in keyed)

    @property
    def words(self) -> str:
        """The kind in a few words."""
        return f"{self.phase}, with guidance" if self.marked else self.phase

    @property
    def name(self) -> str:
        """The kind by its first round."""
        return f"{self.words}, round {self.rounds[0]}"


def kinds_of(task: Task, rounds: int) -> list[Kind]:
    """Return the kinds of rounds among the first ``rounds`` of a run, in order."""
    found: list[Kind] = []
    for number in range(1, rounds + 1):
        phase, marked = task.method.phase_of(number).name, is_marked(task.method, number)
        shape = task.upload_shape(task.download(number, task.initial))
        kind = Kind(phase, marked, shape)
        if kind not in found:
            found.append(kind)
        found[found.index(kind)].rounds.append(number)
    return found


def item_inference(
    run: Run, plan: Plan, users: int, streams: Streams, on_round: Callable[[int, int], None]
) -> dict[str, Any]:
    """Name the items of about ``users`` clients from what a server sees of them."""
    if run.model.method.traits.pooled:
        return {"skipped": "a centralised baseline: the server has everybody's items already"}
    # Other noise than the run's own, whose key is not kept, and the same for every audit.
    task = make_task(run.experiment, run.split, plan.protection, f"audit {streams.seed}")
    trained = run.summary.rounds
    assert isinstance(trained, int), "of one seed"
    kinds = kinds_of(task, trained)
    if not any(kind.uploads for kind in kinds):
        return {"skipped": NOTHING}
    results = _Attack(run, plan, task, users, streams, on_round).on_kinds(kinds)
    if all("skipped" in result for result in results.values()):
        return {"skipped": f"nothing to attack by item: {NO_ITEMS}"}
    return worst_of(results)


def worst_of(results: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return the result that names most items, with the figures of all."""
    attacked = {name: each for name, each in results.items() if "skipped" not in each}
    phases = {name: each.get("skipped") or _seen_precision(each) for name, each in results.items()}
    worst = max(attacked, key=lambda name: _seen_precision(attacked[name]))
    return {**attacked[worst], "phase": worst, "phases": phases}


def _seen_precision(result: Mapping[str, Any]) -> float:
    """Return how many items the server, or the party that sums, can name from an upload."""
    evidence = result["evidence"]
    return float(evidence.get(SENT, evidence[RAW])["r_precision"])


class _Found:
    """The items named from what is seen of some clients."""

    def __init__(self, view: TrainView, by_popularity: NDArray[np.int64]) -> None:
        self.n_items, self.by_popularity = view.n_items, by_popularity
        self.truths: list[NDArray[Any]] = []
        self.popular: list[float] = []
        self.named: dict[str, dict[str, list[_Precision]]] = {}
        """By what is seen and by reading, one for each client."""

    def add(self, truth: NDArray[Any], seen: Mapping[str, Scores]) -> None:
        """Name as many items of a client as it has, by every reading of what is seen of it."""
        self.truths.append(truth)
        self.popular.append(float(np.isin(self.by_popularity[: len(truth)], truth).mean()))
        for name, scores in seen.items():
            readings = self.named.setdefault(name, {reading: [] for reading in scores})
            for reading, named in readings.items():
                named.append(_precision(named_items(scores, reading, len(truth)), scores, truth))

    def add_sum(self, moved: NDArray[np.float64]) -> None:
        """Name items of all clients from how far a sum over them moved each item."""
        order, scores = np.argsort(-moved, kind="stable"), {"size": moved}
        named = [_precision(order[: len(truth)], scores, truth) for truth in self.truths]
        self.named[SUMMED] = {"size": named}

    def result(self, seen_by: Mapping[str, str], replayed: str) -> dict[str, Any]:
        """Return the means over clients of the best reading of all that is seen."""
        sizes = [len(truth) for truth in self.truths]
        return {
            "replayed": replayed,
            "clients": len(sizes),
            "items_per_client": float(np.mean(sizes)),
            "evidence": {name: _evidence(seen_by[name], self.named[name]) for name in seen_by},
            "chance": float(np.mean([size / self.n_items for size in sizes])),
            "popularity": float(np.mean(self.popular)),
        }


class _Together:
    """Scores of clients, summed over rounds."""

    def __init__(self, users: int, n_items: int) -> None:
        self.most = min(users, max(1, TOGETHER_BYTES // (2 * len(READINGS) * 8 * n_items)))
        self.rounds: list[int] = []
        self.truths: dict[int, NDArray[Any]] = {}
        self.seen: dict[int, dict[str, Scores]] = {}
        self.moved: NDArray[np.float64] | float = 0.0

    def add(self, client: int, truth: NDArray[Any], seen: Mapping[str, Scores]) -> None:
        """Add the scores of a client in one round, as long as there is room for another client."""
        before = self.seen.get(client)
        if before is None and len(self.seen) < self.most:
            self.truths[client], self.seen[client] = truth, dict(seen)
        elif before is not None:
            self.seen[client] = {
                name: {reading: before[name][reading] + each for reading, each in scores.items()}
                for name, scores in seen.items()
            }


@dataclass(frozen=True)
class _Attack:
    run: Run
    plan: Plan
    task: Task
    users: int
    streams: Streams
    on_round: Callable[[int, int], None]

    def on_kinds(self, kinds: Sequence[Kind]) -> dict[str, dict[str, Any]]:
        """Attack every kind of round, in the state that it starts from; return all results."""
        model, shipped = self.run.model, self.run.summary.shipped_round
        readable = [kind for kind in kinds if kind.names_items(self.task.initial)]
        by_first = {kind.rounds[0]: kind for kind in readable}
        last = max([*by_first, TOGETHER])
        early = sorted(number for kind in readable for number in kind.rounds if number <= last)
        attacked = {*by_first, *early[:TOGETHER]}
        # The selected model belongs to one phase; rounds of other phases do not start from it.
        phase = self.task.method.phase_of(max(1, shipped)).name
        from_selected = [
            (kind, next((number for number in kind.rounds if number > shipped), kind.rounds[-1]))
            for kind in readable
            if kind.phase == phase and len(kind.rounds) > 1
        ]
        replayed = max(attacked, default=0)
        steps = replayed + len(from_selected)
        results: dict[str, dict[str, Any]] = {}
        for kind in kinds:
            results[kind.name] = {"skipped": NO_ITEMS if kind.uploads else "uploads nothing"}
        together = _Together(self.users, self._view.n_items)
        for number, shared, private in self._states(replayed):
            if number in attacked:
                state = "from the state that it starts from in training"
                found = self._on_round(number, shared, private, state, together)
                if number in by_first:
                    results[by_first[number].name] = found
            self.on_round(number, steps)
        for done, (kind, number) in enumerate(from_selected, start=replayed + 1):
            state = f"from the model of the selected round {shipped}"
            found = self._on_round(number, model.shared, model.private, state, None)
            results[f"{kind.words}, round {number} from the selected model"] = found
            self.on_round(done, steps)
        if len(together.rounds) > 1:
            results[_listed(together.rounds)] = self._on_rounds(together)
        return results

    def _states(self, rounds: int) -> Iterator[tuple[int, Shared, PrivateStore]]:
        """Train again; yield the shared and private parameters before every round."""
        task, method, view = self.task, self.task.method, self._view
        shared = method.init(view, task.streams)
        fields = method.private_fields(view, shared, task.streams)
        private = PrivateStore(fields, len(view.clients))
        backend, state = InProcess(task, view, private), self.plan.protection.state
        for number in range(1, rounds + 1):
            yield number, shared, private
            if number < rounds:
                cohort = self._cohort(number)
                download = task.download(number, shared, cohort, state)
                protection = task.protection_of(download.to(cohort[:0]))
                summed = backend.train(download, protection, cohort).summed
                total, following = protection.finish(summed, SecretRound(number, task.secret))
                shared = method.phase_of(number).apply(shared, total, number)
                state = following.state

    @cached_property
    def _view(self) -> TrainView:
        view = self.run.split.train_view(self.run.experiment.protocol).prepared()
        return replace(view, noise=self.plan.deviations)

    @cached_property
    def _by_popularity(self) -> NDArray[np.int64]:
        trained = self._view.take(self.run.split.training_users).positives.values
        return np.argsort(-np.bincount(trained, minlength=self._view.n_items), kind="stable")

    def _cohort(self, number: int) -> NDArray[np.int64]:
        """Return the clients of a round, by the run's own draw."""
        clients, experiment = self.run.split.training_clients, self.run.experiment
        drawn = clients[experiment.cohort.draw(len(clients), Streams(experiment.seed), number)]
        return drawn if len(drawn) else clients

    def _seen_by(self, protection: Protection) -> dict[str, str]:
        """Return what is seen of a client, and by whom."""
        seen_by = {RAW: "the server, in privacy mode none"}
        if protection.noising.mechanisms:
            who = "the party that sums, which is trusted, or sums under encryption"
            seen_by[SENT] = who if self.plan.trust == "aggregator" else "the server"
        return {**seen_by, SUMMED: "whoever sees the model before and after"}

    def _on_round(
        self,
        number: int,
        shared: Shared,
        private: PrivateStore,
        description: str,
        together: _Together | None,
    ) -> dict[str, Any]:
        """Attack the uploads of one round that starts from this state; add them to ``together``."""
        task, view, cohort = self.task, self._view, self._cohort(number)
        generator = self.streams.generator("audit/items")
        sample = set(generator.choice(cohort, min(self.users, len(cohort)), replace=False).tolist())
        state = self.plan.protection.state
        protection = task.protection_of(task.download(number, shared, state=state))
        seen_by = self._seen_by(protection)
        found, summed = _Found(view, self._by_popularity), ExactSum(view.n_items)
        most = BATCH_BYTES // (private.bytes_per_user + protection.client_bytes)
        for part in chunks(cohort, max(1, min(most, BATCH_CLIENTS))):
            here, download = view.take_clients(part), task.download(number, shared, part, state)
            raw, sent = (
                take_part(task, side, download, here, private.read(part))[0].update
                for side in (Protection(), protection)
            )
            summed.add(protection.receive(sent, here.clients, number))
            updates = {
                name: each for name, each in {RAW: raw, SENT: sent}.items() if name in seen_by
            }
            for index, client in enumerate(part.tolist()):
                if client in sample:
                    start, end = here.positives.indptr[here.client_indptr[index : index + 2]]
                    truth = np.unique(here.positives.values[start:end])
                    seen = {
                        name: readings(by_item(update, index, shared, here), len(truth))
                        for name, update in updates.items()
                    }
                    found.add(truth, seen)
                    if together is not None:
                        together.add(client, truth, seen)
        total = protection.finish(summed, SecretRound(number, task.secret))[0]
        spaces = {n: rows.space for n, rows in raw.rows.items() if isinstance(rows, KeyedRows)}
        moved = np.linalg.norm(_of_total(total, spaces, shared, view.n_items), axis=1)
        found.add_sum(moved)
        if together is not None:
            together.rounds.append(number)
            together.moved = together.moved + moved
        seed = self.run.experiment.seed
        return found.result(seen_by, f"round {number}, {description}, seed {seed}")

    def _on_rounds(self, together: _Together) -> dict[str, Any]:
        """Attack the uploads of several rounds, read together."""
        found = _Found(self._view, self._by_popularity)
        for client, seen in together.seen.items():
            found.add(together.truths[client], seen)
        found.add_sum(np.asarray(together.moved))
        rounds, seed = _listed(together.rounds), self.run.experiment.seed
        return found.result(self._seen_by(self.plan.protection), f"{rounds}, seed {seed}")


def _listed(rounds: Sequence[int]) -> str:
    """Name rounds that are read together."""
    if list(rounds) == list(range(rounds[0], rounds[-1] + 1)):
        return f"rounds {rounds[0]} to {rounds[-1]} together"
    return f"{len(rounds)} rounds from {rounds[0]} to {rounds[-1]} together"


def _precision(named: NDArray[Any], scores: Scores, truth: NDArray[Any]) -> _Precision:
    """Return the R-precision of one client, the size of the support, and its precision."""
    support = np.flatnonzero(scores["size"])
    right, touched = (len(np.intersect1d(items, truth)) for items in (named, support))
    return right / len(truth), len(support), touched / max(1, len(support))


def _evidence(seen_by: str, named: Mapping[str, list[_Precision]]) -> dict[str, Any]:
    """Return means over clients of the reading that names most, and an interval."""
    of = {reading: np.array(each) for reading, each in named.items()}
    best = max(of, key=lambda reading: float(of[reading][:, 0].mean()))
    precision, support, support_precision = of[best].T
    return {
        "seen_by": seen_by,
        "reading": best,
        "r_precision": float(precision.mean()),
        "interval": list(bootstrap_interval(precision)),
        "support_rows": float(support.mean()),
        "support_precision": float(support_precision.mean()),
    }


def by_item(update: Update, client: int, shared: Shared, view: TrainView) -> Table:
    """Lay one client's upload out by item, [items, width]."""
    n_items, parts = view.n_items, []
    for rows in update.rows.values():
        mine = slice(rows.indptr[client], rows.indptr[client + 1])
        ids, values = rows.ids[mine], rows.rows[mine].astype(np.float64)
        if rows.base is not None:
            values -= rows.base[ids]
        space = rows.space if isinstance(rows, KeyedRows) else None
        parts.append(_rows_by_item(ids, values, space, shared, n_items))
    for array in update.dense.values():
        parts += _axes_by_item(array[client].astype(np.float64), shared, n_items)
    return np.concatenate(parts, axis=1) if parts else np.zeros((n_items, 1))


def _of_total(total: Total, spaces: Mapping[str, int], shared: Shared, n_items: int) -> Table:
    """Lay the sum of a round out by item; ``spaces`` are the numbers of keys of keyed sums."""
    parts = [
        _rows_by_item(ids, summed, spaces.get(name), shared, n_items)
        for name, (ids, summed) in total.rows.items()
    ]
    for array in total.dense.values():
        parts += _axes_by_item(array, {}, n_items)
    return np.concatenate(parts, axis=1) if parts else np.zeros((n_items, 1))


def _items_of_keys(space: int, shared: Shared, n_items: int) -> NDArray[np.int64] | None:
    """Return the items whose pairs, or which themselves, are the keys of a space.

    Keys are items, or pairs i · n + j of the catalogue or of a public head. Keys of another space,
    such as pairs of categories, name no item: None.
    """
    if space in (n_items, n_items**2):
        return np.arange(n_items)
    if "head" in shared and space == np.count_nonzero(shared["head"]) ** 2:
        return np.flatnonzero(shared["head"])
    return None


def _rows_by_item(
    ids: NDArray[Any], rows: Table, space: int | None, shared: Shared, n_items: int
) -> Table:
    """Return rows of a table by item; of keyed rows, the sum of sizes for each item in a key."""
    if space is None:
        table = np.zeros((n_items, rows.shape[1]))
        table[ids] = rows
        return table
    table, sizes = np.zeros((n_items, 1)), np.abs(rows).sum(1)
    items = _items_of_keys(space, shared, n_items)
    if items is not None:
        for each in (ids,) if space == n_items else (ids // len(items), ids % len(items)):
            table[:, 0] += np.bincount(items[each], sizes, minlength=n_items)
    return table


def _axes_by_item(array: NDArray[Any], shared: Shared, n_items: int) -> list[Table]:
    """Lay a dense array out by item, for each of its axes with an entry per item.

    What was sent is taken out of an array that has one such axis; one with two, over pairs of
    items, is laid out by the sums of sizes.
    """
    axes = [axis for axis, size in enumerate(array.shape) if size == n_items]
    if len(axes) == 1:
        rest = _without_what_was_sent(array, shared)
        return [np.moveaxis(rest, axes[0], 0).reshape(n_items, -1)]
    sizes = [np.moveaxis(np.abs(array), axis, 0).reshape(n_items, -1).sum(1) for axis in axes]
    return [each[:, None] for each in sizes]


def _without_what_was_sent(table: NDArray[Any], shared: Shared) -> NDArray[Any]:
    """Take the server's own table out of an upload that is a scaled and changed copy of it."""
    for sent in shared.values():
        if sent.shape == table.shape and sent.any():
            scale = float((sent * table).sum() / (sent * sent).sum(dtype=np.float64))
            rest = table - scale * sent
            if (rest**2).sum() < 0.5 * (table**2).sum():
                return rest
    return table


def readings(table: Table, count: int) -> Scores:
    """Score every item by how probably it is one of a client's ``count`` positives."""
    sizes = np.abs(table).sum(1)
    support = np.flatnonzero(sizes)
    along = sizes.copy()
    if len(support) > count:
        rows = table[support]
        projected = rows @ leading_direction(rows)
        whole = len(support) == len(table)
        up, down = _side(projected, count, whole=whole), _side(-projected, count, whole=whole)
        flip = abs(math.log(down / count)) < abs(math.log(up / count))
        along[support] = -projected if flip else projected
    furthest = np.abs(along).max(initial=0.0)  # rounds count alike
    touched = (sizes > 0).astype(np.float64)
    return {"direction": along / furthest if furthest else along, "size": sizes, "support": touched}


def named_items(scores: Scores, reading: str, count: int) -> NDArray[np.int64]:
    """Name at most ``count`` items of the support: those that a reading scores highest."""
    support = np.flatnonzero(scores["size"])
    order = np.lexsort((-scores["direction"][support], -scores[reading][support]))
    return support[order[:count]]


def _side(along: NDArray[np.float64], count: int, *, whole: bool) -> int:
    """Count the rows on the upper side; of a whole table, without those that hardly moved."""
    furthest = np.partition(along, -count)[-count:]
    middle = float(np.median(furthest)) / 2 if whole else 0.0
    return max(1, int((along > max(0.0, middle)).sum()))


def leading_direction(rows: Table) -> NDArray[np.float64]:
    """Return the direction in which the rows are longest, by power iteration."""
    direction = rows[np.argmax(np.abs(rows).sum(1))]
    for _ in range(POWER_STEPS):
        direction = rows.T @ (rows @ direction)
        direction = direction / np.linalg.norm(direction)
    return np.asarray(direction)
