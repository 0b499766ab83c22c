"""Model cards (Mitchell et al. 2019): `run_card` of a run, `release_card` of a release.

A card is Markdown, made from the typed results alone: no path, no time and no name of this machine,
so the same run gives the same card. The card of a release has only what its guarantee covers.
"""

from __future__ import annotations

import html
import sys
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import version
from typing import Any

from hushrec.data.splitting import SplitConfig
from hushrec.errors import plain
from hushrec.evaluation.evaluator import PartRanks
from hushrec.evaluation.groups import bootstrap_interval
from hushrec.evaluation.metrics import per_user
from hushrec.federation.experiment import Experiment
from hushrec.methods.base import Method
from hushrec.privacy.statement import PrivacyStatement
from hushrec.runs.progress import human_size
from hushrec.runs.schema import Summary

CARD = "model-card.md"
HEADLINE = ("hr@10", "ndcg@10")
SPLIT = ("kind", "order", "ties", "repeats")
"""Settings of the split that a card always names."""
CITED = (
    "The hushrec authors. hushrec: personalised, private, federated recommendation, honestly "
    "evaluated"
)
SOFTWARE_LICENCE = "Apache-2.0"
USE = (
    "The model ranks the items of its catalogue for one user, from that user's interactions, to "
    "recommend items that the user may like. It is not meant to judge people, or to decide about "
    "prices, credit, work or health."
)


def run_card(
    experiment: Experiment, summary: Summary, ranks: Mapping[str, PartRanks] | None = None
) -> str:
    """Return the card of a run; ``ranks`` give its figures intervals over users."""
    public, method = experiment.without_paths(), experiment.method_class
    config = public.model_dump(mode="json", exclude_none=True)
    again = "" if experiment.split.next_basket else " that the user has not touched"
    return _card(
        [
            _title(method, summary.data_name),
            *(f"**{_text(mark[0].upper() + mark[1:])}.**" for mark in summary.all_marks),
            *_section("Intended use", USE),
            *_section("Data", *_data(summary, config)),
            *_section("Method", *_method(method, config), _rounds(summary)),
            *_section("Figures", *_figures(summary, ranks, again)),
            *_section("Costs", _costs(summary, method)),
            *_section("Privacy", *_privacy(summary.privacy)),
            *_section("Limits", _list(_limits(summary))),
            *_section("How to reproduce it", *_reproduce(summary)),
            *_section("Licence and citation", _licence()),
        ]
    )


def release_card(
    config: Mapping[str, Any],
    method: type[Method],
    statement: PrivacyStatement,
    number: int,
    items: int,
) -> str:
    """Return the card of a release, of the round ``number``: nothing that is not covered."""
    data = f"{_text(config['data'])}: {items:,} items, whose list is public. {_split(config)}"
    limits = [
        "Figures of the model's quality are left out: they are measured on users' held-out items, "
        "which the guarantee does not cover.",
        "An item that is not in the list cannot be recommended.",
    ]
    again = (
        "`hushrec train --config config.toml` trains with the same settings. The noise is drawn "
        "anew and its key is not kept, so the result is another model with the same guarantee."
    )
    return _card(
        [
            _title(method, config["data"]),
            *_section("Intended use", USE),
            *_section("Data", data),
            *_section("Method", *_method(method, config), f"The model is that of round {number}."),
            *_section("Privacy", *_privacy(statement)),
            *_section("Limits", _list(limits)),
            *_section("How to reproduce it", again),
            *_section("Licence and citation", _licence()),
        ]
    )


# ------------------------------------------------------------ sections


def _data(summary: Summary, config: Mapping[str, Any]) -> Iterable[str]:
    users = summary.users
    rows = "" if users.train_rows is None else f", {users.train_rows:,} training interactions"
    counts = f"{users.users:,} users, {users.items:,} items{rows}"
    where = f" on {len(summary.nodes):,} nodes" if summary.nodes else ""
    yield f"{_text(summary.data_name)}: {counts}{where}. {_split(config)}"
    if summary.data_digest is not None:
        yield f"Digest of the interactions: `{summary.data_digest}`."
    if summary.notes:
        yield _list(map(_text, summary.notes))


