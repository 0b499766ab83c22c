"""Tables for the terminal; numbers, units and names as people read them.

The space before a unit does not break.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from hushrec.analysis.run import GuidanceEffect
from hushrec.data.interactions import Interactions
from hushrec.data.splitting import Part, SplitConfig
from hushrec.errors import plain
from hushrec.evaluation.groups import Spread
from hushrec.io.codec import Tables
from hushrec.methods.base import Method
from hushrec.runs.compared import MEANS_ALONE, ComparedRun, Comparison
from hushrec.runs.progress import human_duration as human_duration
from hushrec.runs.progress import human_size as human_size
from hushrec.runs.schema import AdaptationCurve, Communication, Summary
from hushrec.tuning import Search


def figure(value: float) -> str:
    """Write a metric or a loss: four digits behind the point, fewer before it is large."""
    return f"{value:.4f}" if abs(value) < 10 else f"{value:,.1f}"


def signed(difference: float) -> str:
    """Write a difference of two metrics, with a real minus; nothing is +0.0000."""
    return f"{round(difference, 4) + 0.0:+.4f}".replace("-", "−")


def signed_interval(low: float, high: float) -> str:
    """Write the interval of a difference."""
    return f"{signed(low)} to {signed(high)}"


def verdict(low: float, high: float) -> str:
    """Return whether the interval of a difference lies above zero, below, or around it."""
    return "above" if low > 0 else "below" if high < 0 else "not clearly different from"


def p_text(value: float) -> str:
    """Write a p-value."""
    return "< 0.001" if value < 0.001 else f"{value:.3f}"


def percent(share: float) -> str:
    """Write a share in per cent."""
    return f"{100 * share:.1f} %"


def marked(summary: Summary, label: str) -> str:
    """Return the accessible label of a plot, with the marks of its figures."""
    return ", ".join([label, *summary.short_marks])


def shared_marks(marks: Mapping[str, Iterable[str]]) -> list[str]:
    """Return the marks of compared runs, each once; those of some runs begin with their names."""
    having: dict[str, list[str]] = {}
    for name, of_run in marks.items():
        for mark in of_run:
            having.setdefault(mark, []).append(name)
    return [
        mark if len(names) == len(marks) else f"{', '.join(names)}: {mark}"
        for mark, names in having.items()
    ]


def options(method: Method, summary: Summary) -> list[tuple[str, Any, str]]:
    """Return each option of the method with its value and its description."""
    described = type(method).Config.model_fields
    return [
        (name, value, (described[name].description or "") if name in described else "")
        for name, value in summary.options.items()
    ]


def split_words(config: SplitConfig, data: Interactions) -> str:
    """Describe a split whose settings are resolved, and the order of the rows that it uses."""
    if not config.hold_out:
        return "Nothing is held out: all rows train."
    order = "the order of the rows" if data.rows_in_order else "the order of the file (no times)"
    if config.order == "random":
        order = "an order drawn from the seed"
    elif data.has_time:
        ties = "rows of one time together" if config.ties == "together" else "ties by file order"
        order = f"time, {ties}"
    shares = f"{100 * config.test:g} % test, {100 * config.valid:g} % validation"
    words = {
        "leave-one-out": f"Each user’s last item tests, the one before validates, by {order}.",
        "ratio": f"Each user’s rows: {shares}; ordered by {order}.",
        "time": f"One date for everybody: {shares}; later rows test.",
        "unseen-users": f"Whole users: {shares}. They adapt on the first half of their rows and "
        f"are tested on the second, ordered by {order}.",
        "next-basket": "Each user’s last basket tests, the one before validates; a basket is the "
        "rows of one time.",
    }
    repeats = {
        "merge": "Repeated (user, item) rows are merged before the split.",
        "keep": "Items that a user had again are kept: a held-out item can be a training item too.",
    }
    return f"{words[config.kind]} {repeats[config.repeats]}"


MOST_COLUMNS = 4


def plain_table(
    title: str | None = None,
    *names: str,
    folded: str | None = None,
    figures: Iterable[str] = (),
    **more: Any,
) -> Table:
    """Return a table without lines: first a ``folded`` column, then names, then figures.

    Names and figures stay on their line; other columns of text are added by ``add_column``.
    """
    left: dict[str, Any] = {"title_justify": "left", "caption_justify": "left"}
    table = Table(title=title, box=None, pad_edge=False, **left, **more)
    if folded is not None:
        table.add_column(folded, overflow="fold")
    for name in names:
        table.add_column(name, no_wrap=True)
    for name in figures:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def facts_table(facts: Mapping[str, Any]) -> Table:
    """Return a table of names and values; empty values are left out."""
    table = plain_table(show_header=False)
    table.add_column("", style="bold", no_wrap=True)
    table.add_column("", overflow="fold")
    for name, value in facts.items():
        if value not in ({}, [], None):
            table.add_row(name.replace("_", " "), _text(value))
    return table


def _text(value: object) -> str:
    if isinstance(value, dict):
        nested = any(isinstance(entry, dict) for entry in value.values())
        between = "\n" if nested else ", "
        return between.join(f"{key}: {_text(entry)}" for key, entry in value.items())
    if isinstance(value, list):
        return "\n".join(map(str, value))
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:,.4g}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def cells(values: Iterable[float | None], digits: int = 4) -> list[str]:
    """Write figures with so many digits behind the point; a dash where there is none."""
    return ["–" if value is None else f"{value:.{digits}f}" for value in values]


def shown_metrics(measured: Iterable[str]) -> list[str]:
    """Choose the few that a terminal has room for: at 10 if measured, else at the first k."""
    names = list(measured)
    at = "@10" if "hr@10" in names else "@" + names[0].partition("@")[2]
    chosen = [name for name in names if name in (f"hr{at}", f"ndcg{at}", f"mrr{at}", "auc")]
    return chosen or names[:MOST_COLUMNS]


def result_table(summary: Summary, names: Sequence[str] = (), part: Part = "test") -> Table:
    """Show a run's metrics beside those of the baselines, where these are known.

    Of a final model the metrics are those of the run that it follows.
    """
    final, summary = summary, summary.figures
    tables: Tables = summary.test if part == "test" else summary.valid
    names = names or shown_metrics(tables["full"])
    title = f"{summary.method} on {summary.data_name}, {part} items"
    if final.final_of is not None:
        title += f" of {final.final_of.run}, which this model follows"
    heads = map(str.upper, names)
    marks = [*final.all_marks, *(mark for mark in summary.marks if final is not summary)]
    more: dict[str, Any] = {"caption": "\n".join(marks), "caption_style": "bold red"}
    table = plain_table(title, "candidates", "", figures=heads, **more)
    baselines: dict[str, Tables] = dict(summary.baselines or {})
    mark = " (leaks)" if summary.leaks else ""
    for candidates, values in tables.items():
        sampled = candidates.removeprefix("sampled")
        label = "all items" if candidates == "full" else f"{sampled} sampled"
        shown = cells(map(values.get, names))
        if summary.test_sd:
            deviations = cells(map(summary.test_sd[candidates].get, names))
            shown = [f"{mean} ± {sd}" for mean, sd in zip(shown, deviations, strict=True)]
        table.add_row(label, f"{summary.method}{mark}", *shown, style="bold")
        for name, baseline in baselines.items():
            table.add_row("", name, *cells(map(baseline[candidates].get, names)), style="dim")
        table.add_section()
    return table


def comparison_tables(compared: Comparison) -> list[Table]:
    """Show runs beside each other, a table for each data set and metric."""
    tables: dict[tuple[str, str], Table] = {}
    names, shown = short_names(compared), set()
    for row in compared:
        key = (row.data, row.metric)
        if key not in tables:
            first = len(compared.data) > 1 and row.metric == compared.metrics[0]
            heads, title = ("mean", "difference", "p"), row.data if first else None
            tables[key] = plain_table(title, folded=row.metric.upper(), figures=heads)
        difference, p_value = "" if compared.all_pairs else "baseline", ""
        if row.difference is not None:
            difference = f"{row.difference:+.4f}"
        if row.p_value is not None:
            difference += f" [{row.difference_low:+.3f}, {row.difference_high:+.3f}]"
            p_value = p_text(row.p_value)
        if compared.all_pairs and row.against is not None:
            difference = f"from {names[row.against]}: {difference}"
        # A run that is tested against several others is shown once.
        again = compared.all_pairs and (key, row.run) in shown
        shown.add((key, row.run))
        name, mean = ("", "") if again else (_name(row, names), _mean(row))
        tables[key].add_row(name, mean, difference, p_value)
    last, marks = list(tables.values())[-1], shared_marks({names[r.run]: r.marks for r in compared})
    last.caption = "\n".join([_test_words(compared), *marks])
    return list(tables.values())


def _name(row: ComparedRun, names: Mapping[str, str]) -> str:
    method = "" if row.method in names[row.run] else f" ({row.method})"
    return f"{names[row.run]}{method}{' (leaks)' if row.leaks else ''}"


def _mean(row: ComparedRun) -> str:
    spread = "" if row.seed_sd is None else f" ± {row.seed_sd:.4f}"
    interval = "" if row.low is None else f" [{row.low:.3f}, {row.high:.3f}]"
    return f"{row.mean:.4f}{spread}{interval}"


def _test_words(compared: Comparison) -> str:
    """Return what intervals and p-values of a comparison are."""
    if any(row.low is None for row in compared):
        return MEANS_ALONE
    pair = "any two runs" if compared.all_pairs else "each run and the baseline"
    data = " of one data set" if len(compared.data) > 1 else ""
    return (
        f"[ ] 95 % intervals over users; p of a paired {compared.test} test of {pair}{data}, "
        "Holm-corrected"
    )


def cost_table(rows: Sequence[ComparedRun]) -> Table:
    """Show what each compared model cost: rounds, bytes of all clients, bytes of one client."""
    figures = ("rounds", "uploaded", "downloaded", "up each", "down each", "to serve")
    table = plain_table(folded="COST", figures=figures)
    names = short_names(rows)
    for row in {row.run: row for row in rows}.values():
        sent = row.up_bytes, row.down_bytes, row.client_up_bytes, row.client_down_bytes
        sizes = ["–" if size is None else human_size(size) for size in (*sent, row.serving_bytes)]
        table.add_row(names[row.run], f"{row.selected_round:g}", *sizes)
    table.caption = COST_WORDS
    return table


COST_WORDS = (
    "until the selected round, by all clients and by each of them; to serve: parameters that a "
    "client holds to recommend"
)


def short_names(rows: Sequence[ComparedRun]) -> dict[str, str]:
    """Return each run without the folder that all of them lie in."""
    runs = {row.run: Path(row.run).parts for row in rows}
    levels = zip(*(parts[:-1] for parts in runs.values()), strict=False)
    shared = len(list(takewhile(lambda level: len(set(level)) == 1, levels)))
    return {run: str(Path(*parts[shared:])) for run, parts in runs.items()}


def own_table_table(found: Mapping[str, Mapping[str, Mapping[str, float]]], part: str) -> Table:
    """Show what scoring with the own, the server's and another user's table gives."""
    words = {"own": "own", "global": "global (the server's)", "random": "random (another user's)"}
    names = shown_metrics(found["own"]["full"])
    title, heads = f"whose item table, {part} items", map(str.upper, names)
    table = plain_table(title, "candidates", "table", figures=heads)
    for candidates in found["own"]:
        for whose, values in found.items():
            label, style = (candidates, "bold") if whose == "own" else ("", "")
            shown = cells(map(values[candidates].get, names))
            table.add_row(label, words[whose], *shown, style=style)
        table.add_section()
    return table


def groups_table(found: Mapping[str, Spread], part: str) -> Table:
    """Show how groups of users fare."""
    first = next(iter(found.values()))
    figures = ("mean", *first.groups, "worst 10 %", "sd")
    table = plain_table(f"groups of users, {part} items, all items", "", figures=figures)
    for metric, spread in found.items():
        values = [spread.mean, *spread.groups.values(), spread.worst_tenth, spread.sd]
        table.add_row(metric.upper(), *cells(values))
    return table


def guidance_table(effects: Sequence[GuidanceEffect]) -> Table:
    """Show what each guidance round did to each group, and how far the gates are from 1/2."""
    figures = ("round", *effects[0].before, "improved", "declined", "gate", "away")
    title = f"change of valid {effects[0].metric.upper()} by guidance"
    table = plain_table(title, figures=figures)
    for effect in effects:
        changes = [effect.after[name] - before for name, before in effect.before.items()]
        gates, users = effect.gates, effect.moved
        shares = [f"{100 * users[n]:.1f} %" if users else "–" for n in ("improved", "declined")]
        stats = ["–", "–"]
        if gates:
            stats = [f"{gates['mean']:.3f} ± {gates['sd']:.3f}", f"{100 * gates['away']:.0f} %"]
        table.add_row(str(effect.round), *(f"{change:+.4f}" for change in changes), *shares, *stats)
    table.caption = (
        "improved, declined: users by their AUC; gate: mean ± sd over users and items; away: share "
        "further than 0.01 from 1/2"
    )
    return table


def trials_table(search: Search, most: int = 10) -> Table:
    """Show the best trials of a search; trial 0 has the options that it started from."""
    select = search.about["experiment"]["evaluation"]["select"]
    table = plain_table(figures=("trial", f"valid {select.upper()}", "round"))
    table.add_column("options", overflow="fold")
    ordered = sorted(search.trials, key=lambda trial: (-(trial.value or 0.0), trial.number))
    for trial in ordered[:most]:
        value = "diverged" if trial.value is None else f"{trial.value:.4f}"
        mark = "" if trial.state == "done" else f" ({trial.state})"
        options = "  ".join(
            f"{name}={value:.4g}" if isinstance(value, float) else f"{name}={value}"
            for name, value in trial.options.items()
        )
        style = "bold" if trial is search.best else ""
        figures = str(trial.number), value, str(trial.selected_round or "–")
        table.add_row(*figures, options + mark, style=style)
    states = [trial.state for trial in search.trials]
    counts = ", ".join(f"{states.count(s)} {s}" for s in dict.fromkeys(states))
    table.caption = f"{len(states)} trials ({counts}); test items were not evaluated"
    return table


def model_lines(figures: Mapping[str, float]) -> list[str]:
    """Return a line for each statistic of a method's parameters; all of them are shares."""
    return [f"{name}: {100 * value:.2f} %" for name, value in figures.items()]


