"""Messages come back as they were sent, and what is not a message, or not the expected one, is
refused with a sentence."""

import pickle
import zlib
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save

from hushrec.aggregation import (
    STEPS,
    ClientRows,
    Evaluation,
    KeyedRows,
    LossSum,
    Tally,
    Update,
    UploadShape,
    exact_sum,
)
from hushrec.errors import MessageError
from hushrec.federation.client import Download, Expected, Upload, _DownloadMessage, wire_bytes
from hushrec.io.codec import payload

SHAPE = UploadShape(9, {"items": 2}, {"head": (3,)}, {"pairs": (16, 1), "open": (81, 1)})
EXPECTED = Expected(4, SHAPE)


def rows(ids, width, space=None):
    ids = np.array(ids, np.int32 if space is None else np.int64)
    values = np.linspace(-1, 1, len(ids) * width).astype(np.float32).reshape(-1, width)
    if space is None:
        return ClientRows(np.array([0, len(ids)]), ids, values)
    return KeyedRows(np.array([0, len(ids)]), ids, values, space=space)


def update():
    tables = {
        "items": rows([7, 2], 2),
        "pairs": rows([3, 15], 1, space=16),
        "open": rows([80], 1, space=81),
    }
    return Update(1, tables, {"head": np.ones((1, 3), np.float32)})


def sent(number=4, loss=(0.25,), **changes):
    return Upload(number, replace(update(), **changes), LossSum.of(np.array(loss)))


def test_an_upload_comes_back():
    data = sent().to_bytes()
    read = Upload.from_bytes(data, EXPECTED)
    assert (read.round, read.loss, read.update.clients) == (4, LossSum(STEPS // 4, 1), 1)
    for name, original in update().rows.items():
        got = read.update.rows[name]
        assert type(got) is type(original)
        assert getattr(got, "space", None) == getattr(original, "space", None)
        np.testing.assert_array_equal(got.ids, original.ids)
        np.testing.assert_array_equal(got.rows, original.rows)
    np.testing.assert_array_equal(read.update.dense["head"], update().dense["head"])
    assert payload(data) == update().nbytes, "what travels is what is counted"


def test_differences_travel_and_not_rows():
    base = np.full((9, 2), 0.5, np.float32)
    own = replace(update().rows["items"], base=base)
    shape = UploadShape(9, {"items": 2}, {})
    upload = Upload(4, Update(1, {"items": own}), LossSum())
    read = Upload.from_bytes(upload.to_bytes(), Expected(4, shape))
    np.testing.assert_array_equal(read.update.rows["items"].rows, own.rows - np.float32(0.5))


def test_what_travels_whole_has_every_row():
    shape = replace(SHAPE, spaces={"pairs": (16, 1)})
    tables = {name: update().rows[name] for name in ("items", "pairs")}
    whole = Update(1, tables, update().dense, whole=shape)
    data = Upload(4, whole, LossSum()).to_bytes()
    assert payload(data) == shape.nbytes == whole.nbytes
    read = Upload.from_bytes(data, Expected(4, shape, whole=True)).update
    assert read.rows["items"].ids.tolist() == list(range(9))
    np.testing.assert_array_equal(read.rows["items"].rows[[7, 2]], tables["items"].rows)
    assert np.count_nonzero(read.rows["pairs"].rows) == 2
    with pytest.raises(MessageError, match="lacks"):  # sparse where whole is expected: it tells
        Upload.from_bytes(sent().to_bytes(), Expected(4, SHAPE, whole=True))


NAN = np.full((1, 3), np.nan, np.float32)
TWICE = {**update().rows, "items": rows([2, 2], 2)}
FAR = {**update().rows, "items": rows([2, 9], 2)}
BELOW = {**update().rows, "pairs": rows([-1], 1, space=16)}


@pytest.mark.parametrize(
    ("upload", "expected", "why"),
    [
        (sent(number=3), EXPECTED, "round 3, not of round 4"),
        (sent(dense={"head": NAN}), EXPECTED, "not finite"),
        (sent(dense={"head": np.ones((1, 4), np.float32)}), EXPECTED, "head"),
        (sent(dense={"head": np.ones((1, 3), np.int32)}), EXPECTED, "int32"),
        (sent(dense={}), EXPECTED, "lacks 'dense/head'"),
        (
            sent(dense={**update().dense, "diary": np.ones(3)}),
            EXPECTED,
            "undeclared array .dense.diary",
        ),
        (sent(rows=TWICE), EXPECTED, "twice"),
        (sent(rows=FAR), EXPECTED, "do not exist"),
        (sent(rows=BELOW), EXPECTED, "do not exist"),
        (sent(rows={**update().rows, "items": rows([1], 3)}), EXPECTED, "ids of items, 2"),
        (sent(), replace(EXPECTED, norm=0.5), "norm"),
        (sent(clients=2), EXPECTED, "2 clients, not of 1"),
        (sent(loss=(0.1, 0.2)), EXPECTED, "losses"),
    ],
)
def test_another_upload_than_expected_is_refused(upload, expected, why):
    with pytest.raises(MessageError, match=why):
        Upload.from_bytes(upload.to_bytes(), expected)


def test_a_norm_within_the_bound_is_fine():
    flat = np.concatenate([u.rows.ravel() for u in update().rows.values()] + [np.ones(3)])
    norm = float(np.linalg.norm(flat))
    Upload.from_bytes(sent().to_bytes(), replace(EXPECTED, norm=norm))
    with pytest.raises(MessageError, match="norm"):
        Upload.from_bytes(sent().to_bytes(), replace(EXPECTED, norm=norm * 0.999))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x00" * 7,
        b"\xff" * 64,
        pickle.dumps({"rows": [1, 2]}),
        save({"head": np.ones(3)}),
        save({"head": np.ones(3)}, metadata={"hushrec-2": '{"kind": "upload"}'}),
        save({}, metadata={"hushrec-2": "[" * 5000}),
        save({}, metadata={"hushrec-2": "7"}),
        save({}, metadata={"hushrec-2": '{"kind": "upload", "header": [1]}'}),
        save({}, metadata={"hushrec-1": '{"kind": "upload", "header": {}}'}),
        sent().to_bytes()[:-3],
    ],
    ids=lambda data: repr(data[:12]),
)
def test_what_is_no_message_is_refused(data):
    with pytest.raises(MessageError):
        Upload.from_bytes(data, EXPECTED)
    with pytest.raises(MessageError):
        Download.from_bytes(data)
    with pytest.raises(MessageError):
        Evaluation.from_bytes(data, {"full": ["hr@10"]})


