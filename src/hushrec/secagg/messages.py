"""Terms and messages of a set-up, and of the secure sums that use it.

A message is a frame with sum, stage and sender, and a body whose size is known exactly: it follows
from the terms and from the sets of nodes in the message, and is checked before the body is read.
Nodes send a message of each stage to the server, and the server forwards them. Sets of nodes are
bitmaps, which cannot name a node twice or one that is not registered. Anything else is a
`MessageError` that names its sender.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from enum import IntEnum
from functools import cached_property

from hushrec.errors import ConfigError, MessageError, TooFewError
from hushrec.secagg import keys
from hushrec.secagg.keys import KEY_BYTES, PRIME, SHARE_BYTES, SIGNATURE_BYTES, TAG_BYTES, Identity
from hushrec.secagg.vectors import VectorLayout

MOST_NODES = 2**16 - 1
MOST_SUMS = 2**10
"""Of one set-up."""


def threshold_of(nodes: int, min_nodes: int, configured: int | None) -> int:
    """Return how many nodes must stay to the end: by default above two thirds, and `min_nodes`."""
    return max(2 * nodes // 3 + 1, min_nodes) if configured is None else configured


def colluders_of(nodes: int, threshold: int) -> int:
    """Return how many nodes may collude with the server without it learning more than sums.

    Two groups of `threshold` nodes must have an honest node in common, and two honest nodes must be
    left in every sum.
    """
    return min(2 * threshold - nodes - 1, threshold - 2)


class Stage(IntEnum):
    """Stages, named after what nodes send: the first two are a set-up, the others each sum."""

    KEYS = 1
    SHARES = 2
    MASKED = 3
    CONSISTENCY = 4
    REVEALED = 5


@dataclass(frozen=True)
class SetupTerms:
    """What all parties know of a set-up beforehand: nodes, threshold, and how many sums it is for.

    Each party has the terms from its own configuration. Every signature and every key is bound to
    their digest, so that messages of parties with different terms are invalid.
    """

    federation: str
    first: int
    """Number of the first sum, from 1 on; a node begins each number once, in ascending order."""
    identities: Mapping[str, bytes]
    """Public identity (`Identity.public`) of every node that may take part, by its name."""
    count: int = 1
    """Number of sums that nodes announce keys for, and share the secrets of."""
    min_nodes: int = 3
    """Nodes refuse a sum over fewer. A sum over two reveals each vector to the other node."""
    asked_threshold: int | None = None
    """The configured threshold; `threshold` has the default."""

    def __post_init__(self) -> None:
        count = len(self.identities)
        if not self.federation or self.first < 1 or not 1 <= self.count <= MOST_SUMS:
            raise ConfigError(
                "a secure sum needs a federation's name and a number from 1 on, and a set-up 1 to "
                f"{MOST_SUMS:,} sums"
            )
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
    def number(self) -> int:
        """The number in the frame of messages."""
        return self.first

    @property
    def title(self) -> str:
        """What these are the terms of, for a sentence."""
        return f"the set-up of sums {self.first} to {self.first + self.count - 1}"

    @property
    def threshold(self) -> int:
        """Nodes that must stay to the end of the sum."""
        return threshold_of(len(self.identities), self.min_nodes, self.asked_threshold)

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The nodes in order; messages refer to a node by its index."""
        return tuple(sorted(self.identities))

    @cached_property
    def digest(self) -> bytes:
        """Digest that every key and signature is bound to."""
        return hashlib.sha256(json.dumps(self.facts(), sort_keys=True).encode()).digest()

    def facts(self) -> dict[str, object]:
        """Return all that the parties must agree on."""
        return {
            "protocol": "hushrec-secure-3",
            "federation": self.federation,
            "first": self.first,
            "count": self.count,
            "nodes": [[name, self.identities[name].hex()] for name in self.names],
            "threshold": self.threshold,
        }

    def index(self, name: str) -> int:
        """Return the index of a node."""
        if name not in self.identities:
            raise ConfigError(f"node '{name}' is not registered in '{self.federation}'")
        return self.names.index(name)

    def listed(self, indices: Iterable[int]) -> str:
        """Return the names of nodes, for a sentence."""
        return ", ".join(f"'{self.names[index]}'" for index in sorted(indices))


