"""A node's side of secure sums: a set-up for many sums, and the sums.

In a set-up nodes announce keys for the next sums, and share the secrets of each. A `SetupNode` and
a `SumNode` do not change; their states (`SetupState`, `NodeState`) are stored between messages.
Every step takes a state and a message and returns the next state and the answer, or raises an error
and changes nothing. The caller stores the new state before it sends the answer, so that a node that
is restarted cannot be made to answer twice.

Every sum has secrets of its own (`SumSecrets`), derived from a seed of its own. The seeds are a
hash chain: a node stores the seed of the next sum only, from which those of earlier sums cannot be
derived. So what is revealed or stolen later does not open a sum that is over.
"""

from __future__ import annotations

import hashlib
import io
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal

from pydantic import ConfigDict, TypeAdapter, ValidationError

from hushrec.errors import ConfigError, MessageError
from hushrec.secagg import keys, messages, vectors
from hushrec.secagg.keys import KEY_BYTES, SHARE_BYTES, SIGNATURE_BYTES, Identity
from hushrec.secagg.messages import (
    BOTH_BYTES,
    SERVER,
    Announcement,
    SetupTerms,
    Stage,
    SumTerms,
    Table,
)


@dataclass(frozen=True)
class SumSecrets:
    """A node's secrets in one sum: mask key, the seed of its own mask, and sharing polynomials."""

    mask_key: bytes = field(repr=False)
    mask_seed: bytes = field(repr=False)
    """Of the node's own mask."""
    coefficients: tuple[list[int], list[int]] = field(repr=False)
    """Of the polynomials that share `mask_key` and `mask_seed`."""

    @classmethod
    def of(cls, seed: bytes, threshold: int) -> SumSecrets:
        """Derive the secrets from the seed of a sum; ``threshold`` nodes recover them."""
        names = ("mask key", "mask seed", "coefficients")
        mask_key, mask_seed, chance = (keys.derive(seed, name) for name in names)
        # Half as long again as a number of the field, so that the remainder is as good as uniform.
        count = threshold - 1
        stream = io.BytesIO(vectors.keystream(chance).update(bytes(48 * 2 * count)))
        numbers = [int.from_bytes(stream.read(48), "little") % keys.PRIME for _ in range(2 * count)]
        return cls(mask_key, mask_seed, (numbers[:count], numbers[count:]))

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


def later_seed(seed: bytes, sums: int) -> bytes:
    """Return the seed of the sum that comes so many sums later."""
    for _ in range(sums):
        seed = keys.derive(seed, "next sum")
    return seed


def all_secrets(seed: bytes, terms: SetupTerms) -> list[SumSecrets]:
    """Return the secrets of every sum of a set-up from the first one's seed."""
    found = []
    for _ in range(terms.count):
        found.append(SumSecrets.of(seed, terms.threshold))
        seed = later_seed(seed, 1)
    return found


def announcement(cipher_key: bytes, own: Iterable[SumSecrets]) -> Announcement:
    """Return the public keys and the commitments, unsigned."""
    pairs = [(keys.public_half(each.mask_key), commitment(each.mask_seed)) for each in own]
    mask_keys, commitments = zip(*pairs, strict=True)
    return Announcement(keys.public_half(cipher_key), mask_keys, commitments)


STORED = ConfigDict(strict=True, extra="forbid", ser_json_bytes="base64", val_json_bytes="base64")


@dataclass(frozen=True)
class SetupState:
    """A node's state of a set-up. Secrets of a sum are removed when the sum begins."""

    __pydantic_config__: ClassVar[ConfigDict] = STORED

    first: int
    digest: bytes
    """Of the terms."""
    stage: Stage
    """Stage of the node's last message."""
    cipher_key: bytes = field(default=b"", repr=False)
    """Until the others' shares are opened."""
    seed: bytes = field(default=b"", repr=False)
    """Of the next sum."""
    following: int = 0
    """Index of the next sum among those of the set-up."""
    announced: Mapping[int, bytes] = field(default_factory=dict)
    """Every node's announcement; from the shares on, of every node that shared its secrets."""
    opened: bytes = b""
    """Digest of the server's message with the others' shares."""
    shares: Mapping[int, bytes] = field(default_factory=dict, repr=False)
    """Of every other node that shared its secrets: both shares for the next sum, and so on."""
    transcript: bytes = b""
    """Digest of the server's messages, which the consistency check of each sum compares."""
    format: Literal["hushrec-secure-setup-1"] = "hushrec-secure-setup-1"

    def to_bytes(self) -> bytes:
        """Encode the state for the node's own store. It is secret."""
        return _SETUP.dump_json(self)

    @classmethod
    def from_bytes(cls, data: bytes) -> SetupState:
        """Decode it."""
        try:
            return _SETUP.validate_json(data)
        except ValidationError:
            raise MessageError("the kept state of a set-up is damaged") from None


