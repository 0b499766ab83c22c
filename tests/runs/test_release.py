"""A release holds what the guarantee covers: nothing in it depends on data but through noise."""

import hashlib
import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from hushrec.api import Run, train
from hushrec.errors import RunError, StoppedError
from hushrec.federation.experiment import Experiment
from hushrec.runs.release import LEFT_OUT, MANIFEST, covered, release
from hushrec.runs.schema import Summary
from hushrec.serving.recommender import Recommender
from hushrec.streams import SecretStreams
from hushrec.testing import taste_world
from test_api import StopAfter

CENTRAL = {"privacy.mode": "central", "privacy.epsilon": 8.0}
LOCAL = {"privacy.mode": "local-gaussian", "privacy.epsilon": 50.0, "privacy.clip": 1.0}
POISSON = {"cohort.kind": "poisson", "cohort.probability": 0.5}
FEDMF = {"d": 4, "item_rate": 1.0}
CASES = {
    "central adaptive": ("fedmf", {**FEDMF, **CENTRAL, **POISSON}),
    "central flat": ("pfedrec", {**FEDMF, **CENTRAL, "privacy.clip": 0.5}),
    "central looks": ("fedmf", {**FEDMF, **CENTRAL, "privacy.selection_share": 0.3}),
    "central counts": ("popularity", CENTRAL),
    "central pairs": ("fednext", CENTRAL),
    "central factors": ("fedals", {**CENTRAL, "d": 4}),
    "gaussian": ("fedmf", {**FEDMF, **LOCAL, **POISSON}),
    "laplace": ("fedmf", {**FEDMF, **LOCAL, "privacy.mode": "local-laplace"}),
}
UNSWAYED = [case for case in CASES if case != "central looks"]
"""Where no look, noised or not, chooses the round."""


def go(case, out=None, data=None, **more):
    method, settings = CASES[case]
    rounds = 3 if method in ("fedmf", "pfedrec") else None
    world = taste_world() if data is None else data
    return train(world, method, rounds=rounds, settings=settings, out=out, **more)


