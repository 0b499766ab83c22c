"""What no noise covers is declared: nobody's rows decide on items, their order, or categories."""

import json
from dataclasses import replace

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

import hushrec
from conftest import interactions
from hushrec.api import Run, train
from hushrec.cli import main
from hushrec.data.interactions import Categorical, Interactions, id_order
from hushrec.data.splitting import SplitConfig, make_split
from hushrec.errors import ConfigError, StoppedError
from hushrec.federation.experiment import ExperimentRequest
from hushrec.federation.setup import make_task, set_up, upload_schedule
from hushrec.methods.base import method_class, method_names
from hushrec.streams import Streams
from hushrec.testing.checks import taste_world
from test_api import StopAfter

CENTRAL = {"privacy.mode": "central", "privacy.noise_seed": 3, "privacy.epsilon": 8.0}
LOCAL = {"privacy.mode": "local-gaussian", "privacy.noise_seed": 3, "privacy.scale": 1.0}
ACCEPTED = {"privacy.undeclared": True}
NOT_COVERED = "the list of items is not covered: it was taken from the users' rows"
TRAITS = {name: method_class(name).traits for name in method_names()}
PROTECTABLE = [
    name
    for name, has in TRAITS.items()
    if not (has.pooled or has.data_weighted)
    and not (has.exact_sums and method_class(name).under_noise is None)
]


def emptied(data, user):
    """Without any row of this user."""
    return data.select(data.user != user)


def replaced(data, user, other):
    """With another's rows in place of this user's."""
    others, theirs = np.flatnonzero(data.user != user), np.flatnonzero(data.user == other)
    taken = data.select(np.concatenate([others, theirs]))
    whose = np.concatenate([data.user[others], np.full(len(theirs), user)])
    return replace(taken, user=whose.astype(np.int32))


def neighbours(data, user):
    yield emptied(data, user)
    yield replaced(data, user, (user + 1) % data.n_users)


def vocabulary(columns):
    return {
        name: getattr(column, "names", np.zeros(0)).tolist() for name, column in columns.items()
    }


def known_before_the_first_round(data, methods):
    """Everything that is agreed on before anybody uploads anything, and when what is uploaded."""
    split = make_split(data, SplitConfig(), Streams(0))
    facts = {
        "users": split.n_users,
        "population": split.member_clients.tolist(),
        "items": split.data.items.tolist(),
        "titles": [split.data.title(k) for k in range(split.data.n_items)],
        "people": vocabulary(split.train.user_features),
        "described": {name: c.tobytes() for name, c in split.data.item_features.items()},
    }
    for method in methods:
        experiment = ExperimentRequest(
            data.name, method, settings={"privacy.mode": "central"}
        ).experiment()
        task = make_task(experiment, split, key="the same")
        facts[f"schedule of {method}"] = upload_schedule(task, min(experiment.rounds, 12))
        facts[f"start of {method}"] = {name: a.tobytes() for name, a in task.initial.items()}
    return facts


def assert_nobody_decides(data, users, methods):
    before = known_before_the_first_round(data, methods)
    for user in users:
        for neighbour in neighbours(data, user):
            assert known_before_the_first_round(neighbour, methods) == before, data.users[user]


def test_nobodys_rows_change_what_is_known_before_the_first_round():
    world = taste_world()
    assert_nobody_decides(world, range(world.n_users), ["fedmf"])
    assert_nobody_decides(world, [0, 1, 59], PROTECTABLE)


@pytest.mark.parametrize("name", ["demo", "ml-100k", "frappe"])
def test_nor_in_the_named_data_sets(name, request):
    if name != "demo":
        request.getfixturevalue("data_dir")
    data = hushrec.load(name)
    lonely = np.bincount(data.item, minlength=data.n_items)[data.item] == 1
    # Whoever touched what nobody else did, if there are any, and the first, and the last.
    users = {*data.user[lonely][:2].tolist(), 0, data.n_users - 1}
    assert_nobody_decides(data, users, ["fedmf", "fednext"])


def test_a_list_that_is_found_in_the_rows_does_change():
    # The control of the two above: what only user 0 touched is on the list because of user 0.
    world = taste_world()
    own = world.item[world.user == 0][0]
    only = world.select((world.item != own) | (world.user == 0))
    found, without = only.compacted(), emptied(only, 0).compacted()
    assert set(found.items) - set(without.items) == {world.items[own]}
    assert not found.items_declared
    assert known_before_the_first_round(found, []) != known_before_the_first_round(without, [])


# --------------------------------------------------------------------------- the order of items


