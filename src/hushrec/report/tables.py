"""What the terminal shows: tables one can read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.markup import escape
from rich.table import Table

from hushrec.evaluate.compare import ComparedRun
from hushrec.report.units import human_duration, human_size

MOST_COLUMNS = 4


def shown_metrics(measured: Iterable[str]) -> list[str]:
    """Choose the few that a terminal has room for: at 10 if measured, else at the first k."""
    names = list(measured)
    at = "@10" if "hr@10" in names else "@" + names[0].partition("@")[2]
    chosen = [name for name in names if name in (f"hr{at}", f"ndcg{at}", f"mrr{at}", "auc")]
    return chosen or names[:MOST_COLUMNS]


def result_table(
    summary: Mapping[str, Any], names: Sequence[str] = (), part: str = "test"
) -> Table:
    """Show a run's metrics beside popularity and chance."""
    names = names or shown_metrics(summary[part]["full"])
    published = summary["protocol"] == "published"
    table = Table(
        title=escape(f"{summary['method']} on {summary['data']}, {part} items"),
        caption=summary["protocol_mark"],
        title_justify="left",
        caption_justify="left",
        caption_style="bold red",
        box=None,
        pad_edge=False,
    )
    table.add_column("candidates", no_wrap=True)
    table.add_column("", no_wrap=True)
    for name in names:
        table.add_column(name.upper(), justify="right", no_wrap=True)
    spread = summary.get("test_sd")
    for candidates, values in summary[part].items():
        sampled = candidates.removeprefix("sampled")
        label = "all items" if candidates == "full" else f"{sampled} sampled"
        row = {
            summary["method"] + (" (leaks)" if published else ""): values,
            "popularity": summary["yardsticks"]["popularity"][candidates],
            "chance": summary["yardsticks"]["chance"][candidates],
        }
        for place, (who, figures) in enumerate(row.items()):
            cells = [f"{figures[name]:.4f}" for name in names]
            if place == 0 and spread:
                cells = [
                    f"{cell} ± {spread[candidates][name]:.4f}"
                    for cell, name in zip(cells, names, strict=True)
                ]
            style = "bold" if place == 0 else "dim"
            table.add_row(label if place == 0 else "", who, *cells, style=style)
        table.add_section()
    return table


def comparison_tables(rows: Sequence[ComparedRun]) -> list[Table]:
    """Show runs beside each other, a table for each metric, with intervals and p-values."""
    tables: dict[str, Table] = {}
    for row in rows:
        if row.metric not in tables:
            table = Table(box=None, pad_edge=False)
            table.add_column(row.metric.upper(), overflow="fold")
            for name in ("mean", "difference", "p"):
                table.add_column(name, justify="right", no_wrap=True)
            tables[row.metric] = table
        spread = "" if row.seed_sd is None else f" ± {row.seed_sd:.4f}"
        difference, p_value = "first", ""
        if row.difference is not None and row.p_value is not None:
            difference = (
                f"{row.difference:+.4f} [{row.difference_low:+.3f}, {row.difference_high:+.3f}]"
            )
            p_value = "< 0.001" if row.p_value < 0.001 else f"{row.p_value:.3f}"
        method = "" if row.method in row.run else f" ({row.method})"
        mark = " (leaks)" if row.protocol == "published" else ""
        tables[row.metric].add_row(
            escape(f"{row.run}{method}{mark}"),
            f"{row.mean:.4f}{spread} [{row.low:.3f}, {row.high:.3f}]",
            difference,
            p_value,
        )
    last = list(tables.values())[-1]
    last.caption = (
        "[ ] 95 % intervals over users; p of a paired test against the first run, Holm-corrected"
    )
    last.caption_justify = "left"
    return list(tables.values())


def facts(summary: Mapping[str, Any]) -> list[str]:
    """Return the lines under the table: what a reader must know to judge it."""
    users, time = summary["users"], summary["time"]
    rounds, selected = summary["rounds"], summary["selected_round"]
    sent, silos = summary["communication"], summary.get("silos")
    lines = [
        f"rounds {rounds}, selected {selected} on validation · "
        f"{human_duration(time['per_round_s'])} a round · "
        f"peak memory {human_size(summary['peak_rss_bytes'])}",
        f"uploaded {human_size(sent['up_bytes'])}, downloaded {human_size(sent['down_bytes'])} "
        f"by {silos['count'] if silos else users['users']:,} clients",
        f"privacy: {summary['privacy']['statement']}",
    ]
    if silos:
        apart = silos["divergence"]
        lines.append(
            f"{silos['count']:,} silos of {silos['users']['min']:,} to {silos['users']['max']:,} "
            f"users, {apart['mean']:.4f} from everybody on average ({apart['measure']})"
        )
    budgets = summary["privacy"].get("budgets")
    if budgets:
        own, paid = budgets["epsilon"], budgets["spent"]
        lines.append(
            f"personal budgets: epsilon {own['min']:.4g} to {own['max']:.4g} (median "
            f"{own['median']:.4g}), really spent {paid['min']:.4g} to {paid['max']:.4g} (median "
            f"{paid['median']:.4g}); {budgets['over_budget']:,} of {budgets['clients']:,} clients "
            f"over budget, {budgets['stopped']:,} stopped"
        )
    if users["not_evaluated_users"]:
        lines.append(
            f"{users['not_evaluated_users']:,} of {users['users']:,} users are not evaluated: "
            "too short for the split, or not asked by it"
        )
    return [*lines, *summary["notes"]]
