"""Progress of training: what is said, where, and how long it still takes."""

import io

import pytest
from rich.console import Console

import hushrec
from hushrec.federation.rounds import RoundRecord
from hushrec.runs import progress
from hushrec.runs.progress import TimeLeft, TrainingDisplay, bar, lines, notebook

QUICK = {"d": 4, "item_rate": 1.0}


def test_the_time_left_is_estimated_phase_by_phase():
    """Of phases of 1, 1, 6 and 40 rounds; the first round of each compiles kernels."""
    left = TimeLeft([1, 1, 6, 40], 48)
    times = [100.0, 20.0] + [30.0] + [2.0] * 5 + [50.0] + [1.0] * 39
    said = []
    for number, seconds in enumerate(times, 1):
        left.add(number, seconds)
        said.append(left.left(number))
    # 100 s a round would have said 78 minutes.
    assert [unknown for _, unknown in said[:10]] == [3, 2, 2, 1, 1, 1, 1, 1, 1, 0]
    assert [known for known, _ in said[:5]] == pytest.approx([0.0, 0.0, 0.0, 8.0, 6.0])
    assert said[9] == (pytest.approx(38.0), 0) and said[-1] == (0, 0)
    assert (left.words(3), left.words(48)) == ("50.0\xa0s left", "0\xa0ms left")


def test_a_round_that_waited_for_a_deadline_does_not_make_hours_of_minutes():
    """12 rounds of 25 s are left, and one of those before waited 900 s for a node."""
    left = TimeLeft([16], 16)
    for number, seconds in enumerate([230.0, 900.0, 25.0, 25.0], 1):
        left.add(number, seconds)
    assert left.left(4)[0] == pytest.approx(12 * (75 + 25 + 25) / 3)
    left = TimeLeft([16], 16)
    for number, seconds in enumerate([230.0, 25.0, 900.0], 1):
        left.add(number, seconds)
    assert left.left(3)[0] < 2 * 3600


def test_a_method_with_one_phase_is_estimated_from_its_second_round_on():
    left = TimeLeft([100], 5)
    left.add(1, 60.0)
    assert left.left(1) == (0, 1) and left.words(1) == "… left"
    left.add(2, 2.0)
    left.add(3, 4.0)
    assert left.left(3) == (pytest.approx(6.0), 0)


def test_planned_phases_beyond_the_rounds_are_not_waited_for():
    left = TimeLeft([1, 1, 6, 40], 4)
    for number in (1, 2, 3):
        left.add(number, 1.0)
    assert left.left(3) == (0, 1)
    left.add(4, 1.0)
    assert left.left(4) == (0, 0)


def record(**more):
    zeros = {"valid": None, "selected_round": 0, "selected_value": 0.0}
    return RoundRecord(**{"round": 7, "rounds": 48, "loss": 0.25, **zeros, **more})


@pytest.mark.parametrize("width", [60, 80])
def test_a_narrow_bar_keeps_rounds_and_time_left(width):
    console = Console(file=io.StringIO(), force_terminal=True, width=width, color_system=None)
    state = ["loss 0.2512", "valid ndcg@10 0.1234", "score candidates", "112 ms a round"]
    with bar(console) as show:
        show(record(), "training", state, "79 min left")
    text = console.file.getvalue()
    assert "7/48" in text and "79 min left" in text and "loss 0.2512" in text
    assert ("112 ms a round" in text) is False and "…" in text


def test_labels_and_phases_are_safe_to_print():
    console = Console(file=io.StringIO(), force_terminal=True, width=100, color_system=None)
    written = []
    outputs = [lines(written.append, every=0)]
    with bar(console) as show:
        for output in (show, *outputs):
            output(record(), "evil\x1b]0;title\x07", ["a phase\x1b[2J"], "1 s left")
    assert "\x1b" not in written[0] and "␛" in written[0]
    assert "\x1b]0;" not in console.file.getvalue() and "\x1b[2J" not in console.file.getvalue()


def test_a_notebook_shows_one_line_and_updates_it(monkeypatch):
    shown = []

    class Handle:
        def update(self, data, raw):
            shown.append(("update", data["text/plain"]))

    class Display:
        @staticmethod
        def display(data, raw, display_id):
            shown.append(("new", data["text/plain"]))
            return Handle()

    monkeypatch.setattr(progress, "import_module", lambda name: Display)
    show = notebook()
    for number in (1, 24, 48):
        show(record(round=number), "training", ["loss 0.2"], "3 s left")
    assert [how for how, _ in shown] == ["new", "update", "update"]
    assert "24/48  3 s left  loss 0.2" in shown[1][1] and "██████████░" in shown[1][1]


def test_python_is_silent_but_in_a_terminal_or_a_notebook(tiny, capsys, monkeypatch):
    given = {"method": "fedmf", "rounds": 3, "settings": QUICK}
    hushrec.train(tiny, **given)
    assert capsys.readouterr() == ("", "")
    hushrec.train(tiny, **given, progress=True)
    said = capsys.readouterr()
    assert said.out == "" and "training: round 3 of 3: loss 0." in said.err
    assert "valid ndcg@10 0." in said.err and "… left" in said.err
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich takes this for a terminal
    hushrec.train(tiny, **given)
    assert "3/3" in capsys.readouterr().err
    hushrec.train(tiny, **given, progress=False)
    assert capsys.readouterr() == ("", "")


def test_the_metric_that_is_shown_is_the_one_that_selects(tiny):
    written = []
    display = TrainingDisplay([lines(written.append, every=0)])
    select = {"evaluation.select": "auc", "evaluation.select_on": "sampled"}
    hushrec.train(tiny, "fedmf", rounds=2, settings={**QUICK, **select}, callbacks=[display])
    assert "valid auc 0." in written[0] and len(written) == 2
