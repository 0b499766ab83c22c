"""A server that cheats, or a node: attacks are refused, and work where the refusal is off."""

from dataclasses import replace

import numpy as np
import pytest

from hushrec.errors import MessageError, TooFewError
from hushrec.secagg import Identity, Stage, keys, messages, node, vectors
from hushrec.secagg.keys import SHARE_BYTES, recover, weights_at_zero
from hushrec.secagg.messages import SERVER, Announcement, index_bytes
from hushrec.secagg.node import SumSecrets, all_secrets, announcement
from secure_sums import (
    CHANCE,
    FRAME,
    WORD,
    body,
    following_sum,
    least_likely,
    next_sum,
    play,
    wrapped_sum,
)


def secret(shares):
    """What shares (by index) recover, as bytes."""
    numbers = {index + 1: int.from_bytes(share, "little") for index, share in shares.items()}
    return recover(numbers, weights_at_zero(list(numbers))).to_bytes(32, "little")


@pytest.fixture
def no_signatures(monkeypatch):
    """Nodes that believe every signature."""
    monkeypatch.setattr(keys, "is_signed", lambda *said: True)


# ------------------------------------------------------------ what the server stores


INPUTS = {
    "constant": lambda size: np.full(size, 7),
    "zero": lambda size: np.zeros(size, np.int64),
    "a ramp": lambda size: np.arange(size) << 32,
    "a few": lambda size: (np.arange(size) % 97 == 0).astype(np.int64) << 40,
    "signs": lambda size: np.where(np.arange(size) % 2, -1, 1) * 2**62,
}


@pytest.mark.parametrize("kind", INPUTS)
def test_a_masked_vector_is_uniform(kind):
    size = 2**16
    sums = play(3, words=size)
    sums.vectors = dict.fromkeys(sums.nodes, INPUTS[kind](size))
    sums.until(Stage.MASKED)
    sent = {name: body(message) for name, message in sums.said[Stage.MASKED].items()}
    vector = sums.vectors["a"]
    for words in sent.values():
        assert least_likely(words, vector) > CHANCE
    # Nor do two of them together, or the same vector in the next sum, tell anything.
    later = next_sum(sums).until(Stage.MASKED).said[Stage.MASKED]["a"]
    for other in (sent["b"], body(later)):
        assert least_likely(sent["a"] - other, vector) > CHANCE
        assert least_likely(sent["a"] + other, vector) > CHANCE
    # What adds up is not uniform any more, once all masks are off.
    total = sums.until_end().total()
    np.testing.assert_array_equal(total, 3 * vector)


@pytest.mark.parametrize("kind", INPUTS)
def test_without_masks_it_is_not(kind, monkeypatch):
    """The control: the same tests see every one of these vectors where the cipher gives zeros."""

    class Zeros:
        def update_into(self, data, into):
            into[:] = data

        def update(self, data):
            return data

    monkeypatch.setattr(vectors, "keystream", lambda key: Zeros())
    sums = play(3, words=2**16)
    sums.vectors = dict.fromkeys(sums.nodes, INPUTS[kind](2**16))
    sums.until(Stage.MASKED)
    assert least_likely(body(sums.said[Stage.MASKED]["a"]), sums.vectors["a"]) < CHANCE


# ------------------------------------------------------------ a server that speaks for nodes


