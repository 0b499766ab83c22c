"""What of a run may be published: what its guarantee covers, and nothing else.

A run folder is as private as the data it was made from: it holds metrics, ranks, private parameters
and checkpoints. A release is a folder beside it, made of four things alone (`Covered`): the shared
model that is shipped, the configuration, the statement with its account, and the list of items,
which is public. Whoever has none of a run but these could write the same bytes.

::

    README.md              what it is, and what is not in it
    model-card.md          what the model is for, how it was made, what it guarantees
    manifest.json          size and SHA-256 of every other file
    statement.txt, .json   the guarantee, in words and as fields
    account.json           what the rounds cost
    config.toml            how it was trained
    items.json             the rows of the model's tables
    model.safetensors      the shared model
    bundle/                the same for devices, where the method has such a form
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tomli_w
from safetensors.numpy import save

from hushrec.errors import RunError
from hushrec.io.files import LOCK, atomic_folder, checked_path
from hushrec.privacy.statement import PrivacyStatement
from hushrec.runs.card import CARD, release_card
from hushrec.runs.run import Run
from hushrec.serving.bundle import can_export, export
from hushrec.serving.model import Model

FORMAT = "hushrec-release-1"
MANIFEST = "manifest.json"
LEFT_OUT = (
    "metrics, losses and ranks, on any items",
    "logs, times, byte counts and the sizes of cohorts",
    "checkpoints of other rounds",
    "private parameters, which stay with their users",
    "the key of the noise, which is gone",
    "users: their ids, their number of interactions, their features",
    "where data and other files lay on the machine that trained",
)
"""What a run folder has and a release has not."""


@dataclass(frozen=True)
class Covered:
    """All that a release is made of."""

    model: Model
    """The shared model, without users."""
    config: Mapping[str, Any]
    statement: PrivacyStatement
    """The privacy statement of summary.json."""
    round: int
    """The round that is shipped, which was not chosen by anybody's data."""


def release(run: Run, path: str | Path) -> Path:
    """Write what a run's guarantee covers into a new folder; refuse a run that has none."""
    refuse_uncovered(run)
    folder = checked_path(path)
    with atomic_folder(folder) as fresh:
        write_release(covered(run), fresh)
    return folder


def refuse_uncovered(run: Run) -> None:
    """Refuse a run of whose model something is not covered."""
    statement, privacy = run.summary.privacy, run.experiment.privacy
    where = "the run" if run.folder is None else str(run.folder.path)
    if not statement.promises:
        raise RunError(
            f"{where} guarantees nothing, so nothing of it can be released: {statement.statement} "
            "Train with --privacy central --epsilon E"
        )
    if privacy.noise_seed is not None:
        raise RunError(
            f"{where} is simulated: whoever knows privacy.noise_seed can remove its noise; train "
            "without it"
        )
    if run.summary.selected_by == "validation":
        raise RunError(
            f"{where} was trained before the shipped round was covered: somebody's validation "
            "items chose it; train again"
        )
    if privacy.undeclared:
        raise RunError(
            f"{where} took its list of items, or categories of users, from the users' rows, which "
            "nothing covers; train with --items FILE and declared categories"
        )
    if privacy.budgets is not None:
        raise RunError(
            f"{where} has personal budgets, which shape the model and are not covered themselves; "
            "train with one --epsilon for all"
        )
    if run.experiment.silos.kind != "none":
        raise RunError(
            f"{where} has silos that were made from the users' data, which nothing covers; train "
            "without them"
        )
    if not run.model.shared:
        raise RunError(f"{where} has no shared model: everything stays with its users")


def covered(run: Run) -> Covered:
    """Take from a run what its guarantee covers: not where files or private parameters lay."""
    experiment, summary = run.experiment.without_paths(), run.summary
    config = experiment.model_dump(mode="json", exclude_none=True, exclude={"store"})
    return Covered(run.model.without_users(), config, summary.privacy, summary.shipped_round)


def write_release(what: Covered, folder: Path) -> None:
    """Write the files, the manifest last."""
    statement, data = what.statement, what.model.data
    titles = [data.title(item) for item in range(len(data.items))]
    guarantee = (
        *("guarantee", "epsilon", "delta", "neighbours", "sampling", "trust", "mechanism"),
        *("adversaries", "listener_epsilon"),
        *("rounds", "unit", "public", "not_covered", "noise_seed", "same_budgets"),
        *("asked_epsilon", "statement"),
    )
    account = ("delta", "epsilon", "asked_epsilon", "spent_epsilon", "account")
    texts = {
        "README.md": _readme(what),
        CARD: release_card(
            what.config, type(what.model.method), statement, what.round, len(data.items)
        ),
        "statement.txt": f"{statement.statement}\n",
        "statement.json": _json({key: getattr(statement, key) for key in guarantee}),
        "account.json": _json({key: getattr(statement, key) for key in account}),
        "config.toml": tomli_w.dumps(what.config),
        "items.json": _json({"items": data.items.tolist(), "titles": titles}),
    }
    for name, text in texts.items():
        (folder / name).write_text(text, "utf-8")
    arrays = {name: np.ascontiguousarray(array) for name, array in what.model.shared.items()}
    (folder / "model.safetensors").write_bytes(save(arrays))
    if can_export(what.model.method):
        export(what.model, folder / "bundle")
    files = {
        path.relative_to(folder).as_posix(): {
            "bytes": path.stat().st_size,
            "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
        }
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != LOCK
    }
    manifest = {
        "format": FORMAT,
        "method": what.model.method.name,
        "round": what.round,
        "epsilon": statement.epsilon,
        "delta": statement.delta,
        "files": files,
        "left_out": LEFT_OUT,
    }
    (folder / MANIFEST).write_text(_json(manifest), "utf-8")


def _readme(what: Covered) -> str:
    device = "`bundle` is the same model for devices: `hushrec.serving.recommender` reads it.\n"
    return f"""# A model of {what.model.method.name}, released under differential privacy

{what.statement.statement}

The model is that of round {what.round}. `model.safetensors` holds it, `items.json` the items that
its rows are of, `config.toml` how it was trained, `statement.json` the guarantee as fields,
`account.json` what the rounds cost; `model-card.md` says what it is for. `manifest.json` has the
SHA-256 of every file.
{device if can_export(what.model.method) else ""}
The guarantee covers all of this together. Not in it, because it is not covered:

- {f"{chr(10)}- ".join(LEFT_OUT)}
"""


def _json(value: object) -> str:
    return json.dumps(value, indent=1, ensure_ascii=False) + "\n"
