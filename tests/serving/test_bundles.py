"""The bundle of every method gives the lists of the run, and holds nothing of other users."""

import hashlib
import json
import re
import shutil
import stat
import subprocess
import sys
from contextlib import suppress
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load, save

import hushrec
from hushrec.aggregation import ClientRows
from hushrec.data import Interactions
from hushrec.data.interactions import Categorical
from hushrec.errors import ConfigError
from hushrec.methods.base import Exports, ExportsUser, Method, method_class, method_names
from hushrec.methods.forms import ItemCounts, ItemNetworks, RowNetwork
from hushrec.private import PrivateStore
from hushrec.serving import recommender as device
from hushrec.serving.bundle import can_export, contents, export
from hushrec.serving.data import Filter
from hushrec.serving.recommender import BundleError, Recommender
from hushrec.testing import taste_world

USERS, ITEMS, ME = 1000, 60, 7
ROUNDING = 1e-5
"""Of a score, as a share of the list's largest: beyond it lists in single precision are equal."""
SMALL = {"d": 8, "hidden": [8, 4]}
SILOS = {"silos.kind": "dirichlet", "silos.count": 12}
CENTRAL = {"privacy.mode": "central", "privacy.epsilon": 8.0, "privacy.noise_seed": 3}
MIXTURE = {"newton_rounds": 2, "network_rounds": 2, "lr": 0.2, "factors": 4}
MIXTURE |= {"top_candidates": 20, "random_candidates": 10, "reranked": 12, "hidden": 4}
HISTORIES = {
    "popularity": ("popularity", {}),
    "personal-frequency": ("personal-frequency", {}),
    "fcf": ("fcf", {"d": 8}),
    "fedals": ("fedals", {"d": 8, "frequency": 0.5}),
    "fedals central": ("fedals", {"d": 4, "price": 30.0, **CENTRAL}),
    "fednext": ("fednext", {"popularity": 0.1, "ridge": 5.0}),
    "fedease": ("fedease", {"popularity": 0.1, "ridge": 5.0}),
    "ease": ("ease", {"ridge": 5.0}),
    "itemknn": ("itemknn", {"neighbours": 20}),
    "markov": ("markov", {"window": 3, "recent": 2}),
    "fedmix": ("fedmix", {**MIXTURE, "ridge": 5.0, "evaluation.every": 8}),
}
"""Models that score from shared parameters and a history."""
PERSONAL = {
    "central-mf": ("central-mf", {"d": 8}),
    "cofedrec": ("cofedrec", {"d": 8, "clusters": 4}),
    "feddae": ("feddae", {"d": 8}),
    "fedpergnn": ("fedpergnn", {"d": 8}),
    "gpfedrec": ("gpfedrec", SMALL),
    "metamf": ("metamf", {"d": 8, "memory": 8, "hidden": 8, "rank": 2}),
    "fedmf": ("fedmf", {"d": 8}),
    "fedncf": ("fedncf", SMALL),
    "fedrap": ("fedrap", {"d": 8}),
    "fedrec": ("fedrec", {"d": 8}),
    "fedrecon": ("fedrecon", {"d": 8}),
    "fedrkg": ("fedrkg", {"d": 8, "interval": 2}),
    "fofl-self": ("fofl-self", SMALL),
    "lipm": ("lipm", {**SMALL, **SILOS}),
    "local-only": ("local-only", {"d": 8}),
    "negative-counter": ("negative-counter", {}),
    "neumf": ("neumf", SMALL),
    "nn-self": ("nn-self", SMALL),
    "pfedme": ("pfedme", {**SMALL, **SILOS}),
    "pfedrec": ("pfedrec", {"d": 8}),
    "privrec": ("privrec", {**SMALL, "shares": True}),
    "privrec-cen": ("privrec-cen", SMALL),
    "recent-popularity": ("recent-popularity", {}),
    "gru4rec": ("gru4rec", {"d": 8}),
    "sasrec": ("sasrec", {"d": 8}),
}
"""Models that score with parameters of one user."""
VARIANTS = {
    "fedmf dual": ("fedmf", {"d": 8, "dual": True}),
    "fedncf dual": ("fedncf", {**SMALL, "dual": True}),
    "fedrkg fedncf": ("fedrkg", {"d": 8, "backbone": "fedncf", "hidden": [8]}),
    "fedrkg mlp": ("fedrkg", {"d": 8, "score_function": "mlp"}),
    "fedrkg replace": ("fedrkg", {"d": 8, "guidance": "replace"}),
    "fofl-self unadapted": ("fofl-self", {**SMALL, "adapt_epochs": 0}),
    "lipm averages": ("lipm", {**SMALL, **SILOS, "averages": 3}),
    "lipm off": ("lipm", {**SMALL, **SILOS, "lipm": False}),
    "lipm users": ("lipm", {**SMALL, "meets_items": True, "epochs": 1}),
    "neumf mlp": ("neumf", {**SMALL, "products": False}),
    "pfedme users": ("pfedme", {**SMALL, "epochs": 1}),
    "pfedrec mlp": ("pfedrec", {"d": 8, "score_function": "mlp"}),
    "privrec unadapted": ("privrec", {**SMALL, "adapt_epochs": 0}),
}
CASES = {**HISTORIES, **PERSONAL, **VARIANTS}


