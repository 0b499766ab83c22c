"""`MethodContract`: what every method must do."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import pytest
import tomli_w
from pydantic import ValidationError
from safetensors.numpy import load

from hushrec.aggregation import KeyedRows, Update
from hushrec.data.splitting import Split, SplitConfig, make_split
from hushrec.data.views import TrainView
from hushrec.evaluation.evaluator import EvaluationConfig, Evaluator
from hushrec.federation.backends import Machine
from hushrec.methods.base import Exports, ExportsUser, Fitted, Method, MethodConfig, Shared, fold_in
from hushrec.private import PerClient, PerClientRows, Private, PrivateFields, PrivateStore
from hushrec.serving.bundle import contents
from hushrec.serving.recommender import Recommender
from hushrec.streams import Round, Streams
from hushrec.testing.checks import (
    N_ITEMS,
    Array,
    Federation,
    check_batch,
    check_numbers,
    check_private,
    check_rows,
    check_same,
    check_scores,
    check_shared,
    clients_of,
    digest,
    private_arrays,
    secrets_in,
    sum_of,
    taste_world,
)

COPY = "copy an array before you change it, as in np.array(private['vector'])"


@dataclass(frozen=True)
class _Round:
    """A method on a batch of clients, before and after one round."""

    view: TrainView
    shared: Shared
    fields: PrivateFields
    private: Private
    fitted: Fitted
    kept: Private
    """What the clients hold after the round."""
    after: Shared


class MethodContract:
    """What every method must do: inherit, set ``method``, run pytest."""

    method: ClassVar[type[Method]]
    options: ClassVar[Mapping[str, Any]] = {}
    """Options of the method for all these tests; its defaults otherwise."""
    rounds: ClassVar[int] = 100
    """Most rounds of the test that it learns."""
    beats_chance: ClassVar[bool] = True
    """False for methods that cannot tell unseen items apart, and say so."""

    # ------------------------------------------------------------ the class and its options

    def test_it_is_a_method(self) -> None:
        """The class has a name, options, and a number of rounds."""
        method = self.method
        assert issubclass(method, Method), "a method inherits hushrec.extend.Method"
        assert isinstance(method.name, str) and method.name, "a method has a name"
        assert issubclass(method.Config, MethodConfig), "Config inherits MethodConfig"
        phases = self._make().phases
        assert phases, "a method has at least one phase"
        for phase in phases:
            assert phase.name, "a phase has a name"
            assert phase.rounds >= 1, f"phase '{phase.name}' has at least one round"
        assert len({phase.name for phase in phases}) == len(phases), "phases have different names"
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
        again = type(config).model_validate(tomllib.loads(text))
        assert again == config, "TOML changed the options"

    # ------------------------------------------------------------ types, shapes, dtypes

    def test_init_returns_named_arrays(self) -> None:
        """Shared parameters are a mapping from names to finite arrays."""
        method, view = self._make(), self._view()
        shared = method.init(view, Streams(0))
        check_shared(shared)
        check_same(shared, method.init(view, Streams(0)), "init of the same seed")
        for phase in method.phases:
            check_shared(phase.download(shared))

    def test_private_fields_are_declared(self) -> None:
        """What stays on a client has a shape before the first round."""
        method, view = self._make(), self._view()
        declared = method.private_fields(view, method.init(view, Streams(0)), Streams(0))
        for name, spec in declared.items():
            if isinstance(spec, PerClient):
                assert isinstance(spec.initial, np.ndarray), f"'{name}': initial is an array"
                check_numbers(spec.initial, name)
            else:
                assert isinstance(spec, PerClientRows), f"'{name}' is PerClient or PerClientRows"
                assert spec.capacity.shape == (len(view),), f"'{name}': one capacity per client"
                assert (spec.capacity >= 0).all(), f"'{name}': capacities are not negative"
                assert spec.width >= 1, f"'{name}': rows have a width"

    def test_fit_returns_what_it_declares(self) -> None:
        """Uploads fit the exact sum; private parameters fit the store."""
        for view in (self._view(), self._odd_view()):
            done = self._round(view)  # checks the update and the private parameters
            assert isinstance(done.fitted, Fitted), "fit returns Fitted"
            losses = done.fitted.losses
            assert losses.shape in ((0,), (len(view),)), (
                f"losses have shape {losses.shape}: one for each of {len(view)} clients, or none"
            )
            assert np.isfinite(losses).all(), "some losses are NaN or infinite"

    def test_apply_keeps_names_shapes_and_dtypes(self) -> None:
        """A round changes the values of the shared parameters only."""
        done = self._round(self._view())
        check_shared(done.after)
        assert done.after.keys() == done.shared.keys(), (
            f"apply returns {sorted(done.after)}, and init {sorted(done.shared)}: they must be the "
            "same"
        )
        for name, array in done.shared.items():
            new = done.after[name]
            assert (new.shape, new.dtype) == (array.shape, array.dtype), (
                f"'{name}' is {array.dtype} {array.shape} from init and {new.dtype} {new.shape} "
                "from apply: a round may change values only (sums are float64: use .astype)"
            )

    def test_scores_are_finite_float32(self) -> None:
        """Every client scores every item, before the first round and after it."""
        for view in (self._view(), self._odd_view()):
            done = self._round(view)
            for shared, private in ((done.shared, done.private), (done.after, done.kept)):
                check_scores(self._make().score(shared, private, view), view)

    # ------------------------------------------------------------ state in, state out

    def test_inputs_are_left_alone(self) -> None:
        """State in, state out: what a method is given, it does not write to."""
        method, view, streams = self._make(), self._view(), Streams(0)
        shared = method.init(view, streams)
        store, everybody = self._store(method, view, shared), np.arange(len(view))
        private = dict(store.read(everybody))
        given = (shared, private, view)
        before = digest(given)
        phase = method.phase_of(1)
        fitted = phase.fit(phase.download(shared), private, view, Round(1, streams))
        assert digest(given) == before, f"fit writes to its arguments: {COPY}"
        total = sum_of([fitted.update])
        uploaded = digest(total)
        after = phase.apply(shared, total, 1)
        assert digest(given) == before, f"apply writes to its arguments: {COPY}"
        assert digest(total) == uploaded, f"apply writes to the sum: {COPY}"
        store.write(everybody, fitted.private)
        kept = dict(store.read(everybody))
        state = digest((after, kept, view))
        method.score(after, kept, view)
        method.private_fields(view, after, streams)
        phase.download(after)
        assert digest((after, kept, view)) == state, (
            f"score, private_fields or download writes to its arguments: {COPY}"
        )
        assert digest(given) == before, (
            f"fit or apply returns an argument's memory, which is written to later: {COPY}"
        )

    def test_the_same_seed_gives_the_same_bits(self) -> None:
        """No hidden generator, no hidden state: two rounds from the same state are the same."""
        again = self._make()
        for what, methods in {
            "two identical rounds": (self._make(), self._make()),
            "two rounds of one method object": (again, again),
        }.items():
            one, two = (self._round(self._view(), method) for method in methods)
            check_same(one.after, two.after, what)
            check_same(one.fitted.private, two.fitted.private, what)

    def test_a_batch_of_clients_equals_one_client_at_a_time(self) -> None:
        """Results do not depend on how clients are batched, on threads or on silos."""
        method, view, streams = self._unpooled(), self._odd_view(), Streams(0)
        done, phase = self._round(view), method.phase_of(1)
        received, store = phase.download(done.shared), self._store(method, view, done.shared)
        scores, updates = method.score(done.after, done.kept, view), []
        for client in reversed(range(len(view))):
            one = np.array([client])
            alone = view.take(one)
            fitted = phase.fit(received, store.read(one), alone, Round(1, streams))
            updates.append(fitted.update)
            store.write(one, fitted.private)
            score = method.score(done.after, store.read(one), alone)
            check_batch(score[0], scores[client], f"scores of client {client}")
        for name, value in store.read(np.arange(len(view))).items():
            check_batch(value, done.kept[name], f"private parameters '{name}'")
        together, single = sum_of([done.fitted.update]), sum_of(updates)
        assert together.clients == single.clients, (
            f"a batch of {len(view)} clients makes {together.clients} uploads: Update(len(view), …)"
        )
        check_batch(single, together, "sums of the uploads")

    def test_rounds_to_come_are_exact_too(self) -> None:
        """In every phase, clients one by one come to the same bits as all at once."""
        method = self._unpooled()
        at_once, alone = (
            Federation(method, self._view(), machine=Machine(threads=1, chunk=chunk))
            for chunk in (None, 1)
        )
        last = method.planned_rounds - method.phases[-1].rounds + 1
        for _ in range(max(3, last)):
            first, second = at_once.round(), alone.round()
            where = f"in round {alone.number}"
            check_batch(alone.shared, at_once.shared, f"shared parameters after training {where}")
            assert first.loss == second.loss, (
                f"the mean loss is {second.loss.mean} {where} one client at a time, and "
                f"{first.loss.mean} in a batch of all: compute each client's from its own samples"
            )
            assert first.up_bytes == second.up_bytes, (
                f"clients upload {second.up_bytes} bytes {where} one at a time, and "
                f"{first.up_bytes} in a batch of all: an upload holds the client's own rows only"
            )

    def test_what_is_served_is_enough(self) -> None:
        """A device scores and adapts with `serving` alone as with everything."""
        method, done, streams = self._make(), self._round(self._view()), Streams(0)
        served = method.serving(done.after)
        assert served.keys() <= done.after.keys(), "serving returns names that shared lacks"
        scores = []
        for shared in (done.after, served):
            private = method.adapt(shared, done.kept, done.view, streams)
            scores.append(method.score(shared, private, done.view))
        assert np.array_equal(scores[0], scores[1]), (
            "score gives other bits with serving(shared) than with shared: return from serving all "
            "that score and adapt read"
        )

    def test_a_pooled_method_says_so(self) -> None:
        """A pooled baseline is one batch of everybody, and one upload."""
        method = self._make()
        if not method.traits.pooled:
            pytest.skip("not pooled: clients are trained on their own")
        done = self._round(self._view())
        assert done.fitted.update.clients == 1, "a pooled method makes one upload for everybody"

    # ------------------------------------------------------------ privacy

    def test_private_never_travels(self) -> None:
        """No upload and no download holds a private parameter, or how far one moved.

        What a method `reveals` by its own word may be in an upload, never in a download.
        """
        method, view = self._make(), self._view()
        done = self._round(view)
        update, private = done.fitted.update, done.kept
        # What travels are the differences, where rows stand for those.
        uploads = [rows.differences().rows for rows in update.rows.values()]
        uploads += update.dense.values()
        sent = method.phase_of(1).download
        downloads = [*sent(done.shared).values(), *sent(done.after).values()]
        before = dict(private_arrays(done.private))
        for name, values in private_arrays(private):
            hidden_from = [] if name in method.traits.reveals else uploads
            for array in hidden_from + downloads:
                assert not np.shares_memory(values, array), (
                    f"'{name}' is private, and an upload or download shares its memory: {COPY}"
                )
            secrets = list(secrets_in(values))
            if isinstance(done.fields[name], PerClient):
                leaked = _holds(sent(done.after).values(), secrets, values.dtype)
                assert not leaked, f"'{name}' is private, and a download holds its values"
            if before[name].shape == values.shape:
                secrets += secrets_in(values - before[name])
            leaked = _holds(hidden_from, secrets, values.dtype)
            assert not leaked, (
                f"'{name}' is private, and an upload holds its values, or how far they moved; a "
                "method that must send them says so in Traits(reveals=…)"
            )

    # ------------------------------------------------------------ odd clients and new users

    def test_an_empty_batch(self) -> None:
        """An empty batch uploads nothing and fails nowhere."""
        method, view, streams = self._unpooled(), self._view(), Streams(0)
        shared, none = method.init(view, streams), np.zeros(0, np.int64)
        empty, store = view.take(none), self._store(method, view, shared)
        phase = method.phase_of(1)
        fitted = phase.fit(phase.download(shared), store.read(none), empty, Round(1, streams))
        self._check_update(fitted.update, 0)
        store.write(none, fitted.private)
        check_scores(method.score(shared, store.read(none), empty), empty)

    def test_fold_in_leaves_the_shared_part_alone(self) -> None:
        """A new user trains what is private, on one device, from shared parameters as they are."""
        method, streams = self._make(), Streams(0)
        done = self._round(self._view())
        before = digest(done.after)
        for items in ([3], [1, 2, 5, 8], list(range(N_ITEMS))):
            view = clients_of([items])
            private = fold_in(method, done.after, view, streams, passes=3)
            declared = method.private_fields(view, done.after, streams)
            check_private(private, declared, 1)
            check_scores(method.score(done.after, private, view), view)
        assert digest(done.after) == before, f"fit of a new user writes to shared: {COPY}"

    def test_a_device_scores_as_the_run_does(self) -> None:
        """The form for devices, if there is one, gives the scores of `score` but for rounding."""
        method, split = self._make(), self._split()
        if not isinstance(method, Exports | ExportsUser):
            pytest.skip("declared: it has no form for devices")
        federation = Federation(method, split.train_view("honest"), machine=Machine(threads=1))
        for _ in range(min(4, method.planned_rounds)):
            federation.round()
        evaluator = Evaluator(split, EvaluationConfig(), Streams(0), 1)
        model = evaluator.model(method, federation.shared, federation.store)
        for user in model.data.users[:3].tolist():
            manifest, content = contents(model, user, precision="single")
            device = Recommender(manifest, load(content))
            found = {line.item: line.score for line in device.recommend(N_ITEMS, seen=True)}
            lines = model.recommend(user, N_ITEMS, seen=True)
            largest = max(abs(line.score) for line in lines)
            apart = max(abs(line.score - found[line.item]) for line in lines)
            assert apart <= 1e-4 * largest, (
                f"the form for devices scores an item of user '{user}' {apart:g} apart from score: "
                "device_form or user_form says how score computes"
            )

    # ------------------------------------------------------------ does it learn

    def test_it_learns_or_says_that_it_does_not(self) -> None:
        """On users with tastes the held-out item is found far more often than by chance."""
        method = self._make()
        if not (method.traits.learns and self.beats_chance):
            pytest.skip("declared: learns = False or beats_chance = False")
        split = self._split()
        federation = Federation(method, split.train_view("honest"), machine=Machine(threads=1))
        evaluator = Evaluator(split, EvaluationConfig(), Streams(0), 1)
        rounds = min(self.rounds, method.planned_rounds)
        best, value = evaluator.model(method, federation.shared, federation.store), -np.inf
        for number in range(1, rounds + 1):
            federation.round()
            if number % max(1, rounds // 10) == 0 or number == rounds:
                now = evaluator.model(method, federation.shared, federation.store)
                valid = evaluator.summarise(evaluator.rank(now, "valid"))["full"]["ndcg@10"]
                if valid > value:  # validation items select the round, as in a run
                    best, value = replace(now, private=now.private.snapshot()), valid
        ranks = evaluator.rank(best, "test")
        hits = evaluator.summarise(ranks)["full"]["hr@10"]
        chance = float(np.mean(10 / ranks["full"].candidates))
        # 60 users: the standard deviation of chance is about 0.05, so twice chance is 4 of them.
        assert hits > 2 * chance, (
            f"HR@10 is {hits:.2f} after {rounds} rounds, and chance is {chance:.2f}: set options "
            "or rounds of the test class, or beats_chance = False for a method that cannot"
        )

    # ------------------------------------------------------------ what the tests share

    def _make(self) -> Method:
        return self.method(self.method.Config.model_validate(dict(self.options)))

    def _unpooled(self) -> Method:
        method = self._make()
        if method.traits.pooled:
            pytest.skip("a pooled baseline sees all clients at once")
        return method

    def _store(self, method: Method, view: TrainView, shared: Shared) -> PrivateStore:
        return PrivateStore(method.private_fields(view, shared, Streams(0)), len(view))

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
        store, everybody = self._store(method, view, shared), np.arange(len(view))
        private, phase = dict(store.read(everybody)), method.phase_of(1)
        fitted = phase.fit(phase.download(shared), private, view, Round(1, streams))
        self._check_update(fitted.update, len(view))
        after = phase.apply(shared, sum_of([fitted.update]), 1)
        check_private(fitted.private, store.fields, len(view))
        store.write(everybody, fitted.private)
        kept = dict(store.read(everybody))
        return _Round(view, shared, store.fields, private, fitted, kept, after)

    def _check_update(self, update: Update, clients: int) -> None:
        expected = 1 if self.method.traits.pooled else clients
        assert update.clients == expected, (
            f"fit makes {update.clients} uploads for {expected} clients: Update(len(view), …)"
        )
        for name, rows in update.rows.items():
            check_rows(rows, expected, name)
            assert (rows.ids >= 0).all(), f"'{name}': an id is negative"
            if isinstance(rows, KeyedRows):
                assert (rows.ids < rows.space).all(), (
                    f"'{name}': a key is {rows.ids.max()}, and the declared space is {rows.space}"
                )
            else:
                assert (rows.ids < N_ITEMS).all(), (
                    f"'{name}': an id is {rows.ids.max()}, and ids are item numbers below "
                    f"{N_ITEMS}; for other keys use KeyedRows"
                )
        for name, array in update.dense.items():
            assert array.shape[:1] == (expected,), (
                f"'{name}' has shape {array.shape}: its first axis is that of {expected} clients"
            )
            check_numbers(array, name)


def _holds(arrays: Iterable[Array], secrets: Sequence[bytes], dtype: np.dtype[Any]) -> bool:
    contents = (np.ascontiguousarray(array, dtype).tobytes() for array in arrays)
    return any(secret in content for content in contents for secret in secrets)
