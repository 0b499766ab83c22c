"""`MethodContract`: what every method must do, ours and yours, as tests you inherit.

::

    from hushrec.testing import MethodContract

    class TestMine(MethodContract):
        method = MyMethod

Run it with pytest. Needs no data and no network; the world it trains on has three groups of users,
each of which touches its own third of the items.
"""

from __future__ import annotations

import hashlib
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, ClassVar

import numpy as np
import pytest
import tomli_w
from numpy.typing import NDArray
from pydantic import ValidationError

from hushrec.aggregate import ClientRows, ExactSum, Total, Update
from hushrec.backends.inprocess import InProcess
from hushrec.clients import Ragged, TrainView
from hushrec.data.interactions import Categorical, Features, Interactions, Numeric
from hushrec.device.fold_in import fold_in
from hushrec.evaluate.evaluator import EvaluationConfig, Evaluator
from hushrec.methods.base import (
    Fitted,
    Method,
    MethodConfig,
    PerClient,
    PerClientRows,
    PerClientTable,
    Private,
    PrivateFields,
    Shared,
)
from hushrec.privacy.protection import Mechanism, Protection, UploadShape
from hushrec.rng import Round, SecretRound, SecretStreams, Streams
from hushrec.split import Split, SplitConfig, make_split
from hushrec.store import PrivateStore

Array = NDArray[Any]

N_USERS, N_ITEMS, N_GROUPS = 60, 60, 3
_GROUPS = np.array(["low", "middle", "high"])


def taste_world(seed: int = 0) -> Interactions:
    """Make users who each touch items of one third of the catalogue only, equally popular."""
    generator = np.random.default_rng(seed)
    size = N_ITEMS // N_GROUPS
    user, item, time = [], [], []
    for number in range(N_USERS):
        liked = number % N_GROUPS * size + generator.permutation(size)[: 9 + number % 4]
        user += [number] * len(liked)
        item += liked.tolist()
        time += list(range(len(liked)))
    return Interactions(
        name="tastes",
        user=np.array(user, np.int32),
        item=np.array(item, np.int32),
        value=np.ones(len(user), np.float32),
        time=np.array(time, np.int64),
        users=np.array([f"user-{k}" for k in range(N_USERS)]),
        items=np.array([f"item-{k}" for k in range(N_ITEMS)]),
        user_features=_group_of_users(N_USERS),
        item_features=_group_of_items(N_ITEMS),
    )


def _group_of_users(count: int) -> Features:
    """Say which third of the catalogue each user likes."""
    return {"taste": Categorical(np.arange(count, dtype=np.int32) % N_GROUPS, _GROUPS)}


