"""Layouts and masks: exact for every number, equal to the slow way, in little memory."""

import tracemalloc
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hushrec.aggregation import LARGEST_LOSS, LossSum
from hushrec.errors import ConfigError, DivergedError
from hushrec.secagg import Stage, VectorLayout, vectors
from hushrec.secagg.vectors import WIDE, WORD
from secure_sums import play

WIDEST = 2 ** (64 * WIDE - 1)


def test_named_arrays_and_wide_numbers_come_back():
    layout = VectorLayout({"rows": (3, 2), "none": (0, 4), "clients": ()}, ("loss", "hits"))
    arrays = {
        "rows": np.arange(-3, 3).reshape(3, 2),
        "none": np.zeros((0, 4), np.int64),
        "clients": np.array(7),
    }
    wide = {"loss": -(2**228) - 5, "hits": 2**160 + 1}
    vector = layout.pack(arrays, wide, nodes=3)
    assert vector.shape == (layout.length,) == (7 + 2 * WIDE,)
    found, numbers = layout.unpack(vector)
    assert numbers == wide
    assert found.keys() == arrays.keys()
    for name, array in arrays.items():
        np.testing.assert_array_equal(found[name], array)


def test_losses_of_any_size_fit():
    """Of a million clients with the largest loss there is, on each of the most nodes."""
    layout = VectorLayout({}, ("loss",))
    loss = 2**20 * int(LARGEST_LOSS) * 2**128
    assert LossSum.of(np.array([LARGEST_LOSS * (1 - 2**-53)])).steps * 2**20 <= loss
    for sign in (1, -1):
        layout.pack({}, {"loss": sign * loss}, nodes=2**16)


def test_what_could_overflow_is_refused():
    layout = VectorLayout({"x": (1,)}, ("loss",))
    for nodes in (3, 4):
        most, widest = (2**63 - 1) // nodes, (WIDEST - 1) // nodes
        layout.pack({"x": np.array([-most])}, {"loss": widest}, nodes)
        with pytest.raises(DivergedError, match=f"'x' is too large to be summed over {nodes}"):
            layout.pack({"x": np.array([most + 1])}, {"loss": 0}, nodes)
        with pytest.raises(DivergedError, match="'loss' is too large"):
            layout.pack({"x": np.array([0])}, {"loss": -widest - 1}, nodes)
    with pytest.raises(DivergedError):
        layout.pack({"x": np.array([-(2**63)])}, {"loss": 0}, 3)


def test_what_does_not_follow_the_layout_is_refused():
    layout = VectorLayout({"x": (2,)})
    for arrays, word in [
        ({}, "'x' is in the layout"),
        ({"x": np.zeros(2, np.int64), "y": np.zeros(1, np.int64)}, "'y'"),
        ({"x": np.zeros(3, np.int64)}, r"int64\(3,\), not int64\(2,\)"),
        ({"x": np.zeros(2)}, "float64"),
    ]:
        with pytest.raises(ConfigError, match=word):
            layout.pack(arrays, {}, 3)
    for given_layout in [({}, ()), ({"": (1,)}, ()), ({"x": (1,)}, ("x",)), ({"x": (2**33,)}, ())]:
        with pytest.raises(ConfigError):
            VectorLayout(*given_layout)
    with pytest.raises(ConfigError, match="shape"):
        VectorLayout({"x": (-1, -5)})


def test_digests_tell_layouts_apart():
    layouts = [
        VectorLayout({"a": (2, 3), "b": (1,)}),
        VectorLayout({"b": (1,), "a": (2, 3)}),
        VectorLayout({"a": (3, 2), "b": (1,)}),
        VectorLayout({"a": (2, 3)}, ("b",)),
        VectorLayout({"a": (6,), "b": (1,)}),
    ]
    assert len({layout.digest for layout in layouts}) == len(layouts)
    assert layouts[0].digest == replace(layouts[0]).digest


# ------------------------------------------------------------ masks, and their slow twin


def slow(vector, layout, laid):
    """Every number on its own, in Python's arithmetic."""
    out = vector.tobytes()
    sizes = [8] * layout.words + [8 * WIDE] * len(layout.wide)
    for key, added in laid:
        stream, done, at = vectors.keystream(key).update(bytes(len(out))), b"", 0
        for size in sizes:
            number = int.from_bytes(out[at : at + size], "little")
            mask = int.from_bytes(stream[at : at + size], "little")
            number = (number + mask if added else number - mask) % 2 ** (8 * size)
            done += number.to_bytes(size, "little")
            at += size
        out = done
    return np.frombuffer(out, WORD)


words = st.sampled_from([0, 1, 2**63, 2**64 - 1]) | st.integers(0, 2**64 - 1)


@st.composite
def masked_cases(draw):
    count, wide = draw(st.integers(0, 11)), draw(st.integers(0, 3))
    layout = VectorLayout({"x": (count + (not wide),)}, tuple(f"w{k}" for k in range(wide)))
    size = layout.length
    pair = [draw(st.lists(words, min_size=size, max_size=size)) for _ in range(2)]
    return layout, *(np.array(one, WORD) for one in pair)


@given(masked_cases(), st.lists(st.tuples(st.binary(min_size=32, max_size=32), st.booleans())))
def test_masks_are_the_slow_ones(case, laid):
    layout, vector, other = case
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vectors, "STRETCH", 4)  # several stretches, and one that is not full
        masked = vectors.add_masks(vector, layout, laid)
        np.testing.assert_array_equal(masked, slow(vector, layout, laid))
        off = [(key, not added) for key, added in laid]
        np.testing.assert_array_equal(vectors.add_masks(masked, layout, off), vector)
    total = vector.copy()
    vectors.add(total, other, layout)
    a, b, c = (layout.unpack(v.view(np.int64)) for v in (vector, other, total))
    for name in layout.wide:
        assert (a[1][name] + b[1][name] - c[1][name]) % 2 ** (64 * WIDE) == 0
    for x, y, z in zip(a[0]["x"].tolist(), b[0]["x"].tolist(), c[0]["x"].tolist(), strict=True):
        assert (x + y - z) % 2**64 == 0


def test_the_keystream_is_chacha20():
    """RFC 8439, appendix A.1, the first vector."""
    assert (
        vectors.keystream(bytes(32)).update(bytes(16)).hex() == "76b8e0ada0f13d90405d6ae55386bd28"
    )


def test_masking_holds_one_copy_besides_the_vector():
    """The message itself is one; the server holds a running total and one message."""
    sums = play(5, words=2**20).until(Stage.SHARES)
    size = 8 * 2**20
    tracemalloc.start()
    try:
        _, message = sums.answer("a", Stage.MASKED, sums.told[Stage.SHARES]["a"])
        assert tracemalloc.get_traced_memory()[1] < 1.25 * size
        tracemalloc.reset_peak()
        before = tracemalloc.get_traced_memory()[0]
        sums.server.receive("a", message)
        assert tracemalloc.get_traced_memory()[1] - before < 0.1 * size
    finally:
        tracemalloc.stop()
    assert len(message) > size
