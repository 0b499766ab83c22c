"""What a run records of groups of users, and what guidance did to them."""

import pytest

import hushrec
from hushrec.analysis.run import guidance_effects, metrics_by_group
from hushrec.evaluation.metrics import per_user
from hushrec.reporting.html import write_report


@pytest.fixture(scope="module")
def guided(small, tmp_path_factory):
    """FedRKG with a commit at the start of rounds 5, 9 and 13, looked at every third round."""
    settings = {"interval": 4, "beta": 0.5, "gate_lr": 5.0, "d": 6, "evaluation.every": 3}
    out = tmp_path_factory.mktemp("guided") / "run"
    return hushrec.train(small, "fedrkg", rounds=13, settings=settings, out=out)


def test_a_run_is_looked_at_before_and_after_guidance(guided):
    lines = guided.folder.read_metrics()
    looked = {line.round for line in lines if line.valid is not None}
    assert looked == {3, 6, 9, 12, 13} | {4, 5, 8}
    assert {line.round for line in lines if line.gates} == {5, 9, 13}
    assert all((line.groups is not None) == (line.valid is not None) for line in lines)


def test_extra_looks_do_not_use_up_the_patience(tiny):
    """Guidance in every round, so a look in every round; patience counts every fourth."""
    settings = {"interval": 1, "d": 4, "evaluation.every": 4, "evaluation.patience": 2}
    run = hushrec.train(tiny, "fedrkg", rounds=40, settings=settings)
    assert run.summary.rounds >= run.summary.selected_round + 5
    assert run.summary.rounds % 4 == 0


def test_the_effect_is_the_difference_of_two_looks(guided):
    effects = guidance_effects(guided)
    assert [effect.round for effect in effects] == [5, 9, 13]
    lines = {line.round: line for line in guided.folder.read_metrics()}
    for effect in effects:
        for group in ("cold", "warm", "distinct", "followers"):
            before = lines[effect.round - 1].groups[group]["ndcg@10"]
            assert effect.before[group] == before
            assert effect.after[group] == lines[effect.round].groups[group]["ndcg@10"]
        assert effect.after["all"] == lines[effect.round].valid["full"]["ndcg@10"]
        assert effect.gates["away"] > 0.1  # at this rate the gates do something
        assert set(effect.gates["groups"]["cold"]) >= {"logit", "popular_logit"}
        assert sum(effect.moved.values()) == pytest.approx(1)
        assert effect.moved["improved"] + effect.moved["declined"] > 0.5
    with pytest.raises(hushrec.HushrecError, match="no guidance rounds"):
        guidance_effects(hushrec.train(guided.split.data, "popularity"))


def test_recorded_groups_are_those_of_the_ranks(guided):
    """The last round's record equals what its ranks give when it was the selected one."""
    run = hushrec.train(guided.split.data, "fedmf", rounds=1, out=guided.folder.path / "one")
    members = run.evaluator(1).groups("valid")
    values = per_user(run.ranks["valid"]["full"], "ndcg@10")
    (line,) = run.folder.read_metrics()
    for name, said in line.groups.items():
        assert said["ndcg@10"] == pytest.approx(values[members[name]].mean())
    found = metrics_by_group(run)["hr@10"]
    assert found.mean == pytest.approx(run.metrics["full"]["hr@10"])


def test_the_report_shows_groups_and_guidance(guided):
    page = write_report(guided).read_text()
    for words in ("Cold users", "Followers", "What guidance changed", "Gates</b>", 'class="event"'):
        assert words in page
    assert guided.summary.to_json()  # still plain
