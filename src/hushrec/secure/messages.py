"""What travels: a frame that says which sum, stage and sender, and a body of exactly known size.

A node's message of a stage goes to the server; the server's message of a stage hands on what it
got. Every size follows from the terms and from the sets of nodes in the message, so a message is
measured before anything of it is read. Sets are bitmaps: they cannot name a node twice, nor one
that is not registered. Whatever else arrives is a `MessageError` that names its sender.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Iterator, Mapping

from hushrec.errors import MessageError, TooFewError
from hushrec.secure.keys import TAG_BYTES
from hushrec.secure.shamir import PRIME, SHARE_BYTES
from hushrec.secure.terms import Stage, Terms

_FRAME = struct.Struct("<8sQ32sII")  # of whole words, so that a vector behind it is aligned
_MAGIC = b"hushsum1"
SERVER = 2**16 - 1
"""The server's place; nodes have theirs in `Terms.names`."""
SEALED_BYTES = 2 * SHARE_BYTES + TAG_BYTES
"""Two shares, of a mask key and of a mask's seed, that only their recipient can read."""
_SAID = {
    Stage.KEYS: ("keys", "list of keys"),
    Stage.SHARES: ("shares", "list of shares"),
    Stage.MASKED: ("masked vector", "list of survivors"),
    Stage.AGREEMENT: ("agreement", "list of agreements"),
    Stage.REVEALED: ("revealed shares", "last word"),
}


def called(stage: Stage, sender: int) -> str:
    """Return the name of a message in a sentence."""
    return _SAID[stage][sender == SERVER]


def write(terms: Terms, stage: Stage, sender: int, body: bytes = b"") -> bytes:
    """Return a message."""
    return _FRAME.pack(_MAGIC, terms.number, terms.digest, stage, sender) + body


def read(terms: Terms, stage: Stage, sender: int, data: bytes) -> memoryview:
    """Return the body of a message that must be of this sum, stage and sender."""
    who = "the server" if sender == SERVER else f"node '{terms.names[sender]}'"
    if len(data) < _FRAME.size or not data.startswith(_MAGIC):
        raise MessageError(f"{who} sent something that is no message of a secure sum")
    _, number, digest, sent, said = _FRAME.unpack_from(data)
    if number != terms.number:
        raise MessageError(f"{who} sent a message of sum {number}, not of sum {terms.number}")
    if digest != terms.digest:
        raise MessageError(
            f"{who} goes by other terms of sum {number}: compare federation, nodes, threshold "
            "and layout"
        )
    if sent != stage:
        known = called(Stage(sent), said) if sent in _SAID else f"message of kind {sent}"
        raise MessageError(f"{who} sent its {known}; awaited is its {called(stage, sender)}")
    if said != sender:
        raise MessageError(f"{who} sent a message in the name of another")
    return memoryview(data)[_FRAME.size :]


def check_size(body: memoryview, size: int, what: str) -> None:
    """Refuse a body of any other size."""
    if len(body) != size:
        raise MessageError(f"{what} has {len(body):,} bytes instead of {size:,}")


def check_enough(terms: Terms, places: Iterable[int], what: str) -> None:
    """Refuse to go on with fewer nodes than agreed."""
    left = set(places)
    if len(left) < terms.threshold:
        missing = terms.listed(set(range(len(terms.names))) - left)
        raise TooFewError(
            f"sum {terms.number} is given up: {len(left)} of {len(terms.names)} nodes {what}, and "
            f"{terms.threshold} are needed to hide each of them; missing: {missing}"
        )


# ------------------------------------------------------------ sets of nodes, and tables over them


def write_set(terms: Terms, places: Iterable[int]) -> bytes:
    """Return a set of nodes as a bitmap."""
    bits = sum(1 << place for place in set(places))
    return bits.to_bytes(_set_bytes(terms), "little")


def write_table(terms: Terms, entries: Mapping[int, bytes]) -> bytes:
    """Return entries of equal size by node: the set of nodes, and the entries in its order."""
    return b"".join([write_set(terms, entries), *(entries[place] for place in sorted(entries))])


def read_table(terms: Terms, body: memoryview, size: int, what: str) -> dict[int, bytes]:
    """Read it back."""
    start = _set_bytes(terms)
    if len(body) < start:
        raise MessageError(f"{what} names no nodes")
    places = list(_places(int.from_bytes(body[:start], "little")))
    if places and places[-1] >= len(terms.names):
        raise MessageError(f"{what} names nodes that are not registered")
    check_size(body, start + size * len(places), what)
    at = (start + size * row for row in range(len(places)))
    return {place: bytes(body[here : here + size]) for place, here in zip(places, at, strict=True)}


def _set_bytes(terms: Terms) -> int:
    return -(-len(terms.names) // 8)


def _places(bits: int) -> Iterator[int]:
    return (place for place in range(bits.bit_length()) if bits >> place & 1)


# ------------------------------------------------------------ what is in them


def place_bytes(*places: int) -> bytes:
    """Return nodes as part of what is signed or bound."""
    return struct.pack(f"<{len(places)}H", *places)


def share_bytes(share: int) -> bytes:
    """Write a share."""
    return share.to_bytes(SHARE_BYTES, "little")


def check_shares(data: bytes, what: str) -> None:
    """Refuse shares, one or more, that are no numbers of the field."""
    for at in range(0, len(data), SHARE_BYTES):
        if int.from_bytes(data[at : at + SHARE_BYTES], "little") >= PRIME:
            raise MessageError(f"{what} holds a number that is no share")


def follow(transcript: bytes, said: bytes) -> bytes:
    """Return the digest of everything that nodes were told so far, and this."""
    return hashlib.sha256(transcript + said).digest()


def agreed_words(terms: Terms, place: int, transcript: bytes) -> bytes:
    """Return what a node signs to say that this is what it was told."""
    return terms.digest + place_bytes(place) + transcript