def as_they_came(rows):
    """Number users and items in the order of the file, as a careless reader would."""
    users, items = (list(dict.fromkeys(column)) for column in zip(*rows, strict=True))
    return Interactions(
        name="log",
        user=np.array([users.index(user) for user, _ in rows], np.int32),
        item=np.array([items.index(item) for _, item in rows], np.int32),
        value=np.ones(len(rows), np.float32),
        time=np.arange(len(rows)),
        users=np.array(users),
        items=np.array(items),
    )


def log_that_begins_with(user, world):
    """A log whose first rows are one user's, in an order of their own; and that history."""
    generator = np.random.default_rng(user)
    others = generator.permutation([other for other in range(world.n_users) if other != user])
    rows = [
        (str(world.users[who]), str(world.items[item]))
        for who in (user, *others)
        for item in generator.permutation(world.item[world.user == who])
    ]
    return rows, [item for who, item in rows if who == rows[0][0]]


def share_found(items, history):
    """Take the first names of a table for the first user's history: how many are, and in order."""
    guess = [str(item) for item in items[: len(history)]]
    in_order = np.mean([mine == theirs for mine, theirs in zip(guess, history, strict=True)])
    return len(set(guess) & set(history)) / len(history), float(in_order)


def test_the_first_names_of_a_table_are_not_the_first_users_history():
    world, found, chance = taste_world(), [], []
    for user in range(world.n_users):
        rows, history = log_that_begins_with(user, world)
        careless = as_they_came(rows)
        assert share_found(careless.items, history) == (1.0, 1.0), "the attack works where it can"
        for data in (careless, careless.with_public_items(world.items)):
            released = make_split(data, SplitConfig(), Streams(0)).data
            assert released.items.tolist() == world.items.tolist()
        found.append(share_found(released.items, history))
        chance.append(len(history) / world.n_items)
    # Over all users the guess is as good as any other guess of that length.
    assert np.mean(found, axis=0)[0] == pytest.approx(np.mean(chance), abs=0.05)
    assert np.mean(found, axis=0)[1] < 0.05


def test_what_is_released_is_the_same_whoever_came_first():
    world = taste_world()
    released = []
    for user in (0, 31, 59):
        rows, _ = log_that_begins_with(user, world)
        # In time a log of equal rows is equal, whatever their order in the file.
        time = np.array([hash_of(row) for row in rows])
        found = replace(as_they_came(rows), time=time)
        for data, asked in ((found.with_public_items(world.items), {}), (found, ACCEPTED)):
            run = train(data, "popularity", settings={**CENTRAL, **asked})
            released.append({name: array.tobytes() for name, array in run.model.shared.items()})
    assert all(each == released[0] for each in released)


def hash_of(row):
    return int(row[0][-2:]) * 100 + int(row[1][-2:]) * 7 % 60


IDS = st.one_of(
    st.sets(st.text("abc019", min_size=1, max_size=4), min_size=2, max_size=9),
    st.sets(st.integers(0, 10**25).map(str), min_size=2, max_size=9),
)


@given(IDS, st.randoms())
def test_ids_are_numbered_by_value_or_as_text_whatever_their_order(ids, shuffle):
    ids = sorted(ids)
    whole = all(one.isdecimal() for one in ids)
    expected = sorted(ids, key=lambda one: (int(one), one.lstrip("0"), one) if whole else one)
    shuffle.shuffle(ids)
    given_ids = np.array(ids)
    assert given_ids[id_order(given_ids)].tolist() == expected


@given(st.randoms())
def test_numbering_by_id_keeps_every_row_and_what_describes_it(shuffle):
    world = taste_world()
    items = list(range(world.n_items))
    shuffle.shuffle(items)
    mixed = world._renumbered(np.arange(world.n_users), np.array(items))
    mixed = replace(mixed, titles=np.char.add("The ", mixed.items))
    again = mixed.ordered()
    assert again.items.tolist() == world.items.tolist()
    assert (again.item == world.item).all()
    assert again.title(7) == "The item-07"
    for name, column in world.item_features.items():
        assert again.item_features[name].tobytes() == column.tobytes()
    assert world.ordered() is world


# ------------------------------------------------------------------------------ what is refused


def found_in_rows(data):
    return replace(data, items_declared=False)


@pytest.mark.parametrize("mode", [CENTRAL, LOCAL], ids=["central", "local"])
def test_a_unique_item_that_shows_its_user_is_refused(tiny, mode):
    data = found_in_rows(tiny)
    with pytest.raises(ConfigError, match=r"--items FILE .*with_public_items.*undeclared = true"):
        train(data, "fedmf", rounds=2, settings=mode)
    train(data, "fedmf", rounds=2)  # nothing is promised
    train(data.with_public_items(data.items), "fedmf", rounds=2, settings=mode)