@cache
def world() -> Interactions:
    """1,000 users who each touch items of one third of the catalogue."""
    rng, small = np.random.default_rng(0), taste_world()
    liked = [user % 3 * 20 + rng.permutation(20)[: 5 + user % 4] for user in range(USERS)]
    counts, names = [len(items) for items in liked], small.user_features["taste"].names
    return replace(
        small,
        user=np.repeat(np.arange(USERS, dtype=np.int32), counts),
        item=np.concatenate(liked).astype(np.int32),
        value=np.full(sum(counts), 3, np.float32),
        time=np.concatenate([np.arange(count) for count in counts]),
        users=np.array([f"user-{k:04d}" for k in range(USERS)]),
        user_features={"taste": Categorical(np.arange(USERS, dtype=np.int32) % 3, names, True)},
    )


@cache
def trained(case):
    """The run of a case; one for all tests."""
    method, settings = CASES[case]
    rounds = 2 if isinstance(method_class(method)(), ExportsUser) or method == "fcf" else None
    every = {} if method == "fedmix" else {"evaluation.every": 2}
    return hushrec.train(world(), method, rounds=rounds, settings={**every, **settings})


@cache
def model_of(case):
    return trained(case).model


def on_device(made, history=()):
    return Recommender(made.manifest, device._parse_tensors(made.model), history)


def check_same(found, expected, rounding=ROUNDING):
    """The same list but for items whose scores differ by rounding alone."""
    assert len(found) == len(expected)
    allowed = rounding * max([abs(line.score) for line in expected], default=0)
    for mine, theirs in zip(found, expected, strict=True):
        assert abs(mine.score - theirs.score) <= allowed
        if mine.item == theirs.item:
            assert mine.title == theirs.title
            # Only item weights and ensembles say why on a device (test_serve.py).
            assert mine.because in ("", theirs.because)
            continue
        scores = [line.score for line in expected if line.item == mine.item]
        assert min(abs(mine.score - s) for s in [*scores, expected[-1].score]) <= allowed


def overlap(found, expected):
    return len({line.item for line in found} & {line.item for line in expected}) / len(expected)


def test_every_method_has_a_form():
    methods = [method_class(name) for name in method_names()]
    built_in = [method for method in methods if method.__module__.startswith("hushrec.")]
    assert {method for method, _ in CASES.values()} == {method.name for method in built_in}
    for method in built_in:
        assert issubclass(method, Exports) != issubclass(method, ExportsUser)
        assert can_export(method()) == issubclass(method, Exports)