def files(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


@pytest.mark.parametrize("case", CASES)
def test_what_is_in_it(case, tmp_path):
    run = go(case, tmp_path / "run")
    found = files(release(Run.open(tmp_path / "run", run.data), tmp_path / "out"))
    bundled = case in ("central counts", "central factors", "central pairs")
    bundle = {"bundle/manifest.json", "bundle/model.safetensors"} if bundled else set()
    assert found.keys() == bundle | {
        *("README.md", "manifest.json", "statement.txt", "statement.json", "account.json"),
        *("config.toml", "items.json", "model.safetensors", "model-card.md"),
    }
    told = json.loads(found[MANIFEST])
    assert told["files"].keys() == found.keys() - {MANIFEST}
    for name, said in told["files"].items():
        assert said == {
            "bytes": len(found[name]),
            "sha256": hashlib.sha256(found[name]).hexdigest(),
        }
    model = load_file(tmp_path / "out" / "model.safetensors")
    assert model.keys() == run.model.shared.keys()
    for name, array in run.model.shared.items():
        np.testing.assert_array_equal(model[name], array)
    said = run.summary.privacy
    assert found["statement.txt"].decode().strip() == said.statement
    assert said.statement in found["README.md"].decode()
    assert json.loads(found["statement.json"])["epsilon"] == said.epsilon
    assert json.loads(found["account.json"])["account"] == said.account
    assert json.loads(found["items.json"])["items"] == run.data.items.tolist()
    assert Experiment.from_toml(found["config.toml"].decode()).privacy == run.experiment.privacy
    assert all(left in found["README.md"].decode() for left in LEFT_OUT)
    card = found["model-card.md"].decode()
    assert all(sentence in card for sentence in said.in_words)
    assert said.headline in card and said.statement in card


def figures(value):
    """Yield every number of a summary that is too long to be there by chance."""
    if isinstance(value, dict | list):
        for part in value.values() if isinstance(value, dict) else value:
            yield from figures(part)
    elif isinstance(value, int | float) and len(repr(value)) >= 7:
        yield repr(value)


@pytest.mark.parametrize("case", CASES)
def test_what_is_not_in_it(case, tmp_path):
    """No user, figure or folder of the run; its summary.json, where they are, is the control."""
    run = go(case, tmp_path / "run")
    found = files(release(run, tmp_path / "out"))
    told = {
        key: value
        for key, value in run.summary.as_dict().items()
        if key not in ("privacy", "options")
    }
    measured = set(figures(told))
    words = "\n".join(c.decode() for name, c in found.items() if not name.endswith("tensors"))
    summary = (tmp_path / "run" / "summary.json").read_text()
    assert len(measured) > 40
    assert all(figure in summary for figure in measured)
    assert not any(figure in words for figure in measured)
    assert str(tmp_path) not in words
    for content in found.values():
        assert not re.search(rb"user-[0-9]", content)


@pytest.fixture
def one_key(monkeypatch):
    """The same noise for other data, which never happens: only what is not noised differs."""
    monkeypatch.setattr("hushrec.federation.setup.new_key", lambda: "ab" * 32)
    unbound = classmethod(lambda cls, key, *bound_to: cls(key))
    monkeypatch.setattr(SecretStreams, "from_key", unbound)


def with_other_held_out_items(data):
    """Give the first users other validation and test items, which training never sees."""
    items = data.item.copy()
    for user in range(8):
        mine = np.flatnonzero(data.user == user)
        last = mine[np.argsort(data.time[mine], kind="stable")[-2:]]
        items[last] = np.setdiff1d(np.arange(data.n_items), data.item[mine])[:2]
    return replace(data, item=items)


@pytest.mark.parametrize("case", UNSWAYED)
def test_held_out_items_change_no_byte_of_it(case, one_key, tmp_path):
    world = taste_world()
    runs = [go(case, None, data) for data in (world, with_other_held_out_items(world))]
    one, other = (files(release(run, tmp_path / str(n))) for n, run in enumerate(runs))
    assert one == other
    assert runs[0].summary.valid != runs[1].summary.valid, "the run folder does change"
    assert runs[0].summary.test != runs[1].summary.test


@pytest.mark.parametrize("case", UNSWAYED)
def test_training_items_change_the_noised_model_alone(case, one_key, tmp_path):
    world = taste_world()
    mine = np.flatnonzero(world.user == 3)
    items = world.item.copy()
    others = np.setdiff1d(np.arange(world.n_items), world.item[mine])
    items[mine] = others[: len(mine)]
    runs = [go(case, None, data) for data in (world, replace(world, item=items))]
    one, other = (files(release(run, tmp_path / str(n))) for n, run in enumerate(runs))
    differing = {name for name in one if one[name] != other[name]}
    allowed = {"model.safetensors", MANIFEST, "bundle/model.safetensors", "bundle/manifest.json"}
    assert "model.safetensors" in differing, "the data does matter"
    assert differing <= allowed
    for name in differing & {MANIFEST, "bundle/manifest.json"}:
        # Digests of the models, and the scale of their numbers.
        plain = [
            {k: v for k, v in json.loads(found[name]).items() if k not in ("files", "scale")}
            for found in (one, other)
        ]
        for said in plain:
            said.pop("model_sha256", None)
        assert plain[0] == plain[1]


def test_the_bundle_of_a_release_recommends(tmp_path):
    run = go("central pairs")
    release(run, tmp_path / "out")
    history = [str(item) for item in run.data.items[:5]]
    here = Recommender.load(tmp_path / "out" / "bundle", history).recommend(5)
    theirs = run.recommend("somebody", 5, history)
    assert len({line.item for line in here} & {line.item for line in theirs}) >= 4


def test_paths_stay_at_home(tmp_path):
    run = go("central counts")
    named = {"data": "ratings.csv", "items": "films.csv", "preset": "mine.toml"}
    places = {key: f"{tmp_path}/{name}" for key, name in named.items()}
    run.experiment = run.experiment.model_copy(update=places)
    config = covered(run).config
    assert {key: config[key] for key in named} == named
    assert "store" not in config


REFUSED = {
    "no guarantee": ({"d": 4}, "guarantees nothing.*raw updates reach"),
    "no clip": (
        {"d": 4, "privacy.mode": "local-laplace", "privacy.scale": 1.0},
        "guarantees nothing.*not clipped",
    ),
    "simulated": ({"d": 4, **CENTRAL, "privacy.noise_seed": 1}, "can remove its noise"),
    "budgets": (
        {
            **{"d": 4, "privacy.mode": "local-gaussian", "privacy.clip": 1.0},
            **{"privacy.budgets": "activity", "privacy.epsilon_min": 1.0},
            "privacy.epsilon_max": 8.0,
        },
        "personal budgets",
    ),
}


@pytest.mark.parametrize("why", REFUSED)
def test_what_is_not_covered_is_refused(why, tmp_path):
    settings, message = REFUSED[why]
    run = train(taste_world(), "fedmf", rounds=1, settings=settings)
    with pytest.raises(RunError, match=message):
        release(run, tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_silos_and_models_of_nobody_are_refused(tmp_path):
    silos = {"silos.kind": "dirichlet", "silos.count": 7, "d": 4, "hidden": [4]}
    run = train(taste_world(), "lipm", rounds=1, settings={**silos, **CENTRAL, "lipm": False})
    with pytest.raises(RunError, match="silos that were made"):
        release(run, tmp_path / "out")
    alone = train(taste_world(), "local-only", rounds=1, settings={"d": 4, **CENTRAL})
    with pytest.raises(RunError, match="no shared model"):
        release(alone, tmp_path / "out")


def test_a_list_of_items_from_the_rows_is_refused(tmp_path):
    found = replace(taste_world(), items_declared=False)
    run = train(found, "popularity", settings={**CENTRAL, "privacy.undeclared": True})
    with pytest.raises(RunError, match=r"took its list of items.*--items FILE"):
        release(run, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_round_that_validation_chose_is_refused(tmp_path):
    run = go("central counts")
    told = run.summary.as_dict()
    del told["selected_by"]
    for older in (told, {**told, "selected_by": "validation"}):
        run.summary = Summary(**older)
        with pytest.raises(RunError, match="train again"):
            release(run, tmp_path / "out")


def test_a_place_that_is_taken_stays_as_it_is(tmp_path):
    run = go("central counts")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("mine")
    with pytest.raises(RunError, match="not empty"):
        release(run, tmp_path / "out")
    assert files(tmp_path / "out") == {"mine": b"mine"}
    with pytest.raises(RunError, match="not empty"):
        release(run, tmp_path / "out" / "mine")
    (tmp_path / "empty").mkdir()
    assert (release(run, tmp_path / "empty") / MANIFEST).exists()


def hushrec(*arguments):
    words = [sys.executable, "-m", "hushrec", *map(str, arguments)]
    return subprocess.run(words, capture_output=True, text=True, check=False)


def test_the_command_line(tmp_path):
    run, out = tmp_path / "run", tmp_path / "out"
    asked = ["--data", "demo", "--method", "popularity", "--privacy", "central", "--epsilon", "8"]
    done = hushrec("train", *asked, "--out", run)
    assert done.returncode == 0, done.stderr
    done = hushrec("release", run, out, "--json")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["bytes"].keys() == files(out).keys()
    assert told["statement"].startswith("User-level (8")
    again = hushrec("release", run, out)
    assert (again.returncode, again.stdout) == (2, "")
    assert "not empty" in again.stderr
    assert "Traceback" not in again.stderr
    plain = hushrec("release", run, tmp_path / "plain")
    assert plain.returncode == 0
    assert "model.safetensors" in plain.stdout


def test_the_command_line_refuses(tmp_path):
    world = taste_world()
    with pytest.raises(StoppedError):
        go("central adaptive", tmp_path / "cut", callbacks=[StopAfter(1)])
    train(world, "popularity", seeds=2, out=tmp_path / "seeds", settings=CENTRAL)
    train("demo", "popularity", out=tmp_path / "open")
    for name, message in (
        ("cut", "not finished"),
        ("seeds", "several seeds"),
        ("open", "guarantees nothing"),
        ("nowhere", "no such run folder"),
    ):
        done = hushrec("release", tmp_path / name, tmp_path / "out")
        assert done.returncode == 2, name
        assert message in done.stderr
        assert "Traceback" not in done.stderr
        assert not (tmp_path / "out").exists()
