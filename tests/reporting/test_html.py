import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from importlib import resources
from itertools import pairwise

import numpy as np
import pytest

from hushrec.analysis import item_map
from hushrec.api import Run, train
from hushrec.audit import audit
from hushrec.data.interactions import Interactions, MultiCategorical
from hushrec.errors import ConfigError, RunError
from hushrec.evaluation.metrics import per_user, summarise
from hushrec.privacy.statement import PrivacyStatement
from hushrec.reporting.html import write_comparison, write_report
from hushrec.reporting.tables import human_size
from hushrec.runs.comparison import compare
from hushrec.runs.schema import PUBLISHED_MARK

N_USERS, N_ITEMS, PER_USER = 48, 70, 9
NASTY = '<script>alert(1)</script> & "x"'


def tiny(titles: bool = True) -> Interactions:
    """Two tastes: even users touch even items, and low items are the popular ones."""
    rng = np.random.default_rng(5)
    weight = 1 / np.arange(1, N_ITEMS // 2 + 1)
    choices = [
        2 * rng.choice(N_ITEMS // 2, PER_USER + user % 5, replace=False, p=weight / weight.sum())
        + user % 2
        for user in range(N_USERS)
    ]
    item = np.concatenate(choices).astype(np.int32)
    user = np.repeat(np.arange(N_USERS), [len(c) for c in choices]).astype(np.int32)
    flags = np.stack([np.arange(N_ITEMS) % 2 == 0, np.arange(N_ITEMS) % 2 == 1], axis=1)
    return Interactions(
        name="tiny",
        user=user,
        item=item,
        value=np.ones(len(item), np.float32),
        time=np.arange(len(item)),
        users=np.array([f"u{n}" for n in range(N_USERS)]),
        items=np.array([f"item-{n}" for n in range(N_ITEMS)]),
        titles=np.array([f"Film {n} {NASTY}" for n in range(N_ITEMS)]) if titles else None,
        item_features={"genre": MultiCategorical(flags, np.array(["Even", "Odd & co"]))}
        if titles
        else {},
        notes=("3 repeated rows <merged>",),
    )


class Page(HTMLParser):
    """The elements of a page, and whether they nest."""

    VOID = ("meta", "link", "br", "img", "input")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.words: list[str] = []
        self.feed(text)
        assert not self.open, f"never closed: {self.open}"

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] not in ("style", "title"):
            self.words.append(data)

    def all(self, *names: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name in names]

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


def report(run: Run, **shown: bool) -> str:
    return write_report(run, **{"samples": True, **shown}).read_text("utf-8")


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Run:
    return train(tiny(), "fedmf", rounds=4, out=tmp_path_factory.mktemp("runs") / "fedmf")


@pytest.fixture(scope="module")
def text(run) -> str:
    return report(run)


@pytest.fixture(scope="module")
def page(text) -> Page:
    return Page(text)


def test_sections_come_in_order_and_headings_skip_no_level(page):
    sections = [attributes["id"] for attributes in page.all("section")]
    assert sections == [
        *("result", "convergence", "spread", "costs", "privacy", "samples", "fine-print")
    ]
    levels = [int(name[1]) for name, _ in page.elements if re.fullmatch("h[1-6]", name)]
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(after <= before + 1 for before, after in pairwise(levels))


def test_headline_shows_the_figures_of_the_run(run, page):
    for name in ("hr@10", "ndcg@10"):
        assert f"{run.metrics['full'][name]:.4f}" in page.text
    assert "Recall@k is HR@k" in page.text
    assert "for comparison with papers only" in page.text
    assert all(sentence in page.text for sentence in run.summary.privacy.in_words)


def test_popularity_is_what_a_popularity_run_gives(run, text, tmp_path):
    other = train(tiny(), "popularity", out=tmp_path / "popularity")
    for name in ("hr@10", "ndcg@10"):
        assert f"popularity {other.metrics['full'][name]:.4f} (" in text


def test_chance_is_computed_from_the_candidates(run, text):
    candidates = run.ranks["test"]["full"].candidates
    assert f"chance {np.mean(10 / candidates):.4f} (expected)" in text


def test_intervals_hold_the_mean(run, text):
    mean = per_user(run.ranks["test"]["full"], "hr@10").mean()
    low, high = re.search(r"95&nbsp;% interval ([\d.]+) to ([\d.]+)", text).groups()
    assert float(low) <= mean <= float(high)


def test_every_drawing_and_table_speaks(page):
    drawings = [a for a in page.all("svg") if a.get("aria-hidden") != "true"]
    assert len(drawings) == 9
    for attributes in drawings:
        assert attributes["role"] == "img"
        assert attributes["aria-label"]
    assert page.elements.count(("caption", {})) == len(page.all("table"))
    assert all("scope" in attributes for attributes in page.all("th"))


def test_nothing_comes_from_elsewhere_and_nothing_runs(text, page):
    assert "script" not in {name for name, _ in page.elements}
    for name, attributes in page.elements:
        for key in ("src", "href", "srcset", "action", "xlink:href"):
            target = attributes.get(key)
            assert target is None or target[0] == "#" or target == "data:,", (name, target)
        assert not [key for key in attributes if key.startswith("on")]
    assert not re.search(r"url\(|@import|https?://", text)
    policy = [a["content"] for a in page.all("meta") if "Policy" in (a.get("http-equiv") or "")]
    assert policy == ["default-src 'none'; style-src 'unsafe-inline'; img-src data:"]


def test_links_within_the_page_lead_somewhere(page):
    ids = [attributes["id"] for _, attributes in page.elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    assert {a["href"][1:] for a in page.all("a")} <= set(ids)


def test_text_from_the_data_is_escaped(text, page):
    assert "<script" not in text
    assert "&lt;script&gt;alert(1)&lt;/script&gt; &amp;" in text
    assert NASTY in page.text
    assert "Odd & co" in page.text
    assert "3 repeated rows <merged>" in page.text


def test_the_same_run_gives_the_same_page(run, text):
    assert report(run) == text
    assert report(Run.open(run.folder.path, tiny())) == text


def test_a_hit_is_marked_exactly_where_the_list_has_it(run, page):
    hits = page.text.count("hit at rank")
    marked = [a for a in page.all("li") if a.get("class") == "hit"]
    assert len(marked) == hits
    assert page.text.count("Held out:") == len(page.all("article")) == 6
    assert page.text.count("not in the list: rank") == 6 - hits


def test_hits_agree_with_the_ranks(tmp_path):
    """The counter under the leaking protocol finds its targets: the marks must show it."""
    run = train(tiny(), "negative-counter", protocol="published", out=tmp_path / "run")
    assert run.metrics["full"]["hr@10"] > 0.9
    assert Page(report(run)).text.count("hit at rank") >= 5


def test_published_figures_are_marked_everywhere(tmp_path):
    run = train(tiny(), "fedmf", rounds=3, protocol="published", out=tmp_path / "run")
    text = report(run)
    page = Page(text)
    assert (
        "Published protocol (leaks the held-out item): "
        "figures for comparison with the papers only" in page.text
    )
    captions = re.findall("<figcaption>(.*?)</figcaption>", text, re.S)
    assert captions
    assert all(PUBLISHED_MARK in caption for caption in captions)
    for caption in re.findall("<caption>(.*?)</caption>", text, re.S):
        if "Communication" not in caption and "Options" not in caption:
            assert PUBLISHED_MARK in caption
    for attributes in page.all("svg"):
        assert attributes.get("aria-hidden") or PUBLISHED_MARK in attributes["aria-label"]


def test_an_honest_report_does_not_mention_the_leak(text):
    assert "leaks" not in text
    assert text.count('class="banner"') == 1


def test_few_users_are_marked_in_every_caption(text):
    mark = f"{N_USERS} of {N_USERS} users are evaluated"
    assert f"<p>{mark}.</p>" in text.partition('class="banner"')[2].partition("</div>")[0]
    captions = re.findall("<figcaption>(.*?)</figcaption>", text, re.S)
    assert captions
    assert all(mark in caption for caption in captions)


def test_marks_of_compared_runs_are_shown_once(tmp_path):
    paths = [tmp_path / name for name in ("one", "two")]
    for path in paths:
        train(tiny(), "popularity", out=path)
    summary = json.loads((paths[1] / "summary.json").read_text())
    (paths[1] / "summary.json").write_text(
        json.dumps({**summary, "marks": ["odd", *summary["marks"]]})
    )
    text = write_comparison(paths, tmp_path / "page.html").read_text()
    assert text.count(f"{N_USERS} of {N_USERS} users are evaluated") == 1
    assert "two: odd." in text


def test_a_method_without_loss_and_with_one_round(tmp_path):
    run = train(tiny(), "popularity", out=tmp_path / "run")
    page = Page(report(run))
    assert "One round, so there is nothing to converge." in page.text
    assert "This method has no training loss." in page.text
    assert f"{run.summary.valid['full']['ndcg@10']:.4f}" in page.text
    assert "baselines" not in page.text
    assert not [a for a in page.all("svg") if "line" in (a.get("class") or "")]


def test_one_round_of_a_method_with_loss(tmp_path):
    page = Page(report(train(tiny(), "fedmf", rounds=1, out=tmp_path / "run")))
    assert "Training loss (mean over the clients of a round) at round 1:" in page.text
    assert not [a for a in page.all("svg") if "line" in (a.get("class") or "")]


def test_evaluations_may_be_rare(tmp_path):
    run = train(tiny(), "fedmf", rounds=5, settings={"evaluation.every": 2}, out=tmp_path / "run")
    page = Page(report(run))
    assert "evaluated every 2 rounds" in page.text
    assert len([a for a in page.all("svg") if "line" in (a.get("class") or "")]) == 2


def test_data_without_titles_shows_ids(tmp_path):
    page = Page(report(train(tiny(titles=False), "fedmf", rounds=2, out=tmp_path / "run")))
    assert re.search(r"item-\d+", page.text)
    assert not [a for a in page.all("span") if a.get("class") == "kinds"]


def test_several_targets_show_recall_too(tmp_path):
    settings = {"split.kind": "ratio", "split.test": 0.3, "cohort.kind": "fixed", "cohort.size": 9}
    run = train(tiny(), "fedmf", rounds=2, settings=settings, out=tmp_path / "run")
    page = Page(report(run))
    assert "Recall@k is HR@k" not in page.text
    assert f"{run.metrics['full']['recall@10']:.4f}" in page.text
    assert "held-out items are in the list" in page.text
    assert "9 clients drawn per round" in page.text


def test_users_that_never_trained(tmp_path):
    settings = {"split.kind": "unseen-users"}
    run = train(tiny(), "pfedrec", rounds=2, settings=settings, out=tmp_path / "run")
    page = Page(report(run))
    assert "They adapt on the first half" in page.text
    assert 1 <= len(page.all("article")) <= 6


@pytest.mark.parametrize(
    ("method", "words"),
    [("central-mf", "No messages are counted"), ("local-only", "Nothing travels")],
)
def test_methods_that_send_nothing(method, words, tmp_path):
    run = train(tiny(), method, rounds=2, out=tmp_path / "run")
    assert words in Page(report(run)).text


def test_costs_are_per_client_and_round(run, page):
    traffic = run.summary.communication
    each = traffic.down_bytes / (4 * N_USERS)
    assert human_size(each).split("\xa0")[0] in page.text
    assert "every client, every round" in page.text


def test_a_run_without_a_folder_has_nowhere_to_write():
    with pytest.raises(RunError, match="out=FOLDER"):
        write_report(train(tiny(), "popularity"))


def test_summary_table_agrees_with_the_ranks(run, page):
    """The page computes its tables from the ranks; they must be the summary's figures."""
    for candidates in ("full", "sampled99"):
        stored = run.summary.test[candidates]
        assert summarise(run.ranks["test"][candidates], list(stored)) == pytest.approx(stored)
        for name in ("hr@5", "ndcg@20", "mrr@10", "auc"):
            assert f"{stored[name]:.4f}" in page.text


@pytest.mark.parametrize("scheme", [0, 1])
def test_colours_have_contrast_aa(scheme):
    style = (resources.files("hushrec.reporting") / "look.css.j2").read_text("utf-8")
    light, dark = (
        dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})\b", block))
        for block in re.findall(r":root \{(.*?)\}", style, re.S)
    )
    colours = (light, {**light, **dark})[scheme]
    pairs = [
        *(("ink", "paper"), ("ink", "card"), ("soft", "paper"), ("soft", "card")),
        *(("accent", "paper"), ("accent", "card"), ("paper", "accent"), ("leak", "leak-paper")),
    ]
    for text, ground in pairs:
        assert contrast(colours[text], colours[ground]) >= 4.5, (text, ground)