def _split(config: Mapping[str, Any]) -> str:
    """Name the settings of the split, those at their defaults only if they always matter."""
    usual = SplitConfig().model_dump(mode="json")
    found = {
        name: value
        for name, value in config["split"].items()
        if name in SPLIT or value != usual[name]
    }
    return "Split: " + ", ".join(f"`{name} = {_value(at)}`" for name, at in found.items()) + "."


def _method(method: type[Method], config: Mapping[str, Any]) -> Iterable[str]:
    about = (method.__doc__ or "").strip().splitlines()[:1]
    source = (sys.modules[method.__module__].__doc__ or "").strip().partition("\n")[0]
    yield " ".join([f"`{method.name}`:", *map(_text, about)])
    if source.casefold().startswith(method.name.casefold()):  # a module of this method alone
        yield f"Source: {_text(source)}"
    if options := config["options"]:
        rows = [(f"`{key}`", _value(at)) for key, at in options.items()]
        yield _table(("option", "value"), rows)
    preset = f", preset `{_text(config['preset'])}`" if "preset" in config else ""
    yield f"Trained with hushrec {version('hushrec')}{preset}; `config.toml` has all settings."


def _rounds(summary: Summary) -> str:
    selected = f"selected {_value(summary.selected_round)} by {summary.selected_by}"
    if summary.final_of is not None:
        selected = "all interactions train"
    return f"Rounds: {_value(summary.rounds)}; {selected}. Seed: {_value(summary.seed)}."


def _figures(summary: Summary, ranks: Mapping[str, PartRanks] | None, again: str) -> Iterable[str]:
    shown = summary.figures
    if summary.final_of is not None:
        yield (
            "No figure belongs to this model: it is trained on everything, and nothing is held out "
            f"to measure it on. These are the figures of `{_text(summary.final_of.name)}`, the run "
            "whose options it was trained with."
        )
        yield from (f"**{_text(mark)}.**" for mark in shown.all_marks)
    measured = shown.test["full"]
    names = [name for name in HEADLINE if name in measured] or list(measured)[:2]
    heads = ["metric", shown.method]
    rows = [[name.upper(), f"{measured[name]:.4f}"] for name in names]
    if shown.test_sd is not None:
        heads.append("sd over seeds")
        for name, row in zip(names, rows, strict=True):
            row.append(f"{shown.test_sd['full'][name]:.4f}")
    if ranks and len(ranks["test"]["full"].users):
        heads.append("95 % interval over users")
        for name, row in zip(names, rows, strict=True):
            low, high = bootstrap_interval(per_user(ranks["test"]["full"], name))
            row.append(f"{low:.4f} to {high:.4f}")
    for baseline, values in dict(shown.baselines or {}).items():
        if baseline != shown.method:  # which is no baseline of itself
            heads.append(baseline)
            for name, row in zip(names, rows, strict=True):
                row.append(f"{values['full'][name]:.4f}")
    yield _table(heads, rows)
    yield (
        f"Protocol: {shown.protocol}. Test items of {shown.users.ranked_users:,} users, ranked "
        f"among all items{again}. `summary.json` has all metrics."
    )


def _costs(summary: Summary, method: type[Method]) -> str:
    if method.traits.pooled:
        return "Nothing is sent: this baseline pools everybody's data in one place."
    sent, names = summary.communication, ("up_bytes", "down_bytes")
    up, down = (human_size(getattr(sent, name)) for name in names)
    words = [f"All clients together uploaded {up} and downloaded {down}."]
    if sent.client_up_bytes is not None and sent.client_down_bytes is not None:
        up, down = human_size(sent.client_up_bytes), human_size(sent.client_down_bytes)
        words.append(f"One client uploaded {up} and downloaded {down} on average.")
    if sent.serving_bytes is not None:
        words.append(f"A device holds {human_size(sent.serving_bytes)} to recommend.")
    return " ".join(words)


