"""One runner for all exhibits: it skips what is done, goes on, repeats, and shows three columns."""

import json
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner
from experiments.compare import paired
from experiments.measure import measure
from experiments.plan import Task, chosen, read_papers, tasks_of
from experiments.results import Record, Results
from experiments.runner import changes, expected_seconds, steps_for
from experiments.states import state_of

from hushrec.analysis.run import guidance_effects, metrics_by_group
from hushrec.api import Execution, Run, train
from hushrec.cli import main
from hushrec.data import load
from hushrec.errors import ConfigError, RunError
from hushrec.evaluation.groups import holm

PAPER = (
    'system = "Demo"\ncited = "Nobody: Nothing"\nnothing_to_run = { "figure-9" = "a drawing" }\n'
)
TABLE = """
title = "A table"
scale = 100
digits = 1

[data]
Demo = "demo"
Other = "nowhere"

[[row]]
name = "popularity"
method = "popularity"
paper = { Demo = [41.0, 20.5] }
on.Other.unobtainable = "it was never published"

[[row]]
name = "PFedRec"
method = "pfedrec"
rounds = 3
seeds = 2
set = { d = 4, "evaluation.every" = 3 }
against = ["popularity"]
published = { set = { "evaluation.every" = 1 } }
on.Other.unobtainable = "it was never published"

[[row]]
name = "Later"
without = "it is not built"
on.Other.unobtainable = "it was never published"
"""
FIGURE = """
title = "A figure"
kind = "curves"
metrics = ["hr@10"]
read = "curve/full"
protocols = ["honest"]

[[row]]
name = "PFedRec"
data = "demo"
method = "pfedrec"
rounds = 4
set = { d = 4, "evaluation.every" = 2 }
"""
PFEDREC = "hushrec train --data demo --method pfedrec --protocol {} --rounds 3 --seeds 2"


def hushrec(*words):
    return CliRunner().invoke(main, ["reproduce", *map(str, words)])


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """A checkout of which everything has been run once."""
    root = tmp_path_factory.mktemp("checkout")
    place = root / "experiments/demo"
    place.mkdir(parents=True)
    (place / "paper.toml").write_text(PAPER)
    (place / "table-1.toml").write_text(TABLE)
    (place / "figure-1.toml").write_text(FIGURE)
    done = hushrec("all", *where(root))
    assert done.exit_code == 0, done.output
    return root, done


def where(root: Path):
    return ("--experiments", root / "experiments", "--runs", root / "runs")


@pytest.fixture
def copy(ran, tmp_path):
    """The same, for a test that changes it."""
    shutil.copytree(ran[0], tmp_path / "copy")
    return tmp_path / "copy"


def results_of(root: Path) -> Results:
    return Results(root / "experiments/results")


def test_everything_is_run_and_shown_in_three_columns(ran):
    root, done = ran
    found = dict(results_of(root).records())
    assert len(found) == 5
    own = found[PFEDREC.format("published") + " --set d=4 --set evaluation.every=1"]
    (summary,) = root.glob("runs/demo/published/pfedrec-*/summary.json")
    test = json.loads(summary.read_text())["test"]["full"]
    assert own.values["test"]["full"]["hr@10"] == test["hr@10"]
    assert own.seeds == [0, 1]
    assert own.version.startswith("0.1.0")
    assert own.sd["test"]["full"]["hr@10"] > 0
    assert "of 5: hushrec train --data demo" in done.output
    page = hushrec("page", *where(root))
    assert page.exit_code == 0, page.output
    text = (root / "docs/papers.md").read_text()
    popular = found["hushrec train --data demo --method popularity --protocol honest"]
    hits, gain = (100 * popular.values["test"]["full"][name] for name in ("hr@10", "ndcg@10"))
    here, there = f"{hits:.1f} | {hits:.1f}", f"{gain:.1f} | {gain:.1f}"
    assert f"| popularity | 41.0 | {here} | 20.5 | {there} |" in text, "it learns nothing: no leak"
    assert "**Other**: unobtainable; it was never published." in text
    assert "| Later | – | not built | not built |" in text
    assert "| Demo | figure 9 | a drawing | – |" in text
    assert "demo/figure-1`: done, 1 of 1 cells" in text
    assert "demo/table-1`: partly, 4 of 6 cells" in text
    assert own.version in text
    (other,) = own.against
    difference, low, high, p = own.against[other]["test/full/ndcg@10"]
    mine, theirs = (r.values["test"]["full"]["ndcg@10"] for r in (own, found[other]))
    assert difference == pytest.approx(mine - theirs)
    assert low <= difference <= high
    assert 0 < p <= 1
    assert "- PFedRec − popularity (honest): " in text
    assert (root / "experiments/demo/figure-1-honest.svg").read_text().startswith("<svg")


