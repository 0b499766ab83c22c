"""What a client does in a round: fit the method, protect the upload, keep the private parameters.

A client is a device or a silo. Several clients are trained together as a batch; the result of each
client is the same in a batch of any size, so a simulation of thousands and a single device run the
same lines.
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

NO_CLIENTS: NDArray[np.int64] = np.zeros(0, np.int64)
NO_STATE: Mapping[str, float] = {}


@dataclass(frozen=True)
class Task:
    """What clients and server know before the first round, each from the experiment alone."""

    method: Method
    protection: Protection
    streams: Streams
    secret: SecretStreams
    """Of the device itself; a simulation has one for all clients, addressed by client number."""
    public: TrainView
    """The public view: the catalogue and its features, and no clients."""

    @cached_property
    def initial(self) -> Shared:
        """The shared parameters before the first round, from the public view."""
        return self.method.init(self.public, self.streams)

    @cached_property
    def empty_private(self) -> Private:
        """The private parameters of a batch without clients."""
        fields = self.method.private_fields(self.public, self.initial, self.streams)
        return PrivateStore(fields, 0).read(NO_CLIENTS)

    def download(
        self,
        number: int,
        shared: Shared,
        clients: NDArray[np.int64] = NO_CLIENTS,
        state: Mapping[str, float] = NO_STATE,
    ) -> Download:
        """Return what these clients receive in a round; ``state`` is that of the protection."""
        common = self.method.phase_of(number).download(shared)
        return Download(number, common, self.method.download_own(shared, clients), state)

    def upload_shape(self, download: Download) -> UploadShape:
        """Return the shape of every upload of this round; it follows from the download alone."""
        now = Round(download.round, self.streams)
        fit = self.method.phase_of(download.round).fit
        fitted = fit(download.received, self.empty_private, self.public, now)
        return UploadShape.of(fitted.update, self.public.n_items)

    def protection_of(self, download: Download) -> Protection:
        """Return the protection of this round's uploads."""
        protection = self.protection.with_state(download.protection)
        if not protection.reshapes:
            return protection
        return protection.for_shape(self.upload_shape(download))


def take_part(
    task: Task, protection: Protection, download: Download, view: TrainView, private: Private
) -> tuple[Upload, Private]:
    """Train a batch of clients; return their upload and their new private parameters."""
    number = download.round
    secret = SecretRound(number, task.secret)
    now = Round(
        number, task.streams, protection.past_noise(task.secret), protection.gradient_noise(secret)
    )
    fitted = task.method.phase_of(number).fit(download.received, private, view, now)
    update = protection.protect(fitted.update, view, secret)
    return Upload(number, update, LossSum.of(fitted.losses)), fitted.private
