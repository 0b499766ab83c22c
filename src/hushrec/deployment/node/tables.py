"""The tables of a node's file: their schema, their digests, and what SQLite's errors mean.

SQLite notices damage of its own structure, but neither a changed value nor a lost row. So every
group of rows that is read together has a seal: the sum, modulo 2^64, of a digest of each row. A
row's digest covers its table, its key and all columns, so a row that was changed, lost, copied or
swapped with another one changes the sum. Triggers keep the seals in step with the rows within the
same transaction, and a seal is only ever changed by the digests of changed rows: writing beside a
damaged row does not hide it. Large values have a digest in a column of their own, which the row's
digest covers. Interactions are summed for each user, in the column ``users.history``.

Digests have no key: they find accidents (a failing disk, an interrupted copy), and protect from
nobody who may write the file.
"""

from __future__ import annotations

import hashlib
import sqlite3
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from hushrec.deployment.node import schema
from hushrec.errors import DiskError, RunError, cut, listed

APPLICATION = 0x48555348
"""SQLite application id of a node's file."""
BACKUP = 0x48555342
"""SQLite application id of a node's backup, which is no node until it is restored."""
WAIT_SECONDS = 30.0
"""How long to wait for another process that is writing."""
LARGEST_LOG = 16 * 2**20
"""Bytes that SQLite's write-ahead log keeps on the disk once its content is in the file."""
READ_ROWS = 2**16
"""Interactions that are read at a time."""

COLUMNS: dict[str, tuple[str, ...]] = {
    "facts": ("name", "value"),
    "users": ("id", "name", "features", "silo", "history"),
    "runs": (
        *("id", "number", "upto", "terms", "round", "selected", "request", "version"),
        *("masked", "masked_request"),
    ),
    "closed": ("run",),
    "members": ("place", "user", "client"),
    "private": ("client", "round", "digest"),
    "replies": ("digest",),
    "models": ("digest",),
    "ledger": ("user", "uploads", "round"),
    "setups": ("first", "state", "request", "reply"),
    "sums": (
        *("number", "first", "round", "layout", "about", "state", "masked", "request", "reply"),
    ),
    "pieces": ("number", "digest"),
}
"""Columns of a table that its seals cover."""
WHOLE = ("facts", "users", "runs", "closed")
"""Tables with one seal; the others have one for each run."""
CONTENTS = {
    "private": ("run, client", "arrays"),
    "replies": ("run", "reply"),
    "models": ("run", "model"),
    "pieces": ("run, number", "words"),
}
"""Large values: what their digest covers beside them, and their column."""
EVENTS = {
    "INSERT": (("NEW", 1),),
    "DELETE": (("OLD", -1),),
    "UPDATE": (("OLD", -1), ("NEW", 1)),
}
"""What a change of a row takes from the seal and adds to it."""
SCHEMA = "SELECT type, name, tbl_name, sql FROM main.sqlite_master ORDER BY type, name"
FAILED_WRITE = {
    *(sqlite3.SQLITE_PERM, sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_NOMEM),
    *(sqlite3.SQLITE_READONLY, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_FULL, sqlite3.SQLITE_CANTOPEN),
    *(sqlite3.SQLITE_PROTOCOL, sqlite3.SQLITE_TOOBIG),
}
"""SQLite's codes for a disk without room or right, or a file that another process holds. Whatever
else SQLite reports of a file, which only hushrec writes, is damage."""


class DamagedError(RunError):
    """A node's file is damaged: what of it, and what to do."""

    def __init__(self, path: Path, what: str, instead: str = "") -> None:
        restore = f"restore its backup with 'hushrec node restore BACKUP {path} --overwrite'"
        anew = "or make the node again and import its users' data"
        super().__init__(f"{path} is damaged: {what}; {instead}{restore}, {anew}")
        self.what = what


def content_digest(*values: Any) -> bytes:
    """Return the digest of a large value, the last one, and of its key, the others."""
    *key, content = values
    found = hashlib.blake2b(repr(key).encode(), digest_size=16)
    found.update(content)
    return found.digest()


def row_digest(table: str, owner: str, values: Sequence[Any]) -> int:
    """Return the digest of a row as a number of 64 bits."""
    short = [content_digest(each) if isinstance(each, bytes) else each for each in values]
    return _number(repr((table, owner, short)))


