"""The roster of a run: which node holds which numbers of the population.

A number is the public address of a user's random streams and of its index in cohorts. The
coordinator gives each node a range of numbers at its enrolment. In a rehearsal, which partitions
the users of one file over nodes, users keep the numbers that they have in the file, so that results
do not depend on the partition.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import PlainSerializer, PlainValidator, model_validator

from hushrec.data.splitting import may_train
from hushrec.errors import RunError
from hushrec.federation.experiment import Experiment
from hushrec.federation.requests import Assignment, Enrolment
from hushrec.io.codec import Count, Stored, parse, read_json
from hushrec.privacy.budgets import by_activity, levels_of
from hushrec.runs.folder import record_digest
from hushrec.streams import Streams


def _spans(numbers: NDArray[np.int64]) -> list[list[int]]:
    """Write numbers as spans of consecutive ones, in their order."""
    cuts = np.flatnonzero(np.diff(numbers) != 1) + 1
    return [[int(span[0]), len(span)] for span in np.split(numbers, cuts) if len(span)]


def _numbers(given: Any) -> NDArray[np.int64]:
    """Read spans, or numbers one by one."""
    array = np.asarray(given)
    if array.size and (array.dtype != np.int64 or array.shape[1:] not in ((), (2,))):
        raise ValueError("not a list of spans")
    if array.ndim < 2 or not array.size:
        return array.astype(np.int64).ravel()
    return np.concatenate([np.arange(start, start + length) for start, length in array])


Numbers = Annotated[NDArray[np.int64], PlainValidator(_numbers), PlainSerializer(_spans)]
Budgets = Annotated[
    NDArray[np.float64] | None,
    PlainValidator(lambda given: None if given is None else np.asarray(given, np.float64)),
    PlainSerializer(lambda budgets: None if budgets is None else budgets.tolist()),
]


@dataclass(frozen=True, eq=False)
class Holding:
    """Indices of one node's users and clients among those of all nodes, in the order of its
    enrolment."""

    users: Numbers
    clients: Numbers


Partition = dict[str, Holding]
"""What each node holds, by its name."""


class Roster(Stored):
    """All users and clients of a run: roster.json."""

    run: str
    nodes: Partition
    trains: Numbers
    """Clients that train."""
    members: Numbers
    """Clients of the population that a guarantee is for."""
    clients: Count
    """Number of all clients, those included that do not train."""
    newcomers: bool
    """Whether users are evaluated that training leaves out."""
    epsilon: Budgets
    """Budget of every client, where they have budgets."""

    @classmethod
    def of(
        cls,
        run: str,
        experiment: Experiment,
        enrolled: Sequence[Enrolment],
        partition: Partition | None = None,
    ) -> Roster:
        """Number the users of all nodes, or take the numbers of a rehearsal's ``partition``.

        A node does not say whom it has forgotten or added since the partition was made: then
        everybody is numbered anew (`partition_change` says why).
        """
        silos = experiment.silos.kind != "none"
        if partition is None or partition_change(enrolled, partition):
            holdings = _numbered(enrolled, silos)
        else:
            holdings = {node.name: partition[node.name] for node in enrolled}
        population = _count(holding.users for holding in holdings.values())
        count = _count(holding.clients for holding in holdings.values())
        member, past = np.zeros(count, np.bool_), np.zeros(count, np.bool_)
        for node in enrolled:
            clients = holdings[node.name].clients
            member[clients], past[clients] = True, node.trains
        seen = may_train(experiment.split, Streams(experiment.seed), population)
        if not silos:
            member &= seen
        newcomers = bool(any(node.idle for node in enrolled) or not seen.all())
        return cls(
            run=run,
            nodes=holdings,
            trains=np.flatnonzero(member & past),
            members=np.flatnonzero(member),
            clients=count,
            newcomers=newcomers,
            epsilon=_epsilon(experiment, enrolled, holdings, member),
        )

    @property
    def population(self) -> int:
        """Number of users, the largest number and one."""
        return _count(holding.users for holding in self.nodes.values())

    def pool(self, *, promised: bool) -> NDArray[np.int64]:
        """Return the clients that cohorts are drawn from; under a privacy guarantee, independent of
        any client's data."""
        return self.members if promised else self.trains

    @cached_property
    def digest(self) -> str:
        """Identify the population: a checkpoint is of no use with another one."""
        return hashlib.blake2b(self.to_json().encode(), digest_size=16).hexdigest()

    def assignments(self, *, promised: bool) -> dict[str, Assignment]:
        """Return the indices of each node's users and clients, and the clients' budgets."""
        epsilon, largest, assigned = self.epsilon, 0.0, {}
        if epsilon is not None:
            # Rounded down to what noise is worked out for, so that a node finds the same noise.
            levels, level = levels_of(epsilon)
            epsilon = np.where(epsilon > 0, levels[level], 0.0)
            largest = float(epsilon.max())
        whole = self.run, self.population, len(self.pool(promised=promised))
        for name, held in self.nodes.items():
            own = None if epsilon is None else epsilon[held.clients]
            assigned[name] = Assignment(*whole, held.users, held.clients, own, largest)
        return assigned

    @model_validator(mode="after")
    def _check_numbers(self) -> Roster:
        if max(_count([self.trains]), _count([self.members])) > self.clients:
            raise ValueError("'clients' is fewer than there are numbers of clients")
        return self


