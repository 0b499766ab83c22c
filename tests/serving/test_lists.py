"""Lists: without a history, with reasons, filtered, into files, and from the run alone."""

import csv
import json
import stat
from dataclasses import replace

import ir_measures
import numpy as np
import pytest
from ir_measures import nDCG

import hushrec
from hushrec.analysis.run import one_user
from hushrec.data.interactions import Categorical, MultiCategorical, Numeric
from hushrec.data.splitting import SplitConfig, make_split
from hushrec.errors import ConfigError, RunError
from hushrec.methods.base import ItemPopularity, method_names
from hushrec.serving.bundle import export
from hushrec.serving.recommender import Recommender
from hushrec.streams import Streams
from hushrec.studio.pages import Studio
from hushrec.testing import taste_world

SMALL = {"newton_rounds": 2, "network_rounds": 2, "top_candidates": 20}
SMALL |= {"random_candidates": 10, "reranked": 12, "hidden": 4, "factors": 4, "ridge": 5.0}
SETTINGS = {"fedmix": SMALL | {"evaluation.every": 6}, "fednext": {"ridge": 5.0}}
CENTRAL = {"privacy.mode": "central", "privacy.epsilon": 8.0, "privacy.noise_seed": 3}
HISTORY = ["item-03", "item-08", "item-21"]


def trained(method, data=None, **more):
    settings = SETTINGS.get(method, {}) | more
    planned = method in ("fedmix", "fednext", "fedease")
    data = taste_world() if data is None else data
    return hushrec.train(data, method, rounds=None if planned else 1, settings=settings)


@pytest.fixture(scope="module")
def runs():
    return {name: trained(name) for name in ("fedmix", "fednext", "fedease", "fedmf", "popularity")}


def touched_by(run):
    """Return how many training users touched each item, counted apart."""
    train, counts = run.split.train.positives, np.zeros(run.data.n_items)
    for user in run.split.training_users:
        counts[np.unique(train[user])] += 1
    return counts


# ------------------------------------------------------------ without a history


def check_popular(run, lines):
    counts = touched_by(run)
    found = [counts[run.model.data.item_index[line.item]] for line in lines]
    assert found == sorted(counts, reverse=True)[: len(lines)]
    assert {line.because for line in lines} == {"popular"}


# Recent popularity means other items by popular ones.
@pytest.mark.parametrize("method", sorted({*method_names()} - {"recent-popularity"}))
def test_somebody_without_a_history_gets_the_popular_items(method):
    run = trained(method)
    check_popular(run, run.recommend("nobody", 5, history=[]))
    check_popular(run, run.recommend("nobody", 5, history=["not in the catalogue"]))


def test_features_are_enough_for_a_method_that_reads_them():
    run = trained("privrec")
    lines = run.recommend("nobody", 5, history=[], features={"taste": "middle"})
    assert {line.because for line in lines} == {""}
    scores = run.model.scores_of_new(run.model.data.new_user([], {"taste": "middle"}))[0]
    best = np.argsort(-scores, kind="stable")[:5]
    assert [line.item for line in lines] == run.data.items[best].tolist()


@pytest.mark.parametrize("method", ["fedmix", "fedmf"])
def test_a_known_user_without_rows_gets_them_too(runs, method):
    run, data = runs[method], runs[method].model.data
    train = replace(data.train, **{n: first_emptied(getattr(data.train, n)) for n in LISTS})
    model = replace(run.model, data=replace(data, train=train, later=first_emptied(data.later)))
    lines = model.recommend(["user-00", "user-01"], 5).where(user="user-00")
    assert lines.columns["because"] == ["popular"] * 5
    assert model.recommend("user-00", 5)[0].item == lines.columns["item"][0]
    own = [line.item for line in run.recommend("user-01", 5)]
    assert [line.item for line in model.recommend("user-01", 5)] == own


LISTS = ("positives", "times", "values")


def first_emptied(lists):
    """Return the lists with that of the first user empty."""
    gone = lists.lengths[0]
    return type(lists)(np.maximum(lists.indptr - gone, 0), lists.values[gone:])


