"""A bundle gives a device what the run would say, and is not believed unchecked."""

import hashlib
import json
import shutil
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load, save

import hushrec
from hushrec.errors import ConfigError, RunError
from hushrec.serving import recommender as device
from hushrec.serving.recommender import BundleError, Recommender
from hushrec.testing import taste_world

OPTIONS = {"popularity": 0.1, "ridge": 5.0}


MIXTURE = {"newton_rounds": 3, "network_rounds": 3, "lr": 0.2, "evaluation.every": 8}
MIXTURE |= {
    "top_candidates": 20,
    "random_candidates": 10,
    "reranked": 12,
    "hidden": 4,
    "factors": 4,
    "ridge": 5.0,
}


@pytest.fixture(scope="module", params=["fednext", "fedease", "fedmix"])
def run(request):
    settings = MIXTURE if request.param == "fedmix" else OPTIONS
    return hushrec.train(taste_world(), request.param, settings=settings)


@pytest.fixture(scope="module")
def bundle(run, tmp_path_factory):
    place = tmp_path_factory.mktemp("bundles") / run.model.method.name
    return run.export(place, precision="single")


def pairs(lines):
    return [(line.item, line.title, line.score, line.because) for line in lines]


def check_same(run, found, expected):
    """The same list to the bit; of a mixture but for rounding, which may turn items that tie."""
    if run.model.method.name != "fedmix":
        assert pairs(found) == pairs(expected)
        return
    assert len(found) == len(expected)
    for mine, theirs in zip(found, expected, strict=True):
        assert mine.score == pytest.approx(theirs.score, abs=2e-4)
        if mine.item == theirs.item:
            assert (mine.title, mine.because) == (theirs.title, theirs.because)
        else:
            others = [line.score for line in expected if line.item == mine.item]
            assert min(abs(mine.score - score) for score in [*others, expected[-1].score]) < 2e-4


@given(st.lists(st.integers(0, 59), min_size=1, max_size=60, unique=True))
def test_it_says_what_the_run_says(run, bundle, items):
    history = [f"item-{number:02d}" for number in items]
    here = Recommender.load(bundle, history)
    assert here.history == history
    check_same(run, here.recommend(10), run.recommend("somebody", 10, history))


def test_a_known_user_gets_the_same_list(run, bundle):
    data = run.split.data
    mine = data.user == 0
    order = np.argsort(data.time[mine], kind="stable")
    history = data.items[data.item[mine][order]]
    check_same(run, Recommender.load(bundle, history).recommend(), run.recommend("user-00"))


def test_a_mixture_speaks_before_its_network_has_learnt(tmp_path):
    settings = MIXTURE | {"network_rounds": 0}
    run = hushrec.train(taste_world(), "fedmix", settings=settings)
    place = run.export(tmp_path / "b", precision="single")
    assert json.loads((place / device.MANIFEST).read_text())["reranked"] == 0
    history = ["item-09", "item-02", "item-33"]
    expected = run.recommend("somebody", 10, history)
    check_same(run, Recommender.load(place, history).recommend(), expected)
    assert len(Recommender.load(place).recommend(5)) == 5, "a device that has touched nothing yet"


NOISE = {"privacy.mode": "central", "privacy.epsilon": 8.0, "privacy.noise_seed": 3, "price": 5.0}


@pytest.mark.parametrize("method", ["fednext", "fedease"])
def test_under_noise_it_counts_back_over_the_head(method, tmp_path):
    run = hushrec.train(taste_world(), method, settings=OPTIONS | NOISE)
    head = run.model.shared["head"]
    assert 2 < head.sum() < 60, "some items have no weights"
    place = run.export(tmp_path / "b", precision="single")
    rng, differ = np.random.default_rng(0), 0
    for _ in range(20):
        history = [f"item-{number:02d}" for number in rng.permutation(60)[:12]]
        here = Recommender.load(place, history)
        assert pairs(here.recommend(10)) == pairs(run.recommend("somebody", 10, history))
        here._model._known = np.ones(60, np.bool_)
        differ += pairs(here.recommend(10)) != pairs(run.recommend("somebody", 10, history))
    assert differ > 5, "counting the other items' places too gives other lists"


def test_half_precision_and_few_neighbours_keep_the_list(run, tmp_path):
    few = {} if run.model.method.name == "fedmix" else {"neighbours": 40}
    small = Recommender.load(run.export(tmp_path / "b", **few), ["item-03", "item-08"])
    whole = run.recommend("somebody", 10, ["item-03", "item-08"])
    common = {line.item for line in small.recommend(10)} & {line.item for line in whole}
    assert len(common) >= 8


