"""Fold in a user the run has never seen: train what is private, leave what is shared alone."""

from __future__ import annotations

import numpy as np

from hushrec.data.views import TrainView, chunks
from hushrec.methods.base import Method, Private, Shared
from hushrec.private.store import PrivateStore
from hushrec.streams import Round, Streams

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
        # A pooled method would train the newcomers on each other; each stands alone here.
        for clients in chunks(everybody, 1 if method.traits.pooled else max(1, len(view))):
            own = view.take(clients)
            received = {
                **method.download(shared),
                **method.download_own(shared, own.clients.astype(np.int64)),
            }
            for number in range(passes):
                fitted = method.fit(received, store.read(clients), own, Round(number, streams))
                store.write(clients, fitted.private)
    return store.read(everybody)
