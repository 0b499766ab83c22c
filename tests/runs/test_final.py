"""A final model: the options that a run chose, trained on everything, without figures."""

import hashlib
import json

import numpy as np
import pytest
from click.testing import CliRunner

from conftest import interactions
from hushrec.api import Run, train
from hushrec.cli import main
from hushrec.errors import ConfigError, RunError, StoppedError
from hushrec.federation.experiment import ExperimentRequest
from hushrec.runs.folder import RunFolder
from hushrec.runs.recording import FINAL_MARK
from hushrec.runs.release import release
from hushrec.runs.schema import Summary
from hushrec.tuning import tune
from test_api import StopAfter

OPTIONS = {"rounds": 6, "settings": {"d": 4, "item_rate": 1.0, "lr": 3.0}}


@pytest.fixture(scope="module")
def followed(tiny, tmp_path_factory):
    """A run whose validation was best before its last round."""
    run = train(tiny, "fedmf", out=tmp_path_factory.mktemp("runs") / "chosen", **OPTIONS)
    assert 0 < run.summary.selected_round < run.summary.rounds
    return run


def test_it_trains_on_every_row_for_the_selected_rounds(followed, tiny):
    final = train(final=followed)
    selected = followed.summary.selected_round
    assert final.summary.rounds == final.summary.selected_round == selected
    assert final.summary.selected_by == "last round"
    assert len(final.split.train.positives.values) == len(final.split.data) == len(tiny.merged())
    assert final.experiment.options == followed.experiment.options
    assert [line.valid for line in final.lines] == [None] * selected
    shared = {name: array.tobytes() for name, array in final.model.shared.items()}
    again = {name: array.tobytes() for name, array in train(final=followed).model.shared.items()}
    assert shared == again
    assert shared != {name: array.tobytes() for name, array in followed.model.shared.items()}


def test_no_figure_belongs_to_it(followed, tmp_path):
    final = train(final=followed.folder.path, data=followed.data, out=tmp_path / "final")
    summary = RunFolder.open(tmp_path / "final").read_summary()
    assert (summary.test, summary.valid, summary.baselines) == ({}, {}, None)
    assert summary.marks == [FINAL_MARK] and "final model" in repr(final)
    kept = summary.final_of
    assert kept.run == str(followed.folder.path) and kept.summary == followed.summary
    assert kept.digest == hashlib.sha256(followed.summary.to_json().encode()).hexdigest()
    assert summary.figures.test == followed.summary.test
    opened = Run.open(tmp_path / "final", followed.data)
    user = followed.data.users[0]
    assert opened.recommend(user, 3) == final.recommend(user, 3)
    for refused in (
        lambda: opened.evaluate(),
        lambda: opened.compare(followed),
        lambda: followed.compare(tmp_path / "final"),
    ):
        with pytest.raises(ConfigError, match="is a final model, trained on everything"):
            refused()


def test_only_final_models_lack_figures(followed):
    fields = followed.summary.as_dict()
    with pytest.raises(ValueError, match="'test' lacks 'full'"):
        Summary.model_validate({**fields, "test": {}, "valid": {}})
    with pytest.raises(ValueError, match="a final model has no figures of its own"):
        kept = {"run": "runs/a", "digest": "0", "summary": fields}
        Summary.model_validate({**fields, "final_of": kept})
    with pytest.raises(ConfigError, match=r"split\.hold_out = false leaves nothing to evaluate"):
        train(followed.data, "fedmf", settings={"split.hold_out": False})


@pytest.mark.parametrize("given", [{"rounds": 3}, {"lr": 1.0}, {"method": "fedmf"}, {"seeds": 2}])
def test_its_settings_are_those_of_the_run(given, followed):
    (name,) = given
    with pytest.raises(ConfigError, match=f"final goes on with .*: leave out '{name}'"):
        train(final=followed, **given)


def test_runs_that_chose_nothing_are_not_followed(followed, tiny, tmp_path):
    final = train(final=followed)
    with pytest.raises(ConfigError, match="is a final model already; it follows"):
        train(final=final)
    train(tiny, "popularity", seeds=2, out=tmp_path / "seeds")
    with pytest.raises(RunError, match=r"holds several seeds: name one, such as .*seed-0"):
        train(final=tmp_path / "seeds", data=tiny)


