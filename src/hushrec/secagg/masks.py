"""Vectors of words, and the keystreams that hide them.

A mask is the keystream of ChaCha20 under a key that is used for one mask only. It is added word by
word, modulo 2^64; wide numbers are added modulo 2^320. Whoever does not know the key sees uniform
words. Vectors are walked through in stretches that stay in the cache, all masks at once, so that
nothing of a vector's size is held besides the vector.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, CipherContext
from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20

from hushrec.secagg import keys
from hushrec.secagg.layout import WIDE, WORD, Layout, Words
from hushrec.secagg.messages import Terms, place_bytes

STRETCH = 2**15
"""Words that are masked at a time: 256 KiB."""
Mask = tuple[bytes, bool]
"""A key, and whether its keystream is added (or taken away)."""


def keystream(key: bytes) -> CipherContext:
    """Return what encrypts zeros to the keystream of a key."""
    return Cipher(ChaCha20(key, bytes(16)), mode=None).encryptor()


def own_mask(mask_seed: bytes, added: bool) -> Mask:
    """Return the mask that is a node's own."""
    return keys.derive(mask_seed, "own mask"), added


def pair_mask(terms: Terms, private: bytes, pair: tuple[int, int], public: bytes) -> Mask:
    """Return the mask between two nodes as the first lays it on, whose private key is given."""
    shared = keys.agree(private, public)
    assert shared is not None, "announced keys were checked"
    key = keys.derive(shared, "pair mask", terms.digest, place_bytes(*sorted(pair)))
    return key, pair[0] < pair[1]


def masked(vector: Words, layout: Layout, masks: Iterable[Mask]) -> Iterator[Words]:
    """Yield a vector with masks laid on, in stretches; each is overwritten by the next."""
    streams = [(keystream(key), added) for key, added in masks]
    words, length = layout.words, layout.length
    longest = max(min(STRETCH, words), length - words)
    zeros, mask, stretch = bytes(8 * longest), np.empty(longest, WORD), np.empty(longest, WORD)
    spans = [(start, min(start + STRETCH, words)) for start in range(0, words, STRETCH)]
    spans += [(words, length)] if layout.wide else []
    for start, end in spans:
        size = end - start
        here, laid = stretch[:size], mask[:size]
        here[:] = vector[start:end]
        for cipher, added in streams:
            cipher.update_into(memoryview(zeros)[: 8 * size], laid.data.cast("B"))
            _combine(here, laid, added, wide=start >= words)
        yield here


def laid_on(vector: Words, layout: Layout, masks: Iterable[Mask]) -> Words:
    """Return a vector with masks laid on; a mask that is laid on with the other sign is gone."""
    whole, start = np.empty_like(vector), 0
    for stretch in masked(vector, layout, masks):
        whole[start : start + len(stretch)] = stretch
        start += len(stretch)
    return whole


def add(total: Words, vector: Words, layout: Layout) -> None:
    """Add a vector to a running total, in place."""
    words = layout.words
    _combine(total[:words], vector[:words], added=True, wide=False)
    _combine(total[words:], vector[words:], added=True, wide=True)


def _combine(total: Words, other: Words, added: bool, wide: bool) -> None:
    if not wide:
        (np.add if added else np.subtract)(total, other, out=total)
        return
    # Least word first. Taking away is adding the complement and one.
    mine = total.reshape(-1, WIDE)
    theirs = (other if added else ~other).reshape(-1, WIDE)
    carry = np.full(len(mine), not added, WORD)
    for place in range(WIDE):
        plain = mine[:, place] + theirs[:, place]
        carried = plain + carry
        carry = ((plain < theirs[:, place]) | (carried < plain)).astype(WORD)
        mine[:, place] = carried
