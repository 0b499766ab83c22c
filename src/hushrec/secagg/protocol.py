"""Both sides of secure sums: a set-up for many sums, the sums, and the server that forwards.

In a set-up nodes announce keys for the next sums, and share the secrets of each. A `SetupNode` and
a `SumNode` do not change; their states (`SetupState`, `NodeState`) are stored between messages.
Every step takes a state and a message and returns the next state and the answer, or raises an error
and changes nothing. The caller stores the new state before it sends the answer, so that a node that
is restarted cannot be made to answer twice.

Every sum has secrets of its own (`SumSecrets`), derived from a seed of its own. The seeds are a
hash chain: a node stores the seed of the next sum only, from which those of earlier sums cannot be
derived. So what is revealed or stolen later does not open a sum that is over.

A `SumServer` lives for one sum. It keeps the masked pieces of each node until all have arrived
(`PieceStore`), then their total. An invalid message raises an error that names its node, and
changes nothing; a node without a message is left out when the stage is closed.
"""

from __future__ import annotations

import hashlib
import io
import secrets
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal, Protocol

from pydantic import ConfigDict, TypeAdapter, ValidationError

from hushrec.errors import ConfigError, MessageError
from hushrec.io.codec import Message
from hushrec.secagg import keys, messages, vectors
from hushrec.secagg.keys import KEY_BYTES, SHARE_BYTES, SIGNATURE_BYTES, Identity
from hushrec.secagg.messages import BOTH_BYTES, SERVER, Announcement, SetupTerms, Stage, SumTerms


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
Table = Mapping[int, bytes]
"""Parts of a message, by the node that each concerns."""


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


class _Server:
    """Stages that the messages of nodes belong to."""

    def __init__(self, terms: SetupTerms, stage: Stage, awaited: Iterable[int]) -> None:
        self.terms = terms
        self.stage = stage
        """Stage of the messages that are awaited."""
        self._awaited = set(awaited)
        self._arrived: dict[int, Table] = {}
        """Messages of this stage, by sender."""

    @property
    def awaited(self) -> tuple[str, ...]:
        """Nodes that have not sent this stage's message yet."""
        return tuple(self.terms.names[index] for index in sorted(self._awaited))

    def receive(self, name: str, data: bytes) -> None:
        """Receive a message of a node, whose name the transport has authenticated."""
        if name not in self.terms.identities:
            raise MessageError(f"node '{name}' is not registered: its message counts for nothing")
        index = self.terms.index(name)
        body = messages.read(self.terms, self.stage, index, data, self._piece(index))
        if index not in self._awaited:
            late = "sent this already" if index in self._arrived else "was left out before"
            raise MessageError(f"node '{name}' {late}: its message counts for nothing")
        what = f"what node '{name}' sent as its {messages.called(self.stage, index)}"
        kept = self._accepted(index, body, what)
        if kept is not None:
            self._arrived[index] = kept
            self._awaited.remove(index)

    def _piece(self, index: int) -> int:
        """Return which piece of its message a node sends next."""
        return 0

    def _accepted(self, index: int, body: memoryview, what: str) -> Table | None:
        """Check a message of this stage; return what is kept of it, None if more is to come."""
        raise NotImplementedError

    def _close(self, bodies: Mapping[int, bytes]) -> dict[str, bytes]:
        """Begin the next stage with the nodes whose messages arrived."""
        stage = self.stage
        self.stage, self._awaited, self._arrived = Stage(stage + 1), set(bodies), {}
        return {
            self.terms.names[index]: messages.write(self.terms, stage, SERVER, body)
            for index, body in bodies.items()
        }


