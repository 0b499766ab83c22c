"""Runs side by side: baselines, all pairs, several data sets, and the table of a paper."""

import csv
import io
import json
import re
from dataclasses import replace

import numpy as np
import pytest
from click.testing import CliRunner

import hushrec
from hushrec.cli import main
from hushrec.errors import ConfigError, InputError
from hushrec.evaluation.groups import holm, paired_test
from hushrec.evaluation.metrics import per_user
from hushrec.federation.client import wire_bytes
from hushrec.methods.base import method_class, method_names
from hushrec.runs.compared import ComparedRun, Comparison
from hushrec.runs.folder import RunFolder
from hushrec.runs.schema import PUBLISHED_MARK


@pytest.fixture(scope="module")
def folders(tiny, small, tmp_path_factory):
    """Runs of two data sets by "data/method", one of them published, one of two seeds."""
    folder = tmp_path_factory.mktemp("runs")
    # As a file each, so that they have names.
    for name, data in (("tiny", tiny), ("small", small)):
        rows = zip(data.users[data.user], data.items[data.item], data.time, strict=True)
        file = folder / f"{name}_set.csv"
        file.write_text("user,item,time\n" + "".join(f"{u},{i},{t}\n" for u, i, t in rows))
        given = {"rounds": 2, "d": 4}
        hushrec.train(file, "popularity", out=folder / name / "popularity")
        hushrec.train(file, "fednext", out=folder / name / "fednext")
        hushrec.train(file, "fedmf", **given, out=folder / name / "fedmf")
    file = folder / "small_set.csv"
    hushrec.train(file, "fedmf", **given, protocol="published", out=folder / "small/leaky")
    hushrec.train(file, "fedmf", **given, seeds=2, out=folder / "small/seeds")
    return folder


SMALL = ("popularity", "fednext", "fedmf")


def of_small(folders, *names):
    return [folders / "small" / name for name in names or SMALL]


def test_any_run_is_the_baseline(folders):
    runs = of_small(folders)
    first = hushrec.compare(runs)
    for against in (runs[2], str(runs[2]), "fedmf"):
        compared = hushrec.compare(runs, against=against)
        assert [row.run for row in compared] == [row.run for row in first]
        baseline = [row.difference is None for row in compared]
        assert baseline == [False, False, True] * 2
        assert {row.against for row in compared} == {None, str(runs[2])}
        assert compared[0].difference == pytest.approx(-first[2].difference)
    added = hushrec.compare(runs[:2], against=runs[2])
    assert [row.method for row in added][:3] == ["fedmf", "popularity", "fednext"]
    assert added[1].difference == compared[0].difference


def test_all_pairs_are_tested_and_corrected_together(folders):
    runs = of_small(folders)
    compared = hushrec.compare(runs, ["hr@10"], all_pairs=True)
    pairs = [(row.method, row.against and row.against.rsplit("/", 1)[1]) for row in compared]
    assert pairs == [
        ("popularity", None),
        ("fednext", "popularity"),
        ("fedmf", "popularity"),
        ("fedmf", "fednext"),
    ]
    ranks = [hushrec.Run.open(run).ranks["test"]["full"] for run in runs]
    values = [per_user(one, "hr@10") for one in ranks]
    raw = [paired_test(values[a], values[b]).p_value for a, b in ((1, 0), (2, 0), (2, 1))]
    assert [row.p_value for row in compared][1:] == pytest.approx(holm(raw).tolist())
    assert len({row.mean for row in compared if row.method == "fedmf"}) == 1


def test_data_sets_are_grouped_and_tests_stay_within_one(folders):
    runs = [folders / data / method for method in SMALL for data in ("tiny", "small")]
    compared = hushrec.compare(runs, against="popularity")
    assert compared.data == ["tiny_set", "small_set"]
    assert [row.data for row in compared] == ["tiny_set"] * 6 + ["small_set"] * 6
    for row in compared:
        assert row.against is None or row.against.split("/")[-2] == row.run.split("/")[-2]
    tested = [row.p_value for row in compared if row.p_value is not None]
    assert len(tested) == 8
    alone = hushrec.compare([folders / "tiny" / method for method in SMALL])
    for one, row in zip(alone, compared, strict=False):
        assert replace(one, p_value=None) == replace(row, p_value=None)
        assert one.p_value is None or one.p_value <= row.p_value, "corrected over more tests"


