"""The node's file: its tables, one version after the other, and how it is opened.

A fresh file goes through all versions, so that there is one way only to come to the newest.

`NodeStore`: all that a node keeps, in one file that nobody else may read.

Its users' interactions, the agreement it trains by, the key of its noise; `node.runs` keeps the
private parameters and the ledger of its runs in the same file. Items that the catalogue does not
know are kept, counted, and take no part in anything.
"""

from __future__ import annotations

import json
import os
import sqlite3
import stat
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from hushrec.data.interactions import (
    Categorical,
    Column,
    Features,
    Interactions,
    MultiCategorical,
    Numeric,
)
from hushrec.errors import DataError, DiskError, RunError
from hushrec.federation.contract import Agreement
from hushrec.io.files import remove
from hushrec.streams import new_key

APPLICATION = 0x48555348
"""Written into the file: whose it is."""
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
        id INTEGER PRIMARY KEY AUTOINCREMENT, -- never used again, so that a run can say up to which
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
        terms TEXT,                           -- digest of what the server said of everybody
        round INTEGER NOT NULL DEFAULT 0,     -- last one done
        selected INTEGER NOT NULL DEFAULT 0,  -- round whose private parameters are to be kept
        request TEXT,                         -- digest of what the last round was asked with
        reply BLOB,                           -- and what was answered
        version INTEGER NOT NULL DEFAULT 0    -- counts the changes
    ) WITHOUT ROWID;
    CREATE TABLE members (
        run TEXT NOT NULL REFERENCES runs ON DELETE CASCADE,
        place INTEGER NOT NULL,               -- of the user in what the node told the server
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
    # What is recommended with, once a run is finished.
    """
    ALTER TABLE runs ADD COLUMN model BLOB;
    """,
    # Secure sums: the one that a run is in, and the round whose vector has left.
    """
    ALTER TABLE runs ADD COLUMN masked INTEGER NOT NULL DEFAULT 0;
    ALTER TABLE runs ADD COLUMN masked_request TEXT;
    ALTER TABLE ledger ADD COLUMN round INTEGER NOT NULL DEFAULT 0;
    CREATE TABLE sums (
        run TEXT PRIMARY KEY REFERENCES runs ON DELETE CASCADE,
        number INTEGER NOT NULL,              -- of the last sum that was begun
        round INTEGER NOT NULL,               -- that is summed, or 0 for a look
        layout TEXT NOT NULL,
        about TEXT NOT NULL,                  -- what everybody was asked
        asked BLOB,                           -- what this node was, until its vector leaves
        state BLOB NOT NULL,                  -- secrets
        request TEXT NOT NULL,                -- digest of the last step
        reply BLOB                            -- and what was answered
    ) WITHOUT ROWID;
    """,
)


@contextmanager
def creating(path: Path) -> Iterator[sqlite3.Connection]:
    """Make a new file that nobody else may read, with all tables; it goes if what follows fails."""
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
    except FileExistsError:
        raise RunError(f"{path} exists already: choose another place for the node") from None
    except OSError as error:
        raise DiskError(f"cannot write {path}: {error.strerror}") from None
    connection = None
    try:
        connection = _connect(path)
        connection.execute(f"PRAGMA application_id = {APPLICATION}")
        migrate(connection, path)
        yield connection
    except BaseException as error:
        if connection is not None:
            connection.close()
        for end in ("", "-wal", "-shm", "-journal"):
            remove(path.with_name(f"{path.name}{end}"))
        if isinstance(error, sqlite3.Error):
            raise DiskError(f"cannot write {path}: {error}") from None
        raise


