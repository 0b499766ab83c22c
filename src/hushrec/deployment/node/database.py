"""The node's database: one SQLite file that only its owner may read.

The file holds the users' interactions, the contract that the node trains by and the key of its
noise; `node.runs` keeps the private parameters and the ledger of its runs in it. Interactions with
items outside of the catalogue are stored and counted, and are not used. Whatever is read is checked
against its digest first (`node.tables`).
"""

from __future__ import annotations

import fcntl
import os
import shutil
import sqlite3
import stat
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from hushrec.data.features import columns_from_json, rows_to_json
from hushrec.data.interactions import Interactions
from hushrec.deployment.node.tables import (
    APPLICATION,
    BACKUP,
    DamagedError,
    InteractionRows,
    NodeConnection,
    PartCheck,
    TextDigests,
    signed,
)
from hushrec.errors import DataError, DiskError, RunError
from hushrec.federation.contract import Contract
from hushrec.io.files import atomic_file, remove
from hushrec.streams import new_key

SHARED_STILL_HOLDS = (
    "What was sent before is part of the shared model, and cannot be taken out of it: uploads were "
    "summed with everybody's. Under a privacy guarantee the sum hides that they were there; "
    "without one, only training the model anew removes them."
)


BESIDE = ("-wal", "-shm", "-journal")
"""Ends of the names of SQLite's files beside a database."""
SHARED_LOCK = 0x40000002, 510
"""First byte and length of the range that SQLite locks in a file while it is open."""
FREE_SHARE = 4
"""A file is rewritten without its free pages where they are more than one in so many."""
RESTORED = "restored"
"""The fact of a node that was restored and has finished no run since."""
FEW_PAGES = 256
"""Free pages that no file is rewritten for."""


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

    def __init__(self, path: Path, connection: NodeConnection) -> None:
        """``connection`` is to tables of the newest version."""
        self.path, self.connection = path, connection
        connection.check_schema()
        connection.follow()

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
        connection = None
        try:
            connection = NodeConnection.connect(path)
            connection.execute(f"PRAGMA application_id = {APPLICATION}")
            connection.migrate()
            store = cls(path, connection)
            with store.changing():
                facts = {"name": name, "contract": contract.to_bytes(), "noise_key": new_key()}
                connection.executemany("INSERT INTO facts VALUES (?, ?)", facts.items())
            return store
        except BaseException:
            if connection is not None:
                connection.close()
            for end in ("", *BESIDE):
                remove(path.with_name(f"{path.name}{end}"))
            raise

    @classmethod
    def open(cls, path: Path) -> NodeDatabase:
        """Open a node's file and migrate it; refuse other files, and files that others may read."""
        if not path.is_file():
            raise RunError(f"{path}: no such node; make one with 'hushrec node init'")
        return cls._open(path, APPLICATION)

    @classmethod
    def _open(cls, path: Path, application: int) -> NodeDatabase:
        if stat.S_IMODE(path.stat().st_mode) & 0o077:
            raise RunError(
                f"{path} can be read by others, and holds data and keys: use 'chmod 600 {path}'"
            )
        connection = NodeConnection.connect(path)
        try:
            found = connection.execute("PRAGMA application_id").fetchone()[0]
            if found == BACKUP != application:
                raise RunError(
                    f"{path} is the backup of a node: 'hushrec node restore {path} NODE' makes a "
                    "node of it"
                )
            if found != application:
                what = "node of hushrec" if application == APPLICATION else "backup of a node"
                raise DamagedError(path, f"it is no {what}, or its first page is lost")
            connection.migrate()
            return cls(path, connection)
        except BaseException:
            connection.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.connection.close()

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Run a block as one transaction; a full disk raises a `DiskError`."""
        with self.connection.transaction():
            yield

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
        return dict(self.connection.sealed("facts")).get(name)

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

    # ------------------------------------------------------------ integrity

    def give_back(self) -> None:
        """Empty the write-ahead log, and return free pages to the file system where they are many;
        if another process writes, or there is no room to do it, the next run tries again."""
        free, pages = self.one("PRAGMA freelist_count"), self.one("PRAGMA page_count")
        with suppress(DiskError):
            if free > FEW_PAGES and free * FREE_SHARE > pages:
                self.connection.execute("VACUUM")
            self.connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")

    def backup(self, target: Path, *, overwrite: bool = False) -> list[PartCheck]:
        """Write a checked copy of the file, of one moment, while others may use it.

        All runs are closed in it, and unfinished ones and kept answers are left out: the node goes
        on, so whoever restores the copy must not answer for these runs.
        """
        if target.exists() and not overwrite:
            raise RunError(f"{target} exists already: choose another file, or add --overwrite")
        with atomic_file(target, secret=True) as partial:
            with self.connection.explained(), closing(sqlite3.connect(partial)) as copy:
                self.connection.backup(copy)
            try:
                with NodeDatabase._open(partial, APPLICATION) as made:
                    with made.changing():
                        made.connection.execute("INSERT OR IGNORE INTO closed SELECT id FROM runs")
                        made.connection.execute(
                            "DELETE FROM runs WHERE id NOT IN (SELECT run FROM models)"
                        )
                        for table in ("replies", "setups", "sums", "pieces"):
                            made.connection.execute(f"DELETE FROM {table}")  # noqa: S608 - ours
                    return made._handed_over(BACKUP)
            except DamagedError as error:
                raise DamagedError(self.path, error.what) from None

    @classmethod
    def restore(cls, source: Path, path: Path, *, overwrite: bool = False) -> list[PartCheck]:
        """Make a node of a backup, checked before anything is replaced.

        The restored node draws another key for its noise, and joins a run from its first round on.
        """
        if not source.is_file():
            raise RunError(f"{source}: no such backup; 'hushrec node backup' makes one")
        if path.exists() and not overwrite:
            raise RunError(
                f"{path} exists already: choose another path for the node, or add --overwrite to "
                "replace it"
            )
        require_unused(path)
        with atomic_file(path, secret=True) as partial:
            shutil.copyfile(source, partial)
            try:
                with cls._open(partial, BACKUP) as made:
                    with made.changing():
                        made.keep_fact("noise_key", new_key())
                        made.keep_fact(RESTORED, "1")
                    found = made._handed_over(APPLICATION)
            except DamagedError as error:
                raise RunError(f"{source} is damaged: {error.what}; use another backup") from None
            for end in BESIDE:  # of the file that is replaced
                remove(path.with_name(f"{path.name}{end}"))
            return found

    def _handed_over(self, application: int) -> list[PartCheck]:
        """Make this one file with another application id, and check it."""
        self.connection.execute(f"PRAGMA application_id = {application}")
        self.connection.execute("VACUUM")  # without the bytes of what was deleted
        self.connection.execute("PRAGMA journal_mode = DELETE")
        return self.connection.require_sound()

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
            known_users = len(self.connection.sealed("users"))
            self.connection.executemany(
                "INSERT INTO users (name, features, silo) VALUES (?, ?, ?) ON CONFLICT (name) DO "
                "UPDATE SET features = excluded.features WHERE excluded.features != '{}'",
                people,
            )
            people_now = {row[1]: row for row in self.connection.sealed("users")}
            ids = [people_now[name][0] if name in people_now else -1 for name in data.users]
            items = data.items.tolist()
            first = self.one("SELECT seq FROM sqlite_sequence WHERE name = 'interactions'") or 0
            rows = InteractionRows(
                user=np.array(ids, np.int64)[data.user],
                id=np.arange(first + 1, first + 1 + len(data)),
                item=[items[item] for item in data.item],
                value=data.value.astype(np.float64),
                time=data.time + shift,
                context=contexts,
            )
            self.connection.executemany(
                f"INSERT INTO interactions ({InteractionRows.COLUMNS}) VALUES (?, ?, ?, ?, ?, ?)",  # noqa: S608
                zip(
                    *(rows.user.tolist(), rows.id.tolist(), rows.item),
                    *(rows.value.tolist(), rows.time.tolist(), rows.context),
                    strict=True,
                ),
            )
            before = {row[0]: row[4] for row in people_now.values()}
            totals = rows.totals(TextDigests()).items()
            self.connection.executemany(
                "UPDATE users SET history = ? WHERE id = ?",
                [(signed(before[user] + total), user) for user, total in totals],
            )
            self.keep_fact("has_time", str(int(data.has_time)))
        new_users = len(people_now) - known_users
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
        place = np.full(max(members, default=0) + 1, -1)
        place[[*members]] = [*members.values()]
        context = list[str]()
        parts: list[tuple[NDArray[Any], ...]] = []
        for rows in self.connection.histories():  # numbers in arrays take little memory
            item = np.fromiter((index.get(name, -1) for name in rows.item), np.int32)
            user = np.where(rows.user < len(place), place[rows.user.clip(0, len(place) - 1)], -1)
            kept = np.flatnonzero((user >= 0) & (item >= 0) & (rows.id <= upto))
            columns = user.astype(np.int32), item, rows.value.astype(np.float32), rows.time
            parts.append(tuple(column[kept] for column in columns))
            if catalogue.context:
                context.extend(rows.context[k] for k in kept.tolist())
        if not sum(len(part[0]) for part in parts):
            return None
        users, items, values, times = (np.concatenate(each) for each in zip(*parts, strict=True))
        people = {row[0]: (row[1], row[2]) for row in self.connection.sealed("users")}
        order = sorted(members, key=members.__getitem__)
        names, features = zip(*(people[number] for number in order), strict=True)
        return Interactions(
            name=self.name,
            user=users,
            item=items,
            value=values,
            time=times,
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
        found = {row[1]: int(row[0]) for row in self.connection.sealed("users")}
        return found.get(user)

    def latest(self) -> int:
        """Return the number of the last interaction."""
        return int(self.one("SELECT COALESCE(MAX(id), 0) FROM interactions"))

    def items_of(self, user: int) -> list[str]:
        """Return the items of a user's interactions, oldest first."""
        found = [
            (when, number, item)
            for rows in self.connection.histories(user)
            for when, number, item in zip(rows.time, rows.id, rows.item, strict=True)
        ]
        return [item for _, _, item in sorted(found)]

    def counts(self) -> dict[str, int]:
        """Count users, interactions and items."""
        items = Counter(item for rows in self.connection.histories() for item in rows.item)
        known = set(self.contract.catalogue.items.tolist())
        return {
            "users": len(self.connection.sealed("users")),
            "interactions": items.total(),
            "unknown_items": sum(item not in known for item in items),
            "interactions_with_unknown_items": sum(
                count for item, count in items.items() if item not in known
            ),
            "file_bytes": self.path.stat().st_size,
        }

    def _rewrite(self) -> None:
        try:
            self.connection.execute("VACUUM")
            self.connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        except DiskError as error:
            raise RunError(
                f"{self.path} could not be rewritten ({error}), so it may still hold bytes of "
                "who was forgotten: stop what else uses it and run the command again"
            ) from None


def require_unused(path: Path) -> None:
    """Refuse to replace a file that a process has open."""
    if not path.exists():
        return
    with path.open("rb+") as file:
        try:
            start, length = SHARED_LOCK
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, length, start)
        except OSError:
            raise RunError(f"{path} is in use: stop its node first") from None