@dataclass(frozen=True)
class SumTerms(SetupTerms):
    """What all parties know of one sum beforehand: that of its set-up, its number, the layout."""

    number: int = field(default=1, kw_only=True)
    layout: VectorLayout = field(kw_only=True)
    about: str = field(default="", kw_only=True)
    """Description of the request. Nodes with different requests derive different keys, so that
    the server cannot sum their vectors."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.place < self.count:
            raise ConfigError(f"sum {self.number} is not one of {self.setup.title}")

    @property
    def setup(self) -> SetupTerms:
        """The terms of the set-up."""
        own = {each.name: getattr(self, each.name) for each in fields(SetupTerms)}
        return SetupTerms(**own)

    @property
    def place(self) -> int:
        """Index of the sum among those of its set-up."""
        return self.number - self.first

    @property
    def title(self) -> str:
        """What these are the terms of, for a sentence."""
        return f"sum {self.number}"

    def facts(self) -> dict[str, object]:
        """Return all that the parties must agree on."""
        own = {"number": self.number, "layout": self.layout.digest.hex(), "about": self.about}
        return {**super().facts(), **own}


_ANY_PRIVATE = bytes(range(KEY_BYTES))


@dataclass(frozen=True)
class Announcement:
    """A node's public keys for the sums of a set-up, signed with its identity."""

    cipher_key: bytes
    """For shares that others encrypt for it."""
    mask_keys: tuple[bytes, ...]
    """For the pairwise masks of each sum."""
    commitments: tuple[bytes, ...]
    """To the seed of its own mask in each sum, so that a wrong share of it is detected."""
    signature: bytes = b""

    @staticmethod
    def size(count: int) -> int:
        """Return the bytes of an announcement for so many sums."""
        return KEY_BYTES * (1 + 2 * count) + SIGNATURE_BYTES

    @classmethod
    def from_bytes(cls, data: bytes) -> Announcement:
        """Decode it; any bytes of the size for some number of sums are an announcement."""
        body, signature = data[:-SIGNATURE_BYTES], data[-SIGNATURE_BYTES:]
        parts = [body[at : at + KEY_BYTES] for at in range(0, len(body), KEY_BYTES)]
        return cls(parts[0], tuple(parts[1::2]), tuple(parts[2::2]), signature)

    def to_bytes(self) -> bytes:
        """Encode it."""
        pairs = zip(self.mask_keys, self.commitments, strict=True)
        return self.cipher_key + b"".join(key + own for key, own in pairs) + self.signature

    def signed(self, terms: SetupTerms, index: int, identity: Identity) -> Announcement:
        """Return it with the signature of a node."""
        return replace(self, signature=identity.sign("announcement", self._words(terms, index)))

    def check(self, terms: SetupTerms, index: int) -> None:
        """Refuse keys that the node did not sign, and keys of small order."""
        name = terms.names[index]
        public, signed = terms.identities[name], self._words(terms, index)
        if not keys.is_signed(public, self.signature, "announcement", signed):
            raise MessageError(
                f"the keys of node '{name}' are not signed by it: somebody speaks in its name"
            )
        for key in (self.cipher_key, *self.mask_keys):
            if keys.agree(_ANY_PRIVATE, key) is None:
                raise MessageError(f"node '{name}' announced a key that hides nothing")

    def _words(self, terms: SetupTerms, index: int) -> bytes:
        return terms.digest + index_bytes(index) + replace(self, signature=b"").to_bytes()


def check_distinct(terms: SetupTerms, announced: Mapping[int, Announcement]) -> None:
    """Refuse a key that is announced twice, by two nodes, for two sums or for two purposes."""
    owners: dict[bytes, int] = {}
    for index, announcement in announced.items():
        for key in (announcement.cipher_key, *announcement.mask_keys):
            if key in owners:
                who = terms.listed({index, owners[key]})
                raise MessageError(f"a key was announced twice, by {who}")
            owners[key] = index


_FRAME = struct.Struct("<8sQ32sHHI")  # of whole words, so that a vector behind it is aligned
_MAGIC = b"hushsum2"
SERVER = 2**16 - 1
"""The server's sender index; those of nodes are in `SumTerms.names`."""
BOTH_BYTES = 2 * SHARE_BYTES
"""Two shares, of a mask key and of a mask's seed."""
_NAMES = {
    Stage.KEYS: ("keys", "list of keys"),
    Stage.SHARES: ("shares", "list of shares"),
    Stage.MASKED: ("masked vector", "list of survivors"),
    Stage.CONSISTENCY: ("agreement", "list of agreements"),
    Stage.REVEALED: ("revealed shares", "last word"),
}


def sealed_bytes(count: int) -> int:
    """Return the bytes of the shares for so many sums that only their recipient can read."""
    return count * BOTH_BYTES + TAG_BYTES


def called(stage: Stage, sender: int) -> str:
    """Return the name of a message for a sentence."""
    return _NAMES[stage][sender == SERVER]