def test_new_interactions_count_at_once(bundle):
    one = Recommender.load(bundle)
    assert one.touch("item-04")
    before = [line.item for line in one.recommend(60)]
    assert "item-04" not in before
    assert not one.touch("no such item")
    one.touch("item-30")
    after = [line.item for line in one.recommend(60)]
    assert "item-30" not in after
    assert after != [item for item in before if item != "item-30"]
    one.touch("item-04")
    assert one.history == ["item-30", "item-04"]
    with pytest.raises(ValueError, match="at least 1 item"):
        one.recommend(0)


def test_everything_touched_leaves_nothing(bundle):
    one = Recommender.load(bundle, [f"item-{k:02d}" for k in range(60)])
    assert one.recommend() == []


def test_the_file_works_without_hushrec(bundle, tmp_path):
    """A device has numpy and this one file."""
    shutil.copy(device.__file__, tmp_path / "alone.py")
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        "from alone import Recommender\n"
        f"r = Recommender.load({str(bundle)!r}, ['item-03'])\n"
        "print(len(r.recommend()), sorted({'hushrec', 'numba', 'scipy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "10 []"


def test_export_refuses(run, bundle, tmp_path):
    with pytest.raises(RunError, match=r"holds a bundle: .*replace it with overwrite=True"):
        run.export(bundle)
    with pytest.raises(ConfigError, match="at least 1"):
        run.export(tmp_path / "b", neighbours=0)


# ------------------------------------------------------------------ damaged and hostile bundles


def rewritten(bundle, place, tensors=None, **manifest):
    """A bundle with changed contents and an honest digest."""
    place.mkdir()
    content = (bundle / device.MODEL).read_bytes()
    if tensors is not None:
        content = save({**load(content), **tensors})
    told = json.loads((bundle / device.MANIFEST).read_text())
    if tensors is not None:
        told |= {"model_bytes": len(content), "model_sha256": hashlib.sha256(content).hexdigest()}
    told |= manifest
    (place / device.MODEL).write_bytes(content)
    (place / device.MANIFEST).write_text(json.dumps(told))
    return place


def expert(name, **options):
    """Change the first part of an expert."""
    return lambda told: told["experts"][name][0].update(options)


WRONG_MANIFESTS = {
    "any": [
        {"format": "other"},
        {"model_sha256": "0"},
        {"model_sha256": None},
        {"model_bytes": 12},
        {"model_bytes": True},
        {"items": ["a"]},
        {"items": ["a"] * 60},
        {"items": 3},
        {"titles": []},
        {"titles": [None] * 60},
        {"model": "other"},
        {"model": None},
        {"repeats": None},
        {"repeats": 1},
        {"popular": "yes"},
        {"popular": False},
    ],
    "pairs": [
        {"recent": 0},
        {"recent": 1.5},
        {"recency": -1},
        {"recency": float("nan")},
        {"scale": "1"},
        {"popularity": float("inf")},
        {"because": None},
        {"because": "x" * 10**6},
    ],
    "mixture": [
        {"experts": {}},
        {"experts": ["popularity"]},
        {"experts": {"popularity": [{"kind": "shares", "floor": 0.1}]}},
        {"experts": {"popularity": {"kind": "shares"}}},
        {"experts": {"popularity": ["shares"]}},
        {"reranked": -1},
        {"hidden": 0},
        {"hidden": 5},
        expert("popularity", kind="other"),
        expert("popularity", because=["popular"]),
        expert("popularity", floor=0),
        expert("transitions", ends=[]),
        expert("transitions", ends=[3, 2, 1]),
        expert("transitions", ends=[0, 1]),
        expert("transitions", logs="all"),
        expert("transitions", recency=-1.0),
        expert("categories", sizes=[1]),
        expert("categories", latest=[-1]),
    ],
}


def of_model(cases, run):
    return cases["any"] + cases["mixture" if run.model.method.name == "fedmix" else "pairs"]


def test_a_wrong_manifest_is_refused(run, bundle, tmp_path):
    for number, wrong in enumerate(of_model(WRONG_MANIFESTS, run)):
        told = json.loads((bundle / device.MANIFEST).read_text())
        if callable(wrong):
            wrong(told)
        else:
            told |= wrong
        with pytest.raises(BundleError):
            Recommender.load(rewritten(bundle, tmp_path / str(number), **told))


