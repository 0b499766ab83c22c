"""Vectors of words that are summed securely, in pieces, and the keystreams that mask them.

A node's whole upload is one vector, counts, losses and metrics included, so that all of it is
masked. Its layout is public, and the parties compare its digest.

An entry of an array is a word: a whole number modulo 2^16, 2^32 or 2^64, read with its sign. A
word is as wide as the largest sum needs: `Word` derives it from a public bound on one client's
entry and the number of clients. Sums of losses and metrics (`hushrec.aggregation`) are whole
numbers of some hundred bits. If their words were summed separately, the carries would leak more
than the sum. So a wide number is five words of 64 bits that add up as one number modulo 2^320.

The words lie in the vector by their width, wide numbers first, so that no word crosses the end of a
piece. A vector is packed, masked, sent, summed and read piece by piece: no party holds it whole.

A mask is the keystream of ChaCha20, added word by word. Each piece of each mask has a key of its
own. Without the key, a masked piece is uniform. A piece is masked in stretches that fit the cache.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from math import prod

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, CipherContext
from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20
from numpy.typing import NDArray

from hushrec.errors import ConfigError, DivergedError
from hushrec.secagg import keys

WIDTHS = (2, 4, 8)
"""Bytes of a word."""
WIDE = 5
"""Words of a wide number: 2^303 with its sign, summed over 2^16 nodes."""
WIDE_BYTES = 8 * WIDE
PIECE_BYTES = 2**24
MOST_PIECES = 2**16
TOO_LARGE = (
    "'{name}' is too large to be summed over {nodes} nodes: training diverged; "
    "use a smaller learning rate"
)
Entries = NDArray[np.int64] | tuple[NDArray[np.int64], NDArray[np.int64]]
"""An array, or its rows that are not zero: ascending ids, and the rows."""


@dataclass(frozen=True)
class Word:
    """The words of an array whose entries are bounded."""

    width: int
    """Bytes."""
    unit: int
    """Entries are multiples of it, and a word counts units."""
    largest: int
    """Of one client's entry, in units."""

    @classmethod
    def bounded(cls, name: str, unit: int, largest: int, clients: int) -> Word:
        """Return the narrowest words that hold every sum over so many clients, with its sign."""
        for width in WIDTHS:
            if clients * largest < 2 ** (8 * width - 1):
                return cls(width, unit, largest)
        raise ConfigError(f"'{name}' of {clients:,} clients does not fit words of 64 bits")


@dataclass(frozen=True)
class Span:
    """Entries of one array that are in a piece."""

    name: str
    first: int
    """Flat index of the first entry."""
    last: int
    start: int
    """Byte of the piece with the first entry."""
    width: int

    def words(self, piece: memoryview) -> NDArray[np.signedinteger]:
        """Return the entries as a view of the piece."""
        end = self.start + self.width * (self.last - self.first)
        return np.frombuffer(piece[self.start : end], f"<i{self.width}")


