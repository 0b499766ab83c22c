"""Sums of nodes: as bytes, in the clear, and as vectors, which are as long as is declared."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hushrec.aggregation import ExactSum, FixedPoint, LossSum, Update, UploadShape
from hushrec.errors import ConfigError, MessageError
from hushrec.federation.experiment import ExperimentRequest
from hushrec.federation.sums import (
    COUNTS,
    ExpectedSum,
    NodeSum,
    NodeSumMessage,
    RoundVector,
    round_shape,
)
from hushrec.kernels import pairs
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
        assert shape.entries < 4000


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


# ---------------------------------------------------------------- as bytes


def leb128(number: int) -> bytes:
    """The plain way to write a whole number."""
    digits = []
    while number >= 128:
        digits.append(number % 128 + 128)
        number //= 128
    return bytes([*digits, number])


def zigzag(number: int) -> int:
    return 2 * number if number >= 0 else -2 * number - 1


EDGES = [0, 1, -1, 63, 64, -64, -65, 2**13, 2**31, -(2**40), 2**62 - 1, -(2**62) + 1]


def test_numbers_are_written_as_the_plain_way_writes_them():
    rng = np.random.default_rng(0)
    drawn = rng.integers(-(2**61), 2**61, 300) >> rng.integers(0, 61, 300)
    rows = np.concatenate([EDGES, drawn]).reshape(-1, 2)
    shifts = np.zeros(2, np.int64)
    data = pairs.write_steps(rows, shifts)
    assert data.tobytes() == b"".join(leb128(zigzag(number)) for number in rows.ravel().tolist())
    back = np.empty_like(rows)
    assert pairs.read_steps(data, back, shifts) and np.array_equal(back, rows)
    keys = np.unique(rng.integers(0, 2**40, 200))
    data = pairs.write_keys(keys)
    gaps = np.diff(keys, prepend=-1) - 1
    assert data.tobytes() == b"".join(map(leb128, gaps.tolist()))
    back = np.empty_like(keys)
    assert pairs.read_keys(data, back, int(keys[-1]) + 1) and np.array_equal(back, keys)
    assert not pairs.read_keys(data, back, int(keys[-1])), "the last key does not exist"


@pytest.mark.parametrize(
    "data", [b"", b"\x80", b"\x80\x00", b"\x01\x01", b"\xff" * 9 + b"\x01", b"\xff" * 8 + b"\x7f"]
)
def test_bytes_that_are_no_number_are_refused(data):
    """None, a cut one, a longer form of 0, two, one of 10 digits, one of 63 bits."""
    read = np.frombuffer(data, np.uint8)
    assert not pairs.read_steps(read, np.empty((1, 1), np.int64), np.zeros(1, np.int64))
    assert not pairs.read_keys(read, np.empty(1, np.int64), 2**62)


SHAPE = UploadShape(5, {"items": 2}, {"bias": (2, 2)}, {"pairs": (2**40, 1)})
EXPECTED = ExpectedSum("run", 1, 3, SHAPE, 1e9, 2**61)


def a_sum(unit: int) -> NodeSum:
    """A sum whose numbers are multiples of ``unit`` steps."""
    arrays = {
        "ids/items": np.array([0, 4]),
        "rows/items": unit * np.array([[1, -2], [0, 3]]),
        "ids/pairs": np.array([7, 8, 2**40 - 1]),
        "rows/pairs": unit * np.array([[1], [-200], [3]]),
        "dense/bias": unit * np.array([[0, 1], [5, -6]]),
    }
    return NodeSum("run", 1, ExactSum.from_arrays(SHAPE, 3, arrays), LossSum(8, 3), 100, 0)


def test_a_sum_comes_back_and_a_power_of_two_costs_nothing():
    sizes = []
    for unit in (1, 2**16, 2**32, 3):
        sent = a_sum(unit).to_bytes()
        back = NodeSum.from_bytes(sent, EXPECTED)
        ours, theirs = back.summed.to_arrays(), a_sum(unit).summed.to_arrays()
        assert ours.keys() == theirs.keys()
        assert all(np.array_equal(ours[name], theirs[name]) for name in ours)
        assert (back.counts(), back.loss) == (a_sum(unit).counts(), LossSum(8, 3))
        message = NodeSumMessage.from_bytes(sent)
        sizes.append(sum(array.nbytes for array in message.arrays.values()))
    assert sizes[0] == sizes[1] == sizes[2] == 2 + 4 + (1 + 1 + 6) + (1 + 2 + 1) + 4
    assert len(sent) <= EXPECTED.most_bytes


def spoilt(message: NodeSumMessage):
    """Messages that must not count, with a word of the reason."""
    for name, array in message.arrays.items():
        yield replace(message, arrays={**message.arrays, name: array[:-1]}), "should|twice|number"
        longer = np.concatenate([array, array[-1:]])
        yield replace(message, arrays={**message.arrays, name: longer}), "should|twice|number"
        yield replace(message, arrays={**message.arrays, name: array.astype(np.int64)}), "uint8"
        left = {other: each for other, each in message.arrays.items() if other != name}
        yield replace(message, arrays=left), "lacks|should"
    for name in message.shifts:
        yield replace(message, shifts={**message.shifts, name: (0, 0, 0)}), "how"
        large = tuple(61 for _ in message.shifts[name])
        yield replace(message, shifts={**message.shifts, name: large}), "should|too large"
        negative = tuple(-1 for _ in message.shifts[name])
        yield replace(message, shifts={**message.shifts, name: negative}), "header"
    more = {**message.arrays, "ids/others": message.arrays["ids/items"]}
    yield replace(message, arrays=more), "undeclared"


def test_bytes_that_are_no_sum_of_this_shape_are_refused():
    messages = list(spoilt(NodeSumMessage.from_bytes(a_sum(1).to_bytes())))
    assert len(messages) > 20
    for message, reason in messages:
        with pytest.raises(MessageError, match=reason):
            NodeSum.from_bytes(message.to_bytes(), EXPECTED)