def test_raw_counts_are_not_listed_under_a_promise():
    """They are not covered: the list follows from the shared parameters and public facts alone."""
    run = trained("fedmf", **CENTRAL)
    assert run.model.promises and not isinstance(run.model.method, ItemPopularity)
    assert run.model.popularity is None
    lines = run.recommend("nobody", 5, history=[])
    assert {line.because for line in lines} == {""}
    others = make_split(taste_world(), SplitConfig(), Streams(9)).train
    moved = replace(run.model.data.train, positives=others.positives.take(np.arange(60)[::-1]))
    model = replace(run.model, data=replace(run.model.data, train=moved))
    assert model.recommend("nobody", 5, history=[]) == lines
    noised = trained("fednext", price=5.0, **CENTRAL)
    np.testing.assert_array_equal(noised.model.popularity, noised.model.shared["shares"])


@pytest.mark.parametrize("method", ["fedmix", "fednext", "fedease"])
def test_a_bundle_lists_the_same_without_a_history(runs, method, tmp_path):
    run = runs[method]
    device = Recommender.load(run.export(tmp_path / "bundle"))
    expected = run.recommend("nobody", 8, history=[])
    assert [vars(line) for line in device.recommend(8)] == [vars(line) for line in expected]


def test_the_page_of_a_user_without_a_history_shows_them(runs, monkeypatch):
    run = runs["fedmix"]
    split = replace(run.split, valid=first_emptied(run.split.valid))
    train = {n: first_emptied(getattr(split.train, n)) for n in LISTS}
    split = replace(split, train=replace(split.train, **train))
    shown = one_user(replace(run, _split=split), "user-00", 5).lists["fedmix"]
    counts = touched_by(run)
    scores = [counts[run.model.data.item_index[line.title]] for line in shown]
    assert scores == sorted(counts, reverse=True)[:5]


# ------------------------------------------------------------ reasons


@pytest.mark.parametrize("method", ["fednext", "fedease"])
def test_the_reason_is_the_largest_weight_from_the_history(runs, method):
    """The slow twin: every weight looked up by hand."""
    run, words = runs[method], {"fednext": "often after ", "fedease": "often together with "}
    shared, index = run.model.shared, run.model.data.item_index
    recency, popularity = shared["scalars"]
    prior = (shared["shares"] - shared["shares"].mean()) * popularity
    for line in run.recommend("new", 10, HISTORY):
        added = {}
        for back, past in enumerate(reversed(HISTORY), 1):
            row = shared["neighbours"][index[past]].tolist()
            weights = shared["weights"][index[past]]
            weight = weights[row.index(index[line.item])] if index[line.item] in row else 0.0
            added[past] = float(weight) * back**-recency
        largest = max(added, key=added.get)
        popular = sum(added.values()) < prior[index[line.item]]
        assert line.because == ("popular" if popular else words[method] + largest)


def test_an_ensemble_names_the_expert_in_words_and_the_item(runs):
    run = runs["fedmix"]
    found = {line.because for line in run.recommend("new", 30, HISTORY)}
    said = {because.partition(" item")[0] for because in found}
    known = {
        expert.because.removesuffix(" {}")
        for expert, _ in run.model.method.active(run.model.shared)
    }
    assert said <= known | {f"{words} items of the history" for words in known} and len(said) > 1
    assert {because.rpartition(" ")[2] for because in found if "item-" in because} <= set(HISTORY)


# ------------------------------------------------------------ similar items


@pytest.mark.parametrize("method", ["fednext", "fedease", "fedmix"])
def test_similar_items_have_the_largest_weights(runs, method, tmp_path):
    run = runs[method]
    lines = run.similar("item-03", 5)
    device = Recommender.load(run.export(tmp_path / "bundle", precision="single"))
    assert [vars(line) for line in device.similar("item-03", 5)] == [vars(line) for line in lines]
    if method != "fedmix":
        number = run.model.data.item_index["item-03"]
        dense = np.zeros(60)
        dense[run.model.shared["neighbours"][number]] = run.model.shared["weights"][number]
        dense[number] = 0
        best = np.argsort(-dense, kind="stable")[:5]
        assert [line.item for line in lines] == run.data.items[best].tolist()
    assert len(run.similar("item-03", 10**6)) < 60
    with pytest.raises(ValueError, match="'item-99' is not in the catalogue"):
        device.similar("item-99")


