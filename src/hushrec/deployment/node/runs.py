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

from hushrec.deployment.node.database import RESTORED, NodeDatabase
from hushrec.deployment.node.tables import COLUMNS, content_digest
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
            known = self._rows()
            if run not in known:
                self._require_open(run)
                number = max((row["number"] for row in known.values()), default=0) + 1
                query = "INSERT INTO runs (id, number, upto) VALUES (?, ?, ?)"
                store.connection.execute(query, (run, number, store.latest()))
                people = [(row[0], row[3]) for row in store.connection.sealed("users")]
                numbers = {silo: k for k, silo in enumerate(sorted({silo for _, silo in people}))}
                members = [
                    (run, index, user, numbers[silo] if store.contract.silos else index)
                    for index, (user, silo) in enumerate(people)
                ]
                store.connection.executemany("INSERT INTO members VALUES (?, ?, ?, ?)", members)
                # The newest finished run stays, and so does the one before this.
                self._close_before(number - 1, but=self._newest_finished())
        return self.get(run)

    def get(self, run: str) -> NodeRun:
        """Return a run that was begun, for a request of the server."""
        self._require_open(run)
        return self._get(run)

    def _get(self, run: str) -> NodeRun:
        found = self._rows().get(run)
        if found is None:
            raise MessageError(f"this node was not invited to the run '{run}', or is out of it")
        members = self.store.connection.sealed("members", run)
        return NodeRun(
            **{name: value for name, value in found.items() if name != "number"},
            members={user: index for index, user, _ in members},
            clients={index: client for index, _, client in members},
        )

    def _rows(self) -> dict[str, dict[str, Any]]:
        """Return the columns of all runs, by id."""
        rows = self.store.connection.sealed("runs")
        return {row[0]: dict(zip(COLUMNS["runs"], row, strict=True)) for row in rows}

    def _require_open(self, run: str) -> None:
        if (run,) in self.store.connection.sealed("closed"):
            raise MessageError(f"this node's part in the run '{run}' is over: it joins the next")

    def check_joined(self, run: NodeRun, number: int) -> None:
        """Refuse to join a run in its course after a restore: the node may have answered its first
        rounds already, before it was restored."""
        if number > 1 and not max(run.round, run.masked) and self.store.fact(RESTORED) == "1":
            raise MessageError(
                f"this node was restored from a backup, and cannot tell whether it was in the run "
                f"'{run.id}' before: it joins the next"
            )

    def _newest_finished(self) -> str | None:
        """Return the newest run with a model."""
        runs, connection = self._rows(), self.store.connection
        finished = [run for run in runs if connection.sealed("models", run)]
        return max(finished, key=lambda run: runs[run]["number"], default=None)

    def _close_before(self, number: int, but: str | None) -> None:
        """Drop all runs before a number but one, in the open transaction. A closed run is never
        joined again, as its noise must not be used again; the ledger keeps sums over closed
        runs."""
        store, runs = self.store, self._rows()
        gone = [run for run, row in runs.items() if row["number"] < number and run != but]
        for run in gone:
            store.connection.sealed("ledger", run)  # what is added up must be sound
            store.connection.execute("INSERT OR IGNORE INTO closed VALUES (?)", (run,))
            store.connection.execute(
                "INSERT INTO ledger (run, user, uploads, round) "
                "SELECT '', user, uploads, 0 FROM ledger WHERE run = ? ON CONFLICT (run, user) "
                "DO UPDATE SET uploads = uploads + excluded.uploads",
                (run,),
            )
            store.connection.execute("DELETE FROM ledger WHERE run = ?", (run,))
            store.connection.execute("DELETE FROM runs WHERE id = ?", (run,))

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
        newest = self._newest_private(run.id, latest)
        query = "SELECT arrays FROM private WHERE run = ? AND client = ? AND round = ?"
        for client, index in clients.items():
            if client in newest:
                number, digest = newest[client]
                arrays = self.store.one(query, (run.id, client, number))
                sound = self.store.connection.verified("private", digest, run.id, client, arrays)
                to.restore({"visited": np.array([index]), **load(sound)})

    def finish_round(self, run: NodeRun, done: FinishedRound) -> bool:
        """Store a round in one transaction; False, and nothing is stored, if another process
        changed the run meanwhile."""
        values = {"round": done.round, "request": done.request}
        with self.store.changing():
            stored = self._store_round(run, done, values)
            if stored:
                query = "INSERT OR REPLACE INTO replies VALUES (?, ?, ?)"
                digest = content_digest(run.id, done.reply)
                self.store.connection.execute(query, (run.id, digest, done.reply))
                self._drop_outdated(run.id, done.round, done.selected)
        return stored

    def reply(self, run: NodeRun) -> bytes | None:
        """Return the answer to the last round's request; None if it was removed."""
        return self._large("replies", "reply", run.id)

    def _large(self, table: str, column: str, run: str) -> bytes | None:
        """Return the one large value of a run in a table; None if there is none."""
        kept = self.store.connection.sealed(table, run)
        if not kept:
            return None
        value = self.store.one(f"SELECT {column} FROM {table} WHERE run = ?", (run,))  # noqa: S608
        return self.store.connection.verified(table, kept[0][0], run, value)

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
        """Store the request with the final parameters, which the node recommends with.

        The run is finished: its last answer and all runs before it go."""
        with self.store.changing():
            digest = content_digest(run.id, model)
            connection = self.store.connection
            query = "INSERT OR REPLACE INTO models VALUES (?, ?, ?)"
            connection.execute(query, (run.id, digest, model))
            connection.execute("DELETE FROM replies WHERE run = ?", (run.id,))
            self._close_before(self._rows()[run.id]["number"], but=None)
            connection.execute("DELETE FROM facts WHERE name = ?", (RESTORED,))
        self.store.give_back()

    def newest_model(self) -> tuple[NodeRun, bytes] | None:
        """Return the newest finished run, and the request with its final parameters."""
        run = self._newest_finished()
        model = None if run is None else self._large("models", "model", run)
        return None if run is None or model is None else (self._get(run), model)

    def uploads(self, run: str) -> dict[str, int]:
        """Return how often each user's data was part of a protected upload of a run; ``""`` stands
        for all runs that are closed."""
        names = {row[0]: row[1] for row in self.store.connection.sealed("users")}
        paid = self.store.connection.sealed("ledger", run)
        return {names[user]: uploads for user, uploads, _ in paid}

    def spent(self, run: NodeRun, number: int) -> dict[int, int]:
        """Return the uploads charged to each client (of a silo, the most of any user) before this
        round."""
        charged = self.store.connection.sealed("ledger", run.id)
        paid = {user: uploads - (latest == number) for user, uploads, latest in charged}
        most: dict[int, int] = {}
        for user, index in run.members.items():
            client = run.clients[index]
            most[client] = max(most.get(client, 0), paid.get(user, 0))
        return most

    def status(self) -> dict[str, Any] | None:
        """Return the progress of the newest run; None before the first."""
        known = self._rows()
        if not known:
            return None
        newest = max(known, key=lambda run: known[run]["number"])
        run, uploads = self._get(newest), self.uploads(newest)
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
            "finished": bool(self.store.connection.sealed("models", newest)),
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
        before = self._newest_private(run.id, run.round)
        for client in done.clients:
            self._write_private(run, client, done, before.get(client, (0, b""))[1])
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

    def _write_private(self, run: NodeRun, client: int, done: FinishedRound, before: bytes) -> None:
        """Store a client's private parameters where the round changed them; ``before`` is the
        digest of those that the client has."""
        arrays = to_arrays(done.private.read(np.array([done.clients[client]])))
        if not arrays:
            return
        encoded = save({name: np.ascontiguousarray(array) for name, array in arrays.items()})
        digest = content_digest(run.id, client, encoded)
        if digest != before:
            query = "INSERT OR REPLACE INTO private VALUES (?, ?, ?, ?, ?)"
            self.store.connection.execute(query, (run.id, client, done.round, digest, encoded))

    def _newest_private(self, run: str, latest: int) -> dict[int, tuple[int, bytes]]:
        """Return the newest round up to one that changed each client's private parameters, and the
        digest of these."""
        kept = self.store.connection.sealed("private", run)  # in the order of rounds
        return {client: (number, digest) for client, number, digest in kept if number <= latest}

    def _charge(self, run: NodeRun, done: FinishedRound) -> None:
        """Charge the users who took part; a round is charged once."""
        users = [user for user, index in run.members.items() if run.clients[index] in done.clients]
        self.store.connection.executemany(
            "INSERT INTO ledger (run, user, uploads, round) VALUES (?, ?, 1, ?) ON CONFLICT "
            "(run, user) DO UPDATE SET uploads = uploads + (round < excluded.round), "
            "round = excluded.round",
            ((run.id, user, done.round) for user in users),
        )