SHAPE = (60, 60)
WRONG_TENSORS = {
    "any": [
        {"more": np.zeros(3, np.float32)},
        {"popularity": np.zeros(3, np.float32)},
        {"popularity": np.full(60, np.nan, np.float32)},
    ],
    "pairs": [
        {"weights": np.full(SHAPE, np.nan, np.float32)},
        {"weights": np.zeros(SHAPE, np.float64)},
        {"weights": np.zeros((60, 3), np.float32)},
        {"neighbours": np.full(SHAPE, 60, np.uint16)},
        {"neighbours": np.full(SHAPE, -1, np.int32)},
        {"neighbours": np.zeros((3, 3), np.int32)},
        {"shares": np.zeros(3, np.float32)},
        {"known": np.zeros(3, np.uint8)},
        {"known": np.zeros(60, np.float32)},
    ],
    "mixture": [
        {"transitions/0/scales": np.full(60, np.inf, np.float32)},
        {"transitions/0/codes": np.zeros(9, np.int8)},
        {"pairs/gaps": np.full(3600, 255, np.uint8)},
        {"pairs/starts": np.arange(61, dtype=np.int32)[::-1].copy()},
        {"pairs/starts": np.full(61, 2**30, np.int32)},
        {"pairs/starts": np.arange(0, 61 * 100, 100, dtype=np.int32)},
        {"cooccurrence/1/vectors": np.zeros(60, np.float32)},
        {"cooccurrence/1/units": np.zeros(3, np.float32)},
        {"popularity/0/shares": np.zeros(SHAPE, np.float32)},
        {"categories/0/relations": np.zeros(SHAPE, np.float32)},
        {"mixture/weights": np.zeros(3, np.float32)},
        {"mixture/scale": np.zeros(28, np.float32)},
        {"mixture/networks": np.zeros((1, 9), np.float32)},
        {"mixture/networks": np.zeros((0, 1001), np.float32)},
    ],
}


def test_a_wrong_model_is_refused(run, bundle, tmp_path):
    for number, wrong in enumerate(of_model(WRONG_TENSORS, run)):
        with pytest.raises(BundleError):
            Recommender.load(rewritten(bundle, tmp_path / str(number), wrong))


@given(st.data())
def test_random_damage_is_an_error_and_nothing_else(bundle, tmp_path_factory, data):
    place = rewritten(bundle, Path(tmp_path_factory.mktemp("damaged")) / "b")
    content = bytearray((place / device.MODEL).read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        # The header and the first numbers; a digest that fits shows the checks behind it.
        content[data.draw(st.integers(0, 300))] = data.draw(st.integers(0, 255))
    content = bytes(content[: data.draw(st.integers(8, len(content)))])
    told = json.loads((place / device.MANIFEST).read_text())
    told |= {"model_bytes": len(content), "model_sha256": hashlib.sha256(content).hexdigest()}
    (place / device.MODEL).write_bytes(content)
    (place / device.MANIFEST).write_text(json.dumps(told))
    with suppress(BundleError):
        Recommender.load(place, ["item-01"]).recommend()


def test_missing_files_are_refused(bundle, tmp_path):
    with pytest.raises(BundleError, match="missing"):
        Recommender.load(tmp_path)
    (tmp_path / device.MANIFEST).write_text("{")
    with pytest.raises(BundleError, match="JSON"):
        Recommender.load(tmp_path)
    (tmp_path / device.MANIFEST).write_bytes((bundle / device.MANIFEST).read_bytes())
    with pytest.raises(BundleError, match="missing"):
        Recommender.load(tmp_path)


@pytest.mark.slow
def test_ml_1m_fits_a_device(data_dir, tmp_path):
    """Less than 20 MB, less than 10 ms, and nearly the lists of the run."""
    run = hushrec.train("ml-1m", "fednext")
    place = run.export(tmp_path / "b")
    assert sum(file.stat().st_size for file in place.iterdir()) < 20e6
    same, spent, one = [], [], Recommender.load(place)
    data, past = run.split.data, run.split.history("test").positives
    for user in range(0, 6040, 60):
        history = [str(item) for item in data.items[past[user]]]
        one._history = [int(item) for item in past[user]]
        began = time.perf_counter()
        mine = one.recommend(10)
        spent.append(time.perf_counter() - began)
        whole = run.recommend("new", 10, history)
        same.append(len({x.item for x in mine} & {x.item for x in whole}) / 10)
    assert np.median(spent) < 0.010
    assert np.mean(same) > 0.9