def contrast(first: str, second: str) -> float:
    def luminance(colour: str) -> float:
        parts = [int(colour[n : n + 2], 16) / 255 for n in (1, 3, 5)]
        linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    low, high = sorted([luminance(first), luminance(second)])
    return (high + 0.05) / (low + 0.05)


def test_a_tiny_world_is_still_reported(tmp_path):
    data = tiny()
    few = data.select(data.user < 3).compacted()
    page = Page(report(train(replace(few, name="few"), "fedmf", rounds=2, out=tmp_path / "run")))
    assert len(page.all("article")) == 3
    assert "Fewest training items" not in page.text


# ------------------------------------------------------------- what else a page may be asked


def test_a_page_names_nobody_unless_asked(run):
    whole, short = report(run), write_report(run).read_text()
    assert 'id="samples"' in whole and 'id="samples"' not in short
    assert "#samples" not in short and not re.search(r"\bu\d", short)
    assert not re.search(r"Film \d|item-\d", short)
    assert Page(short).open == []
    assert "because it was asked for with --samples" in Page(whole).text
    assert "does not cover" not in whole
    report(run)


@pytest.fixture(scope="module")
def private(tmp_path_factory) -> Run:
    world = replace(tiny(), items_declared=True)
    folder = tmp_path_factory.mktemp("runs") / "private"
    named = {"privacy": "central", "epsilon": 8.0}
    return train(world, "fedmf", rounds=2, d=4, out=folder, **named)


