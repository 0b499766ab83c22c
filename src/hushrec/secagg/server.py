"""The server's side of a secure sum: collect, hand on, and lift the masks off the sum.

A `Server` lives for one sum. It keeps the running total of masked vectors, never one of them. A bad
message is refused, names its node and changes nothing; a node that says nothing is left out when
the stage is closed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hushrec.errors import MessageError
from hushrec.io.codec import Message
from hushrec.secagg import keys, masks, messages
from hushrec.secagg.keys import KEY_BYTES, SHARE_BYTES, SIGNATURE_BYTES, recover, weights_at_zero
from hushrec.secagg.layout import WORD
from hushrec.secagg.messages import (
    ANNOUNCEMENT_BYTES,
    SEALED_BYTES,
    SERVER,
    Announcement,
    Stage,
    Terms,
    check_distinct,
)
from hushrec.secagg.node import commitment

_Sent = Mapping[int, bytes]
"""What a node sent, by the node it is about or for."""


@dataclass(frozen=True)
class SavedSum(Message, kind="secure-sum", most_bytes=2**36):
    """The server's state before the last stage."""

    announced: bytes
    survivors: bytes
    awaited: bytes
    masked: bytes


class Server:
    """One sum: `receive` what nodes send, `close` each stage, take the `total`."""

    def __init__(self, terms: Terms) -> None:
        self.terms = terms
        self.stage: Stage = Stage.KEYS
        """What is awaited from nodes."""
        self._awaited = set(range(len(terms.names)))
        self._arrived: dict[int, _Sent] = {}
        """Of this stage, by sender."""
        self._announced: dict[int, Announcement] = {}
        self._survivors: frozenset[int] = frozenset()
        self._transcript = terms.digest
        self._masked = np.zeros(terms.layout.length, WORD)
        """The sum of masked vectors so far."""

    @property
    def awaited(self) -> tuple[str, ...]:
        """Nodes that have not sent this stage's message yet."""
        return tuple(self.terms.names[place] for place in sorted(self._awaited))

    @property
    def survivors(self) -> tuple[str, ...]:
        """Nodes whose vectors are in the sum; known once the stage of masked vectors is closed."""
        return tuple(self.terms.names[place] for place in sorted(self._survivors))

    def receive(self, name: str, data: bytes) -> None:
        """Take a message from a node, whose name the transport has made sure of."""
        if name not in self.terms.identities:
            raise MessageError(f"node '{name}' is not registered: its message counts for nothing")
        place = self.terms.place(name)
        body = messages.read(self.terms, self.stage, place, data)
        if place not in self._awaited:
            late = "sent this already" if place in self._arrived else "was left out before"
            raise MessageError(f"node '{name}' {late}: its message counts for nothing")
        what = f"what node '{name}' sent as its {messages.called(self.stage, place)}"
        take: dict[Stage, Callable[[int, memoryview, str], _Sent]] = {
            Stage.KEYS: self._take_keys,
            Stage.SHARES: self._take_shares,
            Stage.MASKED: self._take_vector,
            Stage.AGREEMENT: self._take_agreement,
            Stage.REVEALED: self._take_revealed,
        }
        self._arrived[place] = take[self.stage](place, body, what)
        self._awaited.remove(place)

    def close(self) -> dict[str, bytes]:
        """End a stage before the last; return what each node that is still there is sent."""
        stage, arrived = self.stage, self._arrived
        assert stage < Stage.REVEALED, "the last stage ends with the total"
        messages.check_enough(self.terms, arrived, f"sent their {messages.called(stage, 0)}")
        told = messages.write_set(self.terms, arrived)
        bodies = dict.fromkeys(arrived, told)
        if stage == Stage.SHARES:
            self._announced = {place: self._announced[place] for place in arrived}
            bodies = {place: self._shares_for(place) for place in arrived}
        elif stage == Stage.MASKED:
            self._survivors = frozenset(arrived)
        else:
            table = {place: sent[place] for place, sent in arrived.items()}
            told = messages.write_table(self.terms, table)
            bodies = dict.fromkeys(arrived, told)
        self._transcript = messages.follow(self._transcript, told)
        self.stage, self._awaited, self._arrived = Stage(stage + 1), set(arrived), {}
        return {
            self.terms.names[place]: messages.write(self.terms, stage, SERVER, body)
            for place, body in bodies.items()
        }

    def to_bytes(self) -> bytes:
        """Write a sum that waits for its last stage, so that it can be opened after a restart.

        There is nothing in it that the server did not send or get; the vectors are masked.
        """
        assert self.stage == Stage.REVEALED, "an earlier stage is begun anew, with another number"
        announced = {place: each.to_bytes() for place, each in self._announced.items()}
        return SavedSum(
            messages.write_table(self.terms, announced),
            messages.write_set(self.terms, self._survivors),
            messages.write_set(self.terms, self._awaited | self._arrived.keys()),
            self._masked.tobytes(),
        ).to_bytes()

    @classmethod
    def from_bytes(cls, terms: Terms, data: bytes) -> Server:
        """Decode it; nodes are asked for their last answers again, and give the same."""
        saved, server, what = SavedSum.from_bytes(data), cls(terms), "a saved secure sum"

        def table(field: bytes, size: int = 0) -> dict[int, bytes]:
            return messages.read_table(terms, memoryview(field), size, what)

        announced = table(saved.announced, ANNOUNCEMENT_BYTES)
        server._announced = {place: Announcement.from_bytes(s) for place, s in announced.items()}
        server._survivors = frozenset(table(saved.survivors))
        server._awaited = set(table(saved.awaited))
        messages.check_size(memoryview(saved.masked), server._masked.nbytes, what)
        server._masked, server.stage = np.frombuffer(saved.masked, WORD), Stage.REVEALED
        return server

    def total(self) -> NDArray[np.int64]:
        """Return the sum of the survivors' vectors, with its signs, from what was revealed."""
        assert self.stage == Stage.REVEALED, "every stage before must be closed"
        messages.check_enough(self.terms, self._arrived, "revealed their shares")
        revealed = dict(sorted(self._arrived.items())[: self.terms.threshold])
        weights = weights_at_zero([place + 1 for place in revealed])
        laid: list[masks.Mask] = []
        for owner, said in self._announced.items():
            shares = {
                place + 1: int.from_bytes(sent[owner], "little") for place, sent in revealed.items()
            }
            secret = recover(shares, weights) % 2 ** (8 * KEY_BYTES)
            key = secret.to_bytes(KEY_BYTES, "little")
            kept = owner in self._survivors
            if kept and commitment(key) == said.commitment:
                laid.append(masks.own_mask(key, added=False))
            elif not kept and keys.public_half(key) == said.mask_key:
                laid += self._missing_masks(owner, key)
            else:
                raise MessageError(
                    f"the mask of node '{self.terms.names[owner]}' cannot be lifted: it shared, or "
                    f"one of {self.terms.listed(revealed)} revealed, a wrong number; sum "
                    f"{self.terms.number} is given up"
                )
        total = masks.laid_on(self._masked, self.terms.layout, laid)
        return total.view("<i8").astype(np.int64, copy=False)

    def _missing_masks(self, owner: int, key: bytes) -> list[masks.Mask]:
        """Return the masks that a lost node would have laid on, against the survivors' ones."""
        pairs = ((owner, place) for place in self._survivors)
        return [
            masks.pair_mask(self.terms, key, pair, self._announced[pair[1]].mask_key)
            for pair in pairs
        ]

    def _shares_for(self, recipient: int) -> bytes:
        others = self._arrived.keys() - {recipient}
        sealed = {sender: self._arrived[sender][recipient] for sender in others}
        return messages.write_table(self.terms, sealed)

    def _take_keys(self, place: int, body: memoryview, what: str) -> _Sent:
        messages.check_size(body, ANNOUNCEMENT_BYTES, what)
        said = Announcement.from_bytes(bytes(body))
        said.check(self.terms, place)
        check_distinct(self.terms, {**self._announced, place: said})
        self._announced[place] = said
        return {place: bytes(body)}

    def _take_shares(self, place: int, body: memoryview, what: str) -> _Sent:
        sealed = messages.read_table(self.terms, body, SEALED_BYTES, what)
        if sealed.keys() != self._announced.keys() - {place}:
            raise MessageError(f"{what} is not for every node that announced keys")
        return sealed

    def _take_vector(self, place: int, body: memoryview, what: str) -> _Sent:
        messages.check_size(body, WORD.itemsize * self.terms.layout.length, what)
        masks.add(self._masked, np.frombuffer(body, WORD), self.terms.layout)
        return {}

    def _take_agreement(self, place: int, body: memoryview, what: str) -> _Sent:
        messages.check_size(body, SIGNATURE_BYTES, what)
        public = self.terms.identities[self.terms.names[place]]
        said = messages.agreed_words(self.terms, place, self._transcript)
        if not keys.is_signed(public, bytes(body), "agreement", said):
            raise MessageError(f"{what} is no signature of it under the list it was sent")
        return {place: bytes(body)}

    def _take_revealed(self, place: int, body: memoryview, what: str) -> _Sent:
        revealed = messages.read_table(self.terms, body, SHARE_BYTES, what)
        if revealed.keys() != self._announced.keys():
            raise MessageError(f"{what} is not of every node that shared its secrets")
        for share in revealed.values():
            messages.check_shares(share, what)
        return revealed
