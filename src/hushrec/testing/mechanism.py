"""`MechanismContract`: what every layer of the protection must do."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar

import numpy as np
import pytest
from scipy.stats import beta

from hushrec.aggregation import (
    STEPS_PER_UNIT,
    ClientRows,
    ExactSum,
    KeyedRows,
    Total,
    Update,
    UploadShape,
)
from hushrec.data.views import TrainView
from hushrec.privacy.accountant import epsilon_of
from hushrec.privacy.protection import Mechanism, PrivacyTarget, Protection, with_zeros
from hushrec.streams import SecretRound, SecretStreams
from hushrec.testing.checks import N_ITEMS, Array, clients_of, digest, sum_of

SECRET = SecretRound(5, SecretStreams(1))
KEYS = 9
"""Of the closed key space."""
ZEROS = 0.0
FEWEST = 30
"""Numbers of which a correlation is taken."""
TRIALS = 500
"""Of the attack on a stated guarantee."""


class MechanismContract:
    """What every layer of the protection must do: inherit, return one from `make`, run pytest."""

    hides_support: ClassVar[bool] = True
    """False for layers that leave an upload's rows as they are, such as clipping alone."""
    adds_noise: ClassVar[bool] = True
    """False for layers that hide the support and add no noise."""
    covers_spaces: ClassVar[bool] = True
    """False for layers that refuse keys of a closed space."""

    def make(self, shape: UploadShape) -> Mechanism:
        """Return the mechanism for uploads of this shape."""
        raise NotImplementedError

    def test_devices_do_not_see_each_other(self) -> None:
        """A batch of clients is protected as one client at a time, bit for bit."""
        mechanism, update, view = self._made(), self._update(), self._clients()
        together = mechanism.protect(update, view, SECRET)
        alone = [
            mechanism.protect(_one_upload(update, client), view.take(np.array([client])), SECRET)
            for client in reversed(range(len(view)))
        ]
        same = digest(sum_of([together])) == digest(sum_of(alone))
        assert same, (
            "what a client sends depends on the batch: draw its random numbers by its number, "
            "secret.words(purpose, int(client)) for client in view.clients, and bound it by itself"
        )
        sizes = sum(upload.nbytes for upload in alone)
        assert together.nbytes == sizes, (
            f"messages of a batch have {together.nbytes} bytes, and {sizes} one client at a time"
        )

    def test_nothing_is_changed_in_place(self) -> None:
        """Uploads and sums go in and out; the mechanism of the next round is another value."""
        mechanism, update = self._made(), self._update()
        before = digest(update)
        _, total = _summed(mechanism, update, self._clients(), SECRET)
        assert digest(update) == before, "protect writes to the upload: copy it first"
        inside = digest(total)
        first, second = (digest(mechanism.finish(total, SECRET)[0]) for _ in range(2))
        assert digest(total) == inside, "finish writes to the sum: copy it first"
        assert first == second, "finish gives another result for the same sum, round and streams"

    def test_the_sum_comes_back_in_the_shape_of_the_method(self) -> None:
        """What the method gets has its own tables and arrays, and no others."""
        total, following = self._finished(self._update())
        tables = {"items", "pairs"} if self.covers_spaces else {"items"}
        assert total.rows.keys() == tables, (
            f"finish returns the tables {sorted(total.rows)}, and {sorted(tables)} were uploaded"
        )
        assert total.rows["items"][1].shape[1] == 3, "finish returns rows of another width"
        assert {name: array.shape for name, array in total.dense.items()} == {"head": (2, 2)}
        made = all(callable(getattr(following, name, None)) for name in ("protect", "finish"))
        assert made, "finish returns (sum, mechanism of the next round), and the second is none"

    def test_the_support_tells_nothing(self) -> None:
        """Size of the messages and rows of the sum are the same for all data."""
        if not self.hides_support:
            pytest.skip("declared: hides_support = False")
        sizes = set()
        for update in (self._update(), self._update(quiet=True)):
            sizes.add(self._made().protect(update, self._clients(), SECRET).nbytes)
            total, _ = self._finished(update)
            assert np.array_equal(total.rows["items"][0], np.arange(N_ITEMS)), (
                "the sum has no noise on rows that nobody touched, which tells who touched others; "
                "set hides_support = False for a layer that leaves rows as they are"
            )
        assert len(sizes) == 1, (
            "the size of a message depends on the data; set hides_support = False for a layer that "
            "leaves rows as they are"
        )

    # -------------------------------------------------------- what a claim rests on

    def test_noise_covers_every_number(self) -> None:
        """No number of what is seen is the same in two runs."""
        self._skip_without_noise()
        one, other = (self._numbers(SecretRound(5, SecretStreams(key))) for key in (1, 2))
        for name, size in self._shape().whole.items():
            assert one[name].size == math.prod(size), f"'{name}': some numbers are left out"
            assert (one[name] != other[name]).all(), f"'{name}': some numbers carry no noise"
        for name in one.keys() - self._shape().whole.keys():
            assert (one[name] != other[name]).all(), f"'{name}' carries no noise"

    def test_noise_goes_its_own_way(self) -> None:
        """Rounds, arrays, entries and clients have noises that know nothing of each other."""
        self._skip_without_noise()
        streams = SecretStreams(1)
        rounds = [self._numbers(SecretRound(number, streams), ZEROS) for number in range(1, 41)]
        for name in rounds[0]:
            by_round = np.array([of[name].ravel() for of in rounds])
            _uncorrelated(by_round[:-1], by_round[1:], f"'{name}' in two rounds")
            _uncorrelated(by_round[:, :-1], by_round[:, 1:], f"neighbouring entries of '{name}'")
            for beside in (other for other in rounds[0] if other > name):
                size = min(rounds[0][name].size, rounds[0][beside].size)
                others = np.array([of[beside].ravel()[:size] for of in rounds])
                _uncorrelated(by_round[:, :size], others, f"'{name}' and '{beside}'")
        sent = self._made().protect(self._update(size=ZEROS), self._clients(), SECRET)
        for name, array in sent.dense.items():
            if array.any():  # noise on the device
                flat = array.reshape(len(array), -1)
                assert (flat[:-1] != flat[1:]).all(), f"two clients have the same noise: '{name}'"
                _uncorrelated(flat[:-1], flat[1:], f"'{name}' of two clients")

    @pytest.mark.parametrize("size", [1.0, 2.0, 1e30])
    @pytest.mark.parametrize("only", [None, "items", "head", "pairs"])
    def test_what_is_sent_keeps_to_the_bound(self, only: str | None, size: float) -> None:
        """The norm over all tables, spaces and dense arrays together is within `bound_of`."""
        bound = self._made().bound_of(None)
        if bound is None:
            pytest.skip("declared: no bound")
        update = self._update(size=size, only=only)
        sent = self._made().protect(update, self._clients(), SECRET)
        for client in range(sent.clients):
            mine = _one_upload(sent, client)
            arrays = [table.rows for table in mine.rows.values()]
            arrays += [a for name, a in mine.dense.items() if name in self._shape().whole]
            whole = np.concatenate([a.ravel() for a in arrays]).astype(np.float64)
            assert np.linalg.norm(whole) <= bound, "an upload is larger than its bound"

    def test_what_is_sent_are_whole_steps(self) -> None:
        """Low bits tell nothing: all numbers are whole steps of the sums' grid."""
        noised = self.adds_noise and self.hides_support
        if not noised and self._made().bound_of(None) is None:
            pytest.skip("declared: neither noise nor a bound")
        for number in range(1, 31):
            secret = SecretRound(number, SecretStreams(1))
            sent = self._made().protect(self._update(), self._clients(), secret)
            for array in (*(table.rows for table in sent.rows.values()), *sent.dense.values()):
                steps = array.astype(np.float64) * STEPS_PER_UNIT
                assert (steps == np.rint(steps)).all(), (
                    "a number lies off the grid: sums are in whole steps of 2^-32, and low bits of "
                    "other numbers tell what noise was added to; round them"
                )

    def test_nothing_stays_nothing(self) -> None:
        """An upload of zeros is one of zeros, but for its noise: it counts neither way."""
        quiet, view = self._update(size=ZEROS), self._clients()
        secrets = [SecretRound(5, SecretStreams(key)) for key in (1, 2)]
        sent, again = (self._made().protect(quiet, view, secret) for secret in secrets)
        for name, array in sent.dense.items():
            if name in again.dense and np.array_equal(array, again.dense[name]):
                assert not array.any(), (
                    f"'{name}': something other than noise is sent for nothing, an upload of zeros"
                )
        assert not any(table.rows.any() for table in sent.rows.values()), (
            "an upload of zeros becomes one with rows that are not zero"
        )

    @pytest.mark.parametrize("number", [np.nan, np.inf, -np.inf])
    def test_nan_and_infinity_count_as_zero(self, number: float) -> None:
        """An upload that holds NaN or infinity is as one of zeros; the others' stay."""
        update, view = self._update(), self._clients()
        head = update.dense["head"].copy()
        head[0, 1, 1] = number
        empty = np.array([True, False, False, False])
        given = replace(update, dense={"head": head}), with_zeros(update, empty)
        protection = Protection((self._made(),))
        sums = [digest(sum_of([protection.protect(each, view, SECRET)])) for each in given]
        assert sums[0] == sums[1], "NaN or infinity changes more than its own upload"

    def test_a_stated_guarantee_withstands_an_attack(self) -> None:
        """Two neighbouring uploads are told apart no more often than the stated event allows."""
        target = PrivacyTarget(1.0, 1e-5, 1)
        mechanism = self._made().calibrated(target)
        stated = mechanism.release()
        if stated is None:
            pytest.skip("declared: no guarantee of its own")
        assert self.hides_support, "a guarantee covers the support too"
        claimed = epsilon_of(stated.event, 1, target.delta)
        assert claimed <= target.epsilon * (1 + 1e-9), "it spends more than the target"
        here = self._clients().take(np.array([0]))
        upload = _one_upload(self._update(size=1e6), 0)
        neighbour = -1.0 if stated.neighbours == "replace-one" else 0.0
        guesses = []
        for factor in (1.0, neighbour):
            given = _scaled(upload, factor)
            rounds = (SecretRound(number, SecretStreams(f"{factor}")) for number in range(TRIALS))
            scores = [_likeness(_released(mechanism, given, here, now), upload) for now in rounds]
            guesses.append(sum(score > 0 for score in scores))
        # Clopper-Pearson bounds of both rates, each wrong once in a thousand times.
        right = float(beta.ppf(1e-3, guesses[0], TRIALS - guesses[0] + 1))
        wrong = float(beta.ppf(1 - 1e-3, guesses[1] + 1, TRIALS - guesses[1]))
        assert right - target.delta <= math.exp(claimed) * wrong, (
            f"an attack shows an epsilon of {math.log(right / wrong):.2g}, stated is {claimed:.2g}"
        )

    # -------------------------------------------------------- what it is tried on

    def _skip_without_noise(self) -> None:
        if not (self.hides_support and self.adds_noise):
            pytest.skip("declared: no noise")

    def _shape(self) -> UploadShape:
        spaces = {"pairs": (KEYS, 1)} if self.covers_spaces else {}
        return UploadShape(N_ITEMS, {"items": 3}, {"head": (2, 2)}, spaces)

    def _made(self) -> Mechanism:
        return self.make(self._shape())

    def _clients(self) -> TrainView:
        view = clients_of([[1], [2, 3], [4], [5]])
        return replace(view, noise=np.array([0.5, 1.0, 2.0, 4.0]))

    def _update(self, *, quiet: bool = False, size: float = 1.0, only: str | None = None) -> Update:
        """Make uploads of many, few and no rows, large and small; or of no row at all."""
        generator = np.random.default_rng(0)
        counts = [0, 0, 0, 0] if quiet else [40, 2, 1, 0]
        indptr = np.cumsum([0, *counts])
        ids = np.concatenate([generator.permutation(N_ITEMS)[:n] for n in counts]).astype(np.int32)
        rows = generator.standard_normal((len(ids), 3)).astype(np.float32)
        head = generator.standard_normal((4, 2, 2)).astype(np.float32)
        keys = np.concatenate([np.arange(min(n, KEYS)) for n in counts]).astype(np.int64)
        pairs = generator.standard_normal((len(keys), 1)).astype(np.float32)
        names = "items", "head", "pairs"
        kept = {name: np.float32(size * (only in (None, name))) for name in names}
        tables: dict[str, ClientRows] = {"items": ClientRows(indptr, ids, kept["items"] * rows)}
        if self.covers_spaces:
            each = np.cumsum([0, *(min(n, KEYS) for n in counts)])
            tables["pairs"] = KeyedRows(each, keys, kept["pairs"] * pairs, space=KEYS)
        return Update(4, rows=tables, dense={"head": kept["head"] * head})

    def _numbers(self, secret: SecretRound, size: float = 1.0) -> dict[str, Array]:
        return _released(self._made(), self._update(size=size), self._clients(), secret)

    def _finished(self, update: Update) -> tuple[Total, Mechanism]:
        mechanism = self._made()
        _, total = _summed(mechanism, update, self._clients(), SECRET)
        return mechanism.finish(total, SECRET)


