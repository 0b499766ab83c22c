"""Whatever is not the awaited message is refused by name, and leaves everything as it was."""

import pickle
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hushrec.errors import MessageError, TooFewError
from hushrec.secagg import Stage, messages
from hushrec.secagg.keys import SHARE_BYTES
from hushrec.secagg.messages import SERVER
from secure_sums import FRAME, next_sum, play, wrapped_sum

TO_NODES = [stage for stage in Stage if stage < Stage.REVEALED]
RUBBISH = [b"", b"\0" * FRAME, pickle.dumps({"a": 1}), b"{}", b"hushsum2", b"hushsum2" + bytes(99)]


@pytest.fixture(scope="module")
def finished():
    """A whole sum, to take messages from."""
    return play(4).until(Stage.REVEALED)


def before(stage, sums=None):
    """The same parties, about to send a stage's messages."""
    sums = sums or play(4)
    for earlier in Stage:
        if earlier < stage:
            sums.step(earlier)
    return sums


@pytest.mark.parametrize("stage", Stage)
def test_the_server_refuses_and_goes_on(stage):
    sums = before(stage)
    inbox = sums.told.get(stage - 1, dict.fromkeys(sums.nodes, b""))
    good = sums.let("a", stage, inbox["a"])
    bad = [*RUBBISH, good[:-1], good + b"\0", b"\x80" + good[1:], good[:FRAME]]
    for message in bad:
        with pytest.raises(MessageError, match="node 'a'"):
            sums.server.receive("a", message)
    with pytest.raises(MessageError, match="node 'b' sent a message in the name of another"):
        sums.server.receive("b", good)
    with pytest.raises(MessageError, match="node 'z' is not registered"):
        sums.server.receive("z", good)
    sums.server.receive("a", good)
    with pytest.raises(MessageError, match="node 'a' sent this already"):
        sums.server.receive("a", good)
    for name in ("b", "c", "d"):
        sums.server.receive(name, sums.let(name, stage, inbox[name]))
    assert sums.server.awaited == ()
    if stage < Stage.REVEALED:
        sums.close()
        sums.until_end()
    assert sums.total().tolist() == wrapped_sum(sums.vectors.values())


@pytest.mark.parametrize("stage", TO_NODES)
def test_a_node_refuses_and_goes_on(stage):
    sums = before(Stage(stage + 1))
    good = sums.told[stage]["a"]
    for message in [*RUBBISH, good[:-1], good + b"\0", good[:FRAME]]:
        with pytest.raises(MessageError, match="the server"):
            sums.answer("a", Stage(stage + 1), message)
    named = bytearray(good)
    named[FRAME] |= 0x80  # the eighth of four nodes
    with pytest.raises(MessageError, match="names nodes that are not registered"):
        sums.answer("a", Stage(stage + 1), bytes(named))
    for other in TO_NODES:
        if other != stage and other in sums.told:
            with pytest.raises(
                MessageError, match=r"the server (sent its list|goes by other terms)"
            ):
                sums.answer("a", Stage(stage + 1), sums.told[other]["a"])
    assert sums.until_end().total().tolist() == wrapped_sum(sums.vectors.values())


def test_messages_come_in_order(finished):
    """A node that is asked too early, or again, says so."""
    fresh = play(4)
    fresh.step(Stage.KEYS)
    with pytest.raises(MessageError, match="sent node 'a' its list of shares too early"):
        fresh.answer("a", Stage.MASKED, fresh.tell(Stage.SHARES, bytes(1)))
    fresh.until(Stage.MASKED)
    with pytest.raises(MessageError, match="sent node 'a' its list of agreements too early"):
        fresh.answer("a", Stage.REVEALED, fresh.tell(Stage.CONSISTENCY, bytes(1)))
    for stage in TO_NODES:
        word = r"sum 1 was begun before" if stage == Stage.SHARES else r"its list of .* already"
        with pytest.raises(MessageError, match=word):
            finished.answer("a", Stage(stage + 1), finished.told[stage]["a"])