def test_users_data_in_a_private_report_is_said_to_be_uncovered(private, monkeypatch):
    monkeypatch.setattr(item_map, "LIKED", 3)
    said = "The privacy guarantee does not cover this section"
    assert said not in write_report(private).read_text()
    for shown, option in (
        ({"samples": True}, "--samples"),
        ({"item_map": True}, "--map"),
        ({"user": "u3"}, "--user"),
    ):
        page = Page(write_report(private, **shown).read_text()).text
        assert f"{option} ; hushrec report RUN writes the page without it. {said}" in page


def test_a_final_model_has_no_users_to_show(run, tmp_path):
    final = train(tiny(), final=run, out=tmp_path / "final")
    assert "No figure belongs to this model" in write_report(final).read_text()
    for shown in ({"samples": True}, {"item_map": True}, {"user": "u3"}):
        with pytest.raises(ConfigError, match="in the report of the run that it follows"):
            write_report(final, **shown)


def test_pages_show_names_and_no_places(tmp_path):
    data, folder = tiny(), tmp_path / "secret place"
    folder.mkdir()
    rows = zip(data.users[data.user], data.items[data.item], data.time, strict=True)
    file = folder / "ratings.csv"
    file.write_text("user,item,time\n" + "".join(f"{u},{i},{t}\n" for u, i, t in rows))
    (folder / "films.csv").write_text("item\n" + "\n".join(data.items.tolist()) + "\n")
    (folder / "mine.toml").write_text("[options]\nd = 4\n")
    preset = str(folder / "mine.toml")
    named = {"items": folder / "films.csv", "preset": preset, "rounds": 2}
    run = train(str(file), "fedmf", **named, out=folder / "run")
    final = train(final=folder / "run", out=folder / "final")
    other = train(str(file), "popularity", out=folder / "popular")
    compared = write_comparison([run.folder.path, other.folder.path], folder / "compared.html")
    pages = [report(run), write_report(final).read_text(), compared.read_text()]
    for page in pages:
        assert "secret place" not in page
        assert re.search(r"<title>.*on ratings( ·|<)", page)
        assert re.search("<h1>.*ratings", page)
    assert "mine.toml" in pages[0] and "films.csv" in pages[0]
    assert "<dt>Follows</dt><dd>run</dd>" in pages[1]


