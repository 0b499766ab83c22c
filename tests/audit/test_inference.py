"""Item inference: raw uploads name a client's items, protected ones tell nothing."""

import numpy as np
import pytest

from hushrec.aggregation import ClientRows, KeyedRows, Update
from hushrec.api import train
from hushrec.audit.inference import (
    RAW,
    SENT,
    SUMMED,
    attacked_round,
    by_item,
    item_inference,
    leading_direction,
    name_items,
)
from hushrec.federation.setup import set_up
from hushrec.methods.base import method_names
from hushrec.streams import Streams
from hushrec.testing import clients_of, taste_world

OPTIONS = {
    "fedmf": {"d": 6, "item_rate": 5.0},
    "pfedrec": {"d": 6, "item_rate": 1.0},
    "fedrecon": {"d": 6, "item_rate": 1.0},
    "fedrap": {"d": 6, "epochs": 2, "table_lr": 5.0},
    "fedrkg": {"d": 6, "item_rate": 1.0, "interval": 2},
    "fedals": {"d": 4},
}
LOCAL = {
    "privacy.mode": "local-gaussian",
    "privacy.noise_seed": 0,
    "privacy.clip": 1.0,
    "privacy.epsilon": 8.0,
}
LAPLACE = {
    "privacy.mode": "local-laplace",
    "privacy.noise_seed": 0,
    "privacy.clip": 1.0,
    "privacy.epsilon": 8.0,
}
CENTRAL = {
    "privacy.mode": "central",
    "privacy.noise_seed": 0,
    "privacy.epsilon": 4.0,
    "privacy.delta": 1e-3,
}


def attack(data, method, settings=(), users=120):
    rounds = 1 if method in ("popularity", "fednext", "fedease") else 4
    options = {**OPTIONS.get(method, {}), "evaluation.every": rounds, **dict(settings)}
    run = train(data, method, rounds=rounds, seed=1, settings=options)
    before = {name: array.copy() for name, array in run.model.shared.items()}
    plan = set_up(run.experiment, run.split).plan
    found = item_inference(run, plan, users, Streams(0), lambda done, total: None)
    assert all(np.array_equal(before[name], array) for name, array in run.model.shared.items())
    return found


@pytest.mark.parametrize(
    "method", ["fedmf", "pfedrec", "fedrecon", "fedals", "popularity", "fednext", "fedease"]
)
def test_raw_uploads_name_the_items(method, small):
    found = attack(small, method)
    raw = found["evidence"][RAW]
    assert raw["r_precision"] > 0.99
    assert found["chance"] < 0.2
    assert SENT not in found["evidence"]
    sampled = method in ("fedmf", "pfedrec", "fedrecon")
    if sampled:  # the support alone holds the negatives too
        assert raw["support_precision"] < 0.5
    else:
        assert raw["support_precision"] == 1.0


@pytest.mark.parametrize(("method", "least"), [("fedrap", 0.8), ("fedrkg", 0.6)])
def test_personal_tables_give_most_items_away(method, least, small):
    found = attack(small, method)
    assert found["evidence"][RAW]["r_precision"] > least > 3 * found["chance"]


@pytest.mark.parametrize("method", ["fedmf", "popularity", "fedals", "fedrkg"])
@pytest.mark.parametrize("mode", [LOCAL, LAPLACE], ids=["gaussian", "laplace"])
def test_local_noise_leaves_chance(method, mode, small):
    found = attack(small, method, mode)
    sent = found["evidence"][SENT]
    low, high = sent["interval"]
    assert low - 0.02 < found["chance"] < high + 0.02
    assert sent["support_rows"] == 60, "the support tells nothing"
    assert sent["seen_by"] == "the server"


def test_central_noise_trusts_the_aggregator(small):
    found = attack(small, "fedmf", CENTRAL)
    assert found["evidence"][SENT]["r_precision"] > 0.99, "clipping alone hides nothing"
    assert "trusted" in found["evidence"][SENT]["seen_by"]
    after = found["evidence"][SUMMED]
    assert after["r_precision"] < max(found["chance"], found["popularity"]) + 0.05


@pytest.mark.parametrize("method", ["local-only", "negative-counter", "central-mf"])
def test_methods_without_uploads(method, small):
    found = attack(small, method)
    assert "nothing to attack" in found["skipped"] or "centralised" in found["skipped"]


