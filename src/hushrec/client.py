"""What a client does in a round: the only place where fit, protect and keep meet.

A client is a device or a silo. Several of them are one stack, trained at once and exact for one.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hushrec.aggregate import Update
from hushrec.clients import TrainView
from hushrec.methods.base import Method, Private, Shared
from hushrec.privacy.protection import Protection
from hushrec.rng import Round, SecretRound, SecretStreams, Streams


@dataclass(frozen=True)
class Part:
    """What clients made of a round: what leaves them, what stays, and how they fared."""

    upload: Update
    private: Private
    losses: NDArray[np.float64]


def take_part(
    method: Method,
    protection: Protection,
    received: Shared,
    private: Private,
    view: TrainView,
    number: int,
    streams: Streams,
    secret: SecretStreams,
) -> Part:
    """Train a stack of clients on what they received and what they keep; protect their uploads."""
    now = Round(number, streams, protection.past_noise(secret))
    fitted = method.fit(received, private, view, now)
    upload = protection.protect(fitted.update, view, SecretRound(number, secret))
    return Part(upload, fitted.private, fitted.losses)