def _privacy(statement: PrivacyStatement) -> Iterable[str]:
    if statement.promises:
        yield f"**{_text(statement.headline)}**"
    yield _list(map(_text, statement.in_words))
    if statement.promises:
        yield f"The exact statement: {_text(statement.statement)}"


def _limits(summary: Summary) -> Iterable[str]:
    users = summary.users
    if summary.privacy.promises:
        yield (
            "The guarantee does not cover the figures and costs on this card. `hushrec release` "
            "writes a card without them, to publish."
        )
    if users.not_evaluated_users and summary.final_of is None:
        yield (
            f"{users.not_evaluated_users:,} of {users.users:,} users are not evaluated: they have "
            "too few interactions, or the split does not test them. The figures do not speak of "
            "them."
        )
    if users.ranked_users < users.evaluated_users:
        yield f"Of the others, {users.ranked_users:,} were drawn and ranked."
    if users.test_items_nobody_trained_on:
        share = 100 * users.test_items_nobody_trained_on
        yield (
            f"{share:.1f} % of the test items are in nobody's training data; a collaborative "
            "method cannot know such cold items."
        )
    else:
        yield "An item that nobody touched before training is cold: it is hardly ever recommended."
    if "coverage@10" in summary.lists:
        covered, bias = (100 * summary.lists[n] for n in ("coverage@10", "popularity_bias@10"))
        yield (
            f"All lists of ten together show {covered:.1f} % of the items; the mean item shown is "
            f"more popular than {bias:.1f} % of them."
        )
    yield (
        "The figures rank past interactions that were held out. They do not say what people would "
        "do who see the lists, nor how the model does on other data or later in time."
    )


def _reproduce(summary: Summary) -> Iterable[str]:
    if summary.nodes:
        yield "The interactions stay on the nodes, which train with this folder's `config.toml`."
        return
    seeds = f" --seeds {len(summary.runs)}" if summary.runs else ""
    command = f"hushrec train --config config.toml{seeds} --out DIR"
    if summary.final_of is not None:
        command = f"hushrec train --final {_text(summary.final_of.name)} --out DIR"
    yield f"```\n{command}\n```"
    if summary.privacy.promises and summary.privacy.noise_seed is None:
        yield "Privacy noise is secret and drawn anew: figures differ from run to run."
        return
    yield (
        "The same data and seed give the same result on the same kind of processor. Another kind "
        "rounds differently, so the bits of the model, and at times the last digits of its "
        "figures, differ."
    )


def _licence() -> str:
    return (
        "Whoever publishes the model names its licence here, as far as the licence of the data "
        f"allows. The software is licensed under {SOFTWARE_LICENCE}. Please cite it, and the paper "
        f"of the method: {CITED}, version {version('hushrec')}."
    )


# ------------------------------------------------------------ Markdown


def _card(blocks: Sequence[str]) -> str:
    return "\n\n".join(blocks) + "\n"


def _title(method: type[Method], data: str) -> str:
    return f"# Model card: {method.name} on {_text(data)}"


def _section(title: str, *blocks: str) -> tuple[str, ...]:
    return f"## {title}", *blocks


def _list(lines: Iterable[str]) -> str:
    return "\n".join(f"- {line}" for line in lines)


def _table(heads: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    ruled = [heads, ["---"] * len(heads), *rows]
    cells = ([str(cell).replace("|", "\\|") for cell in row] for row in ruled)
    return "\n".join(f"| {' | '.join(row)} |" for row in cells)


def _value(value: object) -> str:
    """Write a setting, or the numbers of several seeds."""
    if isinstance(value, list):
        return ", ".join(map(_value, value))
    return str(value).lower() if isinstance(value, bool) else _text(value)


def _text(value: object) -> str:
    """Write text of others on one line, without control characters and markup."""
    return html.escape(" ".join(plain(value).split()), quote=False)
