"""What a client does in a round: the only place where fit, protect and keep meet.

A client is a device or a silo. Several of them are a stack, which is trained at once; whatever a
stack does is exact for one, so that a simulation of thousands and a device run the same lines.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from hushrec.aggregation import UploadShape
from hushrec.aggregation.statistics import LossSum
from hushrec.data.views import TrainView
from hushrec.federation.messages import Download, Upload
from hushrec.methods.base import Method, Private, Shared
from hushrec.privacy.protection import Protection
from hushrec.private.store import PrivateStore
from hushrec.streams import Round, SecretRound, SecretStreams, Streams

NOBODY: NDArray[np.int64] = np.zeros(0, np.int64)
NO_STATE: Mapping[str, float] = {}


@dataclass(frozen=True)
class Task:
    """What clients and server agree on before the first round."""

    method: Method
    protection: Protection
    streams: Streams
    secret: SecretStreams
    """On a device its own; a simulation has one for all clients, addressed by their numbers."""
    nobody: TrainView
    """What is public of the data: the catalogue and its features, and no client."""

    @cached_property
    def initial(self) -> Shared:
        """The shared parameters before the first round, which everybody can work out."""
        return self.method.init(self.nobody, self.streams)

    @cached_property
    def nobodys(self) -> Private:
        """The private parameters of no clients."""
        fields = self.method.private_fields(self.nobody, self.initial, self.streams)
        return PrivateStore(fields, 0).read(NOBODY)

    def download(
        self,
        number: int,
        shared: Shared,
        clients: NDArray[np.int64] = NOBODY,
        state: Mapping[str, float] = NO_STATE,
    ) -> Download:
        """Return what these clients are sent in a round; ``state`` is that of the protection."""
        method = self.method
        own = method.download_own(shared, clients)
        return Download(number, method.download(shared), own, state)

    def upload_shape(self, download: Download) -> UploadShape:
        """Return what everybody uploads in this round: it follows from what everybody receives."""
        now = Round(download.round, self.streams)
        fitted = self.method.fit(download.received, self.nobodys, self.nobody, now)
        return UploadShape.of(fitted.update, self.nobody.n_items)

    def protection_of(self, download: Download) -> Protection:
        """Return the protection of this round's uploads."""
        protection = self.protection.with_state(download.protection)
        if not protection.reshapes:
            return protection
        return protection.for_shape(self.upload_shape(download))


def take_part(
    task: Task, protection: Protection, download: Download, view: TrainView, private: Private
) -> tuple[Upload, Private]:
    """Train a stack of clients on what they received and keep: (what leaves them, what stays)."""
    number = download.round
    secret = SecretRound(number, task.secret)
    now = Round(
        number, task.streams, protection.past_noise(task.secret), protection.gradient_noise(secret)
    )
    fitted = task.method.fit(download.received, private, view, now)
    update = protection.protect(fitted.update, view, secret)
    return Upload(number, update, LossSum.of(fitted.losses)), fitted.private
