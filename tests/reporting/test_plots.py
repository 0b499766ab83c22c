"""Drawings and figures, without a page around them."""

import pytest

from hushrec.reporting import plots
from hushrec.reporting.tables import human_duration, human_size


def test_names_in_drawings_are_escaped():
    drawing = str(plots.dots([plots.Dot('<b>&"', 0.5, (0.4, 0.6))], '<i>&"'))
    assert "<b>" not in drawing
    assert "<i>" not in drawing
    assert "&lt;b&gt;&amp;&quot;" in drawing


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [
        (0, 0.1029, [0, 0.05, 0.1, 0.15]),
        (0, 1, [0, 0.25, 0.5, 0.75, 1]),
        (3, 3, [3, 4, 5, 6]),
        (0, 0, [0, 0.25, 0.5, 0.75, 1]),
    ],
)
def test_ticks_are_round_and_enclose(low, high, ticks):
    assert plots.nice_ticks(low, high, 4) == pytest.approx(ticks)


def test_rounds_on_the_axis_keep_their_distance():
    assert plots.round_ticks(1, 15) == [1, 5, 10, 15]
    assert plots.round_ticks(1, 2) == [1, 2]
    assert plots.round_ticks(1, 100)[0] == 1
    assert plots.round_ticks(1, 100)[-1] == 100


def test_a_line_that_never_moves_can_be_drawn():
    assert "polyline" in plots.line([(1, 0.0), (2, 0.0)], "flat", selected=2, from_zero=True)
    assert "polyline" in plots.line([(1, 0.3), (2, 0.3)], "flat", selected=1)


def test_sizes_and_durations_are_for_people():
    sizes = [human_size(n) for n in (0, 999, 1_234, 56_500, 999_700, 3.2e9, 5e15)]
    assert [s.replace("\xa0", " ") for s in sizes] == [
        *("0 bytes", "999 bytes", "1.2 kB", "56.5 kB", "1.0 MB", "3.2 GB", "5000 TB")
    ]
    times = [human_duration(s) for s in (0.0714, 12.34, 600, 10_000)]
    assert [t.replace("\xa0", " ") for t in times] == ["71 ms", "12.3 s", "10 min", "2.8 h"]