def test_what_cannot_be_compared_is_said(folders, tmp_path):
    tiny, small = folders / "tiny/fedmf", folders / "small/fedmf"
    with pytest.raises(InputError, match=r"data sets tiny_set, small_set, and compare needs two"):
        hushrec.compare([tiny, small])
    data = folders / "small_set.csv"
    other = tmp_path / "other"
    hushrec.train(data, "popularity", settings={"split.kind": "ratio"}, out=other)
    with pytest.raises(InputError, match=r"different held-out.*a call of its own"):
        hushrec.compare([small, other, tiny])
    runs = of_small(folders)
    with pytest.raises(ConfigError, match=r"no run on small_set is 'fednxt'.*mean 'fednext'"):
        hushrec.compare(runs, against="fednxt")
    with pytest.raises(ConfigError, match="several runs on small_set are of fedmf: name the"):
        hushrec.compare([*runs, folders / "small/leaky"], against="fedmf")
    with pytest.raises(ConfigError, match="all pairs have no baseline"):
        hushrec.compare(runs, against="fedmf", all_pairs=True)
    with pytest.raises(ConfigError, match="did you mean 'ndcg'"):
        hushrec.compare(runs, ["ndgc@10"])
    with pytest.raises(ConfigError, match="seeds are of one method"):
        hushrec.compare([runs[0], [hushrec.Run.open(run) for run in runs[:2]]])


def test_a_file_that_has_changed_is_another_data_set(folders, tmp_path):
    copy = tmp_path / "small_set.csv"
    text = (folders / "small_set.csv").read_text()
    copy.write_text(text)
    hushrec.train(copy, "popularity", out=tmp_path / "before")
    # The first line is nobody's held-out item.
    copy.write_text(text.replace(text.splitlines()[1] + "\n", ""))
    hushrec.train(copy, "popularity", out=tmp_path / "after")
    with pytest.raises(InputError, match="the rows of 'small_set' were not the same"):
        hushrec.compare([tmp_path / "before", tmp_path / "after"])
    moved = hushrec.compare([folders / "small/popularity", tmp_path / "before"])
    assert moved.data == ["small_set"] and moved[1].difference == 0


def test_seeds_in_memory_are_seeds_of_a_folder(folders, small):
    runs = hushrec.train(small, "fedmf", rounds=2, d=4, seeds=2)
    single = hushrec.train(small, "popularity")
    own = hushrec.compare([single, runs], ["hr@10"])
    stored = hushrec.compare(of_small(folders, "popularity", "seeds"), ["hr@10"])
    for one, other in zip(own, stored, strict=True):
        unnamed = {"run": "", "data": "", "against": ""}
        assert replace(one, **unnamed) == replace(other, **unnamed)
    assert own[1].seeds == 2 and own[1].run == "2: fedmf"


# ---------------------------------------------------------------- the table of a paper


def latex_lines(text):
    """Return caption, heads and lines of a table, after a check that LaTeX can read it."""
    bare = re.sub(r"\\[\\&%$#_{}]", "", text)
    bare = re.sub(r"(?m)^%.*\n", "", bare)
    depth = 0
    for sign in bare:
        depth += {"{": 1, "}": -1}.get(sign, 0)
        assert depth >= 0
    assert depth == 0 and bare.count("$") % 2 == 0
    assert not re.search(r"[#_^~%]", bare.replace("~", " ")), "signs with a meaning are escaped"
    assert text.isascii()
    begun = re.findall(r"\\begin\{(\w+)\}", text)
    assert begun == re.findall(r"\\end\{(\w+)\}", text)[::-1] == ["table", "tabular"]
    for rule in ("toprule", "midrule", "bottomrule", "cmidrule"):
        assert f"\\{rule}" in text
    columns = len(re.search(r"\\begin\{tabular\}\{(l\w+)\}", text)[1])
    caption = re.search(r"\\caption\{(.*)\}\n", text)[1]
    body = text.partition("\\toprule\n")[2].partition("\\bottomrule")[0]
    rows = [line[: -len(r" \\")] for line in body.splitlines() if line.endswith(r"\\")]
    over, heads, *lines = [re.split(r" & |^& ", row) for row in rows]
    spans = [int(span) for span in re.findall(r"multicolumn\{(\d+)\}", " ".join(over))]
    assert 1 + sum(spans) == len(heads) == columns
    assert {len(line) for line in lines} == {columns}
    return caption, heads, lines


