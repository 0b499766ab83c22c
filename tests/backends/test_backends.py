"""Everybody in one process, in any chunks and threads, gives what clients alone give, in bytes."""

from dataclasses import replace

import pytest

from hushrec.backends.inprocess import Machine
from hushrec.prepare import prepare
from hushrec.testing import BackendContract


class TestInProcess(BackendContract):
    machine = Machine(threads=2, chunk=7)

    def make(self, server, split):
        return prepare(server.experiment, split, server.plan, self.machine)[0].backend


@pytest.mark.parametrize(
    "broken", ["unprotected", "another seed", "one client forgotten", "noise of another round"]
)
def test_the_contract_bites(broken):
    class Broken(TestInProcess):
        def make(self, server, split):
            backend = super().make(server, split)
            honest = backend.train

            def train(download, protection, cohort):
                if broken == "unprotected":
                    protection = replace(protection, mechanisms=())
                if broken == "one client forgotten":
                    cohort = cohort[1:]
                if broken == "noise of another round":
                    download = replace(download, round=download.round + 1)
                return honest(download, protection, cohort)

            backend.train = train
            if broken == "another seed":
                streams = replace(server.task.streams, seed=1)
                backend.task = replace(server.task, streams=streams)
            return backend

    with pytest.raises(AssertionError):
        Broken().compare("fedmf", {"privacy.mode": "local-gaussian", "privacy.scale": 0.1})