def write(
    terms: SetupTerms,
    stage: Stage,
    sender: int,
    body: bytes | bytearray = b"",
    piece: int = 0,
) -> bytes:
    """Return a message; only a masked vector has more than one piece."""
    return b"".join([_FRAME.pack(_MAGIC, terms.number, terms.digest, stage, sender, piece), body])


def read(terms: SetupTerms, stage: Stage, sender: int, data: bytes, piece: int = 0) -> memoryview:
    """Return the body of a message that must be of this sum, stage, sender and piece."""
    who = "the server" if sender == SERVER else f"node '{terms.names[sender]}'"
    if len(data) < _FRAME.size or not data.startswith(_MAGIC):
        raise MessageError(f"{who} sent something that is no message of a secure sum")
    _, number, digest, sent, claimed, part = _FRAME.unpack_from(data)
    if number != terms.number:
        raise MessageError(f"{who} sent a message of sum {number}, not of sum {terms.number}")
    if digest != terms.digest:
        raise MessageError(
            f"{who} goes by other terms of {terms.title}: compare federation, nodes, threshold "
            "and layout"
        )
    if sent != stage:
        known = called(Stage(sent), claimed) if sent in _NAMES else f"message of kind {sent}"
        raise MessageError(f"{who} sent its {known}; awaited is its {called(stage, sender)}")
    if claimed != sender:
        raise MessageError(f"{who} sent a message in the name of another")
    if part != piece:
        raise MessageError(f"{who} sent piece {part} of its message; awaited is piece {piece}")
    return memoryview(data)[_FRAME.size :]


def check_size(body: memoryview, size: int, what: str) -> None:
    """Refuse a body of any other size."""
    if len(body) != size:
        raise MessageError(f"{what} has {len(body):,} bytes instead of {size:,}")


def check_enough(terms: SetupTerms, indices: Iterable[int], what: str) -> None:
    """Refuse to continue with fewer nodes than the threshold."""
    left = set(indices)
    if len(left) < terms.threshold:
        missing = terms.listed(set(range(len(terms.names))) - left)
        raise TooFewError(
            f"{terms.title} is given up: {len(left)} of {len(terms.names)} nodes {what}, and "
            f"{terms.threshold} are needed to hide each of them; missing: {missing}"
        )


Table = Mapping[int, bytes]
"""Parts of a message, by the node that each concerns."""


def write_set(terms: SetupTerms, indices: Iterable[int]) -> bytes:
    """Return a set of nodes as a bitmap."""
    return sum(1 << index for index in set(indices)).to_bytes(_set_bytes(terms), "little")


def write_table(terms: SetupTerms, entries: Mapping[int, bytes]) -> bytes:
    """Return entries of equal size by node: the set of nodes, and the entries in its order."""
    return b"".join([write_set(terms, entries), *(entries[index] for index in sorted(entries))])


def read_table(terms: SetupTerms, body: memoryview, size: int, what: str) -> dict[int, bytes]:
    """Decode a table."""
    start = _set_bytes(terms)
    if len(body) < start:
        raise MessageError(f"{what} names no nodes")
    bits = int.from_bytes(body[:start], "little")
    indices = [index for index in range(bits.bit_length()) if bits >> index & 1]
    if indices and indices[-1] >= len(terms.names):
        raise MessageError(f"{what} names nodes that are not registered")
    check_size(body, start + size * len(indices), what)
    ends = [start + size * row for row in range(1, len(indices) + 1)]
    return {index: bytes(body[end - size : end]) for index, end in zip(indices, ends, strict=True)}


def _set_bytes(terms: SetupTerms) -> int:
    return -(-len(terms.names) // 8)


def index_bytes(*indices: int) -> bytes:
    """Return indices of nodes as bytes to sign or to bind."""
    return struct.pack(f"<{len(indices)}H", *indices)


def check_shares(data: bytes, what: str) -> None:
    """Refuse shares that are no elements of the field."""
    for at in range(0, len(data), SHARE_BYTES):
        if int.from_bytes(data[at : at + SHARE_BYTES], "little") >= PRIME:
            raise MessageError(f"{what} holds a number that is no share")


def extended(transcript: bytes, message: bytes) -> bytes:
    """Return the digest of the transcript (all messages to nodes so far) and one more message."""
    return hashlib.sha256(transcript + message).digest()


def consistency_bytes(terms: SetupTerms, index: int, transcript: bytes) -> bytes:
    """Return the bytes that a node signs in the consistency check."""
    return terms.digest + index_bytes(index) + transcript