def test_what_is_done_is_skipped_and_lost_figures_are_read_off_the_runs(copy):
    assert json.loads(hushrec("all", *where(copy), "--json").stdout) == []
    (copy / "experiments/results/demo.json").unlink()
    before = json.loads(hushrec("list", *where(copy), "--json").stdout)
    assert [(row["name"], row["state"]) for row in before] == [
        ("demo/table-1", "not run"),
        ("demo/figure-1", "not run"),
        ("demo/figure-9", "nothing to run"),
    ]
    again = hushrec("demo/figure-1", *where(copy), "--json")
    assert again.exit_code == 0, again.output
    (told,) = json.loads(again.stdout)
    assert told["values"]["curve"]["full"]["hr@10"][0][0] == 2
    assert [row["state"] for row in json.loads(hushrec("list", *where(copy), "--json").stdout)] == [
        "not run",
        "done",
        "nothing to run",
    ]
    assert "demo/figure-1" in hushrec("list", *where(copy)).stdout


def test_the_same_seed_gives_the_same_figures(copy):
    words = ("demo/table-1", "--only", "PFedRec", "--protocol", "honest", "--again", *where(copy))
    done = hushrec(*words)
    assert done.exit_code == 0, done.output
    assert done.output.count("the same figures") == 1
    results = results_of(copy)
    command = next(c for c, _ in results.records() if "--seeds 2" in c and "honest" in c)
    record = results.get(command)
    record.values["test"]["full"]["hr@10"] += 1e-9
    results.put("demo", command, record)
    (told,) = json.loads(hushrec(*words, "--json").stdout)
    assert told["changed"] == ["test/full/hr@10"]


def test_tests_stand_as_long_as_both_have_the_same_figures(copy):
    def again(*rows):
        only = [word for row in rows for word in ("--only", row)]
        words = ("demo/table-1", *only, "--protocol", "honest", "--again", *where(copy))
        assert hushrec(*words).exit_code == 0
        return results_of(copy).get(own).against

    results = results_of(copy)
    own, popular = (
        next(c for c, _ in results.records() if method in c and "honest" in c)
        for method in ("pfedrec --protocol honest --rounds 3", "popularity")
    )
    tested = results.get(own).against
    assert list(tested) == [popular]
    assert again("PFedRec") == tested
    assert again("popularity") == tested
    shutil.rmtree(copy / "runs")  # so that nothing is tested anew
    record = results.get(popular)
    record.values["test"]["full"]["hr@10"] *= 1 + 1e-15
    results.put("demo", popular, record)
    assert again("popularity") == tested, "the same ranks, added up in another order"
    record.values["test"]["full"]["hr@10"] += 1
    results.put("demo", popular, record)
    assert again("popularity") == {}
    assert again("PFedRec", "popularity") == tested, "both runs are at hand"


