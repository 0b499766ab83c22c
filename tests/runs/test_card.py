"""Model cards: complete, true, the same for the same run, and silent about this machine."""

import getpass
import platform
import re
from dataclasses import replace
from pathlib import Path

import pytest

from hushrec.api import Run, train
from hushrec.evaluation.groups import bootstrap_interval
from hushrec.evaluation.metrics import per_user
from hushrec.runs.card import CARD, CITED, SOFTWARE_LICENCE, run_card
from hushrec.runs.progress import human_size
from hushrec.runs.schema import Summary
from hushrec.testing import taste_world

SECTIONS = [
    *("Intended use", "Data", "Method", "Figures", "Costs", "Privacy", "Limits"),
    *("How to reproduce it", "Licence and citation"),
]
ROOT = Path(__file__).parents[2]


def card_of(run: Run) -> str:
    return (run.folder.path / CARD).read_text("utf-8")


def section(card: str, name: str) -> str:
    return card.partition(f"\n## {name}\n")[2].partition("\n## ")[0]


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Run:
    out = tmp_path_factory.mktemp("runs") / "fedmf"
    return train(taste_world(), "fedmf", rounds=3, d=4, out=out)


@pytest.fixture(scope="module")
def card(run) -> str:
    return card_of(run)


def test_a_card_has_every_section_once(card):
    assert re.findall("^## (.*)$", card, re.M) == SECTIONS
    assert all(section(card, name).strip() for name in SECTIONS)


def test_figures_stand_beside_intervals_and_baselines(run, card):
    figures = section(card, "Figures")
    for name in ("hr@10", "ndcg@10"):
        low, high = bootstrap_interval(per_user(run.ranks["test"]["full"], name))
        others = run.summary.baselines.popularity["full"], run.summary.baselines.chance["full"]
        cells = [name.upper(), f"{run.metrics['full'][name]:.4f}", f"{low:.4f} to {high:.4f}"]
        cells += [f"{other[name]:.4f}" for other in others]
        assert f"| {' | '.join(cells)} |" in figures
    assert "Protocol: honest. Test items of 60 users" in figures


def test_facts_are_those_of_the_summary(run, card):
    summary, sent = run.summary, run.summary.communication
    data = section(card, "Data")
    assert f"tastes: 60 users, 60 items, {summary.users.train_rows:,} training" in data
    assert summary.data_digest in data and "`kind = leave-one-out`" in data
    method = section(card, "Method")
    assert "federated matrix factorisation (Chai et al., 2020" in method
    assert all(f"| `{option}` |" in method for option in summary.options)
    assert f"Rounds: 3; selected {summary.selected_round} by validation. Seed: 0." in method
    costs = section(card, "Costs")
    assert f"together uploaded {human_size(sent.up_bytes)} and" in costs
    assert f"A device holds {human_size(sent.serving_bytes)} to" in costs
    assert all(mark in card for mark in summary.marks)
    assert all(sentence in section(card, "Privacy") for sentence in summary.privacy.in_words)
    assert "hushrec train --config config.toml --out DIR" in section(card, "How to reproduce it")


def test_the_same_run_gives_the_same_card(run, card, tmp_path):
    again = train(taste_world(), "fedmf", rounds=3, d=4)
    again.save(tmp_path / "saved")
    assert card_of(again) == card
    assert run_card(run.experiment, run.summary, run.ranks) == card


def test_a_card_names_neither_places_nor_the_machine(tmp_path):
    data, folder = taste_world(), tmp_path / "secret place"
    folder.mkdir()
    rows = zip(data.users[data.user], data.items[data.item], data.time, strict=True)
    file = folder / "clicks.csv"
    file.write_text("user,item,time\n" + "".join(f"{u},{i},{t}\n" for u, i, t in rows))
    (folder / "mine.toml").write_text("[options]\nd = 4\n")
    first = train(str(file), "fedmf", preset=str(folder / "mine.toml"), rounds=1, out=folder / "a")
    for card in (card_of(first), card_of(train(final=folder / "a", out=folder / "b"))):
        assert card.startswith("# Model card: fedmf on clicks\n")
        assert "preset `mine.toml`" in card
        for word in ("secret place", str(tmp_path), platform.node(), f"/{getpass.getuser()}"):
            assert word not in card
        assert not re.search("user-[0-9]", card)


