"""The node's side of a secure sum: five messages, each sent once.

A `SumNode` does not change during a sum; its `NodeState` is stored between messages. Every step
takes a state and a message and returns the next state and the answer, or raises an error and
changes nothing. The caller stores the new state before it sends the answer, so that a node that is
restarted cannot be made to answer twice.

A node's secrets of a sum (`OwnSecrets`) are derived from one seed in its state, to the same bits:
a node that is restarted sends nothing new.
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
from hushrec.secagg import keys, messages, vectors
from hushrec.secagg.keys import KEY_BYTES, PRIME, SHARE_BYTES, SIGNATURE_BYTES, Identity, share
from hushrec.secagg.messages import SERVER, Announcement, Stage, SumTerms
from hushrec.secagg.vectors import WORD


@dataclass(frozen=True)
class OwnSecrets:
    """A node's secrets in one sum: keys, the seed of its own mask, and sharing polynomials."""

    cipher_key: bytes = field(repr=False)
    mask_key: bytes = field(repr=False)
    mask_seed: bytes = field(repr=False)
    """Of the node's own mask."""
    coefficients: tuple[list[int], list[int]] = field(repr=False)
    """Of the polynomials that share `mask_key` and `mask_seed`."""

    @classmethod
    def of(cls, seed: bytes, threshold: int) -> OwnSecrets:
        """Derive the secrets from a seed; ``threshold`` nodes recover them."""
        names = ("cipher key", "mask key", "mask seed", "coefficients")
        cipher_key, mask_key, mask_seed, chance = (keys.derive(seed, name) for name in names)
        # Half as long again as a number of the field, so that the remainder is as good as uniform.
        count = threshold - 1
        stream = io.BytesIO(vectors.keystream(chance).update(bytes(48 * 2 * count)))
        numbers = [int.from_bytes(stream.read(48), "little") % PRIME for _ in range(2 * count)]
        return cls(cipher_key, mask_key, mask_seed, (numbers[:count], numbers[count:]))

    def announcement(self) -> Announcement:
        """Return the public keys and the commitment, unsigned."""
        cipher_key, mask_key = keys.public_half(self.cipher_key), keys.public_half(self.mask_key)
        return Announcement(cipher_key, mask_key, commitment(self.mask_seed))

    def shares(self, index: int) -> bytes:
        """Return a node's shares: of the mask key, then of the mask's seed."""
        both = b""
        for secret, own in zip((self.mask_key, self.mask_seed), self.coefficients, strict=True):
            point = share(int.from_bytes(secret, "little"), own, index + 1)
            both += point.to_bytes(SHARE_BYTES, "little")
        return both


def commitment(mask_seed: bytes) -> bytes:
    """Return the commitment to the seed of a mask."""
    return keys.derive(mask_seed, "commitment")


@dataclass(frozen=True)
class NodeState:
    """A node's state in one sum. A secret is removed at the last step that needs it."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(
        strict=True, extra="forbid", ser_json_bytes="base64", val_json_bytes="base64"
    )

    number: int
    digest: bytes
    """Of the terms."""
    stage: Stage
    """Stage of the node's last message."""
    seed: bytes = field(default=b"", repr=False)
    """Seed of all secrets, until the vector is masked."""
    transcript: bytes = b""
    """Digest of the server's messages, which the consistency check compares."""
    keys: Mapping[int, bytes] = field(default_factory=dict, repr=False)
    """Every node's announcement, until the vector is masked."""
    shares: Mapping[int, bytes] = field(default_factory=dict, repr=False)
    """Of every node that shared its secrets: shares of its mask key and of its seed."""
    survivors: frozenset[int] = frozenset()
    """Nodes whose vectors are in the sum."""
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
Table = dict[int, bytes]


