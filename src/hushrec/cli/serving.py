"""Commands that serve a finished run: ``recommend``, ``similar`` and ``export``.

Lists come from the run folder alone. A bundle, and a release that has one, serve too: for a
history, or for somebody who has none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from hushrec.api import Run
from hushrec.cli.display import reading_progress
from hushrec.cli.options import COUNT, PATH, gather, json_option, run_argument, threads_option
from hushrec.cli.terminal import echo_err, show
from hushrec.data.reading import read_history
from hushrec.data.splitting import Part
from hushrec.errors import ConfigError, RunError
from hushrec.reporting.tables import human_size, plain_table
from hushrec.serving.bundle import BundleForm
from hushrec.serving.data import FilterOptions, Recommendation
from hushrec.serving.recommender import MANIFEST, MODEL, BundleError, Recommender, Suggestion

NEW = "somebody new"
"""What a user without an id is called."""
Listed = Sequence[Recommendation | Suggestion]


@dataclass(frozen=True)
class Whom:
    """Whom lists are for."""

    user: str | None
    new: bool
    all_users: bool
    history: Path | None
    features: tuple[str, ...]

    def __post_init__(self) -> None:
        """Refuse options that do not go together."""
        if self.all_users + self.new + (self.user is not None or self.history is not None) != 1:
            raise ConfigError(
                "say whom to recommend to, once: --user ID, --history FILE, --new or --all-users"
            )
        if self.all_users and self.features:
            raise ConfigError("--feature describes one new user: leave out --all-users")
        for pair in self.features:
            if "=" not in pair:
                raise ConfigError(f"--feature {pair}: expected NAME=VALUE")

    @property
    def name(self) -> str:
        """What to call the user."""
        return self.user or NEW

    def items(self) -> list[str] | None:
        """Return the given history; None where the run knows it."""
        if self.history is None:
            return [] if self.new else None
        empty = self.history.is_file() and not self.history.read_bytes().strip()
        return [] if empty else read_history(self.history)


@dataclass(frozen=True)
class Chosen:
    """Which items lists may hold."""

    only: Path | None
    without: Path | None
    where: tuple[str, ...]
    seen: bool

    def options(self) -> FilterOptions:
        """Return the options of `Run.recommend`."""
        found: FilterOptions = {"where": self.where, "seen": self.seen}
        if self.only is not None:
            found["only"] = read_history(self.only)
        if self.without is not None:
            found["without"] = read_history(self.without)
        return found


@dataclass(frozen=True)
class ListFile:
    """Where everybody's lists go."""

    out: Path | None
    part: Part | None
    qrels: Path | None
    threads: int | None