def _group_of_items(count: int) -> Features:
    """Say which third of the catalogue each item is in, and give it a number besides."""
    place = np.arange(count, dtype=np.int32)
    third = Categorical(np.minimum(place // (N_ITEMS // N_GROUPS), N_GROUPS - 1), _GROUPS)
    return {"third": third, "place": Numeric((place % 7).astype(np.float32), 0.0, 7.0)}


def clients_of(rows: list[list[int]], n_items: int = N_ITEMS) -> TrainView:
    """Make a stack of clients from their training items, oldest first."""
    indptr = np.cumsum([0, *(len(row) for row in rows)])
    items = np.array([item for row in rows for item in row], np.int32)
    return TrainView(
        users=np.arange(len(rows), dtype=np.int32),
        n_items=n_items,
        positives=Ragged(indptr, items),
        times=Ragged(indptr, np.arange(len(items))),
        values=Ragged(indptr, np.ones(len(items), np.float32)),
        user_features=_group_of_users(len(rows)),
        item_features=_group_of_items(n_items),
    )


@dataclass(frozen=True)
class _Round:
    """A method on a stack of clients, before and after one round."""

    view: TrainView
    shared: Shared
    fields: PrivateFields
    private: Private
    fitted: Fitted
    kept: Private
    """What the clients hold after the round, whole."""
    after: Shared


class MethodContract:
    """Inherit, set ``method``, run pytest."""

    method: ClassVar[type[Method]]
    options: ClassVar[Mapping[str, Any]] = {}
    """Options of the method for all these tests; its defaults otherwise."""
    rounds: ClassVar[int] = 100
    """Rounds of the test that it learns; methods with fewer `planned_rounds` get those."""
    beats_chance: ClassVar[bool] = True
    """False for methods that cannot tell unseen items apart, and say so."""

    # ------------------------------------------------------------ the class and its options

    def test_it_is_a_method(self) -> None:
        """The class has a name, options, and a number of rounds."""
        method = self.method
        assert issubclass(method, Method), "a method inherits hushrec.Method"
        assert isinstance(method.name, str), "a method has a name"
        assert method.name, "a method has a name"
        assert issubclass(method.Config, MethodConfig), "Config inherits MethodConfig"
        assert self._make().planned_rounds >= 1, "planned_rounds is at least 1"
        assert isinstance(method().config, method.Config), "a method works with its defaults"

    def test_the_config_is_frozen(self) -> None:
        """Nobody changes the options of a run while it runs."""
        config = self._make().config
        assert type(config).model_config.get("frozen"), "Config is frozen"
        for name in type(config).model_fields:
            with pytest.raises(ValidationError):
                setattr(config, name, getattr(config, name))

    def test_an_unknown_option_is_refused(self) -> None:
        """A misspelt option is an error, not a default."""
        with pytest.raises(ValidationError):
            self.method.Config.model_validate({**self.options, "no_such_option": 1})

    def test_the_config_survives_toml(self) -> None:
        """A run folder can hold the options and give them back."""
        config = self._make().config
        text = tomli_w.dumps(config.model_dump(mode="json", exclude_none=True))
        assert type(config).model_validate(tomllib.loads(text)) == config, (
            "TOML changed the options"
        )

    # ------------------------------------------------------------ types, shapes, dtypes

    def test_init_returns_named_arrays(self) -> None:
        """Shared parameters are a mapping from names to finite arrays."""
        method, view = self._make(), self._view()
        shared = method.init(view, Streams(0))
        _check_shared(shared)
        _check_same(shared, method.init(view, Streams(0)), "init of the same seed")
        _check_shared(method.download(shared))

    def test_private_fields_are_declared(self) -> None:
        """What stays on a client has a shape before the first round."""
        method, view = self._make(), self._view()
        declared = method.private_fields(view, method.init(view, Streams(0)), Streams(0))
        for name, spec in declared.items():
            assert isinstance(name, str), "private fields have names"
            if isinstance(spec, PerClient):
                assert isinstance(spec.initial, np.ndarray), f"'{name}': initial is an array"
                _check_numbers(spec.initial, name)
            else:
                assert isinstance(spec, PerClientRows), f"'{name}' is PerClient or PerClientRows"
                assert spec.capacity.shape == (len(view),), f"'{name}': one capacity per client"
                assert (spec.capacity >= 0).all(), f"'{name}': capacities are not negative"
                assert spec.width >= 1, f"'{name}': rows have a width"

    def test_fit_returns_what_it_declares(self) -> None:
        """Uploads fit the exact sum; private parameters fit the store."""
        for view in (self._view(), self._odd_view()):
            done = self._round(view)
            assert isinstance(done.fitted, Fitted), "fit returns Fitted"
            self._check_update(done.fitted.update, len(view))
            _check_private(done.fitted.private, done.fields, len(view))
            losses = done.fitted.losses
            assert losses.shape in ((0,), (len(view),)), "losses: one per client, or none"
            assert np.isfinite(losses).all(), "losses are finite"

    def test_apply_keeps_names_shapes_and_dtypes(self) -> None:
        """A round changes the values of the shared parameters only."""
        done = self._round(self._view())
        _check_shared(done.after)
        assert done.after.keys() == done.shared.keys(), "apply keeps the names"
        for name, array in done.shared.items():
            new = done.after[name]
            assert (new.shape, new.dtype) == (array.shape, array.dtype), f"apply reshaped '{name}'"

    def test_scores_are_finite_float32(self) -> None:
        """Every client scores every item, before the first round and after it."""
        for view in (self._view(), self._odd_view()):
            done = self._round(view)
            for shared, private in (
                (done.shared, done.private),
                (done.after, done.kept),
            ):
                _check_scores(self._make().score(shared, private, view), view)

    # ------------------------------------------------------------ state in, state out

    def test_inputs_are_left_alone(self) -> None:
        """State in, state out: what a method is given, it does not write to."""
        method, view, streams = self._make(), self._view(), Streams(0)
        shared = method.init(view, streams)
        private = _materialised(method.private_fields(view, shared, streams), len(view))
        given = (shared, private, view)
        before = _digest(given)
        fitted = method.fit(method.download(shared), private, view, Round(1, streams))
        assert _digest(given) == before, "fit changed what it was given"
        summed = ExactSum(view.n_items)
        summed.add(fitted.update)
        total = summed.total()
        uploaded = _digest((total.rows, total.dense))
        after = method.apply(shared, total)
        assert _digest(given) == before, "apply changed what it was given"
        assert _digest((total.rows, total.dense)) == uploaded, "apply changed the sum"
        kept = _kept(private, fitted.private)
        state = _digest((after, kept, view))
        method.score(after, kept, view)
        method.private_fields(view, after, streams)
        method.download(after)
        assert _digest((after, kept, view)) == state, "score changed what it was given"
        assert _digest(given) == before, "an output shares memory with an input"

    def test_the_same_seed_gives_the_same_bits(self) -> None:
        """No hidden generator, no hidden state: two rounds from the same state are the same."""
        first, second = self._round(self._view()), self._round(self._view())
        _check_same(first.after, second.after, "two identical rounds")
        _check_same(first.fitted.private, second.fitted.private, "two identical rounds")
        again = self._make()
        one, two = (self._round(self._view(), again) for _ in range(2))
        _check_same(one.after, two.after, "two rounds of one method object")
        _check_same(one.fitted.private, two.fitted.private, "two rounds of one method object")

    def test_a_stack_of_clients_equals_one_client_at_a_time(self) -> None:
        """Results do not depend on how clients are stacked, on threads or on silos."""
        method, view, streams = self._make(), self._odd_view(), Streams(0)
        if method.traits.pooled:
            pytest.skip("a pooled yardstick sees all clients at once")
        done = self._round(view)
        received = method.download(done.shared)
        stacked, single = ExactSum(view.n_items), ExactSum(view.n_items)
        stacked.add(done.fitted.update)
        scores = method.score(done.after, done.kept, view)
        for client in reversed(range(len(view))):
            alone = view.take(np.array([client]))
            mine = _client(done.private, client)
            fitted = method.fit(received, mine, alone, Round(1, streams))
            single.add(fitted.update)
            _check_same(
                fitted.private, _client(done.fitted.private, client), f"client {client} alone"
            )
            score = method.score(done.after, _kept(mine, fitted.private), alone)
            assert np.array_equal(score[0], scores[client]), f"client {client} scores otherwise"
        assert stacked.clients == single.clients, "the number of uploads depends on the stack"
        one, other = stacked.total(), single.total()
        assert _digest((one.rows, one.dense)) == _digest((other.rows, other.dense)), (
            "the sum of the uploads depends on the stack"
        )

    def test_a_pooled_method_says_so(self) -> None:
        """A pooled yardstick is one stack of everybody, and one upload."""
        method = self._make()
        if not method.traits.pooled:
            pytest.skip("not pooled: clients are trained on their own")
        done = self._round(self._view())
        assert done.fitted.update.clients == 1, "a pooled method is one upload"

    # ------------------------------------------------------------ privacy

    def test_private_never_travels(self) -> None:
        """No upload and no download holds a private parameter, or how far one moved.

        What a method `reveals` by its own word may be in an upload, never in a download.
        """
        method, view = self._make(), self._view()
        done = self._round(view)
        update, private = done.fitted.update, done.kept
        # What travels are the differences, where a stack stands for those.
        uploads = [stack.differences().rows for stack in update.rows.values()]
        uploads += update.dense.values()
        downloads = [*method.download(done.shared).values(), *method.download(done.after).values()]
        for name, values in _private_arrays(private):
            sent_to_anybody = downloads if name in method.traits.reveals else uploads + downloads
            for sent in sent_to_anybody:
                assert not np.shares_memory(values, sent), f"'{name}' travels: memory is shared"
        before = dict(_private_arrays(done.private))
        for name, values in _private_arrays(private):
            secrets = list(_secrets(values))
            if name in before and before[name].shape == values.shape:
                secrets += _secrets(values - before[name])
            for sent in [] if name in method.traits.reveals else uploads:
                content = np.ascontiguousarray(sent, values.dtype).tobytes()
                leaked = any(secret in content for secret in secrets)
                assert not leaked, f"'{name}' travels: it is in an upload"
        for name, values in _private_arrays(private):
            if isinstance(done.fields[name], PerClient):
                for sent in method.download(done.after).values():
                    content = np.ascontiguousarray(sent, values.dtype).tobytes()
                    leaked = any(secret in content for secret in _secrets(values))
                    assert not leaked, f"'{name}' travels: it is in a download"

    # ------------------------------------------------------------ odd clients and new users

    def test_nobody(self) -> None:
        """An empty stack uploads nothing and fails nowhere."""
        method, streams = self._make(), Streams(0)
        if method.traits.pooled:
            pytest.skip("a pooled yardstick always has everybody")
        whole = self._view()
        shared = method.init(whole, streams)
        nobody = whole.take(np.zeros(0, np.int64))
        declared = method.private_fields(whole, shared, streams)
        private = PrivateStore(declared, len(whole)).read(np.zeros(0, np.int64))
        fitted = method.fit(method.download(shared), private, nobody, Round(1, streams))
        self._check_update(fitted.update, 0)
        kept = _kept(private, fitted.private)
        _check_scores(method.score(shared, kept, nobody), nobody)

    def test_fold_in_leaves_the_shared_part_alone(self) -> None:
        """A new user trains what is private, on one device, from shared parameters as they are."""
        method, streams = self._make(), Streams(0)
        done = self._round(self._view())
        before = _digest(done.after)
        for items in ([3], [1, 2, 5, 8], list(range(N_ITEMS))):
            view = clients_of([items])
            private = fold_in(method, done.after, view, streams, passes=3)
            declared = method.private_fields(view, done.after, streams)
            _check_private(private, declared, 1)
            _check_scores(method.score(done.after, private, view), view)
        assert _digest(done.after) == before, "fold-in changed the shared parameters"

    # ------------------------------------------------------------ does it learn

    def test_it_learns_or_says_that_it_does_not(self) -> None:
        """On users with tastes the held-out item is found far more often than by chance."""
        method = self._make()
        if not (method.traits.learns and self.beats_chance):
            pytest.skip("declared: learns = False or beats_chance = False")
        hits, chance = self._hits_and_chance(method)
        # 60 users: the standard deviation of chance is about 0.05, so twice chance is 4 of them.
        assert hits > 2 * chance, f"HR@10 {hits:.2f} is not clearly above chance ({chance:.2f})"

    # ------------------------------------------------------------ what the tests share

    def _make(self) -> Method:
        return self.method(self.method.Config.model_validate(dict(self.options)))

    def _split(self) -> Split:
        return make_split(taste_world(), SplitConfig(), Streams(0))

    def _view(self) -> TrainView:
        return self._split().train_view("honest")

    def _odd_view(self) -> TrainView:
        """One item, every item, all but one, and ordinary clients."""
        everything = list(range(N_ITEMS))
        return clients_of([[7], everything, everything[:-1], [5, 3, 9], [4, 40, 8, 2, 20], [59]])

    def _round(self, view: TrainView, method: Method | None = None) -> _Round:
        method, streams = method or self._make(), Streams(0)
        shared = method.init(view, streams)
        declared = method.private_fields(view, shared, streams)
        private = _materialised(declared, len(view))
        fitted = method.fit(method.download(shared), private, view, Round(1, streams))
        summed = ExactSum(view.n_items)
        self._check_update(fitted.update, len(view))
        summed.add(fitted.update)
        after = method.apply(shared, summed.total())
        kept = _kept(private, fitted.private)
        return _Round(view, shared, declared, private, fitted, kept, after)

    def _check_update(self, update: Update, clients: int) -> None:
        expected = 1 if self.method.traits.pooled else clients
        assert update.clients == expected, f"{update.clients} uploads of {expected} clients"
        for name, stack in update.rows.items():
            _check_rows(stack, expected, name)
            if len(stack.ids):
                assert stack.ids.min() >= 0, f"'{name}': row ids start at 0"
                if stack.keyed:
                    assert stack.ids.max() < N_ITEMS**2, f"'{name}': keys are pairs of items"
                else:
                    assert stack.ids.max() < N_ITEMS, f"'{name}': row ids are item numbers"
        for name, array in update.dense.items():
            assert array.shape[:1] == (expected,), f"'{name}': one block per client"
            _check_numbers(array, name)

    def _hits_and_chance(self, method: Method) -> tuple[float, float]:
        split, streams = self._split(), Streams(0)
        view = split.train_view("honest")
        shared = method.init(view, streams)
        store = PrivateStore(method.private_fields(view, shared, streams), len(view))
        backend = InProcess(view, store, threads=1)
        evaluator = Evaluator(split, EvaluationConfig(), streams, 1)
        rounds = min(self.rounds, method.planned_rounds)
        best, value = (shared, store), -np.inf
        for number in range(1, rounds + 1):
            outcome = backend.run_clients(
                method, shared, Protection(), split.training_users, streams, number
            )
            shared = method.apply(shared, outcome.summed.total())
            if number % max(1, rounds // 10) == 0 or number == rounds:
                found = evaluator.selection_value(evaluator.rank(method, shared, store, "valid"))
                if found > value:  # validation items select the round, as in a run
                    best, value = (shared, store.snapshot(None)), found
        ranks = evaluator.rank(method, *best, "test")
        hits = evaluator.summarise(ranks)["full"]["hr@10"]
        return hits, float(np.mean(10 / ranks["full"].candidates))


class MechanismContract:
    """What every layer of the privacy stack must do: inherit, return one from `make`, run pytest.

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
        together.add(mechanism.protect(update, view, SecretRound(5, SecretStreams(1))))
        for client in reversed(range(len(view))):
            mine = _one_upload(update, client)
            here = view.take(np.array([client]))
            alone.add(mechanism.protect(mine, here, SecretRound(5, SecretStreams(1))))
        one, other = together.total(), alone.total()
        assert _digest((one.rows, one.dense)) == _digest((other.rows, other.dense)), (
            "protection depends on the stack"
        )
        assert together.up_bytes == alone.up_bytes, "message sizes depend on the stack"

    def test_nothing_is_changed_in_place(self) -> None:
        """Uploads and sums go in and out; the mechanism of the next round is another value."""
        mechanism, update = self._made(), self._update()
        before = _digest((update.rows, update.dense))
        summed = ExactSum(N_ITEMS)
        summed.add(mechanism.protect(update, self._clients(), SecretRound(5, SecretStreams(1))))
        assert _digest((update.rows, update.dense)) == before, "protect changed the upload"
        total = summed.total()
        inside = _digest((total.rows, total.dense))
        first, _ = mechanism.finish(total, SecretRound(5, SecretStreams(1)))
        assert _digest((total.rows, total.dense)) == inside, "finish changed the sum"
        second, _ = mechanism.finish(total, SecretRound(5, SecretStreams(1)))
        assert _digest((first.rows, first.dense)) == _digest((second.rows, second.dense)), (
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
            summed = ExactSum(N_ITEMS)
            summed.add(
                self._made().protect(update, self._clients(), SecretRound(5, SecretStreams(1)))
            )
            sizes.add(summed.up_bytes)
            total, _ = self._finished(update, self._clients())
            assert np.array_equal(total.rows["items"][0], np.arange(N_ITEMS)), "rows are left out"
        assert len(sizes) == 1, "the size of a message depends on the data"

    def _made(self) -> Mechanism:
        return self.make(UploadShape(N_ITEMS, {"items": 3}, {"head": (2, 2)}))

    def _clients(self) -> TrainView:
        return clients_of([[1], [2, 3], [4], []])

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
        summed.add(mechanism.protect(update, view, SecretRound(5, SecretStreams(1))))
        return mechanism.finish(summed.total(), SecretRound(5, SecretStreams(1)))


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


def _materialised(declared: PrivateFields, clients: int) -> Private:
    """Read every field of a fresh store once, as plain arrays."""
    return dict(PrivateStore(declared, clients).read(np.arange(clients)))


def _kept(before: Private, given_back: Private) -> Private:
    """Put the changed rows of whole tables in place, as the store does."""
    out = dict(given_back)
    for name, rows in given_back.items():
        table = before.get(name)
        if isinstance(rows, ClientRows) and isinstance(table, np.ndarray):
            new = table.copy()
            for client in range(len(new)):
                mine = slice(rows.indptr[client], rows.indptr[client + 1])
                new[client, rows.ids[mine]] = rows.rows[mine]
            new.flags.writeable = table.flags.writeable
            out[name] = new
    return out


def _client(private: Private, client: int) -> Private:
    """Take one client out of a stack."""
    out: dict[str, Array | ClientRows] = {}
    for name, value in private.items():
        if isinstance(value, ClientRows):
            mine = slice(value.indptr[client], value.indptr[client + 1])
            indptr = np.array([0, mine.stop - mine.start])
            out[name] = ClientRows(indptr, value.ids[mine].copy(), value.rows[mine].copy())
        else:
            mine_alone = value[client : client + 1].copy()
            mine_alone.flags.writeable = value.flags.writeable
            out[name] = mine_alone
    return out


def _check_numbers(array: Array, name: str) -> None:
    assert array.dtype.kind in "fiub", f"'{name}' holds {array.dtype}, not numbers"
    assert np.isfinite(array).all(), f"'{name}' is not finite"


def _check_shared(shared: Shared) -> None:
    for name, array in shared.items():
        assert isinstance(name, str), "shared parameters have names"
        assert isinstance(array, np.ndarray), f"'{name}' is not an array"
        _check_numbers(array, name)


def _check_rows(stack: Any, clients: int, name: str) -> None:
    assert isinstance(stack, ClientRows), f"'{name}' is not a ClientRows"
    assert stack.indptr.shape == (clients + 1,), f"'{name}': indptr has one entry more than clients"
    assert stack.indptr[0] == 0, f"'{name}': indptr starts at 0"
    assert (np.diff(stack.indptr) >= 0).all(), f"'{name}': indptr ascends"
    assert stack.indptr[-1] == len(stack.ids) == len(stack.rows), f"'{name}': lengths differ"
    assert stack.rows.ndim == 2, f"'{name}': rows are [entries, width]"
    _check_numbers(stack.rows, name)


def _check_private(private: Private, declared: PrivateFields, clients: int) -> None:
    assert private.keys() == declared.keys(), "fit returns exactly the declared private fields"
    for name, spec in declared.items():
        value = private[name]
        if isinstance(spec, PerClientTable) and isinstance(value, ClientRows):
            _check_rows(value, clients, name)
            assert value.rows.shape[1] == spec.initial.shape[1], f"'{name}' has another width"
        elif isinstance(spec, PerClient):
            assert isinstance(value, np.ndarray), f"'{name}' is not an array"
            shape = (clients, *spec.initial.shape)
            assert value.shape == shape, f"'{name}' has shape {value.shape}, declared {shape}"
            assert value.dtype == spec.initial.dtype, f"'{name}' has another dtype than declared"
            _check_numbers(value, name)
        else:
            _check_rows(value, clients, name)
            assert isinstance(value, ClientRows)
            assert value.rows.shape[1] == spec.width, f"'{name}' has another width than declared"
            fits = (np.diff(value.indptr) <= spec.capacity).all()
            assert fits, f"'{name}' exceeds its declared capacity"


def _check_scores(scores: Array, view: TrainView) -> None:
    shape = (len(view), view.n_items)
    assert scores.shape == shape, f"scores are {scores.shape}, not [clients, items] = {shape}"
    assert scores.dtype == np.float32, f"scores are {scores.dtype}, not float32"
    assert np.isfinite(scores).all(), "scores are finite"


def _check_same(first: Mapping[str, Any], second: Mapping[str, Any], what: str) -> None:
    assert first.keys() == second.keys(), f"{what}: names differ"
    for name in first:
        assert _digest(first[name]) == _digest(second[name]), f"{what}: '{name}' differs"


def _arrays(value: Any) -> Iterator[Array]:
    if isinstance(value, np.ndarray):
        yield value
    elif isinstance(value, Mapping):
        for key in sorted(value):
            yield from _arrays(value[key])
    elif isinstance(value, (tuple, list)):
        for part in value:
            yield from _arrays(part)
    elif is_dataclass(value):
        for field in fields(value):
            yield from _arrays(getattr(value, field.name))


def _digest(value: Any) -> str:
    hashed = hashlib.blake2b()
    for array in _arrays(value):
        hashed.update(f"{array.dtype}{array.shape}".encode())
        hashed.update(np.ascontiguousarray(array).tobytes())
    return hashed.hexdigest()


def _private_arrays(private: Private) -> Iterator[tuple[str, Array]]:
    """Yield the values that must not travel; which items a client trained on is another matter."""
    for name, value in private.items():
        yield name, value.rows if isinstance(value, ClientRows) else np.asarray(value)


def _secrets(values: Array) -> Iterator[bytes]:
    """Yield each client's block and all blocks together, if they are no coincidence."""
    for block in (*values, values):
        if np.size(block) >= 3 and len(np.unique(block)) >= 3:
            yield np.ascontiguousarray(block).tobytes()
