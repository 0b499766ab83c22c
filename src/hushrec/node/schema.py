"""The node's file: its tables, one version after the other, and how it is opened.

A fresh file goes through all versions, so that there is one way only to come to the newest.
"""

from __future__ import annotations

import os
import sqlite3
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hushrec.disk import remove
from hushrec.errors import DiskError, RunError

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