def _numbered(enrolled: Sequence[Enrolment], silos: bool) -> dict[str, Holding]:
    """Give nodes one range after the other, in the order of their names."""
    holdings, user, client = {}, 0, 0
    for node in sorted(enrolled, key=lambda node: node.name):
        users = np.arange(user, user + node.users)
        clients = np.arange(client, client + len(node.trains)) if silos else users
        holdings[node.name] = Holding(users, clients)
        user, client = user + len(users), client + len(clients)
    return holdings


def partition_change(enrolled: Sequence[Enrolment], partition: Partition) -> str:
    """Return how the nodes differ from a rehearsal's partition; empty where they do not."""
    for node in enrolled:
        holding = partition.get(node.name)
        if holding is None:
            return f"{node.name} is not in the partition"
        if (node.users, len(node.trains)) != (len(holding.users), len(holding.clients)):
            given = f"{len(holding.users):,} users in {len(holding.clients):,} clients"
            return (
                f"{node.name} holds {node.users:,} users in {len(node.trains):,} clients, and the "
                f"partition gives it {given}"
            )
    return ""


def _epsilon(
    experiment: Experiment,
    enrolled: Sequence[Enrolment],
    held: Partition,
    member: NDArray[np.bool_],
) -> NDArray[np.float64] | None:
    """Return the privacy budget of every client."""
    config = experiment.privacy
    if config.budgets is None:
        return None
    declared = np.zeros(len(member))
    for node in enrolled:
        own = node.activity if config.budgets == "activity" else node.epsilon
        assert own is not None, "read with the contract's rule"
        declared[held[node.name].clients] = own
    if config.budgets == "activity":
        assert config.epsilon_min is not None and config.epsilon_max is not None, "checked"
        counts, clients = declared.astype(np.int64), np.flatnonzero(member)
        return by_activity(counts, clients, config.epsilon_min, config.epsilon_max)
    return np.where(member, declared, 0.0)


def _count(numbers: Iterable[NDArray[np.int64]]) -> int:
    return 1 + max((int(each.max(initial=-1)) for each in numbers), default=-1)


def with_digest(roster: Roster) -> str:
    """Return the contents of a roster's file, which `read_roster` checks."""
    record = json.loads(roster.to_json())
    return json.dumps({**record, "check": record_digest(record)})


def read_roster(path: Path) -> Roster:
    """Read the roster of a run, after checking it against its digest."""
    record = read_json(path)
    if record.pop("check", None) != record_digest(record):
        raise RunError(
            f"{path} is damaged, or of an older hushrec: its digest does not fit; remove the run "
            f"{path.parent} and begin a new one"
        )
    return parse(Roster, json.dumps(record), str(path))
