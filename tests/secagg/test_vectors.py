"""Layouts and masks: exact for every number, equal to the slow way, in little memory."""

import tracemalloc
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hushrec.aggregation import LARGEST_LOSS, LossSum
from hushrec.errors import ConfigError, DivergedError
from hushrec.secagg import Stage, VectorLayout, keys, vectors
from hushrec.secagg.vectors import WIDE, WIDE_BYTES, Word
from secure_sums import FRAME, play

WIDEST = 2 ** (64 * WIDE - 1)


def test_named_arrays_and_wide_numbers_come_back():
    layout = VectorLayout({"rows": (3, 2), "none": (0, 4), "clients": ()}, ("loss", "hits"))
    arrays = {
        "rows": np.arange(-3, 3).reshape(3, 2),
        "none": np.zeros((0, 4), np.int64),
        "clients": np.array(7),
    }
    wide = {"loss": -(2**228) - 5, "hits": 2**160 + 1}
    pieces = list(layout.pack(arrays, wide, nodes=3))
    assert [len(piece) for piece in pieces] == [layout.nbytes] == [8 * (7 + 2 * WIDE)]
    found, numbers = layout.unpack(pieces)
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
    for given_layout in [({}, ()), ({"": (1,)}, ()), ({"x": (1,)}, ("x",)), ({"x": (2**40,)}, ())]:
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


def slow(layout, number, piece, laid):
    """Every number on its own, in Python's arithmetic."""
    out = bytes(piece)
    for key, added in laid:
        own = keys.derive(key, "piece", number.to_bytes(8, "little"))
        stream, done = vectors.keystream(own).update(bytes(len(out))), b""
        for size in sizes(layout, number):
            at = len(done)
            value = int.from_bytes(out[at : at + size], "little")
            mask = int.from_bytes(stream[at : at + size], "little")
            value = (value + mask if added else value - mask) % 2 ** (8 * size)
            done += value.to_bytes(size, "little")
        out = done
    return out


def sizes(layout, number):
    """Bytes of every number of a piece."""
    found = [WIDE_BYTES] * len(layout.wide) if number == 0 else []
    return found + [
        span.width for span in layout.spans(number) for _ in range(span.last - span.first)
    ]


@st.composite
def layouts(draw):
    """Arrays of every width, wide numbers, and pieces that cut through arrays and rows."""
    arrays, bounded = {}, {}
    for k in range(draw(st.integers(1, 4))):
        name, width = f"x{k}", draw(st.sampled_from([2, 4, 8, None]))
        arrays[name] = draw(st.tuples(st.integers(0, 9), st.integers(1, 3)))
        if width is not None:
            bounded[name] = Word(width, draw(st.sampled_from([1, 2**16])), 1)
    wide = tuple(f"w{k}" for k in range(draw(st.integers(0, 2))))
    if not wide and not any(np.prod(shape) for shape in arrays.values()):
        arrays["x0"] = (1, 1)
    least = max(1, WIDE * len(wide))
    return VectorLayout(arrays, wide, bounded, 8 * draw(st.integers(least, least + 6)))


@given(
    layouts(),
    st.lists(st.tuples(st.binary(min_size=32, max_size=32), st.booleans())),
    st.integers(0, 2**32),
)
def test_masks_are_the_slow_ones(layout, laid, seed):
    random = np.random.default_rng(seed)
    for number in range(layout.pieces):
        piece, other = (random.bytes(layout.size(number)) for _ in range(2))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(vectors, "STRETCH", WIDE_BYTES)  # several, and one that is not full
            masked = vectors.add_masks(layout, number, piece, laid)
            assert masked == slow(layout, number, piece, laid)
            off = [(key, not added) for key, added in laid]
            assert vectors.add_masks(layout, number, bytes(masked), off) == piece
        total, at = bytearray(piece), 0
        vectors.add(layout, number, total, other)
        for size in sizes(layout, number):
            a, b, c = (
                int.from_bytes(each[at : at + size], "little") for each in (piece, other, total)
            )
            assert (a + b - c) % 2 ** (8 * size) == 0
            at += size
        assert at == layout.size(number)


def test_pieces_never_share_a_keystream():
    layout = VectorLayout({"x": (64,)}, piece_bytes=64)
    mask = [(bytes(32), True)]
    streams = [bytes(vectors.add_masks(layout, k, bytes(64), mask)) for k in range(layout.pieces)]
    assert len(set(streams)) == layout.pieces == 8
    blocks = {stream[at : at + 8] for stream in streams for at in range(0, 64, 8)}
    assert len(blocks) == 64


