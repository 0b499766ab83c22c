"""The sum is exact over whoever is left, or there is none."""

import hashlib
import secrets
from base64 import urlsafe_b64encode
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hushrec.errors import ConfigError, MessageError, TooFewError
from hushrec.secagg import (
    SetupServer,
    SetupTerms,
    Stage,
    SumNode,
    SumServer,
    VectorLayout,
)
from hushrec.secagg.messages import BOTH_BYTES, colluders_of
from hushrec.secagg.protocol import later_seed
from secure_sums import (
    Play,
    identities,
    make_terms,
    next_sum,
    play,
    random_vectors,
    run_in_memory,
    wrapped_sum,
)


@pytest.mark.parametrize("count", [3, 4, 7])
def test_sums_are_exact(count):
    people = identities(count)
    vectors = random_vectors(people, 50)
    vectors["a"][:4] = [2**63 - 1, -(2**63), 0, -1]
    total, survivors = run_in_memory(people, vectors, make_terms(people, 50))
    assert survivors == tuple(people)
    assert total.dtype == np.int64
    assert total.tolist() == wrapped_sum(vectors.values())


def test_signs_come_out_right_where_the_sum_fits():
    """On the way everything wraps; the end is read with its sign."""
    people = identities(3)
    columns = [(2**63 - 1, 5, -6), (-(2**63), 2**63 - 1, 1), (2**62, -(2**62), -1), (-1, -1, -1)]
    vectors = dict(zip(people, np.array(columns, np.int64).T, strict=True))
    total, _ = run_in_memory(people, vectors, make_terms(people, 4))
    assert total.tolist() == [sum(column) for column in columns]


def test_wide_numbers_sum_exactly():
    people = identities(4)
    terms = make_terms(people, 2, wide=("loss", "hits"))
    wide = {name: {"loss": (-1) ** k * 2**300 + k, "hits": -k} for k, name in enumerate(people)}
    arrays = {name: {"x": np.array([k, -k])} for k, name in enumerate(people)}
    vectors = {name: b"".join(terms.layout.pack(arrays[name], wide[name], 4)) for name in people}
    total, _ = run_in_memory(people, vectors, terms)
    found, numbers = terms.layout.unpack([total.tobytes()])
    assert numbers == {"loss": 6, "hits": -6}
    assert found["x"].tolist() == [6, -6]


def test_one_of_four_lost_after_the_masks():
    """It shared its keys, masks of others wait for its own, and its vector never comes."""
    sums = play(4)
    sums.until(Stage.REVEALED, lost={Stage.MASKED: {"c"}})
    assert sums.server.survivors == ("a", "b", "d")
    rest = [vector for name, vector in sums.vectors.items() if name != "c"]
    assert sums.total().tolist() == wrapped_sum(rest)
    assert sums.total().tolist() == wrapped_sum(rest)  # asking again changes nothing


@pytest.mark.parametrize("stage", Stage)
def test_two_of_four_lost_fails_closed(stage):
    sums = play(4)
    with pytest.raises(TooFewError, match=r"2 of 4 nodes .* 3 are needed .* missing: 'b', 'c'"):
        sums.until(Stage.REVEALED, lost={stage: {"b", "c"}}).total()


