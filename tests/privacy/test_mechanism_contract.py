"""The contract of mechanisms bites: each rule refuses the defect that it is there for."""

from dataclasses import replace

import numpy as np
import pytest

from hushrec.privacy.clipping import AdaptiveClip, FlatClip, client_norms
from hushrec.privacy.clipping import _factors as factors
from hushrec.privacy.clipping import _scaled as scaled
from hushrec.privacy.noise import CentralGaussian, LocalNoise
from hushrec.streams import SecretRound, SecretStreams
from hushrec.testing import MechanismContract


class SilentHead(CentralGaussian):
    def noise(self, secret, part=1.0):
        added = super().noise(secret, part)
        return replace(added, dense={"head": np.zeros_like(added.dense["head"])})


class SilentPairs(CentralGaussian):
    def noise(self, secret, part=1.0):
        return replace(super().noise(secret, part), spaces={})


class SameEveryRound(CentralGaussian):
    def noise(self, secret, part=1.0):
        return super().noise(SecretRound(1, secret.streams), part)


class SameEverywhere(CentralGaussian):
    def noise(self, secret, part=1.0):
        class Deaf(SecretStreams):
            def words(self, purpose, round_number, user=-1):
                return super().words("noise", round_number, user)

        return super().noise(SecretRound(secret.number, Deaf(secret.streams.root)), part)


class SameForEverybody(LocalNoise):
    def protect(self, update, view, secret):
        return super().protect(update, replace(view, users=np.zeros_like(view.users)), secret)


class RealNumbers(LocalNoise):
    def protect(self, update, view, secret):
        sent = super().protect(update, view, secret)
        drawn = np.random.default_rng(secret.number)
        dense = {
            name: (array + 1e-3 * drawn.standard_normal(array.shape)).astype(np.float32)
            for name, array in sent.dense.items()
        }
        return replace(sent, dense=dense)


class TablesAlone(FlatClip):
    def protect(self, update, view, secret):
        norms = client_norms(replace(update, dense={}), self.power)
        return scaled(update, factors(norms, self.bound))


class CountsNothing(AdaptiveClip):
    def protect(self, update, view, secret):
        sent = super().protect(update, view, secret)
        bits = {
            name: np.where(array == 0, 0.5, array) if array.ndim == 1 else array
            for name, array in sent.dense.items()
        }
        return replace(sent, dense=bits)


class Stops(FlatClip):
    """Takes the sum of everybody's upload for its bound: one user decides for all."""

    def protect(self, update, view, secret):
        most = min(self.bound, 1 / client_norms(update, 2).max())
        return FlatClip(most).protect(update, view, secret)


def central(of):
    return lambda shape: of(FlatClip(1.0), 1.5, "zero-out-one", shape, 7.0)


def local(of):
    return lambda shape: of("gaussian", 0.3, shape)


NOISES = [
    "test_noise_covers_every_number",
    "test_noise_goes_its_own_way",
    "test_what_is_sent_are_whole_steps",
    "test_nothing_stays_nothing",
]
DEFECTS = [
    (central(SilentHead), "test_noise_covers_every_number", "'head'"),
    (central(SilentPairs), "test_noise_covers_every_number", "'pairs'"),
    (central(SameEveryRound), "test_noise_goes_its_own_way", "in two rounds"),
    (central(SameEverywhere), "test_noise_goes_its_own_way", "' and '"),
    (local(SameForEverybody), "test_noise_goes_its_own_way", "two clients"),
    (local(RealNumbers), "test_what_is_sent_are_whole_steps", "off the grid"),
    (
        lambda shape: CountsNothing(1.0, 0.5, 0.2, 3.0),
        "test_nothing_stays_nothing",
        "sent for nothing",
    ),
    (lambda shape: Stops(1.0), "test_devices_do_not_see_each_other", "depends on the batch"),
]


def tried(make):
    """Return the contract for a mechanism."""
    contract = MechanismContract()
    contract.make = make
    contract.covers_spaces = not isinstance(contract.make(contract._shape()), LocalNoise)
    return contract


@pytest.mark.parametrize(("make", "rule", "words"), DEFECTS)
def test_a_defect_is_refused(make, rule, words):
    with pytest.raises(AssertionError, match=words):
        getattr(tried(make), rule)()


@pytest.mark.parametrize("make", [central(CentralGaussian), local(LocalNoise)])
def test_what_keeps_to_it_is_not(make):
    for rule in NOISES:
        getattr(tried(make), rule)()


@pytest.mark.parametrize("only", [None, "head"])
def test_a_norm_that_leaves_arrays_out_is_refused(only):
    contract = tried(lambda shape: TablesAlone(1.0))
    with pytest.raises(AssertionError, match="larger than its bound"):
        contract.test_what_is_sent_keeps_to_the_bound(only, 2.0)
    contract.test_what_is_sent_keeps_to_the_bound("items", 2.0)