@dataclass(frozen=True)
class SumNode:
    """A node in one sum: its own copy of the terms, and its identity."""

    terms: SumTerms
    name: str
    identity: Identity = field(repr=False)

    def __post_init__(self) -> None:
        self.terms.index(self.name)  # refuses a name that is not registered
        if self.terms.identities[self.name] != self.identity.public:
            raise ConfigError(f"node '{self.name}' is registered with another identity")

    @property
    def index(self) -> int:
        """The node's index in the terms."""
        return self.terms.index(self.name)

    def announce(self, last: int) -> Step:
        """Begin the sum; ``last`` is the number of the last one that this node began, or 0."""
        if self.terms.number <= last:
            raise MessageError(
                f"sum {self.terms.number} was begun before: node '{self.name}' is at sum {last}"
            )
        seed = secrets.token_bytes(KEY_BYTES)
        announcement = OwnSecrets.of(seed, self.terms.threshold).announcement()
        signed = announcement.signed(self.terms, self.index, self.identity).to_bytes()
        state = NodeState(self.terms.number, self.terms.digest, Stage.KEYS, seed)
        return state, self._write(Stage.KEYS, signed)

    def share(self, state: NodeState, data: bytes) -> Step:
        """Receive all nodes' keys; send each node shares of this node's secrets."""
        table = self._read_table(state, Stage.KEYS, data, messages.ANNOUNCEMENT_BYTES)
        messages.check_enough(self.terms, table, "announced keys")
        announced = {index: Announcement.from_bytes(entry) for index, entry in table.items()}
        for index, announcement in announced.items():
            announcement.check(self.terms, index)
        messages.check_distinct(self.terms, announced)
        mine = OwnSecrets.of(state.seed, self.terms.threshold)
        listed = announced.pop(self.index, None)
        if listed is None or replace(listed, signature=b"") != mine.announcement():
            raise MessageError(f"the server's list lacks the keys of node '{self.name}' itself")
        sealed = {}
        for index, announcement in announced.items():
            key, about = self._share_key(mine, self.index, index, announcement.cipher_key)
            sealed[index] = keys.seal(key, mine.shares(index), about)
        transcript = messages.extended(self.terms.digest, messages.write_table(self.terms, table))
        state = replace(state, stage=Stage.SHARES, keys=table, transcript=transcript)
        return state, self._write(Stage.SHARES, messages.write_table(self.terms, sealed))

    def mask(self, state: NodeState, data: bytes, vector: NDArray[np.int64]) -> Step:
        """Receive this node's shares of the others' secrets; send its masked vector."""
        if vector.dtype != np.int64 or vector.shape != (self.terms.layout.length,):
            raise ConfigError("the vector does not follow the layout: use VectorLayout.pack")
        sealed = self._read_table(state, Stage.SHARES, data, messages.SEALED_BYTES)
        self._check_known(sealed, state.keys.keys() - {self.index}, "is not one that shares")
        messages.check_enough(self.terms, [*sealed, self.index], "shared their secrets")
        mine = OwnSecrets.of(state.seed, self.terms.threshold)
        shares, laid = {self.index: mine.shares(self.index)}, []
        for index, text in sealed.items():
            announcement = Announcement.from_bytes(state.keys[index])
            shares[index] = self._opened(mine, index, announcement.cipher_key, text)
            pair, public = (self.index, index), announcement.mask_key
            laid.append(vectors.pair_mask(self.terms.digest, mine.mask_key, pair, public))
        laid.append(vectors.own_mask(mine.mask_seed, added=True))
        transcript = messages.extended(state.transcript, messages.write_set(self.terms, shares))
        out = io.BytesIO(self._write(Stage.MASKED))  # it hands its bytes over without a copy
        out.seek(0, io.SEEK_END)
        words = vector.astype("<i8", copy=False).view(WORD)
        for stretch in vectors.masked(words, self.terms.layout, laid):
            out.write(stretch.data)
        state = replace(state, stage=Stage.MASKED, seed=b"", keys={}, shares=shares)
        return replace(state, transcript=transcript), out.getvalue()

    def agree(self, state: NodeState, data: bytes) -> Step:
        """Receive the list of survivors; sign this one list and no other."""
        survivors = self._read_table(state, Stage.MASKED, data, 0)
        self._check_known(survivors, state.shares, "never shared its secrets")
        messages.check_enough(self.terms, survivors, "sent a vector")
        if self.index not in survivors:
            raise MessageError(f"the server leaves node '{self.name}' out of the sum")
        transcript = messages.extended(state.transcript, messages.write_set(self.terms, survivors))
        signed = messages.consistency_bytes(self.terms, self.index, transcript)
        signature = self.identity.sign("agreement", signed)
        state = replace(state, stage=Stage.CONSISTENCY, survivors=frozenset(survivors))
        return replace(state, transcript=transcript), self._write(Stage.CONSISTENCY, signature)

    def reveal(self, state: NodeState, data: bytes) -> Step:
        """Receive enough nodes' signatures of the same list; reveal shares, and remove all secrets.

        Of a survivor, the node reveals a share of the seed of its own mask; of any other node, a
        share of its mask key. It is never both, as there is one list and one answer.
        """
        signatures = self._read_table(state, Stage.CONSISTENCY, data, SIGNATURE_BYTES)
        self._check_known(signatures, state.survivors, "is not in the sum")
        messages.check_enough(self.terms, signatures, "agreed on who is in it")
        for index, signature in signatures.items():
            name = self.terms.names[index]
            signed = messages.consistency_bytes(self.terms, index, state.transcript)
            if not keys.is_signed(self.terms.identities[name], signature, "agreement", signed):
                raise MessageError(
                    f"node '{name}' did not agree to what node '{self.name}' was told: the server "
                    "told them different things"
                )
        revealed = {
            index: both[SHARE_BYTES:] if index in state.survivors else both[:SHARE_BYTES]
            for index, both in state.shares.items()
        }
        done = NodeState(state.number, state.digest, Stage.REVEALED)
        return done, self._write(Stage.REVEALED, messages.write_table(self.terms, revealed))

    def _write(self, stage: Stage, body: bytes = b"") -> bytes:
        return messages.write(self.terms, stage, self.index, body)

    def _read_table(self, state: NodeState, stage: Stage, data: bytes, size: int) -> Table:
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

    def _check_known(self, indices: Iterable[int], known: Iterable[int], what: str) -> None:
        for index in sorted(set(indices) - set(known)):
            raise MessageError(f"the server names node '{self.terms.names[index]}', which {what}")

    def _opened(self, mine: OwnSecrets, sender: int, public: bytes, text: bytes) -> bytes:
        """Return the two shares that another node sent to this one."""
        what = f"what node '{self.terms.names[sender]}' shared with node '{self.name}'"
        key, about = self._share_key(mine, sender, self.index, public)
        shares = keys.unseal(key, text, about)
        if shares is None:
            raise MessageError(f"{what} was changed on the way, or never meant for it")
        messages.check_shares(shares, what)
        return shares

    def _share_key(
        self, mine: OwnSecrets, sender: int, recipient: int, public: bytes
    ) -> tuple[bytes, bytes]:
        """Return key and associated data of what one node shares with another, one of them this."""
        shared = keys.agree(mine.cipher_key, public)
        assert shared is not None, "announced keys were checked"
        about = self.terms.digest + messages.index_bytes(sender, recipient)
        return keys.derive(shared, "shares", about), about