def test_an_undeclared_list_can_be_accepted_and_is_said_first(tiny):
    said = train(found_in_rows(tiny), "popularity", settings={**CENTRAL, **ACCEPTED})
    privacy = said.summary.privacy
    assert privacy.not_covered[0] == NOT_COVERED
    assert f"Not covered: {NOT_COVERED};" in privacy.statement
    assert not any("items" in fact for fact in privacy.public)
    covered = train(tiny, "popularity", settings=CENTRAL).summary.privacy
    assert NOT_COVERED not in covered.statement
    assert covered.public == ["the list of 40 items", "the number of clients, 30"]
    assert "Public: the list of 40 items; the number of clients, 30." in covered.statement


def test_accepting_what_is_declared_anyway_is_refused(tiny):
    with pytest.raises(ConfigError, match="undeclared does nothing: the list"):
        train(tiny, "popularity", settings={**CENTRAL, **ACCEPTED})
    with pytest.raises(ConfigError, match="undeclared does nothing without a mode"):
        train(tiny, "popularity", settings=ACCEPTED)


def with_people(data, column, kind="user_features"):
    return replace(data, **{kind: {"town": column}})


@pytest.mark.parametrize("kind", ["user_features", "context"])
def test_categories_that_were_found_in_the_rows_are_refused(tiny, kind):
    size = tiny.n_users if kind == "user_features" else len(tiny)
    entries = ["Ely", *["Rome"] * (size - 1)]
    found = with_people(tiny, Categorical.of(entries), kind)
    with pytest.raises(ConfigError, match=r"categories of 'town' .*town:category:A\|B\|C"):
        train(found, "popularity", settings=CENTRAL)
    accepted = train(found, "popularity", settings={**CENTRAL, **ACCEPTED}).summary.privacy
    assert accepted.not_covered[0].startswith("the categories of 'town' are not covered")
    named = with_people(tiny, Categorical.of(entries, ["Ely", "Oslo", "Rome"]), kind)
    said = train(named, "popularity", settings=CENTRAL).summary.privacy
    assert "the categories of town" in said.public


def test_the_statement_names_dates_and_what_describes_items():
    settings = {**CENTRAL, "split.kind": "time", "split.valid_from": 6, "split.test_from": 8}
    said = train(taste_world(), "popularity", settings=settings).summary.privacy
    assert said.public == [
        "the list of 60 items and their features",
        "the categories of taste",
        "the number of clients, 60",
        "the dates of the split",
    ]


def test_a_file_under_a_known_name_is_public_only_if_it_is_the_published_one(cache):
    place = cache / "filmtrust"
    place.mkdir(parents=True)
    rows = [f"{u} {(u * 3 + k) % 17} 1" for u in range(1, 6) for k in range(12)]
    (place / "ratings.txt").write_text("\n".join(rows))
    data = hushrec.load("filmtrust")
    assert any("not the published file" in note for note in data.notes)
    with pytest.raises(ConfigError, match="--items FILE"):
        train(data, "popularity", settings=CENTRAL)


def test_the_named_data_sets_have_declared_theirs(data_dir):
    for name in hushrec.data.names():
        data = hushrec.load(name)
        assert data.items_declared, name
        people = make_split(data, SplitConfig(), Streams(0)).train.user_features
        assert all(getattr(column, "declared", True) for column in people.values()), name
        assert data.items.tolist() == data.items[id_order(data.items)].tolist()


# ------------------------------------------------------------------- files and the command line

HEADER = "user,item,rating,timestamp\n"


@pytest.fixture
def shop(tmp_path):
    """A file of ratings in which one user has an item of their own, and the list of the shop."""
    lines = [(f"u{u}", f"i{(u * 3 + k) % 9}", k) for u in range(12) for k in range(6)]
    lines.append(("u3", "rare", 99))

    def write(name, kept):
        path = tmp_path / name
        path.write_text(HEADER + "".join(f"{u},{i},1,{t}\n" for u, i, t in kept))
        return str(path)

    (tmp_path / "list.txt").write_text("\n".join([*(f"i{k}" for k in range(12)), "rare"]))
    everybody = write("all.csv", lines)
    without = write("without.csv", [line for line in lines if line[0] != "u3"])
    return everybody, without, str(tmp_path / "list.txt")


def hush(*arguments):
    return CliRunner().invoke(main, list(arguments))


PROTECT = ["--method", "popularity", "--privacy", "central", "--epsilon", "8", "--json"]