@click.command("recommend")
@run_argument
@click.option("-k", "count", type=COUNT, default=10)
@gather(
    "whom",
    Whom,
    click.option("--user", metavar="ID"),
    click.option("--new", is_flag=True, help="Somebody without a history."),
    click.option("--all-users", is_flag=True, help="Everybody, into the file of --out."),
    click.option(
        "--history",
        type=PATH,
        metavar="FILE",
        help="Items of a user the run does not know: one id a line, oldest first, or a table.",
    ),
    click.option(
        "--feature",
        "features",
        multiple=True,
        metavar="NAME=VALUE",
        help="What such a user is; repeatable.",
    ),
)
@gather(
    "chosen",
    Chosen,
    click.option("--only", type=PATH, metavar="FILE", help="Items to choose from, one id a line."),
    click.option("--without", type=PATH, metavar="FILE", help="Items to leave out, one id a line."),
    click.option(
        "--where",
        multiple=True,
        metavar="CONDITION",
        help="On item features, as genres=Comedy or 'year>=1990'; repeatable, all hold.",
    ),
    click.option("--seen", is_flag=True, help="List items of the history too."),
)
@gather(
    "target",
    ListFile,
    click.option(
        "--out",
        type=PATH,
        metavar="FILE",
        help="With --all-users: .csv, .jsonl, .parquet or .trec.",
    ),
    click.option(
        "--part",
        type=click.Choice(["valid", "test"]),
        help="With --all-users: the lists of the evaluation, from histories before these items.",
    ),
    click.option(
        "--qrels", type=PATH, metavar="FILE", help="With --part: write its items as TREC qrels."
    ),
    threads_option,
)
@json_option
def recommend_command(
    folder: Path, count: int, whom: Whom, chosen: Chosen, target: ListFile, as_json: bool
) -> None:
    """Recommend items to one user, to somebody new, or to everybody.

    Lists hold items that the user has not touched yet. Without a history they hold the popular
    items.

    \b
    hushrec recommend runs/pfedrec --user 42
    hushrec recommend runs/pfedrec --history anna.txt -k 5 --json
    hushrec recommend runs/privrec --new --feature 'region=coast'
    hushrec recommend runs/first --user 42 --where genres=Comedy --where 'year>=1990'
    hushrec recommend runs/first --all-users --out lists.csv
    hushrec recommend runs/first --all-users --part test --out lists.trec --qrels test.qrels
    """
    if whom.all_users:
        _recommend_to_all(Run.open(folder), count, chosen.options(), target, as_json)
        return
    for name in ("out", "part", "qrels"):
        if getattr(target, name) is not None:
            raise ConfigError(f"--{name} goes with --all-users")
    device = _device(folder)
    if device is not None:
        found = _from_bundle(folder, device, count, whom, chosen)
        show_recommendations(whom.name, found, as_json)
        return
    run, items = Run.open(folder), whom.items()
    if (changes := run.data_changes()) is not None:
        echo_err(changes)
    if items:
        unknown = len(set(items) - run.model.data.item_index.keys())
        popular = "; the popular items are listed" if unknown == len(set(items)) else ""
        if unknown:
            echo_err(f"{unknown} of {len(set(items))} items are not in the catalogue{popular}")
    features = dict(pair.split("=", 1) for pair in whom.features)
    lines = run.recommend(whom.name, count, items, features, **chosen.options())
    show_recommendations(whom.name, lines, as_json)


def _recommend_to_all(
    run: Run, count: int, chosen: FilterOptions, target: ListFile, as_json: bool
) -> None:
    """Write everybody's lists, and the held-out items if they are asked for."""
    if target.out is None:
        raise ConfigError("--all-users needs --out FILE, a name that ends in .csv, .jsonl, …")
    if target.qrels is not None and target.part is None:
        raise ConfigError("--qrels are the held-out items of a part: add --part test")
    if (changes := run.data_changes()) is not None:
        echo_err(changes)
    part, threads = target.part, target.threads
    with reading_progress(as_json, "recommending") as progress:
        run.write_lists(target.out, count, part=part, threads=threads, progress=progress, **chosen)
    written = {"lists": str(target.out)}
    if target.qrels is not None and part is not None:
        written["qrels"] = str(run.write_qrels(target.qrels, part))
    show(as_json, written, *written.values())


def _device(folder: Path) -> Recommender | None:
    """Return the model of a bundle, or of the bundle in a release; None if it is neither."""
    release = (folder / "statement.json").is_file()
    bundle = folder / "bundle" if release else folder
    if not all((bundle / name).is_file() for name in (MANIFEST, MODEL)):
        if release:
            raise RunError(
                f"{folder} is a release without a bundle for devices: recommend from the run that "
                "it was made from"
            )
        return None
    try:
        return Recommender.load(bundle)
    except BundleError as error:
        raise RunError(f"{bundle}: {error}") from None


def _from_bundle(
    folder: Path, device: Recommender, count: int, whom: Whom, chosen: Chosen
) -> list[Suggestion]:
    items = whom.items()
    if device.user is None and items is None:
        raise ConfigError(
            f"{folder} knows no users: give a history with --history FILE, or add --new"
        )
    if device.user is not None and (whom.new or whom.user not in (None, device.user)):
        raise ConfigError(
            f"{folder} is the bundle of one user, who is somebody else: give that user's id with "
            "--user, or what they touched since with --history FILE"
        )
    if chosen.where:
        raise ConfigError(f"{folder} has no item features: choose items with --only FILE")
    for item in items or ():
        device.touch(item)
    options = chosen.options()
    only = options.get("only")
    try:
        return device.recommend(
            count,
            None if only is None else [str(item) for item in only],
            [str(item) for item in options.get("without", ())],
            chosen.seen,
        )
    except ValueError as error:
        raise ConfigError(str(error)) from None


