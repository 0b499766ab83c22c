"""The node's database: one SQLite file that only its owner may read.

The file holds the users' interactions, the contract that the node trains by and the key of its
noise; `node.runs` keeps the private parameters and the ledger of its runs in it. Interactions with
items outside of the catalogue are stored and counted, and are not used. A new file goes through all
migrations, so that there is one way only to the newest schema.
"""

from __future__ import annotations

import os
import sqlite3
import stat
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from hushrec.data.features import columns_from_json, rows_to_json
from hushrec.data.interactions import Interactions
from hushrec.errors import DataError, DiskError, RunError
from hushrec.federation.contract import Contract
from hushrec.io.files import remove
from hushrec.streams import new_key

APPLICATION = 0x48555348
"""SQLite application id of the file."""
WAIT_SECONDS = 30.0
"""How long to wait for another process that is writing."""

MIGRATIONS = (
    """
    CREATE TABLE facts (name TEXT PRIMARY KEY, value BLOB NOT NULL) WITHOUT ROWID;
    CREATE TABLE users (
        id INTEGER PRIMARY KEY,
        name TEXT NOT NULL UNIQUE,
        features TEXT NOT NULL DEFAULT '{}',  -- JSON, by name of the feature
        silo INTEGER NOT NULL DEFAULT 0       -- which client holds the user, if any does
    );
    CREATE TABLE interactions (
        id INTEGER PRIMARY KEY AUTOINCREMENT, -- never used again: a run takes part up to one
        user INTEGER NOT NULL REFERENCES users ON DELETE CASCADE,
        item TEXT NOT NULL,
        value REAL NOT NULL,
        time INTEGER NOT NULL,
        context TEXT NOT NULL DEFAULT '{}'
    );
    CREATE INDEX interactions_of ON interactions (user);
    CREATE TABLE runs (
        id TEXT PRIMARY KEY,
        number INTEGER NOT NULL,              -- 1 is the first run of this node
        upto INTEGER NOT NULL,                -- later interactions wait for the next run
        terms TEXT,                           -- digest of the assignment
        round INTEGER NOT NULL DEFAULT 0,     -- last one done
        selected INTEGER NOT NULL DEFAULT 0,  -- round whose private parameters are to be kept
        request TEXT,                         -- digest of the last round's request
        reply BLOB,                           -- and its answer
        version INTEGER NOT NULL DEFAULT 0    -- counts the changes
    ) WITHOUT ROWID;
    CREATE TABLE members (
        run TEXT NOT NULL REFERENCES runs ON DELETE CASCADE,
        place INTEGER NOT NULL,               -- index of the user in the node's enrolment
        user INTEGER NOT NULL REFERENCES users ON DELETE CASCADE,
        client INTEGER NOT NULL,
        PRIMARY KEY (run, place)
    ) WITHOUT ROWID;
    CREATE TABLE private (
        run TEXT NOT NULL REFERENCES runs ON DELETE CASCADE,
        client INTEGER NOT NULL,
        round INTEGER NOT NULL,
        arrays BLOB NOT NULL,
        PRIMARY KEY (run, client, round)
    );
    CREATE TABLE ledger (
        run TEXT NOT NULL,
        user INTEGER NOT NULL REFERENCES users ON DELETE CASCADE,
        uploads INTEGER NOT NULL,
        PRIMARY KEY (run, user)
    ) WITHOUT ROWID;
    """,
    # Parameters that recommend, once a run is finished.
    "ALTER TABLE runs ADD COLUMN model BLOB",
    # Secure sums: the pending sum of a run, and the round whose vector was sent.
    """
    ALTER TABLE runs ADD COLUMN masked INTEGER NOT NULL DEFAULT 0;
    ALTER TABLE runs ADD COLUMN masked_request TEXT;
    ALTER TABLE ledger ADD COLUMN round INTEGER NOT NULL DEFAULT 0;
    CREATE TABLE sums (
        run TEXT PRIMARY KEY REFERENCES runs ON DELETE CASCADE,
        number INTEGER NOT NULL,              -- of the last sum that was begun
        round INTEGER NOT NULL,               -- that is summed, or 0 for an evaluation
        layout TEXT NOT NULL,
        about TEXT NOT NULL,                  -- description of the request
        asked BLOB,                           -- the request, until the vector is sent
        state BLOB NOT NULL,                  -- secrets
        request TEXT NOT NULL,                -- digest of the last request
        reply BLOB                            -- and its answer
    ) WITHOUT ROWID;
    """,
    # Secure sums with one set-up for many, and vectors in pieces.
    """
    DROP TABLE sums;
    CREATE TABLE setups (
        run TEXT PRIMARY KEY REFERENCES runs ON DELETE CASCADE,
        first INTEGER NOT NULL,               -- number of its first sum
        state BLOB NOT NULL,                  -- secrets
        request TEXT NOT NULL,                -- digest of the last request
        reply BLOB NOT NULL                   -- and its answer
    ) WITHOUT ROWID;
    CREATE TABLE sums (
        run TEXT PRIMARY KEY REFERENCES runs ON DELETE CASCADE,
        number INTEGER NOT NULL,              -- of the last sum that was begun
        first INTEGER NOT NULL,               -- number of the first sum of its set-up
        round INTEGER NOT NULL,               -- that is summed, or 0 for an evaluation
        layout TEXT NOT NULL,
        about TEXT NOT NULL,                  -- description of the request
        state BLOB NOT NULL,                  -- secrets
        masked TEXT NOT NULL,                 -- digest of the request for the vector
        request TEXT NOT NULL,                -- digest of the last request
        reply BLOB                            -- and its answer, where it is no vector
    ) WITHOUT ROWID;
    CREATE TABLE pieces (
        run TEXT NOT NULL REFERENCES runs ON DELETE CASCADE,
        number INTEGER NOT NULL,
        words BLOB NOT NULL,                  -- of the unmasked vector, compressed
        PRIMARY KEY (run, number)
    );
    """,
    # A foreign key to a run reads the run's row. Answer and model can be 100 MB, so they are in
    # tables of their own, which only their reader touches.
    """
    CREATE TABLE replies (run TEXT PRIMARY KEY REFERENCES runs ON DELETE CASCADE, reply BLOB);
    CREATE TABLE models (run TEXT PRIMARY KEY REFERENCES runs ON DELETE CASCADE, model BLOB);
    INSERT INTO replies SELECT id, reply FROM runs WHERE reply IS NOT NULL;
    INSERT INTO models SELECT id, model FROM runs WHERE model IS NOT NULL;
    ALTER TABLE runs DROP COLUMN reply;
    ALTER TABLE runs DROP COLUMN model;
    """,
)
READ_ROWS = 2**16
"""Interactions that are read at a time."""