def test_a_message_is_not_looked_at_beyond_its_size():
    closed = replace(EXPECTED, shape=UploadShape(9, {"items": 2}, {}))
    with pytest.raises(MessageError, match="more than"):
        Upload.from_bytes(b"\x00" * 500_000, closed)


@settings(max_examples=300)
@given(st.data())
def test_no_damage_gets_through_as_a_crash(data):
    """Flip, cut and lengthen: an upload is read as something finite of the right shape, or not."""
    content = bytearray(sent().to_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(content)))
    for damaged in (bytes(content), bytes(content[:cut]), bytes(content) + b"\x00" * 9):
        try:
            read = Upload.from_bytes(damaged, EXPECTED)
        except MessageError:
            continue
        assert all(np.isfinite(array).all() for array in read.update.dense.values())
        assert all(stack.ids.min(initial=0) >= 0 for stack in read.update.rows.values())


def test_a_download_comes_back():
    own = {"cluster": np.array([[1.0, 2.0], [3.0, 4.0]])}
    download = Download(7, {"items": np.eye(3, dtype=np.float32)}, own, {"clip_bound": 0.1})
    second = download.to(np.array([1]))
    read = Download.from_bytes(second.to_bytes())
    assert (read.round, read.protection) == (7, {"clip_bound": 0.1})
    np.testing.assert_array_equal(read.received["cluster"], [[3.0, 4.0]])
    assert payload(second.to_bytes()) == second.nbytes(1)
    assert download.nbytes(2) == 2 * second.nbytes(1)
    with pytest.raises(MessageError, match="finite"):
        Download.from_bytes(Download(1, {"items": np.array([np.inf])}).to_bytes())


NAMES = {"full": ["hr@10", "auc"]}


def evaluation(users=3, hits=STEPS, rank_counts=3):
    histogram = np.zeros(32, np.int64)
    histogram[2] = rank_counts
    return Evaluation({"full": Tally(users, {"hr@10": hits, "auc": STEPS}, histogram)})


def test_an_evaluation_comes_back_and_merges():
    read = Evaluation.from_bytes(evaluation().to_bytes(), NAMES)
    both = read.merge(Evaluation({})).merge(evaluation(hits=3 * STEPS))
    assert both.users == 6
    assert both.means() == {"full": {"hr@10": 4 / 6, "auc": 2 / 6}}
    assert both.tallies["full"].rank_counts[2] == 6


