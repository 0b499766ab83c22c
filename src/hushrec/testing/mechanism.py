"""`MechanismContract`: what every layer of the protection must do."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import numpy as np
import pytest

from hushrec.aggregate import ClientRows, ExactSum, Total, Update, UploadShape
from hushrec.clients import TrainView
from hushrec.privacy.protection import Mechanism
from hushrec.rng import SecretRound, SecretStreams
from hushrec.testing.checks import digest
from hushrec.testing.worlds import N_ITEMS, clients_of

SECRET = SecretRound(5, SecretStreams(1))


class MechanismContract:
    """What every layer of the protection must do: inherit, return one from `make`, run pytest.

    ::

        class TestMine(MechanismContract):
            def make(self, shape):
                return MyMechanism(shape, ...)
    """

    hides_support: ClassVar[bool] = True
    """False for layers that leave an upload's rows as they are, such as clipping alone."""

    def make(self, shape: UploadShape) -> Mechanism:
        """Return the mechanism for uploads of this shape."""
        raise NotImplementedError

    def test_devices_do_not_see_each_other(self) -> None:
        """A stack of clients is protected as one client at a time, bit for bit."""
        mechanism, update, view = self._made(), self._update(), self._clients()
        together, alone = ExactSum(N_ITEMS), ExactSum(N_ITEMS)
        upload = mechanism.protect(update, view, SECRET)
        sent, sizes = upload.nbytes, []
        together.add(upload)
        for client in reversed(range(len(view))):
            mine = _one_upload(update, client)
            here = view.take(np.array([client]))
            upload = mechanism.protect(mine, here, SECRET)
            sizes.append(upload.nbytes)
            alone.add(upload)
        one, other = together.total(), alone.total()
        assert digest((one.rows, one.dense)) == digest((other.rows, other.dense)), (
            "protection depends on the stack"
        )
        assert sent == sum(sizes), "message sizes depend on the stack"

    def test_nothing_is_changed_in_place(self) -> None:
        """Uploads and sums go in and out; the mechanism of the next round is another value."""
        mechanism, update = self._made(), self._update()
        before = digest((update.rows, update.dense))
        summed = ExactSum(N_ITEMS)
        sent = mechanism.protect(update, self._clients(), SECRET)
        summed.add(mechanism.receive(sent, self._clients().clients))
        assert digest((update.rows, update.dense)) == before, "protect changed the upload"
        total = summed.total()
        inside = digest((total.rows, total.dense))
        first, _ = mechanism.finish(total, SECRET)
        assert digest((total.rows, total.dense)) == inside, "finish changed the sum"
        second, _ = mechanism.finish(total, SECRET)
        assert digest((first.rows, first.dense)) == digest((second.rows, second.dense)), (
            "the same streams and round give another result"
        )

    def test_the_sum_comes_back_in_the_shape_of_the_method(self) -> None:
        """What the method gets has its own tables and arrays, and no others."""
        total, following = self._finished(self._update(), self._clients())
        assert total.rows.keys() == {"items"}, "tables come back under their names"
        assert total.rows["items"][1].shape[1] == 3, "rows keep their width"
        assert {name: array.shape for name, array in total.dense.items()} == {"head": (2, 2)}
        assert callable(following.protect), "finish returns the mechanism of the next round"
        assert callable(following.finish), "finish returns the mechanism of the next round"

    def test_the_support_tells_nothing(self) -> None:
        """Size of the messages and rows of the sum are the same for all data."""
        if not self.hides_support:
            pytest.skip("declared: hides_support = False")
        sizes = set()
        for update in (self._update(), self._update(quiet=True)):
            sizes.add(self._made().protect(update, self._clients(), SECRET).nbytes)
            total, _ = self._finished(update, self._clients())
            assert np.array_equal(total.rows["items"][0], np.arange(N_ITEMS)), "rows are left out"
        assert len(sizes) == 1, "the size of a message depends on the data"

    def _made(self) -> Mechanism:
        return self.make(UploadShape(N_ITEMS, {"items": 3}, {"head": (2, 2)}))

    def _clients(self) -> TrainView:
        view = clients_of([[1], [2, 3], [4], []])
        return replace(view, noise=np.array([0.5, 1.0, 2.0, 4.0]))

    def _update(self, *, quiet: bool = False) -> Update:
        """Make uploads of many, few and no rows, large and small; or of no row at all."""
        generator = np.random.default_rng(0)
        counts = [0, 0, 0, 0] if quiet else [40, 2, 1, 0]
        indptr = np.cumsum([0, *counts])
        ids = np.concatenate([generator.permutation(N_ITEMS)[:n] for n in counts]).astype(np.int32)
        rows = generator.standard_normal((len(ids), 3)).astype(np.float32)
        head = generator.standard_normal((4, 2, 2)).astype(np.float32)
        return Update(4, rows={"items": ClientRows(indptr, ids, rows)}, dense={"head": head})

    def _finished(self, update: Update, view: TrainView) -> tuple[Total, Mechanism]:
        mechanism, summed = self._made(), ExactSum(N_ITEMS)
        sent = mechanism.protect(update, view, SECRET)
        summed.add(mechanism.receive(sent, view.clients))
        return mechanism.finish(summed.total(), SECRET)


def _one_upload(update: Update, client: int) -> Update:
    rows = {
        name: ClientRows(
            np.array([0, stack.indptr[client + 1] - stack.indptr[client]]),
            stack.ids[stack.indptr[client] : stack.indptr[client + 1]],
            stack.rows[stack.indptr[client] : stack.indptr[client + 1]],
        )
        for name, stack in update.rows.items()
    }
    dense = {name: array[client : client + 1] for name, array in update.dense.items()}
    return Update(1, rows=rows, dense=dense)