def migrate(connection: sqlite3.Connection, path: Path) -> None:
    """Bring the tables to the newest version, each migration in a transaction."""
    found = connection.execute("PRAGMA user_version").fetchone()[0]
    if found > len(MIGRATIONS):
        raise RunError(
            f"{path} was written by a newer hushrec (version {found} of its tables, this one knows "
            f"{len(MIGRATIONS)}): upgrade hushrec"
        )
    for number in range(found, len(MIGRATIONS)):
        with transaction(connection):
            for statement in MIGRATIONS[number].split(";"):
                connection.execute(statement)
            connection.execute(f"PRAGMA user_version = {number + 1}")


@contextmanager
def transaction(connection: sqlite3.Connection) -> Iterator[None]:
    """Run a block as one transaction."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
    except BaseException:
        if connection.in_transaction:  # a full disk ends it by itself
            connection.execute("ROLLBACK")
        raise
    connection.execute("COMMIT")


def _connect(path: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(path, timeout=WAIT_SECONDS, isolation_level=None)
    try:
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = FULL")
        connection.execute("PRAGMA foreign_keys = ON")
        connection.execute("PRAGMA secure_delete = ON")
    except sqlite3.DatabaseError as error:
        connection.close()
        if isinstance(error, sqlite3.OperationalError):  # no room, no right, or no patience
            raise DiskError(f"cannot write {path}: {error}") from None
        raise RunError(f"{path} is no node of hushrec, or damaged: {error}") from None
    return connection


SHARED_STILL_HOLDS = (
    "What was sent before is part of the shared model, and cannot be taken out of it: uploads were "
    "summed with everybody's. Under a privacy guarantee the sum hides that they were there; "
    "without one, only training the model anew removes them."
)


@dataclass(frozen=True)
class ImportCounts:
    """Counts of an import."""

    rows: int
    users: int
    """New users."""
    unknown_items: int
    """Rows whose item is not in the catalogue."""


@dataclass(frozen=True)
class DeletionReport:
    """What the deletion of a user removed, and what it cannot remove."""

    interactions: int
    private_parameters: int
    uploads: int
    """The user's uploads that were part of a sum that left the node."""
    others: int
    """Other users of the silo, whose private parameters were removed as they are the same."""
    still_held: str