@dataclass(frozen=True)
class VectorLayout:
    """Names and shapes of the summed arrays, and the words that they are summed in."""

    arrays: Mapping[str, tuple[int, ...]]
    wide: tuple[str, ...] = ()
    """Names of wide numbers."""
    words: Mapping[str, Word] = field(default_factory=dict)
    """Of the arrays whose entries are bounded; others have words of 64 bits."""
    piece_bytes: int = PIECE_BYTES
    """Of every piece but the last."""

    def __post_init__(self) -> None:
        names = [*self.arrays, *self.wide]
        for name in names:
            if not name or names.count(name) > 1:
                raise ConfigError(f"a layout needs different names: '{name}' will not do")
        for name, shape in self.arrays.items():
            if any(size < 0 for size in shape):
                raise ConfigError(f"'{name}' cannot have shape {shape}")
        for name, word in self.words.items():
            if name not in self.arrays or word.width not in WIDTHS:
                raise ConfigError(f"'{name}' is no array of the layout, or has no such words")
        if self.piece_bytes % 8 or self.piece_bytes < max(8, WIDE_BYTES * len(self.wide)):
            raise ConfigError("a piece holds whole words, and the first one all wide numbers")
        if not 0 < self.pieces <= MOST_PIECES:
            raise ConfigError(f"a vector of {self.nbytes:,} bytes cannot be summed securely")

    @cached_property
    def starts(self) -> Mapping[str, int]:
        """The first byte of every array, the arrays with the widest words first."""
        found, at = {}, WIDE_BYTES * len(self.wide)
        for width in reversed(WIDTHS):
            for name, shape in self.arrays.items():
                if self.width(name) == width:
                    found[name] = at
                    at += width * prod(shape)
        return found

    def width(self, name: str) -> int:
        """Return the bytes of an array's words."""
        return self.words[name].width if name in self.words else 8

    @cached_property
    def nbytes(self) -> int:
        """Bytes of the whole vector."""
        narrow = sum(self.width(name) * prod(shape) for name, shape in self.arrays.items())
        return WIDE_BYTES * len(self.wide) + narrow

    @property
    def pieces(self) -> int:
        """Number of pieces."""
        return -(-self.nbytes // self.piece_bytes)

    def size(self, piece: int) -> int:
        """Return the bytes of a piece."""
        return min(self.piece_bytes, self.nbytes - piece * self.piece_bytes)

    @cached_property
    def digest(self) -> bytes:
        """Digest that the parties of a sum compare."""
        return hashlib.sha256(self.to_json().encode()).digest()

    def to_json(self) -> str:
        """Encode the layout for the node's own store."""
        arrays = [[name, list(shape)] for name, shape in self.arrays.items()]
        words = [[name, word.width, word.unit, word.largest] for name, word in self.words.items()]
        return json.dumps([arrays, list(self.wide), words, self.piece_bytes])

    @classmethod
    def from_json(cls, text: str) -> VectorLayout:
        """Decode what `to_json` wrote."""
        arrays, wide, words, piece_bytes = json.loads(text)
        shapes = {name: tuple(shape) for name, shape in arrays}
        bounded = {name: Word(*word) for name, *word in words}
        return cls(shapes, tuple(wide), bounded, piece_bytes)

    def spans(self, piece: int) -> list[Span]:
        """Return the entries of each array that are in a piece."""
        low, found = piece * self.piece_bytes, []
        high = low + self.size(piece)
        for name, start in self.starts.items():
            width = self.width(name)
            end = start + width * prod(self.arrays[name])
            first, last = max(low, start), min(high, end)
            if first < last:
                at = (first - start) // width, (last - start) // width
                found.append(Span(name, *at, first - low, width))
        return found

    def regions(self, piece: int) -> list[tuple[int, int, int]]:
        """Return where words of one kind begin and end in a piece, and their bytes."""
        ends, at = [(WIDE_BYTES, WIDE_BYTES * len(self.wide))], WIDE_BYTES * len(self.wide)
        for width in reversed(WIDTHS):
            own = (prod(s) for name, s in self.arrays.items() if self.width(name) == width)
            at += width * sum(own)
            ends.append((width, at))
        low, high = piece * self.piece_bytes, piece * self.piece_bytes + self.size(piece)
        cuts = [0, *(min(max(end - low, 0), high - low) for _, end in ends)]
        return [(a, b, w) for (a, b), (w, _) in zip(pairwise(cuts), ends, strict=True) if a < b]

    def pack(
        self,
        entries: Mapping[str, Entries],
        wide: Mapping[str, int],
        nodes: int,
        clients: int = 0,
    ) -> Iterator[bytes]:
        """Yield the pieces of the vector of a node with so many clients.

        Entries that could overflow in a sum of so many nodes, or that are larger than the clients
        can make a bounded array, are refused.
        """
        for name in sorted({*entries, *wide} ^ {*self.arrays, *self.wide}):
            raise ConfigError(f"'{name}' is in the layout or among the arrays, but not in both")
        for name, given in entries.items():
            self._check(name, given, nodes, clients)
        head, most = b"", (2 ** (8 * WIDE_BYTES - 1) - 1) // nodes
        for name in self.wide:
            if abs(wide[name]) > most:
                raise DivergedError(TOO_LARGE.format(name=name, nodes=nodes))
            head += wide[name].to_bytes(WIDE_BYTES, "little", signed=True)
        return self._packed(entries, head)

    def _packed(self, entries: Mapping[str, Entries], head: bytes) -> Iterator[bytes]:
        for piece in range(self.pieces):
            out = bytearray(self.size(piece))
            out[: len(head)] = head
            for span in self.spans(piece):
                unit = self.words[span.name].unit if span.name in self.words else 1
                span.words(memoryview(out))[:] = _between(entries[span.name], span) // unit
            head = b""
            yield bytes(out)

    def _check(self, name: str, given: Entries, nodes: int, clients: int) -> None:
        """Refuse entries of another form, and entries that could overflow."""
        shape = self.arrays[name]
        rows = given[1] if isinstance(given, tuple) else given
        shape = (len(given[0]), *shape[1:]) if isinstance(given, tuple) else shape
        if rows.dtype != np.int64 or rows.shape != shape:
            raise ConfigError(f"'{name}' is {rows.dtype}{rows.shape}, not int64{shape}")
        word = self.words.get(name)
        most = (2**63 - 1) // nodes if word is None else clients * word.largest * word.unit
        if rows.size and not -most <= rows.min() <= rows.max() <= most:
            raise DivergedError(TOO_LARGE.format(name=name, nodes=nodes))
        if word is not None and (rows % word.unit).any():
            raise ConfigError(f"'{name}' has entries that are no multiples of {word.unit}")

    def unpack(
        self, pieces: Iterable[bytes], sparse: Collection[str] = ()
    ) -> tuple[dict[str, Entries], dict[str, int]]:
        """Return arrays and wide numbers of a vector; arrays named ``sparse`` as the rows that are
        not zero."""
        kept: dict[str, list[tuple[NDArray[np.int64], NDArray[np.int64]]]] = {}
        dense = {n: np.zeros(s, np.int64) for n, s in self.arrays.items() if n not in sparse}
        wide: dict[str, int] = {}
        for number, piece in enumerate(pieces):
            if number == 0:
                for k, name in enumerate(self.wide):
                    bits = piece[WIDE_BYTES * k : WIDE_BYTES * (k + 1)]
                    wide[name] = int.from_bytes(bits, "little", signed=True)
            for span in self.spans(number):
                words = span.words(memoryview(piece))
                unit = self.words[span.name].unit if span.name in self.words else 1
                if span.name in dense:
                    flat = dense[span.name].reshape(-1)
                    flat[span.first : span.last] = words.astype(np.int64) * unit
                else:
                    at = np.flatnonzero(words)
                    some = at + span.first, words[at].astype(np.int64) * unit
                    kept.setdefault(span.name, []).append(some)
        rows = {name: self._rows(name, kept.pop(name, [])) for name in sparse}
        return {**dense, **rows}, wide

    def _rows(
        self, name: str, found: Sequence[tuple[NDArray[np.int64], NDArray[np.int64]]]
    ) -> Entries:
        """Return rows from flat indices of entries, and the entries."""
        flat, entries = (
            np.concatenate([np.zeros(0, np.int64), *(some[part] for some in found)])
            for part in range(2)
        )
        width = prod(self.arrays[name][1:])
        if width == 1:
            return flat, entries.reshape(-1, *self.arrays[name][1:])
        ids, at = np.unique(flat // max(width, 1), return_inverse=True)
        rows = np.zeros((len(ids), width), np.int64)
        rows[at, flat % max(width, 1)] = entries
        return ids, rows.reshape(-1, *self.arrays[name][1:])


def _between(given: Entries, span: Span) -> NDArray[np.int64]:
    """Return the entries of a span in dense form."""
    if not isinstance(given, tuple):
        return given.reshape(-1)[span.first : span.last]
    ids, rows = given
    width = prod(rows.shape[1:])
    low, high = np.searchsorted(ids, [span.first // width, -(-span.last // width)])
    flat = (ids[low:high, None] * width + np.arange(width)).reshape(-1) - span.first
    inside = (flat >= 0) & (flat < span.last - span.first)
    out = np.zeros(span.last - span.first, np.int64)
    out[flat[inside]] = rows[low:high].reshape(-1)[inside]
    return out


STRETCH = 2**18
"""Bytes that are masked at a time."""
Mask = tuple[bytes, bool]
"""A key, and whether its keystream is added or subtracted."""


def keystream(key: bytes) -> CipherContext:
    """Return the cipher that encrypts zeros to the keystream of a key."""
    return Cipher(ChaCha20(key, bytes(16)), mode=None).encryptor()


def own_mask(digest: bytes, mask_seed: bytes, added: bool) -> Mask:
    """Return a node's own mask; ``digest`` is of the terms."""
    return keys.derive(mask_seed, "own mask", digest), added


def pair_mask(digest: bytes, private: bytes, pair: tuple[int, int], public: bytes) -> Mask:
    """Return the pairwise mask that the first of two nodes adds; ``digest`` is of the terms."""
    shared = keys.agree(private, public)
    assert shared is not None, "announced keys were checked"
    key = keys.derive(shared, "pair mask", digest, struct.pack("<2H", *sorted(pair)))
    return key, pair[0] < pair[1]


def add_masks(layout: VectorLayout, number: int, piece: bytes, masks: Iterable[Mask]) -> bytearray:
    """Return a piece with masks added; adding a mask with the other sign removes it."""
    at = struct.pack("<Q", number)
    streams = [(keystream(keys.derive(key, "piece", at)), added) for key, added in masks]
    out, zeros, noise = bytearray(piece), bytes(STRETCH), bytearray(STRETCH)
    for start, end, width in layout.regions(number):
        step = STRETCH // width * width
        for low in range(start, end, step):
            size = min(step, end - low)
            here = memoryview(out)[low : low + size]
            for cipher, added in streams:
                cipher.update_into(memoryview(zeros)[:size], memoryview(noise)[:size])
                _combine(here, memoryview(noise)[:size], width, added)
    return out


def add(layout: VectorLayout, number: int, total: bytearray, piece: bytes) -> None:
    """Add a piece to a running total of this piece, in place."""
    for start, end, width in layout.regions(number):
        _combine(memoryview(total)[start:end], memoryview(piece)[start:end], width, True)


def _combine(total: memoryview, other: memoryview, width: int, added: bool) -> None:
    if width != WIDE_BYTES:
        mine, theirs = (np.frombuffer(part, f"<u{width}") for part in (total, other))
        (np.add if added else np.subtract)(mine, theirs, out=mine)
        return
    # Least word first. Taking away is adding the complement and one.
    mine, theirs = (np.frombuffer(part, "<u8").reshape(-1, WIDE) for part in (total, other))
    theirs = theirs if added else ~theirs
    carry = np.full(len(mine), not added, np.uint64)
    for word in range(WIDE):
        plain = mine[:, word] + theirs[:, word]
        carried = plain + carry
        carry = ((plain < theirs[:, word]) | (carried < plain)).astype(np.uint64)
        mine[:, word] = carried