def test_every_figure_of_a_table_carries_the_name_of_its_column(text):
    assert '<td data-label="Per client, whole run">' in text
    for table in re.findall(r'<table class="stacks">.*?</table>', text, re.DOTALL):
        heads = len(re.findall(r"<t[hd][ >]", table.partition("</thead>")[0])) - 1
        for row in re.findall("<tr>.*?</tr>", table.partition("</thead>")[2], re.DOTALL):
            assert len(re.findall(r"<td data-label=", row)) == heads == len(re.findall("<td", row))


def test_privacy_is_three_sentences_with_the_statement_folded_beneath(private, text):
    whole = write_report(private).read_text()
    section = whole.partition('<section id="privacy"')[2].partition("</section>")[0]
    shown, _, folded = section.partition("<details>")
    words = Page(f"<main>{shown}</main>").text
    assert "User-level (ε = 8, δ = 1e-05) differential privacy of everything" in words
    names = ("What an attacker learns at most", "What is not covered", "What it rests on")
    for name, sentence in zip(names, private.summary.privacy.in_words, strict=True):
        assert f"{name} {sentence}" in words
    statement = private.summary.privacy.statement
    assert statement not in words and statement in Page(f"<main><details>{folded}</main>").text
    plain = text.partition('<section id="privacy"')[2].partition("</section>")[0]
    assert "No formal guarantee: interactions stay on the clients" in plain
    assert "Users have to trust the server" in plain
    assert "<blockquote>" not in plain and "<details>" not in plain
    noised = PrivacyStatement(guarantee="DP", epsilon=8.0, noise_seed=1, statement="User-level …")
    assert noised.headline.startswith("Simulated: user-level (ε = 8")