class SetupServer(_Server):
    """One set-up: `receive` the nodes' messages, and `close` both stages."""

    def __init__(self, terms: SetupTerms) -> None:
        super().__init__(terms, Stage.KEYS, range(len(terms.names)))
        self.announced: dict[int, Announcement] = {}
        """Of the nodes that take part."""
        self.transcript = terms.digest
        self.told: dict[str, bytes] = {}
        """The message to each node that its next sum begins with; it has the others' shares."""

    def close(self) -> dict[str, bytes]:
        """End a stage; return the message to each remaining node."""
        arrived = self._arrived
        what = f"sent their {messages.called(self.stage, 0)}"
        messages.check_enough(self.terms, arrived, what)
        if self.stage == Stage.KEYS:
            own = {index: sent[index] for index, sent in arrived.items()}
            forwarded = messages.write_table(self.terms, own)
            self.transcript = messages.extended(self.transcript, forwarded)
            return self._close(dict.fromkeys(arrived, forwarded))
        assert self.stage == Stage.SHARES, "a set-up has two stages"
        self.announced = {index: self.announced[index] for index in sorted(arrived)}
        present = messages.write_set(self.terms, arrived)
        self.transcript = messages.extended(self.transcript, present)
        bodies = {}
        for index in arrived:
            sealed = {who: sent[index] for who, sent in arrived.items() if who != index}
            bodies[index] = messages.write_table(self.terms, sealed)
        self.told = self._close(bodies)
        return self.told

    def _accepted(self, index: int, body: memoryview, what: str) -> Table:
        if self.stage == Stage.KEYS:
            messages.check_size(body, Announcement.size(self.terms.count), what)
            announced = Announcement.from_bytes(bytes(body))
            announced.check(self.terms, index)
            messages.check_distinct(self.terms, {**self.announced, index: announced})
            self.announced[index] = announced
            return {index: bytes(body)}
        size = messages.sealed_bytes(self.terms.count)
        sealed = messages.read_table(self.terms, body, size, what)
        if sealed.keys() != self.announced.keys() - {index}:
            raise MessageError(f"{what} is not for every node that announced keys")
        return sealed


class PieceStore(Protocol):
    """Where the server keeps pieces of vectors: those of each node, and their total."""

    def write(self, name: str, number: int, piece: bytes) -> None:
        """Keep the next piece of a vector."""

    def read(self, name: str, number: int) -> bytes:
        """Return a piece."""

    def remove(self, name: str) -> None:
        """Remove all pieces of a vector, if there are any."""


class MemoryPieces:
    """Pieces in memory, for sums of small vectors."""

    def __init__(self) -> None:
        self.kept: dict[str, list[bytes]] = {}

    def write(self, name: str, number: int, piece: bytes) -> None:
        """Keep the next piece of a vector."""
        own = self.kept.setdefault(name, [])
        assert len(own) == number, "pieces come in order"
        own.append(bytes(piece))

    def read(self, name: str, number: int) -> bytes:
        """Return a piece."""
        return self.kept[name][number]

    def remove(self, name: str) -> None:
        """Remove all pieces of a vector, if there are any."""
        self.kept.pop(name, None)


MASKED = "masked"
"""Name of the sum of masked vectors in the store."""


@dataclass(frozen=True)
class _SavedSum(Message, kind="secure-sum"):
    """The server's state before the last stage, but for the sum of masked vectors."""

    announced: bytes
    survivors: bytes
    awaited: bytes


