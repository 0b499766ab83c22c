"""A mechanism with a guarantee of its own: what it states is checked, composed and attacked."""

from dataclasses import dataclass, replace

import numpy as np
import pytest

import hushrec
from hushrec.aggregation import UploadShape
from hushrec.errors import ConfigError
from hushrec.privacy import calibration
from hushrec.privacy.accountant import Everybody, Gaussian, Grid, Pure, epsilon_of
from hushrec.privacy.noise import LocalMechanism
from hushrec.privacy.protection import PrivacyTarget, Release
from hushrec.testing import MechanismContract

MODE = {"privacy.mode": "mechanism", "privacy.mechanism": "own", "privacy.epsilon": 2.0}


@dataclass(frozen=True)
class Coin(LocalMechanism):
    """Sends nothing, and the sign of the first entry by randomised response."""

    shape: UploadShape
    epsilon: float = 1.0
    stated: float | None = None

    def calibrated(self, target):
        return replace(self, epsilon=target.epsilon / target.uploads)

    def release(self):
        return Release(Pure(self.stated or self.epsilon), "the sign of an entry")

    def randomise(self, arrays, view, secret):
        truth = 1 / (1 + np.exp(-self.epsilon))
        for client, number in enumerate(view.clients):
            sign = 1
            for array in arrays.values():
                sign = -1 if array[client].sum() < 0 else sign
                array[client] = 0
            (word,) = secret.words("coin", int(number)).take(1)
            first = next(iter(arrays.values()))
            first[client, 0] = sign if int(word) < truth * 2**64 else -sign


@pytest.fixture
def own(monkeypatch):
    """Install a mechanism under the name "own"."""

    def install(make):
        monkeypatch.setattr(calibration, "find", lambda group, name: make)

    return install


def test_the_accountant_composes_what_is_stated(own):
    own(Coin)
    run = hushrec.train("demo", "fedmf", rounds=4, settings=MODE)
    privacy = run.summary.privacy
    assert privacy.epsilon == privacy.spent_epsilon == pytest.approx(2.0)
    assert privacy.delta == 0
    assert privacy.account == [{"event": "pure", "epsilon": 0.5, "count": 4}]
    assert privacy.trust == "nobody"
    assert "the sign of an entry (mechanism 'own', which states this itself)" in (privacy.statement)


class OnSum(Coin):
    def release(self):
        event = Gaussian(9.0, Everybody(), "zero-out-one", Grid(2.0**40, 10))
        return Release(event, "noise on the sum", "zero-out-one", on_sum=True)


def test_a_mechanism_on_sums_trusts_whoever_sums(own):
    own(OnSum)
    told = hushrec.train("demo", "fedmf", rounds=2, settings=MODE).summary.privacy
    assert (told.trust, told.neighbours) == ("aggregator", "zero-out-one")
    assert told.epsilon == epsilon_of(OnSum(None).release().event, 2, told.delta)
    with pytest.raises(ConfigError, match="accounted for without sampling: use cohort"):
        sampled = {"cohort.kind": "poisson", "cohort.probability": 0.5}
        hushrec.train("demo", "fedmf", rounds=2, settings={**MODE, **sampled})


def stating(release):
    """Return a mechanism that states this."""
    return type("Stating", (Coin,), {"release": lambda self: release})


def gaussian(neighbours="replace-one", grid=None):
    return Gaussian(9.0, Everybody(), neighbours, grid)


@pytest.mark.parametrize(
    ("release", "message"),
    [
        (None, "states no guarantee, so no epsilon can be given"),
        (Release(Pure(3.0), ""), "spends epsilon 3 in 1 uploads, more than privacy.epsilon = 2"),
        (Release(gaussian(), ""), "with the grid of its discrete noise"),
        (Release(gaussian("zero-out-one", Grid(2.0**40, 1)), ""), "for the stated neighbours"),
        (Release(Pure(1.0), "", "zero-out-one"), "must state its guarantee for replace-one"),
    ],
)
def test_what_is_not_stated_well_is_refused(own, release, message):
    own(stating(release))
    with pytest.raises(ConfigError, match=message):
        hushrec.train("demo", "fedmf", rounds=1, settings=MODE)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"privacy.mode": "mechanism", "privacy.epsilon": 1.0}, r"needs privacy\.mechanism"),
        ({"privacy.mode": "mechanism", "privacy.mechanism": "own"}, r"and privacy\.epsilon"),
        ({**MODE, "privacy.scale": 1.0}, r"privacy\.scale does nothing with privacy\.mode"),
        (
            {"privacy.mode": "central", "privacy.epsilon": 1.0, "privacy.mechanism": "own"},
            r"privacy\.mechanism needs privacy\.mode = mechanism",
        ),
        (MODE, "unknown mechanism 'own'; no mechanism is installed"),
    ],
)
def test_settings_that_do_not_fit_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        hushrec.train("demo", "fedmf", rounds=1, settings=settings)


class TestCoin(MechanismContract):
    adds_noise = False
    covers_spaces = False

    def make(self, shape):
        return Coin(shape)


@pytest.mark.parametrize("truly", [2.5, 4.0])
def test_the_attack_refutes_a_false_statement(truly):
    class Liar(Coin):
        def calibrated(self, target: PrivacyTarget):
            return replace(self, epsilon=truly, stated=1.0)

    class Contract(MechanismContract):
        adds_noise = covers_spaces = False

        def make(self, shape):
            return Liar(shape)

    with pytest.raises(AssertionError, match="an attack shows an epsilon of"):
        Contract().test_a_stated_guarantee_withstands_an_attack()
