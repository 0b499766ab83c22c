"""The audit names at least what a plain reader of all uploads names, for every method.

The reader shares nothing with the audit: it sits where the server reads messages of the reference
backend, in every round, and looks at which items' entries are large, or are there at all.
"""

import numpy as np
import pytest

from hushrec.aggregation import KeyedRows
from hushrec.api import train
from hushrec.audit.inference import RAW, item_inference
from hushrec.federation.backends import OneByOne
from hushrec.federation.client import Upload
from hushrec.federation.setup import make_task, set_up
from hushrec.methods.base import method_class, method_names
from hushrec.streams import SecretRound, Streams
from hushrec.testing import taste_world

ROUNDS = 3
ALL_PHASES = {
    "fedmix": {"newton_rounds": 1, "network_rounds": 1},
    "fednext": {},
}
OPTIONS = {"fedrkg": {"interval": 2}, "lipm": {"epochs": 1}, **ALL_PHASES}
FEDERATED = [name for name in method_names() if not method_class(name).traits.pooled]


def uploads_of(run, monkeypatch):
    """Train again with the reference backend; yield each client's raw uploads of every round."""
    task, experiment = make_task(run.experiment, run.split), run.experiment
    backend, shared = OneByOne(task, run.split, experiment), task.initial
    clients, received = run.split.training_users, []
    read = Upload.from_bytes

    def overheard(data, expected):
        received.append(read(data, expected))
        return received[-1]

    monkeypatch.setattr(Upload, "from_bytes", overheard)
    for number in range(1, experiment.rounds + 1):
        cohort = clients[experiment.cohort.draw(len(clients), Streams(experiment.seed), number)]
        download = task.download(number, shared, cohort)
        received.clear()
        summed = backend.train(download, task.protection, cohort).summed
        yield dict(zip(cohort.tolist(), [upload.update for upload in received], strict=True))
        total, _ = task.protection.finish(summed, SecretRound(number, task.secret))
        shared = task.method.phase_of(number).apply(shared, total, number)


def weight_of_items(update, n_items):
    """Add up the sizes of everything that an upload says of each item."""
    weight = np.zeros(n_items)
    for rows in update.rows.values():
        sizes, space = np.abs(rows.rows).sum(1), getattr(rows, "space", n_items)
        if isinstance(rows, KeyedRows) and space == n_items**2:
            for items in np.divmod(rows.ids, n_items):
                np.add.at(weight, items, sizes)
        elif space == n_items:
            np.add.at(weight, rows.ids, sizes)
    for array in update.dense.values():
        if n_items in array.shape[1:]:
            axis = array.shape.index(n_items, 1)
            others = tuple(other for other in range(array.ndim) if other != axis)
            weight += np.abs(array).sum(others)
    return weight


def share_named(weights, view):
    """Name as many items of each client as it has, the heaviest; return the mean share right.

    Of items that are equally heavy, those to name are drawn: the share is the expected one.
    """
    right = []
    for client, weight in weights.items():
        truth = np.unique(view.positives[client])
        least = max(np.sort(weight)[-len(truth)], 1e-300)
        sure, tied = np.flatnonzero(weight > least), np.flatnonzero(weight == least)
        drawn = min(len(tied), len(truth) - len(sure)) / max(1, len(tied))
        expected = np.isin(sure, truth).sum() + drawn * np.isin(tied, truth).sum()
        right.append(expected / len(truth))
    return float(np.mean(right))


@pytest.mark.parametrize("method", FEDERATED)
def test_the_audit_names_no_less_than_a_plain_reader(method, monkeypatch):
    rounds = None if method in ALL_PHASES else ROUNDS
    options = {"evaluation.every": 1, **OPTIONS.get(method, {})}
    run = train(taste_world(), method, rounds=rounds, seed=2, settings=options)
    plan, view = set_up(run.experiment, run.split).plan, run.split.train_view("honest")
    everybody = len(run.split.training_users)  # nobody is left out, so no interval is needed
    found = item_inference(run, plan, everybody, Streams(0), lambda done, total: None)

    sizes, counts, shares, uploaded = {}, {}, [0.0], 0
    for uploads in uploads_of(run, monkeypatch):
        each = {client: weight_of_items(u, view.n_items) for client, u in uploads.items()}
        uploaded += sum(update.nbytes for update in uploads.values())
        shares.append(share_named(each, view))
        for client, weight in each.items():
            sizes[client] = sizes.get(client, 0.0) + weight
            counts[client] = counts.get(client, 0.0) + (weight > 0)
    shares += [share_named(sizes, view), share_named(counts, view)]
    if "skipped" in found:
        assert max(shares) == 0.0, f"a plain reader names {max(shares):.1%}"
        assert ("uploads nothing" in found["skipped"]) == (uploaded == 0)
    else:
        assert found["clients"] == everybody
        assert found["evidence"][RAW]["r_precision"] >= max(shares) - 1e-12