def server_plays_the_others(sums):
    """Answer one node in the name of all others, with keys of the server; return its vector."""
    terms, setup, me = sums.terms, sums.terms.setup, sums.nodes["a"].index
    server = Identity.generate()
    state, said = sums.answer("a", Stage.KEYS)
    theirs = Announcement.from_bytes(said[FRAME:])
    ciphers = {index: bytes([9 + index] * 32) for index in (1, 2, 3)}
    made = {index: all_secrets(bytes([index] * 32), setup) for index in (1, 2, 3)}
    own = {index: announcement(ciphers[index], made[index]) for index in made}
    listed = {index: each.signed(setup, index, server).to_bytes() for index, each in own.items()}
    told = sums.tell(Stage.KEYS, messages.write_table(setup, {me: said[FRAME:], **listed}))
    state, shares = sums.answer("a", Stage.SHARES, told, state)
    size = messages.sealed_bytes(setup.count)
    sealed = messages.read_table(setup, memoryview(shares)[FRAME:], size, "it")

    def about(*way):
        return setup.digest + index_bytes(*way)

    def key(index, *way):
        return keys.derive(keys.agree(ciphers[index], theirs.cipher_key), "shares", about(*way))

    opened = {p: keys.unseal(key(p, me, p), sealed[p], about(me, p)) for p in made}
    mask_key = secret({p: text[:SHARE_BYTES] for p, text in opened.items()})
    mask_seed = secret({p: text[SHARE_BYTES : 2 * SHARE_BYTES] for p, text in opened.items()})
    back = {}
    for p, each in made.items():
        text = b"".join(one.shares(me) for one in each)
        back[p] = keys.seal(key(p, p, me), text, about(p, me))
    told = sums.tell(Stage.SHARES, messages.write_table(setup, back))
    state, sent = sums.answer("a", Stage.MASKED, told, state)
    laid = [vectors.own_mask(terms.digest, mask_seed, added=False)]
    for index, each in own.items():
        pair, added = vectors.pair_mask(terms.digest, mask_key, (me, index), each.mask_keys[0])
        laid.append((pair, not added))
    return unmasked(sums, sent[FRAME:], laid)


def unmasked(sums, piece, laid):
    """The words of the only piece of a vector, with masks removed."""
    return np.frombuffer(vectors.add_masks(sums.terms.layout, 0, piece, laid), np.int64)


def test_a_forged_key_is_noticed_by_name():
    with pytest.raises(MessageError, match="keys of node 'b' are not signed by it: somebody"):
        server_plays_the_others(play(4))


def test_without_signatures_the_server_reads_a_vector(no_signatures):
    sums = play(4)
    np.testing.assert_array_equal(server_plays_the_others(sums), sums.vectors["a"])


@pytest.mark.parametrize("part", ["cipher_key", "mask_keys", "commitments", "signature"])
def test_no_part_of_an_announcement_can_be_replaced(part):
    sums = play(4).until(Stage.KEYS)
    table = {k: sums.said[Stage.KEYS][name][FRAME:] for k, name in enumerate(sums.nodes)}
    other = Announcement.from_bytes(next_sum(sums).answer("c", Stage.KEYS)[1][FRAME:])
    said = Announcement.from_bytes(table[2])
    table[2] = replace(said, **{part: getattr(other, part)}).to_bytes()
    told = sums.tell(Stage.KEYS, messages.write_table(sums.terms, table))
    for name in ("a", "b", "d"):
        with pytest.raises(MessageError, match="keys of node 'c' are not signed by it"):
            sums.answer(name, Stage.SHARES, told)
    with pytest.raises(MessageError, match="keys of node 'c'"):  # nor does an honest server take it
        play(4).server.receive("c", sums.tell(Stage.KEYS, table[2], sender=2))


def test_a_node_insists_on_its_own_keys_and_on_different_ones():
    sums = play(4).until(Stage.KEYS)
    terms = sums.terms.setup
    entries = {k: m[FRAME:] for k, m in enumerate(sums.said[Stage.KEYS].values())}

    def tell(name, table):
        told = messages.write_table(terms, table)
        return sums.answer(name, Stage.SHARES, sums.tell(Stage.KEYS, told))

    with pytest.raises(MessageError, match="lacks the keys of node 'a' itself"):
        tell("a", {k: entries[k] for k in (1, 2, 3)})
    with pytest.raises(TooFewError, match="2 of 4 nodes announced keys"):
        tell("a", {k: entries[k] for k in (0, 1)})
    own = announcement(b"d" * 32, all_secrets(b"d" * 32, terms))
    bad = []
    for key, word in [
        (Announcement.from_bytes(entries[1]).mask_keys[1], "announced twice, by 'b', 'd'"),
        (own.mask_keys[0], "announced twice, by 'd'"),  # one key for two sums
        (bytes(32), "node 'd' announced a key that hides nothing"),
    ]:
        made = replace(own, mask_keys=(own.mask_keys[0], key))
        bad.append((made.signed(terms, 3, sums.people["d"]).to_bytes(), word))
    honest = play(4).server
    honest.receive("b", sums.said[Stage.KEYS]["b"])
    for signed, word in bad:
        with pytest.raises(MessageError, match=word):
            tell("a", {**entries, 3: signed})
        with pytest.raises(MessageError, match=word):
            honest.receive("d", sums.tell(Stage.KEYS, signed, sender=3))