@dataclass(frozen=True)
class NodeState:
    """A node's state in one sum. A secret is removed at the last step that needs it."""

    __pydantic_config__: ClassVar[ConfigDict] = STORED

    number: int
    digest: bytes
    """Of the terms."""
    stage: Stage
    """Stage of the node's last message."""
    seed: bytes = field(default=b"", repr=False)
    """Of this sum, until all pieces have arrived."""
    mask_keys: Mapping[int, bytes] = field(default_factory=dict)
    """The other nodes' public keys for this sum, as long."""
    shares: Mapping[int, bytes] = field(default_factory=dict, repr=False)
    """Of every node that shared its secrets: shares of its mask key and of its seed."""
    transcript: bytes = b""
    """Digest of the server's messages, which the consistency check compares."""
    survivors: frozenset[int] = frozenset()
    """Nodes whose vectors are in the sum."""
    format: Literal["hushrec-secure-state-3"] = "hushrec-secure-state-3"

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


_SETUP, _STATE = TypeAdapter(SetupState), TypeAdapter(NodeState)


@dataclass(frozen=True)
class _Party:
    """A node with its own copy of the terms, and its identity."""

    terms: SetupTerms
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

    def _write(self, stage: Stage, body: bytes | bytearray = b"", piece: int = 0) -> bytes:
        return messages.write(self.terms, stage, self.index, body, piece)

    def _read_table(
        self, state: SetupState | NodeState, stage: Stage, data: bytes, size: int
    ) -> Table:
        """Read the server's message of a stage, which must be what this node sent last."""
        what = messages.called(stage, SERVER)
        if state.digest != self.terms.digest:
            raise ConfigError(
                f"node '{self.name}' began {self.terms.title} under other terms: leave it"
            )
        body = messages.read(self.terms, stage, SERVER, data)
        if state.stage != stage:
            when = "already" if state.stage > stage else "too early"
            raise MessageError(f"the server sent node '{self.name}' its {what} {when}")
        return messages.read_table(self.terms, body, size, f"the server's {what}")

    def _check_known(self, indices: Iterable[int], known: Iterable[int], what: str) -> None:
        for index in sorted(set(indices) - set(known)):
            raise MessageError(f"the server names node '{self.terms.names[index]}', which {what}")


@dataclass(frozen=True)
class SetupNode(_Party):
    """A node in one set-up."""

    def announce(self, last: int) -> tuple[SetupState, bytes]:
        """Begin the set-up; ``last`` is the last number of the set-up before it, or 0."""
        if self.terms.first <= last:
            raise MessageError(
                f"sum {self.terms.first} was begun before: node '{self.name}' is at sum {last}"
            )
        root = secrets.token_bytes(KEY_BYTES)
        cipher_key, seed = (keys.derive(root, name) for name in ("cipher key", "first sum"))
        own = announcement(cipher_key, all_secrets(seed, self.terms))
        signed = own.signed(self.terms, self.index, self.identity).to_bytes()
        state = SetupState(self.terms.first, self.terms.digest, Stage.KEYS, cipher_key, seed)
        return state, self._write(Stage.KEYS, signed)

    def share(self, state: SetupState, data: bytes) -> tuple[SetupState, bytes]:
        """Receive all nodes' keys; send each node shares of this node's secrets of every sum."""
        table = self._read_table(state, Stage.KEYS, data, Announcement.size(self.terms.count))
        messages.check_enough(self.terms, table, "announced keys")
        announced = {index: Announcement.from_bytes(entry) for index, entry in table.items()}
        for index, each in announced.items():
            each.check(self.terms, index)
        messages.check_distinct(self.terms, announced)
        mine = all_secrets(state.seed, self.terms)
        listed = announced.pop(self.index, None)
        if listed is None or replace(listed, signature=b"") != announcement(state.cipher_key, mine):
            raise MessageError(f"the server's list lacks the keys of node '{self.name}' itself")
        sealed = {}
        for index, each in announced.items():
            key, about = self._share_key(state, self.index, index, each.cipher_key)
            sealed[index] = keys.seal(key, b"".join(own.shares(index) for own in mine), about)
        transcript = messages.extended(self.terms.digest, messages.write_table(self.terms, table))
        state = replace(state, stage=Stage.SHARES, announced=table, transcript=transcript)
        return state, self._write(Stage.SHARES, messages.write_table(self.terms, sealed))

    def open(self, state: SetupState, data: bytes) -> SetupState:
        """Receive this node's shares of the others' secrets; any later time, the same message."""
        digest = hashlib.sha256(data).digest()
        if state.opened:
            if state.opened != digest:
                raise MessageError(f"the server sent node '{self.name}' its list of shares already")
            return state
        size = messages.sealed_bytes(self.terms.count)
        sealed = self._read_table(state, Stage.SHARES, data, size)
        self._check_known(sealed, state.announced.keys() - {self.index}, "is not one that shares")
        messages.check_enough(self.terms, [*sealed, self.index], "shared their secrets")
        shares = {index: self._opened(state, index, text) for index, text in sealed.items()}
        present = {self.index, *shares}
        transcript = messages.extended(state.transcript, messages.write_set(self.terms, present))
        announced = {index: state.announced[index] for index in sorted(present)}
        state = replace(state, cipher_key=b"", announced=announced, opened=digest, shares=shares)
        return replace(state, transcript=transcript)

    def _opened(self, state: SetupState, sender: int, text: bytes) -> bytes:
        """Return the shares that another node sent to this one."""
        what = f"what node '{self.terms.names[sender]}' shared with node '{self.name}'"
        public = Announcement.from_bytes(state.announced[sender]).cipher_key
        key, about = self._share_key(state, sender, self.index, public)
        shares = keys.unseal(key, text, about)
        if shares is None:
            raise MessageError(f"{what} was changed on the way, or never meant for it")
        messages.check_shares(shares, what)
        return shares

    def _share_key(
        self, state: SetupState, sender: int, recipient: int, public: bytes
    ) -> tuple[bytes, bytes]:
        """Return key and associated data of what one node shares with another, one of them this."""
        shared = keys.agree(state.cipher_key, public)
        assert shared is not None, "announced keys were checked"
        about = self.terms.digest + messages.index_bytes(sender, recipient)
        return keys.derive(shared, "shares", about), about