class SumServer(_Server):
    """One sum: `receive` the nodes' messages, `close` each stage, compute the `total`."""

    terms: SumTerms

    def __init__(
        self, terms: SumTerms, setup: SetupServer | None, pieces: PieceStore | None = None
    ) -> None:
        """``setup`` is that of the terms; it is closed."""
        self.pieces = MemoryPieces() if pieces is None else pieces
        self._announced: dict[int, bytes] = {}
        """Public mask key and commitment of each node in the set-up."""
        self._survivors: frozenset[int] = frozenset()
        self._next: dict[int, int] = {}
        """Which piece of its vector each node sends next."""
        if setup is not None:
            assert setup.terms == terms.setup and setup.told, "a set-up comes before its sums"
            for index, sent in setup.announced.items():
                keys_of_sum = sent.mask_keys[terms.place], sent.commitments[terms.place]
                self._announced[index] = b"".join(keys_of_sum)
            self._transcript = messages.extended(setup.transcript, terms.digest)
        super().__init__(terms, Stage.MASKED, self._announced)

    @property
    def survivors(self) -> tuple[str, ...]:
        """Nodes whose vectors are in the sum; known once the stage of masked vectors is closed."""
        return tuple(self.terms.names[index] for index in sorted(self._survivors))

    def awaiting(self, piece: int) -> tuple[str, ...]:
        """Return the nodes whose next piece is this one."""
        return tuple(n for n in self.awaited if self._piece(self.terms.index(n)) == piece)

    def close(self) -> dict[str, bytes]:
        """End a stage before the last; return the message to each remaining node."""
        stage, arrived = self.stage, self._arrived
        assert stage < Stage.REVEALED, "the last stage ends with the total"
        messages.check_enough(self.terms, arrived, f"sent their {messages.called(stage, 0)}")
        forwarded = messages.write_set(self.terms, arrived)
        if stage == Stage.MASKED:
            self._survivors = frozenset(arrived)
            self._add_up()
        else:
            own = {index: sent[index] for index, sent in arrived.items()}
            forwarded = messages.write_table(self.terms, own)
        self._transcript = messages.extended(self._transcript, forwarded)
        return self._close(dict.fromkeys(arrived, forwarded))

    def to_bytes(self) -> bytes:
        """Encode a sum that awaits its last stage, so that it can be opened after a restart with
        the same pieces. It holds nothing beyond the messages that the server sent or received."""
        assert self.stage == Stage.REVEALED, "an earlier stage is begun anew, with another number"
        return _SavedSum(
            messages.write_table(self.terms, self._announced),
            messages.write_set(self.terms, self._survivors),
            messages.write_set(self.terms, self._awaited | self._arrived.keys()),
        ).to_bytes()

    @classmethod
    def from_bytes(cls, terms: SumTerms, data: bytes, pieces: PieceStore) -> SumServer:
        """Decode it; nodes are asked for their last answers again, and give the same."""
        saved, server, what = _SavedSum.from_bytes(data), cls(terms, None, pieces), "a saved sum"

        def table(field: bytes, size: int = 0) -> dict[int, bytes]:
            return messages.read_table(terms, memoryview(field), size, what)

        server._announced = table(saved.announced, 2 * KEY_BYTES)
        server._survivors = frozenset(table(saved.survivors))
        server._awaited = set(table(saved.awaited))
        server.stage = Stage.REVEALED
        return server

    def total(self) -> Iterator[bytes]:
        """Return the pieces of the sum of the survivors' vectors, from the revealed shares."""
        assert self.stage == Stage.REVEALED, "every stage before must be closed"
        messages.check_enough(self.terms, self._arrived, "revealed their shares")
        return self._unmasked(self._remaining_masks())

    def _unmasked(self, laid: list[vectors.Mask]) -> Iterator[bytes]:
        layout = self.terms.layout
        for number in range(layout.pieces):
            masked = self.pieces.read(MASKED, number)
            yield bytes(vectors.add_masks(layout, number, masked, laid))

    def _remaining_masks(self) -> list[vectors.Mask]:
        """Return what removes the masks that do not cancel: survivors' own, and lost nodes'."""
        revealed = dict(sorted(self._arrived.items())[: self.terms.threshold])
        weights = keys.weights_at_zero([index + 1 for index in revealed])
        laid: list[vectors.Mask] = []
        for owner, announced in self._announced.items():
            shares = {k + 1: int.from_bytes(sent[owner], "little") for k, sent in revealed.items()}
            secret = keys.recover(shares, weights) % 2 ** (8 * KEY_BYTES)
            key, kept = secret.to_bytes(KEY_BYTES, "little"), owner in self._survivors
            if kept and commitment(key) == announced[KEY_BYTES:]:
                laid.append(vectors.own_mask(self.terms.digest, key, added=False))
            elif not kept and keys.public_half(key) == announced[:KEY_BYTES]:
                # The pairwise masks of a lost node cancel those of the survivors.
                for index in self._survivors:
                    pair, public = (owner, index), self._announced[index][:KEY_BYTES]
                    laid.append(vectors.pair_mask(self.terms.digest, key, pair, public))
            else:
                raise MessageError(
                    f"the mask of node '{self.terms.names[owner]}' cannot be lifted: it shared, or "
                    f"one of {self.terms.listed(revealed)} revealed, a wrong number; sum "
                    f"{self.terms.number} is given up"
                )
        return laid

    def _add_up(self) -> None:
        """Add up the survivors' masked pieces, and remove those of every node."""
        layout = self.terms.layout
        for number in range(layout.pieces):
            total = bytearray(layout.size(number))
            for index in sorted(self._survivors):
                vectors.add(layout, number, total, self.pieces.read(_spool(index), number))
            self.pieces.write(MASKED, number, bytes(total))
        for index in self._announced:
            self.pieces.remove(_spool(index))

    def _piece(self, index: int) -> int:
        last = self.terms.layout.pieces - 1
        return min(self._next.get(index, 0), last) if self.stage == Stage.MASKED else 0

    def _accepted(self, index: int, body: memoryview, what: str) -> Table | None:
        if self.stage == Stage.MASKED:
            number, layout = self._piece(index), self.terms.layout
            messages.check_size(body, layout.size(number), what)
            self.pieces.write(_spool(index), number, bytes(body))
            self._next[index] = number + 1
            return {} if number + 1 == layout.pieces else None
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


def _spool(index: int) -> str:
    """Return the name in the store of a node's masked vector."""
    return f"node-{index}"
