"""Nodes that hold their users' data in files give the bits of one process, however many."""

from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from dealing import SUFFIX, deal
from hushrec.deployment.coordinator.planning import Policy
from hushrec.deployment.coordinator.roster import Roster
from hushrec.deployment.coordinator.run import RemoteBackend
from hushrec.deployment.coordinator.session import Session
from hushrec.deployment.node.database import NodeDatabase
from hushrec.deployment.node.worker import Worker
from hushrec.testing import BackendContract
from hushrec.testing.backend import PRIVACY, MemoryLink


def answering(path: Path):
    """Answer as a process does that is started for each message: from the file alone."""

    def answer(message: bytes) -> bytes:
        with NodeDatabase.open(path) as store:
            return Worker(store, tell=print).answer(message)

    return answer


class Told:
    """Events as a list; a failing test shows them."""

    def __init__(self):
        self.lines = []

    def tell(self, line):
        self.lines.append(line)
        print(line.to_json())

    def of(self, event):
        return [line for line in self.lines if line.event == event]


def federated(folder: Path, data, experiment, nodes: int, policy=Policy(), events=None):  # noqa: B008
    """Deal data out; return the link, the session and the roster."""
    contract, partition = deal(data, experiment, folder, nodes)
    link = MemoryLink({name: answering(folder / f"{name}{SUFFIX}") for name in partition})
    policy = policy.model_copy(update={"nodes": nodes, "backoff_seconds": 0.01})
    session = Session(contract, "run", link, policy, events or Told())
    return link, session, Roster.of("run", experiment, session.gather(), partition)


class OnNodes(BackendContract):
    nodes = 2

    @pytest.fixture(autouse=True)
    def _folder(self):
        with TemporaryDirectory() as folder:
            self.folder = Path(folder)
            yield

    def make(self, setup):
        _, session, roster = federated(self.folder, setup.split.data, setup.experiment, self.nodes)
        assert roster.newcomers == setup.split.newcomers
        promised = setup.experiment.privacy.promises
        assert roster.pool(promised=promised).tolist() == setup.clients.tolist()
        return RemoteBackend(setup.task, setup.experiment, roster, session)


class TestThree(OnNodes):
    nodes = 3


class Fewer(OnNodes):
    """The methods of the papers, under noise too, and what is kept or sent for each client."""

    @pytest.mark.parametrize("mode", PRIVACY)
    @pytest.mark.parametrize(
        "method", ["pfedrec", "fedrap", "fedrkg", "privrec", "lipm", "fednext"]
    )
    def test_every_method(self, method, mode):
        super().test_every_method(method, mode)

    @pytest.mark.parametrize("form", ["fedmf budgets", "lipm DPPS", "pfedrec unseen users"])
    def test_every_form(self, form):
        super().test_every_form(form)


class TestTwo(Fewer):
    nodes = 2


class TestFive(Fewer):
    nodes = 5
