"""``hushrec audit``: attack a finished run, and test its privacy claim."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
from rich.progress import BarColumn, MofNCompleteColumn, TimeRemainingColumn
from rich.table import Table

from hushrec.api import Run
from hushrec.audit.auditor import Progress, audit
from hushrec.cli.options import SEED, json_option, run_argument
from hushrec.cli.terminal import Console, print_json, progress, say, text_column
from hushrec.reporting.html import write_report
from hushrec.reporting.tables import plain_table
from hushrec.runs.schema import (
    Audit,
    AuditedClaim,
    CanaryResult,
    Guesses,
    ItemResult,
    MembershipResult,
    Skipped,
    SoundnessResult,
)


@click.command("audit")
@run_argument
@click.option(
    "--users",
    type=click.IntRange(10, 1_000_000),
    default=500,
    show_default=True,
    help="Users to attack, at most.",
)
@click.option(
    "--trials",
    type=click.IntRange(1_000, 10_000_000),
    default=10_000,
    show_default=True,
    help="Canary trials; more of them prove a higher bound.",
)
@click.option(
    "--seed",
    type=SEED,
    default=0,
    show_default=True,
    metavar="S",
    help="Of the attacks, not the run.",
)
@json_option
def audit_command(folder: Path, users: int, trials: int, seed: int, as_json: bool) -> None:
    """Attack a finished run: membership, items in uploads, canary users, clipping and noise.

    Writes audit.json and the report. Exits with 1, and names the evidence, if an attack contradicts
    the claimed epsilon.

    \b
    hushrec audit runs/first
    hushrec audit runs/private --trials 100000
    hushrec audit runs/first --users 100 --json
    """
    run = Run.open(folder)
    with _display(as_json) as on_progress:
        found = audit(run, users=users, trials=trials, seed=seed, on_progress=on_progress)
    report = write_report(run)
    if as_json:
        print_json(found)
    else:
        console = Console()
        for table in _tables(found):
            console.print(table)
            console.print()
        console.print(found.verdict_words)
        for reason in found.reasons:
            console.print(f"- {reason}")
        console.print(f"report: {report}", soft_wrap=True)
    if found.verdict == "contradicted":
        reasons = found.reasons
        more = f" (and {len(reasons) - 1} more)" if len(reasons) > 1 else ""
        say(f"hushrec: the claim of {folder} is contradicted: {reasons[0]}{more}", err=True)
        sys.exit(1)


def _tables(found: Audit) -> Iterator[Table]:
    yield _membership_table(found.membership)
    yield _items_table(found.items)
    yield _canary_table(found.canaries, found.claim)
    if found.soundness is not None:
        yield _soundness_table(found.soundness)


def _membership_table(found: Skipped | MembershipResult) -> Table:
    table = _new_table("Membership inference on users or items", found.skipped)
    if isinstance(found, Skipped):
        return table
    for name in ("", "model", "95 % interval", "popularity", "chance"):
        table.add_column(name, justify="right" if name else "left", no_wrap=True)
    names = {"auc": "AUC", "advantage": "advantage", "tpr_at_1_fpr": "TPR at 1 % FPR"}
    for key, name in names.items():
        cells = (getattr(rates, key) for rates in (found, found.baseline, found.chance))
        here, popular, chance = ("–" if cell is None else f"{cell:.3f}" for cell in cells)
        ends = getattr(found.intervals, key)
        interval = "–" if ends is None else f"{ends[0]:.3f} to {ends[1]:.3f}"
        table.add_row(name, here, interval, popular, chance)
    table.caption = (
        f"{found.members:,} members, {found.others:,} others: {found.compared}. "
        f"Threat: {found.threat}.{_guessed(found.guesses)}"
    )
    return table


def _guessed(found: Guesses | None) -> str:
    """Return the lower bound that the guesses prove, if there are any."""
    if found is None:
        return ""
    return (
        f" {found.right} of {found.guesses} guesses in {found.pairs} pairs are right: "
        f"epsilon is at least {found.lower_bound:.3f}, and {found.claimed_epsilon:.3f} is "
        f"claimed at delta {found.delta:.2g}."
    )


def _items_table(found: Skipped | ItemResult) -> Table:
    table = _new_table("Items inferred from one client's upload", found.skipped)
    if isinstance(found, Skipped):
        return table
    for name in ("seen", "items named", "95 % interval", "rows", "right by support"):
        table.add_column(name, justify="left" if name == "seen" else "right", no_wrap=True)
    for name, value in found.evidence.items():
        low, high = value.interval
        table.add_row(
            name,
            f"{value.r_precision:.1%}",
            f"{low:.1%} to {high:.1%}",
            f"{value.support_rows:,.0f}",
            f"{value.support_precision:.1%}",
        )
    table.add_row("the most popular items", f"{found.popularity:.1%}", style="dim")
    table.add_row("chance", f"{found.chance:.1%}", style="dim")
    table.caption = (
        f"{found.clients:,} clients with {found.items_per_client:.0f} items each, as many "
        f"named; {found.replayed}"
    )
    return table


def _canary_table(found: list[CanaryResult], claim: AuditedClaim) -> Table:
    why = None
    if not found:
        why = "no guarantee to test" if claim.epsilon is None else "not tested"
    table = _new_table("Canaries: lower bounds of epsilon", why)
    if why:
        return table
    for name in ("", "claimed", "at least", "if Gaussian", "most provable", "delta"):
        table.add_column(name, justify="right" if name else "left")
    for result in found:
        sharper = result.gaussian_lower_bound
        table.add_row(
            f"{result.who}, {result.where}",
            f"{result.claimed_epsilon:.3f}",
            f"{result.lower_bound:.3f}",
            "–" if sharper is None else f"{sharper:.3f}",
            f"{result.most_provable:.3f}",
            f"{result.delta:.2g}",
            style="bold red" if result.contradicted else "",
        )
    first = found[0]
    table.caption = (
        f"{first.trials:,} trials of {first.rounds} rounds for a canary in each array of an "
        "upload, Clopper-Pearson at 95 %"
    )
    return table


def _soundness_table(found: SoundnessResult) -> Table:
    table = _new_table("Clipping and noise: tests of the mechanism", None)
    for name in ("numbers", "arrays", "rounds", "tests", "problems"):
        table.add_column(name, justify="right")
    table.add_row(
        f"{found.numbers:,}",
        f"{len(found.arrays)}",
        f"{found.rounds}",
        f"{found.tests:,}",
        f"{len(found.problems)}",
        style="bold red" if found.problems else "",
    )
    table.caption = (
        "reach of one upload; noise on every number, as much as claimed, of the law claimed, "
        "independent of all other; whole steps"
    )
    return table


def _new_table(title: str, skipped: str | None) -> Table:
    table = plain_table(title, title_style="bold")
    if skipped:
        table.add_column("")
        table.add_row(skipped)
    return table


@contextmanager
def _display(quiet: bool) -> Iterator[Progress]:
    """Show a progress bar for each attack on standard error."""
    if quiet:
        yield lambda what, done, total: None
        return
    columns = (text_column("{task.description:10}"), BarColumn(), MofNCompleteColumn())
    with progress(*columns, TimeRemainingColumn()) as bars:
        tasks: dict[str, Any] = {}

        def show(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = bars.add_task(what, total=total)
            bars.update(tasks[what], completed=done, total=total)

        yield show
