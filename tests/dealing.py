"""Deal the users of one file out to nodes: a rehearsal, which gives the bits of one process."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from hushrec.data.interactions import Interactions
from hushrec.data.splitting import make_split
from hushrec.deployment.coordinator.roster import Holding, Partition
from hushrec.deployment.node.database import NodeDatabase
from hushrec.errors import ConfigError
from hushrec.federation.contract import Catalogue, Contract, SecureSums
from hushrec.federation.experiment import Experiment
from hushrec.streams import Streams

SUFFIX = ".node"


def deal(
    data: Interactions,
    experiment: Experiment,
    folder: Path,
    nodes: int,
    secure: SecureSums | None = None,
) -> tuple[Contract, Partition]:
    """Make so many nodes in a folder; return what they agree on, and who holds whom.

    Users, or whole silos, go to the nodes in turn. Each keeps the number it has in the file.
    """
    contract = Contract(experiment, Catalogue.of(data), secure)
    split = make_split(data, experiment.split, Streams(experiment.seed), experiment.silos)
    clients = np.arange(data.n_users) if split.holders is None else split.holders
    present = np.isin(np.arange(data.n_users), data.user)
    if nodes > len(np.unique(clients[present])):
        raise ConfigError(f"{nodes} nodes are more than there are clients to deal out")
    partition = {}
    for number in range(nodes):
        name = f"node-{number + 1}"
        mine = np.flatnonzero(present & (clients % nodes == number))
        with NodeDatabase.create(folder / f"{name}{SUFFIX}", name, contract) as store:
            store.add_interactions(data.select(np.isin(data.user, mine)), split.holders)
        partition[name] = Holding(mine, np.unique(clients[mine]).astype(np.int64))
    return contract, partition
