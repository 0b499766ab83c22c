"""Secure sums: a vector is as long as what the method declares, in every round."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hushrec.aggregation import ExactSum, FixedPoint, Update, UploadShape
from hushrec.errors import ConfigError
from hushrec.federation.experiment import ExperimentRequest
from hushrec.federation.sums import COUNTS, NodeSum, RoundVector, round_shape
from hushrec.methods.base import method_class, method_names
from hushrec.methods.statistics.embedded_experts import (
    Cooccurrence,
    PopularityExpert,
    RecentTransitions,
    Transitions,
)
from hushrec.methods.statistics.experts import Counting
from hushrec.methods.statistics.fedmix import FedMixConfig
from hushrec.privacy.protection import Protection
from hushrec.secagg.vectors import WIDE
from hushrec.testing import Federation, clients_of

ITEMS = 20
SHORT = {"fedmix": {"newton_rounds": 1, "network_rounds": 1}}
FEDERATED = [name for name in method_names() if not method_class(name).traits.pooled]


def world():
    """Ten clients with features of users and items, of different lengths."""
    generator = np.random.default_rng(0)
    return clients_of([generator.permutation(ITEMS)[: 4 + n].tolist() for n in range(10)], ITEMS)


def vectors(method, rounds):
    """Play rounds; return the shape of each one's sum and the vector that a node would send."""
    federation = Federation(method, world())
    out = []
    for number in range(1, rounds + 1):
        download = federation.task.download(number, federation.shared)
        shape = round_shape(federation.task, Protection(), download)
        collected = federation.round()
        told = collected.loss, collected.up_bytes, collected.zeroed_out
        summed = NodeSum("run", number, collected.summed, *told)
        form = RoundVector(shape, 10, 2**30)
        out.append((shape, form.layout, list(form.pack(summed, 1))))
    return out


@pytest.mark.parametrize("name", FEDERATED)
def test_a_vector_is_as_long_as_its_declared_parts(name):
    method = method_class(name)(method_class(name).Config.model_validate(SHORT.get(name, {})))
    for shape, layout, pieces in vectors(method, min(method.planned_rounds, 4)):
        declared = sum(
            # Ten clients with multiples of 2^-16 up to 1 need four bytes, with whole numbers two.
            math.prod(size) * ({16: 4, 0: 2}[shape.grids[each].bits] if each in shape.grids else 8)
            for each, size in shape.whole.items()
        )
        (piece,) = pieces
        assert len(piece) == layout.nbytes == declared + 8 * (len(COUNTS) + WIDE)


def test_the_default_declares_what_it_counts():
    """Pairs are items squared, popularity has one key an item, and weights are one row."""
    made = ExperimentRequest("demo", "fedmix", settings=SHORT["fedmix"]).experiment().make_method()
    count, candidates, weights, network = (shape for shape, _, _ in vectors(made, 4))
    groups = 4  # the three thirds of the catalogue, and unknown
    assert count == UploadShape(
        ITEMS,
        {},
        {},
        {
            f"{held}{name}": (keys, 1)
            for name, keys in {
                "transitions": ITEMS**2,
                "recent-transitions": ITEMS**2,
                "cooccurrence": ITEMS**2,
                "popularity": ITEMS,
                "categories": groups**2,
            }.items()
            for held in ("held_out/", "")
        },
        {
            f"{held}{name}": FixedPoint(bits)
            for name, bits in {
                "transitions": 16,
                "recent-transitions": 16,
                "cooccurrence": 0,
                "popularity": 0,
            }.items()
            for held in ("held_out/", "")
        },
    )
    for shape in (candidates, weights, network):
        assert {keys for keys, _ in shape.spaces.values()} == {1}
        assert shape.entries < 2000


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 5), max_size=12), min_size=1, max_size=4),
    st.sampled_from(["merged", "kept", "baskets"]),
    st.integers(1, 3),
)
def test_experts_keep_to_what_they_declare(histories, mode, held):
    """With every history: the counts without held-out items, and what those add or take away."""
    if mode == "merged":
        histories = [list(dict.fromkeys(items)) for items in histories]
    view = clients_of(histories, 6)
    view = replace(view, merged=mode == "merged", repeats=mode == "baskets")
    config = FedMixConfig(latest=3)
    made = [
        kind(config) for kind in (Transitions, RecentTransitions, Cooccurrence, PopularityExpert)
    ]
    applicable = [expert for expert in made if expert.is_applicable(view)]
    less = np.minimum(view.positives.lengths, held)
    rows = Counting(0, 1, np.zeros(0, np.bool_)).count(applicable, view, less)
    declared = {name for name, each in rows.items() if each.grid is not None}
    whole = {"merged": 4, "kept": 2, "baskets": 2}[mode]
    assert len(declared) == 2 * whole, "an item that comes again is counted again"
    assert all(each.keeps_grid for each in rows.values())


def test_an_item_that_comes_again_would_be_too_much():
    """The control: were transitions declared all the same, the upload would be refused."""
    view = replace(clients_of([[1, 2, 1]], 6), merged=True)
    counted = Transitions(FedMixConfig()).count(view)
    with pytest.raises(ConfigError, match=r"'pairs' is not what the method declares.*2\^-16"):
        ExactSum(6).add(Update(1, {"pairs": counted}))
