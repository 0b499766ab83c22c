"""Nodes in files that sum securely, over a link that can be cut and listened to."""

from pathlib import Path

import numpy as np
from test_nodes_backend import Told

from dealing import SUFFIX, deal
from hushrec.data.splitting import make_split
from hushrec.deployment.coordinator.planning import Policy
from hushrec.deployment.coordinator.roster import Roster
from hushrec.deployment.coordinator.run import RemoteBackend
from hushrec.deployment.coordinator.session import Session
from hushrec.deployment.coordinator.summing import RecoveryJournal, SecureSumming
from hushrec.deployment.node.database import NodeDatabase
from hushrec.deployment.node.worker import NodeCredentials, Worker
from hushrec.federation.contract import NodeRegistry, SecureSums
from hushrec.federation.experiment import ExperimentRequest
from hushrec.federation.setup import set_up
from hushrec.federation.sums import StageRequest
from hushrec.io.codec import kind_of
from hushrec.secagg import Identity
from hushrec.streams import Streams
from hushrec.testing import taste_world
from hushrec.testing.backend import MemoryLink

ONCE = 1e9
"""Seconds of backoff: no request that failed is sent again before its deadline."""
QUICK = Policy(min_nodes=1, backoff_seconds=ONCE)
SECURE = SecureSums()


class Wire(MemoryLink):
    """A link that keeps everything, and loses what it is told to lose."""

    def __init__(self, nodes):
        super().__init__({name: self._through(name, answer) for name, answer in nodes.items()})
        self.workers = nodes
        self.seen = []
        """(name, step or None, request, answer)"""
        self.lost = set()
        """(name, stage), or (name, stage, piece), of requests that do not arrive."""
        self.unheard = set()
        """(name, stage) of answers that do not arrive; each is lost once."""
        self.change = lambda name, step, request: request

    def _through(self, name, answer):
        def through(request):
            step = StageRequest.from_bytes(request) if kind_of(request) == "stage" else None
            at = (name, None if step is None else step.stage)
            if at in self.lost or (step is not None and (*at, step.piece) in self.lost):
                raise OSError("cut")
            said = answer(self.change(name, step, request))
            self.seen.append((name, step, request, said))
            if at in self.unheard:
                self.unheard.remove(at)
                raise OSError("cut")
            return said

        return through

    def answers(self, stage):
        """What nodes answered in a stage."""
        return [(name, said) for name, step, _, said in self.seen if step and step.stage == stage]


class Secured:
    """A federation whose sums are secure."""

    def __init__(self, folder: Path, data, experiment, nodes, secure=SECURE, policy=QUICK):
        self.experiment, self.events, self.folder = experiment, Told(), folder
        self.contract, self.partition = deal(data, experiment, folder, nodes, secure)
        self.identities = {name: Identity.generate() for name in self.partition}
        public = {name: identity.public for name, identity in self.identities.items()}
        self.registered, self.journal = (
            NodeRegistry("test", public),
            RecoveryJournal(folder / "sums"),
        )
        self.wire = Wire({name: self.answering(name) for name in self.partition})
        self.policy = policy.model_copy(update={"nodes": nodes})
        self.start()
        self.roster = Roster.of("run", experiment, self.session.gather(), self.partition)

    def start(self):
        """Start the server, anew."""
        self.session = Session(self.contract, "run", self.wire, self.policy, self.events)
        for name in self.partition:
            if hasattr(self, "roster"):
                self.session.known[name] = name
        self.summing = SecureSumming(self.session, self.registered, self.journal)

    def credentials(self, name):
        return NodeCredentials(self.registered, self.identities[name])

    def store(self, name):
        return NodeDatabase.open(self.folder / f"{name}{SUFFIX}")

    def answering(self, name):
        """Answer as a process does that is started for each message: from the file alone."""

        def answer(message: bytes) -> bytes:
            with self.store(name) as store:
                return Worker(store, tell=print, credentials=self.credentials(name)).answer(message)

        return answer


class World:
    """A run on secure nodes, round by round, and the exact sums of one process beside it."""

    def __init__(self, folder, nodes=4, method="pfedrec", secure=SECURE, policy=QUICK, **more):
        if method in ("pfedrec", "fedmf"):
            more = {"d": 8, "rounds": 3, **more}
        rounds = more.pop("rounds", None)
        self.experiment = ExperimentRequest(
            "tastes", method, settings=more, rounds=rounds
        ).experiment()
        self.split = make_split(taste_world(), self.experiment.split, Streams(0))
        self.setup = set_up(self.experiment, self.split)
        self.plan = self.setup.plan
        self.server, self.state = self.setup.start(key="1")
        self.task, self.cohort = self.server.task, self.server.clients
        self.made = Secured(folder, self.split.data, self.experiment, nodes, secure, policy)
        self.wire, self.events = self.made.wire, self.made.events

    def backend(self):
        """The nodes, as a server sees them that was started just now."""
        self.made.start()
        made = self.made
        return RemoteBackend(self.task, self.experiment, made.roster, made.session, made.summing)

    def download(self, number=1, shared=None):
        state = self.plan.protection.state
        return self.task.download(number, shared or self.task.initial, self.cohort, state)

    def train(self, number=1, shared=None):
        """Let a server that was started just now sum a round."""
        download = self.download(number, shared)
        protection = self.task.protection_of(download.to(self.cohort[:0]))
        return self.backend().train(download, protection, self.cohort)

    def exact(self, number=1, without=()):
        """What one process sums over the users of the other nodes."""
        gone = [self.made.partition[name].clients for name in without]
        left = np.setdiff1d(self.cohort, np.concatenate([*gone, np.zeros(0, np.int64)]))
        download = self.download(number)
        protection = self.task.protection_of(download.to(self.cohort[:0]))
        fresh, _ = self.setup.start(key="1")
        return fresh.backend.train(download, protection, left)

    def table(self, name, query):
        with self.made.store(name) as store:
            return store.rows(query)

    def uploads(self):
        """How often everybody paid, by node."""
        query = "SELECT uploads, COUNT(*) FROM ledger GROUP BY uploads"
        return {name: dict(self.table(name, query)) for name in self.made.partition}

    def rounds(self):
        """The last round that each node has done."""
        return [self.table(name, "SELECT round FROM runs")[0][0] for name in self.made.partition]


def same(one, other):
    """Whether two collected sums are the same, to the last bit."""
    mine, theirs = one.summed.to_arrays(), other.summed.to_arrays()
    assert mine.keys() == theirs.keys()
    for name in mine:
        np.testing.assert_array_equal(mine[name], theirs[name], err_msg=name)
    assert one.summed.clients == other.summed.clients
    assert (one.loss, one.up_bytes, one.zeroed_out) == (
        other.loss,
        other.up_bytes,
        other.zeroed_out,
    )
