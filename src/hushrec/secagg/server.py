"""The server's side of secure sums: it forwards messages of nodes, and adds up masked vectors.

A `SetupServer` lives for one set-up, a `SumServer` for one sum. The latter keeps the masked pieces
of each node until all have arrived (`PieceStore`), then their total. An invalid message raises an
error that names its node, and changes nothing; a node without a message is left out when the stage
is closed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

from hushrec.errors import MessageError
from hushrec.io.codec import Message
from hushrec.secagg import keys, messages, vectors
from hushrec.secagg.keys import KEY_BYTES, SHARE_BYTES, SIGNATURE_BYTES
from hushrec.secagg.messages import SERVER, Announcement, SetupTerms, Stage, SumTerms, Table
from hushrec.secagg.node import commitment


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