def summary_lines(summary: Summary) -> list[Table | Text]:
    """Return the table of a run's metrics and, as lines below it, costs, privacy and caveats."""
    users, time, sent = summary.users, summary.time, summary.communication
    lines = [
        f"rounds {summary.rounds}, selected {summary.selected_round} by {summary.selected_by} · "
        f"{human_duration(time.total_s)}, {human_duration(time.per_round_s)} a round · "
        f"peak memory {human_size(summary.peak_rss_bytes)}",
        f"uploaded {human_size(sent.up_bytes)}, downloaded {human_size(sent.down_bytes)} "
        f"by {users.training_clients or users.users:,} clients that train{_client_costs(sent)}",
        " ".join(filter(None, ["privacy:", summary.privacy.headline, *summary.privacy.in_words])),
    ]
    if summary.wire is not None:
        wire = human_size(summary.wire.up_bytes), human_size(summary.wire.down_bytes)
        lines[1] += "; if each client were a device of its own"
        lines.insert(2, f"on the wire: {wire[0]} from the nodes, {wire[1]} to them, retries too")
    if summary.nodes:
        counts = ", ".join(f"{name} {count:,}" for name, count in summary.nodes.items())
        lines += [f"users of each node: {counts}", summary.attendance_words]
    if silos := summary.silos:
        lines.append(
            f"{silos.count:,} silos of {silos.users.min:,} to {silos.users.max:,} users, "
            f"{silos.divergence.mean:.4f} from everybody on average ({silos.divergence.measure})"
        )
    if summary.improving and isinstance(summary.rounds, int):
        lines.append(
            f"still improving at the last round: go on with --resume --rounds {2 * summary.rounds} "
            "--out of this run"
        )
    if budgets := summary.privacy.budgets:
        own, spent = budgets.epsilon, budgets.spent
        lines.append(
            f"personal budgets: epsilon {own.min:.4g} to {own.max:.4g} (median {own.median:.4g}), "
            f"really spent {spent.min:.4g} to {spent.max:.4g} (median {spent.median:.4g}); "
            f"{budgets.over_budget:,} of {budgets.clients:,} clients over budget, "
            f"{budgets.stopped:,} stopped"
        )
    away = users.users - summary.counted_users
    unused = users.not_evaluated_users - away
    if unused > 0 and summary.final_of is None:
        lines.append(
            f"{unused:,} of {users.users:,} users are not evaluated: "
            "too short for the split, or not asked by it"
        )
    lines += [*model_lines(summary.model), *summary.notes]
    return [result_table(summary), *(Text(plain(line), style="dim") for line in lines)]


def _client_costs(sent: Communication) -> str:
    """Return the bytes of one client, as far as the run has stored them."""
    words = ""
    if sent.client_up_bytes is not None and sent.client_down_bytes is not None:
        up, down = human_size(sent.client_up_bytes), human_size(sent.client_down_bytes)
        words = f", {up} and {down} by each"
    if sent.serving_bytes is not None:
        words += f"; {human_size(sent.serving_bytes)} to serve"
    return words


def adaptation_table(curve: AdaptationCurve) -> Table:
    """Show what unseen users get after so many interactions of their own."""
    title = f"{curve.users:,} users that training left out, full ranking"
    table = plain_table(title, figures=curve.points[0])
    for point in curve.points:
        interactions, *values = point.values()
        table.add_row(str(interactions), *cells(values))
    return table
