"""Item inference: which items a curious server infers from one client's upload.

For each phase of the method, one round is replayed for a sample of clients, through the method and
the client side of the privacy mechanisms, as in training. A method with one phase is replayed from
the run's selected model. Of a method with several, the first round of each phase is replayed, after
all rounds before it. The result is that of the phase that reveals most.

The server knows the method, what it sent, and how many items a client has (R); it names R items, so
precision and recall are one number, the R-precision. The attack on an upload:

1. lay it out by item: rows of tables, arrays with an entry per item, the items of pair keys; from
   an array that holds values and not differences, what was sent is subtracted;
2. the rows that are not zero are the *support*. If they are R or fewer, name them;
3. else project the rows on their leading direction: training moves a client's positives one way
   along its own vector and its negatives the other. The positives are the side whose size is
   nearer to R. Name the R furthest out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hushrec.aggregation import ExactSum, KeyedRows, Total, Update
from hushrec.api import Run
from hushrec.data.views import TrainView, chunks
from hushrec.evaluation.groups import bootstrap_interval
from hushrec.federation.backends import InProcess
from hushrec.federation.client import Task, take_part
from hushrec.federation.setup import make_task
from hushrec.methods.base import Shared
from hushrec.privacy.plan import Plan
from hushrec.privacy.protection import Protection
from hushrec.private import PrivateStore
from hushrec.streams import SecretRound, Streams

BATCH_CLIENTS = 256
BATCH_BYTES = 128 * 2**20
POWER_STEPS = 50
RAW, SENT, SUMMED = "raw upload", "protected upload", "sum after the round"
NOTHING = "nothing to attack: this method uploads nothing"

Table = NDArray[np.float64]


def item_inference(
    run: Run, plan: Plan, users: int, streams: Streams, on_client: Callable[[int, int], None]
) -> dict[str, Any]:
    """Name the items of about ``users`` clients from what a server sees of them."""
    method = run.model.method
    if method.traits.pooled:
        return {"skipped": "a centralised baseline: the server has everybody's items already"}
    # Other noise than the run's own, whose key is not kept, and the same for every audit.
    task = make_task(run.experiment, run.split, plan.protection, f"audit {streams.seed}")
    attack = _Attack(run, plan, task, users, streams, on_client)
    if len(method.phases) == 1:
        number = attacked_round(run)
        if number is None:
            return {"skipped": NOTHING}
        selected = f"from the model of the selected round {run.summary.selected_round}"
        return attack.on_round(number, run.model.shared, run.model.private, selected)
    results, number = {}, 1
    for phase in method.phases:
        if number <= run.experiment.rounds:
            results[phase.name] = attack.on_phase(number)
        number += phase.rounds
    attacked = {name: each for name, each in results.items() if "skipped" not in each}
    if not attacked:
        return {"skipped": NOTHING}
    phases = {name: each.get("skipped") or _seen_precision(each) for name, each in results.items()}
    worst = max(attacked, key=lambda name: _seen_precision(attacked[name]))
    return {**attacked[worst], "phase": worst, "phases": phases}


def _seen_precision(result: Mapping[str, Any]) -> float:
    """Return how many items the server, or the party that sums, can name from an upload."""
    evidence = result["evidence"]
    return float(evidence.get(SENT, evidence[RAW])["r_precision"])


@dataclass(frozen=True)
class _Attack:
    run: Run
    plan: Plan
    task: Task
    users: int
    streams: Streams
    on_client: Callable[[int, int], None]

    def on_phase(self, number: int) -> dict[str, Any]:
        """Attack the first round of a phase, after the rounds before it."""
        task, n_items = self.task, self.run.split.data.n_items
        shape = task.upload_shape(task.download(number, task.initial))
        if not shape.entries and not shape.spaces:
            return {"skipped": NOTHING}
        by_item = any(size and size[0] == n_items for size in shape.dense.values())
        named = [_items_of_keys(keys, task.initial, n_items) for keys, _ in shape.spaces.values()]
        if not shape.tables and not by_item and all(items is None for items in named):
            return {"skipped": "no array of its upload has an entry per item or pair of items"}
        shared, private = self._state_before(number)
        phase = f"phase '{task.method.phase_of(number).name}', from the state it starts from"
        return self.on_round(number, shared, private, phase)

    def _state_before(self, number: int) -> tuple[Shared, PrivateStore]:
        """Replay the rounds before one; return the shared and private parameters."""
        task, method, view = self.task, self.task.method, self._view()
        shared = method.init(view, task.streams)
        fields = method.private_fields(view, shared, task.streams)
        private = PrivateStore(fields, len(view.clients))
        backend, state = InProcess(task, view, private), self.plan.protection.state
        for played in range(1, number):
            cohort = self._cohort(played)
            download = task.download(played, shared, cohort, state)
            protection = task.protection_of(download.to(cohort[:0]))
            summed = backend.train(download, protection, cohort).summed
            total, following = protection.finish(summed, SecretRound(played, task.secret))
            shared = method.phase_of(played).apply(shared, total, played)
            state = following.state
        return shared, private

    def _view(self) -> TrainView:
        view = self.run.split.train_view(self.run.experiment.protocol).prepared()
        return replace(view, noise=self.plan.deviations)

    def _cohort(self, number: int) -> NDArray[np.int64]:
        """Return the clients of a round, by the run's own draw."""
        clients, experiment = self.run.split.training_users, self.run.experiment
        drawn = clients[experiment.cohort.draw(len(clients), Streams(experiment.seed), number)]
        return drawn if len(drawn) else clients

    def on_round(
        self, number: int, shared: Shared, private: PrivateStore, description: str
    ) -> dict[str, Any]:
        """Attack the uploads of one round that starts from this state."""
        task, view, cohort = self.task, self._view(), self._cohort(number)
        generator = self.streams.generator("audit/items")
        sample = set(generator.choice(cohort, min(self.users, len(cohort)), replace=False).tolist())
        trained = view.take(self.run.split.training_users).positives.values
        by_popularity = np.argsort(-np.bincount(trained, minlength=view.n_items), kind="stable")

        state = self.plan.protection.state
        protection = task.protection_of(task.download(number, shared, state=state))
        seen_by = {RAW: "the server, in privacy mode none"}
        if protection.noising.mechanisms:
            who = "the party that sums, which is trusted, or sums under encryption"
            seen_by[SENT] = who if self.plan.trust == "aggregator" else "the server"
        seen_by[SUMMED] = "whoever sees the model before and after"
        results: dict[str, list[tuple[float, int, float]]] = {name: [] for name in seen_by}
        summed, popular = ExactSum(view.n_items), []
        truths: list[NDArray[Any]] = []
        done, most = 0, BATCH_BYTES // (private.bytes_per_user + protection.client_bytes)
        for part in chunks(cohort, max(1, min(most, BATCH_CLIENTS))):
            here, download = view.take(part), task.download(number, shared, part, state)
            raw, sent = (
                take_part(task, side, download, here, private.read(part))[0].update
                for side in (Protection(), protection)
            )
            summed.add(protection.receive(sent, here.clients, number))
            for index, user in enumerate(part.tolist()):
                if user not in sample:
                    continue
                truth = np.unique(here.positives[index])
                for name, update in ((RAW, raw), (SENT, sent)):
                    if name in results:
                        table = by_item(update, index, shared, here)
                        support = np.flatnonzero(np.abs(table).sum(1))
                        named = name_items(table, len(truth))
                        results[name].append(_precision(named, support, truth))
                truths.append(truth)
                popular.append(np.isin(by_popularity[: len(truth)], truth).mean())
            done += len(part)
            self.on_client(done, len(cohort))
        total = protection.finish(summed, SecretRound(number, task.secret))[0]
        spaces = {n: rows.space for n, rows in raw.rows.items() if isinstance(rows, KeyedRows)}
        moved = np.linalg.norm(_of_total(total, spaces, shared, view.n_items), axis=1)
        order, support = np.argsort(-moved, kind="stable"), np.flatnonzero(moved)
        results[SUMMED] = [_precision(order[: len(truth)], support, truth) for truth in truths]
        sizes = [len(truth) for truth in truths]
        return {
            "replayed": f"round {number}, {description}, seed {self.run.experiment.seed}",
            "clients": len(truths),
            "items_per_client": float(np.mean(sizes)),
            "evidence": {name: _evidence(seen_by[name], results[name]) for name in seen_by},
            "chance": float(np.mean([size / view.n_items for size in sizes])),
            "popularity": float(np.mean(popular)),
        }