@pytest.mark.parametrize("stage", Stage)
def test_messages_of_the_sum_before_are_refused(stage, finished):
    sums = before(stage, next_sum(finished))
    with pytest.raises(MessageError, match="node 'a' sent a message of sum 1, not of sum 3"):
        sums.server.receive("a", finished.said[stage]["a"])
    if stage > Stage.KEYS:
        with pytest.raises(MessageError, match="the server sent a message of sum 1, not of sum 3"):
            sums.answer("a", stage, finished.told[Stage(stage - 1)]["a"])
    # Under the new number: what is inside is bound to the old one.
    body = finished.said[stage]["a"][FRAME:]
    renamed = sums.tell(stage, body, sender=0)
    if stage in (Stage.KEYS, Stage.CONSISTENCY):
        with pytest.raises(MessageError, match="node 'a'"):
            sums.server.receive("a", renamed)


def test_shares_of_the_sum_before_do_not_open(finished):
    sums = before(Stage.MASKED, next_sum(finished))
    body = finished.told[Stage.SHARES]["a"][FRAME:]
    with pytest.raises(MessageError, match="what node 'b' shared with node 'a' was changed"):
        sums.answer("a", Stage.MASKED, sums.tell(Stage.SHARES, body))


@pytest.mark.parametrize("stage", [Stage.SHARES, Stage.REVEALED])
def test_tables_must_be_whole(stage):
    """A node that shares with some, or reveals of some, would make others' work fail later."""
    sums = before(stage)
    size = {Stage.SHARES: messages.sealed_bytes(2), Stage.REVEALED: SHARE_BYTES}[stage]
    _, good = sums.answer("a", stage, sums.told[Stage(stage - 1)]["a"])
    table = messages.read_table(sums.terms, memoryview(good)[FRAME:], size, "it")
    less = {index: entry for index, entry in table.items() if index != 3}
    for bad in (less, {}, {**table, 0: table[1]} if stage == Stage.SHARES else {}):
        message = sums.tell(stage, messages.write_table(sums.terms, bad), sender=0)
        with pytest.raises(
            MessageError, match=r"what node 'a' sent as its .* is not (for|of) every"
        ):
            sums.server.receive("a", message)
    sums.server.receive("a", good)


def test_who_was_left_out_stays_out():
    sums = play(4)
    sums.until(Stage.SHARES, lost={Stage.SHARES: {"d"}})
    sums.step(Stage.MASKED)
    late = messages.write(sums.terms, Stage.CONSISTENCY, 3, bytes(64))
    with pytest.raises(MessageError, match="node 'd' was left out before"):
        sums.server.receive("d", late)
    sums.until_end()
    assert sums.server.survivors == ("a", "b", "c")


def test_a_huge_message_is_measured_not_read():
    sums = before(Stage.MASKED)
    huge = messages.write(sums.terms, Stage.MASKED, 0, bytes(2**26))
    told = sums.tell(Stage.SHARES, b"\x0e" + bytes(2**26))
    tracemalloc.start()
    try:
        with pytest.raises(MessageError, match="67,108,864 bytes instead of 64"):
            sums.server.receive("a", huge)
        with pytest.raises(MessageError, match="list of shares has 67,108,865 bytes instead of"):
            sums.answer("a", Stage.MASKED, told)
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()


@given(st.data())
def test_changed_bytes_never_pass_for_others(data):
    """One byte changed anywhere in what the server hands on: every node refuses."""
    stage = data.draw(st.sampled_from(TO_NODES))
    sums = before(Stage(stage + 1), play(4, asked_threshold=4))
    told = bytearray(sums.told[stage]["b"])
    at = data.draw(st.integers(0, len(told) - 1))
    told[at] ^= data.draw(st.integers(1, 255))
    with pytest.raises((MessageError, TooFewError)):
        sums.answer("b", Stage(stage + 1), bytes(told))


@given(st.binary(max_size=400), st.sampled_from(list(Stage)))
def test_any_bytes_are_refused(noise, stage):
    terms = play(4).terms
    for sender in (0, SERVER):
        for data in (noise, messages.write(terms, stage, sender, noise)):
            try:
                body = messages.read(terms, stage, sender, data)
                messages.read_table(terms, body, 33, "it")
            except MessageError:
                continue
            assert len(noise) == 1 + 33 * noise[0].bit_count() and noise[0] < 16