# ------------------------------------------------------------ a server that lies about who is left


def test_a_second_list_of_survivors_is_refused():
    """Both lists together would ask for both kinds of shares of one node."""
    sums = play(4).until(Stage.CONSISTENCY)
    everybody = sums.told[Stage.MASKED]["a"]
    without = messages.write_set(sums.terms, {0, 1, 2})
    second = messages.write(sums.terms, Stage.MASKED, SERVER, without)
    for told in (everybody, second):
        with pytest.raises(MessageError, match="sent node 'a' its list of survivors already"):
            sums.answer("a", Stage.CONSISTENCY, told)
    sums.step(Stage.REVEALED)
    shares = messages.read_table(
        sums.terms, memoryview(sums.said[Stage.REVEALED]["a"])[FRAME:], SHARE_BYTES, "it"
    )
    assert set(shares) == {0, 1, 2, 3}  # one share of each node, and that was all
    again = {Stage.CONSISTENCY: second, Stage.REVEALED: sums.told[Stage.CONSISTENCY]["a"]}
    for stage, told in again.items():
        with pytest.raises(MessageError, match="already"):
            sums.answer("a", stage, told)


def test_a_node_masks_nothing_for_too_few():
    sums = play(4).until(Stage.SHARES)
    told = memoryview(sums.told[Stage.SHARES]["a"])[FRAME:]
    sealed = messages.read_table(sums.terms, told, messages.sealed_bytes(2), "it")
    few = messages.write_table(sums.terms, {1: sealed[1]})
    with pytest.raises(TooFewError, match="2 of 4 nodes shared their secrets, and 3 are needed"):
        sums.answer("a", Stage.MASKED, sums.tell(Stage.SHARES, few))


def test_nodes_refuse_a_sum_over_too_few_or_without_them():
    sums = play(4).until(Stage.MASKED)

    def tell(name, indices):
        told = messages.write_set(sums.terms, indices)
        message = messages.write(sums.terms, Stage.MASKED, SERVER, told)
        return sums.answer(name, Stage.CONSISTENCY, message)

    with pytest.raises(TooFewError, match="2 of 4 nodes sent a vector, and 3 are needed"):
        tell("a", {0, 1})
    with pytest.raises(MessageError, match="leaves node 'a' out"):
        tell("a", {1, 2, 3})
    sums = play(4).until(Stage.MASKED, lost={Stage.SHARES: {"d"}})
    with pytest.raises(MessageError, match="names node 'd', which never shared its secrets"):
        tell("a", {0, 1, 3})


