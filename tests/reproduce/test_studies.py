"""Studies of our own: a page each, all data sets side by side, marks and forests of differences."""

import pytest
from experiments.exhibits import pictures
from experiments.page import PAGE, exhibit_section, write_pages
from experiments.plan import chosen, read_papers
from experiments.results import Record, Results

from hushrec.errors import ConfigError

STUDY = 'system = "Our own"\npage = "results.md"\nnote = "Why we look."\n'
PAPER = 'system = "Theirs"\ncited = "They: What"\n'
TABLE = """
title = "A grid"
kind = "overview"
protocols = ["honest"]

[data]
One = "one"
Two = "two"

[[row]]
name = "base"
method = "popularity"

[[row]]
name = "own"
method = "pfedrec"
against = ["base"]
line = "Own − base"

[[row]]
name = "same"
method = "fedmf"
against = ["base", "own"]

[[row]]
name = "late"
data = ["Two"]
method = "fedncf"
against = ["base"]
"""
COMMAND = "hushrec train --data {} --method {} --protocol honest"


@pytest.fixture
def experiments(tmp_path):
    folder = tmp_path / "experiments"
    for name, words in (("a-study", STUDY), ("paper", PAPER)):
        (folder / name).mkdir(parents=True)
        (folder / name / "paper.toml").write_text(words)
        (folder / name / "table-1.toml").write_text(TABLE.replace("overview", "table"))
    (folder / "a-study/table-1.toml").write_text(TABLE)
    return folder


@pytest.fixture
def results(experiments):
    found = Results(experiments / "results")

    def put(data, method, ndcg=None, **tests):
        """``tests``: the difference from another method, and p."""
        values = {} if ndcg is None else {"test": {"full": {"hr@10": 2 * ndcg, "ndcg@10": ndcg}}}
        against = {
            COMMAND.format(data, other): {"test/full/ndcg@10": [value, value - 0.01, value, p]}
            for other, (value, p) in tests.items()
        }
        diverged = "too large a step" if ndcg is None else None
        record = Record(
            seeds=[0], version="1", rounds=1, seconds=1.0, diverged=diverged, values=values,
            against=against,
        )  # fmt: skip
        found.put(data, COMMAND.format(data, method), record)

    put("one", "popularity", 0.1)
    put("two", "popularity", 0.1)
    put("one", "pfedrec", 0.2, popularity=(0.1, 0.04))
    put("two", "pfedrec", 0.05, popularity=(-0.05, 0.001))
    put("one", "fedmf")
    put("two", "fedmf", 0.11, popularity=(0.01, 0.05), pfedrec=(0.06, 0.01))
    return found


def test_an_overview_says_which_differences_count(experiments, results):
    (exhibit,) = chosen(read_papers(experiments), ["a-study"])
    lines = exhibit_section(exhibit, results)
    assert "| honest | against | One | Two |" in lines
    assert "| base |  | 0.200 / 0.100 | 0.200 / 0.100 |" in lines
    assert "| own | base | 0.400 / 0.200 ▲ | 0.100 / 0.050 ▼ |" in lines
    assert "| same | base, own | diverged | 0.220 / 0.110 = ▲ |" in lines
    assert "| late | base |  | not run |" in lines, "it is no cell of One"
    assert "a-study/table-1`: partly, 6 of 7 cells." in "\n".join(lines)
    one = exhibit_section(exhibit, results, ["one"])
    assert not any("against" in line for line in one), "a single data set needs no overview"
    assert "| own | 0.4000 | 0.2000 |" in one


def test_the_forest_has_the_rows_that_ask_for_it(experiments, results):
    (exhibit,) = chosen(read_papers(experiments), ["a-study"])
    ((name, drawing),) = pictures(exhibit, results).items()
    assert name == "table-1-honest.svg"
    assert drawing.count("Own − base") == 1
    assert drawing.count('class="dot strong"') == 2
    assert ("+0.1000" in drawing, "−0.0500" in drawing, "+0.0100" in drawing) == (True, True, False)
    assert pictures(exhibit, Results(experiments / "nothing")) == {}


def test_a_study_has_a_page_of_its_own_and_comes_last(experiments, results):
    papers = read_papers(experiments)
    assert [paper.key for paper in papers] == ["paper", "a-study"]
    pages = write_pages(papers, results, experiments)
    assert pages == [experiments.parent / PAGE, experiments / "a-study/results.md"]
    common, own = (page.read_text("utf-8") for page in pages)
    assert "Our own" not in common
    assert "▲" not in common
    assert own.startswith("# Our own\n")
    assert "Why we look." in own
    assert "## Table 1: A grid" in own.splitlines()
    assert "![A grid, honest](table-1-honest.svg)" in own.splitlines()
    assert f"- `{COMMAND.format('two', 'fedmf')}` (1 seed, 1)" in own.splitlines()
    assert "Theirs" not in own


@pytest.mark.parametrize(
    ("file", "old", "new", "words"),
    [
        ("paper.toml", "results.md", "../../README.md", r"paper\.toml: page: String should match"),
        (
            "paper.toml",
            'page = "results.md"',
            "",
            r"paper\.toml: a paper is cited, a study of our own has a page",
        ),
        ("table-1.toml", '"late"', '"own"', r"table-1\.toml: two rows are called 'own'"),
        (
            "table-1.toml",
            '["Two"]',
            '["Three"]',
            r"table-1\.toml: row 'late': 'Three' is none of the data",
        ),
    ],
)
def test_a_wrong_study_is_refused_by_name(experiments, file, old, new, words):
    place = experiments / "a-study" / file
    place.write_text(place.read_text().replace(old, new))
    with pytest.raises(ConfigError, match=words):
        read_papers(experiments)


def test_a_data_set_without_rows_is_refused(experiments):
    place, row = (
        experiments / "a-study/table-1.toml",
        '[[row]]\nname = "base"\nmethod = "popularity"\n',
    )
    table = TABLE.partition("[[row]]")[0] + row
    place.write_text(table)
    (exhibit,) = chosen(read_papers(experiments), ["a-study"])
    assert [cell.label for cell in exhibit.cells] == ["One", "Two"], "a row is on all, by default"
    place.write_text(table + 'data = ["One"]')
    with pytest.raises(ConfigError, match=r"table-1\.toml: no row is on 'Two'"):
        read_papers(experiments)