@settings(max_examples=60)
@given(
    st.lists(st.sampled_from([1, 2, 3, 4, 5, 6, 6, 6]), min_size=3, max_size=6),
    st.booleans(),
    st.integers(0, 99),
)
def test_whoever_is_lost_when(leaves, low, seed):
    """Node k is lost in stage ``leaves[k]``, or never: the exact sum of the rest, or none."""
    people = identities(len(leaves))
    more = {"min_nodes": 2, "asked_threshold": len(people) // 2 + 1} if low else {}
    terms = make_terms(people, **more)
    vectors = random_vectors(people, 8, seed)
    when = dict(zip(people, leaves, strict=True))
    lost = {stage: {name for name in people if when[name] == stage} for stage in Stage}
    if sum(leaving > Stage.REVEALED for leaving in leaves) < terms.threshold:
        with pytest.raises(TooFewError):
            run_in_memory(people, vectors, terms, lost)
        return
    total, survivors = run_in_memory(people, vectors, terms, lost)
    assert survivors == tuple(name for name in people if when[name] > Stage.MASKED)
    assert total.tolist() == wrapped_sum([vectors[name] for name in survivors])


def test_one_sum_after_the_other():
    sums = play(3)
    for _ in range(3):
        sums.until(Stage.REVEALED)
        assert sums.total().tolist() == wrapped_sum(sums.vectors.values())
        sums = next_sum(sums)


def test_a_server_that_starts_again_opens_the_sum():
    """What is kept before the last stage is enough, and tells no more than what travelled."""
    sums = play(4)
    for stage in (Stage.KEYS, Stage.SHARES, Stage.MASKED, Stage.CONSISTENCY):
        sums.step(stage, {"c"} if stage == Stage.MASKED else ())
    kept, pieces = sums.server.to_bytes(), sums.server.pieces
    sums.step(Stage.REVEALED, lost={"a", "b"})
    with pytest.raises(TooFewError):
        sums.server.total()
    sums.server = SumServer.from_bytes(sums.terms, sums.server.to_bytes(), pieces)
    assert sums.server.awaited == ("a", "b", "d")
    for name, said in sums.said[Stage.REVEALED].items():
        sums.server.receive(name, said)
    rest = [vector for name, vector in sums.vectors.items() if name != "c"]
    assert sums.total().tolist() == wrapped_sum(rest)
    assert sums.server.survivors == ("a", "b", "d")
    assert SumServer.from_bytes(sums.terms, kept, pieces).to_bytes() == kept
    with pytest.raises(MessageError):
        SumServer.from_bytes(sums.terms, kept[:-1], pieces)


def test_nodes_of_two_versions_understand_each_other(monkeypatch):
    """With known seeds every message is known: whoever changes one changes the protocol's name."""
    seeds = iter(bytes([seed] * 32) for seed in range(1, 5))
    monkeypatch.setattr(secrets, "token_bytes", lambda size: next(seeds))
    people = identities(4)
    vectors = {name: np.arange(13) * k for k, name in enumerate(people)}
    sums = Play.of(people, vectors, make_terms(people, wide=("loss",)))
    sums.until(Stage.REVEALED, lost={Stage.MASKED: {"d"}})
    said = b"".join(message for by_node in sums.said.values() for message in by_node.values())
    told = b"".join(message for by_node in sums.told.values() for message in by_node.values())
    assert sums.terms.digest.hex()[:16] == "f921e7b2b5d0ece3"
    assert hashlib.sha256(said + told).hexdigest()[:16] == "b3b08ad04afe6d64"


# ------------------------------------------------------------ terms


def test_thresholds_and_who_may_collude():
    for count, threshold, colluders in [(3, 3, 1), (4, 3, 1), (5, 4, 2), (6, 5, 3), (9, 7, 4)]:
        terms = make_terms(identities(count))
        assert terms.threshold == threshold, count
        assert colluders_of(count, threshold) == colluders, count
        assert 3 * terms.threshold > 2 * count
        # Two groups that could each open something share an honest node.
        assert 2 * threshold - count > colluders
    assert colluders_of(5, make_terms(identities(5), asked_threshold=3).threshold) == 0
    assert make_terms(identities(9), min_nodes=8).threshold == 8


def test_terms_that_hide_nothing_are_refused():
    for more, word in [
        ({"min_nodes": 5}, "4 nodes cannot be summed securely: register 5 or more"),
        ({"min_nodes": 1}, "min_nodes must be 2 or more"),
        ({"asked_threshold": 2}, "more than half"),
        ({"asked_threshold": 5}, "no more than there are"),
        ({"min_nodes": 4, "asked_threshold": 3}, "at least min_nodes=4"),
        ({"number": 0}, "number"),
        ({"number": 3, "first": 1}, "sum 3 is not one of the set-up of sums 1 to 2"),
        ({"count": 0}, "a set-up 1 to 1,024 sums"),
    ]:
        with pytest.raises(ConfigError, match=word):
            make_terms(identities(4), **more)
    with pytest.raises(ConfigError, match="2 nodes cannot be summed securely"):
        make_terms(identities(2))
    public = identities(3)["a"].public
    with pytest.raises(ConfigError, match="same identity"):
        SetupTerms("f", 1, dict.fromkeys("abc", public))
    with pytest.raises(ConfigError, match="32 bytes"):
        SetupTerms("f", 1, {"a": b"", "b": public, "c": b"1"})


def test_every_part_of_the_terms_is_in_the_digest():
    people = identities(4)
    terms = make_terms(people)
    other = identities(5)["e"].public
    of_setup = [
        replace(terms, federation="another"),
        replace(terms, first=2, number=2),
        replace(terms, count=3),
        replace(terms, asked_threshold=4),
        replace(terms, identities={**terms.identities, "a": other}),
        replace(terms, identities={**terms.identities, "e": other}),
    ]
    of_sum = [
        replace(terms, number=2),
        replace(terms, about="another model"),
        replace(terms, layout=VectorLayout({"y": (8,)})),
        replace(terms, layout=VectorLayout({"x": (8,)}, piece_bytes=8)),
    ]
    assert len({each.digest for each in [terms, *of_setup, *of_sum]}) == 11
    assert len({each.setup.digest for each in [terms, *of_setup]}) == 7
    assert {each.setup.digest for each in of_sum} == {terms.setup.digest}
    for each in of_setup[:-1]:
        # A server that goes by other terms gets no further than the first message.
        sums = play(4)
        sums.server = SetupServer(each.setup)
        with pytest.raises(MessageError, match=r"node 'a' (goes by other terms|sent a message of)"):
            sums.step(Stage.KEYS)
    for each in of_sum:
        sums = play(4).until(Stage.SHARES)
        sums.server = SumServer(each, sums.set_up)
        with pytest.raises(MessageError, match=r"node 'a' (goes by other terms|sent a message of)"):
            sums.step(Stage.MASKED)


# ------------------------------------------------------------ the state of a node


def test_a_state_survives_and_forgets():
    """Every step of every test goes through bytes; what is no longer needed is gone."""
    sums, setups, kept = play(3, sums=3), [], []
    for stage in Stage:
        sums.step(stage)
        setups.append(sums.setups["a"])
        kept.append(sums.states.get("a"))
    assert [state.stage for state in setups[:2]] == [Stage.KEYS, Stage.SHARES]
    assert [state.stage for state in kept[2:]] == [Stage.MASKED, Stage.CONSISTENCY, Stage.REVEALED]
    assert [bool(state.seed) for state in kept[2:]] == [True, False, False]
    assert [len(state.shares) for state in kept[2:]] == [3, 3, 0]
    assert [bool(state.cipher_key) for state in setups] == [True, True, False, False, False]
    assert [state.following for state in setups] == [0, 0, 1, 1, 1]
    first = setups[0].seed
    assert first.hex() not in repr(setups[0])
    encoded = urlsafe_b64encode(first)
    assert encoded in setups[1].to_bytes() and encoded in kept[2].to_bytes()
    for state in (setups[2], kept[3], kept[4]):
        assert encoded not in state.to_bytes(), "it is gone with the sum"
    # Shares of the others' secrets of this sum are gone as well; those of later sums are there.
    assert [len(both) for both in setups[2].shares.values()] == [2 * BOTH_BYTES] * 2
    shared = kept[2].shares[1]
    assert not any(shared in both for both in setups[2].shares.values())
    with pytest.raises(MessageError, match="sum 1 was begun before: node 'a' is at sum 3"):
        sums.in_setup("a").announce(last=3)


@pytest.mark.parametrize("skipped", [0, 1, 2])
def test_seeds_are_a_chain_that_goes_forward_only(skipped):
    """Sums that were skipped, as others went on without this node, are gone too."""
    sums = play(3, sums=4).until(Stage.SHARES)
    before = sums.setups["a"]
    later = replace(sums.terms, number=sums.terms.first + skipped)
    node = SumNode(later, "a", sums.people["a"])
    after, state = node.begin(before, sums.told[Stage.SHARES]["a"])
    assert state.seed == later_seed(before.seed, skipped)
    assert after.seed == later_seed(before.seed, skipped + 1)
    assert after.following == skipped + 1
    for number in range(later.first, later.number + 1):
        used = SumNode(replace(later, number=number), "a", sums.people["a"])
        with pytest.raises(MessageError, match=f"sum {number} was begun before by node 'a'"):
            used.begin(after, sums.told[Stage.SHARES]["a"])


def test_a_damaged_state_is_refused():
    sums = play(3).until(Stage.MASKED)
    for state in (sums.states["a"], sums.setups["a"]):
        data = state.to_bytes()
        other = data.replace(b"state-3", b"state-0").replace(b"setup-1", b"setup-0")
        for bad in [b"", data[:-1], b"[]", b"{}", b"1", other, b"[" * 9999]:
            with pytest.raises(MessageError, match="damaged"):
                type(state).from_bytes(bad)
        assert type(state).from_bytes(data) == state


def test_a_node_that_starts_again_says_the_same():
    """Its secrets are made from what is kept: an answer that got lost is given again."""
    sums = play(3).until(Stage.KEYS)
    first = [sums.answer("a", Stage.SHARES, sums.told[Stage.KEYS]["a"]) for _ in range(2)]
    assert first[0] == first[1]


def test_terms_must_not_change_during_a_sum():
    sums = play(3).until(Stage.KEYS)
    other = replace(sums.terms.setup, count=3)
    node = replace(sums.in_setup("a"), terms=other)
    with pytest.raises(ConfigError, match="began the set-up of sums 1 to 3 under other terms"):
        node.share(sums.setups["a"], sums.told[Stage.KEYS]["a"])
    with pytest.raises(ConfigError, match="registered with another identity"):
        replace(sums.nodes["a"], name="b")
    with pytest.raises(ConfigError, match="'z' is not registered"):
        replace(sums.nodes["a"], name="z")
    sums.until(Stage.MASKED)
    state = sums.states["a"]
    with pytest.raises(ConfigError, match="does not follow the layout"):
        sums.nodes["a"].mask(state, 0, bytes(7))
    changed = replace(sums.terms, layout=VectorLayout({"y": (8,)}))
    with pytest.raises(MessageError, match="no vector of node 'a' is due in sum 1"):
        replace(sums.nodes["a"], terms=changed).mask(state, 0, bytes(64))
    with pytest.raises(ConfigError, match="began sum 1 under other terms"):
        replace(sums.nodes["a"], terms=changed).agree(state, sums.told[Stage.MASKED]["a"])
