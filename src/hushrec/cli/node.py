"""``hushrec node``: the database of a federation's node."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
import numpy as np

from hushrec.cli.options import COUNT, PATH, column_options, gather, json_option
from hushrec.cli.serving import show_bundle, show_recommendations
from hushrec.cli.terminal import show
from hushrec.data.reading import read_interactions
from hushrec.data.tables import Columns
from hushrec.deployment.node.database import ImportCounts, NodeDatabase
from hushrec.deployment.node.runs import NodeRuns
from hushrec.deployment.node.training import model_of, recommend
from hushrec.errors import DataError
from hushrec.federation.contract import Contract
from hushrec.reporting.tables import facts_table
from hushrec.serving.bundle import BundleForm, export

store_argument = click.argument("store", metavar="NODE", type=PATH)


@click.group("node")
def node_commands() -> None:
    """Manage a node of a federation: its data and the state of its runs.

    NODE is one file that only its owner may read.

    \b
    hushrec node init shop.node --contract contract.hushrec --name shop
    hushrec node import shop.node ratings.csv
    hushrec node add shop.node alice film-7 --value 5
    hushrec node status shop.node
    hushrec node recommend shop.node alice
    hushrec node export shop.node alice bundle-of-alice
    hushrec node forget shop.node alice
    """


@node_commands.command("init")
@store_argument
@click.option(
    "--contract",
    required=True,
    type=PATH,
    help="Contract of the federation: the experiment and the public list of items.",
)
@click.option("--name", required=True, help="Name of the node in the federation.")
@json_option
def init_command(store: Path, contract: Path, name: str, as_json: bool) -> None:
    """Make a node that is bound to a contract.

    \b
    hushrec node init shop.node --contract contract.hushrec --name shop
    """
    with NodeDatabase.create(store, name, Contract.read(contract)) as made:
        facts = {"node": str(store), **_contract_facts(made)}
    show(as_json, facts, facts_table(facts))


@node_commands.command("import")
@store_argument
@click.argument("file", type=PATH)
@gather("columns", Columns, *column_options)
@json_option
def import_command(store: Path, file: Path, columns: Columns, as_json: bool) -> None:
    """Add the interactions of a file, read as `hushrec data import` reads one.

    Interactions with items outside the federation's catalogue are stored and counted, but not
    used. Interactions that are imported during a run are used from the next run on.

    \b
    hushrec node import shop.node ratings.csv
    hushrec node import shop.node log.tsv --user who --item what --time when
    """
    with NodeDatabase.open(store) as node:
        data = read_interactions(file, columns, share=True)
        _show_import(node.add_interactions(data), as_json)


@node_commands.command("add")
@store_argument
@click.argument("user")
@click.argument("item")
@click.option("--value", type=float, default=1.0, help="Rating or count.")
@click.option(
    "--time",
    "when",
    type=click.IntRange(-(2**63), 2**63 - 1),
    help="In the unit of the other times.  [now, seconds]",
)
@json_option
def add_command(
    store: Path, user: str, item: str, value: float, when: int | None, as_json: bool
) -> None:
    """Add one interaction.

    \b
    hushrec node add shop.node alice film-7
    hushrec node add shop.node alice film-7 --value 4 --time 978300760
    """
    if not np.isfinite(np.float32(value)):
        raise DataError(f"--value {value:g} is not a finite number")
    if not user or not item:
        raise DataError("the user and the item need an id that is not empty")
    with NodeDatabase.open(store) as node:
        _show_import(node.add(user, item, value, when), as_json)


@node_commands.command("forget")
@store_argument
@click.argument("user")
@json_option
def forget_command(store: Path, user: str, as_json: bool) -> None:
    """Remove a user: interactions, private parameters, ledger; the file is rewritten.

    The shared parameters keep what they learnt from the user, and the command says so.

    \b
    hushrec node forget shop.node alice
    """
    with NodeDatabase.open(store) as node:
        gone = node.forget(user)
    lines = [
        f"forgotten: {gone.interactions:,} interactions, {gone.private_parameters:,} sets of "
        "private parameters"
    ]
    if gone.others:
        lines.append(
            f"{gone.others:,} other users share the removed private parameters of their silo; the "
            "next round makes new ones"
        )
    uploads = f"{gone.uploads:,} protected uploads held the user's part. " if gone.uploads else ""
    show(as_json, asdict(gone), *lines, uploads + gone.still_held)


@node_commands.command("recommend")
@store_argument
@click.argument("user")
@click.option("-k", "count", type=COUNT, default=10)
@json_option
def recommend_command(store: Path, user: str, count: int, as_json: bool) -> None:
    """Recommend items that a user of this node has not touched yet.

    Uses the model of the last finished run, the user's private parameters and all interactions of
    the user. Nothing leaves the node.

    \b
    hushrec node recommend shop.node alice
    hushrec node recommend shop.node alice -k 5 --json
    """
    with NodeDatabase.open(store) as node:
        show_recommendations(user, recommend(node, user, count), as_json)


@node_commands.command("export")
@store_argument
@click.argument("user")
@click.argument("bundle", metavar="DIR", type=PATH)
@click.option("--precision", type=click.Choice(["half", "single"]), default="half")
@click.option("--overwrite", is_flag=True, help="Replace the bundle in DIR.")
@json_option
def export_command(
    store: Path, user: str, bundle: Path, precision: Any, overwrite: bool, as_json: bool
) -> None:
    """Write the bundle of a user of this node, for that user's device alone.

    It holds the model of the last finished run, the user's private parameters and all interactions
    of the user; `hushrec export` says more.

    \b
    hushrec node export shop.node alice bundle-of-alice
    hushrec recommend bundle-of-alice --user alice
    """
    with NodeDatabase.open(store) as node:
        model = model_of(node, user)
    form: BundleForm = {"user": user, "precision": precision, "overwrite": overwrite}
    show_bundle(export(model, bundle, **form), as_json)


@node_commands.command("status")
@store_argument
@json_option
def status_command(store: Path, as_json: bool) -> None:
    """Show what the node holds, and the progress of its run.

    \b
    hushrec node status shop.node
    hushrec node status shop.node --json
    """
    with NodeDatabase.open(store) as node:
        facts, run = {**_contract_facts(node), **node.counts()}, NodeRuns(node).status()
    rows = {f"run {key}": value for key, value in (run or {}).items()}
    show(as_json, {**facts, "run": run}, facts_table({**facts, **rows}))


def _contract_facts(node: NodeDatabase) -> dict[str, object]:
    experiment = node.contract.experiment
    return {
        "name": node.name,
        "method": experiment.method,
        "privacy": experiment.privacy.mode,
        "items": len(node.contract.catalogue.items),
        "catalogue": node.contract.catalogue.digest,
        "settings": node.contract.settings_digest,
    }


def _show_import(taken: ImportCounts, as_json: bool) -> None:
    text = f"{taken.rows:,} interactions imported, {taken.users:,} new users"
    if taken.unknown_items:
        text += f"; {taken.unknown_items:,} of them with items outside the catalogue, not used"
    show(as_json, asdict(taken), text)
