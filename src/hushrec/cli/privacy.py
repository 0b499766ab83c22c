"""``hushrec audit``: attack a finished run; ``hushrec privacy``: compute and compose guarantees."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import click
import numpy as np
from rich.progress import BarColumn, MofNCompleteColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from hushrec.api import Run
from hushrec.audit import Progress, audit
from hushrec.cli import module_of
from hushrec.cli.options import PATH, SEED, Number, gather, json_option, run_argument
from hushrec.cli.terminal import Console, exit_with, print_json, progress, show, text_column
from hushrec.errors import ConfigError
from hushrec.io.files import write_text
from hushrec.privacy import accountant
from hushrec.privacy.accountant import Gaussian, Neighbours, epsilon_of, noise_for
from hushrec.privacy.statement import ComposedStatement, compose, largest_certainty
from hushrec.reporting.html import write_report
from hushrec.reporting.plots import line, standalone
from hushrec.reporting.tables import cells, plain_table
from hushrec.runs import schema
from hushrec.runs.folder import RunFolder
from hushrec.runs.replayed import ReplayResult
from hushrec.runs.schema import Audit, Skipped, Summary


@click.command("audit")
@run_argument
@click.option(
    "--users", type=click.IntRange(10, 1_000_000), default=500, help="Users to attack, at most."
)
@click.option(
    "--trials",
    type=click.IntRange(1_000, 10_000_000),
    default=10_000,
    help="Canary trials; more of them prove a higher bound.",
)
@click.option("--seed", type=SEED, default=0, metavar="S", help="Of the attacks, not the run.")
@json_option
def audit_command(folder: Path, users: int, trials: int, seed: int, as_json: bool) -> None:
    """Attack a finished run: membership, uploads, canaries, clipping, noise.

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
        first, *others = found.reasons
        more = f" (and {len(others)} more)" if others else ""
        exit_with(1, f"the claim of {folder} is contradicted: {first}{more}")


def _tables(found: Audit) -> Iterator[Table]:
    yield _membership_table(found.membership)
    yield _items_table(found.items)
    if isinstance(found.items, schema.ItemResult):
        yield _rounds_table(found.items)
    yield _canary_table(found.canaries, found.claim)
    if found.soundness is not None:
        yield _soundness_table(found.soundness)
    if found.replay is not None:
        yield _replay_table(found.replay)
    yield _reason_table("Out of sight of every attack", "; ".join(found.out_of_sight))


def _reason_table(title: str, reason: str) -> Table:
    """Return a table with the reason why an attack was skipped."""
    table = plain_table(title, folded="", title_style="bold")
    table.add_row(reason)
    return table


def _membership_table(found: Skipped | schema.MembershipResult) -> Table:
    title = "Membership inference on users or items"
    if isinstance(found, Skipped):
        return _reason_table(title, found.skipped)
    figures = ("model", "95 % interval", "popularity", "chance")
    table = plain_table(title, "", figures=figures, title_style="bold")
    names = {"auc": "AUC", "advantage": "advantage", "tpr_at_1_fpr": "TPR at 1 % FPR"}
    for key, name in names.items():
        rates = cells((getattr(of, key) for of in (found, found.baseline, found.chance)), 3)
        ends = getattr(found.intervals, key)
        interval = "–" if ends is None else " to ".join(cells(ends, 3))
        table.add_row(name, rates[0], interval, *rates[1:])
    table.caption = (
        f"{found.members:,} members, {found.others:,} others: {found.compared}. "
        f"Threat: {found.threat}."
    )
    if guesses := found.guesses:
        table.caption += (
            f" {guesses.right} of {guesses.guesses} guesses in {guesses.pairs} pairs are right: "
            f"epsilon is at least {guesses.lower_bound:.3f}, and {guesses.claimed_epsilon:.3f} is "
            f"claimed at delta {guesses.delta:.2g}."
        )
    return table


def _items_table(found: Skipped | schema.ItemResult) -> Table:
    title = "Items inferred from a client's uploads"
    if isinstance(found, Skipped):
        return _reason_table(title, found.skipped)
    figures = ("items named", "95 % interval", "rows", "right by support")
    table = plain_table(title, "seen", figures=figures, title_style="bold")
    for name, value in found.evidence.items():
        low, high = value.interval
        named, right = f"{value.r_precision:.1%}", f"{value.support_precision:.1%}"
        interval, rows = f"{low:.1%} to {high:.1%}", f"{value.support_rows:,.0f}"
        table.add_row(name, named, interval, rows, right)
    table.add_row("the most popular items", f"{found.popularity:.1%}", style="dim")
    table.add_row("chance", f"{found.chance:.1%}", style="dim")
    table.caption = (
        f"{found.clients:,} clients with {found.items_per_client:.0f} items each, as many "
        f"named by {next(iter(found.evidence.values())).reading}; {found.replayed}"
    )
    return table