def open_existing(path: Path) -> sqlite3.Connection:
    """Open a node's file, bring it up to date, and refuse what is none or open to others."""
    if not path.is_file():
        raise RunError(f"{path}: no such node; make one with 'hushrec node init'")
    if stat.S_IMODE(path.stat().st_mode) & 0o077:
        raise RunError(
            f"{path} can be read by others, and holds people's data and keys: use 'chmod 600 "
            f"{path}'"
        )
    connection = _connect(path)
    try:
        if connection.execute("PRAGMA application_id").fetchone()[0] != APPLICATION:
            raise RunError(f"{path} is no node of hushrec")
        migrate(connection, path)
    except sqlite3.DatabaseError as error:
        raise RunError(f"{path} is no node of hushrec, or damaged: {error}") from None
    return connection


def migrate(connection: sqlite3.Connection, path: Path) -> None:
    """Bring the tables to the newest version, each step whole or not at all."""
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
    """Do everything inside, or nothing."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
    except BaseException:
        if connection.in_transaction:  # a full disk has ended it already
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


Row = tuple[Any, ...]
SHARED_STILL_HOLDS = (
    "What was sent before is part of the shared model, and cannot be taken out of it: uploads were "
    "summed with everybody's. Under a privacy guarantee the sum hides that they were there; "
    "without one, only training the model anew removes them."
)


@dataclass(frozen=True)
class Taken:
    """What came in."""

    rows: int
    users: int
    """Users that were not known before."""
    unknown_items: int
    """Rows whose item the catalogue does not know."""


@dataclass(frozen=True)
class Forgotten:
    """What is gone, and what is not."""

    interactions: int
    private_parameters: int
    uploads: int
    """Messages of the user's that were part of a sum that left the node."""
    others: int
    """Other users whose silo's private parameters went too, for they are one with the user's."""
    still_held: str