def different_lists(sums):
    """Tell every node another list of three; return the sum over "a" and "b" alone.

    Each of c, d and e is called lost in three of the five lists, and nodes reveal accordingly: with
    a threshold of three, that opens a sum over two. A node is never told that it is lost itself.
    """
    terms = sums.terms
    lost = {"a": "cd", "b": "ce", "c": "de", "d": "ce", "e": "cd"}
    revealed = {}
    states, signed = {}, {}
    for name, gone in lost.items():
        left = {k for k, other in enumerate(sums.nodes) if other not in gone}
        told = messages.write(terms, Stage.MASKED, SERVER, messages.write_set(terms, left))
        states[name], said = sums.answer(name, Stage.CONSISTENCY, told)
        signed[name] = left, said[FRAME:]
    for index, (name, (left, _)) in enumerate(signed.items()):
        agreed = {k: signed[terms.names[k]][1] for k in left}
        told = messages.write_table(terms, agreed)
        message = messages.write(terms, Stage.CONSISTENCY, SERVER, told)
        _, said = sums.answer(name, Stage.REVEALED, message, states[name])
        table = messages.read_table(terms, memoryview(said)[FRAME:], SHARE_BYTES, "it")
        for owner, share in table.items():
            revealed.setdefault((owner, owner in left), {})[index] = share
    laid = []
    for owner in (0, 1):
        seed = secret(dict(list(revealed[owner, True].items())[:3]))
        laid.append(vectors.own_mask(terms.digest, seed, added=False))
    announced = [Announcement.from_bytes(m[FRAME:]) for m in sums.said[Stage.KEYS].values()]
    for gone in (2, 3, 4):
        key = secret(dict(list(revealed[gone, False].items())[:3]))
        laid += [
            vectors.pair_mask(terms.digest, key, (gone, left), announced[left].mask_keys[0])
            for left in (0, 1)
        ]
    total = body(sums.said[Stage.MASKED]["a"]) + body(sums.said[Stage.MASKED]["b"])
    return unmasked(sums, total.tobytes(), laid)


def test_different_lists_for_different_nodes_are_noticed():
    with pytest.raises(MessageError, match="node 'b' did not agree to what node 'a' was told"):
        different_lists(play(5, asked_threshold=3).until(Stage.MASKED))


def test_without_that_check_a_sum_over_two_is_opened(no_signatures):
    sums = play(5, asked_threshold=3).until(Stage.MASKED)
    two = [sums.vectors["a"], sums.vectors["b"]]
    assert different_lists(sums).tolist() == wrapped_sum(two)


def test_nodes_that_were_told_different_keys_or_sharers_do_not_agree():
    """A node that signs two announcements, and a server that gives each to another node."""
    sums = play(5, asked_threshold=3).until(Stage.KEYS)
    terms = sums.terms.setup
    entries = {k: m[FRAME:] for k, m in enumerate(sums.said[Stage.KEYS].values())}
    second = announcement(b"e" * 32, all_secrets(b"e" * 32, terms))
    other = {**entries, 4: second.signed(terms, 4, sums.people["e"]).to_bytes()}
    for name, table in {"a": entries, "b": entries, "c": entries, "d": other}.items():
        told = sums.tell(Stage.KEYS, messages.write_table(terms, table))
        sums.server.receive(name, sums.let(name, Stage.SHARES, told))
    sums.close()
    sums.step(Stage.MASKED)
    with pytest.raises(MessageError, match="what node 'd' sent as its agreement is no signature"):
        sums.step(Stage.CONSISTENCY)


@pytest.mark.parametrize("how", ["too few", "not in the sum", "of another sum"])
def test_agreements_are_counted_and_checked(how):
    sums = play(5)
    sums.until(Stage.CONSISTENCY, lost={Stage.MASKED: {"e"}})
    signed = {k: m[FRAME:] for k, m in enumerate(sums.said[Stage.CONSISTENCY].values())}
    if how == "too few":
        del signed[3]
        expected = pytest.raises(TooFewError, match="3 of 5 nodes agreed")
    elif how == "not in the sum":
        signed[4] = signed[0]
        expected = pytest.raises(MessageError, match="names node 'e', which is not in the sum")
    else:
        later = next_sum(sums).until(Stage.CONSISTENCY, lost={Stage.MASKED: {"e"}})
        signed[1] = later.said[Stage.CONSISTENCY]["b"][FRAME:]
        expected = pytest.raises(MessageError, match="node 'b' did not agree")
    told = messages.write_table(sums.terms, signed)
    with expected:
        message = messages.write(sums.terms, Stage.CONSISTENCY, SERVER, told)
        sums.answer("a", Stage.REVEALED, message)