# ------------------------------------------------------------------ the lists of the run


@pytest.mark.parametrize("case", HISTORIES)
def test_1000_random_histories_get_the_lists_of_the_run(case):
    model, rng, halves = model_of(case), np.random.default_rng(1), []
    single, half = contents(model, precision="single"), contents(model)
    assert single.manifest["personal"] is False and "history" not in load(single.model)
    one, other = on_device(single), on_device(half)
    bits = case in ("popularity", "personal-frequency", "fednext", "fedease")
    rounding = 0 if bits else 1e-4 if case == "fedmix" else ROUNDING
    for number in range(1000):
        past = rng.permutation(ITEMS)[: rng.integers(0, 30)]
        expected = model.recommend("somebody", 10, [f"item-{k:02d}" for k in past])
        one._history = other._history = past.tolist()
        check_same(one.recommend(10), expected, rounding)
        if number < 200:
            halves.append(overlap(other.recommend(10), expected))
    assert np.mean(halves) > 0.97


@pytest.mark.parametrize("case", [*PERSONAL, *VARIANTS])
def test_1000_users_get_the_lists_of_the_run(case):
    """Every tenth user of a variant."""
    model, halves = model_of(case), []
    users = world().users.tolist()[:: 1 if case in PERSONAL else 10]
    chosen, indices = Filter.of(model.data, {}), model.indices(users)
    lists = model.lists(indices, 10, chosen, 1)
    if case == "lipm averages":  # a silo's mix is that of the users in a batch
        lists = (model.recommend(user, 10) for user in users)
    for number, (user, expected) in enumerate(zip(users, lists, strict=True)):
        here = on_device(contents(model, user, precision="single"))
        assert (here.user, here.fixed) == (user, True)
        check_same(here.recommend(10), expected)
        if number < 100:
            halves.append(overlap(on_device(contents(model, user)).recommend(10), expected))
    assert np.mean(halves) > 0.99 and min(halves) >= 0.8


@pytest.mark.parametrize("case", HISTORIES)
def test_a_known_user_may_have_a_bundle_of_a_shared_model(case):
    model = model_of(case)
    for user in world().users[:20].tolist():
        here = on_device(contents(model, user, precision="single"))
        history = model.data.history(model.indices([user])).positives[0]
        assert here.history == [f"item-{k:02d}" for k in history]
        check_same(here.recommend(10), model.recommend(user, 10), 1e-4)


def test_new_items_change_the_exclusions_of_a_fixed_model_only():
    here = on_device(contents(model_of("pfedrec"), "user-0001"))
    before = here.recommend(ITEMS)
    assert here.touch(before[0].item)
    assert here.recommend(ITEMS) == before[1:]
    follows = on_device(contents(model_of("fedals"), "user-0001"))
    before = follows.recommend(ITEMS)
    follows.touch(before[-1].item)
    assert {line.item: line.score for line in follows.recommend(ITEMS)} != {
        line.item: line.score for line in before[:-1]
    }


def test_a_user_without_a_history_gets_what_the_run_lists():
    """The popular items; where features are known, a method that reads them scores."""
    empty = world()
    gone = empty.user != ME
    columns = {name: getattr(empty, name)[gone] for name in ("user", "item", "value", "time")}
    data = replace(empty, **columns)
    for method, popular in (("fedmf", True), ("privrec", False)):
        settings = {**(SMALL if method == "privrec" else {"d": 8}), "evaluation.every": 1}
        model = hushrec.train(data, method, rounds=1, settings=settings).model
        made = contents(model, f"user-{ME:04d}", precision="single")
        assert made.manifest["popular"] is popular
        assert ("popularity" in load(made.model)) is popular
        check_same(on_device(made).recommend(10), model.recommend(f"user-{ME:04d}", 10))
        others = contents(model, "user-0008").manifest
        assert others["popular"] is False, "nobody with a history needs the others' counts"


