"""The guard of a training: which rounds do not count, and what it may look at."""

import math
from dataclasses import replace

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from hushrec.aggregation import LossSum, Total
from hushrec.api import train
from hushrec.cli import main
from hushrec.errors import DivergedError
from hushrec.federation.backends import InProcess
from hushrec.federation.guard import (
    GuardConfig,
    GuardState,
    PhaseFigures,
    RoundFigures,
    rounds_in_words,
)
from hushrec.testing import taste_world

GUARD = GuardConfig()
USUAL = {"method": "fedmf", "settings": {"d": 4}}


def figures(loss, norm=1.0, bound=math.inf):
    return RoundFigures(norm, bound, loss)


def after(*rounds):
    state = PhaseFigures()
    for one in rounds:
        state = state.plus(one, GUARD.window)
    return state


def test_the_first_round_of_a_phase_is_bounded_by_clipping_and_noise_alone():
    assert figures(1e9, 1e9).reason(GUARD, PhaseFigures()) == ""
    assert "clipping and noise allow" in figures(None, 2.0, 1.5).reason(GUARD, PhaseFigures())
    assert "not finite" in figures(None, math.nan).reason(GUARD, PhaseFigures())
    assert "3 clients is not finite" in replace(figures(0.1), lost=3).reason(GUARD, PhaseFigures())


def test_loss_and_norm_far_outside_of_the_last_rounds_are_refused():
    """The losses of a federation with a node of random vectors."""
    before = after(figures(0.72))
    assert "its loss is 21, where the last round had 0.72" in figures(21.0).reason(GUARD, before)
    assert figures(3.5).reason(GUARD, before) == ""
    assert "its norm is 11" in figures(0.72, 11.0).reason(GUARD, before)
    # A round that was large before may be large again.
    calm = after(figures(9.0), *[figures(0.1)] * 20)
    assert figures(17.0).reason(GUARD, calm) == "" != figures(19.0).reason(GUARD, calm)


@given(
    st.lists(st.floats(0.5, 2.0), min_size=1, max_size=30),
    st.floats(0.5, 2.0),
    st.floats(1e-6, 1e6),
    st.floats(1e-6, 1e6),
)
def test_rounds_within_a_factor_of_four_are_never_refused(before, new, loss, norm):
    known = after(*(figures(loss * each, norm * each) for each in before))
    assert figures(loss * new, norm * new).reason(GUARD, known) == ""
    assert figures(loss * new, norm * 100.0).reason(GUARD, known)


def test_the_bound_of_a_noised_total_is_what_clipping_and_noise_allow():
    rng, clients, clip, noise = np.random.default_rng(0), 50.0, 2.0, 3.0
    for _ in range(20):
        total = Total(clients, {}, {"w": rng.normal(0, noise, 4000)}, noise_std=noise)
        total.dense["w"][0] += clients * clip
        assert RoundFigures.of(total, clip, None).reason(GUARD, PhaseFigures()) == ""
    spoilt = replace(total, dense={"w": total.dense["w"] * 5})
    assert RoundFigures.of(spoilt, clip, None).reason(GUARD, PhaseFigures())
    assert RoundFigures.of(spoilt, None, None).reason(GUARD, PhaseFigures()) == ""


def test_the_state_is_stored_with_a_checkpoint():
    state = GuardState().after(1, "", "train", figures(0.5), 8)
    state = state.after(2, "its loss is 21", "train", None, 8)
    again = GuardState.model_validate_json(state.to_json())
    assert again == state and again.in_a_row == 1 and again.not_applied[0].round == 2
    assert again.after(3, "", "train", figures(0.4), 8).in_a_row == 0


def test_rounds_are_written_as_spans():
    assert rounds_in_words([4]) == "round 4"
    assert rounds_in_words([5, 4]) == "rounds 4 and 5"
    assert rounds_in_words([1, 2, 3, 7, 9, 10]) == "rounds 1 to 3, 7, 9 and 10"


class Spoilt:
    """Multiplies the sum of some rounds by a large number."""

    def __init__(self, monkeypatch, rounds, factor=10_000):
        plain = InProcess.train

        def spoilt(backend, download, protection, cohort):
            collected = plain(backend, download, protection, cohort)
            if download.round in rounds:
                for table, _ in collected.summed._rows.values():
                    table *= factor
            return collected

        monkeypatch.setattr(InProcess, "train", spoilt)


def test_a_simulated_round_far_outside_is_left_out_and_said(tmp_path, monkeypatch):
    honest = train(taste_world(), rounds=6, **USUAL)
    Spoilt(monkeypatch, {4})
    run = train(taste_world(), rounds=6, out=tmp_path / "run", **USUAL)
    assert [one.round for one in run.summary.not_applied] == [4]
    assert any("1 of 6 rounds was not applied: round 4" in mark for mark in run.summary.marks)
    lines = run.folder.read_metrics()
    assert [bool(line.not_applied) for line in lines] == [n == 4 for n in range(1, 7)]
    assert run.summary.test["full"]["auc"] > honest.summary.test["full"]["auc"] - 0.1
    unguarded = train(
        taste_world(), rounds=6, method="fedmf", settings={"d": 4, "guard.active": False}
    )
    assert not unguarded.summary.not_applied
    assert unguarded.summary.valid != run.summary.valid


def test_a_command_whose_run_left_rounds_out_exits_with_3(tmp_path, monkeypatch):
    Spoilt(monkeypatch, {4})
    words = ["train", "--data", "demo", "--method", "fedmf", "--rounds", "5", "--set", "d=4"]
    done = CliRunner().invoke(main, [*words, "--out", str(tmp_path / "run")])
    assert done.exit_code == 3
    assert "the run is complete, but 1 of 5 rounds was not applied: round 4" in done.output
    assert (tmp_path / "run" / "summary.json").exists()


def test_several_rounds_in_a_row_end_the_run_and_are_saved(tmp_path, monkeypatch):
    Spoilt(monkeypatch, range(3, 99))
    with pytest.raises(DivergedError, match=r"3 rounds in a row were not applied.*smaller lr"):
        train(taste_world(), rounds=20, out=tmp_path / "run", **USUAL)
    metrics = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert len(metrics) == 5 and '"not_applied"' in metrics[-1]


def test_a_phase_of_one_round_cannot_be_left_out(monkeypatch):
    plain = InProcess.train

    def broken(backend, download, protection, cohort):
        collected = plain(backend, download, protection, cohort)
        return replace(collected, loss=LossSum(0, 1, 1))

    monkeypatch.setattr(InProcess, "train", broken)
    with pytest.raises(DivergedError, match="fednext cannot do without it"):
        train(taste_world(), "fednext", rounds=1)