# ------------------------------------------------------------ a vector that comes too late


def test_a_late_vector_stays_closed():
    """The others have revealed the keys of a node that seemed lost; its own mask still hides it."""
    size = 2**14
    sums = play(4, words=size)
    sums.vectors["d"] = INPUTS["a ramp"](size)
    sums.until(Stage.SHARES)
    seed = sums.setups["d"].seed
    for stage in (Stage.MASKED, Stage.CONSISTENCY, Stage.REVEALED):
        sums.step(stage, lost={"d"})
    late = sums.said[Stage.MASKED]["d"]
    with pytest.raises(MessageError, match="node 'd' sent its masked vector; awaited"):
        sums.server.receive("d", late)
    key, pairs = revealed_key(sums, 3)
    opened = unmasked(sums, late[FRAME:], [(pair, not sign) for pair, sign in pairs])
    assert least_likely(opened.view(WORD), sums.vectors["d"]) > CHANCE
    # The control: with the seed that nobody revealed, the same steps end at the vector.
    mine = SumSecrets.of(seed, sums.terms.threshold)
    assert mine.mask_key == key
    own = vectors.own_mask(sums.terms.digest, mine.mask_seed, added=False)
    vector = unmasked(sums, opened.tobytes(), [own])
    np.testing.assert_array_equal(vector, sums.vectors["d"])
    assert least_likely(vector.view(WORD), sums.vectors["d"]) < CHANCE


def revealed_key(sums, lost):
    """The mask key of a lost node from what others revealed, and its pairwise masks."""
    tables = [
        messages.read_table(sums.terms, memoryview(said)[FRAME:], SHARE_BYTES, "it")
        for said in sums.said[Stage.REVEALED].values()
    ]
    key = secret({index: table[lost] for index, table in enumerate(tables)})
    announced = [Announcement.from_bytes(m[FRAME:]) for m in sums.said[Stage.KEYS].values()]
    place = sums.terms.place
    assert keys.public_half(key) == announced[lost].mask_keys[place]
    public = {k: each.mask_keys[place] for k, each in enumerate(announced) if k != lost}
    digest = sums.terms.digest
    return key, [vectors.pair_mask(digest, key, (lost, k), each) for k, each in public.items()]


@pytest.mark.parametrize("reused", [False, True])
def test_what_one_sum_reveals_opens_no_other_sum(reused, monkeypatch):
    """Node d is lost in the second of three sums of one set-up: its mask key of that sum is known.

    The server also has, of the first and the third sum, the seed of its own mask, as d is in them.
    With the mask key of those sums, d's vectors in them would be open. They are, where a node uses
    one mask key for all sums.
    """
    if reused:
        whole = node.later_seed
        monkeypatch.setattr(node, "later_seed", lambda seed, sums: whole(seed, 0))
        monkeypatch.setattr(messages, "check_distinct", lambda terms, announced: None)
    size = 2**14
    first = play(4, words=size, sums=3)
    first.vectors["d"] = INPUTS["a ramp"](size)
    first.until(Stage.REVEALED)
    second = following_sum(first).until(Stage.REVEALED, lost={Stage.MASKED: {"d"}})
    third = following_sum(second).until(Stage.REVEALED)
    key, _ = revealed_key(second, 3)
    announced = [Announcement.from_bytes(m[FRAME:]) for m in first.said[Stage.KEYS].values()]
    for sums in (first, third):
        assert sums.total().tolist() == wrapped_sum(sums.vectors.values())
        place, digest = sums.terms.place, sums.terms.digest
        tables = [
            messages.read_table(sums.terms, memoryview(said)[FRAME:], SHARE_BYTES, "it")
            for said in sums.said[Stage.REVEALED].values()
        ]
        seed = secret({index: table[3] for index, table in enumerate(tables[:3])})
        laid = [vectors.own_mask(digest, seed, added=False)]
        for k in range(3):
            pair = digest, key, (3, k), announced[k].mask_keys[place]
            mask, added = vectors.pair_mask(*pair)
            laid.append((mask, not added))
        opened = unmasked(sums, sums.said[Stage.MASKED]["d"][FRAME:], laid)
        if reused:
            np.testing.assert_array_equal(opened, sums.vectors["d"])
        else:
            assert least_likely(opened.view(WORD), sums.vectors["d"]) > CHANCE
            assert key not in {keys.derive(seed, each) for each in ("mask key", "next sum")}