def show_recommendations(user: str, found: Listed, as_json: bool) -> None:
    """Print a list."""
    if not found:
        echo_err(f"nothing is left to recommend to '{user}'")
    _show_list({"user": user, "recommendations": found}, found, as_json)


def _show_list(value: Mapping[str, Any], found: Listed, as_json: bool) -> None:
    table = plain_table(figures=[""])
    table.add_column("title", overflow="fold")
    table.add_column("item", overflow="fold")
    table.add_column("score", justify="right")
    explained = any(line.because for line in found)
    if explained:
        table.add_column("because", overflow="fold")
    for rank, line in enumerate(found, 1):
        cells = str(rank), line.title, line.item, f"{line.score:.3f}"
        table.add_row(*cells, *([line.because] if explained else []))
    show(as_json, value, table)


@click.command("similar")
@run_argument
@click.argument("item")
@click.option("-k", "count", type=COUNT, default=10)
@json_option
def similar_command(folder: Path, item: str, count: int, as_json: bool) -> None:
    """List the items nearest to an item, by weights from item to item or by item vectors.

    \b
    hushrec similar runs/fednext film-0012
    hushrec similar runs/fedmf film-0012 -k 5 --json
    """
    device = _device(folder)
    try:
        found = (device or Run.open(folder)).similar(item, count)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    if not found:
        echo_err(f"no item is near to '{item}'")
    _show_list({"item": item, "similar": found}, found, as_json)


@click.command("export")
@run_argument
@click.argument("bundle", metavar="DIR", type=PATH)
@click.option(
    "--user",
    metavar="ID",
    help="Write the bundle of one user, with that user's history and own parameters, for that "
    "user's device alone.",
)
@click.option(
    "--neighbours",
    type=COUNT,
    help="Weights kept per item, the largest ones; in fedmix an option of training.  [all in "
    "single precision, 600 in half]",
)
@click.option("--precision", type=click.Choice(["half", "single"]), default="half")
@click.option("--overwrite", is_flag=True, help="Replace the bundle in DIR.")
@json_option
def export_command(
    folder: Path,
    bundle: Path,
    user: str | None,
    neighbours: int | None,
    precision: Any,
    overwrite: bool,
    as_json: bool,
) -> None:
    """Write a run's model for devices: a folder that numpy alone can serve.

    \b
    hushrec export runs/fednext bundle
    hushrec recommend bundle --history anna.txt
    python -c "from hushrec.serving.recommender import Recommender as R
    print(R.load('bundle', history=['1193', '661']).recommend(5))"

    Methods that score with parameters of single users have bundles of single users. Such a bundle
    is private to the user, and only the owner of its files can read them.

    \b
    hushrec export runs/pfedrec bundle-of-42 --user 42
    hushrec recommend bundle-of-42 --user 42

    `hushrec/serving/recommender.py` imports nothing else of hushrec: copy it to the device.
    """
    form: BundleForm = {
        "user": user,
        "neighbours": neighbours,
        "precision": precision,
        "overwrite": overwrite,
    }
    show_bundle(Run.open(folder).export(bundle, **form), as_json)


def show_bundle(path: Path, as_json: bool) -> None:
    """Print the files of a bundle and, if it is that of one user, what it holds of the user."""
    sizes, device = file_sizes(path), Recommender.load(path)
    lines = [size_line(path, sizes)]
    if device.user is not None:
        lines.append(
            f"holds the history ({len(device.history)} items) and parameters of user "
            f"'{device.user}', for this user's device alone"
        )
    if device.user is not None and device.fixed:
        lines.append("scores stay as they are: items touched from now on are only left out")
    facts = {"personal": device.user is not None, "fixed": device.fixed}
    show(as_json, {"bundle": str(path), "bytes": sizes, **facts}, *lines)


def file_sizes(folder: Path) -> dict[str, int]:
    """Return the bytes of every file below a folder."""
    files = [file for file in sorted(folder.rglob("*")) if file.is_file()]
    return {file.relative_to(folder).as_posix(): file.stat().st_size for file in files}


def size_line(folder: Path, sizes: Mapping[str, int]) -> str:
    """Return a line that names the files of a folder with their sizes."""
    return f"{folder}: " + ", ".join(f"{name} {human_size(size)}" for name, size in sizes.items())
