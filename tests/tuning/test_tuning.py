"""The search: it looks at validation only, goes on as if never stopped, and leaves a preset."""

import itertools
import json

import pytest
from click.testing import CliRunner

import hushrec
from hushrec.cli import main
from hushrec.config import DEFAULT_METHOD
from hushrec.errors import ConfigError, RunError, StoppedError
from hushrec.evaluation.evaluator import Evaluator
from hushrec.federation.experiment import ExperimentRequest, read_preset
from hushrec.methods.base import Between, OneOf, Tunable, method_class, method_names
from hushrec.tuning import tune
from test_api import StopAfter

pytest.importorskip("optuna", reason="needs the 'tune' extra")


def search(data, out, trials=8, seed=0, **more):
    request = ExperimentRequest(data.name, "fedmf", rounds=6, seed=seed, settings={"d": 4})
    return tune(data, request, out, trials=trials, **more)


@pytest.fixture(scope="module")
def whole(tiny, tmp_path_factory):
    return search(tiny, tmp_path_factory.mktemp("tune") / "whole")


def test_the_test_items_are_never_scored(tiny, tmp_path, monkeypatch):
    asked = []
    rank = Evaluator.rank

    def watched(self, model, part, *more):
        asked.append(part)
        return rank(self, model, part, *more)

    monkeypatch.setattr(Evaluator, "rank", watched)
    search(tiny, tmp_path / "s", trials=3)
    assert set(asked) == {"valid"}
    hushrec.train(tiny, "fedmf", rounds=1)
    assert "test" in asked  # the watch sees a test when there is one


def test_trial_0_is_where_it_started_and_the_best_is_best(whole):
    assert [trial.number for trial in whole.trials] == list(range(8))
    assert whole.trials[0].options == {"lr": 0.1, "item_rate": 60.0, "init_std": 0.1}
    done = [trial.value for trial in whole.trials if trial.state == "done"]
    assert whole.best.value == max(done)
    assert len({json.dumps(trial.options) for trial in whole.trials}) == 8
    for trial in whole.trials:
        assert 0.02 <= trial.options["lr"] <= 1.0
        assert trial.value == max(trial.evaluations.values())


def test_an_interrupted_search_comes_out_the_same(tiny, tmp_path, whole):
    out, trials = tmp_path / "s", []
    with pytest.raises(StoppedError, match="same command"):
        search(tiny, out, on_trial=trials.append, callbacks=[StopAfter(21)])
    assert trials == list(range(len(trials)))
    kept = len((out / "trials.jsonl").read_text().splitlines())
    assert 0 < kept < 8
    with (out / "trials.jsonl").open("a") as file:
        file.write('{"number": ')  # died while writing
    again = search(tiny, out)
    assert again.trials == whole.trials
    # More trials go on from there; the others stay.
    more = search(tiny, out, trials=9)
    assert more.trials[:8] == whole.trials


def test_the_preset_gives_the_same_validation_value(tiny, whole):
    file = whole.folder / "tuned-honest.toml"
    assert file.read_text().startswith("# fedmf on blocks: the best of 8 trials")
    run = hushrec.train(tiny, "fedmf", preset=str(file))
    assert run.summary.valid["full"]["ndcg@10"] == whole.best.value
    assert run.summary.selected_round == whole.best.selected_round
    assert run.summary.protocol == "honest"


def test_hopeless_trials_are_stopped(small, tmp_path):
    request = ExperimentRequest(small.name, "fedmf", rounds=10, settings={"d": 4})
    found = tune(small, request, tmp_path / "s", trials=12)
    stopped = [trial for trial in found.trials if trial.state == "stopped"]
    assert stopped
    assert all(max(trial.evaluations) < 10 for trial in stopped)
    assert all(trial.number >= 5 for trial in stopped)


