"""``hushrec node``: the database of a federation's node; backups of it and of whole folders."""

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
from hushrec.deployment.make import back_up_folder, restore_folder
from hushrec.deployment.node.database import ImportCounts, NodeDatabase
from hushrec.deployment.node.runs import NodeRuns
from hushrec.deployment.node.tables import DamagedError, PartCheck
from hushrec.deployment.node.training import model_of, recommend
from hushrec.errors import DataError, listed
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
    hushrec node check shop.node
    hushrec node backup shop.node shop.backup
    hushrec node restore shop.backup shop.node
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


@node_commands.command("check")
@store_argument
@json_option
def check_command(store: Path, as_json: bool) -> None:
    """Check the node's file: its structure, and every row and value against its digest.

    Exit code 2 if a part is damaged. `hushrec federate node` checks the same when it starts.

    \b
    hushrec node check shop.node
    hushrec node check shop.node --json
    """
    with NodeDatabase.open(store) as node:
        found = node.connection.check()
        sound = all(part.damage is None for part in found)
        rows = {part.part: part.damage or f"{part.rows:,}" for part in found}
        parts = [asdict(part) for part in found]
        show(as_json, {"node": str(store), "sound": sound, "parts": parts}, facts_table(rows))
        if not sound:
            damage = listed([part.part for part in found if part.damage is not None], quote="")
            raise DamagedError(store, damage)


overwrite_option = click.option("--overwrite", is_flag=True, help="Replace what is there.")


@node_commands.command("backup")
@store_argument
@click.argument("file", type=PATH)
@overwrite_option
@json_option
def backup_command(store: Path, file: Path, overwrite: bool, as_json: bool) -> None:
    """Write a checked copy of the node's file, also while the node runs.

    Only its owner may read it: it holds the users' data and the node's key. `hushrec federate
    backup` includes the other files of a node's folder.

    \b
    hushrec node backup shop.node shop.backup
    """
    with NodeDatabase.open(store) as node:
        parts = node.backup(file, overwrite=overwrite)
    _show_backup(file, {"node": str(store)}, parts, as_json)


@node_commands.command("restore")
@click.argument("file", type=PATH)
@store_argument
@overwrite_option
@json_option
def restore_command(file: Path, store: Path, overwrite: bool, as_json: bool) -> None:
    """Make a node of a backup, which is checked first.

    The node recommends as it did when it was backed up. It draws a new key for its noise, takes no
    further part in runs that began before, and joins a new run from its first round on.

    \b
    hushrec node restore shop.backup shop.node
    hushrec node restore shop.backup shop.node --overwrite
    """
    parts = NodeDatabase.restore(file, store, overwrite=overwrite)
    _show_backup(store, {"backup": str(file)}, parts, as_json)


@click.command("backup")
@click.argument("folder", metavar="DIR", type=PATH)
@click.argument("file", type=PATH)
@overwrite_option
@json_option
def backup_folder_command(folder: Path, file: Path, overwrite: bool, as_json: bool) -> None:
    """Write the folder of a server or a node into one file, also while it runs.

    Keys, configuration, finished runs and a node's file are in it; logs and unfinished runs are
    not. Only its owner may read the file.

    \b
    hushrec federate backup films/server server.backup
    hushrec federate backup films/nodes/node-1 node-1.backup
    """
    found = back_up_folder(folder, file, overwrite=overwrite)
    facts = {"file": str(file), **asdict(found)}
    show(as_json, facts, facts_table(facts))


@click.command("restore")
@click.argument("file", type=PATH)
@click.argument("folder", metavar="DIR", type=PATH)
@overwrite_option
@json_option
def restore_folder_command(file: Path, folder: Path, overwrite: bool, as_json: bool) -> None:
    """Make the folder of a server or a node from a backup, which is checked first.

    A run that was not finished cannot go on: begin a new one. `hushrec node restore` says what a
    restored node does.

    \b
    hushrec federate restore server.backup films/server
    hushrec federate restore server.backup films/server --overwrite
    """
    found = restore_folder(file, folder, overwrite=overwrite)
    facts = {"folder": str(folder), **asdict(found)}
    show(as_json, facts, facts_table(facts))


def _show_backup(made: Path, source: dict[str, str], parts: list[PartCheck], as_json: bool) -> None:
    facts = {"file": str(made), **source, "bytes": made.stat().st_size}
    rows = {part.part: part.rows for part in parts}
    show(as_json, {**facts, "rows": rows}, facts_table({**facts, **rows}))


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