def test_the_card_of_a_final_model_shows_whose_figures_they_are(run, tmp_path):
    final = train(final=run, data=taste_world(), out=tmp_path / "final")
    card = card_of(final)
    figures = section(card, "Figures")
    assert "No figure belongs to this model" in figures and "figures of `fedmf`" in figures
    assert f"| HR@10 | {run.metrics['full']['hr@10']:.4f} |" in figures
    assert "95 % interval" not in figures
    assert "hushrec train --final fedmf --out DIR" in card
    notes = re.findall("^- .*$", section(card, "Data"), re.M)
    assert len(notes) == len(set(notes))


def test_the_card_of_several_seeds_shows_their_spread(tmp_path):
    seeds = train(taste_world(), "fedmf", rounds=2, d=4, seeds=[3, 5], out=tmp_path / "runs")
    card = (tmp_path / "runs" / CARD).read_text()
    mean, sd = (table["full"]["hr@10"] for table in (seeds.metrics, seeds.summary.test_sd))
    assert f"| HR@10 | {mean:.4f} | {sd:.4f} |" in card
    assert "Rounds: 2, 2; selected" in card and "Seed: 3, 5." in card
    assert "--seeds 2" in card and "`order = time`" in card
    assert card_of(seeds[1]).count("95 % interval") == 1


def test_a_private_run_says_that_its_figures_are_not_covered(tmp_path):
    private = {"privacy": "central", "epsilon": 8.0, "out": tmp_path / "run"}
    run = train(taste_world(), "fedmf", rounds=1, d=4, **private)
    card = card_of(run)
    assert "The guarantee does not cover the figures" in section(card, "Limits")
    assert f"**{run.summary.privacy.headline}**" in card
    assert run.summary.privacy.statement in card
    assert "drawn anew" in section(card, "How to reproduce it")


def test_the_card_of_a_federation_shows_what_a_coordinator_knows(run):
    known = {"nodes": {"node-1": 30, "node-2": 30}, "baselines": None, "data_digest": None}
    card = run_card(run.experiment, Summary(**{**run.summary.as_dict(), **known}))
    assert "60 users, 60 items" in card and " on 2 nodes. Split" in card
    assert f"| HR@10 | {run.metrics['full']['hr@10']:.4f} |\n" in card
    assert "The interactions stay on the nodes" in card


def test_text_of_others_is_no_markup(tmp_path):
    nasty = "<script>alert(1)</script>\n# a | b"
    world = replace(taste_world(), name=nasty, notes=(nasty,))
    card = card_of(train(world, "popularity", out=tmp_path / "run"))
    assert "<script" not in card and "\n# a" not in card
    assert card.startswith("# Model card: popularity on &lt;script&gt;alert(1)")
    assert "| popularity |" not in section(card, "Figures").replace("| metric | popularity |", "")


def test_baskets_may_hold_what_was_bought_before(run):
    split = run.experiment.split.model_copy(update={"kind": "next-basket"})
    card = run_card(run.experiment.model_copy(update={"split": split}), run.summary)
    assert "ranked among all items. " in card and "not touched" not in card


def test_licence_and_citation_are_those_of_the_project(card):
    cited = (ROOT / "CITATION.cff").read_text("utf-8")
    title = re.search('^title: "(.*)"$', cited, re.M)[1]
    authors = re.search("- name: (.*)", cited)[1]
    assert f"{authors}. {title}" == CITED
    assert f"license: {SOFTWARE_LICENCE}\n" in cited
    assert CITED in section(card, "Licence and citation")
