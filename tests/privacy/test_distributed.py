"""Noise that nodes add: enough with any so many of them gone, and nothing left for the server."""

import math
from dataclasses import replace
from functools import reduce

import numpy as np
import pytest
from scipy.stats import chi2, kstest
from test_runs import go, plan

from hushrec.aggregation import ExactSum, Steps, Update, UploadShape
from hushrec.api import train
from hushrec.errors import ConfigError
from hushrec.privacy.clipping import BIT, AdaptiveClip, FlatClip
from hushrec.privacy.noise import CentralGaussian, DistributedGaussian
from hushrec.privacy.protection import Protection
from hushrec.streams import SecretRound, SecretStreams
from hushrec.testing import MechanismContract

SHAPE = UploadShape(500, {"items": 20}, {"head": (30, 40)}, {"pairs": (3000, 1)})
DISTRIBUTED = {
    "privacy.mode": "distributed",
    "privacy.nodes": 5,
    "privacy.noise_seed": 2,
    "privacy.epsilon": 4.0,
    "privacy.delta": 1e-3,
}


class TestDistributedGaussian(MechanismContract):
    def make(self, shape):
        return DistributedGaussian(
            FlatClip(1.0), 1.5, "zero-out-one", shape, 7.0, nodes=5, tolerated=2
        )


def made(nodes, tolerated, clip=FlatClip(2.0)):  # noqa: B008 - a frozen value
    return DistributedGaussian(
        clip, 1.5, "zero-out-one", SHAPE, 7.0, nodes=nodes, tolerated=tolerated
    )


def shares(layer, number=1):
    return [
        layer.share(SecretRound(number, SecretStreams(f"node {node}")))
        for node in range(layer.nodes)
    ]


def entries(steps):
    parts = [*steps.tables.values(), *steps.spaces.values(), *steps.dense.values()]
    return np.concatenate([part.ravel() for part in parts]) / 2**32


@pytest.mark.parametrize(("nodes", "tolerated"), [(2, 0), (5, 0), (5, 2), (9, 3)])
def test_the_variance_is_as_accounted_with_none_and_with_all_that_may_be_gone(nodes, tolerated):
    layer, std = made(nodes, tolerated), 3.0  # 1.5 times a clip of 2
    everybody = shares(layer)
    for gone in (0, tolerated):
        left = entries(reduce(Steps.plus, everybody[gone:]))
        expected = std * math.sqrt((nodes - gone) / (nodes - tolerated))
        low, high = chi2.ppf([1e-5, 1 - 1e-5], len(left)) / len(left)
        assert low < left.var() / expected**2 < high
        assert kstest(left / expected, "norm").pvalue > 1e-3
        assert expected >= std * (1 - 1e-12), "never less than the account asks for"
    one_more = entries(reduce(Steps.plus, everybody[tolerated + 1 :]))
    assert one_more.std() < std, "one more gone than is tolerated, and it is not enough"


def test_shares_are_independent_and_whole_steps():
    first, second = (entries(share) for share in shares(made(5, 1))[:2])
    assert abs(np.corrcoef(first, second)[0, 1]) < 0.03  # 14,200 entries
    again = entries(shares(made(5, 1), number=2)[0])
    assert abs(np.corrcoef(first, again)[0, 1]) < 0.03


def test_the_bit_of_adaptive_clipping_is_shared_too():
    layer = made(4, 1, AdaptiveClip(1.0, 0.5, 0.2, 6.0))
    drawn = [
        sum(float(share.dense[BIT]) for share in shares(layer, number)[1:]) / 2**32
        for number in range(400)
    ]
    low, high = chi2.ppf([1e-5, 1 - 1e-5], 399) / 399
    assert low < np.var(drawn, ddof=1) / 36 < high


def test_one_process_plays_all_nodes(tiny):
    layer = made(5, 2)
    secret = SecretRound(1, SecretStreams(0))
    summed = ExactSum(500)
    total, _ = Protection((layer,)).finish(summed, secret)
    noise = np.concatenate([total.rows[name][1].ravel() for name in ("items", "pairs")])
    assert noise.std() == pytest.approx(3.0 * math.sqrt(5 / 3), rel=0.03)
    assert total.noise_std == pytest.approx(3.0 * math.sqrt(5 / 3))
    central = replace_by_central(layer)
    assert not np.any(entries_of(central.share(secret))), "centrally, nodes add nothing"
    said = go(tiny, DISTRIBUTED).summary.privacy
    assert 0.99 * 4 <= said.epsilon <= 4
    assert said.trust == "nodes"
    assert "a share from each of 5 nodes, of which 1 may drop out" in said.statement


def replace_by_central(layer):
    return CentralGaussian(layer.clip, layer.multiplier, layer.neighbours, layer.shape, 7.0)


def entries_of(steps):
    return [*steps.tables.values(), *steps.spaces.values(), *steps.dense.values()]


def test_it_costs_what_central_noise_costs(tiny):
    central = {**DISTRIBUTED, "privacy.mode": "central"}
    del central["privacy.nodes"]
    assert plan(tiny, DISTRIBUTED).event == plan(tiny, central).event


def test_methods_with_a_form_for_noise_have_it(tiny):
    run = train(tiny, "fednext", settings=DISTRIBUTED)
    assert run.summary.rounds == 2
    assert "head" in run.model.shared


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({**DISTRIBUTED, "privacy.tolerated": 4}, "use at most 3"),
        ({k: v for k, v in DISTRIBUTED.items() if k != "privacy.nodes"}, "privacy.nodes = N"),
        ({**DISTRIBUTED, "privacy.mode": "central"}, "needs privacy.mode = distributed"),
        ({**DISTRIBUTED, "privacy.scale": 1.0}, "privacy.scale is for local noise"),
        (
            {**DISTRIBUTED, "cohort.kind": "poisson", "cohort.probability": 0.5},
            "sampling amplifies nothing",
        ),
        (
            {**DISTRIBUTED, "cohort.kind": "fixed", "cohort.size": 20},
            "knows who takes part",
        ),
        (
            {**DISTRIBUTED, "privacy.selection_share": 0.2},
            "would see all validation scores",
        ),
    ],
)
def test_what_cannot_be_is_refused(settings, message, tiny):
    with pytest.raises(ConfigError, match=message):
        go(tiny, settings)


def test_uploads_are_clipped_as_under_central_noise():
    layer, update = made(3, 0), Update(1, dense={"head": np.full((1, 30, 40), 9.0, np.float32)})
    clipped = replace(layer, shape=UploadShape(500, {}, {"head": (30, 40)})).protect(
        update, None, SecretRound(1, SecretStreams(0))
    )
    assert np.linalg.norm(clipped.dense["head"]) <= 2.0