def test_nodes_with_different_requests_cannot_be_summed():
    """The keys of a sum are announced before it; its masks are bound to what is summed."""
    sums = play(4).until(Stage.SHARES)
    other = replace(sums.terms, about="another model")
    honest, sums.terms = sums.terms, other
    said = sums.let("d", Stage.MASKED, sums.told[Stage.SHARES]["d"])
    sums.terms = honest
    with pytest.raises(MessageError, match="node 'd' goes by other terms of sum 1"):
        sums.server.receive("d", said)
    # A server that takes the vector all the same gets no sum of it.
    for name in "abc":
        sums.server.receive(name, sums.let(name, Stage.MASKED, sums.told[Stage.SHARES][name]))
    sums.server.receive("d", sums.tell(Stage.MASKED, said[FRAME:], sender=3))
    sums.close()
    sums.told[Stage.MASKED].pop("d")  # which would not agree
    sums.until_end()
    assert sums.total().tolist() != wrapped_sum(sums.vectors.values())


# ------------------------------------------------------------ nodes that cheat


def test_a_wrong_share_is_noticed_and_gives_no_sum():
    for lost, owner in (({}, "a"), ({Stage.MASKED: {"d"}}, "d")):
        sums = play(4).until(Stage.CONSISTENCY, lost)
        for name, told in sums.told[Stage.CONSISTENCY].items():
            _, said = sums.answer(name, Stage.REVEALED, told)
            if name == "b":
                # Not the lowest bits: X25519 does not look at three of them.
                at = FRAME + 1 + SHARE_BYTES * sums.terms.index(owner) + 16
                said = said[:at] + bytes([said[at] ^ 1]) + said[at + 1 :]
            sums.server.receive(name, said)
        with pytest.raises(MessageError, match=f"node '{owner}' cannot be lifted.*'b'"):
            sums.server.total()


def test_a_share_that_was_changed_on_the_way_is_named():
    sums = play(4).until(Stage.SHARES)
    told = sums.told[Stage.SHARES]["a"]
    with pytest.raises(MessageError, match="what node 'd' shared with node 'a' was changed"):
        sums.answer("a", Stage.MASKED, told[:-1] + bytes([told[-1] ^ 1]))
    # What was meant for another does not pass either.
    with pytest.raises(MessageError, match=r"names node 'a'|what node 'c' shared with node 'a'"):
        sums.answer("a", Stage.MASKED, sums.told[Stage.SHARES]["b"])
    size = messages.sealed_bytes(2)
    swapped = told[: FRAME + 1] + told[FRAME + 1 + size :][:size] + told[FRAME + 1 :][:size]
    with pytest.raises(MessageError, match="what node 'b' shared with node 'a' was changed"):
        sums.answer("a", Stage.MASKED, swapped + told[FRAME + 1 + 2 * size :])


def test_a_dealer_of_numbers_outside_the_field_is_named(monkeypatch):
    sums = play(4).until(Stage.KEYS)
    for name in sums.nodes:
        with monkeypatch.context() as patch:
            if name == "c":
                patch.setattr(SumSecrets, "shares", lambda own, index: b"\xff" * 2 * SHARE_BYTES)
            said = sums.let(name, Stage.SHARES, sums.told[Stage.KEYS][name])
        sums.server.receive(name, said)
    sums.close()
    with pytest.raises(MessageError, match="'c' shared with node 'a' holds a number that is no"):
        sums.answer("a", Stage.MASKED, sums.told[Stage.SHARES]["a"])