class NodeStore:
    """One node's file."""

    def __init__(self, path: Path, connection: sqlite3.Connection) -> None:
        self.path = path
        self.connection = connection

    @classmethod
    def create(cls, path: Path, name: str, agreement: Agreement) -> NodeStore:
        """Make a node that is to train by this agreement."""
        if not name or len(name) > 100 or not name.isprintable():
            raise RunError(f"{name!r} cannot be the name of a node: use up to 100 characters")
        with creating(path) as connection:
            store = cls(path, connection)
            with store.changing():
                facts = {"name": name, "agreement": agreement.to_bytes(), "noise_key": new_key()}
                connection.executemany("INSERT INTO facts VALUES (?, ?)", facts.items())
        return store

    @classmethod
    def open(cls, path: Path) -> NodeStore:
        """Open a node."""
        return cls(path, open_existing(path))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.connection.close()

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Change the file by everything inside, or by nothing; a full disk is a sentence."""
        try:
            with transaction(self.connection):
                yield
        except sqlite3.OperationalError as error:
            raise RunError(f"cannot write {self.path}: {error}; nothing was changed") from None

    # ------------------------------------------------------------ what the node is

    @property
    def name(self) -> str:
        """What the node is called."""
        return str(self.fact("name"))

    @cached_property
    def agreement(self) -> Agreement:
        """What it trains by."""
        return Agreement.from_bytes(self.fact("agreement"), f"the agreement in {self.path}")

    @property
    def noise_key(self) -> str:
        """The root of the node's secret streams; it never leaves it."""
        return str(self.fact("noise_key"))

    def fact(self, name: str) -> Any:
        """Read something the node knows of itself; None if it does not."""
        return self.one("SELECT value FROM facts WHERE name = ?", (name,))

    def keep_fact(self, name: str, value: bytes | str) -> None:
        """Remember something; part of what is being changed."""
        self.connection.execute("INSERT OR REPLACE INTO facts VALUES (?, ?)", (name, value))

    def one(self, query: str, values: Iterable[Any] = ()) -> Any:
        """Return the first value of the first row; None if there is none."""
        row = self.connection.execute(query, tuple(values)).fetchone()
        return None if row is None else row[0]

    def rows(self, query: str, values: Iterable[Any] = ()) -> list[Row]:
        """Return all rows."""
        return self.connection.execute(query, tuple(values)).fetchall()

    # ------------------------------------------------------------ interactions

    def take_in(self, data: Interactions, silos: NDArray[np.int32] | None = None) -> Taken:
        """Add interactions, whose items are known by their ids; ``silos`` are the users' own."""
        self._expect_times(data.has_time)
        later = 0 if data.has_time else self._after_the_last()
        known = np.isin(data.items, self.agreement.catalogue.items)
        features = _said(data.user_features, data.n_users)
        contexts = _said(data.context, len(data))
        touched = np.unique(data.user)
        with self.changing():
            before = self.one("SELECT COUNT(*) FROM users")
            people = [
                (str(data.users[k]), features[k], 0 if silos is None else int(silos[k]))
                for k in touched
            ]
            self.connection.executemany(
                "INSERT INTO users (name, features, silo) VALUES (?, ?, ?) ON CONFLICT (name) DO "
                "UPDATE SET features = excluded.features WHERE excluded.features != '{}'",
                people,
            )
            number: dict[str, int] = dict(self.rows("SELECT name, id FROM users"))
            columns = (data.user, data.item, data.value, data.time, contexts)
            self.connection.executemany(
                "INSERT INTO interactions (user, item, value, time, context) "
                "VALUES (?, ?, ?, ?, ?)",
                (
                    (
                        number[str(data.users[user])],
                        str(data.items[item]),
                        float(value),
                        int(when) + later,
                        context,
                    )
                    for user, item, value, when, context in zip(*columns, strict=True)
                ),
            )
            users = self.one("SELECT COUNT(*) FROM users") - before
            self.keep_fact("has_time", str(int(data.has_time)))
        return Taken(len(data), users, int((~known[data.item]).sum()))

    def add(self, user: str, item: str, value: float, when: int | None) -> Taken:
        """Add one interaction; its time is now unless given."""
        has_time = self.fact("has_time") in (None, "1")
        if not has_time and when is not None:
            raise DataError(
                f"{self.path}: its interactions have no times, the order is all they have: leave "
                "--time out"
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
        return self.take_in(one)

    def forget(self, user: str) -> Forgotten:
        """Remove a user: data, private parameters, ledger, and what was answered from them.

        The bytes are overwritten, and the file is written anew without them.
        """
        found = self.one("SELECT id FROM users WHERE name = ?", (user,))
        if found is None:
            self._write_anew()
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
            self.connection.execute(
                "UPDATE runs SET reply = NULL, version = version + 1 WHERE id IN "
                "(SELECT run FROM members WHERE user = ?)",
                (found,),
            )
            self.connection.execute(
                "UPDATE sums SET reply = NULL WHERE run IN (SELECT run FROM members WHERE "
                "user = ?)",
                (found,),
            )
            self.connection.execute("DELETE FROM users WHERE id = ?", (found,))
        self._write_anew()
        return Forgotten(rows, gone, uploads or 0, others, SHARED_STILL_HOLDS)

    def interactions(self, members: Mapping[int, int], upto: int) -> Interactions | None:
        """Return the interactions of users (by number: where they are wanted), in the order they
        came; None without any whose item is known."""
        catalogue = self.agreement.catalogue
        place = {str(item): k for k, item in enumerate(catalogue.items)}
        query = (
            "SELECT user, item, value, time, context FROM interactions WHERE id <= ? ORDER BY id"
        )
        kept = [row for row in self.rows(query, (upto,)) if row[0] in members and row[1] in place]
        if not kept:
            return None
        user, item, value, when, context = zip(*kept, strict=True)
        said: dict[int, str] = dict(self.rows("SELECT id, features FROM users"))
        order = sorted(members, key=lambda number: members[number])
        names: dict[int, str] = dict(self.rows("SELECT id, name FROM users"))
        return Interactions(
            name=self.name,
            user=np.array([members[each] for each in user], np.int32),
            item=np.array([place[each] for each in item], np.int32),
            value=np.array(value, np.float32),
            time=np.array(when, np.int64),
            users=np.array([names[number] for number in order], np.str_),
            items=catalogue.items,
            titles=catalogue.titles,
            user_features=_told(catalogue.user_features, [said[number] for number in order]),
            item_features=catalogue.item_features,
            context=_told(catalogue.context, context),
            has_time=self.fact("has_time") != "0",
        )

    def number_of(self, user: str) -> int | None:
        """Return a user's number in this file; None if there is no such user."""
        found = self.one("SELECT id FROM users WHERE name = ?", (user,))
        return None if found is None else int(found)

    def latest(self) -> int:
        """Return the number of the last interaction that came in."""
        return int(self.one("SELECT COALESCE(MAX(id), 0) FROM interactions"))

    def items_of(self, user: int) -> list[str]:
        """Return what a user touched, oldest first."""
        query = "SELECT item FROM interactions WHERE user = ? ORDER BY time, id"
        return [item for (item,) in self.rows(query, (user,))]

    def counts(self) -> dict[str, int]:
        """Count what is in the store."""
        items = self.rows("SELECT item, COUNT(*) FROM interactions GROUP BY item")
        known = set(self.agreement.catalogue.items.tolist())
        return {
            "users": self.one("SELECT COUNT(*) FROM users"),
            "interactions": sum(count for _, count in items),
            "unknown_items": sum(item not in known for item, _ in items),
            "interactions_with_unknown_items": sum(c for item, c in items if item not in known),
            "file_bytes": self.path.stat().st_size,
        }

    def _expect_times(self, has_time: bool) -> None:
        before = self.fact("has_time")
        if before is not None and before != str(int(has_time)):
            have, lack = ("no times", "some") if before == "0" else ("times", "none")
            raise DataError(
                f"{self.path}: the interactions in it have {have} and the new ones have {lack}, so "
                "nobody could tell which came first"
            )

    def _after_the_last(self) -> int:
        return int(self.one("SELECT COALESCE(MAX(time) + 1, 0) FROM interactions"))

    def _write_anew(self) -> None:
        try:
            self.connection.execute("VACUUM")
            self.connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        except sqlite3.OperationalError as error:
            raise RunError(
                f"{self.path} could not be written anew ({error}), so it may still hold bytes of "
                "who was forgotten: stop what else uses it and run the command again"
            ) from None


# ------------------------------------------------------------ features as JSON


def _said(features: Features, count: int) -> list[str]:
    """Write what is known of each row; what is unknown is left out."""
    rows: list[dict[str, Any]] = [{} for _ in range(count)]
    for name, column in features.items():
        for row, value in zip(rows, _entries(column), strict=True):
            if value is not None:
                row[name] = value
    return [json.dumps(row) for row in rows]


def _entries(column: Column) -> list[Any]:
    if isinstance(column, Categorical):
        return [None if code < 0 else str(column.names[code]) for code in column.codes]
    if isinstance(column, MultiCategorical):
        return [column.names[flags].tolist() for flags in column.flags]
    return [None if np.isnan(value) else float(value) for value in column.values]


def _told(vocabulary: Features, rows: Iterable[str]) -> dict[str, Column]:
    """Read rows back, as columns of the catalogue's categories; others are unknown."""
    said = [json.loads(row) for row in rows]
    return {
        name: _column(column, [row.get(name) for row in said])
        for name, column in vocabulary.items()
    }


def _column(kind: Column, entries: list[Any]) -> Column:
    if isinstance(kind, Numeric):
        values = [np.nan if entry is None else entry for entry in entries]
        return replace(kind, values=np.array(values, np.float32))
    place = {str(name): code for code, name in enumerate(kind.names)}
    if isinstance(kind, Categorical):
        codes = [-1 if entry is None else place.get(entry, -1) for entry in entries]
        return replace(kind, codes=np.array(codes, np.int32))
    flags = np.zeros((len(entries), len(kind.names)), np.bool_)
    for row, entry in enumerate(entries):
        flags[row, [place[name] for name in entry or () if name in place]] = True
    return replace(kind, flags=flags)
