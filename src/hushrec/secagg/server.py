"""The server's side of a secure sum: collect and forward messages, and remove the masks.

A `SumServer` lives for one sum. It keeps the running total of masked vectors, and no single vector.
An invalid message raises an error that names its node, and changes nothing; a node without a
message is left out when the stage is closed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hushrec.errors import MessageError
from hushrec.io.codec import Message
from hushrec.secagg import keys, messages, vectors
from hushrec.secagg.keys import KEY_BYTES, SHARE_BYTES, SIGNATURE_BYTES, recover, weights_at_zero
from hushrec.secagg.messages import SERVER, Announcement, Stage, SumTerms
from hushrec.secagg.node import commitment
from hushrec.secagg.vectors import WORD

_Sent = Mapping[int, bytes]
"""A node's message, by the node that each part concerns."""


@dataclass(frozen=True)
class SavedSum(Message, kind="secure-sum", most_bytes=2**36):
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
        self._arrived: dict[int, _Sent] = {}
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
        """Encode a sum that awaits its last stage, so that it can be opened after a restart.

        It holds nothing beyond the messages that the server sent or received.
        """
        assert self.stage == Stage.REVEALED, "an earlier stage is begun anew, with another number"
        announced = {index: each.to_bytes() for index, each in self._announced.items()}
        return SavedSum(
            messages.write_table(self.terms, announced),
            messages.write_set(self.terms, self._survivors),
            messages.write_set(self.terms, self._awaited | self._arrived.keys()),
            self._masked.tobytes(),
        ).to_bytes()

    @classmethod
    def from_bytes(cls, terms: SumTerms, data: bytes) -> SumServer:
        """Decode it; nodes are asked for their last answers again, and give the same."""
        saved, server, what = SavedSum.from_bytes(data), cls(terms), "a saved secure sum"

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
        weights = weights_at_zero([index + 1 for index in revealed])
        laid: list[vectors.Mask] = []
        for owner, announcement in self._announced.items():
            shares = {
                at + 1: int.from_bytes(sent[owner], "little") for at, sent in revealed.items()
            }
            secret = recover(shares, weights) % 2 ** (8 * KEY_BYTES)
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

    def _accepted(self, index: int, body: memoryview, what: str) -> _Sent:
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
