"""The runs that a node takes part in: private parameters, ledger, the last round and its answer.

A round is one transaction: private parameters, ledger, the number of the round and the reply are
written together. So a finished round is never trained again, and a repeated request is answered
with the same bytes.

Private parameters are stored with the round that changed them. A client has at most two versions:
the newest, and the newest up to the selected round.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from safetensors.numpy import load, save

from hushrec.deployment.node.database import NodeDatabase
from hushrec.errors import MessageError
from hushrec.private import PrivateStore, to_arrays


@dataclass(frozen=True)
class NodeRun:
    """A run, as stored on the node."""

    id: str
    upto: int
    """Number of the last interaction that takes part."""
    terms: str | None
    round: int
    """The last finished round."""
    selected: int
    request: str | None
    version: int
    masked: int
    """The last round whose vector was sent for a secure sum."""
    masked_request: str | None
    """Digest of that round's request."""
    members: Mapping[int, int]
    """Index of each user in the enrolment, by the user's number in the file."""
    clients: Mapping[int, int]
    """Client of each such index."""


@dataclass(frozen=True)
class FinishedRound:
    """A trained round, to be stored."""

    round: int
    selected: int
    request: str
    reply: bytes
    private: PrivateStore
    clients: Mapping[int, int]
    """Clients that took part, with their indices in the private store."""
    charged: bool
    """Whether the round is charged to their privacy budgets."""


