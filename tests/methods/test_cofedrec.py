"""CoFedRec against devices with all pairs of rows by autograd, and a server with every table."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from pydantic import ValidationError

import hushrec
import reference
from hushrec.errors import ConfigError
from hushrec.federation.backends import Machine
from hushrec.methods.base import fold_in
from hushrec.methods.baselines import LocalOnly
from hushrec.methods.cofedrec import (
    BINS,
    NOBODY,
    SENT,
    VALUES,
    CoFedRec,
    PrivateCoFedRec,
    _server_generator,
    bins_of,
    cluster_rows,
    elbow_bin,
)
from hushrec.streams import Streams
from hushrec.testing import Federation, clients_of, taste_world

N_ITEMS = 25


def devices():
    """One item, every item, all but one, repeats, and ordinary ones."""
    rng = np.random.default_rng(5)
    rows = [[3], list(range(N_ITEMS)), list(range(1, N_ITEMS)), [4, 4, 4, 9]]
    return clients_of([*rows, *(rng.permutation(N_ITEMS)[:n].tolist() for n in (2, 5, 9))], N_ITEMS)


def close(ours, theirs):
    theirs = np.asarray(theirs)
    return np.linalg.norm(ours - theirs) <= 1e-5 * np.linalg.norm(theirs)


def contrast_of(rows, labels, temperature):
    """The sum over anchors, with a mask over all pairs."""
    unit = torch.nn.functional.normalize(rows, dim=1)
    logits = unit @ unit.T / temperature
    other = ~torch.eye(len(rows), dtype=torch.bool)
    same = (labels[:, None] == labels[None]) & other
    log_share = logits - torch.logsumexp(logits.masked_fill(~other, -torch.inf), 1, keepdim=True)
    anchors = same.any(1)
    mean = (log_share.masked_fill(~same, 0)).sum(1)[anchors] / same.sum(1)[anchors]
    return -(temperature / 0.5) * mean.sum()


def train_device(key, user, positives, excluded, state, labels, config):
    """One device in torch, in float64: two steps per batch on the whole loss."""
    table, w, b = (torch.tensor(part, requires_grad=True) for part in state)
    own = torch.optim.SGD([w, b], lr=config.lr)
    rows = torch.optim.SGD([table], lr=config.lr * len(table) * config.item_rate)
    stream = reference.Stream(key, user)
    seen = reference.samples(stream, positives, excluded, len(table), config.negatives)
    for _ in range(config.epochs):
        reference.shuffle(stream, seen)
        for start in range(0, len(seen), config.batch):
            part = seen[start : start + config.batch]
            ids = torch.tensor([item for item, _ in part])
            given = torch.tensor([label for _, label in part]).double()
            for optimizer in (own, rows):
                own.zero_grad()
                rows.zero_grad()
                logits = table[ids] @ w + b
                loss = torch.nn.functional.binary_cross_entropy_with_logits(logits, given)
                if labels is not None:
                    chosen = torch.arange(len(table)) if config.contrast == "all" else ids.unique()
                    kinds = torch.tensor(labels)[chosen]
                    term = contrast_of(table[chosen], kinds, config.temperature)
                    loss = loss + config.weight * term / len(table)
                loss.backward()
                optimizer.step()
    return [part.detach().numpy() for part in (table, w, b)]


def literal_group(tables, core, items):
    """Sort the similarities, and cut the list where it is farthest from its chord."""
    alike = []
    for table in tables:
        pairs = [(table[i], core[i]) for i in items]
        alike.append(
            sum(a @ b / np.sqrt((a @ a) * (b @ b)) for a, b in pairs if a.any() and b.any())
        )
    order = sorted(range(len(tables)), key=lambda u: -alike[u])
    points = np.array([(place, alike[u]) for place, u in enumerate(order)])
    line = points[-1] - points[0]
    line = line / np.sqrt(line @ line)
    away = points - points[0]
    away = away - np.outer(away @ line, line)
    elbow = int(np.argmax((away**2).sum(1)))
    return set(order[: elbow + 1])


BASE = {"d": 6, "item_rate": 0.5, "clusters": 4, "weight": 0.5, "temperature": 0.5, "lr": 0.2}
OPTIONS = {
    "batch": {},
    "all": {"contrast": "all", "weight": 0.2},
    "small batches": {"batch": 7, "epochs": 1, "negatives": 2, "temperature": 0.1},
    "no contrast": {"weight": 0.0},
    "mean": {"core": "mean"},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_it_equals_autograd_with_every_table_on_the_server(name):
    view, method = devices(), CoFedRec(CoFedRec.Config(**{**BASE, **OPTIONS[name]}))
    config, streams, excluded, n = method.config, Streams(0), view.excluded(), len(view)
    ours = Federation(method, view, machine=Machine(threads=1, chunk=3))
    fields = method.private_fields(view, ours.shared, streams)
    first = [fields[part].initial.astype(np.float64) for part in ("table", "vector", "bias")]
    states, labels, number, sizes = [first] * n, None, 1, []
    for _ in range(3):
        for _ in method.steps:
            ours.round()
        key = streams.key("fit", number)
        for c in range(n):
            mine = key, view.users[c], view.positives[c], excluded[c], states[c]
            states[c] = train_device(*mine, labels, config)
        tables = [state[0] for state in states]
        mean = np.mean(tables, axis=0)
        generator = _server_generator(ours.shared["key"], number)
        labels = cluster_rows(mean, config.clusters, generator)
        np.testing.assert_array_equal(labels, ours.shared["labels"])
        chosen, core = int(generator.integers(config.clusters)), int(generator.integers(n))
        core_table = mean if config.core == "mean" else tables[core]
        group = literal_group(tables, core_table, np.flatnonzero(labels == chosen))
        assert set(np.flatnonzero(ours.store.read(np.arange(n))["member"])) == group
        replaced = np.mean([tables[u] for u in sorted(group)], axis=0)
        states = [[replaced if u in group else s[0], *s[1:]] for u, s in enumerate(states)]
        sizes.append(len(group))
        number += len(method.steps)
    assert any(1 < size < n for size in sizes)
    private = ours.store.read(np.arange(n))
    for place, field in ((1, "vector"), (2, "bias")):
        assert close(private[field], [state[place] for state in states])
    member = np.asarray(private["member"])[:, None, None] > 0
    assert close(
        np.where(member, ours.shared["group"], private["table"]), [state[0] for state in states]
    )
    scores = [table @ vector + bias for table, vector, bias in states]
    assert close(method.score(ours.shared, private, view), scores)


def test_without_contrast_and_groups_it_is_local_only():
    view, options = devices(), {"d": 6, "item_rate": 0.5, "epochs": 1}
    alone = LocalOnly(LocalOnly.Config(**options))
    ours = CoFedRec(CoFedRec.Config(**options, weight=0.0, least_group=len(view) + 1))
    one, other = Federation(ours, view), Federation(alone, view)
    for _ in range(9):
        one.round()
        other.number = one.number - 1
        if ours.step_of(one.number) == "train":
            other.round()
    everybody = np.arange(len(view))
    for name in ("table", "vector", "bias"):
        np.testing.assert_array_equal(
            one.store.read(everybody)[name], other.store.read(everybody)[name]
        )


def test_a_group_of_all_is_the_plain_mean():
    view, method = devices(), CoFedRec(CoFedRec.Config(**BASE))
    federation = Federation(method, view)
    for _ in range(3):
        federation.round()
    federation.shared = {**federation.shared, "threshold": np.zeros(1, np.int64)}
    federation.round()
    private = federation.store.read(np.arange(len(view)))
    assert np.asarray(private["member"]).all()
    assert close(federation.shared["group"], np.asarray(private["table"], np.float64).mean(0))


@pytest.mark.parametrize("seed", range(20))
def test_the_elbow_of_a_histogram_is_that_of_the_sorted_list(seed):
    rng = np.random.default_rng(seed)
    bins = np.sort(rng.choice(BINS, 40, replace=False))[::-1]
    counts = np.zeros(BINS)
    counts[bins] = 1
    points = np.stack([np.arange(40), VALUES[bins]], 1)
    line = points[-1] - points[0]
    away = points - points[0]
    distance = abs(away[:, 0] * line[1] - away[:, 1] * line[0])
    assert elbow_bin(counts) == bins[distance.argmax()]


def test_bins_ascend_and_hold_their_values():
    np.testing.assert_array_equal(bins_of(VALUES), np.arange(BINS))
    assert bins_of(np.array([-1.0, 1.0, 1.0 + 1e-7])).tolist() == [0, BINS - 1, BINS - 1]


def test_an_empty_histogram_has_no_group():
    assert elbow_bin(np.zeros(BINS)) == NOBODY


def test_kmeans_finds_clusters_that_are_there():
    rng = np.random.default_rng(0)
    centres = 10 * rng.normal(size=(5, 3))
    rows = np.repeat(centres, 20, axis=0) + rng.normal(size=(100, 3)) / 10
    labels = cluster_rows(rows, 5, np.random.default_rng(1))
    assert len({tuple(np.unique(labels[k : k + 20])) for k in range(0, 100, 20)}) == 5
    assert labels.max() == 4
    assert cluster_rows(rows[:3], 30, np.random.default_rng(1)).max() < 3


@pytest.mark.parametrize("contrast", ["batch", "all"])
def test_threads_and_chunks_do_not_matter(contrast):
    view, method = devices(), CoFedRec(CoFedRec.Config(**BASE, contrast=contrast))
    found = []
    for machine in (Machine(threads=1), Machine(threads=3, chunk=1), Machine(threads=2, chunk=4)):
        federation = Federation(method, view, machine=machine)
        for _ in range(6):
            federation.round()
        private = federation.store.read(np.arange(len(view)))
        found.append([federation.shared["group"], private["table"], private["vector"]])
    for other in found[1:]:
        for one, same in zip(found[0], other, strict=True):
            np.testing.assert_array_equal(one, same)


def test_only_the_core_uploads_in_its_round():
    view, method = devices(), CoFedRec(CoFedRec.Config(**BASE))
    federation = Federation(method, view)
    federation.round()
    shared = federation.shared
    cluster = np.flatnonzero(shared["labels"] == shared["chosen"][0])
    core = int(shared["core_client"][0])
    collected = federation.round()
    assert collected.up_bytes == len(cluster) * (4 * method.config.d + 4)
    table = np.asarray(federation.store.read(np.array([core]))["table"])[0]
    assert close(federation.shared["core"][cluster], table[cluster])
    assert not np.delete(federation.shared["core"], cluster, axis=0).any()


def test_the_mean_stands_for_an_absent_core():
    view, method = devices(), CoFedRec(CoFedRec.Config(**BASE))
    federation = Federation(method, view)
    federation.round()
    shared = {**federation.shared, "core_client": np.full(1, len(view), np.int64)}
    federation.shared = shared
    federation.round()
    assert shared["core"].any()
    np.testing.assert_array_equal(federation.shared["core"], shared["core"])


@pytest.mark.parametrize("made", [CoFedRec, PrivateCoFedRec])
def test_the_number_of_a_round_decides_what_it_sends(made):
    """A node checks what it receives by the initial parameters."""
    view, method = devices(), made(made.Config(d=6, clusters=4))
    federation = Federation(method, view)
    first = method.init(view, Streams(0))
    for number in range(1, 2 * len(method.steps) + 1):
        sent, known = (method.phase_of(number).download(s) for s in (federation.shared, first))
        assert sent.keys() == known.keys()
        assert set(sent) == set(SENT[method.step_of(number)])
        federation.round()


def test_a_new_client_trains_in_every_pass():
    view, method = devices(), CoFedRec(CoFedRec.Config(**BASE))
    shared = method.init(view, Streams(0))
    found = [fold_in(method, shared, view, Streams(0), passes)["table"] for passes in (0, 1, 2, 3)]
    for one, longer in pairwise(found):
        assert (np.asarray(one) != np.asarray(longer)).any(axis=(1, 2)).all()


def test_noise_on_sums_needs_the_mean_as_core():
    settings = {"privacy.mode": "central", "privacy.epsilon": 8.0, "d": 4}
    run = hushrec.train(taste_world(), "cofedrec", rounds=6, settings=settings)
    assert isinstance(run.model.method, PrivateCoFedRec)
    assert 0 < run.summary.privacy.epsilon <= 8
    with pytest.raises((ConfigError, ValidationError), match="core"):
        hushrec.train(taste_world(), "cofedrec", settings={**settings, "core": "client"})


def test_local_noise_is_refused_with_a_client_as_core():
    settings = {"privacy.mode": "local-gaussian", "privacy.epsilon": 8.0, "privacy.clip": 1.0}
    with pytest.raises(ConfigError, match="uploads something else in some rounds"):
        hushrec.train(taste_world(), "cofedrec", settings=settings)