def test_another_search_is_not_mixed_in(tiny, tmp_path):
    out = tmp_path / "s"
    search(tiny, out, trials=1)
    with pytest.raises(RunError, match="holds another search"):
        search(tiny, out, trials=2, seed=1)
    line = json.loads((out / "trials.jsonl").read_text())
    odd = [
        {"number": "0"},
        {"value": "high"},
        {"evaluations": {"x": 1.0}},
        {"evaluations": [1]},
        {"more": 1},
    ]
    odd += [{"options": {**line["options"], "lr": [1]}}, {"state": "won"}, {"number": 1}]
    for text in ['{"number": 0}', "[" * 9_999, *(json.dumps(line | more) for more in odd)]:
        (out / "trials.jsonl").write_text(f"{text}\n")
        with pytest.raises(RunError, match=r"trials.jsonl, line 1 is damaged"):
            search(tiny, out, trials=2)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.txt").write_text("mine")
    with pytest.raises(RunError, match="holds no search"):
        search(tiny, tmp_path / "full")


def test_what_cannot_be_searched_is_refused(tiny, tmp_path):
    with pytest.raises(ConfigError, match="no options to search"):
        tune(tiny, ExperimentRequest(tiny.name, "popularity"), tmp_path / "a")
    fixed = {"lr": 0.1, "item_rate": 1.0, "init_std": 0.1}
    with pytest.raises(ConfigError, match="no options to search"):
        tune(tiny, ExperimentRequest(tiny.name, "fedmf", settings=fixed), tmp_path / "b")
    leaking = tmp_path / "leaking.toml"
    leaking.write_text('protocol = "published"\n')
    with pytest.raises(ConfigError, match="would tune the leak"):
        tune(tiny, ExperimentRequest(tiny.name, "fedmf", preset=str(leaking)), tmp_path / "c")


def test_a_diverging_trial_is_a_line_not_an_end(tiny, tmp_path):
    found = search(tiny, tmp_path / "s", trials=1)
    assert found.trials[0].state == "done"
    far = ExperimentRequest(tiny.name, "pfedrec", rounds=3, settings={"init_std": 1e12, "d": 4})
    wild = tune(tiny, far, tmp_path / "w", trials=2)
    assert {trial.state for trial in wild.trials} == {"diverged"}
    with pytest.raises(RunError, match="no trial came to its end"):
        _ = wild.best


@pytest.mark.parametrize("name", sorted({DEFAULT_METHOD, "fedmix", "fednext", "fedease", "fedals"}))
def test_the_default_and_what_is_recommended_can_be_searched(name, tiny, tmp_path):
    settings = {"network_rounds": 2} if name == "fedmix" else {}
    found = tune(
        tiny, ExperimentRequest(tiny.name, name, settings=settings), tmp_path / "s", trials=2
    )
    assert [trial.state for trial in found.trials] == ["done", "done"]
    assert found.trials[0].options != found.trials[1].options


@pytest.mark.parametrize("name", method_names())
def test_every_space_names_options_that_exist_and_are_allowed(name):
    kind = method_class(name)
    for options in ({}, {"dual": True} if "dual" in kind.Config.model_fields else {}):
        method = kind(kind.Config(**options))
        space = method.search if isinstance(method, Tunable) else {}
        assert set(space) <= set(kind.Config.model_fields)
        ends = [
            where.values if isinstance(where, OneOf) else (where.low, where.high)
            for where in space.values()
        ]
        for corner in itertools.product(*ends):
            kind.Config(**options, **dict(zip(space, corner, strict=True)))
        assert all(where.low < where.high for where in space.values() if isinstance(where, Between))


def test_the_command(tmp_path):
    out = tmp_path / "s"
    words = ["tune", "--method", "fedmf", "--rounds", "2", "--trials", "2", "--set", "d=4"]
    result = CliRunner().invoke(main, [*words, "--out", str(out), "--json"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert len(found["trials"]) == 2
    assert found["best"] in (0, 1)
    shown = CliRunner().invoke(main, [*words, "--out", str(out)])
    assert "test items were not evaluated" in " ".join(shown.stdout.split())
    text = (out / "tuned-honest.toml").read_text()
    assert "# Found by: hushrec tune --data demo --method fedmf --rounds 2 --set d=4" in text
    assert read_preset("fedmf", str(out / "tuned-honest.toml"))["options"]["d"] == 4
    with pytest.raises(ConfigError, match="cannot read the preset"):
        read_preset("fedmf", "nowhere.toml")