def test_p_is_corrected_over_the_metrics_of_a_test(copy):
    file = copy / "experiments/demo/table-1.toml"
    file.write_text(TABLE.replace("scale", 'tested = ["hr@10", "ndcg@10"]\nscale', 1))
    assert hushrec("demo/table-1", *where(copy)).exit_code == 0
    assert hushrec("page", *where(copy)).exit_code == 0
    (exhibit,) = chosen(read_papers(copy / "experiments"), ["demo/table-1"])
    cell = next(cell for cell in exhibit.cells if cell.row.against)
    ((_, task, other), *_) = exhibit.pairs(cell)
    found = results_of(copy).get(task.command).tests(other.command, cell.read, exhibit.compared)
    mine, theirs = (copy / "runs" / each.folder for each in (task, other))
    raw = [paired(mine, theirs, "full", metric) for metric in ("hr@10", "ndcg@10")]
    assert [test.p for test in found] == list(holm([test.p_value for test in raw]))
    assert [test.value for test in found] == [test.difference for test in raw]
    page = (copy / "docs/papers.md").read_text()
    assert "HR@10 and NDCG@10, one minus the other" in page
    assert "p Holm-corrected over the metrics:" in page


def test_a_budget_is_kept_and_the_rest_goes_on_later(copy):
    shutil.rmtree(copy / "runs")
    (copy / "experiments/results/demo.json").unlink()
    none = hushrec("all", "--budget", "0s", *where(copy))
    assert none.exit_code == 0, none.output
    assert "of 5 are left" in none.output
    assert len(list(results_of(copy).records())) <= 1
    dry = hushrec("all", "--dry-run", *where(copy)).stdout.splitlines()
    assert all(line.startswith("hushrec train --data demo") for line in dry)
    rest = hushrec("all", "--data", "demo", "--protocol", "honest", *where(copy))
    assert rest.exit_code == 0, rest.output
    assert all("honest" in command for command, _ in results_of(copy).records())


def test_divergence_is_a_result_and_does_not_stop_the_others(copy):
    file = copy / "experiments/demo/figure-1.toml"
    file.write_text(FIGURE.replace("d = 4", "d = 4, item_rate = 1e12"))
    (copy / "experiments/results/demo.json").unlink()
    done = hushrec("all", *where(copy))
    assert done.exit_code == 0, done.output
    papers, results = read_papers(copy / "experiments"), results_of(copy)
    (exhibit,) = chosen(papers, ["demo/figure-1"])
    assert state_of(exhibit, results).counts == {"diverged": 1}
    assert steps_for(papers, [exhibit], results) == []
    assert len(list(results.records())) == 5


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ('name = "Later"', 'nam = "Later"', r"table-1.toml: row.2.name: Field required"),
        ("[41.0, 20.5]", "[41.0]", "1 figures for 2 metrics"),
        ("Demo = [41", "Dem = [41", "'Dem' is none of the data sets"),
        ("scale = 100", "scale = ", "not valid TOML"),
        ("on.Other", "on.Othre", "on.Othre is none of the data sets"),
        ('["popularity"]', '["nobody"]', "against 'nobody', which is no row"),
        ("rounds = 3", 'data = ["Dem"]', "'PFedRec': 'Dem' is none of the data sets"),
        ("rounds = 3", 'data = "demo"', "data is named by the exhibit or by each row"),
    ],
)
def test_a_wrong_file_is_refused_by_name(copy, old, new, words):
    (copy / "experiments/demo/table-1.toml").write_text(TABLE.replace(old, new, 1))
    with pytest.raises(ConfigError, match=words):
        read_papers(copy / "experiments")
    refused = hushrec("list", *where(copy))
    assert refused.exit_code == 2
    assert "table-1.toml" in refused.output


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (["demo/tabel-1"], "did you mean 'demo/table-1'"),
        (["demo", "--only", "PfedRec"], "did you mean 'PFedRec'"),
        (["demo", "--data", "deom"], "did you mean 'demo'"),
        (["demo", "--budget", "soon"], "2h, 90m"),
        (["demo", "--experiments", "elsewhere"], "--experiments DIR"),
    ],
)
def test_unknown_names_are_refused(ran, names, words):
    given = names if "--experiments" in names else [*names, *where(ran[0])]
    refused = hushrec(*given)
    assert refused.exit_code == 2
    assert words in refused.output