class NodeDatabase:
    """One node's file."""

    def __init__(self, path: Path, connection: sqlite3.Connection) -> None:
        self.path, self.connection = path, connection

    @classmethod
    def create(cls, path: Path, name: str, contract: Contract) -> NodeDatabase:
        """Create a node's database, which only its owner may read; an error leaves no file."""
        if not name or len(name) > 100 or not name.isprintable():
            raise RunError(f"{name!r} cannot be the name of a node: use up to 100 characters")
        try:
            os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
        except FileExistsError:
            raise RunError(f"{path} exists already: choose another path for the node") from None
        except OSError as error:
            raise DiskError(f"cannot write {path}: {error.strerror}") from None
        store = None
        try:
            store = cls(path, _connect(path))
            store.connection.execute(f"PRAGMA application_id = {APPLICATION}")
            migrate(store.connection, path)
            with store.changing():
                facts = {"name": name, "contract": contract.to_bytes(), "noise_key": new_key()}
                store.connection.executemany("INSERT INTO facts VALUES (?, ?)", facts.items())
            return store
        except BaseException as error:
            if store is not None:
                store.connection.close()
            for end in ("", "-wal", "-shm", "-journal"):
                remove(path.with_name(f"{path.name}{end}"))
            if isinstance(error, sqlite3.Error):
                raise DiskError(f"cannot write {path}: {error}") from None
            raise

    @classmethod
    def open(cls, path: Path) -> NodeDatabase:
        """Open a node's file and migrate it; refuse other files, and files that others may read."""
        if not path.is_file():
            raise RunError(f"{path}: no such node; make one with 'hushrec node init'")
        if stat.S_IMODE(path.stat().st_mode) & 0o077:
            raise RunError(
                f"{path} can be read by others, and holds data and keys: use 'chmod 600 {path}'"
            )
        connection = _connect(path)
        try:
            if connection.execute("PRAGMA application_id").fetchone()[0] != APPLICATION:
                raise RunError(f"{path} is no node of hushrec")
            migrate(connection, path)
        except sqlite3.DatabaseError as error:
            raise RunError(f"{path} is no node of hushrec, or damaged: {error}") from None
        return cls(path, connection)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.connection.close()

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Run a block as one transaction; a full disk raises a `RunError`."""
        try:
            with transaction(self.connection):
                yield
        except sqlite3.OperationalError as error:
            raise RunError(f"cannot write {self.path}: {error}; nothing was changed") from None

    # ------------------------------------------------------------ the node

    @property
    def name(self) -> str:
        """Name of the node."""
        return str(self.fact("name"))

    @cached_property
    def contract(self) -> Contract:
        """The contract that the node trains by."""
        return Contract.from_bytes(self.fact("contract"), f"the contract in {self.path}")

    @property
    def noise_key(self) -> str:
        """The root of the node's secret streams; it never leaves it."""
        return str(self.fact("noise_key"))

    def fact(self, name: str) -> Any:
        """Return a stored fact of the node; None if there is none."""
        return self.one("SELECT value FROM facts WHERE name = ?", (name,))

    def keep_fact(self, name: str, value: bytes | str) -> None:
        """Store a fact; part of the open transaction."""
        self.connection.execute("INSERT OR REPLACE INTO facts VALUES (?, ?)", (name, value))

    def one(self, query: str, values: Iterable[Any] = ()) -> Any:
        """Return the first value of the first row; None if there is none."""
        row = self.connection.execute(query, tuple(values)).fetchone()
        return None if row is None else row[0]

    def rows(self, query: str, values: Iterable[Any] = ()) -> list[tuple[Any, ...]]:
        """Return all rows."""
        return self.connection.execute(query, tuple(values)).fetchall()

    # ------------------------------------------------------------ interactions

    def add_interactions(
        self, data: Interactions, silos: NDArray[np.int32] | None = None
    ) -> ImportCounts:
        """Add interactions; ``silos`` are those of the users."""
        before = self.fact("has_time")
        if before is not None and before != str(int(data.has_time)):
            have, lack = ("no times", "some") if before == "0" else ("times", "none")
            raise DataError(
                f"{self.path}: the interactions in it have {have} and the new ones have {lack}, so "
                "nobody could tell which came first"
            )
        # The order of arrival stands for times that there are none of.
        latest = "SELECT COALESCE(MAX(time) + 1, 0) FROM interactions"
        shift = 0 if data.has_time else int(self.one(latest))
        known = np.isin(data.items, self.contract.catalogue.items)
        features = rows_to_json(data.user_features, data.n_users)
        contexts = rows_to_json(data.context, len(data))
        people = [
            (str(data.users[k]), features[k], 0 if silos is None else int(silos[k]))
            for k in np.unique(data.user)
        ]
        with self.changing():
            known_users = self.one("SELECT COUNT(*) FROM users")
            self.connection.executemany(
                "INSERT INTO users (name, features, silo) VALUES (?, ?, ?) ON CONFLICT (name) DO "
                "UPDATE SET features = excluded.features WHERE excluded.features != '{}'",
                people,
            )
            number: dict[str, int] = dict(self.rows("SELECT name, id FROM users"))
            ids = [number.get(name) for name in data.users.tolist()]
            items = data.items.tolist()
            rows = zip(data.user, data.item, data.value, data.time, contexts, strict=True)
            self.connection.executemany(
                "INSERT INTO interactions (user, item, value, time, context) "
                "VALUES (?, ?, ?, ?, ?)",
                (
                    (ids[user], items[item], float(value), int(when) + shift, context)
                    for user, item, value, when, context in rows
                ),
            )
            self.keep_fact("has_time", str(int(data.has_time)))
        new_users = len(number) - known_users
        return ImportCounts(len(data), new_users, int((~known[data.item]).sum()))

    def add(self, user: str, item: str, value: float, when: int | None) -> ImportCounts:
        """Add one interaction; its time is now unless given."""
        has_time = self.fact("has_time") in (None, "1")
        if not has_time and when is not None:
            raise DataError(
                f"{self.path}: its interactions have no times, only an order: leave --time out"
            )
        stamp = when if when is not None else int(time.time())
        one = Interactions(
            name=self.name,
            user=np.zeros(1, np.int32),
            item=np.zeros(1, np.int32),
            value=np.array([value], np.float32),
            time=np.array([stamp if has_time else 0], np.int64),
            users=np.array([user]),
            items=np.array([item]),
            has_time=has_time,
        )
        return self.add_interactions(one)

    def forget(self, user: str) -> DeletionReport:
        """Delete a user: interactions, private parameters, ledger, and the stored answers. The
        bytes are overwritten, and the file is rewritten without them."""
        found = self.number_of(user)
        if found is None:
            self._rewrite()
            raise DataError(f"{self.path}: no user '{user}'")
        with self.changing():
            mine = "SELECT run, client FROM members WHERE user = ?"
            rows = self.one("SELECT COUNT(*) FROM interactions WHERE user = ?", (found,))
            uploads = self.one("SELECT SUM(uploads) FROM ledger WHERE user = ?", (found,))
            others = self.one(
                f"SELECT COUNT(DISTINCT user) FROM members WHERE (run, client) IN ({mine}) "  # noqa: S608
                "AND user != ?",
                (found, found),
            )
            gone = self.connection.execute(
                f"DELETE FROM private WHERE (run, client) IN ({mine})",  # noqa: S608 - ours
                (found,),
            ).rowcount
            runs = "(SELECT run FROM members WHERE user = ?)"
            for statement in (
                f"DELETE FROM replies WHERE run IN {runs}",  # noqa: S608 - ours
                f"UPDATE runs SET version = version + 1 WHERE id IN {runs}",  # noqa: S608 - ours
                f"UPDATE sums SET reply = NULL WHERE run IN {runs}",  # noqa: S608 - ours
                f"DELETE FROM pieces WHERE run IN {runs}",  # noqa: S608 - ours
                "DELETE FROM users WHERE id = ?",
            ):
                self.connection.execute(statement, (found,))
        self._rewrite()
        return DeletionReport(rows, gone, uploads or 0, others, SHARED_STILL_HOLDS)

    def interactions(self, members: Mapping[int, int], upto: int) -> Interactions | None:
        """Return the interactions of users in the order of arrival; None if no item is known.

        ``members`` is each user's index in the result, by the user's number in the file.
        """
        catalogue = self.contract.catalogue
        index = {str(item): k for k, item in enumerate(catalogue.items)}
        wanted = "user, item, value, time" + (", context" if catalogue.context else "")
        query = f"SELECT {wanted} FROM interactions WHERE id <= ? ORDER BY id"  # noqa: S608 - ours
        cursor, context = self.connection.execute(query, (upto,)), list[str]()
        parts: list[list[NDArray[Any]]] = []
        types = np.int32, np.int32, np.float32, np.int64
        while some := cursor.fetchmany(READ_ROWS):  # numbers in arrays take little memory
            kept = [row for row in some if row[0] in members and row[1] in index]
            user, item, value, when, *more = zip(*kept, strict=True) if kept else ((),) * 4
            numbers = map(members.__getitem__, user), map(index.__getitem__, item), value, when
            parts.append([np.array([*n], t) for n, t in zip(numbers, types, strict=True)])
            for each in more:
                context.extend(each)
        if not sum(len(part[0]) for part in parts):
            return None
        columns = [np.concatenate(each) for each in zip(*parts, strict=True)]
        people = {row[0]: row[1:] for row in self.rows("SELECT id, name, features FROM users")}
        order = sorted(members, key=members.__getitem__)
        names, features = zip(*(people[number] for number in order), strict=True)
        return Interactions(
            name=self.name,
            user=columns[0],
            item=columns[1],
            value=columns[2],
            time=columns[3],
            users=np.array(names, np.str_),
            items=catalogue.items,
            titles=catalogue.titles,
            user_features=columns_from_json(catalogue.user_features, features),
            item_features=catalogue.item_features,
            context=columns_from_json(catalogue.context, context),
            has_time=self.fact("has_time") != "0",
        )

    def number_of(self, user: str) -> int | None:
        """Return a user's number in this file; None if there is no such user."""
        found = self.one("SELECT id FROM users WHERE name = ?", (user,))
        return None if found is None else int(found)

    def latest(self) -> int:
        """Return the number of the last interaction."""
        return int(self.one("SELECT COALESCE(MAX(id), 0) FROM interactions"))

    def items_of(self, user: int) -> list[str]:
        """Return the items of a user's interactions, oldest first."""
        query = "SELECT item FROM interactions WHERE user = ? ORDER BY time, id"
        return [item for (item,) in self.rows(query, (user,))]

    def counts(self) -> dict[str, int]:
        """Count users, interactions and items."""
        items = self.rows("SELECT item, COUNT(*) FROM interactions GROUP BY item")
        known = set(self.contract.catalogue.items.tolist())
        return {
            "users": self.one("SELECT COUNT(*) FROM users"),
            "interactions": sum(count for _, count in items),
            "unknown_items": sum(item not in known for item, _ in items),
            "interactions_with_unknown_items": sum(c for item, c in items if item not in known),
            "file_bytes": self.path.stat().st_size,
        }

    def _rewrite(self) -> None:
        try:
            self.connection.execute("VACUUM")
            self.connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        except sqlite3.OperationalError as error:
            raise RunError(
                f"{self.path} could not be rewritten ({error}), so it may still hold bytes of "
                "who was forgotten: stop what else uses it and run the command again"
            ) from None