@pytest.mark.parametrize(
    ("message", "why"),
    [
        (evaluation(hits=4 * STEPS), "between 0 and 1"),
        (evaluation(hits=-1), "between 0 and 1"),
        (evaluation(rank_counts=2), "ranks do not fit"),
        (Evaluation({}), "candidate sets"),
        (Evaluation({"full": Tally(1, {"hr@5": 0}, np.eye(32, dtype=np.int64)[0])}), "metrics"),
    ],
)
def test_an_evaluation_that_cannot_be_is_refused(message, why):
    with pytest.raises(MessageError, match=why):
        Evaluation.from_bytes(message.to_bytes(), NAMES)


@settings(max_examples=200)
@given(
    st.lists(st.floats(-1e5, 1e5) | st.floats(-1e29, 1e29), max_size=50),
    st.randoms(use_true_random=False),
)
def test_sums_of_losses_are_exact_in_any_order(values, random):
    shuffled = np.array(random.sample(values, len(values)))
    whole = LossSum.of(np.array(values))
    parts = LossSum.of(shuffled[: len(values) // 2]).merge(LossSum.of(shuffled[len(values) // 2 :]))
    assert whole == parts
    if values:
        exact = float(sum(map(Fraction, values)) / len(values))
        assert whole.mean == pytest.approx(exact, rel=1e-12, abs=1e-25)


def test_a_loss_that_is_no_number_is_counted_as_lost():
    loss = LossSum.of(np.array([0.5, np.nan, np.inf, 1e300]))
    assert (loss.clients, loss.lost, loss.mean) == (4, 3, 0.5)
    assert exact_sum(np.array([0.1] * 10)) / (10 * STEPS) == 0.1


# ------------------------------------------------------------------ deflated arrays


def a_download():
    codes = np.arange(5000).astype(np.int8).reshape(50, 100)
    head, gaps = np.arange(2000) % 3 == 0, np.full(3000, 7, np.uint8)
    floats, few = np.ones(4, np.float32), np.arange(9, dtype=np.int8)
    common = {"codes": codes, "head": head, "gaps": gaps, "floats": floats, "few": few}
    return Download(3, common)


def test_arrays_of_bytes_travel_deflated_and_come_back():
    sent = a_download()
    back = Download.from_bytes(sent.to_bytes())
    assert back.common.keys() == sent.common.keys()
    for name, array in sent.common.items():
        assert back.common[name].dtype == array.dtype
        np.testing.assert_array_equal(back.common[name], array)
    plain = sum(array.nbytes for array in sent.common.values())
    assert wire_bytes(sent.common) < plain and sent.nbytes(2) == 2 * wire_bytes(sent.common)
    assert abs(len(sent.to_bytes()) - wire_bytes(sent.common)) < 2000, "what is counted is sent"


def spoilt_downloads(message):
    shapes, deflated = message.shapes, message.deflated
    for name, data in deflated.items():
        dtype, shape = shapes[name]
        yield replace(message, deflated={**deflated, name: data[:-3]}), "not deflated"
        yield replace(message, deflated={**deflated, name: data.astype(np.int64)}), "no deflated"
        for wrong in ((1,), (*shape, 2), (2**40,)):
            yield replace(message, shapes={**shapes, name: (dtype, wrong)}), "bytes|too large"
        yield replace(message, deflated={**deflated, name: data[:0]}), "not deflated"
        left = {other: each for other, each in deflated.items() if other != name}
        yield replace(message, deflated=left), "does not say"
    yield replace(message, shapes={**shapes, "codes": ("float64", (625,))}), "header"
    yield replace(message, shapes={**shapes, "codes": ("bool", (50, 100))}), "header"
    yield replace(message, common={**message.common, "codes": np.zeros(1)}), "does not say"
    bomb = np.frombuffer(zlib.compress(bytes(2**24)), np.uint8)
    yield replace(message, deflated={**deflated, "gaps": bomb}), "not 3,000 bytes"


def test_deflated_arrays_that_are_not_what_they_say_are_refused():
    messages = list(spoilt_downloads(_DownloadMessage.from_bytes(a_download().to_bytes())))
    assert len(messages) > 15
    for message, why in messages:
        with pytest.raises(MessageError, match=why):
            Download.from_bytes(message.to_bytes())
