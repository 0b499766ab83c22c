"""The stack: device sides in order, server sides in reverse."""

from dataclasses import dataclass

import numpy as np
import pytest

from hushrec.aggregation import ClientRows, ExactSum, Total, Update
from hushrec.data.splitting import SplitConfig, make_split
from hushrec.federation.backends import Machine
from hushrec.methods.fedmf import FedMF
from hushrec.methods.pfedrec import PFedRec
from hushrec.privacy.plan import NoPlan
from hushrec.privacy.protection import Mechanism, Protection
from hushrec.streams import SecretRound, SecretStreams, Streams
from hushrec.testing import Federation


@dataclass(frozen=True)
class Scale(Mechanism):
    """Multiplies on the device and divides on the server, writing down that it did."""

    name: str
    factor: float
    log: list

    def protect(self, update, view, secret):
        self.log.append((f"{self.name} protects", len(view), secret.number))
        return Update(update.clients, dense={k: a * self.factor for k, a in update.dense.items()})

    def finish(self, total, secret):
        self.log.append((f"{self.name} finishes", total.clients, secret.number))
        undone = {k: a / self.factor for k, a in total.dense.items()}
        return Total(total.clients, {}, undone), self


def test_in_order_on_the_device_and_reversed_on_the_server(tiny):
    log = []
    stack = Protection((Scale("clip", 2.0, log), Scale("noise", 8.0, log)))
    view = make_split(tiny, SplitConfig(), Streams(0)).train.take(np.array([1, 2, 3]))
    update = Update(3, dense={"head": np.full((3, 2), 0.25)})
    protected = stack.protect(update, view, SecretRound(4, SecretStreams(0)))
    np.testing.assert_array_equal(protected.dense["head"], np.full((3, 2), 4.0))
    np.testing.assert_array_equal(update.dense["head"], np.full((3, 2), 0.25))
    summed = ExactSum(view.n_items)
    summed.add(protected)
    total, following = stack.finish(summed, SecretRound(4, SecretStreams(0)))
    assert following == stack
    np.testing.assert_array_equal(total.dense["head"], [0.75, 0.75])
    assert log == [
        ("clip protects", 3, 4),
        ("noise protects", 3, 4),
        ("noise finishes", 3, 4),
        ("clip finishes", 3, 4),
    ]


def test_the_backend_protects_every_upload_before_it_is_summed(tiny):
    @dataclass(frozen=True)
    class Silence(Mechanism):
        def protect(self, update, view, secret):
            stack = update.rows["items"]
            quiet = ClientRows(stack.indptr, stack.ids, np.zeros_like(stack.rows))
            return Update(update.clients, rows={"items": quiet})

    view = make_split(tiny, SplitConfig(), Streams(0)).train
    sums = {}
    for name, protection in {"bare": Protection(), "silent": Protection((Silence(),))}.items():
        federation = Federation(FedMF(), view, protection=protection, machine=Machine(2, 4))
        sums[name] = federation.round().summed.total().rows["items"][1]
    assert np.abs(sums["bare"]).max() > 0
    assert np.abs(sums["silent"]).max() == 0


def test_mechanisms_see_the_numbers_that_travel(tiny):
    """A clip or a noise must act on a client's change, never on its own rows."""
    seen = []

    @dataclass(frozen=True)
    class Look(Mechanism):
        def protect(self, update, view, secret):
            seen.append(update.rows["items"])
            return update

    view, method = make_split(tiny, SplitConfig(), Streams(0)).train, PFedRec(PFedRec.Config(d=4))
    looking = Protection((Look(),))
    federation = Federation(method, view, protection=looking, machine=Machine(1, 100))
    shared = federation.shared
    federation.round()
    (stack,), own = seen, federation.store.read(np.arange(len(view)))["rows"]
    np.testing.assert_array_equal(stack.ids, own.ids)
    np.testing.assert_array_equal(stack.rows, own.rows - shared["items"][own.ids])
    assert not np.array_equal(stack.rows, own.rows)


@pytest.mark.parametrize(
    ("pooled", "up_bytes", "word"),
    [(False, 9, "raw updates"), (False, 0, "nothing"), (True, 0, "pooled")],
)
def test_a_run_that_asks_for_nothing_claims_nothing(pooled, up_bytes, word):
    statement = NoPlan(Protection(), pooled=pooled).statement((), 1, up_bytes=up_bytes)
    assert statement.guarantee == "none"
    assert statement.epsilon is None
    assert statement.statement.startswith("No")
    assert word in statement.statement


def test_a_method_that_uploads_private_parameters_is_told():
    plain, revealing = NoPlan(Protection()), NoPlan(Protection(), reveals=frozenset({"table"}))
    said = revealing.statement((), 1, up_bytes=9).statement
    assert said.endswith("This method uploads its clients' table.")
    assert "uploads its clients'" not in plain.statement((), 1, up_bytes=9).statement