def _summed(
    mechanism: Mechanism, update: Update, view: TrainView, secret: SecretRound
) -> tuple[Update, Total]:
    """Return what the clients send, and its sum with the noise, before `Mechanism.finish`."""
    summed = ExactSum(N_ITEMS)
    sent = mechanism.protect(update, view, secret)
    summed.add(mechanism.receive(sent, view.clients))
    summed.add_steps(mechanism.noise(secret))
    return sent, summed.total()


def _released(
    mechanism: Mechanism, update: Update, view: TrainView, secret: SecretRound
) -> dict[str, Array]:
    """Return every number of a round's sum with its noise, before `Mechanism.finish`."""
    sent, total = _summed(mechanism, update, view, secret)
    rows = {name: array for name, (_, array) in total.rows.items()}
    travels = sent.rows.keys() | sent.dense.keys()
    return {name: of for name, of in {**rows, **total.dense}.items() if name in travels}


def _scaled(update: Update, factor: float) -> Update:
    times = np.float32(factor)
    rows = {name: replace(of, rows=times * of.rows) for name, of in update.rows.items()}
    return replace(update, rows=rows, dense={n: times * of for n, of in update.dense.items()})


def _likeness(released: Mapping[str, Array], upload: Update) -> float:
    """Return the inner product of what is released and one client's upload."""
    parts = [(released[name].ravel(), array.ravel()) for name, array in upload.dense.items()]
    parts += [
        (released[name].reshape(-1, of.rows.shape[1])[of.ids].ravel(), of.rows.ravel())
        for name, of in upload.rows.items()
    ]
    return sum(float(seen @ own) for seen, own in parts)


def _uncorrelated(one: Array, other: Array, what: str) -> None:
    """Hold noises to a correlation within five deviations of none, where there are enough."""
    if one.size >= FEWEST:
        found = abs(float(np.corrcoef(one.ravel(), other.ravel())[0, 1]))
        assert found < 5 / math.sqrt(one.size), (
            f"the noises of {what} are correlated ({found:.2f}): draw each number once, from "
            "secret streams with a purpose, a round and a client of their own"
        )


def _one_upload(update: Update, client: int) -> Update:
    rows = {}
    for name, table in update.rows.items():
        own = slice(*table.indptr[client : client + 2])
        indptr = np.array([0, own.stop - own.start])
        rows[name] = replace(table, indptr=indptr, ids=table.ids[own], rows=table.rows[own])
    dense = {name: array[client : client + 1] for name, array in update.dense.items()}
    return Update(1, rows=rows, dense=dense)