def _precision(
    named: NDArray[Any], support: NDArray[Any], truth: NDArray[Any]
) -> tuple[float, int, float]:
    """Return the R-precision of one client, the size of the support, and its precision."""
    right, touched = (len(np.intersect1d(items, truth)) for items in (named, support))
    return right / len(truth), len(support), touched / max(1, len(support))


def _evidence(seen_by: str, results: list[tuple[float, int, float]]) -> dict[str, Any]:
    """Return means over clients, and an interval of the R-precision."""
    precision, support, support_precision = map(np.array, zip(*results, strict=True))
    return {
        "seen_by": seen_by,
        "r_precision": float(precision.mean()),
        "interval": list(bootstrap_interval(precision)),
        "support_rows": float(support.mean()),
        "support_precision": float(support_precision.mean()),
    }


def attacked_round(run: Run) -> int | None:
    """Return the first round after the selected one that uploads, else the last one that does."""
    task, last = make_task(run.experiment, run.split), None
    for number in range(1, run.experiment.rounds + 1):
        if task.upload_shape(task.download(number, run.model.shared)).entries:
            last = number
            if number > run.summary.shipped_round:
                break
    return last


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
        if array.ndim > 1 and array.shape[1] == n_items:
            table = array[client].astype(np.float64).reshape(n_items, -1)
            parts.append(_without_what_was_sent(table, shared))
    return np.concatenate(parts, axis=1) if parts else np.zeros((n_items, 1))


def _of_total(total: Total, spaces: Mapping[str, int], shared: Shared, n_items: int) -> Table:
    """Lay the sum of a round out by item; ``spaces`` are the numbers of keys of keyed sums."""
    parts = [
        _rows_by_item(ids, summed, spaces.get(name), shared, n_items)
        for name, (ids, summed) in total.rows.items()
    ]
    whole = [array for array in total.dense.values() if array.ndim and len(array) == n_items]
    parts += [array.reshape(n_items, -1) for array in whole]
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


def _without_what_was_sent(table: Table, shared: Shared) -> Table:
    """Take the server's own table out of an upload that is a scaled and changed copy of it."""
    for sent in shared.values():
        if sent.shape == table.shape and sent.any():
            scale = float((sent * table).sum() / (sent * sent).sum(dtype=np.float64))
            rest = table - scale * sent
            if (rest**2).sum() < 0.5 * (table**2).sum():
                return rest
    return table


def name_items(table: Table, count: int) -> NDArray[np.int64]:
    """Name the ``count`` items that most probably are the client's positives."""
    support = np.flatnonzero(np.abs(table).sum(1))
    if len(support) <= count:
        return support
    rows = table[support]
    along = rows @ leading_direction(rows)
    whole = len(support) == len(table)
    up, down = _side(along, count, whole=whole), _side(-along, count, whole=whole)
    flip = abs(math.log(down / count)) < abs(math.log(up / count))
    order = np.argsort(along if flip else -along, kind="stable")
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
