"""Roster: which node holds which numbers of the population.

A number is the public address of a user's random streams and of its index in cohorts. The
coordinator gives each node a range of numbers at its enrolment. In a rehearsal, which partitions
the users of one file over nodes, users keep the numbers that they have in the file, so that results
do not depend on the partition.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hushrec.data.splitting import may_train
from hushrec.errors import RunError
from hushrec.federation.experiment import Experiment
from hushrec.federation.requests import Assignment, Enrolment
from hushrec.privacy.budgets import by_activity, levels_of
from hushrec.streams import Streams

Numbers = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Holding:
    """Numbers of one node's users and clients, in the order of its enrolment."""

    users: Numbers
    clients: Numbers

    @classmethod
    def of_users(cls, numbers: Numbers) -> Holding:
        """Return a holding of users who are clients themselves."""
        return cls(numbers, numbers)


Partition = Mapping[str, Holding]
"""What each node holds, by its name."""


@dataclass(frozen=True, eq=False)
class Roster:
    """All users and clients of a run."""

    run: str
    holdings: Partition
    trains: NDArray[np.bool_]
    """Of every client, by number, whether it trains."""
    members: NDArray[np.bool_]
    """Of every client, whether it belongs to the population that a guarantee is for."""
    newcomers: bool
    """Whether users are evaluated that training leaves out."""
    epsilon: NDArray[np.float64] | None = None
    """Budget of every client, where they have budgets."""

    @classmethod
    def of(
        cls,
        run: str,
        experiment: Experiment,
        enrolled: Sequence[Enrolment],
        partition: Partition | None = None,
    ) -> Roster:
        """Number the users of all nodes, or take the numbers of a rehearsal's ``partition``."""
        silos = experiment.silos.kind != "none"
        holdings = (
            _numbered(enrolled, silos)
            if partition is None
            else _as_partitioned(enrolled, partition)
        )
        population = _count(holding.users for holding in holdings.values())
        count = _count(holding.clients for holding in holdings.values())
        member = np.zeros(count, np.bool_)
        past = np.zeros(count, np.bool_)
        for node in enrolled:
            clients = holdings[node.name].clients
            member[clients], past[clients] = True, node.trains
        seen = may_train(experiment.split, Streams(experiment.seed), population)
        if not silos:
            member &= seen
        newcomers = bool(any(node.idle for node in enrolled) or not seen.all())
        found = cls(run, holdings, member & past, member, newcomers)
        epsilon = _epsilon(experiment, enrolled, found)
        return found if epsilon is None else cls(run, *found._parts(), epsilon)

    def _parts(self) -> tuple[Partition, NDArray[np.bool_], NDArray[np.bool_], bool]:
        return self.holdings, self.trains, self.members, self.newcomers

    @property
    def population(self) -> int:
        """Number of users, the largest number and one."""
        return _count(holding.users for holding in self.holdings.values())

    def clients(self, *, promised: bool) -> Numbers:
        """Return the clients that cohorts are drawn from; under a privacy guarantee, independent of
        any client's data."""
        return np.flatnonzero(self.members if promised else self.trains)

    @cached_property
    def digest(self) -> str:
        """Identify the population: a checkpoint is of no use with another one."""
        return hashlib.blake2b(json.dumps(self.to_json()).encode(), digest_size=16).hexdigest()

    def assignments(self, *, promised: bool) -> dict[str, Assignment]:
        """Return the numbers and budgets that each node is assigned."""
        epsilon, training = self.epsilon, len(self.clients(promised=promised))
        if epsilon is not None:
            # Rounded down to what noise is worked out for, so that a node finds the same noise.
            levels, level = levels_of(epsilon)
            epsilon = np.where(epsilon > 0, levels[level], 0.0)
        return {
            name: Assignment(
                self.run,
                self.population,
                training,
                holding.users,
                holding.clients,
                None if epsilon is None else epsilon[holding.clients],
                0.0 if epsilon is None else float(epsilon.max()),
            )
            for name, holding in self.holdings.items()
        }

    def to_json(self) -> dict[str, Any]:
        """Write it for a file."""
        return {
            "run": self.run,
            "nodes": {
                name: {"users": _spans(holding.users), "clients": _spans(holding.clients)}
                for name, holding in self.holdings.items()
            },
            "trains": _spans(np.flatnonzero(self.trains)),
            "members": _spans(np.flatnonzero(self.members)),
            "clients": len(self.trains),
            "newcomers": self.newcomers,
            "epsilon": None if self.epsilon is None else self.epsilon.tolist(),
        }

    @classmethod
    def from_json(cls, stored: Mapping[str, Any], source: str) -> Roster:
        """Read back what `to_json` wrote."""
        try:
            count = int(stored["clients"])
            trains, members = np.zeros(count, np.bool_), np.zeros(count, np.bool_)
            trains[_numbers(stored["trains"])] = True
            members[_numbers(stored["members"])] = True
            holdings = {
                name: Holding(_numbers(node["users"]), _numbers(node["clients"]))
                for name, node in stored["nodes"].items()
            }
            budgets = stored["epsilon"]
            epsilon = None if budgets is None else np.array(budgets, np.float64)
            run, newcomers = str(stored["run"]), bool(stored["newcomers"])
        except (KeyError, TypeError, ValueError, IndexError, AttributeError):
            raise RunError(f"{source} is damaged: start the run anew") from None
        return cls(run, holdings, trains, members, newcomers, epsilon)


