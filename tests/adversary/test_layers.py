"""A layer of another package may do anything to an upload: the stated epsilon stays true."""

import math
from dataclasses import dataclass, replace

import numpy as np
import pytest

from hushrec.aggregation import UploadShape
from hushrec.data.splitting import make_split
from hushrec.errors import ConfigError
from hushrec.federation import setup as setting_up
from hushrec.federation.backends import Machine
from hushrec.federation.experiment import ExperimentRequest
from hushrec.federation.setup import set_up
from hushrec.privacy.accountant import Everybody, Gaussian, epsilon_of
from hushrec.privacy.protection import Mechanism
from hushrec.streams import Streams
from hushrec.testing import taste_world


@dataclass(frozen=True)
class Against(Mechanism):
    """Makes a vote of every upload: data speak for one direction, and no data against it."""

    shape: UploadShape

    def protect(self, update, view, secret):
        empty = np.diff(view.positives.indptr[view.client_indptr]) == 0
        sign = np.where(empty, -1e6, 1e6)
        rows = {
            name: replace(
                of, rows=np.full_like(of.rows, 1) * np.repeat(sign, np.diff(of.indptr))[:, None]
            )
            for name, of in update.rows.items()
        }
        dense = {
            name: (np.ones_like(of) * sign.reshape(-1, *[1] * (of.ndim - 1))).astype(of.dtype)
            for name, of in update.dense.items()
        }
        return replace(update, rows=rows, dense=dense)


@dataclass(frozen=True)
class Broken(Mechanism):
    """Divides by what may be zero."""

    shape: UploadShape

    def protect(self, update, view, secret):
        dense = {name: np.full_like(array, np.nan) for name, array in update.dense.items()}
        rows = {
            name: replace(of, rows=np.full_like(of.rows, np.inf))
            for name, of in update.rows.items()
        }
        return replace(update, rows=rows, dense=dense)


@dataclass(frozen=True)
class Heavier(Mechanism):
    """Weights what arrives, which was clipped before."""

    shape: UploadShape

    def receive(self, update, clients):
        return update


def world(monkeypatch, layer, data, method, **settings):
    """Set up a run of one round with a layer; return its plan and what everybody's sum is."""
    monkeypatch.setattr(setting_up, "find", lambda group, name: _found(group, name, layer))
    asked = {
        "privacy.mode": "central",
        "privacy.noise_seed": 0,
        "privacy.epsilon": 1.0,
        "privacy.clip": 1.0,
        "privacy.layers": ["vote"],
        **settings,
    }
    experiment = ExperimentRequest(data.name, method, rounds=1, settings=asked).experiment()
    made = set_up(experiment, make_split(data, experiment.split, Streams(0), experiment.silos))
    server, state = made.start(Machine(threads=1))
    download = server.task.download(1, state.shared, server.clients, state.protection)
    protection = server.task.protection_of(download.to(server.clients[:0]))
    return made.plan, server.backend.train(download, protection, server.clients).summed.total()


def _found(group, name, layer, honest=setting_up.find):
    return layer if group == "mechanisms" else honest(group, name)


def distance(one, other):
    """Return the L2 distance of two sums."""
    squares = 0.0
    for name in one.rows.keys() | other.rows.keys():
        found = {}
        for sign, total in ((1.0, one), (-1.0, other)):
            for key, row in zip(*total.rows[name], strict=True):
                found[int(key)] = found.get(int(key), 0.0) + sign * row.astype(np.float64)
        squares += sum(float((row**2).sum()) for row in found.values())
    for name, array in one.dense.items():
        squares += float(((array - other.dense[name]) ** 2).sum())
    return math.sqrt(squares)


@pytest.mark.parametrize("method", ["fedncf", "privrec"])
def test_what_a_layer_makes_of_nothing_is_nothing(method, monkeypatch):
    """The true epsilon of two sums that are so far apart is at most the claimed one."""
    data = taste_world()
    plan, with_user = world(monkeypatch, Against, data, method)
    _, without = world(monkeypatch, Against, data.select(data.user != 31), method)
    noise = plan.protection.mechanisms[-1].noise_std()
    moved = distance(with_user, without)
    assert moved > 0.9, "the layer does act"
    true = epsilon_of(Gaussian(noise / moved, Everybody(), "zero-out-one"), 1, plan.delta)
    assert true <= plan.statement([], 0).epsilon * (1 + 1e-6)


def test_nan_of_a_layer_counts_as_nothing(monkeypatch):
    _, total = world(monkeypatch, Broken, taste_world(), "fedmf")
    assert not any(rows.any() for _, rows in total.rows.values())


def test_a_layer_that_weights_clipped_uploads_is_refused(monkeypatch):
    with pytest.raises(ConfigError, match="'vote' weights uploads after they are clipped"):
        world(monkeypatch, Heavier, taste_world(), "fedmf")


def test_no_layer_acts_on_what_already_carries_noise(monkeypatch):
    settings = {"privacy.mode": "local-gradients", "privacy.clip": 0.1, "guidance": "fixed"}
    with pytest.raises(ConfigError, match="already carries its noise"):
        world(monkeypatch, Against, taste_world(), "fedrkg", **settings)
