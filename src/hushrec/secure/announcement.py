"""What a node tells the others of its secrets in one sum: public keys, signed with its identity."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from hushrec.errors import MessageError
from hushrec.secure import keys
from hushrec.secure.keys import KEY_BYTES, SIGNATURE_BYTES, Identity
from hushrec.secure.messages import place_bytes
from hushrec.secure.terms import Terms

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