def _rounds_table(found: schema.ItemResult) -> Table:
    title = "Items inferred, by kind of round"
    table = plain_table(title, folded="rounds", figures=("items named",), title_style="bold")
    for name, value in found.phases.items():
        if isinstance(value, str):
            table.add_row(f"{name}: {value}", "–", style="dim")
        else:
            table.add_row(name, f"{value:.1%}", style="bold" if name == found.phase else "")
    table.caption = "every kind is attacked from its own state; the worst is the table above"
    return table


def _canary_table(found: list[schema.CanaryResult], claim: schema.AuditedClaim) -> Table:
    title = "Canaries: lower bounds of epsilon"
    if not found:
        reason = "no guarantee to test" if claim.epsilon is None else "not tested"
        return _reason_table(title, reason)
    figures = ("claimed", "at least", "if Gaussian", "most provable", "delta")
    table = plain_table(title, "", figures=figures, title_style="bold")
    for row in found:
        bounds = (row.claimed_epsilon, row.lower_bound, row.gaussian_lower_bound, row.most_provable)
        style = "bold red" if row.contradicted else ""
        shown = [f"{row.who}, {row.where}", *cells(bounds, 3), f"{row.delta:.2g}"]
        table.add_row(*shown, style=style)
    table.caption = (
        f"{found[0].trials:,} trials of {found[0].rounds} rounds for a canary in each array of an "
        "upload, Clopper-Pearson at 95 %"
    )
    return table


def _soundness_table(found: schema.SoundnessResult) -> Table:
    counts = {
        "numbers": found.numbers,
        "arrays": len(found.arrays),
        "rounds": found.rounds,
        "tests": found.tests,
        "problems": len(found.problems),
    }
    title = "Clipping and noise: tests of the mechanism"
    table = plain_table(title, figures=counts, title_style="bold")
    style = "bold red" if found.problems else ""
    table.add_row(*(f"{count:,}" for count in counts.values()), style=style)
    table.caption = (
        "reach of one upload; noise on every number, as much as claimed, of the law claimed, "
        "independent of all other; whole steps"
    )
    return table


def _replay_table(found: ReplayResult) -> Table:
    counts = {
        "rounds": found.rounds,
        "clients": found.clients,
        "uploads": found.uploads,
        "problems": len(found.problems),
    }
    title = "Replay: the run's own loop, played again with and without data"
    table = plain_table(title, figures=counts, title_style="bold")
    style = "bold red" if found.problems else ""
    table.add_row(*(f"{count:,}" for count in counts.values()), style=style)
    table.caption = (
        "reach of real uploads; nothing from clients without data; noise and cohorts of their own "
        "in every round and run; a model that follows from released sums alone"
    )
    return table


