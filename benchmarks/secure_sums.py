"""Measure a secure sum of the first round of a method: ``python -m benchmarks.secure_sums``.

Nodes and coordinator are processes of their own. What is printed: bytes of a node's vector, seconds
of the round, and the largest memory of each party. The sum is compared with that of one process.
"""

from __future__ import annotations

import multiprocessing
import resource
import time
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from tempfile import TemporaryDirectory

import click
import numpy as np

from hushrec.data import load
from hushrec.data.interactions import Interactions
from hushrec.data.splitting import make_split
from hushrec.deployment.coordinator.planning import Policy
from hushrec.deployment.coordinator.roster import Holding, Roster
from hushrec.deployment.coordinator.run import RemoteBackend
from hushrec.deployment.coordinator.session import EventLog, Session
from hushrec.deployment.coordinator.summing import RecoveryJournal, SecureSumming
from hushrec.deployment.node.database import NodeDatabase
from hushrec.deployment.node.worker import NodeCredentials, Worker
from hushrec.federation.backends import Machine
from hushrec.federation.contract import Catalogue, Contract, NodeRegistry, SecureSums
from hushrec.federation.experiment import Experiment, ExperimentRequest
from hushrec.federation.requests import Failure, NodeId
from hushrec.federation.setup import set_up, set_up_public
from hushrec.secagg import Identity
from hushrec.streams import Streams

STOP = b""


def peak_megabytes() -> float:
    """Return the largest memory of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def answer_for(path: Path, registered: NodeRegistry, identity: Identity, wire: Connection) -> None:
    """Answer messages as a node until told to stop; then send the largest memory."""
    with NodeDatabase.open(path) as store:
        worker = Worker(
            store, Machine(threads=1), credentials=NodeCredentials(registered, identity)
        )
        while (message := wire.recv_bytes()) != STOP:
            wire.send_bytes(worker.answer(message))
    wire.send(peak_megabytes())


class PipeLink:
    """Nodes that are processes of this machine."""

    def __init__(self, wires: Mapping[NodeId, Connection]) -> None:
        self.wires = dict(wires)

    def present(self) -> dict[NodeId, str]:
        """Return all nodes."""
        return dict.fromkeys(self.wires, "pipe")

    def send(self, node: NodeId, request: bytes, seconds: float) -> str | None:
        """Send a request; a node has one at a time."""
        self.wires[node].send_bytes(request)
        return node

    def receive(self, tickets: Sequence[str]) -> Iterator[tuple[str, bytes | Failure]]:
        """Yield the replies that are there."""
        for node in tickets:
            if self.wires[node].poll():
                yield node, self.wires[node].recv_bytes()

    def wait(self, seconds: float) -> None:
        """Wait for a reply, if there is none before."""
        wait(list(self.wires.values()), seconds)

    def now(self) -> float:
        """Return the time of this machine."""
        return time.monotonic()


def deal_out(
    folder: Path, data: Interactions, contract: Contract, names: list[str]
) -> dict[str, Holding]:
    """Make the nodes' files, with every n-th user each."""
    partition = {}
    for number, name in enumerate(names):
        mine = np.arange(number, data.n_users, len(names))
        with NodeDatabase.create(folder / name, name, contract) as store:
            store.add_interactions(data.select(np.isin(data.user, mine)))
        partition[name] = Holding(mine, mine)
    return partition


def coordinate(
    folder: Path,
    contract: Contract,
    partition: dict[str, Holding],
    registered: NodeRegistry,
    wires: Mapping[NodeId, Connection],
    result: Connection,
) -> None:
    """Sum the first round as the coordinator; send what was measured, and the sum."""
    experiment, names = contract.experiment, list(partition)
    policy = Policy(
        nodes=len(names), min_nodes=len(names), resend_seconds=3000.0, round_seconds=3000.0
    )
    session = Session(contract, "run", PipeLink(wires), policy, EventLog(folder / "events"))
    roster = Roster.of("run", experiment, session.gather(), partition)
    setup = set_up_public(
        experiment, contract.public, "1", roster.digest, len(roster.pool(promised=False)), None
    )
    summing = SecureSumming(session, registered, RecoveryJournal(folder / "sums"))
    backend = RemoteBackend(setup.task, experiment, roster, session, summing)
    began = time.perf_counter()
    clients = roster.pool(promised=False)
    download = setup.task.download(1, setup.task.initial, clients)
    found = backend.train(download, setup.task.protection, clients)
    seconds, peak = time.perf_counter() - began, peak_megabytes()
    lines = [line for line in session.events.lines() if "masked" in line.to]
    up = {name: sum(line.up_bytes for line in lines if line.node == name) for name in names}
    result.send((seconds, peak, max(up.values()), len(lines) // len(names)))
    for name, array in sorted(found.summed.to_arrays().items()):
        result.send((name, array))
    result.send(None)


def differences(experiment: Experiment, data: Interactions, result: Connection) -> int:
    """Count the arrays of the sum that are not those of one process."""
    split = make_split(data, experiment.split, Streams(experiment.seed))
    made = set_up(experiment, split)
    server, _ = made.start(key="1")
    download = made.task.download(1, made.task.initial, made.clients)
    exact = server.backend.train(download, made.task.protection, made.clients).summed.to_arrays()
    for name in [name for name in exact if name.startswith("ids/")]:
        rows = name.replace("ids/", "rows/", 1)
        some = exact[rows].any(1)  # a secure sum does not tell rows of zeros from none
        exact |= {name: exact[name][some], rows: exact[rows][some]}
    count = 0
    while (sent := result.recv()) is not None:
        count += not np.array_equal(exact.pop(sent[0]), sent[1])
    return count + len(exact)


@click.command()
@click.option("--data", default="ml-1m", help="What is summed over.")
@click.option("--method", default="fedmix", help="Whose first round is summed.")
@click.option("--nodes", default=3, help="Number of nodes.")
def main(data: str, method: str, nodes: int) -> None:
    """Sum the first round of a method securely, and print what it takes."""
    read, experiment = load(data), ExperimentRequest(data, method).experiment()
    contract = Contract(experiment, Catalogue.of(read), SecureSums())
    names = [f"node-{number + 1}" for number in range(nodes)]
    identities = {name: Identity.generate() for name in names}
    registered = NodeRegistry("benchmark", {n: each.public for n, each in identities.items()})
    spawn = multiprocessing.get_context("spawn")
    with TemporaryDirectory() as temporary:
        folder = Path(temporary)
        partition, wires, processes = deal_out(folder, read, contract, names), {}, []
        ends = {}
        for name in names:
            wires[name], ends[name] = spawn.Pipe()
            given = folder / name, registered, identities[name], ends[name]
            processes.append(spawn.Process(target=answer_for, args=given))
        here, there = spawn.Pipe()
        everything = folder, contract, partition, registered, wires, there
        processes.append(spawn.Process(target=coordinate, args=everything))
        for process in processes:
            process.start()
        seconds, peak, sent, exchanges = here.recv()
        wrong = differences(experiment, read, here)
        peaks = {}
        for name, wire in wires.items():
            wire.send_bytes(STOP)
            peaks[name] = wire.recv()
        for process in processes:
            process.join()
    click.echo(f"{method} on {data}, {nodes} nodes: {seconds:.0f} s for the sum of round 1")
    click.echo(f"a node's masked vector: {sent:,} bytes in {exchanges} pieces")
    click.echo(f"largest memory: coordinator {peak:,.0f} MB, nodes {max(peaks.values()):,.0f} MB")
    click.echo("the same sum as one process" if not wrong else f"{wrong} ARRAYS DIFFER")


if __name__ == "__main__":
    main()
