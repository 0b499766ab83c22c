"""Both sides of a secure sum: five messages of every node, and the server that forwards them.

A `SumNode` does not change during a sum; its `NodeState` is stored between messages. Every step
takes a state and a message and returns the next state and the answer, or raises an error and
changes nothing. The caller stores the new state before it sends the answer, so that a node that is
restarted cannot be made to answer twice. A node's secrets of a sum (`OwnSecrets`) are derived from
one seed in its state, to the same bits: a node that is restarted sends nothing new.

A `SumServer` lives for one sum. It keeps the running total of masked vectors, and no single vector.
An invalid message raises an error that names its node, and changes nothing; a node without a
message is left out when the stage is closed.
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
from hushrec.io.codec import Message
from hushrec.secagg import keys, messages, vectors
from hushrec.secagg.keys import KEY_BYTES, SHARE_BYTES, SIGNATURE_BYTES, Identity
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
        numbers = [int.from_bytes(stream.read(48), "little") % keys.PRIME for _ in range(2 * count)]
        return cls(cipher_key, mask_key, mask_seed, (numbers[:count], numbers[count:]))

    def announcement(self) -> Announcement:
        """Return the public keys and the commitment, unsigned."""
        cipher_key, mask_key = keys.public_half(self.cipher_key), keys.public_half(self.mask_key)
        return Announcement(cipher_key, mask_key, commitment(self.mask_seed))

    def shares(self, index: int) -> bytes:
        """Return a node's shares: of the mask key, then of the mask's seed."""
        both = b""
        for secret, own in zip((self.mask_key, self.mask_seed), self.coefficients, strict=True):
            point = keys.share(int.from_bytes(secret, "little"), own, index + 1)
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
Table = Mapping[int, bytes]
"""Parts of a message, by the node that each concerns."""


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


@dataclass(frozen=True)
class _SavedSum(Message, kind="secure-sum", most_bytes=2**36):
    """The server's state before the last stage."""

    announced: bytes
    survivors: bytes
    awaited: bytes
    masked: bytes