def test_similar_items_have_similar_rows():
    model = model_of("fedmf")
    here = on_device(contents(model, "user-0001", precision="single"))
    found, theirs = here.similar("item-03", 5), model.similar("item-03", 5)
    assert [line.item for line in found] == [line.item for line in theirs]
    assert on_device(contents(model_of("fedals"))).similar("item-03", 5)
    for case, user in (("popularity", None), ("negative-counter", "user-0001")):
        with pytest.raises(ValueError, match="neither weights from item to item nor item vectors"):
            on_device(contents(model_of(case), user)).similar("item-03")


# ------------------------------------------------------------------ nothing of other users


def scrambled(model, rng):
    """The model after all other users got other parameters, another history, another name."""
    store, silos = model.private, model.data.holders is not None and model.method.traits.silos
    mine = int(model.data.client_index[ME]) if silos else ME
    fresh, everybody = PrivateStore(store.fields, store.n_users), np.arange(store.n_users)
    values = {}
    for name, value in store.read(everybody).items():
        if isinstance(value, ClientRows):
            owner = np.repeat(everybody, np.diff(value.indptr))
            # A silo keeps a row for each of its users; only one of them is mine.
            other = (value.ids != ME) if silos and name != "rows" else (owner != mine)
            rows = np.where(other[:, None], rng.standard_normal(value.rows.shape), value.rows)
            values[name] = ClientRows(value.indptr, value.ids, rows.astype(np.float32))
        else:
            drawn = rng.standard_normal(np.shape(value)).astype(np.asarray(value).dtype)
            drawn[mine] = np.asarray(value)[mine]
            values[name] = drawn
    if values:
        fresh.write(everybody, values)
    data = model.data
    past = data.train.positives
    moved = (past.values + 17) % ITEMS
    start, end = past.indptr[ME : ME + 2]
    moved[start:end] = past.values[start:end]
    later = data.later.values.copy()
    first, last = data.later.indptr[ME : ME + 2]
    later[:first], later[last:] = (later[:first] + 5) % ITEMS, (later[last:] + 5) % ITEMS
    users = np.array([f"other-{k:03d}" if k != ME else user for k, user in enumerate(data.users)])
    train = replace(data.train, positives=replace(past, values=moved.astype(np.int32)))
    changed = replace(data, train=train, later=replace(data.later, values=later), users=users)
    return replace(model, private=fresh, data=changed)


@pytest.mark.parametrize("case", [*PERSONAL, "fedmf dual", "fedncf dual", "fedals"])
def test_other_users_change_no_byte_of_a_bundle(case):
    model, user = model_of(case), f"user-{ME:04d}"
    other = scrambled(model, np.random.default_rng(2))
    assert contents(other, user) == contents(model, user)


@pytest.mark.parametrize("precision", ["half", "single"])
@pytest.mark.parametrize("case", [*PERSONAL, "fedmf dual", "fedncf dual", "fedals"])
def test_a_bundle_has_no_bytes_of_other_users(case, precision):
    model, user = scrambled(model_of(case), np.random.default_rng(3)), f"user-{ME:04d}"
    made = contents(model, user, precision=precision)
    text = json.dumps(made.manifest)
    assert re.findall(r"user-\d+|other-\d+", text) == [user]
    assert b"user-" not in made.model and b"other-" not in made.model
    for other in range(100):
        past = model.data.history(np.array([other])).positives[0]
        inside = any(past.astype(kind).tobytes() in made.model for kind in ("<i4", "<u2", "<i8"))
        assert inside == (other == ME), "the own history and no other"
    scales = [1.0, *re.findall(r'"scale": ([\d.e+-]+)', text)]
    searched = 0
    for row in private_rows(model):
        for scale in map(float, scales):
            for kind in ("<f2", "<f4"):
                with np.errstate(over="ignore"):
                    assert (row / np.float32(scale)).astype(kind).tobytes() not in made.model
        searched += 1
    assert searched > 100 or not model.private.fields