def _numbered(enrolled: Sequence[Enrolment], silos: bool) -> dict[str, Holding]:
    """Give nodes one range after the other, in the order of their names."""
    holdings, user, client = {}, 0, 0
    for node in sorted(enrolled, key=lambda node: node.name):
        users = np.arange(user, user + node.users)
        clients = np.arange(client, client + len(node.trains)) if silos else users
        holdings[node.name] = Holding(users, clients)
        user, client = user + len(users), client + len(clients)
    return holdings


def _as_partitioned(enrolled: Sequence[Enrolment], partition: Partition) -> dict[str, Holding]:
    for node in enrolled:
        holding = partition.get(node.name)
        if holding is None:
            raise RunError(f"node '{node.name}' is not in the partition: make the folders again")
        if (node.users, len(node.trains)) != (len(holding.users), len(holding.clients)):
            raise RunError(
                f"node '{node.name}' holds {node.users} users, and the partition gives it "
                f"{len(holding.users)}: make the folders again"
            )
    return {node.name: partition[node.name] for node in enrolled}


def _epsilon(
    experiment: Experiment, enrolled: Sequence[Enrolment], roster: Roster
) -> NDArray[np.float64] | None:
    """Return the privacy budget of every client."""
    config, clients = experiment.privacy, roster.clients(promised=True)
    if config.budgets is None:
        return None
    declared = np.zeros(len(roster.trains))
    for node in enrolled:
        own = node.activity if config.budgets == "activity" else node.epsilon
        assert own is not None, "read with the contract's rule"
        declared[roster.holdings[node.name].clients] = own
    if config.budgets == "activity":
        assert config.epsilon_min is not None and config.epsilon_max is not None, "checked"
        counts = declared.astype(np.int64)
        return by_activity(counts, clients, config.epsilon_min, config.epsilon_max)
    epsilon = np.zeros(len(declared))
    epsilon[clients] = declared[clients]
    return epsilon


def _count(numbers: Any) -> int:
    return 1 + max((int(each.max(initial=-1)) for each in numbers), default=-1)


def _spans(numbers: Numbers) -> list[list[int]]:
    """Write numbers as spans of consecutive ones, in their order."""
    cuts = np.flatnonzero(np.diff(numbers) != 1) + 1
    return [[int(span[0]), len(span)] for span in np.split(numbers, cuts) if len(span)]


def _numbers(spans: Sequence[Sequence[int]]) -> Numbers:
    parts = [np.arange(start, start + length) for start, length in spans]
    return np.concatenate(parts).astype(np.int64) if parts else np.zeros(0, np.int64)