def test_a_bare_file_is_refused_and_a_list_makes_it_right(shop, tmp_path):
    everybody, without, listed = shop
    refused = hush("train", "--data", everybody, "--out", str(tmp_path / "no"), *PROTECT)
    assert refused.exit_code == 2
    assert "--items FILE" in refused.stderr
    assert "Traceback" not in refused.output
    assert not (tmp_path / "no").exists()
    catalogues = []
    for name, data in (("with", everybody), ("without", without)):
        out = str(tmp_path / name)
        done = hush("train", "--data", data, "--items", listed, "--out", out, *PROTECT)
        assert done.exit_code == 0, done.output
        assert json.loads(done.stdout)["privacy"]["public"][0] == "the list of 13 items"
        run = Run.open(out)  # finds the list again
        assert run.experiment.items == listed
        catalogues.append(
            (run.data.items.tolist(), {n: a.shape for n, a in run.model.shared.items()})
        )
    assert catalogues[0] == catalogues[1], "nothing shows that u3 was there"
    # The control: a list found in the rows shows it, and the run says that this is not covered.
    seen = []
    for name, data in (("loose", everybody), ("looser", without)):
        out = str(tmp_path / name)
        asked = ("--set", "privacy.undeclared=true", "--out", out)
        done = hush("train", "--data", data, *asked, *PROTECT)
        assert json.loads(done.stdout)["privacy"]["not_covered"][0] == NOT_COVERED
        seen.append("rare" in Run.open(out).data.items)
    assert seen == [True, False]


def test_an_item_that_is_not_on_the_list_is_named_by_line(shop, tmp_path):
    everybody, _, _ = shop
    short = tmp_path / "short.txt"
    short.write_text("\n".join(f"i{k}" for k in range(9)))
    refused = hush("train", "--data", everybody, "--items", str(short), *PROTECT)
    assert refused.exit_code == 2
    assert "all.csv, line 74, column 'item': item 'rare' is not in the list" in refused.stderr


def test_a_resumed_run_finds_the_list_again(shop, tmp_path):
    everybody, _, listed = shop
    out = str(tmp_path / "run")
    data = hushrec.load(everybody, items=listed)
    stop = StopAfter(2)
    with pytest.raises(StoppedError):
        train(data, "fedmf", rounds=4, out=out, callbacks=[stop])
    refused = hush("train", "--resume", "--out", out, "--items", listed)
    assert refused.exit_code == 2
    assert "leave out --items" in refused.stderr
    again = hush("train", "--resume", "--out", out, "--json")
    assert again.exit_code == 0, again.output
    assert Run.open(out).data.n_items == 13


# --------------------------------------------------------------- rows of others decide on no rows


SPLITS = {
    "leave-one-out": {},
    "ratio": {"kind": "ratio"},
    "ratio, any order": {"kind": "ratio", "order": "random"},
    "dates": {"kind": "time", "valid_from": 100, "test_from": 140},
    "unseen users": {"kind": "unseen-users"},
    "unseen users, any order": {"kind": "unseen-users", "order": "random"},
}
FILTERS = {
    "plain": {},
    "filtered": {"drop_below": 2.0, "positive_above": 3.0, "min_train": 4},
    "repeats": {"repeats": "keep", "min_train": 3},
}


def noisy_world():
    """Users of different length with repeats, ratings and a context."""
    generator = np.random.default_rng(2)
    rows = [
        (u, int(generator.integers(40)), 10 * t + u % 10)
        for u in range(30)
        for t in range(14 + u % 7)
    ]
    data = interactions(rows)
    values = generator.integers(1, 6, len(data)).astype(np.float32)
    days = Categorical.of(generator.choice(["mon", "tue"], len(data)).tolist(), ["mon", "tue"])
    return replace(data.with_public_items(data.items), value=values, context={"day": days})


def shares_of(split, users):
    """What each of these users trains on, validates on, tests on and is described by."""
    ragged = (split.train.positives, split.train.times, split.train.values)
    ragged += (split.valid, split.test, split.disliked)
    codes = split.train.user_features["day"].codes
    trains = set(split.training_users.tolist())
    return [([part[u].tolist() for part in ragged], int(codes[u]), u in trains) for u in users]


@pytest.mark.parametrize("filters", FILTERS.values(), ids=FILTERS)
@pytest.mark.parametrize("kind", SPLITS.values(), ids=SPLITS)
def test_nobodys_rows_change_what_others_train_on(kind, filters):
    data, config = noisy_world(), SplitConfig(**kind, **filters)
    before = make_split(data, config, Streams(1))
    for user in range(data.n_users):
        others = [u for u in range(data.n_users) if u != user]
        for neighbour in neighbours(data, user):
            after = make_split(neighbour, config, Streams(1))
            assert shares_of(after, others) == shares_of(before, others)


def test_dates_that_are_shares_do_and_are_refused():
    data, config = noisy_world(), SplitConfig(kind="time")
    before, after = (make_split(d, config, Streams(1)) for d in (data, emptied(data, 20)))
    assert shares_of(after, range(20)) != shares_of(before, range(20)), "the test above can fail"
    experiment = ExperimentRequest(
        "tiny", "popularity", settings={**CENTRAL, "split.kind": "time"}
    ).experiment()
    with pytest.raises(ConfigError, match="share of everybody's rows"):
        set_up(experiment, before)
