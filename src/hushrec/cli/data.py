"""``hushrec data``: list, describe, fetch and import data sets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
from rich.progress import BarColumn, DownloadColumn, TimeRemainingColumn

from hushrec.cli.display import reading_progress
from hushrec.cli.options import (
    PATH,
    SOURCE,
    column_options,
    gather,
    items_option,
    json_option,
    title_option,
)
from hushrec.cli.terminal import echo_err, progress, show, text_column
from hushrec.data.catalog import fetch, import_file, load, names
from hushrec.data.interactions import Interactions
from hushrec.data.reading import FeatureFiles
from hushrec.data.sources import CATALOG, cache_dir
from hushrec.data.splitting import SplitConfig
from hushrec.data.tables import Columns
from hushrec.evaluation.groups import split_notes
from hushrec.reporting.tables import facts_table, plain_table, split_words


@click.group("data")
def data_commands() -> None:
    """List, describe, fetch and import data sets.

    \b
    hushrec data list
    hushrec data info demo
    hushrec data fetch ml-100k
    hushrec data import ratings.csv --name mine
    """


@data_commands.command("list")
@json_option
def list_command(as_json: bool) -> None:
    """List the known data sets, and where they are.

    \b
    hushrec data list
    hushrec data list --json
    """
    entries, figures = [_entry(name) for name in names()], ("users", "items", "rows")
    table = plain_table(None, "name", figures=figures)
    table.add_column("where", overflow="fold")
    table.add_column("licence")
    for entry in entries:
        counts = (f"{entry[count]:,}" for count in figures)
        # The first clause; `info` has the whole.
        licence = entry["licence"].split(";")[0]
        table.add_row(entry["name"], *counts, entry["where"] or "not here", licence)
    show(as_json, entries, table)


@data_commands.command("info")
@click.argument("source", type=SOURCE, metavar="NAME|FILE")
@items_option
@gather("columns", Columns, *column_options, title_option)
@json_option
def info_command(source: str, items: str | None, columns: Columns, as_json: bool) -> None:
    """Describe a data set or a file: counts, ties, baskets, features, its split, terms, checksums.

    \b
    hushrec data info ml-100k
    hushrec data info ratings.csv.gz --items films.csv --json
    hushrec data info log.csv --user customer --item product
    """
    given: Any = {role: at for role, at in vars(columns).items() if at is not None}
    with reading_progress(as_json) as progress:
        data = load(source, items=items, progress=progress, **given)
    summary = _facts(data)
    if source in CATALOG:
        dataset = CATALOG[source]
        folder = dataset.find() if dataset.files else None
        summary |= {
            "title": dataset.title,
            "licence": dataset.licence,
            "citation": dataset.citation,
            "where": str(folder.path) if folder else "built in",
            "files": dataset.states(folder),
        }
    show(as_json, summary, facts_table(summary))


@data_commands.command("fetch")
@click.argument("name")
@json_option
def fetch_command(name: str, as_json: bool) -> None:
    """Download a data set into the cache and check it.

    \b
    hushrec data fetch ml-100k
    hushrec data fetch lastfm-2k/listens
    """
    if name in CATALOG:
        echo_err(f"{CATALOG[name].title}\nTerms: {CATALOG[name].licence}")
    columns = (text_column("{task.description}"), BarColumn(), DownloadColumn())
    with progress(*columns, TimeRemainingColumn(), transient=True, quiet=as_json) as bar:
        task = bar.add_task(name, total=None)
        folder = fetch(name, lambda done, total: bar.update(task, completed=done, total=total))
    dataset = CATALOG[name]
    result: dict[str, Any] = {"name": name, "where": str(folder.path), "licence": dataset.licence}
    result["files"] = dataset.states(folder)
    show(as_json, result, facts_table(result))


@data_commands.command("import")
@click.argument("file", type=PATH)
@click.option("--name", required=True, help="Name of the import, for --data NAME.")
@gather("columns", Columns, *column_options, title_option)
@gather(
    "features",
    FeatureFiles,
    click.option("--users", type=PATH, help="File of user features."),
    click.option("--items", type=PATH, help="Public list of items, with their features."),
    click.option(
        "--user-feature", "user_features", multiple=True, metavar="COLUMN", help="Repeatable."
    ),
    click.option(
        "--item-feature", "item_features", multiple=True, metavar="COLUMN", help="Repeatable."
    ),
)
@click.option("--overwrite", is_flag=True, help="Replace an older import of that name.")
@json_option
def import_command(
    file: Path, name: str, columns: Columns, features: FeatureFiles, overwrite: bool, as_json: bool
) -> None:
    """Import a file under a name.

    Reads CSV, TSV, other delimiters, JSON lines and Parquet, gzip-compressed or not. --items is
    the public list of items, which training under privacy needs: an id per line, or a table.
    Feature files have a line per user or item; a column is a category, a set of categories
    separated by | (NAME:set), or a number with its range (NAME:number:0:100). Public categories of
    users are declared by name (NAME:category:A|B, NAME:set:A|B).

    \b
    hushrec data import ratings.csv --name mine
    hushrec data import log.tsv.gz --name log --user who --item what --time when
    hushrec data import plain.txt --name plain --user 0 --item 1 --delimiter '|'
    hushrec data import ratings.csv --name mine --items films.csv --item-feature genres:set
        --users people.csv --user-feature 'gender:category:F|M' --user-feature age:number:0:100
    """
    with reading_progress(as_json) as progress:
        data = import_file(file, name, columns, features, overwrite=overwrite, progress=progress)
    facts = _facts(data)
    show(as_json, facts, facts_table(facts))


def _facts(data: Interactions) -> dict[str, Any]:
    """Describe interactions, and the split that a run makes of them by default."""
    config, facts = SplitConfig().resolved(data.in_order, data.has_baskets), data.facts()
    facts["notes"] += split_notes(data, config)
    return {**facts, "split": split_words(config, data)}


def _entry(name: str) -> dict[str, Any]:
    """Describe a published data set, or an imported file."""
    if name not in CATALOG:
        stored = load(name)
        counts = stored.n_users, stored.n_items, len(stored)
        where: str | None = str(cache_dir() / "imported" / f"{name}.npz")
        url, licence = None, "yours"
    else:
        dataset = CATALOG[name]
        folder = dataset.find() if dataset.files else None
        counts = dataset.users, dataset.items, dataset.rows
        where = "built in" if not dataset.files else str(folder.path) if folder else None
        url, licence = dataset.url, dataset.licence
    return {
        "name": name,
        **dict(zip(("users", "items", "rows"), counts, strict=True)),
        "present": where is not None,
        "where": where,
        "download": url,
        "licence": licence,
    }