@given(layouts(), st.integers(0, 2**32), st.booleans())
def test_what_is_packed_in_pieces_comes_back(layout, seed, sparse):
    random, entries = np.random.default_rng(seed), {}
    for name, shape in layout.arrays.items():
        word = layout.words.get(name)
        most = 2**40 if word is None else min(3 * word.largest, 2**15)
        whole = random.integers(-most, most + 1, shape) * random.integers(0, 2, (shape[0], 1))
        entries[name] = whole * (1 if word is None else word.unit)
    wide = {name: int(random.integers(-(2**60), 2**60)) << 200 for name in layout.wide}
    given_ = {}
    for name, whole in entries.items():
        ids = np.flatnonzero(whole.any(1))
        given_[name] = (ids, whole[ids]) if sparse else whole
    pieces = list(layout.pack(given_, wide, nodes=3, clients=3))
    assert [len(piece) for piece in pieces] == [layout.size(k) for k in range(layout.pieces)]
    found, numbers = layout.unpack(pieces, sparse=entries if sparse else ())
    assert numbers == wide
    for name, whole in entries.items():
        if sparse:
            ids, rows = found[name]
            np.testing.assert_array_equal(ids, given_[name][0])
            np.testing.assert_array_equal(rows, given_[name][1])
        else:
            np.testing.assert_array_equal(found[name], whole)
    assert VectorLayout.from_json(layout.to_json()) == layout


@pytest.mark.parametrize(
    ("clients", "largest", "width"),
    [
        *[(2**15 - 1, 1, 2), (2**15, 1, 4), (6040, 2**16, 4), (2**15 - 1, 2**16, 4)],
        *[(2**15, 2**16, 8), (2**31 - 1, 1, 4), (2**31, 1, 8)],
    ],
)
def test_words_are_as_wide_as_the_bound_needs(clients, largest, width):
    """The largest sum and its negative fit with their signs, and a narrower word would not do."""
    assert Word.bounded("x", 1, largest, clients).width == width
    assert clients * largest <= 2 ** (8 * width - 1) - 1
    assert width == 2 or clients * largest > 2 ** (4 * width - 1) - 1
    with pytest.raises(ConfigError, match="'x' of 1,024 clients does not fit"):
        Word.bounded("x", 1, 2**53, 1024)


def test_more_than_the_clients_can_have_is_refused():
    layout = VectorLayout({"x": (2, 1)}, words={"x": Word(2, 4, 3)})
    list(layout.pack({"x": np.array([[60], [-60]])}, {}, 3, clients=5))
    for bad, error, word in [
        ([[64], [0]], DivergedError, "too large"),
        ([[0], [-64]], DivergedError, "too large"),
        ([[2], [0]], ConfigError, "no multiples of 4"),
    ]:
        with pytest.raises(error, match=word):
            layout.pack({"x": np.array(bad)}, {}, 3, clients=5)
    for more in ({"words": {"y": Word(2, 1, 1)}}, {"words": {"x": Word(3, 1, 1)}}):
        with pytest.raises(ConfigError, match="is no array of the layout, or has no such words"):
            VectorLayout({"x": (2,)}, **more)
    for size in (12, 0, 32):
        with pytest.raises(ConfigError, match="a piece holds whole words"):
            VectorLayout({"x": (2,)}, ("loss",), piece_bytes=size)


def test_the_keystream_is_chacha20():
    """RFC 8439, appendix A.1, the first vector."""
    assert (
        vectors.keystream(bytes(32)).update(bytes(16)).hex() == "76b8e0ada0f13d90405d6ae55386bd28"
    )


def test_masking_holds_one_piece():
    """The message itself is one; the server holds one piece of each node in its store."""
    size = 2**20
    layout = VectorLayout({"x": (8 * size // 8,)}, piece_bytes=size)
    sums = play(5, layout=layout).until(Stage.MASKED)
    assert {len(said) for said in sums.pieces.values()} == {size + FRAME}
    assert len(sums.pieces) == 5 * 8
    piece, node = sums.piece("a", 3), sums.nodes["a"]
    tracemalloc.start()
    try:
        message = node.mask(sums.states["a"], 3, piece)
        assert tracemalloc.get_traced_memory()[1] < 4 * size
    finally:
        tracemalloc.stop()
    assert message == sums.pieces["a", 3]