class NodeRuns:
    """Reads and writes a node's runs."""

    def __init__(self, store: NodeDatabase) -> None:
        self.store = store

    def begin(self, run: str) -> NodeRun:
        """Begin a run with all current users; a repeated call returns the same run."""
        store = self.store
        with store.changing():
            if store.one("SELECT id FROM runs WHERE id = ?", (run,)) is None:
                number = store.one("SELECT COALESCE(MAX(number), 0) + 1 FROM runs")
                query = "INSERT INTO runs (id, number, upto) VALUES (?, ?, ?)"
                store.connection.execute(query, (run, number, store.latest()))
                people = store.rows("SELECT id, silo FROM users ORDER BY id")
                numbers = {silo: k for k, silo in enumerate(sorted({silo for _, silo in people}))}
                members = [
                    (run, index, user, numbers[silo] if store.contract.silos else index)
                    for index, (user, silo) in enumerate(people)
                ]
                store.connection.executemany("INSERT INTO members VALUES (?, ?, ?, ?)", members)
                # Ledgers stay; so do the newest finished run and the one before this.
                store.connection.execute(
                    "DELETE FROM runs WHERE number < ? AND number IS NOT "
                    "(SELECT MAX(number) FROM runs WHERE id IN (SELECT run FROM models))",
                    (number - 1,),
                )
        return self.get(run)

    def get(self, run: str) -> NodeRun:
        """Return a run that was begun."""
        store = self.store
        found = store.rows(
            "SELECT id, upto, terms, round, selected, request, version, masked, masked_request "
            "FROM runs WHERE id = ?",
            (run,),
        )
        if not found:
            raise MessageError(f"this node was not invited to the run '{run}', or is out of it")
        members = store.rows("SELECT place, user, client FROM members WHERE run = ?", (run,))
        indices = {user: index for index, user, _ in members}
        fields = (*found[0], indices, {index: client for index, _, client in members})
        return NodeRun(*fields)

    def pin_terms(self, run: NodeRun, terms: str) -> None:
        """Store the first assignment of a run, and refuse any other."""
        if run.terms is None:
            query = "UPDATE runs SET terms = ? WHERE id = ? AND terms IS NULL"
            self._change(query, terms, run.id)
        elif run.terms != terms:
            raise MessageError("the server sent another assignment of the run than before")

    def load(
        self, run: NodeRun, clients: Mapping[int, int], to: PrivateStore, *, selected: bool = False
    ) -> None:
        """Load the newest, or the selected, private parameters of clients into a private store."""
        latest = run.selected if selected else run.round
        for client, index in clients.items():
            arrays = self._private(run.id, client, latest)
            if arrays is not None:
                to.restore({"visited": np.array([index]), **load(arrays)})

    def finish_round(self, run: NodeRun, done: FinishedRound) -> bool:
        """Store a round in one transaction; False, and nothing is stored, if another process
        changed the run meanwhile."""
        values = {"round": done.round, "request": done.request}
        with self.store.changing():
            stored = self._store_round(run, done, values)
            if stored:
                query = "INSERT OR REPLACE INTO replies VALUES (?, ?)"
                self.store.connection.execute(query, (run.id, done.reply))
                self._drop_outdated(run.id, done.round, done.selected)
        return stored

    def reply(self, run: NodeRun) -> bytes | None:
        """Return the answer to the last round's request; None if it was removed."""
        found = self.store.one("SELECT reply FROM replies WHERE run = ?", (run.id,))
        return None if found is None else bytes(found)

    def send_round(self, run: NodeRun, done: FinishedRound) -> bool:
        """Store a round whose vector is sent for a secure sum, in the open transaction.

        The round is charged to the privacy budget now. Its private parameters are used once the
        round is finished.
        """
        return self._store_round(run, done, {"masked": done.round, "masked_request": done.request})

    def close_round(self, run: NodeRun, number: int) -> None:
        """Finish a round whose sum this node helps to open, in the open transaction."""
        self.store.connection.execute(
            "UPDATE runs SET round = ?, request = NULL, version = version + 1 WHERE id = ?",
            (number, run.id),
        )
        self._drop_outdated(run.id, number, run.selected)

    def select(self, run: NodeRun, round_number: int) -> NodeRun:
        """Store which round is selected, if it is a later one; return the run."""
        if round_number > run.selected:
            query = "UPDATE runs SET selected = MAX(selected, ?) WHERE id = ?"
            self._change(query, round_number, run.id)
        return self.get(run.id)

    def keep_model(self, run: NodeRun, model: bytes) -> None:
        """Store the request with the final parameters, which the node recommends with."""
        self._change("INSERT OR REPLACE INTO models VALUES (?, ?)", run.id, model)

    def newest_model(self) -> tuple[NodeRun, bytes] | None:
        """Return the newest finished run, and the request with its final parameters."""
        found = self.store.rows(
            "SELECT id, model FROM models JOIN runs ON id = run ORDER BY number DESC LIMIT 1"
        )
        return (self.get(found[0][0]), found[0][1]) if found else None

    def uploads(self, run: str) -> dict[str, int]:
        """Return how often each user's data was part of a protected upload of a run."""
        query = "SELECT name, uploads FROM ledger JOIN users ON users.id = ledger.user "
        return dict(self.store.rows(f"{query} WHERE run = ?", (run,)))

    def spent(self, run: NodeRun, number: int) -> dict[int, int]:
        """Return the uploads charged to each client (of a silo, the most of any user) before this
        round."""
        query = "SELECT user, uploads - (round = ?) FROM ledger WHERE run = ?"
        paid: dict[int, int] = dict(self.store.rows(query, (number, run.id)))
        most: dict[int, int] = {}
        for user, index in run.members.items():
            client = run.clients[index]
            most[client] = max(most.get(client, 0), paid.get(user, 0))
        return most

    def status(self) -> dict[str, Any] | None:
        """Return the progress of the newest run; None before the first."""
        query = "SELECT id, id IN (SELECT run FROM models) FROM runs ORDER BY number DESC LIMIT 1"
        newest = self.store.rows(query)
        if not newest:
            return None
        run, uploads = self.get(newest[0][0]), self.uploads(newest[0][0])
        size = "SELECT COUNT(*), COALESCE(SUM(LENGTH(arrays)), 0) FROM private WHERE run = ?"
        count, stored = self.store.rows(size, (run.id,))[0]
        waiting = self.store.one("SELECT COUNT(*) FROM interactions WHERE id > ?", (run.upto,))
        return {
            "id": run.id,
            "round": run.round,
            "selected_round": run.selected,
            "users": len(run.members),
            "clients": len(set(run.clients.values())),
            "interactions_for_the_next_run": waiting,
            "private_parameters": count,
            "private_bytes": stored,
            "finished": bool(newest[0][1]),
            "most_protected_uploads": max(uploads.values(), default=0),
        }

    def _change(self, query: str, *values: object) -> None:
        """Execute one statement as a transaction."""
        with self.store.changing():
            self.store.connection.execute(query, values)

    def _store_round(self, run: NodeRun, done: FinishedRound, values: Mapping[str, object]) -> bool:
        """Store private parameters, ledger and columns of the run, in the open transaction."""
        connection, columns = self.store.connection, "".join(f"{name} = ?, " for name in values)
        changed = connection.execute(
            f"UPDATE runs SET {columns} selected = MAX(selected, ?), version = version + 1 "  # noqa: S608
            "WHERE id = ? AND version = ?",
            (*values.values(), done.selected, run.id, run.version),
        ).rowcount
        if changed != 1:
            return False
        connection.execute("DELETE FROM private WHERE run = ? AND round > ?", (run.id, run.round))
        for client in done.clients:
            self._write_private(run, client, done)
        if done.charged:
            self._charge(run, done)
        return True

    def _drop_outdated(self, run: str, number: int, selected: int) -> None:
        """Keep, of a round's clients, its parameters and the newest up to the selected round."""
        self.store.connection.execute(
            "DELETE FROM private WHERE run = ? AND round != ? AND client IN "
            "(SELECT client FROM private WHERE run = ? AND round = ?) AND round IS NOT "
            "(SELECT MAX(round) FROM private AS kept WHERE kept.run = private.run AND "
            "kept.client = private.client AND kept.round <= ?)",
            (run, number, run, number, selected),
        )

    def _write_private(self, run: NodeRun, client: int, done: FinishedRound) -> None:
        """Store a client's private parameters where the round changed them."""
        arrays = to_arrays(done.private.read(np.array([done.clients[client]])))
        if not arrays:
            return
        encoded = save({name: np.ascontiguousarray(array) for name, array in arrays.items()})
        if encoded == self._private(run.id, client, run.round):
            return
        query = "INSERT OR REPLACE INTO private VALUES (?, ?, ?, ?)"
        self.store.connection.execute(query, (run.id, client, done.round, encoded))

    def _private(self, run: str, client: int, latest: int) -> bytes | None:
        """Return a client's newest private parameters up to a round."""
        arrays = self.store.one(
            "SELECT arrays FROM private WHERE run = ? AND client = ? AND round <= ? "
            "ORDER BY round DESC LIMIT 1",
            (run, client, latest),
        )
        return None if arrays is None else bytes(arrays)

    def _charge(self, run: NodeRun, done: FinishedRound) -> None:
        """Charge the users who took part; a round is charged once."""
        users = [user for user, index in run.members.items() if run.clients[index] in done.clients]
        self.store.connection.executemany(
            "INSERT INTO ledger (run, user, uploads, round) VALUES (?, ?, 1, ?) ON CONFLICT "
            "(run, user) DO UPDATE SET uploads = uploads + (round < excluded.round), "
            "round = excluded.round",
            ((run.id, user, done.round) for user in users),
        )