def test_it_may_follow_with_newer_data(followed, tiny):
    rows = list(zip(tiny.user.tolist(), tiny.item.tolist(), tiny.time.tolist(), strict=True))
    somebody = len(tiny.users)
    newer = interactions([*rows, (somebody, 3, 98), (somebody, 5, 99)])
    final = train(newer, final=followed)
    assert len(final.split.train) == somebody + 1
    assert len(final.recommend(f"u{somebody:03d}", 2)) == 2


def test_it_can_be_interrupted(followed, tmp_path):
    whole = train(final=followed, out=tmp_path / "whole")
    with pytest.raises(StoppedError):
        train(final=followed, out=tmp_path / "cut", callbacks=[StopAfter(1)])
    train(followed.data, out=tmp_path / "cut", resume=True)
    name = "checkpoint/final/selected-shared.safetensors"
    assert (tmp_path / "cut" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    summary = RunFolder.open(tmp_path / "cut").read_summary()
    assert summary.final_of == whole.summary.final_of
    with pytest.raises(ConfigError, match="is a final model, of as many rounds as the run"):
        train(followed.data, out=tmp_path / "cut", resume=True, rounds=50)


def test_a_guarantee_covers_it(tmp_path):
    """All rows train under the noise of the run, and a release is made as of any run."""
    private = train("demo", privacy="central", epsilon=8, out=tmp_path / "private")
    final = train(final=private, out=tmp_path / "final")
    statement = final.summary.privacy
    assert statement.epsilon == pytest.approx(8, rel=0.01) and statement.promises
    assert len(final.split.train.positives.values) == len(final.split.data)
    made = release(Run.open(tmp_path / "final"), tmp_path / "released")
    assert "private" not in (made / "config.toml").read_text().split("[privacy]")[0]
    arrays = [array for array in final.model.shared.values() if array.dtype.kind == "f"]
    assert all(np.isfinite(array).all() for array in arrays)


def test_validation_queries_are_not_charged_again(tiny):
    settings = {"privacy.selection_share": 0.2, "d": 4}
    run = train(
        tiny, "fedmf", rounds=4, privacy="central", epsilon=8, delta=1e-3, settings=settings
    )
    final = train(final=run)
    assert final.experiment.privacy.selection_share is None
    assert final.summary.rounds == run.summary.selected_round
    assert final.summary.privacy.epsilon == pytest.approx(8, rel=0.01)


def test_the_command_line_trains_and_shows_it(tmp_path):
    chosen, shipped = tmp_path / "chosen", tmp_path / "shipped"

    def says(*words):
        return CliRunner().invoke(main, list(map(str, words)))

    assert says("train", "--method", "fednext", "--out", chosen, "-q").exit_code == 0
    done = says("train", "--final", chosen, "--out", shipped, "-q")
    assert done.exit_code == 0, done.stderr
    words = " ".join(done.stdout.split())
    assert "which this model follows" in words and "no figure belongs to it" in words
    figure = json.loads((chosen / "summary.json").read_text())["test"]["full"]["hr@10"]
    assert f"{figure:.4f}" in words
    report = (shipped / "report.html").read_text()
    assert "No figure belongs to this model" in report and f"{figure:.4f}" in report
    refused = says("train", "--final", chosen, "--out", tmp_path / "x", "--rounds", 3)
    assert refused.exit_code == 2 and "leave out --rounds" in refused.stderr
    for command in ("compare", "evaluate", "analyse"):
        told = says(command, *([chosen] if command == "compare" else []), shipped)
        assert told.exit_code == 2 and "the run that it follows" in told.stderr, command
    listed = says("recommend", shipped, "--user", "viewer-0001", "-k", 2, "--json")
    assert len(json.loads(listed.stdout)["recommendations"]) == 2
    assert says("export", shipped, tmp_path / "bundle").exit_code == 0


def test_a_search_needs_validation_items(tiny, tmp_path):
    everything = ExperimentRequest(tiny.name, "fedmf", settings={"split.hold_out": False})
    with pytest.raises(ConfigError, match="a search needs validation items"):
        tune(tiny, everything, tmp_path / "search")