class SumServer:
    """One sum: `receive` the nodes' messages, `close` each stage, compute the `total`."""

    def __init__(self, terms: SumTerms) -> None:
        self.terms = terms
        self.stage: Stage = Stage.KEYS
        """Stage of the messages that are awaited."""
        self._awaited = set(range(len(terms.names)))
        self._arrived: dict[int, Table] = {}
        """Messages of this stage, by sender."""
        self._announced: dict[int, Announcement] = {}
        self._survivors: frozenset[int] = frozenset()
        self._transcript = terms.digest
        self._masked = np.zeros(terms.layout.length, WORD)
        """The sum of masked vectors so far."""

    @property
    def awaited(self) -> tuple[str, ...]:
        """Nodes that have not sent this stage's message yet."""
        return tuple(self.terms.names[index] for index in sorted(self._awaited))

    @property
    def survivors(self) -> tuple[str, ...]:
        """Nodes whose vectors are in the sum; known once the stage of masked vectors is closed."""
        return tuple(self.terms.names[index] for index in sorted(self._survivors))

    def receive(self, name: str, data: bytes) -> None:
        """Receive a message of a node, whose name the transport has authenticated."""
        if name not in self.terms.identities:
            raise MessageError(f"node '{name}' is not registered: its message counts for nothing")
        index = self.terms.index(name)
        body = messages.read(self.terms, self.stage, index, data)
        if index not in self._awaited:
            late = "sent this already" if index in self._arrived else "was left out before"
            raise MessageError(f"node '{name}' {late}: its message counts for nothing")
        what = f"what node '{name}' sent as its {messages.called(self.stage, index)}"
        self._arrived[index] = self._accepted(index, body, what)
        self._awaited.remove(index)

    def close(self) -> dict[str, bytes]:
        """End a stage before the last; return the message to each remaining node."""
        stage, arrived = self.stage, self._arrived
        assert stage < Stage.REVEALED, "the last stage ends with the total"
        messages.check_enough(self.terms, arrived, f"sent their {messages.called(stage, 0)}")
        forwarded = messages.write_set(self.terms, arrived)
        bodies = dict.fromkeys(arrived, forwarded)
        if stage == Stage.SHARES:
            self._announced = {index: self._announced[index] for index in arrived}
            for index in arrived:
                sealed = {who: sent[index] for who, sent in arrived.items() if who != index}
                bodies[index] = messages.write_table(self.terms, sealed)
        elif stage == Stage.MASKED:
            self._survivors = frozenset(arrived)
        else:
            own = {index: sent[index] for index, sent in arrived.items()}
            forwarded = messages.write_table(self.terms, own)
            bodies = dict.fromkeys(arrived, forwarded)
        self._transcript = messages.extended(self._transcript, forwarded)
        self.stage, self._awaited, self._arrived = Stage(stage + 1), set(arrived), {}
        return {
            self.terms.names[index]: messages.write(self.terms, stage, SERVER, body)
            for index, body in bodies.items()
        }

    def to_bytes(self) -> bytes:
        """Encode a sum that awaits its last stage, so that it can be opened after a restart. It
        holds nothing beyond the messages that the server sent or received."""
        assert self.stage == Stage.REVEALED, "an earlier stage is begun anew, with another number"
        announced = {index: each.to_bytes() for index, each in self._announced.items()}
        return _SavedSum(
            messages.write_table(self.terms, announced),
            messages.write_set(self.terms, self._survivors),
            messages.write_set(self.terms, self._awaited | self._arrived.keys()),
            self._masked.tobytes(),
        ).to_bytes()

    @classmethod
    def from_bytes(cls, terms: SumTerms, data: bytes) -> SumServer:
        """Decode it; nodes are asked for their last answers again, and give the same."""
        saved, server, what = _SavedSum.from_bytes(data), cls(terms), "a saved secure sum"

        def table(field: bytes, size: int = 0) -> dict[int, bytes]:
            return messages.read_table(terms, memoryview(field), size, what)

        announced = table(saved.announced, messages.ANNOUNCEMENT_BYTES)
        server._announced = {index: Announcement.from_bytes(s) for index, s in announced.items()}
        server._survivors = frozenset(table(saved.survivors))
        server._awaited = set(table(saved.awaited))
        messages.check_size(memoryview(saved.masked), server._masked.nbytes, what)
        server._masked, server.stage = np.frombuffer(saved.masked, WORD), Stage.REVEALED
        return server

    def total(self) -> NDArray[np.int64]:
        """Return the signed sum of the survivors' vectors, from the revealed shares."""
        assert self.stage == Stage.REVEALED, "every stage before must be closed"
        messages.check_enough(self.terms, self._arrived, "revealed their shares")
        revealed = dict(sorted(self._arrived.items())[: self.terms.threshold])
        weights = keys.weights_at_zero([index + 1 for index in revealed])
        laid: list[vectors.Mask] = []
        for owner, announcement in self._announced.items():
            shares = {k + 1: int.from_bytes(sent[owner], "little") for k, sent in revealed.items()}
            secret = keys.recover(shares, weights) % 2 ** (8 * KEY_BYTES)
            key, kept = secret.to_bytes(KEY_BYTES, "little"), owner in self._survivors
            if kept and commitment(key) == announcement.commitment:
                laid.append(vectors.own_mask(key, added=False))
            elif not kept and keys.public_half(key) == announcement.mask_key:
                # The pairwise masks of a lost node cancel those of the survivors.
                for index in self._survivors:
                    pair, public = (owner, index), self._announced[index].mask_key
                    laid.append(vectors.pair_mask(self.terms.digest, key, pair, public))
            else:
                raise MessageError(
                    f"the mask of node '{self.terms.names[owner]}' cannot be lifted: it shared, or "
                    f"one of {self.terms.listed(revealed)} revealed, a wrong number; sum "
                    f"{self.terms.number} is given up"
                )
        total = vectors.add_masks(self._masked, self.terms.layout, laid)
        return total.view("<i8").astype(np.int64, copy=False)

    def _accepted(self, index: int, body: memoryview, what: str) -> Table:
        """Check a message of this stage; return what is kept of it."""
        if self.stage == Stage.KEYS:
            messages.check_size(body, messages.ANNOUNCEMENT_BYTES, what)
            announcement = Announcement.from_bytes(bytes(body))
            announcement.check(self.terms, index)
            messages.check_distinct(self.terms, {**self._announced, index: announcement})
            self._announced[index] = announcement
            return {index: bytes(body)}
        if self.stage == Stage.SHARES:
            sealed = messages.read_table(self.terms, body, messages.SEALED_BYTES, what)
            if sealed.keys() != self._announced.keys() - {index}:
                raise MessageError(f"{what} is not for every node that announced keys")
            return sealed
        if self.stage == Stage.MASKED:
            messages.check_size(body, self._masked.nbytes, what)
            vectors.add(self._masked, np.frombuffer(body, WORD), self.terms.layout)
            return {}
        if self.stage == Stage.CONSISTENCY:
            messages.check_size(body, SIGNATURE_BYTES, what)
            public = self.terms.identities[self.terms.names[index]]
            signed = messages.consistency_bytes(self.terms, index, self._transcript)
            if not keys.is_signed(public, bytes(body), "agreement", signed):
                raise MessageError(f"{what} is no signature of it under the list it was sent")
            return {index: bytes(body)}
        revealed = messages.read_table(self.terms, body, SHARE_BYTES, what)
        if revealed.keys() != self._announced.keys():
            raise MessageError(f"{what} is not of every node that shared its secrets")
        for share in revealed.values():
            messages.check_shares(share, what)
        return revealed