@dataclass(frozen=True)
class SumNode(_Party):
    """A node in one sum."""

    terms: SumTerms

    def begin(self, setup: SetupState, data: bytes) -> tuple[SetupState, NodeState]:
        """Take the material of this sum out of the set-up; ``data`` is the server's message with
        the others' shares. No material is used for two sums."""
        node = SetupNode(self.terms.setup, self.name, self.identity)
        if setup.digest != node.terms.digest:
            raise MessageError(f"node '{self.name}' is in another set-up than {self.terms.title}")
        setup, place = node.open(setup, data), self.terms.place
        if place < setup.following:
            raise MessageError(f"sum {self.terms.number} was begun before by node '{self.name}'")
        passed = place - setup.following
        seed = later_seed(setup.seed, passed)
        own = SumSecrets.of(seed, self.terms.threshold).shares(self.index)
        at, end = passed * BOTH_BYTES, (passed + 1) * BOTH_BYTES
        state = NodeState(
            self.terms.number,
            self.terms.digest,
            Stage.MASKED,
            seed,
            {
                index: Announcement.from_bytes(sent).mask_keys[place]
                for index, sent in setup.announced.items()
                if index != self.index
            },
            {self.index: own, **{k: both[at:end] for k, both in setup.shares.items()}},
            messages.extended(setup.transcript, self.terms.digest),
        )
        rest = {index: both[end:] for index, both in setup.shares.items()}
        later = later_seed(seed, 1)
        return replace(setup, seed=later, following=place + 1, shares=rest), state

    def mask(self, state: NodeState, number: int, piece: bytes) -> bytes:
        """Return a piece of the masked vector; the same bytes whenever it is asked for."""
        layout = self.terms.layout
        if state.digest != self.terms.digest or state.stage != Stage.MASKED:
            raise MessageError(f"no vector of node '{self.name}' is due in {self.terms.title}")
        if not 0 <= number < layout.pieces:
            raise MessageError(f"the vector of {self.terms.title} has no piece {number}")
        if len(piece) != layout.size(number):
            raise ConfigError("the vector does not follow the layout: use VectorLayout.pack")
        mine, digest = SumSecrets.of(state.seed, self.terms.threshold), self.terms.digest
        laid = [
            vectors.pair_mask(digest, mine.mask_key, (self.index, index), public)
            for index, public in state.mask_keys.items()
        ]
        laid.append(vectors.own_mask(digest, mine.mask_seed, added=True))
        masked = vectors.add_masks(layout, number, piece, laid)
        return self._write(Stage.MASKED, masked, number)

    def agree(self, state: NodeState, data: bytes) -> tuple[NodeState, bytes]:
        """Receive the list of survivors; sign this one list and no other."""
        survivors = self._read_table(state, Stage.MASKED, data, 0)
        self._check_known(survivors, state.shares, "never shared its secrets")
        messages.check_enough(self.terms, survivors, "sent a vector")
        if self.index not in survivors:
            raise MessageError(f"the server leaves node '{self.name}' out of the sum")
        transcript = messages.extended(state.transcript, messages.write_set(self.terms, survivors))
        signed = messages.consistency_bytes(self.terms, self.index, transcript)
        signature = self.identity.sign("agreement", signed)
        state = replace(state, stage=Stage.CONSISTENCY, seed=b"", mask_keys={})
        state = replace(state, survivors=frozenset(survivors), transcript=transcript)
        return state, self._write(Stage.CONSISTENCY, signature)

    def reveal(self, state: NodeState, data: bytes) -> tuple[NodeState, bytes]:
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
