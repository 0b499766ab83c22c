"""Item inference: every kind of round is attacked; raw uploads name a client's items."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hushrec.aggregation import ClientRows, KeyedRows, Update
from hushrec.api import train
from hushrec.audit.inference import (
    NO_ITEMS,
    NOTHING,
    RAW,
    SENT,
    SUMMED,
    by_item,
    item_inference,
    kinds_of,
    leading_direction,
    named_items,
    readings,
    worst_of,
)
from hushrec.federation.setup import set_up
from hushrec.methods.base import Fitted, Guided, method_class
from hushrec.methods.baselines import Popularity
from hushrec.streams import Streams
from hushrec.testing import Federation, clients_of, taste_world

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
        assert raw["reading"] == "direction"
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


def test_methods_without_uploads_by_item():
    """A test of all methods (test_plain_reader.py) holds refusals to what is uploaded."""
    skipped = {
        "central-mf": "a centralised baseline: the server has everybody's items already",
        "negative-counter": NOTHING,
        "privrec": f"nothing to attack by item: {NO_ITEMS}",
    }
    for method, reason in skipped.items():
        assert attack(taste_world(), method) == {"skipped": reason}


def test_a_sample_of_clients_is_attacked(small):
    assert attack(small, "popularity", users=10)["clients"] == 10
    assert attack(small, "popularity", users=1000)["clients"] == 120


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
    assert found["phase"] == "count, round 1"
    assert found["evidence"][RAW]["r_precision"] > 0.99 > 5 * found["chance"]
    later = ("score candidates, round 2", "fit weights, round 3", "fit network, round 6")
    assert list(found["phases"]) == ["count, round 1", *later]
    assert all("entry per item" in found["phases"][name] for name in later)


# ------------------------------------------------------------ kinds of rounds


class InTurns(Popularity, Guided):
    """Uploads in every third round, and sends guidance in rounds 4 and 6."""

    def fit(self, shared, private, view, now):
        whole = super().fit(shared, private, view, now)
        return whole if now.number % 3 == 0 else Fitted(Update(len(view)), {})

    def marks(self, round_number):
        return round_number in (4, 6)

    def gates(self, shared, private):
        raise NotImplementedError


def test_kinds_differ_in_phase_layout_and_guidance():
    task = Federation(InTurns(), clients_of([[0], [1]])).task
    found = {kind.name: (kind.uploads, kind.rounds) for kind in kinds_of(task, 9)}
    assert found == {
        "train, round 1": (False, [1, 2, 5, 7, 8]),
        "train, round 3": (True, [3, 9]),
        "train, with guidance, round 4": (False, [4]),
        "train, with guidance, round 6": (True, [6]),
    }
    fednext = Federation(method_class("fednext")(), clients_of([[0, 1], [1, 2]])).task
    assert [kind.phase for kind in kinds_of(fednext, 3)] == ["count", "select scalars"]


def test_first_selected_and_all_rounds_are_attacked(small):
    """FedRKG uploads in some rounds only; each is attacked from the state that it starts from."""
    options = {**OPTIONS["fedrkg"], "evaluation.every": 1}
    run = train(small, "fedrkg", rounds=5, settings=options)
    plan, done = set_up(run.experiment, run.split).plan, []
    found = item_inference(run, plan, 120, Streams(0), lambda *progress: done.append(progress))
    selected = run.summary.shipped_round
    after = 2 if selected < 2 else 4
    assert list(found["phases"]) == [
        "train, round 1",
        "train, round 2",
        "train, with guidance, round 3",
        f"train, round {after} from the selected model",
        "2 rounds from 2 to 4 together",
    ]
    assert found["phases"]["train, round 1"] == "uploads nothing"
    assert found["phases"][found["phase"]] == found["evidence"][RAW]["r_precision"]
    assert done == [(number, 5) for number in range(1, 6)]


def test_many_rounds_name_what_one_does_not(small):
    """FedRec's virtual ratings hide items in one round; over rounds, real ones stay."""
    found = attack(small, "fedrec")
    together = found["phases"].pop("rounds 1 to 4 together")
    assert together > 0.99 > max(found["phases"].values()) + 0.02
    assert found["phase"] == "rounds 1 to 4 together"


@given(st.lists(st.one_of(st.none(), st.floats(0, 1)), min_size=1), st.floats(0, 1))
def test_another_kind_of_round_never_lowers_the_headline(others, first):
    def result(value):
        if value is None:
            return {"skipped": NO_ITEMS}
        return {"evidence": {RAW: {"r_precision": value}}}

    results = {"first": result(first)}
    for number, value in enumerate(others):
        before = worst_of(results)
        results[f"other {number}"] = result(value)
        after = worst_of(results)
        headlines = [found["evidence"][RAW]["r_precision"] for found in (before, after)]
        assert headlines[0] <= headlines[1]
        assert list(after["phases"]) == list(results)


# ------------------------------------------------------------ the parts


def test_an_upload_is_laid_out_by_item():
    view = clients_of([[0], [1]], 5)
    base = np.ones((5, 2), np.float32)
    table = ClientRows(np.array([0, 1, 3]), np.array([3, 0, 4], np.int32), 2 * base[:3], base)
    one = np.full((1, 1), 7.0, np.float32)
    pairs = KeyedRows(np.array([0, 0, 1]), np.array([2 * 5 + 4]), one, space=25)
    counts = np.arange(10, dtype=np.float32).reshape(2, 5)
    output = np.arange(30, dtype=np.float32).reshape(2, 3, 5)
    gram = np.zeros((2, 5, 5), np.float32)
    gram[1, 2, 4] = -3
    dense = {"counts": counts, "head": np.ones((2, 3), np.float32), "output": output, "gram": gram}
    laid = by_item(Update(2, {"a": table, "b": pairs}, dense), 1, {}, view)
    assert laid.shape == (5, 2 + 1 + 1 + 3 + 1 + 1), "what has no entry per item is left out"
    np.testing.assert_array_equal(laid[:, 0], [1, 0, 0, 0, 1])
    np.testing.assert_array_equal(laid[:, 2], [0, 0, 7, 0, 7])
    np.testing.assert_array_equal(laid[:, 3], [5, 6, 7, 8, 9])
    np.testing.assert_array_equal(laid[:, 4:7], output[1].T)
    np.testing.assert_array_equal(laid[:, 7:].T, [[0, 0, 3, 0, 0], [0, 0, 0, 0, 3]])


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
    for count, named in ((10, range(10)), (60, range(50))):  # the support, if it is not larger
        assert set(named_items(readings(table, count), "direction", count)) == set(named)


def test_sizes_and_rounds_name_items_too():
    table = np.array([[0.0, 0], [3, 3], [-1, 1], [0, 5], [0.5, 0]])
    scores = readings(table, 2)
    assert named_items(scores, "size", 2).tolist() == [1, 3]
    again = readings(np.array([[0.0, 0], [0, 0], [1, 1], [0, 0], [0.1, 0]]), 2)
    both = {name: scores[name] + again[name] for name in scores}
    assert named_items(both, "support", 2).tolist() == [2, 4], "touched in both rounds"


def test_the_leading_direction_is_the_first_singular_vector():
    rows = np.random.default_rng(2).standard_normal((50, 4)) * [5, 1, 1, 1]
    first = np.linalg.svd(rows)[2][0]
    assert abs(leading_direction(rows) @ first) == pytest.approx(1, abs=1e-9)
