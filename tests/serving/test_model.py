"""`Model`: a trained recommender as one value, in memory and on disk."""

import json
import shutil

import numpy as np
import pytest

import hushrec
from hushrec.errors import ConfigError, RunError
from hushrec.io.codec import Rows
from hushrec.serving.model import Model
from hushrec.testing import taste_world

TRAINED = {
    "popularity": ("popularity", {}),
    "fedmf": ("fedmf", {"d": 4}),
    "pfedrec dual": ("pfedrec", {"d": 4}),
    "fedrap tables": ("fedrap", {"d": 4}),
    "fedmix": (
        "fedmix",
        {
            "newton_rounds": 2,
            "network_rounds": 2,
            "top_candidates": 20,
            "random_candidates": 10,
        }
        | {"reranked": 12, "hidden": 4, "factors": 4, "evaluation.every": 8},
    ),
    "fednext under noise": (
        "fednext",
        {"privacy.mode": "central", "privacy.epsilon": 8.0, "privacy.noise_seed": 0},
    ),
    "privrec unseen": ("privrec", {"hidden": [8, 4], "split.kind": "unseen-users"}),
    "lipm silos": (
        "lipm",
        {"silos.kind": "dirichlet", "silos.count": 5, "d": 4, "hidden": [8, 4]},
    ),
}


def trained(name):
    method, settings = TRAINED[name]
    planned = method == "fedmix"
    return hushrec.train(
        taste_world(), method, rounds=None if planned else 2, settings=settings
    ).model


@pytest.fixture(scope="module")
def model():
    return trained("fedmix")


@pytest.mark.parametrize("name", TRAINED)
def test_a_saved_model_recommends_as_the_one_in_memory(name, tmp_path):
    model = trained(name)
    again = Model.load(model.save(tmp_path / "model"))
    assert again.recommend(k=5).columns == model.recommend(k=5).columns
    history = ["item-03", "item-08", "item-21"]
    assert again.recommend("new", 5, history) == model.recommend("new", 5, history)
    assert type(again.method) is type(model.method) and again.method.config == model.method.config


def test_one_verb_for_one_user_and_for_many(model):
    one = model.recommend("user-07", 3)
    assert [line.item for line in one] == model.recommend(["user-07"], 3).columns["item"]
    table = model.recommend(k=3)
    assert isinstance(table, Rows) and len(table) == 3 * len(model.data.users)
    assert table.columns["rank"][:4] == [1, 2, 3, 1]
    seen = set(model.data.history(model.indices(["user-07"])).positives.values.tolist())
    assert not {model.data.item_index[line.item] for line in one} & seen
    with pytest.raises(ConfigError, match="give one id"):
        model.recommend(["user-07", "user-08"], 3, ["item-03"])
    with pytest.raises(ConfigError, match="'somebody' is unknown"):
        model.recommend(["user-07", "somebody"])


def test_the_list_of_one_user_is_made_from_their_rows_alone(model, monkeypatch):
    """Nobody else's history is joined or scored."""
    scored = []
    method = type(model.method)
    original = method.score
    monkeypatch.setattr(
        method, "score", lambda self, *given: scored.append(given[2]) or original(self, *given)
    )
    model.recommend("user-07")
    (view,) = scored
    assert len(view) == 1 and len(view.positives.values) < len(taste_world()) / 30


def test_explanations_are_those_of_the_list(model):
    lines = model.recommend("user-07", 4)
    assert model.explain("user-07", [line.item for line in lines]) == [a.because for a in lines]
    with pytest.raises(ConfigError, match="no item 'item-99' in the catalogue; did you mean"):
        model.explain("user-07", ["item-99"])


def test_a_model_without_users_serves_new_ones(model, tmp_path):
    alone = model.without_users()
    history = ["item-03", "item-08"]
    assert alone.recommend("new", 5, history) == model.recommend("new", 5, history)
    assert len(alone.data.users) == len(alone.recommend()) == 0
    with pytest.raises(ConfigError, match="'user-07' is unknown"):
        alone.recommend("user-07")
    folder = alone.save(tmp_path / "model")
    assert b"user-07" not in (folder / "data.safetensors").read_bytes()
    assert Model.load(folder).recommend("new", 5, history) == model.recommend("new", 5, history)


def test_features_of_users_and_items_are_saved(tmp_path):
    model = hushrec.train("demo", "privrec", rounds=1, settings={"hidden": [8, 4]}).model
    again = Model.load(model.save(tmp_path / "model"))
    user = model.data.users[3]
    assert again.recommend(user) == model.recommend(user)
    for ours, theirs in (
        (model.data.train.user_features, again.data.train.user_features),
        (model.data.train.item_features, again.data.train.item_features),
    ):
        assert {n: c.tobytes() for n, c in ours.items()} == {
            n: c.tobytes() for n, c in theirs.items()
        }


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    return trained("fedmf").save(tmp_path_factory.mktemp("saved") / "model")


def test_a_folder_is_not_written_over(saved):
    with pytest.raises(RunError, match="exists already"):
        Model.load(saved).save(saved)


def test_damaged_models_are_refused(saved, tmp_path):
    for file in sorted(path.name for path in saved.iterdir()):
        copy = tmp_path / file
        shutil.copytree(saved, copy)
        content = (copy / file).read_bytes()
        for damaged in (content[:-3], content[:40] + b"x" + content[41:], b"", b"{}"):
            (copy / file).write_bytes(damaged)
            with pytest.raises(RunError, match="damaged"):
                Model.load(copy)
        (copy / file).unlink()
        with pytest.raises(RunError, match="cannot be read"):
            Model.load(copy)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("options", {"d": 5}),
        ("options", {"no_such_option": 1}),
        ("format", "other"),
        ("seed", "x"),
        ("files", {}),
    ],
)
def test_headers_that_do_not_fit_are_refused(saved, tmp_path, key, value):
    shutil.copytree(saved, tmp_path / "model")
    file = tmp_path / "model" / "model.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {key: value}))
    with pytest.raises(RunError):
        Model.load(tmp_path / "model")


def test_data_that_does_not_fit_together_is_refused(model):
    data = model.data
    sound = data.to_arrays()
    again = type(data).from_arrays(sound)
    assert again.users.tolist() == data.users.tolist()
    for name, array in (
        ("train.items", np.full_like(sound["train.items"], 99)),
        ("train.indptr", sound["train.indptr"][:-1]),
        ("trained", sound["trained"][:-1]),
        ("train.times", sound["train.times"][:-1]),
        ("later.items", -np.ones_like(sound["later.items"])),
    ):
        with pytest.raises(hushrec.HushrecError):
            type(data).from_arrays({**sound, name: array})
    for name in sound:
        if name not in ("titles", "holders"):
            with pytest.raises(hushrec.HushrecError):
                type(data).from_arrays({k: v for k, v in sound.items() if k != name})
