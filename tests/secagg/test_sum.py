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
from hushrec.secagg.node import later_seed
from hushrec.secagg.vectors import Word
from secure_sums import (
    Play,
    following_sum,
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


@st.composite
def forms(draw):
    """A layout with words of every width, in pieces of any size, and a node's number of clients."""
    arrays, bounded = {}, {}
    clients = draw(st.sampled_from([1, 7, 2**15 - 1, 2**15]))
    for k in range(draw(st.integers(1, 3))):
        arrays[f"x{k}"] = draw(st.tuples(st.integers(1, 9), st.integers(1, 2)))
        if draw(st.booleans()):
            largest = draw(st.sampled_from([1, 3, 2**16]))
            bounded[f"x{k}"] = Word.bounded("x", 2**16, largest, 4 * clients)
    piece = 8 * draw(st.integers(5, 12))
    return VectorLayout(arrays, ("loss",), bounded, piece), clients


@settings(max_examples=60, deadline=None)
@given(forms(), st.integers(0, 2**32), st.integers(0, 3), st.integers(0, 9), st.booleans())
def test_a_secure_sum_is_the_exact_sum(form, seed, who, when, sparse):
    """Any shapes, words and pieces; one of four nodes is lost at a piece, or not at all. Every
    entry is as large as the bound allows, in one direction, so that a narrower word would wrap."""
    (layout, clients), people = form, identities(4)
    random, entries = np.random.default_rng(seed), {}
    for name in people:
        entries[name] = {}
        for each, shape in layout.arrays.items():
            word = layout.words.get(each)
            most = 2**60 if word is None else clients * word.largest * word.unit
            sign = random.choice([1, 1, 0], shape[:1])[:, None] * np.ones(shape, np.int64)
            entries[name][each] = sign * most * (-1) ** (seed % 2)
    loss = {name: int(random.integers(-(2**60), 2**60)) << 230 for name in people}
    vectors = {}
    for name, own in entries.items():
        rows = {each: np.flatnonzero(array.any(1)) for each, array in own.items()}
        given_ = {each: (rows[each], own[each][rows[each]]) for each in own} if sparse else own
        vectors[name] = b"".join(layout.pack(given_, {"loss": loss[name]}, 4, clients))
    lost = {Stage.MASKED: {("abcd"[who], when)}} if when < layout.pieces else {}
    play = Play.of(people, vectors, make_terms(people, layout=layout)).until(Stage.REVEALED, lost)
    left = [name for name in people if not lost or name != "abcd"[who]]
    assert play.server.survivors == tuple(left)
    found, wide = layout.unpack(play.server.total())
    assert wide == {"loss": sum(loss[name] for name in left)}
    for each, array in found.items():
        np.testing.assert_array_equal(array, sum(entries[name][each] for name in left))


def test_a_piece_counts_once_and_in_its_place():
    layout = VectorLayout({"x": (12,)}, piece_bytes=32)
    sums = play(4, layout=layout).until(Stage.SHARES)
    said = {name: sums.let(name, Stage.MASKED, sums.told[Stage.SHARES][name]) for name in "abcd"}
    third = sums.again("a", 2)
    with pytest.raises(MessageError, match=r"node 'a' sent piece 2 .* awaited is piece 0"):
        sums.server.receive("a", third)
    sums.server.receive("a", said["a"])
    assert sums.again("a", 0) == said["a"], "the same bytes whenever it is asked for"
    for wrong in (said["a"], third):
        with pytest.raises(MessageError, match=r"node 'a' sent piece . .* awaited is piece 1"):
            sums.server.receive("a", wrong)
    assert sums.server.awaiting(0) == ("b", "c", "d") and sums.server.awaiting(1) == ("a",)
    for name in "bcd":
        sums.server.receive(name, said[name])
    for name in "abcd":
        for number in (1, 2):
            sums.server.receive(name, sums.again(name, number))
    assert sums.server.awaited == ()
    for number in (-1, 3):
        with pytest.raises(MessageError, match=f"the vector of sum 1 has no piece {number}"):
            sums.nodes["a"].mask(sums.states["a"], number, bytes(32))
    sums.close()
    assert sums.server.pieces.kept.keys() == {"masked"}, "and no node's pieces"
    sums.until_end()
    assert sums.total().tolist() == wrapped_sum(sums.vectors.values())
    with pytest.raises(MessageError, match="no vector of node 'a' is due in sum 1"):
        sums.again("a", 0)


def test_one_set_up_serves_many_sums():
    sums = play(4, sums=3).until(Stage.REVEALED)
    assert sums.total().tolist() == wrapped_sum(sums.vectors.values())
    second = following_sum(sums).until(Stage.REVEALED, lost={Stage.MASKED: {"b"}})
    assert second.server.survivors == ("a", "c", "d")
    third = following_sum(second, about="another round").until(Stage.REVEALED)
    assert third.total().tolist() == wrapped_sum(sums.vectors.values()), "b is back"
    assert len({each.said[Stage.MASKED]["a"] for each in (sums, second, third)}) == 3
    with pytest.raises(ConfigError, match="sum 4 is not one of the set-up of sums 1 to 3"):
        following_sum(third)


def test_material_is_used_once():
    """Not for the same number, nor for one that was passed over, nor with other shares."""
    first = play(4, sums=3).until(Stage.MASKED)
    told = first.told[Stage.SHARES]["a"]
    for again in (first.terms, replace(first.terms, about="another model")):
        with pytest.raises(MessageError, match="sum 1 was begun before by node 'a'"):
            SumNode(again, "a", first.people["a"]).begin(first.setups["a"], told)
    third = replace(first.terms, number=3)
    setup, _ = SumNode(third, "a", first.people["a"]).begin(first.setups["a"], told)
    with pytest.raises(MessageError, match="sum 2 was begun before by node 'a'"):
        SumNode(replace(third, number=2), "a", first.people["a"]).begin(setup, told)
    with pytest.raises(MessageError, match="sent node 'a' its list of shares already"):
        SumNode(third, "a", first.people["a"]).begin(first.setups["a"], told + bytes(1))
    other = replace(first.terms, first=4, number=4)
    with pytest.raises(MessageError, match="is in another set-up than sum 4"):
        SumNode(other, "a", first.people["a"]).begin(first.setups["a"], told)


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
