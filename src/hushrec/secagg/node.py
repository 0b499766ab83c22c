"""What a node keeps to itself in one sum: keys, the seed of its own mask, and how both are shared.

All of it is made from one seed, so it can be made again from what a node's store holds, to the same
bits: a node that is started again says nothing new.

What a node keeps of one sum between two messages.

The node's side of a secure sum: five answers, each given once.

A `Node` is what stays the same during a sum; its `NodeState` is what has to be kept between
messages. Every step takes a state and a message and returns the next state and the answer, or
refuses and changes nothing. Keep the new state before the answer is sent: then a node that is
started again cannot be asked twice.
"""

from __future__ import annotations

import io
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import ConfigDict, TypeAdapter, ValidationError

from hushrec.errors import ConfigError, MessageError
from hushrec.secagg import keys, masks, messages
from hushrec.secagg.keys import KEY_BYTES, PRIME, SHARE_BYTES, SIGNATURE_BYTES, Identity, share
from hushrec.secagg.layout import WORD
from hushrec.secagg.messages import (
    ANNOUNCEMENT_BYTES,
    SEALED_BYTES,
    SERVER,
    Announcement,
    Stage,
    Terms,
    check_distinct,
    place_bytes,
    share_bytes,
)


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


@dataclass(frozen=True)
class NodeState:
    """What a node keeps of one sum. Secrets are forgotten at the step that needs them last."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(
        strict=True, extra="forbid", ser_json_bytes="base64", val_json_bytes="base64"
    )

    number: int
    digest: bytes
    """Of the terms."""
    stage: Stage
    """What the node sent last."""
    seed: bytes = field(default=b"", repr=False)
    """All its secrets are made from this; until its vector is masked."""
    transcript: bytes = b""
    """Digest of what the server said: nodes that agree have seen the same."""
    keys: Mapping[int, bytes] = field(default_factory=dict, repr=False)
    """What every node announced; until the vector is masked."""
    shares: Mapping[int, bytes] = field(default_factory=dict, repr=False)
    """Of every node that shared: a share of its mask key, and one of its seed."""
    survivors: frozenset[int] = frozenset()
    """Nodes whose vectors are in the sum, as agreed."""
    format: Literal["hushrec-secure-state-2"] = "hushrec-secure-state-2"

    def to_bytes(self) -> bytes:
        """Encode the state for the node's own store. It is secret."""
        return _STATE.dump_json(self)

    @classmethod
    def from_bytes(cls, data: bytes) -> NodeState:
        """Decode it."""
        try:
            return _STATE.validate_json(data)
        except ValidationError:
            raise MessageError("the kept state of a secure sum is damaged") from None


_STATE = TypeAdapter(NodeState)
Step = tuple[NodeState, bytes]


