"""What a node keeps to itself in one sum: keys, the seed of its own mask, and how both are shared.

All of it is made from one seed, so it can be made again from what a node's store holds, to the same
bits: a node that is started again says nothing new.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from hushrec.secure import keys, masks
from hushrec.secure.announcement import Announcement
from hushrec.secure.messages import share_bytes
from hushrec.secure.shamir import PRIME, share


@dataclass(frozen=True)
class OwnSecrets:
    """A node's secrets in one sum."""

    cipher_key: bytes = field(repr=False)
    mask_key: bytes = field(repr=False)
    mask_seed: bytes = field(repr=False)
    """Of the mask that no other node knows."""
    coefficients: tuple[list[int], list[int]] = field(repr=False)
    """Of the polynomials that share `mask_key` and `mask_seed`."""

    @classmethod
    def of(cls, seed: bytes, threshold: int) -> OwnSecrets:
        """Make them from a seed, to be recovered by so many nodes."""
        names = ("cipher key", "mask key", "mask seed", "coefficients")
        cipher_key, mask_key, mask_seed, chance = (keys.derive(seed, name) for name in names)
        # Half as long again as a number of the field, so that the remainder is as good as uniform.
        size, count = 48, threshold - 1
        stream = masks.keystream(chance).update(bytes(2 * size * count))
        numbers = [
            int.from_bytes(stream[at : at + size], "little") % PRIME
            for at in range(0, len(stream), size)
        ]
        return cls(cipher_key, mask_key, mask_seed, (numbers[:count], numbers[count:]))

    def announcement(self) -> Announcement:
        """Return what the others are told of them, unsigned."""
        cipher_key, mask_key = keys.public_half(self.cipher_key), keys.public_half(self.mask_key)
        return Announcement(cipher_key, mask_key, commitment(self.mask_seed))

    def shares(self, place: int) -> bytes:
        """Return the shares of the node at a place: of the mask key, then of the mask's seed."""
        shared = zip((self.mask_key, self.mask_seed), self.coefficients, strict=True)
        return b"".join(
            share_bytes(share(int.from_bytes(secret, "little"), coefficients, place + 1))
            for secret, coefficients in shared
        )


def commitment(mask_seed: bytes) -> bytes:
    """Return what binds a node to the seed of its own mask, and does not tell it."""
    return keys.derive(mask_seed, "commitment")
