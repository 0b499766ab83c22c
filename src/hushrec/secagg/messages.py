"""What all parties of one sum agree on before it, each from its own configuration.

What a node tells the others of its secrets in one sum: public keys, signed with its identity.

What travels: a frame that says which sum, stage and sender, and a body of exactly known size.

A node's message of a stage goes to the server; the server's message of a stage hands on what it
got. Every size follows from the terms and from the sets of nodes in the message, so a message is
measured before anything of it is read. Sets are bitmaps: they cannot name a node twice, nor one
that is not registered. Whatever else arrives is a `MessageError` that names its sender.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import IntEnum
from functools import cached_property

from hushrec.errors import ConfigError, MessageError, TooFewError
from hushrec.secagg import keys
from hushrec.secagg.keys import KEY_BYTES, PRIME, SHARE_BYTES, SIGNATURE_BYTES, TAG_BYTES, Identity
from hushrec.secagg.layout import Layout

MOST_NODES = 2**16 - 1


def threshold_of(nodes: int, min_nodes: int, asked: int | None) -> int:
    """Return how many of so many nodes must stay to the end of a sum."""
    return max(2 * nodes // 3 + 1, min_nodes) if asked is None else asked


def colluders_of(nodes: int, threshold: int) -> int:
    """Return how many nodes may side with a dishonest server that is to learn sums only.

    Two groups of `threshold` nodes must have an honest node in common, and two honest nodes must be
    left in every sum.
    """
    return min(2 * threshold - nodes - 1, threshold - 2)


class Stage(IntEnum):
    """What nodes send, in this order; a node's state is named after what it sent last."""

    KEYS = 1
    SHARES = 2
    MASKED = 3
    AGREEMENT = 4
    REVEALED = 5


@dataclass(frozen=True)
class Terms:
    """One sum: who takes part, what is summed, and how many must be left.

    Nodes do not take these from the server. Every signature and every key is bound to their digest,
    so parties with different terms cannot be played off against each other.
    """

    federation: str
    number: int
    """Of the sum, from 1 on; a node begins each number once, in ascending order."""
    identities: Mapping[str, bytes]
    """Public identity (`Identity.public`) of every node that may take part, by its name."""
    layout: Layout
    min_nodes: int = 3
    """Nodes refuse a sum over fewer. A sum over two tells each of them the other's vector."""
    asked_threshold: int | None = None
    """Nodes that must stay to the end; `threshold` says what holds where none is given."""
    about: str = ""
    """What the vectors are made from. Nodes that were asked for different things have no key in
    common, so that a server cannot sum them."""

    def __post_init__(self) -> None:
        count = len(self.identities)
        if not self.federation or self.number < 1:
            raise ConfigError("a secure sum needs a federation's name and a number from 1 on")
        if self.min_nodes < 2:
            raise ConfigError("min_nodes must be 2 or more: a sum over one node hides nothing")
        if not self.min_nodes <= count <= MOST_NODES:
            raise ConfigError(
                f"{count} nodes cannot be summed securely: register {self.min_nodes} or more "
                f"(min_nodes), and {MOST_NODES:,} at most"
            )
        if not max(self.min_nodes, count // 2 + 1) <= self.threshold <= count:
            raise ConfigError(
                f"a threshold of {self.threshold} does not fit {count} nodes: it must be more than "
                f"half of them, at least min_nodes={self.min_nodes}, and no more than there are"
            )
        if any(len(public) != KEY_BYTES for public in self.identities.values()):
            raise ConfigError(f"a node's public identity has {KEY_BYTES} bytes")
        if len(set(self.identities.values())) < count:
            raise ConfigError("two nodes have the same identity: each needs its own")

    @property
    def threshold(self) -> int:
        """Nodes that must stay to the end: more than two thirds, and `min_nodes`, unless told."""
        return threshold_of(len(self.identities), self.min_nodes, self.asked_threshold)

    @property
    def colluders(self) -> int:
        """How many nodes may side with a dishonest server, and it still learns sums only."""
        return colluders_of(len(self.identities), self.threshold)

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The nodes in order; in messages a node is its place here."""
        return tuple(sorted(self.identities))

    @cached_property
    def digest(self) -> bytes:
        """What every key and signature of this sum is bound to."""
        said = {
            "protocol": "hushrec-secure-2",
            "federation": self.federation,
            "number": self.number,
            "nodes": [[name, self.identities[name].hex()] for name in self.names],
            "threshold": self.threshold,
            "layout": self.layout.digest.hex(),
            "about": self.about,
        }
        return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).digest()

    def place(self, name: str) -> int:
        """Return the place of a node."""
        if name not in self.identities:
            raise ConfigError(f"node '{name}' is not registered in '{self.federation}'")
        return self.names.index(name)

    def listed(self, places: Iterable[int]) -> str:
        """Return the names of nodes, for a sentence."""
        return ", ".join(f"'{self.names[place]}'" for place in sorted(places))


ANNOUNCEMENT_BYTES = 3 * KEY_BYTES + SIGNATURE_BYTES
_ANY_PRIVATE = bytes(range(KEY_BYTES))


@dataclass(frozen=True)
class Announcement:
    """A node's public keys for one sum."""

    cipher_key: bytes
    """For what others send to it."""
    mask_key: bytes
    """For the masks it shares with others."""
    commitment: bytes
    """To the seed of the mask that is its own, so that a wrong share of it is noticed."""
    signature: bytes = b""

    @classmethod
    def from_bytes(cls, data: bytes) -> Announcement:
        """Read it; any bytes of this size are one."""
        one, two, three = (KEY_BYTES * count for count in (1, 2, 3))
        return cls(data[:one], data[one:two], data[two:three], data[three:])

    def to_bytes(self) -> bytes:
        """Write it."""
        return self._public + self.signature

    def signed(self, terms: Terms, place: int, identity: Identity) -> Announcement:
        """Return it signed by the node at a place."""
        return replace(self, signature=identity.sign("announcement", self._words(terms, place)))

    def check(self, terms: Terms, place: int) -> None:
        """Refuse keys that the node did not sign, or that agree with everybody."""
        name = terms.names[place]
        public, said = terms.identities[name], self._words(terms, place)
        if not keys.is_signed(public, self.signature, "announcement", said):
            raise MessageError(
                f"the keys of node '{name}' are not signed by it: somebody speaks in its name"
            )
        for key in (self.cipher_key, self.mask_key):
            if keys.agree(_ANY_PRIVATE, key) is None:
                raise MessageError(f"node '{name}' announced a key that hides nothing")

    @property
    def _public(self) -> bytes:
        return self.cipher_key + self.mask_key + self.commitment

    def _words(self, terms: Terms, place: int) -> bytes:
        return terms.digest + place_bytes(place) + self._public


def check_distinct(terms: Terms, announced: Mapping[int, Announcement]) -> None:
    """Refuse a key that two nodes announce, or one node for both purposes."""
    owners: dict[bytes, int] = {}
    for place, said in announced.items():
        for key in (said.cipher_key, said.mask_key):
            if key in owners:
                who = terms.listed({place, owners[key]})
                raise MessageError(f"a key was announced twice, by {who}")
            owners[key] = place


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