def test_similar_items_by_their_vectors(runs):
    run = runs["fedmf"]
    table = run.model.shared["items"]
    cosines = table @ table[3] / np.linalg.norm(table, axis=1)
    best = [n for n in np.argsort(-cosines, kind="stable").tolist() if n != 3][:5]
    assert [line.item for line in run.similar("item-03", 5)] == run.data.items[best].tolist()
    with pytest.raises(
        ConfigError, match="no item 'item-99' in the catalogue; did you mean 'item-"
    ):
        run.similar("item-99")
    with pytest.raises(ConfigError, match=r"popularity has neither weights .* nor item vectors"):
        runs["popularity"].similar("item-03")


# ------------------------------------------------------------ filters


@pytest.fixture(scope="module")
def films():
    """A model whose items have genres, a maker and a year."""
    data = taste_world()
    kinds = [["Comedy"], ["Drama", "Comedy"], ["Western"], []]
    columns = {
        "genres": MultiCategorical.of([kinds[n % 4] for n in range(60)]),
        "maker": Categorical.of([("", "north", "south")[n % 3] for n in range(60)]),
        "year": Numeric(np.array([np.nan if n == 5 else 1960 + n for n in range(60)], np.float32)),
        "decade": Categorical.of([str(1960 + n // 10 * 10) for n in range(60)]),
    }
    return trained("fednext", replace(data, item_features=columns))


@pytest.mark.parametrize(
    ("chosen", "allowed"),
    [
        ({}, lambda n: True),
        ({"only": ["item-07", "item-30", "item-59"]}, lambda n: n in (7, 30, 59)),
        ({"only": []}, lambda n: False),
        ({"without": ["item-07", "item-30"]}, lambda n: n not in (7, 30)),
        ({"where": ["genres=Comedy"]}, lambda n: n % 4 < 2),
        ({"where": ["genres=Drama|Western"]}, lambda n: n % 4 in (1, 2)),
        ({"where": ["genres!=Comedy"]}, lambda n: n % 4 >= 2),
        ({"where": ["maker = north", "year>=1990"]}, lambda n: n % 3 == 1 and n >= 30),
        ({"where": ["year<1966"]}, lambda n: n < 6 and n != 5),
        ({"where": ["year=1970"]}, lambda n: n == 10),
        ({"where": ["decade>=2000"]}, lambda n: n >= 40),
        ({"where": ["decade<1980"], "without": ["item-02"]}, lambda n: n < 20 and n != 2),
    ],
)
@pytest.mark.parametrize("seen", [False, True])
def test_a_filtered_list_is_the_whole_list_without_the_others(films, chosen, allowed, seen):
    whole = films.recommend("new", 60, HISTORY, seen=True)
    past = set() if seen else set(HISTORY)
    expected = [x for x in whole if allowed(int(x.item[-2:])) and x.item not in past]
    assert len(whole) == 60
    assert films.recommend("new", 60, HISTORY, seen=seen, **chosen) == expected
    assert films.recommend("new", 4, HISTORY, seen=seen, **chosen) == expected[:4]
    both = films.recommend(k=60, seen=seen, **chosen)
    for user in ("user-00", "user-33"):
        alone = films.recommend(user, 60, seen=seen, **chosen)
        assert both.where(user=user).columns["item"] == [line.item for line in alone]


@pytest.mark.parametrize(
    ("chosen", "refused"),
    [
        ({"only": ["item-7"]}, "no item 'item-7' in the catalogue; did you mean 'item-"),
        ({"without": ["itm-07"]}, "no item 'itm-07' in the catalogue; did you mean 'item-07'"),
        ({"where": ["genre=Comedy"]}, "no item feature 'genre'; did you mean 'genres'"),
        (
            {"where": ["genres=Comdy"]},
            "item feature 'genres' has no 'Comdy'; did you mean 'Comedy'",
        ),
        ({"where": ["genres"]}, "'genres' is no condition: write genres=Comedy or year>=1990"),
        ({"where": ["year>=old"]}, "compares numbers, and 'old' is none"),
        ({"where": ["maker>3"]}, "compares numbers, and 'north' is none"),
    ],
)
def test_what_a_filter_does_not_know_is_refused(films, chosen, refused):
    with pytest.raises(ConfigError, match=refused):
        films.recommend("new", 5, HISTORY, **chosen)


def test_keywords_that_a_filter_does_not_have_are_refused(films):
    with pytest.raises(TypeError, match="unexpected keyword argument 'were'; did you mean 'where'"):
        films.recommend("user-00", were=["genres=Comedy"])


def test_a_bundle_has_allow_and_deny_lists(films, tmp_path):
    device = Recommender.load(films.export(tmp_path / "bundle", precision="single"), HISTORY)
    for chosen in (
        {"only": ["item-07", "item-03"]},
        {"without": ["item-00"]},
        {"seen": True},
        {"only": []},
    ):
        expected = films.recommend("new", 20, HISTORY, **chosen)
        assert [vars(x) for x in device.recommend(20, **chosen)] == [vars(x) for x in expected]
    with pytest.raises(ValueError, match="'item-99' is not in the catalogue"):
        device.recommend(only=["item-99"])


def test_lists_may_repeat_where_people_buy_again(films, tmp_path):
    train = replace(films.model.data.train, repeats=True)
    again = replace(films, model=replace(films.model, data=replace(films.model.data, train=train)))
    whole = again.recommend("new", 60, HISTORY)
    assert set(HISTORY) <= {line.item for line in whole} and len(whole) == 60
    device = Recommender.load(again.export(tmp_path / "bundle", precision="single"), HISTORY)
    assert [line.item for line in device.recommend(60)] == [line.item for line in whole]
    device.touch("item-08")
    assert device.history == [*HISTORY, "item-08"]


def test_an_ensemble_reranks_known_items_where_people_buy_again(runs, tmp_path):
    model = runs["fedmix"].model
    again = replace(model, data=replace(model.data, train=replace(model.data.train, repeats=True)))
    expected = again.recommend("new", 60, [*HISTORY, "item-03"])
    device = Recommender.load(export(again, tmp_path / "b", precision="single"))
    for item in (*HISTORY, "item-03"):
        device.touch(item)
    found = {line.item: line.score for line in device.recommend(60)}
    assert len(found) == len(expected) == 60
    for line in expected:
        assert found[line.item] == pytest.approx(line.score, abs=2e-4)


# ------------------------------------------------------------ everybody's lists in a file


def read(path):
    if path.suffix == ".csv":
        with path.open(newline="") as file:
            return list(csv.DictReader(file))
    if path.suffix == ".jsonl":
        return [json.loads(line) for line in path.read_text().splitlines()]
    return pytest.importorskip("pyarrow.parquet").read_table(path).to_pylist()


@pytest.mark.parametrize("suffix", [".csv", ".jsonl", ".parquet"])
def test_a_file_has_the_lists_of_recommend(films, tmp_path, suffix):
    shares = []
    path = films.write_lists(
        tmp_path / f"lists{suffix}", 4, progress=shares.append, where=["year>=1980"]
    )
    rows, table = read(path), films.recommend(k=4, where=["year>=1980"])
    assert [[str(row[name]) for name in table.columns] for row in rows] == [
        [str(value) for value in row.values()] for row in table
    ]
    assert shares == sorted(shares) and shares[-1] == 1
    one = films.write_lists(tmp_path / f"one{suffix}", 4, threads=1, where=["year>=1980"])
    assert read(one) == rows


def test_an_outside_evaluator_finds_our_figures(films, tmp_path):
    lists = films.write_lists(tmp_path / "lists.trec", 60, part="test")
    qrels = films.write_qrels(tmp_path / "test.qrels")
    assert lists.read_text().splitlines()[0].split()[1::2] == ["Q0", "1", "fednext"]
    judged = list(ir_measures.read_trec_qrels(str(qrels)))
    ranked = list(ir_measures.read_trec_run(str(lists)))
    found = ir_measures.calc_aggregate([nDCG @ 10], judged, ranked)[nDCG @ 10]
    assert found == pytest.approx(films.metrics["full"]["ndcg@10"], abs=1e-9)


def test_files_that_cannot_hold_the_lists_are_refused(films, tmp_path):
    with pytest.raises(ConfigError, match=r"ends in one of .csv, .jsonl, .parquet, .trec"):
        films.write_lists(tmp_path / "lists.txt")
    data = films.model.data
    spaced = np.array([f"item {n}" for n in range(60)])
    model = replace(films.model, data=replace(data, items=spaced))
    with pytest.raises(ConfigError, match=r"'item \d+' is empty or has spaces, .* as .csv"):
        replace(films, model=model).write_lists(tmp_path / "lists.trec")
    assert list(tmp_path.iterdir()) == []


# ------------------------------------------------------------ from the run alone


@pytest.fixture
def ratings(tmp_path):
    data, file = taste_world(), tmp_path / "ratings.csv"
    rows = zip(data.users[data.user], data.items[data.item], data.time, strict=True)
    file.write_text("user,item,time\n" + "".join(f"{u},{i},{t}\n" for u, i, t in rows))
    return file


@pytest.mark.parametrize("method", ["fednext", "pfedrec", "lipm"])
def test_lists_come_from_the_run_whatever_happens_to_the_file(ratings, tmp_path, method):
    silos = {"silos.kind": "dirichlet", "silos.count": 5} if method == "lipm" else {}
    rounds = None if method == "fednext" else 2
    run = hushrec.train(str(ratings), method, rounds=rounds, settings=silos, out=tmp_path / "run")
    expected = run.recommend(k=5).columns
    opened = hushrec.Run.open(tmp_path / "run")
    assert opened.data_changes() is None
    assert opened.evaluate("hr@10").columns == run.evaluate("hr@10").columns
    with ratings.open("a") as file:
        file.write("user-00,item-59,99999999\nsomebody,item-01,5\n")
    opened = hushrec.Run.open(tmp_path / "run")
    assert opened.recommend(k=5).columns == expected
    assert opened.recommend("new", 5, HISTORY) == run.recommend("new", 5, HISTORY)
    assert opened.data_changes() == f"2 new rows of {ratings} since training: not in the histories"
    with pytest.raises(RunError, match=r"has changed since training, .* or train again"):
        opened.evaluate()
    ratings.unlink()
    gone = hushrec.Run.open(tmp_path / "run")
    assert gone.recommend(k=5).columns == expected
    assert "cannot be read now" in gone.data_changes()


def test_histories_in_the_run_are_for_their_owner_alone(ratings, tmp_path):
    hushrec.train(str(ratings), "fednext", out=tmp_path / "run")
    kept = tmp_path / "run" / "checkpoint" / "final" / "serving.safetensors"
    assert stat.S_IMODE(kept.stat().st_mode) == 0o600
    kept.write_bytes(kept.read_bytes()[:-1] + b"x")
    with pytest.raises(RunError, match=r"serving.safetensors is missing or damaged"):
        hushrec.Run.open(tmp_path / "run")


def test_a_touched_file_of_the_same_rows_has_not_changed(ratings, tmp_path):
    hushrec.train(str(ratings), "popularity", out=tmp_path / "run")
    ratings.write_text(ratings.read_text())
    assert hushrec.Run.open(tmp_path / "run").data_changes() is None


def test_the_page_of_a_user_is_shown_after_the_file_has_changed(ratings, tmp_path):
    hushrec.train(str(ratings), "fednext", out=tmp_path / "runs" / "one")
    with ratings.open("a") as file:
        file.write("user-00,item-59,99999999\n")
    page = Studio(tmp_path / "runs").page("user", {"run": "one", "user": "user-00"})
    assert "1 new row of" in page and "from the whole history" in page
    best = hushrec.Run.open(tmp_path / "runs" / "one").recommend("user-00", 1)
    assert f'<span class="title">{best[0].title}</span>' in page
