"""Fold in a user the run has never seen: train what is private, leave what is shared alone."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from hushrec.client import Task, take_part
from hushrec.clients import TrainView, chunks
from hushrec.methods.base import Method, Private, Shared
from hushrec.privacy.protection import Protection
from hushrec.rng import SecretStreams, Streams
from hushrec.store import PrivateStore

PASSES = 20


def fold_in(
    method: Method, shared: Shared, view: TrainView, streams: Streams, passes: int = PASSES
) -> Private:
    """Return private parameters of new clients after some rounds on their own devices.

    Nothing is uploaded, so nothing needs protection, and no noise is drawn.
    """
    fields = method.private_fields(view, shared, streams)
    store = PrivateStore(fields, len(view))
    everybody = np.arange(len(view))
    if fields:
        task = Task(method, Protection(), streams, SecretStreams(0), view.take(everybody[:0]))
        # A pooled method would train the newcomers on each other; each stands alone here.
        for clients in chunks(everybody, 1 if method.traits.pooled else max(1, len(view))):
            own = view.take(clients)
            download = task.download(0, shared, own.clients.astype(np.int64))
            for number in range(passes):
                now, kept = replace(download, round=number), store.read(clients)
                store.write(clients, take_part(task, task.protection, now, own, kept)[1])
    return store.read(everybody)
