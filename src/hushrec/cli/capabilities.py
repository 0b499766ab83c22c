"""The table of `hushrec methods --capabilities`: what every method can do, and every refusal.

No cell is written down. Each is what the command itself checks before it begins, on a small data
set: an error of that check is the sentence of the refusal. `tests/test_capabilities.py` plays every
cell, and asserts that what is refused here is refused by the command with the same sentence.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

from hushrec.config import DEFAULT_METHOD, DEFAULT_UNDER_NOISE
from hushrec.data.splitting import Split, make_split
from hushrec.data.synthetic import demo
from hushrec.deployment.node.database import SHARED_STILL_HOLDS
from hushrec.errors import HushrecError
from hushrec.federation.contract import Catalogue, Contract, SecureSums
from hushrec.federation.experiment import ExperimentRequest
from hushrec.federation.setup import set_up, set_up_public
from hushrec.methods.base import method_names
from hushrec.serving.bundle import can_export, export
from hushrec.serving.data import ServingData
from hushrec.serving.model import Model
from hushrec.streams import Streams

NODES, VIEWERS = 3, 60
"""Nodes of the federation, and users of the data, that the checks are made for."""
DISTRIBUTED = {"privacy.mode": "distributed", "privacy.epsilon": 8.0, "privacy.nodes": NODES}
PAPERS = ("lipm", "pfedrec", "privrec", "fedrap", "fedrkg")
"""Methods of the five papers, which follow the default in the table."""


@dataclass(frozen=True)
class Capability:
    """A column of the table."""

    about: str
    """What somebody can do, and with which command."""
    check: Callable[[str | None], None]
    """Raises what the command raises for a method; None is the default."""


def _request(method: str | None) -> ExperimentRequest:
    return ExperimentRequest("demo", method)


@cache
def _split() -> Split:
    return make_split(demo(viewers=VIEWERS), _request(None).experiment().split, Streams(0))


def check_simulation(method: str | None) -> None:
    """Check as `hushrec train` does, on which resuming, reports and audits depend."""
    set_up(_request(method).experiment(), _split())


def check_deployment(
    method: str | None, secure: SecureSums | None = None, **settings: object
) -> None:
    """Check as `hushrec federate init` and the nodes do."""
    request = replace(_request(method), settings=settings)
    data = _split().data
    contract = Contract(request.experiment().resolved(None), Catalogue.of(data), secure)
    contract.check_nodes(NODES)
    set_up_public(contract.experiment, contract.public, "0", "", data.n_users)


def _untrained(method: str | None) -> Model:
    """Return a model of the method before its first round."""
    training, state = set_up(_request(method).experiment(), _split()).start()
    task, private = training.task, training.backend.store
    return Model(task.method, state.shared, private, ServingData.of(_split()), task.streams)


def check_export(method: str | None) -> None:
    """Check as `hushrec export` does, for one user where scores need the user's own parameters."""
    model = _untrained(method)
    user = None if can_export(model.method) else model.data.users[0]
    with TemporaryDirectory() as folder:
        export(model, Path(folder) / "bundle", user=user)


def check_reasons(method: str | None) -> None:
    """Check as `Model.explain` does."""
    model = _untrained(method)
    model.explain(str(model.data.users[0]), [str(model.data.items[0])])


COLUMNS: Mapping[str, Capability] = {
    "simulate": Capability("`hushrec train`: train and evaluate in one process", check_simulation),
    "deploy": Capability(
        "`hushrec federate`: nodes keep the data, and the model has the bits of the simulation",
        check_deployment,
    ),
    "deploy securely": Capability(
        "`hushrec federate init --secure`: the same bits, and the server sees only the sum over "
        "all nodes",
        lambda method: check_deployment(method, SecureSums()),
    ),
    "distributed noise": Capability(
        "`--set privacy.mode=distributed`: differential privacy against the server; nodes add the "
        "noise",
        lambda method: check_deployment(method, SecureSums(), **DISTRIBUTED),
    ),
    "resume": Capability(
        "`hushrec train --resume`: an interrupted run ends with the same bits", check_simulation
    ),
    "report": Capability("`hushrec report`: the results as one page", check_simulation),
    "export": Capability(
        "`hushrec export`: a bundle that numpy alone serves on a device, of one user (`--user`) "
        "where scores need the user's own parameters",
        check_export,
    ),
    "explain": Capability(
        "`because` in lists: the largest contribution to an item's score",
        check_reasons,
    ),
    "forget": Capability(
        "`hushrec node forget`: a user's data and private parameters are deleted, and training and "
        f"recommending go on. {SHARED_STILL_HOLDS}",
        check_deployment,
    ),
    "audit": Capability("`hushrec audit`: attacks on the finished run", check_simulation),
}


def refusal(column: str, method: str | None) -> str | None:
    """Return the sentence with which a method refuses a column; None where it does not."""
    try:
        COLUMNS[column].check(method)
    except HushrecError as error:
        return str(error)
    return None


def capabilities(method: str) -> dict[str, str | None]:
    """Return the refusal of every column, None where there is none.

    The default is asked for as by somebody who names no method.
    """
    asked = None if method == DEFAULT_METHOD else method
    return {column: refusal(column, asked) for column in COLUMNS}


def capability_table() -> dict[str, dict[str, str | None]]:
    """Return the cells of every method: the default, the papers' methods, and all others."""
    names = dict.fromkeys((DEFAULT_METHOD, *PAPERS, *method_names()))
    return {name: capabilities(name) for name in names}


def capability_page(table: Mapping[str, Mapping[str, str | None]]) -> str:
    """Return docs/capabilities.md, from the whole table."""
    lines = [f"| method | {' | '.join(COLUMNS)} |", "|---" * (len(COLUMNS) + 1) + "|"]
    for method, row in table.items():
        cells = ["yes" if why is None else "[no](#refusals)" for why in row.values()]
        lines.append(f"| `{method}` | {' | '.join(cells)} |")
    refusals = ["| method | refuses | with the sentence |", "|---|---|---|"]
    for method, row in table.items():
        for why in dict.fromkeys(filter(None, row.values())):
            columns = ", ".join(name for name, found in row.items() if found == why)
            refusals.append(f"| `{method}` | {columns} | {why} |")
    named = refusal("distributed noise", DEFAULT_METHOD)
    parts = [
        "# What every method can do",
        "Written by `hushrec methods --capabilities --markdown`. Every cell is what the command "
        "itself checks. `tests/test_capabilities.py` plays every cell on small data, or asserts "
        "that the command refuses with the sentence below.",
        "\n".join(lines),
        f"`{DEFAULT_METHOD}` is the default, and its row is what happens where no method is named: "
        f"where noise is added to sums, `{DEFAULT_UNDER_NOISE}` is trained in its place. Named "
        f"together with such noise it is refused: {named}.",
        "## Columns",
        "\n".join(f"- **{name}**: {column.about}" for name, column in COLUMNS.items()),
        "## Refusals",
        "\n".join(refusals),
    ]
    return "\n\n".join(parts) + "\n"