def test_a_damaged_file_of_results_is_named(copy):
    (copy / "experiments/results/demo.json").write_text('{"a": {"seeds": 1}}')
    with pytest.raises(RunError, match=r"demo.json is damaged"):
        results_of(copy)


def test_time_is_expected_by_what_the_method_took(ran, tmp_path):
    papers = read_papers(ran[0] / "experiments")
    (_, _, task) = next(t for t in tasks_of(papers[0].exhibits) if t[2].method == "pfedrec")
    results = Results(tmp_path)
    unknown = expected_seconds(task, results)
    assert unknown > 0
    other = task.model_copy(update={"rounds": 6, "seeds": 1})
    results.put("demo", other.command, Record(seeds=[0], version="1", rounds=6, seconds=60.0))
    assert expected_seconds(task, results) == pytest.approx(60.0), "3 rounds of 2 seeds"
    results.put("demo", task.command, Record(seeds=[0, 1], version="1", rounds=3, seconds=7.0))
    assert expected_seconds(task, results) == 7.0


def test_changes_are_those_of_common_figures():
    assert changes({"a": {"x": 1.0, "y": 2}}, {"a": {"x": 1.0}, "b": 3}) == []
    assert changes({"a": {"x": 1.0}}, {"a": {"x": 1.0000000001}}) == ["a/x"]
    assert changes({"a": [(1, 2.0)]}, {"a": [[1, 2.0]]}) == []


def test_users_of_seeds_that_test_others_stand_side_by_side(tmp_path, tiny):
    unseen = {"split.kind": "unseen-users", "split.test": 0.4}
    for method in ("popularity", "fedals"):
        train(tiny, method, seeds=[0, 1], out=tmp_path / method, settings=unseen, rounds=1)
    test = paired(tmp_path / "fedals", tmp_path / "popularity", "full", "hits@10")
    parts = [
        json.loads((tmp_path / "popularity" / f"seed-{s}/summary.json").read_text()) for s in (0, 1)
    ]
    assert test.n == sum(part["users"]["ranked_users"] for part in parts)
    train(tiny, "popularity", seeds=[0], out=tmp_path / "one", settings=unseen)
    with pytest.raises(RunError, match="different held-out items or users"):
        paired(tmp_path / "fedals", tmp_path / "one", "full", "hits@10")


def test_what_can_be_read_off_a_run(tmp_path):
    """Groups, guidance, gates and whose table, besides the figures of the test items."""
    options = {"d": 2, "interval": 2, "gate_lr": 0.1, "evaluation.every": 2}
    task = Task(data="demo", method="fedrkg", rounds=5, set=options)
    wanted = [
        ("test/full", "auc"),
        ("groups/cold", "hr@10"),
        ("guidance/followers", "ndcg@10"),
        ("guidance/all", "improved"),
        ("guidance/warm-cold/logit", "change"),
        ("tables/own/full", "hr@10"),
        ("curve/train", "loss"),
    ]
    record = measure(task, load("demo"), tmp_path, wanted, lambda seed: None, Execution())
    for place in wanted:
        assert record.find(*place) is not None, place
    assert record.find("tables/own/full", "hr@10") == record.find("test/full", "hr@10")
    run = Run.open(tmp_path / task.folder / "seed-0")
    last = guidance_effects(run)[-1]
    change = 100 * (last.after["followers"] / last.before["followers"] - 1)
    assert record.find("guidance/followers", "ndcg@10") == pytest.approx(change)
    assert record.find("guidance/all", "improved") == 100 * last.moved["improved"]
    gates = last.gates["groups"]
    change = 100 * (gates["warm"]["logit"] - gates["cold"]["logit"]) / gates["cold"]["logit"]
    assert record.find("guidance/warm-cold/logit", "change") == pytest.approx(change)
    groups = metrics_by_group(run, names=["hr@10"])["hr@10"].groups
    assert record.find("groups/cold", "hr@10") == groups["cold"]
    assert [number for number, _ in record.find("curve/train", "loss")] == [1, 2, 3, 4, 5]
