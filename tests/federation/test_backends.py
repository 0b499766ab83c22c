"""Everybody in one process, in any chunks and threads, gives what clients alone give, in bytes."""

from dataclasses import replace

import numpy as np
import pytest

from hushrec.aggregation import ClientRows, Update
from hushrec.data.splitting import make_split
from hushrec.errors import ConfigError
from hushrec.federation.backends import Machine
from hushrec.federation.experiment import ExperimentRequest
from hushrec.federation.setup import set_up
from hushrec.methods.base import Fitted, Method, Traits, method_class, method_names
from hushrec.private import PerClient
from hushrec.streams import Streams
from hushrec.testing import BackendContract, taste_world
from hushrec.testing.backend import GAUSSIAN


class TestInProcess(BackendContract):
    machine = Machine(threads=2, chunk=7)


def test_only_pairs_and_their_mixture_refuse_local_noise():
    """What the contract passes over as refused is known: nothing else hides behind it."""
    refused = []
    for name in method_names():
        if not method_class(name).traits.pooled:
            experiment = ExperimentRequest("tastes", name, settings=GAUSSIAN, rounds=1).experiment()
            split = make_split(taste_world(), experiment.split, Streams(0))
            try:
                set_up(experiment, split)
            except ConfigError:
                refused.append(name)
    assert refused == ["fedease", "fedmix", "fednext"]


@pytest.mark.parametrize(
    "broken", ["unprotected", "another seed", "one client forgotten", "noise of another round"]
)
def test_the_contract_bites(broken):
    class Broken(TestInProcess):
        def make(self, setup):
            backend = super().make(setup)
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
                streams = replace(setup.task.streams, seed=1)
                backend.task = replace(setup.task, streams=streams)
            return backend

    with pytest.raises(AssertionError):
        Broken().compare(
            "fedmf",
            {"privacy.mode": "local-gaussian", "privacy.noise_seed": 0, "privacy.scale": 0.1},
        )


class Clustered(Method):
    """Counts in two clusters: each client is sent, and scores by, the counts of its own one."""

    name = "clustered"
    traits = Traits(rounds=3)

    def init(self, view, streams):
        return {"counts": np.ones((2, view.n_items), np.float32)}

    def private_fields(self, view, shared, streams):
        return {"received": PerClient(np.ones(view.n_items, np.float32))}

    def download(self, shared):
        return {}

    def download_own(self, shared, clients):
        return {"mine": shared["counts"][clients % 2]}

    def fit(self, shared, private, view, now):
        past = view.positives
        owner = np.repeat(np.arange(len(view)), past.lengths)
        seen = 1 / shared["mine"][owner, past.values]
        parity = (view.clients % 2)[owner]
        rows = np.stack([seen * (parity == 0), seen * (parity == 1)], 1).astype(np.float32)
        update = Update(len(view), {"counts": ClientRows(past.indptr, past.values, rows)})
        return Fitted(update, {"received": shared["mine"]})

    def apply(self, shared, total):
        ids, summed = total.rows["counts"]
        counts = shared["counts"].copy()
        counts[:, ids] += summed.T.astype(np.float32)
        return {"counts": counts}

    def score(self, shared, private, history):
        return np.asarray(private["received"])


def test_a_download_may_differ_from_client_to_client(monkeypatch):
    monkeypatch.setattr("hushrec.federation.experiment.method_class", lambda name: Clustered)
    TestInProcess().compare("clustered", {})
    TestInProcess().compare("clustered", {"cohort.kind": "fixed", "cohort.size": 13})
    TestInProcess().compare(
        "clustered", {"privacy.mode": "central", "privacy.noise_seed": 0, "privacy.epsilon": 8.0}
    )