@contextmanager
def _display(quiet: bool) -> Iterator[Progress]:
    """Show a progress bar for each attack on standard error."""
    columns = (text_column("{task.description:10}"), BarColumn(), MofNCompleteColumn())
    with progress(*columns, TimeRemainingColumn(), quiet=quiet) as bars:
        tasks: dict[str, Any] = {}

        def update(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = bars.add_task(what, total=total)
            bars.update(tasks[what], completed=done, total=total)

        yield update


CURVE_POINTS = 16

noise_option = click.option(
    "--noise",
    type=Number(0, 1e6),
    required=True,
    metavar="Z",
    help="Standard deviation of the noise over the sensitivity, which is the clipping bound under "
    "zero-out-one and twice the bound under replace-one.",
)


@dataclass(frozen=True)
class Setting:
    """Population, sampling, rounds and delta of a run."""

    population: int
    cohort: float | None
    rounds: int
    sampling: Literal["poisson", "fixed", "none"]
    neighbours: Neighbours | None
    delta: float

    def event(self, noise: float) -> Gaussian:
        """Return one round with this noise multiplier; refuse contradictory options."""
        population, cohort = self.population, self.cohort
        if not 0 < self.delta < 1 / population:
            raise ConfigError(
                f"delta = {self.delta:g} must lie between 0 and 1 / population = "
                f"{1 / population:.3g}: a larger one allows giving a user away entirely"
            )
        if self.sampling == "none":
            if cohort is not None and cohort != population:
                raise ConfigError(
                    "sampling 'none' means that everybody takes part: leave out --cohort, "
                    "or use --sampling poisson or fixed"
                )
            return Gaussian(noise, accountant.Everybody(), self.neighbours or "zero-out-one")
        if cohort is None:
            raise ConfigError(f"--sampling {self.sampling} needs --cohort")
        if self.sampling == "poisson":
            poisson = accountant.Poisson(cohort / population)
            return Gaussian(noise, poisson, self.neighbours or "zero-out-one")
        if cohort != int(cohort):
            raise ConfigError(f"--cohort {cohort:g}: a fixed-size cohort is a whole number")
        fixed = accountant.FixedSize(int(cohort), population)
        return Gaussian(noise, fixed, self.neighbours or "replace-one")


setting_options = gather(
    "setting",
    Setting,
    click.option("--population", type=click.IntRange(1, 10**12), required=True, metavar="N"),
    click.option(
        "--cohort",
        type=Number(1e-3, 1e12),
        metavar="M",
        help="Clients a round; expected ones for poisson.",
    ),
    click.option("--rounds", type=click.IntRange(1, 10**9), required=True, metavar="T"),
    click.option("--sampling", type=click.Choice(["poisson", "fixed", "none"]), default="poisson"),
    click.option(
        "--neighbours",
        type=click.Choice(["zero-out-one", "replace-one"]),
        help="[replace-one for fixed, else zero-out-one]",
    ),
    click.option("--delta", type=Number(1e-300, 1), required=True, metavar="D"),
)


@click.group("privacy")
def privacy_commands() -> None:
    """Compute guarantees of differential privacy.

    \b
    hushrec privacy epsilon --noise 1 --population 4800 --cohort 20 --rounds 1000 --delta 1e-6
    hushrec privacy noise --epsilon 4 --population 4800 --cohort 20 --rounds 1000 --delta 1e-6
    hushrec privacy compose runs/monday runs/tuesday
    hushrec privacy tables
    """


@privacy_commands.command("epsilon")
@noise_option
@setting_options
@json_option
def epsilon_command(noise: float, setting: Setting, as_json: bool) -> None:
    """Compute epsilon for a noise multiplier.

    \b
    hushrec privacy epsilon --noise 1 --population 4800 --cohort 20 --rounds 1000 --delta 1e-6
    hushrec privacy epsilon --noise 1 --population 4800 --cohort 20 --rounds 1000 --delta 1e-6 \\
        --sampling fixed --neighbours replace-one --json
    hushrec privacy epsilon --noise 30 --population 943 --rounds 100 --sampling none --delta 1e-4
    """
    _show_epsilon(setting, setting.event(noise), as_json)


@privacy_commands.command("noise")
@click.option("--epsilon", type=Number(1e-6, 1e6), required=True, metavar="E")
@setting_options
@json_option
def noise_command(epsilon: float, setting: Setting, as_json: bool) -> None:
    """Compute the noise multiplier for a target epsilon.

    \b
    hushrec privacy noise --epsilon 4 --population 4800 --cohort 20 --rounds 1000 --delta 1e-6
    hushrec privacy noise --epsilon 4 --population 943 --rounds 100 --sampling none --delta 1e-4
    """
    noise = noise_for(epsilon, setting.delta, setting.rounds, setting.event)
    _show_epsilon(setting, setting.event(noise), as_json)


@privacy_commands.command("compose")
@click.argument("folders", metavar="RUN [RUN ...]", nargs=-1, required=True, type=PATH)
@click.option(
    "--delta", type=Number(1e-300, 1), metavar="D", help="Where to state the sum.  [the runs' own]"
)
@json_option
def compose_command(folders: tuple[Path, ...], delta: float | None, as_json: bool) -> None:
    """Compute the joint guarantee of several runs on the same data.

    A run's own epsilon holds for an observer of that run alone. A folder of several seeds counts as
    all of its runs.

    \b
    hushrec privacy compose runs/monday runs/tuesday
    hushrec privacy compose runs/three-seeds --json
    hushrec privacy compose runs/small runs/large --delta 1e-6
    """
    together = compose([summary.claim(str(folder)) for folder, summary in _runs(folders)], delta)
    facts = together.epsilon, together.delta, together.neighbours, together.unit
    words = largest_certainty(*facts, same_budgets=together.same_budgets)
    show(as_json, together, _composition_table(together), Text(words), Text(together.statement))


def _runs(folders: tuple[Path, ...]) -> list[tuple[Path, Summary]]:
    """Read the summaries of runs, and of each seed of a run with several; refuse duplicates."""
    found: dict[Path, tuple[Path, Summary]] = {}
    for folder in folders:
        seeds = RunFolder.open(folder).read_summary().runs or [""]
        for run in (folder / seed for seed in seeds):
            if run.resolve() in found:
                raise ConfigError(f"{run} is named twice: it was released once")
            found[run.resolve()] = run, RunFolder.open(run).read_summary()
    return list(found.values())


def _composition_table(together: ComposedStatement) -> Table:
    table = plain_table(None, "method", folded="RUN", figures=("epsilon", "delta"))
    for run in together.runs:
        mark = "" if run["noise_seed"] is None else " (simulated)"
        figures = f"{run['epsilon']:.4f}", f"{run['delta']:.3g}"
        table.add_row(f"{run['run']}{mark}", run["method"], *figures)
    figures = f"{together.epsilon:.4f}", f"{together.delta:.3g}"
    table.add_row("all together", "", *figures, style="bold")
    return table


@privacy_commands.command("tables")
@json_option
def tables_command(as_json: bool) -> None:
    """Show tables 3 and 4 of DP-PrivRec, as printed and corrected.

    \b
    hushrec privacy tables
    hushrec privacy tables --json
    """
    module_of("experiments.epsilon_tables").show_tables(as_json=as_json)


@privacy_commands.command("plot")
@noise_option
@setting_options
@click.option("--out", type=PATH, default=Path("epsilon.svg"))
@json_option
def plot_command(noise: float, setting: Setting, out: Path, as_json: bool) -> None:
    """Draw epsilon against rounds.

    \b
    hushrec privacy plot --noise 1 --population 4800 --cohort 20 --rounds 1000 --delta 1e-6 \\
        --out eps.svg
    """
    rounds, delta = setting.rounds, setting.delta
    if rounds < 2:
        raise ConfigError("a curve needs at least two rounds: use a larger --rounds")
    event = setting.event(noise)
    # The curve bends at its beginning: more points there.
    numbers = sorted({round(1 + (rounds - 1) * x**2) for x in np.linspace(0, 1, CURVE_POINTS)})
    points = [(number, epsilon_of(event, number, delta)) for number in numbers]
    if not np.isfinite(points[0][1]):
        raise ConfigError("without noise there is no epsilon to draw: use a larger --noise")
    title = f"epsilon at delta {delta:g} against rounds; noise {noise:g}, {event.sampling}"
    drawing = line(points, title, selected=-1, from_zero=True)
    write_text(out, standalone([(title, drawing)]))
    curve = [{"rounds": number, "epsilon": epsilon} for number, epsilon in points]
    text = f"{out}: epsilon {points[-1][1]:.4g} after {rounds} rounds"
    show(as_json, {"out": str(out), "delta": delta, "curve": curve}, text)


def _show_epsilon(setting: Setting, event: Gaussian, as_json: bool) -> None:
    """Print epsilon after the rounds of a setting."""
    epsilon = epsilon_of(event, setting.rounds, setting.delta)
    if event.multiplier > 0 and math.isinf(epsilon):
        raise ConfigError(
            f"--noise {event.multiplier:g} in {setting.rounds:,} rounds is too little to be worked "
            "out under this sampling: epsilon is in the hundreds at least; use more noise"
        )
    neighbours, sampled = event.neighbours, event.sampling != accountant.Everybody()
    known = Gaussian(event.multiplier, accountant.Everybody(), neighbours)
    listener = epsilon_of(known, setting.rounds, setting.delta)
    bound = "the clipping bound" if neighbours == "zero-out-one" else "twice the bound"
    value = {
        "epsilon": epsilon,
        "delta": setting.delta,
        "noise_multiplier": event.multiplier,
        "rounds": setting.rounds,
        "sampling": str(event.sampling),
        "listener_epsilon": listener,
        "neighbours": neighbours,
        "sensitivity": bound,
        "unit": "user",
    }
    text = (
        f"epsilon {epsilon:.4f} at delta {setting.delta:g}: {setting.rounds} rounds, noise "
        f"multiplier {event.multiplier:.4g} (standard deviation over {bound}), {neighbours}, "
        f"sampling {event.sampling}"
    )
    if sampled:
        text += f"; against whoever sees who was drawn, epsilon {listener:.4f}"
    words = [largest_certainty(epsilon, setting.delta, neighbours)] if event.multiplier else []
    show(as_json, value, text, *words)
