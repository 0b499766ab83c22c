"""Item inference: what does a curious server read from one client's upload?

One round is replayed for a sample of clients from the run's selected model, through the method and
the device side of the privacy stack as the backend does. The server knows the method, what it sent,
and how many items a client has (R); it names R items, so precision and recall are one number, the
R-precision. What it does with an upload:

1. lay it out by item: rows of tables, arrays with an entry per item, the items of pair keys;
   of an array that holds values and not differences, what was sent is taken out;
2. the rows that are not zero are the *support*. If they are R or fewer, name them;
3. else project the rows on their leading direction: training moves a client's positives one way
   along its own vector and its negatives the other. The positives are the side whose size is
   nearer to R. Name the R furthest out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hushrec.aggregation import ExactSum, KeyedRows, Total, Update
from hushrec.api import Run
from hushrec.data.views import TrainView, chunks
from hushrec.evaluation.significance import bootstrap_interval
from hushrec.federation.client import take_part
from hushrec.federation.setup import make_task
from hushrec.methods.base import Shared
from hushrec.privacy.plan import Plan
from hushrec.privacy.protection import Protection
from hushrec.streams import SecretRound, Streams

STACK_CLIENTS = 256
STACK_BYTES = 128 * 2**20
POWER_STEPS = 50
RAW, SENT, SUMMED = "raw upload", "protected upload", "sum after the round"

Table = NDArray[np.float64]


@dataclass
class Tally:
    """What naming items from one kind of evidence came to, client by client."""

    seen_by: str
    precision: list[float] = field(default_factory=list)
    support: list[float] = field(default_factory=list)
    support_precision: list[float] = field(default_factory=list)

    def add(self, named: NDArray[np.int64], truth: NDArray[Any], support: NDArray[Any]) -> None:
        """Count one client."""
        self.precision.append(len(np.intersect1d(named, truth)) / len(truth))
        self.support.append(len(support))
        right = len(np.intersect1d(support, truth))
        self.support_precision.append(right / max(1, len(support)))

    def as_dict(self) -> dict[str, Any]:
        """Return the means, and an interval over clients."""
        values = np.array(self.precision)
        return {
            "seen_by": self.seen_by,
            "r_precision": float(values.mean()),
            "interval": list(bootstrap_interval(values)),
            "support_rows": float(np.mean(self.support)),
            "support_precision": float(np.mean(self.support_precision)),
        }


def item_inference(
    run: Run,
    plan: Plan,
    users: int,
    streams: Streams,
    on_client: Callable[[int, int], None],
) -> dict[str, Any]:
    """Name the items of about ``users`` clients from what a server sees of them."""
    if run.model.method.traits.pooled:
        return {"skipped": "a centralised yardstick: the server has everybody's items already"}
    number = attacked_round(run)
    if number is None:
        return {"skipped": "nothing to attack: this method uploads nothing"}
    view = run.split.train_view(run.experiment.protocol).prepared()
    view = replace(view, noise=plan.deviations)
    clients = run.split.training_users
    drawn = clients[run.experiment.cohort.draw(len(clients), run_streams(run), number)]
    cohort = drawn if len(drawn) else clients
    generator = streams.generator("audit/items")
    sample = set(generator.choice(cohort, min(users, len(cohort)), replace=False).tolist())
    counts = np.bincount(view.take(clients).positives.values, minlength=view.n_items)
    by_popularity = np.argsort(-counts, kind="stable")

    # Other noise than the run's own, which nobody can draw again, and the same for every audit.
    task = make_task(run.experiment, run.split, plan.protection, f"audit {streams.seed}")
    state = plan.protection.state
    protection = task.protection_of(task.download(number, run.model.shared, state=state))
    tallies = {RAW: Tally("the server, in privacy mode none")}
    if protection.noising.mechanisms:
        aggregator = plan.trust == "aggregator"
        who = "the party that sums, which is trusted, or sums under encryption"
        tallies[SENT] = Tally(who if aggregator else "the server")
    tallies[SUMMED] = Tally("whoever sees the model before and after")
    summed, chance, popular = ExactSum(view.n_items), [], []
    truths: list[NDArray[Any]] = []
    done, most = 0, STACK_BYTES // (run.model.private.bytes_per_user + protection.client_bytes)
    for part in chunks(cohort, max(1, min(most, STACK_CLIENTS))):
        here, download = view.take(part), task.download(number, run.model.shared, part, state)
        raw, sent = (
            take_part(task, side, download, here, run.model.private.read(part))[0].update
            for side in (Protection(), protection)
        )
        summed.add(protection.receive(sent, here.clients, number))
        for place, user in enumerate(part.tolist()):
            if user not in sample:
                continue
            truth = np.unique(here.positives[place])
            for name, update in ((RAW, raw), (SENT, sent)):
                if name in tallies:
                    table = by_item(update, place, run.model.shared, here)
                    support = np.flatnonzero(np.abs(table).sum(1))
                    tallies[name].add(name_items(table, len(truth)), truth, support)
            truths.append(truth)
            chance.append(len(truth) / view.n_items)
            popular.append(np.isin(by_popularity[: len(truth)], truth).mean())
        done += len(part)
        on_client(done, len(cohort))
    total = protection.finish(summed, SecretRound(number, task.secret))[0]
    spaces = {n: rows.space for n, rows in raw.rows.items() if isinstance(rows, KeyedRows)}
    moved = np.linalg.norm(_of_total(total, spaces, run.model.shared, view.n_items), axis=1)
    for truth in truths:
        named = np.argsort(-moved, kind="stable")[: len(truth)]
        tallies[SUMMED].add(named, truth, np.flatnonzero(moved))
    return {
        "replayed": f"round {number}, from the model of the selected round "
        f"{run.summary.selected_round}, seed {run.experiment.seed}",
        "clients": len(truths),
        "items_per_client": float(np.mean([len(truth) for truth in truths])),
        "evidence": {name: tally.as_dict() for name, tally in tallies.items()},
        "chance": float(np.mean(chance)),
        "popularity": float(np.mean(popular)),
    }


def run_streams(run: Run) -> Streams:
    """Return the streams the run itself drew from."""
    return Streams(run.experiment.seed)


def attacked_round(run: Run) -> int | None:
    """Return the first round after the selected one that uploads, else the last one that does."""
    task, last = make_task(run.experiment, run.split), None
    sent = task.download(1, run.model.shared)
    for number in range(1, run.experiment.rounds + 1):
        if task.upload_shape(replace(sent, round=number)).entries:
            last = number
            if number > run.summary.shipped_round:
                break
    return last


def by_item(update: Update, client: int, shared: Shared, view: TrainView) -> Table:
    """Lay one client's upload out by item, [items, width]."""
    n_items, parts = view.n_items, []
    for stack in update.rows.values():
        mine = slice(stack.indptr[client], stack.indptr[client + 1])
        ids, rows = stack.ids[mine], stack.rows[mine].astype(np.float64)
        if isinstance(stack, KeyedRows):
            table = _keys_by_item(ids, rows, stack.space, shared, n_items)
        else:
            differences = rows if stack.base is None else rows - stack.base[ids]
            table = np.zeros((n_items, rows.shape[1]))
            table[ids] = differences
        parts.append(table)
    for array in update.dense.values():
        if array.ndim > 1 and array.shape[1] == n_items:
            table = array[client].astype(np.float64).reshape(n_items, -1)
            parts.append(_without_what_was_sent(table, shared))
    return np.concatenate(parts, axis=1) if parts else np.zeros((n_items, 1))