@dataclass(frozen=True)
class Node:
    """A node in one sum: the terms as it knows them itself, and who it is."""

    terms: Terms
    name: str
    identity: Identity = field(repr=False)

    def __post_init__(self) -> None:
        self.terms.place(self.name)
        if self.terms.identities[self.name] != self.identity.public:
            raise ConfigError(f"node '{self.name}' is registered with another identity")

    @property
    def place(self) -> int:
        """Its place among the nodes."""
        return self.terms.place(self.name)

    def announce(self, last: int) -> Step:
        """Begin the sum; ``last`` is the number of the last one that this node began, or 0."""
        if self.terms.number <= last:
            raise MessageError(
                f"sum {self.terms.number} was begun before: node '{self.name}' is at sum {last}"
            )
        seed = secrets.token_bytes(KEY_BYTES)
        said = OwnSecrets.of(seed, self.terms.threshold).announcement()
        signed = said.signed(self.terms, self.place, self.identity)
        state = NodeState(self.terms.number, self.terms.digest, Stage.KEYS, seed)
        return state, self._write(Stage.KEYS, signed.to_bytes())

    def share(self, state: NodeState, data: bytes) -> Step:
        """Get everybody's keys; send everybody shares of this node's secrets."""
        table = self._read_table(state, Stage.KEYS, data, ANNOUNCEMENT_BYTES)
        messages.check_enough(self.terms, table, "announced keys")
        announced = {place: Announcement.from_bytes(entry) for place, entry in table.items()}
        for place, said in announced.items():
            said.check(self.terms, place)
        check_distinct(self.terms, announced)
        mine = OwnSecrets.of(state.seed, self.terms.threshold)
        listed = announced.pop(self.place, None)
        if listed is None or replace(listed, signature=b"") != mine.announcement():
            raise MessageError(f"the server's list lacks the keys of node '{self.name}' itself")
        sealed = {}
        for place, said in announced.items():
            key = self._share_key(mine, self.place, place, said.cipher_key)
            sealed[place] = keys.seal(key, mine.shares(place), self._about(self.place, place))
        told = messages.follow(self.terms.digest, messages.write_table(self.terms, table))
        state = replace(state, stage=Stage.SHARES, keys=table, transcript=told)
        return state, self._write(Stage.SHARES, messages.write_table(self.terms, sealed))

    def mask(self, state: NodeState, data: bytes, vector: NDArray[np.int64]) -> Step:
        """Get this node's shares of everybody's secrets; send its vector, masked."""
        if vector.dtype != np.int64 or vector.shape != (self.terms.layout.length,):
            raise ConfigError("the vector does not follow the layout: make it with Layout.pack")
        sealed = self._read_table(state, Stage.SHARES, data, SEALED_BYTES)
        self._check_known(sealed, state.keys.keys() - {self.place}, "is not one that shares")
        messages.check_enough(self.terms, [*sealed, self.place], "shared their secrets")
        mine = OwnSecrets.of(state.seed, self.terms.threshold)
        shares, laid = {self.place: mine.shares(self.place)}, []
        for place, text in sealed.items():
            said = Announcement.from_bytes(state.keys[place])
            shares[place] = self._opened(mine, place, said.cipher_key, text)
            pair = self.place, place
            laid.append(masks.pair_mask(self.terms, mine.mask_key, pair, said.mask_key))
        laid.append(masks.own_mask(mine.mask_seed, added=True))
        told = messages.follow(state.transcript, messages.write_set(self.terms, shares))
        out = io.BytesIO(self._write(Stage.MASKED))  # it hands its bytes over without a copy
        out.seek(0, io.SEEK_END)
        words = vector.astype("<i8", copy=False).view(WORD)
        for stretch in masks.masked(words, self.terms.layout, laid):
            out.write(stretch.data)
        state = replace(state, stage=Stage.MASKED, seed=b"", keys={}, shares=shares)
        return replace(state, transcript=told), out.getvalue()

    def agree(self, state: NodeState, data: bytes) -> Step:
        """Get the list of nodes whose vectors arrived; sign it, this one list and no other."""
        survivors = self._read_table(state, Stage.MASKED, data, 0)
        self._check_known(survivors, state.shares, "never shared its secrets")
        messages.check_enough(self.terms, survivors, "sent a vector")
        if self.place not in survivors:
            raise MessageError(f"the server leaves node '{self.name}' out of the sum")
        told = messages.follow(state.transcript, messages.write_set(self.terms, survivors))
        said = messages.agreed_words(self.terms, self.place, told)
        signature = self.identity.sign("agreement", said)
        state = replace(state, stage=Stage.AGREEMENT, survivors=frozenset(survivors))
        return replace(state, transcript=told), self._write(Stage.AGREEMENT, signature)

    def reveal(self, state: NodeState, data: bytes) -> Step:
        """Get enough nodes' signatures under the same list; reveal what opens the sum, and forget.

        Of a node in the sum that is a share of its own mask's seed; of one that is not, a share of
        its mask key. It is never both, as there is one list and one answer.
        """
        signatures = self._read_table(state, Stage.AGREEMENT, data, SIGNATURE_BYTES)
        self._check_known(signatures, state.survivors, "is not in the sum")
        messages.check_enough(self.terms, signatures, "agreed on who is in it")
        for place, signature in signatures.items():
            name = self.terms.names[place]
            said = messages.agreed_words(self.terms, place, state.transcript)
            if not keys.is_signed(self.terms.identities[name], signature, "agreement", said):
                raise MessageError(
                    f"node '{name}' did not agree to what node '{self.name}' was told: the server "
                    "told them different things"
                )
        revealed = {
            place: both[SHARE_BYTES:] if place in state.survivors else both[:SHARE_BYTES]
            for place, both in state.shares.items()
        }
        done = NodeState(state.number, state.digest, Stage.REVEALED)
        return done, self._write(Stage.REVEALED, messages.write_table(self.terms, revealed))

    def _write(self, stage: Stage, body: bytes = b"") -> bytes:
        return messages.write(self.terms, stage, self.place, body)

    def _read_table(
        self, state: NodeState, stage: Stage, data: bytes, size: int
    ) -> dict[int, bytes]:
        """Read the server's message of a stage, which must be what this node sent last."""
        what = messages.called(stage, SERVER)
        if state.digest != self.terms.digest:
            raise ConfigError(
                f"node '{self.name}' began sum {state.number} under other terms: leave that sum"
            )
        body = messages.read(self.terms, stage, SERVER, data)
        if state.stage != stage:
            when = "already" if state.stage > stage else "too early"
            raise MessageError(f"the server sent node '{self.name}' its {what} {when}")
        return messages.read_table(self.terms, body, size, f"the server's {what}")

    def _check_known(self, places: Iterable[int], known: Iterable[int], what: str) -> None:
        for place in sorted(set(places) - set(known)):
            raise MessageError(f"the server names node '{self.terms.names[place]}', which {what}")

    def _opened(self, mine: OwnSecrets, sender: int, public: bytes, text: bytes) -> bytes:
        """Return the two shares that another node sent to this one."""
        what = f"what node '{self.terms.names[sender]}' shared with node '{self.name}'"
        key = self._share_key(mine, sender, self.place, public)
        shares = keys.unseal(key, text, self._about(sender, self.place))
        if shares is None:
            raise MessageError(f"{what} was changed on the way, or never meant for it")
        messages.check_shares(shares, what)
        return shares

    def _about(self, sender: int, recipient: int) -> bytes:
        return self.terms.digest + place_bytes(sender, recipient)

    def _share_key(self, mine: OwnSecrets, sender: int, recipient: int, public: bytes) -> bytes:
        """Return the key of what one node shares with another; this node is one of the two."""
        shared = keys.agree(mine.cipher_key, public)
        assert shared is not None, "announced keys were checked"
        return keys.derive(shared, "shares", self._about(sender, recipient))