def _number(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def signed(total: int) -> int:
    """Return a sum modulo 2^64 as SQLite stores it."""
    return (total + 2**63) % 2**64 - 2**63


class TextDigests(dict[str, int]):
    """Digests of texts; each is worked out once."""

    def __missing__(self, text: str) -> int:
        self[text] = found = _number(text)
        return found


@dataclass(frozen=True)
class InteractionRows:
    """Interactions, by columns."""

    user: NDArray[np.int64]
    id: NDArray[np.int64]
    item: Sequence[str]
    value: NDArray[np.float64]
    time: NDArray[np.int64]
    context: Sequence[str]

    COLUMNS: ClassVar[str] = "user, id, item, value, time, context"

    @classmethod
    def of(cls, rows: Sequence[Sequence[Any]]) -> InteractionRows:
        """Sort rows of the file into columns; raise if one is of another type."""
        user, number, item, value, when, context = ([row[k] for row in rows] for k in range(6))
        return cls(
            np.array(user, np.int64),
            np.array(number, np.int64),
            item,
            np.array(value, np.float64),
            np.array(when, np.int64),
            context,
        )

    def digests(self, texts: TextDigests) -> NDArray[np.uint64]:
        """Return the digest of each interaction."""
        items = np.fromiter(map(texts.__getitem__, self.item), np.uint64, len(self.item))
        contexts = np.fromiter(map(texts.__getitem__, self.context), np.uint64, len(self.context))
        found = np.full(len(self.user), 0x9E3779B97F4A7C15, np.uint64)
        for word in (self.user, self.id, items, self.value, self.time, contexts):
            # The finaliser of SplitMix64: another word gives another digest.
            found ^= word.view(np.uint64)
            for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
                found = (found ^ (found >> np.uint64(shift))) * np.uint64(factor)
            found ^= found >> np.uint64(31)
        return found

    def totals(self, texts: TextDigests) -> dict[int, int]:
        """Return each user's sum of digests, modulo 2^64."""
        order = np.argsort(self.user, kind="stable")
        users, starts = np.unique(self.user[order], return_index=True)
        sums = np.add.reduceat(self.digests(texts)[order], starts) if len(order) else starts
        return dict(zip(users.tolist(), sums.tolist(), strict=True))


@dataclass(frozen=True)
class PartCheck:
    """The check of one part of a node's file."""

    part: str
    rows: int
    """Of the structure, pages."""
    damage: str | None
    """What is damaged; None if nothing is."""


class _Cursor(sqlite3.Cursor):
    """A cursor whose errors are hushrec's."""

    connection: NodeConnection

    def execute(self, *arguments: Any) -> _Cursor:
        with self.connection.explained():
            super().execute(*arguments)
        return self

    def executemany(self, *arguments: Any) -> _Cursor:
        with self.connection.explained():
            super().executemany(*arguments)
        return self

    def fetchone(self) -> Any:
        with self.connection.explained():
            return super().fetchone()

    def fetchmany(self, size: int | None = 1) -> list[Any]:
        with self.connection.explained():
            return super().fetchmany(size)

    def fetchall(self) -> list[Any]:
        with self.connection.explained():
            return super().fetchall()


class NodeConnection(sqlite3.Connection):
    """A connection to a node's file: its errors are hushrec's, and its rows have seals."""

    path: Path
    pending: defaultdict[tuple[str, str], int]
    """What the open transaction adds to the seals, by table and owner."""

    @classmethod
    def connect(cls, path: Path) -> NodeConnection:
        """Connect to a file, which must exist."""
        connection = sqlite3.connect(path, timeout=WAIT_SECONDS, isolation_level=None, factory=cls)
        connection.path, connection.pending = path, defaultdict(int)
        try:
            connection.execute("PRAGMA cell_size_check = ON")
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute(f"PRAGMA journal_size_limit = {LARGEST_LOG}")
            connection.execute("PRAGMA synchronous = FULL")
            connection.execute("PRAGMA foreign_keys = ON")
            connection.execute("PRAGMA secure_delete = ON")
            connection.execute("PRAGMA recursive_triggers = ON")  # of rows that are replaced
        except RunError:
            connection.close()
            raise
        connection.create_function("content_digest", -1, content_digest, deterministic=True)
        connection.create_function("tally", -1, connection._tally)
        return connection

    def execute(self, *arguments: Any) -> _Cursor:
        """Execute one statement."""
        return _Cursor(self).execute(*arguments)

    def executemany(self, *arguments: Any) -> _Cursor:
        """Execute one statement for each of several rows."""
        return _Cursor(self).executemany(*arguments)

    @contextmanager
    def explained(self) -> Iterator[None]:
        """Raise SQLite's errors as a `DiskError`, or as a `DamagedError`."""
        try:
            yield
        except (sqlite3.ProgrammingError, sqlite3.InterfaceError):
            raise
        except sqlite3.DatabaseError as error:
            code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_CORRUPT) & 0xFF
            if code in FAILED_WRITE:
                raise DiskError(f"cannot write {self.path}: {error}; nothing was changed") from None
            if code == sqlite3.SQLITE_NOTADB:
                raise DamagedError(
                    self.path, "it is no node of hushrec, or its start is lost"
                ) from None
            raise DamagedError(self.path, f"SQLite reports '{error}'") from None

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Run a block as one transaction, with the seals of the rows that it changes."""
        self.execute("BEGIN IMMEDIATE")
        try:
            yield
            self._seal()
            self.execute("COMMIT")
        except BaseException:
            self.pending.clear()
            if self.in_transaction:  # a full disk ends it by itself
                self.execute("ROLLBACK")
            raise

    @contextmanager
    def snapshot(self) -> Iterator[None]:
        """Let a block read one state of the file, whatever other processes write meanwhile."""
        if self.in_transaction:
            yield
            return
        self.execute("BEGIN")
        try:
            yield
        finally:
            if self.in_transaction:
                self.execute("COMMIT")

    # ------------------------------------------------------------ seals

    def sealed(self, table: str, owner: str = "") -> list[tuple[Any, ...]]:
        """Return rows of a table, in ascending order, after checking them against their seal."""
        with self.snapshot():
            rows = self._rows(table, owner)
            wanted = self._seal_of(table, owner) + self.pending[table, owner]
        if (sum(row_digest(table, owner, row) for row in rows) - wanted) % 2**64:
            raise DamagedError(self.path, f"its table '{table}' does not have the digest it had")
        return rows

    def owners(self, table: str) -> list[str]:
        """Return whose rows a table holds, or has a seal of."""
        if table in WHOLE:
            return [""]
        query = f"SELECT run FROM {table} UNION SELECT owner FROM seals WHERE part = ?"  # noqa: S608
        return [str(owner) for (owner,) in self.execute(query, (table,)).fetchall()]

    def check_schema(self) -> None:
        """Refuse tables that were declared otherwise."""
        if (self._schema() - self._seal_of("schema", "")) % 2**64:
            raise DamagedError(self.path, "the declarations of its tables do not have their digest")

    def histories(self, user: int | None = None) -> Iterator[InteractionRows]:
        """Yield the interactions of all users, or of one, in the order of their ids. They are
        complete and unchanged if the iteration ends without an error."""
        totals = defaultdict[int, int](int)
        only, values = ("", ()) if user is None else ("WHERE user = ?", (user,))
        with self.snapshot():
            known = {row[0]: (row[1], row[4]) for row in self.sealed("users")}
            yield from self._interactions_of(totals, only, values)
        asked = known.keys() | totals.keys() if user is None else {user}
        wrong = [
            known.get(each, ("of nobody",))[0]
            for each in sorted(asked)
            if each not in known or (totals[each] - known[each][1]) % 2**64
        ]
        if wrong:
            raise DamagedError(
                self.path,
                f"the interactions of {len(wrong):,} users do not have their digest: "
                f"{listed(wrong)}",
                "take these users out with 'hushrec node forget' and import their data again, or ",
            )

    def _interactions_of(
        self, totals: dict[int, int], only: str = "", values: tuple[int, ...] = ()
    ) -> Iterator[InteractionRows]:
        """Yield interactions, and add their digests to the totals of users."""
        query = f"SELECT {InteractionRows.COLUMNS} FROM interactions {only} ORDER BY id"  # noqa: S608 - ours
        cursor, texts = self.execute(query, values), TextDigests()
        while found := cursor.fetchmany(READ_ROWS):
            try:
                rows = InteractionRows.of(found)
                for user, total in rows.totals(texts).items():
                    totals[user] += total
            except (TypeError, ValueError, OverflowError, AttributeError):
                raise DamagedError(self.path, "an interaction is of another type") from None
            yield rows

    def check(self) -> list[PartCheck]:
        """Check the structure of the file, and every row and value against its digest."""
        parts = {"structure": self._structure, "interactions": self._interactions}
        parts |= {table: partial(self._table, table) for table in COLUMNS}
        found = []
        with self.snapshot():
            for part, count in parts.items():
                try:
                    found.append(PartCheck(part, count(), None))
                except DamagedError as error:
                    found.append(PartCheck(part, 0, error.what))
        return found

    def require_sound(self) -> list[PartCheck]:
        """Check the file, and refuse a damaged one."""
        found = self.check()
        damage = [f"{each.part} ({each.damage})" for each in found if each.damage is not None]
        if damage:
            raise DamagedError(self.path, "; ".join(damage[:3]))
        return found

    def verified(self, table: str, digest: bytes, *values: Any) -> bytes:
        """Return a large value, the last one, if it and its key have the digest."""
        if not isinstance(values[-1], bytes) or content_digest(*values) != digest:
            raise DamagedError(self.path, f"a value of its table '{table}' lost its digest")
        return values[-1]

    def _structure(self) -> int:
        lines = [str(line) for (line,) in self.execute("PRAGMA integrity_check(3)").fetchall()]
        if lines != ["ok"]:
            raise DamagedError(self.path, cut(" ".join(lines[0].split()), 200))
        for table, _, parent, _ in self.execute("PRAGMA foreign_key_check").fetchall():
            raise DamagedError(self.path, f"a row of '{table}' lacks its row of '{parent}'")
        return int(self.execute("PRAGMA page_count").fetchone()[0])

    def _interactions(self) -> int:
        return sum(len(rows.item) for rows in self.histories())

    def _table(self, table: str) -> int:
        count = sum(len(self.sealed(table, owner)) for owner in self.owners(table))
        if table in CONTENTS:
            key, column = CONTENTS[table]
            query = f"SELECT digest, {key}, {column} FROM {table} WHERE rowid = ?"  # noqa: S608
            rows = f"SELECT rowid FROM {table} NOT INDEXED"  # noqa: S608 - ours
            for row in self.execute(rows).fetchall():  # one large value in memory at a time
                for digest, *values in self.execute(query, row).fetchall():
                    self.verified(table, digest, *values)
        return count

    def follow(self) -> None:
        """Keep the seals in step with the rows from now on."""
        for table, columns in COLUMNS.items():
            for event, changes in EVENTS.items():
                calls = "".join(
                    f"SELECT tally({sign}, '{table}', "
                    f"{chr(39) * 2 if table in WHOLE else f'{row}.run'}, "
                    f"{', '.join(f'{row}.{column}' for column in columns)});"
                    for row, sign in changes
                )
                self.execute(
                    f"CREATE TEMP TRIGGER {table}_{event} AFTER {event} ON main.{table} "
                    f"BEGIN {calls} END"
                )

    def _tally(self, sign: int, table: str, owner: str, *values: Any) -> None:
        self.pending[table, owner] += sign * row_digest(table, owner, values)

    def _seal(self) -> None:
        """Write the seals of the rows that the open transaction changed."""
        for (table, owner), change in self.pending.items():
            total = signed(self._seal_of(table, owner) + change)
            if total:
                query = "INSERT OR REPLACE INTO seals VALUES (?, ?, ?)"
                self.execute(query, (table, owner, total))
            else:
                self.execute("DELETE FROM seals WHERE part = ? AND owner = ?", (table, owner))
        self.pending.clear()

    def _seal_of(self, table: str, owner: str) -> int:
        query = "SELECT total FROM seals WHERE part = ? AND owner = ?"
        found = self.execute(query, (table, owner)).fetchone()
        if found is not None and not isinstance(found[0], int):
            raise DamagedError(self.path, f"the digest of its table '{table}' is lost")
        return 0 if found is None else int(found[0])

    def _rows(self, table: str, owner: str) -> list[tuple[Any, ...]]:
        columns = ", ".join(COLUMNS[table])
        order = "1" if len(COLUMNS[table]) == 1 else "1, 2"
        # An index of names may be damaged where the rows are not.
        which = "NOT INDEXED WHERE ? = ''" if table in WHOLE else "WHERE run = ?"
        query = f"SELECT {columns} FROM {table} {which} ORDER BY {order}"  # noqa: S608 - ours
        return list(self.execute(query, (owner,)).fetchall())

    def _schema(self) -> int:
        return sum(row_digest("schema", "", row) for row in self.execute(SCHEMA).fetchall())

    # ------------------------------------------------------------ migrations

    def migrate(self) -> None:
        """Bring the tables to the newest version, each migration in a transaction."""
        found = self.execute("PRAGMA user_version").fetchone()[0]
        if found > len(schema.MIGRATIONS):
            raise RunError(
                f"{self.path} was written by a newer hushrec (version {found} of its tables, this "
                f"one knows {len(schema.MIGRATIONS)}): upgrade hushrec"
            )
        for version in range(found + 1, len(schema.MIGRATIONS) + 1):
            with self.transaction():
                for statement in schema.MIGRATIONS[version - 1].split(";"):
                    self.execute(statement)
                if version == schema.SEALED_FROM:
                    self._seal_all()
                if version >= schema.SEALED_FROM:
                    self.execute("DELETE FROM seals WHERE part = 'schema'")
                    self.pending["schema", ""] = self._schema()
                self.execute(f"PRAGMA user_version = {version}")

    def _seal_all(self) -> None:
        """Give an older file's rows their digests, as they are now."""
        totals = defaultdict[int, int](int)
        for _ in self._interactions_of(totals):
            pass
        changes = [(signed(total), number) for number, total in totals.items()]
        self.executemany("UPDATE users SET history = ? WHERE id = ?", changes)
        for table in COLUMNS:
            for owner in self.owners(table):
                for row in self._rows(table, owner):
                    self._tally(1, table, owner, *row)