def private_rows(model):
    """Rows of some hundred other users, of four numbers or more: none is there by chance."""
    silos = model.data.holders is not None and model.method.traits.silos
    mine = int(model.data.client_index[ME]) if silos else ME
    who = np.array([k for k in range(min(model.private.n_users, 150)) if k != mine])
    for value in model.private.read(who).values():
        rows = value.rows if isinstance(value, ClientRows) else np.asarray(value)
        if rows.ndim > 1:
            flat = rows.reshape(-1, rows.shape[-1])
            yield from flat[:: max(1, len(flat) // 400)] if flat.shape[1] >= 4 else ()


def test_the_search_finds_rows_that_are_there():
    """A bundle of another user's rows is caught."""
    model = scrambled(model_of("fedmf"), np.random.default_rng(3))
    made = contents(model, "other-009", precision="single")
    (row,) = np.asarray(model.private.read(np.array([9]))["vector"])
    assert row.astype("<f4").tobytes() in made.model


# ------------------------------------------------------------------ files


def test_a_personal_bundle_is_for_its_owner(tmp_path):
    run = trained("pfedrec")
    place = run.export(tmp_path / "mine", user="user-0001")
    assert stat.S_IMODE(place.stat().st_mode) == 0o700
    assert {stat.S_IMODE(file.stat().st_mode) for file in place.iterdir()} == {0o600}
    manifest = json.loads((place / device.MANIFEST).read_text())
    assert manifest["format"] == "hushrec-bundle-7"
    assert (manifest["personal"], manifest["user"]) == (True, "user-0001")
    assert manifest["scores"] == "fixed"
    again = run.export(place, user="user-0002", overwrite=True)
    assert {stat.S_IMODE(file.stat().st_mode) for file in again.iterdir()} == {0o600}
    assert Recommender.load(again).user == "user-0002"
    shared = trained("fedals").export(tmp_path / "anybody's")
    assert stat.S_IMODE((shared / device.MODEL).stat().st_mode) & 0o044


@pytest.mark.parametrize("case", ["popularity", "fedals", "fedals central", "neumf", "privrec"])
def test_numpy_alone_reads_it(case, tmp_path):
    user = None if case in HISTORIES else "user-0001"
    place = trained(case).export(tmp_path / "bundle", user=user)
    shutil.copy(device.__file__, tmp_path / "alone.py")
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        "from alone import Recommender\n"
        f"r = Recommender.load({str(place)!r}, ['item-03'])\n"
        "print(len(r.recommend()), sorted({'hushrec', 'numba', 'torch'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "10 []"


# ------------------------------------------------------------------ refusals


class Plain(Method):
    """A method that says nothing of devices."""

    name = "plain"

    def init(self, view, streams):
        return {}

    def score(self, shared, private, history):
        return np.zeros((len(history), history.n_items), np.float32)


class Infinite(Plain, Exports):
    """A method with a score that is infinite."""

    def device_form(self, shared, view):
        return ItemCounts(np.full(ITEMS, np.inf, np.float32))


class Linear(Plain, Exports):
    """A method of another package: scores are the numbers of items."""

    def device_form(self, shared, view):
        rows = np.arange(2.0 * ITEMS).reshape(ITEMS, 2)
        return ItemNetworks([RowNetwork(rows, [(np.ones((2, 1)), np.zeros(1))])])


def test_what_cannot_be_exported_is_refused_in_a_sentence(tmp_path):
    model = model_of("pfedrec")
    with pytest.raises(ConfigError, match=r"pfedrec scores with parameters of single users.*user="):
        export(model, tmp_path / "b")
    with pytest.raises(ConfigError, match="user 'nobody' is unknown to this model: only its users"):
        export(model, tmp_path / "b", user="nobody")
    with pytest.raises(ConfigError, match="plain has no form for devices"):
        export(replace(model, method=Plain()), tmp_path / "b")
    with pytest.raises(ConfigError, match="'scores' has numbers that are NaN or infinite"):
        export(replace(model, method=Infinite()), tmp_path / "b")
    with pytest.raises(ConfigError, match="at least 1"):
        contents(model_of("fednext"), neighbours=0)
    rated = method_class("fcf")
    with_values = replace(model_of("fcf"), method=rated(rated.Config(d=8, positive_above=2.0)))
    assert contents(with_values)
    with pytest.raises(ConfigError, match="reads the ratings of a history"):
        contents(with_values, "user-0001")
    assert list(tmp_path.iterdir()) == []


def test_baskets_of_a_history_are_refused():
    data = model_of("fedmix").data
    baskets = replace(data, train=replace(data.train, repeats=True))
    with pytest.raises(ConfigError, match="reads the baskets of a history"):
        contents(replace(model_of("fedmix"), data=baskets), "user-0001")


def test_a_method_of_another_package_says_how_devices_score():
    made = contents(replace(model_of("fedals"), method=Linear()), precision="single")
    here = on_device(made, ["item-57"])
    assert [line.item for line in here.recommend(2)] == ["item-59", "item-58"]
    assert here.fixed and here.user is None


# ------------------------------------------------------------------ damaged and hostile bundles


@cache
def sound(kind):
    """A bundle of every kind that this module is about, as a manifest and arrays."""
    case, user = {
        "counts": ("personal-frequency", None),
        "solved": ("fedals", None),
        "sum": ("fedals central", None),
        "network": ("neumf", "user-0001"),
    }[kind]
    made = contents(model_of(case), user)
    return made.manifest, load(made.model)


def branch(**options):
    """Change the first network."""
    return lambda told: told["branches"][0].update(options)


F4 = np.float32
WRONG = {
    "counts": [
        {"own": -1},
        {"own": None},
        {"own": 0},
        {"scores": "fixed"},
        {"branches": []},
        {"scale": 1.0},
        {"user": "user-0001"},
        {"personal": True},
        {"personal": 1},
        {"tensor": ("scores", np.zeros(3, F4))},
        {"tensor": ("scores", np.zeros(ITEMS, np.float16))},
        {"tensor": ("scores", np.full(ITEMS, np.nan, F4))},
        {"tensor": ("history", np.zeros(3, np.int32))},
    ],
    "solved": [
        {"vector": "other"},
        {"vector": "sum"},
        {"ridge": 0},
        {"ridge": float("nan")},
        {"unseen": -0.1},
        {"frequency": "1"},
        {"factor": 0},
        {"scale": 0},
        {"scale": 1e300},
        {"scores": "fixed"},
        {"tensor": ("items", np.zeros((3, 8), F4))},
        {"tensor": ("items", np.zeros((ITEMS, 8, 1), F4))},
        {"tensor": ("items", np.zeros((ITEMS, 5000), np.float16))},
        {"tensor": ("known", np.zeros(ITEMS, np.uint8))},
    ],
    "sum": [
        {"recent": 0},
        {"recent": 10**9},
        {"recency": -1},
        {"tensor": ("known", np.zeros(3, np.uint8))},
        {"tensor": ("known", np.zeros(ITEMS, F4))},
    ],
    "network": [
        {"branches": None},
        {"branches": []},
        {"branches": [{"scale": 1.0, "layers": 1}] * 9},
        {"branches": [3]},
        {"user": None},
        {"user": 7},
        {"personal": False},
        {"scores": "from history"},
        branch(scale=0),
        branch(scale=float("inf")),
        branch(layers=0),
        branch(layers=2),
        branch(layers=10**5),
        branch(more=1),
        {"tensor": ("history", np.full(3, ITEMS, np.int32))},
        {"tensor": ("history", np.full(3, -1, np.int32))},
        {"tensor": ("history", np.zeros(3, np.int32))},
        {"tensor": ("history", np.zeros((3, 1), np.int32))},
        {"tensor": ("0/rows", np.zeros((3, 8), F4))},
        {"tensor": ("0/rows", np.full((ITEMS, 8), np.inf, F4))},
        {"tensor": ("0/0/weight", np.zeros((8, 2), F4))},
        {"tensor": ("0/0/weight", np.zeros((8, 1), np.float16))},
        {"tensor": ("0/0/bias", np.zeros(2, F4))},
        {"tensor": ("1/0/weight", np.zeros((8, 5000), F4))},
        {"tensor": ("2/rows", np.zeros((ITEMS, 8), F4))},
    ],
}


@pytest.mark.parametrize("kind", WRONG)
def test_a_wrong_bundle_is_refused(kind):
    manifest, tensors = sound(kind)
    assert Recommender(manifest, tensors, ["item-01"]).recommend(3)
    for wrong in [*WRONG[kind], {"more": 1}, {"model": "other"}, {"popular": None}]:
        told, arrays = json.loads(json.dumps(manifest)), dict(tensors)
        if callable(wrong):
            wrong(told)
        elif "tensor" in wrong:
            name, array = wrong["tensor"]
            arrays[name] = array
        else:
            told |= wrong
        with pytest.raises(BundleError):
            Recommender(told, arrays)
    for name in tensors:
        with pytest.raises(BundleError):
            Recommender(manifest, {n: a for n, a in tensors.items() if n != name})


def test_huge_numbers_and_huge_work_are_refused(monkeypatch):
    manifest, tensors = sound("network")
    large = {**tensors, "0/0/weight": np.full_like(tensors["0/0/weight"], 1e38)}
    first, *others = manifest["branches"]
    scaled = {**manifest, "branches": [{**first, "scale": 1e30}, *others]}
    with pytest.raises(BundleError, match="NaN or infinite"):
        Recommender(scaled, large).recommend()
    monkeypatch.setattr(device, "MOST_PRODUCTS", 100)
    with pytest.raises(BundleError, match="too large for a device"):
        Recommender(manifest, tensors)
    with pytest.raises(BundleError, match="too wide for a device"):
        Recommender(*sound("solved"))


def test_a_system_without_a_solution_is_refused():
    manifest, tensors = sound("solved")
    rows = np.ones_like(tensors["items"])
    singular = {**manifest, "ridge": 1e-30, "frequency": 0.0, "unseen": 0.0}
    with suppress(BundleError):
        found = Recommender(singular, {**tensors, "items": rows}, ["item-01"]).recommend(5)
        assert all(np.isfinite(line.score) for line in found)


@pytest.mark.parametrize("kind", WRONG)
@given(data=st.data())
def test_random_damage_is_an_error_and_nothing_else(kind, tmp_path_factory, data):
    manifest, tensors = sound(kind)
    content = bytearray(save(tensors))
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, min(600, len(content) - 1)))] = data.draw(
            st.integers(0, 255)
        )
    content = bytes(content[: data.draw(st.integers(8, len(content)))])
    told = json.loads(json.dumps(manifest))
    if data.draw(st.booleans()):
        odd = st.sampled_from([None, True, -1, 0, 1e30, 10**40, "x", [], {}, [[1]], {"scale": 1}])
        told[data.draw(st.sampled_from(sorted(told)))] = data.draw(odd)
    told |= {"model_bytes": len(content), "model_sha256": hashlib.sha256(content).hexdigest()}
    place = tmp_path_factory.mktemp("damaged")
    (place / device.MODEL).write_bytes(content)
    (place / device.MANIFEST).write_text(json.dumps(told))
    with suppress(BundleError):
        found = Recommender.load(place, ["item-01"]).recommend()
        assert all(np.isfinite(line.score) for line in found)