def test_the_items_can_be_drawn_as_one_user_sees_them(tmp_path, monkeypatch):
    monkeypatch.setattr(item_map, "LIKED", 3)
    seen = train(tiny(), "fedmf", rounds=2, settings={"d": 4}, out=tmp_path / "run")
    write_report(seen, item_map=True)
    page = (tmp_path / "run" / "report.html").read_text()
    drawn = re.search(r'<svg class="plot map".*?</svg>', page, re.DOTALL)[0]
    assert drawn.count("<circle") == N_ITEMS
    assert "item liked" in drawn and "item held" in drawn
    assert Page(page).open == []


def test_several_runs_on_one_page(tmp_path):
    for method in ("popularity", "fedmf", "fednext"):
        settings = {"d": 4} if method == "fedmf" else {}
        rounds = 3 if method == "fedmf" else None
        train(tiny(), method, rounds=rounds, settings=settings, out=tmp_path / method)
    paths = [tmp_path / name for name in ("popularity", "fedmf", "fednext")]
    file = write_comparison(paths, tmp_path / "compared.html")
    text = file.read_text()
    assert Page(text).open == []
    assert text.count('<th scope="row">fedmf</th>') == 3
    rows = compare(paths, ("hr@10",))
    assert f'<td data-label="Mean" class="mine">{rows[1].mean:.4f}</td>' in text
    assert "script" not in text and "http" not in text.replace("http-equiv", "")
    # Rounds that try settings are no course of training: such a run is a level line, and so is a
    # baseline of one round.
    drawn = re.search(r'<svg class="plot line".*?</svg>', text, re.DOTALL)[0]
    lines = [
        points.split() for points in re.findall(r'<polyline class="curve .." points="(.*?)"', drawn)
    ]
    assert [len(points) for points in lines] == [2, 3, 2]
    assert lines[2][0].replace("0.00", "100.00", 1) == lines[2][1]


def test_baskets_are_said_to_hold_what_was_bought_before(tmp_path):
    data = tiny()
    again = replace(data, time=np.asarray(data.time) // 3)
    settings = {"split.kind": "next-basket"}
    run = train(again, "popularity", settings=settings, out=tmp_path / "run")
    text = Page(report(run)).text
    assert "ranked among all items, those of the history included, for" in text
    assert "not touched" not in text and "touched items left out" not in text
    assert "All items: people buy again what they bought before." in text


def test_what_a_device_holds_to_serve_is_a_cost(run, text):
    served = human_size(run.summary.communication.serving_bytes)
    assert f"<dt>To serve, on a device</dt><dd>{served}</dd>" in text
    sent = run.summary.communication.model_copy(update={"serving_bytes": None})
    older = replace(run, summary=run.summary.model_copy(update={"communication": sent}))
    assert "To serve" not in report(older)


def test_every_kind_of_round_is_in_the_audit(tmp_path):
    run = train(tiny(), "fednext", out=tmp_path / "run")
    found = audit(run, users=20, trials=1_000)
    section = report(run).partition('<section id="audit"')[2].partition("</section>")[0]
    assert len(found.items.phases) > 1
    assert f"those that give most away: {found.items.phase}." in section
    for name, value in found.items.phases.items():
        shown = f": {value}</th>" if isinstance(value, str) else "</th>"
        figure = "–" if isinstance(value, str) else f"{100 * value:.1f} %"
        assert f'<th scope="row">{name}{shown}' in section
        assert f'<td data-label="Items named" class="mine">{figure}</td>' in section