def test_latex_has_a_line_for_each_method_and_columns_for_each_data_set(folders):
    runs = [folders / data / method for data in ("tiny", "small") for method in SMALL]
    compared = hushrec.compare(runs, against="popularity")
    text = compared.to_latex()
    caption, heads, lines = latex_lines(text)
    assert [line[0] for line in lines] == list(SMALL)
    assert heads == ["Method", *["HR@10", "NDCG@10", "Up", "Down", "Serve"] * 2]
    assert r"\multicolumn{5}{c}{tiny\_set\textsuperscript{" in text
    assert "different from popularity (p $<$ 0.05; two-sided paired randomisation test" in caption
    assert "Holm-corrected over 8 tests" in caption and "Honest protocol" in caption
    means = {(row.data, row.method, row.metric): row for row in compared}
    for line in lines:
        for at, (data, metric) in enumerate(
            [(d, m) for d in compared.data for m in compared.metrics]
        ):
            row = means[data, line[0], metric]
            cell = line[1 + at + 3 * (at // 2)]
            best = max(r.mean for r in compared if (r.data, r.metric) == (data, metric))
            assert cell.startswith(r"\textbf{") == (f"{best:.4f}" == f"{row.mean:.4f}")
            assert f"{row.mean:.4f}" in cell
            assert ("$*$" in cell) == (row.p_value is not None and row.p_value < 0.05)
    assert "$*$" in str(lines), "something is significant"
    bare = latex_lines(compared.to_latex(costs=False))
    assert bare[1] == ["Method", *["HR@10", "NDCG@10"] * 2] and "Serve" not in bare[0]


def row(run, mean, **more):
    """Return a row of a comparison that was never made."""
    given = {"data": "d_1", "method": run, "protocol": "honest", "marks": (), "seeds": 1}
    given |= {"metric": "hr@10", "low": mean, "high": mean, "seed_sd": None, "selected_round": 1}
    given |= {"up_bytes": 2e3, "down_bytes": 3e6, "client_up_bytes": 20.0}
    given |= {"client_down_bytes": 3e4, "serving_bytes": None}
    return ComparedRun(run=run, mean=mean, **{**given, **more})


def compared_row(run, mean, against, p_value, difference, **more):
    """Return such a row with its test."""
    more |= {"difference_low": difference, "difference_high": difference}
    return row(run, mean, against=against, p_value=p_value, difference=difference, **more)


def test_runs_that_leak_are_marked_and_never_best():
    leaky = {"protocol": "published", "marks": (PUBLISHED_MARK, "10 of 90 users: few")}
    few = {"marks": ("10 of 90 users: few",)}
    rows = [
        row("a", 0.2, **few),
        compared_row("b", 0.9, "a", 0.001, 0.7, **leaky),
        compared_row("c", 0.30001, "a", 0.2, 0.1, **few),
        compared_row("d", 0.30002, "a", 0.04, 0.1, **few),
    ]
    compared = Comparison(rows, "wilcoxon", "full", all_pairs=False)
    caption, _, lines = latex_lines(compared.to_latex())
    cells = [line[1] for line in lines]
    assert cells[1] == r"0.9000\textsuperscript{$*$$\dagger$}".replace("dagger", "ddagger")
    assert cells[2] == r"\textbf{0.3000}", "what prints alike is alike"
    assert cells[3] == r"\textbf{0.3000}\textsuperscript{$*$}"
    assert "Best in bold, without runs that leak." in caption
    assert "Wilcoxon signed-rank" in caption and "Published protocol where marked" in caption
    text = compared.to_latex()
    assert r"{d\_1\textsuperscript{$\dagger$}}" in text, "all runs have it"
    assert r"$\ddagger$ published protocol (leaks the held-out item)." in text
    assert lines[0][4] == "--", "unknown bytes are no bytes"
    assert (
        r"\textbf{0.9000}"
        in Comparison(
            [row("a", 0.2, **leaky), row("b", 0.9, **leaky)], "wilcoxon", "full", all_pairs=False
        ).to_latex()
    ), "among themselves they are compared"


def test_letters_name_the_runs_that_one_is_above():
    rows = [
        row("x", 0.2),
        compared_row("y", 0.4, "x", 0.01, 0.2),
        compared_row("z", 0.1, "x", 0.3, -0.1),
        compared_row("z", 0.1, "y", 0.02, -0.3),
    ]
    compared = Comparison(rows, "randomisation", "sampled99", all_pairs=True)
    caption, _, lines = latex_lines(compared.to_latex(costs=False))
    assert lines == [
        ["x (a)", "0.2000"],
        ["y (b)", r"\textbf{0.4000}\textsuperscript{ac}"],
        ["z (c)", "0.1000"],
    ]
    assert "Letters name the lines" in caption and "candidates sampled99" in caption
    assert "| y (b) | **0.4000**<sup>ac</sup> |" in compared.to_markdown(costs=False)


def test_lines_are_named_by_what_tells_them_apart():
    rows = [
        row("r/one", 0.1, method="m"),
        row("r/two", 0.2, method="m"),
        row("r/three", 0.3, method="m", protocol="published"),
        row("r/four", 0.4, method="n"),
        row("s/five", 0.5, method="m", data="d2"),
    ]
    lines = latex_lines(Comparison(rows, "wilcoxon", "full", all_pairs=False).to_latex())[2]
    assert [line[0] for line in lines] == ["m (one)", "m (two)", "m (leaks)", "n", "m"]


def test_markdown_says_what_latex_says(folders):
    compared = hushrec.compare(of_small(folders, "popularity", "seeds", "leaky"))
    text = compared.to_markdown()
    caption, heads, lines = latex_lines(compared.to_latex())
    table = [line.strip("| ").split(" | ") for line in text.splitlines() if line[:1] == "|"]
    assert table[0] == heads
    figures = [re.findall(r"\d\.\d{4}", " ".join(line)) for line in lines]
    assert [re.findall(r"\d\.\d{4}", " ".join(line)) for line in table[2:]] == figures
    assert "±" in text and "means over users and seeds" in text and "means over users" in caption
    assert f"† {PUBLISHED_MARK}." in text
    assert compared._repr_markdown_() == repr(compared) == text


def test_every_figure_is_in_the_csv_and_the_frame(folders):
    compared = hushrec.compare(of_small(folders), all_pairs=True)
    read = list(csv.DictReader(io.StringIO(compared.to_csv())))
    frame = compared.to_pandas()
    assert len(read) == len(frame) == len(compared) == 8
    for one, line, own in zip(read, frame.to_dict("records"), compared, strict=True):
        assert float(one["mean"]) == line["mean"] == own.mean
        assert one["against"] == (own.against or "")
        assert float(one["serving_bytes"]) == own.serving_bytes > 0
    assert set(frame.columns) == set(vars(compared[0]))


# ---------------------------------------------------------------- the command


def said(*words):
    return CliRunner().invoke(main, ["compare", *map(str, words)])


def test_tables_are_printed_or_written(folders, tmp_path):
    runs, compared = of_small(folders), hushrec.compare(of_small(folders))
    assert said(*runs, "--latex").stdout == compared.to_latex()
    assert said(*runs, "--markdown", "--no-costs").stdout.strip() == compared.to_markdown(
        costs=False
    )
    files = {name: tmp_path / f"table.{name}" for name in ("latex", "csv", "markdown")}
    given = [word for name, file in files.items() for word in (f"--{name}", file)]
    result = said(*runs, *given)
    assert "to serve" in result.stdout
    assert files["latex"].read_text() == compared.to_latex()
    assert files["markdown"].read_text() == compared.to_markdown()
    assert files["csv"].read_text() == compared.to_csv() == said(*runs, "--csv").stdout
    for words, message in (
        (["--latex", "--csv"], "--latex and --csv cannot both be printed"),
        (["--markdown", "--json"], "--markdown and --json cannot both be printed"),
        (["--latex", runs[0]], "that is a folder; name the FILE to write"),
        (["--against", "fedmff"], "did you mean 'fedmf'"),
    ):
        refused = said(*runs, *words)
        assert refused.exit_code == 2 and refused.stdout == ""
        assert message in " ".join(refused.stderr.split())


def test_the_terminal_shows_pairs_data_sets_and_marks(folders):
    runs = [folders / data / method for data in ("tiny", "small") for method in SMALL]
    shown = said(*runs, folders / "small/leaky", "--all-pairs").stdout
    assert re.findall(r"(?m)^(\w+_set) *\nHR@10 ", shown) == ["tiny_set", "small_set"]
    assert "from small/fednext: " in shown
    assert shown.count("small/fedmf ") >= 2
    assert f"small/leaky: {PUBLISHED_MARK}" in shown
    assert "of any two runs of one data set, Holm-corrected" in " ".join(shown.split())
    against = said(*runs, "--against", "fednext").stdout
    assert re.search(r"^small/fednext +0\.\d+ \S+ \S+ +baseline", against, re.MULTILINE)


# ---------------------------------------------------------------- bytes of one client


TRAINING_ONLY = {"gpfedrec", "fedpergnn", "metamf"}


@pytest.mark.parametrize(
    "method", ["fedmix", "fednext", "fedmf", "pfedrec", "popularity", *sorted(TRAINING_ONLY)]
)
def test_bytes_of_one_client_are_counted(method, tiny):
    run = hushrec.train(tiny, method, rounds=3)
    sent, users = run.summary.communication, len(tiny.users)
    assert sent.client_up_bytes == sent.up_bytes / users
    assert sent.client_down_bytes == sent.down_bytes / users
    served = run.model.method.serving(run.model.shared)
    everybody, unused = np.arange(users), run.model.method.traits.training_only
    private = dict(run.model.private.read(everybody))
    assert unused <= private.keys()
    private = {name: value for name, value in private.items() if name not in unused}
    kept = sum(array.nbytes for array in private.values()) / users
    assert sent.serving_bytes == wire_bytes(served) + round(kept)
    assert wire_bytes(served) <= sum(array.nbytes for array in served.values())
    # What only training reads is not held: scores are the same without it.
    history = run.split.history("test")
    scores = run.model.method.score(served, private, history)
    assert np.array_equal(scores, run.model.scores(everybody, history))


def test_private_fields_for_training_alone_are_known():
    """So that a method that declares some is added to the test above."""
    declared = {name for name in method_names() if method_class(name).traits.training_only}
    assert declared == {"fedmix", *TRAINING_ONLY}


def test_bytes_of_several_seeds_are_means(folders):
    top = folders / "small/seeds"
    summary = RunFolder.open(top).read_summary()
    single = [RunFolder.open(top / f"seed-{seed}").read_summary() for seed in (0, 1)]
    mean = np.mean([one.communication.client_up_bytes for one in single])
    assert summary.communication.client_up_bytes == pytest.approx(mean)
    assert summary.communication.serving_bytes == single[0].communication.serving_bytes


def test_runs_of_before_have_no_bytes_to_serve(folders, tmp_path):
    for name in ("popularity", "fedmf"):
        source, copy = folders / "small" / name, tmp_path / name
        copy.mkdir()
        for file in source.iterdir():
            if file.is_file():
                (copy / file.name).write_bytes(file.read_bytes())
        found = json.loads((copy / "summary.json").read_text())
        for key in ("client_up_bytes", "client_down_bytes", "serving_bytes"):
            del found["communication"][key]
        (copy / "summary.json").write_text(json.dumps(found))
    shown = said(tmp_path / "popularity", tmp_path / "fedmf")
    assert shown.exit_code == 0, shown.output
    assert re.search(r"^fedmf +2 .* +–$", shown.stdout, re.MULTILINE)
    rows = json.loads(said(tmp_path / "popularity", tmp_path / "fedmf", "--json").stdout)
    assert rows[1]["serving_bytes"] is None
    assert rows[1]["client_up_bytes"] == rows[1]["up_bytes"] / 120