def test_every_installed_method_can_be_attacked():
    for method in method_names():
        found = attack(taste_world(), method, users=10)
        assert "skipped" in found or found["clients"] == 10


@pytest.mark.parametrize("method", ["fednext", "fedease", "fedals"])
def test_what_takes_a_methods_place_under_noise_can_be_attacked(method):
    run = train(taste_world(), method, settings={**CENTRAL, "price": 0.1})  # all that were met
    plan = set_up(run.experiment, run.split).plan
    found = item_inference(run, plan, 30, Streams(0), lambda done, total: None)
    assert found["evidence"][RAW]["r_precision"] > 2 * found["chance"]
    assert found["evidence"][SUMMED]["r_precision"] < found["evidence"][RAW]["r_precision"]


def test_every_phase_of_the_default_is_attacked():
    """The round that counts gives a client's items away; later phases name no item."""
    short = {"network_rounds": 4, "evaluation.every": 4}
    run = train("demo", "fedmix", settings=short)
    plan = set_up(run.experiment, run.split).plan
    found = item_inference(run, plan, 30, Streams(0), lambda done, total: None)
    assert found["phase"] == "count"
    assert found["evidence"][RAW]["r_precision"] > 0.99 > 5 * found["chance"]
    assert list(found["phases"]) == ["count", "score candidates", "fit weights", "fit network"]
    for name in ("score candidates", "fit weights", "fit network"):
        assert "entry per item" in found["phases"][name]


def test_the_next_round_that_uploads_is_replayed(small):
    options = {**OPTIONS["fedrkg"], "evaluation.every": 1}
    run = train(small, "fedrkg", rounds=5, settings=options)
    number = attacked_round(run)
    assert number % 2 == 0
    assert number > run.summary.selected_round or run.summary.selected_round >= 4


# ------------------------------------------------------------ the parts


def test_an_upload_is_laid_out_by_item():
    view = clients_of([[0], [1]], 5)
    base = np.ones((5, 2), np.float32)
    table = ClientRows(np.array([0, 1, 3]), np.array([3, 0, 4], np.int32), 2 * base[:3], base)
    one = np.full((1, 1), 7.0, np.float32)
    pairs = KeyedRows(np.array([0, 0, 1]), np.array([2 * 5 + 4]), one, space=25)
    counts = np.arange(10, dtype=np.float32).reshape(2, 5)
    dense = {"counts": counts, "head": np.ones((2, 3), np.float32)}
    laid = by_item(Update(2, {"a": table, "b": pairs}, dense), 1, {}, view)
    assert laid.shape == (5, 2 + 1 + 1), "what has no entry per item is left out"
    np.testing.assert_array_equal(laid[:, 0], [1, 0, 0, 0, 1])
    np.testing.assert_array_equal(laid[:, 2], [0, 0, 7, 0, 7])
    np.testing.assert_array_equal(laid[:, 3], [5, 6, 7, 8, 9])


def test_a_table_that_was_sent_is_taken_out():
    view, generator = clients_of([[0]], 40), np.random.default_rng(0)
    sent = generator.standard_normal((40, 3)).astype(np.float32)
    changed = 0.5 * sent
    changed[[7, 9]] += 0.2
    update = Update(1, dense={"table": changed[None]})
    rest = by_item(update, 0, {"guidance": sent}, view)
    assert set(np.argsort(-np.linalg.norm(rest, axis=1))[:2]) == {7, 9}


@pytest.mark.parametrize("sign", [1, -1])
def test_positives_are_the_side_of_the_right_size(sign):
    generator, vector = np.random.default_rng(1), np.array([0.6, -0.8])
    table = np.zeros((100, 2))
    table[:10] = sign * generator.uniform(0.1, 1, (10, 1)) * vector
    table[10:50] = -sign * generator.uniform(0.1, 1, (40, 1)) * vector
    assert set(name_items(table, 10)) == set(range(10))
    assert set(name_items(table, 60)) == set(range(50)), "the support, if it is not larger"


def test_the_leading_direction_is_the_first_singular_vector():
    rows = np.random.default_rng(2).standard_normal((50, 4)) * [5, 1, 1, 1]
    first = np.linalg.svd(rows)[2][0]
    assert abs(leading_direction(rows) @ first) == pytest.approx(1, abs=1e-9)