def _keys_by_item(
    keys: NDArray[Any], rows: Table, space: int, shared: Shared, n_items: int
) -> Table:
    """Add up the sizes of keyed rows for each item that their keys name.

    Keys are items, or pairs i · n + j of the catalogue or of a head that everybody knows. Keys of
    another space, such as pairs of categories, name no item.
    """
    table, sizes = np.zeros((n_items, 1)), np.abs(rows).sum(1)
    head = np.flatnonzero(shared.get("head", ()))
    if space == n_items:
        table[:, 0] = np.bincount(keys, sizes, minlength=n_items)
    elif space in (n_items**2, len(head) ** 2):
        items = np.arange(n_items) if space == n_items**2 else head
        for indices in (keys // len(items), keys % len(items)):
            table[:, 0] += np.bincount(items[indices], sizes, minlength=n_items)
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


def _of_total(total: Total, spaces: Mapping[str, int], shared: Shared, n_items: int) -> Table:
    """Lay the sum of a round out by item; ``spaces`` are the numbers of keys of keyed sums."""
    parts: list[Table] = []
    for name, (ids, summed) in total.rows.items():
        if name in spaces:
            parts.append(_keys_by_item(ids, summed, spaces[name], shared, n_items))
            continue
        table = np.zeros((n_items, summed.shape[1]))
        table[ids] = summed
        parts.append(table)
    parts += [
        array.reshape(n_items, -1)
        for array in total.dense.values()
        if array.ndim and len(array) == n_items
    ]
    return np.concatenate(parts, axis=1) if parts else np.zeros((n_items, 1))
