"""Every method keeps the contract, and the contract catches every way to break it."""

import numpy as np
import pytest
from pydantic import ConfigDict, field_serializer

from hushrec.aggregation import ClientRows, Update
from hushrec.methods.base import Fitted, Method, Traits, method_class, method_names
from hushrec.methods.fedmf import FedMF
from hushrec.methods.pfedrec import PFedRec
from hushrec.private import PerClient
from hushrec.testing import MethodContract

BUILT_IN = [
    name for name in method_names() if method_class(name).__module__.startswith("hushrec.methods.")
]
FEW = {"d": 8, "hidden": (8, 8, 4, 4), "lr": 0.1}
SILO = {"d": 8, "hidden": (8, 4), "batch": 16, "epochs": 20, "lr": 0.1, "decay": 0.003}
# Alone on its device (local-only, FedRKG before its first guidance, CoFedRec but for the mean of a
# group now and then) one cannot tell unseen items
# apart; what FedRAP's common table knows of an unseen item drowns in a personal row that only saw
# it as a negative; FedRec looks at ratings, which are all alike here; and under pFedMe single users
# learn slowly.
AT_CHANCE = ("local-only", "cofedrec", "fedrap", "fedrkg", "fedrec", "pfedme")
SMALLER = {
    # Smaller networks and fewer rounds: enough for three groups of users.
    "privrec": {"options": FEW, "rounds": 30},
    "nn-self": {"options": FEW, "rounds": 30},
    "privrec-cen": {"options": FEW, "rounds": 30},
    "lipm": {"options": {**SILO, "interest": 4}, "rounds": 12},
    "pfedme": {"options": {**SILO, "epochs": 6}},
    "feddae": {"options": {"d": 8, "server_lr": 0.02}, "rounds": 60},
    "metamf": {"options": {"memory": 16, "hidden": 32, "lr": 0.01}, "rounds": 60},
    "fedpergnn": {"options": {"d": 8, "lr": 0.03}, "rounds": 60},
    # Rows of a table take longer to find than features.
    "fofl-self": {
        "options": {**FEW, "d": 32, "hidden": (32, 16), "item_lr": 1.0, "item_server_rate": 2.0},
        "rounds": 60,
    },
}
RULES = [name for name in dir(MethodContract) if name.startswith("test_")]


def contract_of(method_type, **more):
    return type("Contract", (MethodContract,), {"method": method_type, **more})()


def test_all_built_in_methods_are_found():
    assert {"fedmf", "lipm", "popularity"} <= set(BUILT_IN)
    for name in BUILT_IN:
        assert method_class(name).name == name


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", BUILT_IN)
def test_built_in(name, rule):
    more = {"beats_chance": name not in AT_CHANCE, **SMALLER.get(name, {})}
    getattr(contract_of(method_class(name), **more), rule)()


class TestThreeLines(MethodContract):
    method = PFedRec


class TestWithOptions(MethodContract):
    method = FedMF
    options = {"d": 4, "epochs": 2, "batch": 16, "negatives": 2}  # noqa: RUF012


# ------------------------------------------------------------------ one broken method per rule


def changed(fitted, **more):
    return Fitted(**{**{n: getattr(fitted, n) for n in ("update", "private", "losses")}, **more})


class NotFrozen(FedMF):
    class Config(FedMF.Config):
        model_config = ConfigDict(frozen=False)


class Lenient(FedMF):
    class Config(FedMF.Config):
        model_config = ConfigDict(extra="ignore")


class LosesOptions(FedMF):
    class Config(FedMF.Config):
        @field_serializer("d")
        def round_it(self, d):
            return d // 10 * 10


class NoName(FedMF):
    name = ""


class ListsInShared(FedMF):
    def init(self, view, streams):
        return {"items": super().init(view, streams)["items"].tolist()}


class RandomInit(FedMF):
    def init(self, view, streams):
        return {"items": np.random.default_rng().random((view.n_items, 32), np.float32)}


class UndeclaredPrivate(FedMF):
    def fit(self, *given):
        fitted = super().fit(*given)
        return changed(fitted, private={**fitted.private, "diary": np.zeros(3)})


class ForgetsPrivate(FedMF):
    def fit(self, *given):
        return changed(super().fit(*given), private={})


class WrongPrivateType(FedMF):
    def fit(self, *given):
        fitted = super().fit(*given)
        return changed(fitted, private={"vector": fitted.private["vector"].astype(np.float64)})


class WrongField(FedMF):
    def private_fields(self, view, shared, streams):
        return {"vector": PerClient([0.0] * 32)}


class TooManyRows(PFedRec):
    def private_fields(self, view, shared, streams):
        from hushrec.private import PerClientRows

        declared = dict(super().private_fields(view, shared, streams))
        declared["rows"] = PerClientRows(np.minimum(declared["rows"].capacity, 2), 32)
        return declared


class StrayRows(FedMF):
    def fit(self, *given):
        fitted = super().fit(*given)
        stack = fitted.update.rows["items"]
        away = ClientRows(stack.indptr, stack.ids + 1, stack.rows)
        return changed(fitted, update=Update(fitted.update.clients, {"items": away}))


class MiscountsClients(FedMF):
    def fit(self, *given):
        fitted = super().fit(*given)
        return changed(fitted, update=Update(1, fitted.update.rows))


class NaNLosses(FedMF):
    def fit(self, *given):
        fitted = super().fit(*given)
        return changed(fitted, losses=fitted.losses * np.nan)


class Reshapes(FedMF):
    def apply(self, shared, total):
        return {"items": super().apply(shared, total)["items"].astype(np.float64)}


class Renames(FedMF):
    def apply(self, shared, total):
        return {**super().apply(shared, total), "extra": np.zeros(1)}


class DoubleScores(FedMF):
    def score(self, shared, private, history):
        return super().score(shared, private, history).astype(np.float64)


class InfiniteScores(FedMF):
    def score(self, shared, private, history):
        scores = super().score(shared, private, history)
        for c in range(len(history)):
            scores[c, history.positives[c]] = -np.inf
        return scores


class TrainsInPlace(FedMF):
    def fit(self, shared, private, view, now):
        fitted = super().fit(shared, private, view, now)
        private["vector"][:] = fitted.private["vector"]
        return fitted


class AppliesInPlace(FedMF):
    def apply(self, shared, total):
        shared["items"][:] = super().apply(shared, total)["items"]
        return shared


class ScoresInPlace(FedMF):
    def score(self, shared, private, history):
        private["vector"][:] *= 2
        return super().score(shared, private, history)


class HiddenGenerator(FedMF):
    def fit(self, *given):
        fitted = super().fit(*given)
        noise = np.random.default_rng().random(fitted.private["vector"].shape, np.float32)
        return changed(fitted, private={"vector": fitted.private["vector"] + noise})


class HiddenCounter(FedMF):
    seen = 0

    def fit(self, *given):
        fitted = super().fit(*given)
        self.seen += 1
        return changed(fitted, private={"vector": fitted.private["vector"] + np.float32(self.seen)})


class LooksAtNeighbours(FedMF):
    def fit(self, *given):
        fitted = super().fit(*given)
        centred = fitted.private["vector"] - fitted.private["vector"].mean(axis=0)
        return changed(fitted, private={"vector": centred})


class LooksLater(FedMF):
    """Alone in the first round, and in the second with an eye on the others."""

    def fit(self, shared, private, view, now):
        fitted = super().fit(shared, private, view, now)
        vectors = fitted.private["vector"]
        centred = vectors - vectors.mean(axis=0) if now.number > 1 else vectors
        return changed(fitted, private={"vector": centred})


class ServesAnOldTable(FedMF):
    def serving(self, shared):
        return {"items": np.zeros_like(shared["items"])}


class NormalisesTheStack(FedMF):
    def fit(self, *given):
        fitted = super().fit(*given)
        stack = fitted.update.rows["items"]
        mean = ClientRows(stack.indptr, stack.ids, stack.rows / max(1, fitted.update.clients))
        return changed(fitted, update=Update(fitted.update.clients, {"items": mean}))


class ScoresByStack(FedMF):
    def score(self, shared, private, history):
        scores = super().score(shared, private, history)
        return scores - scores.mean(axis=0, keepdims=True)


class UploadsTheVector(FedMF):
    def fit(self, *given):
        fitted = super().fit(*given)
        vectors = fitted.private["vector"].copy()
        update = Update(fitted.update.clients, fitted.update.rows, {"average": vectors})
        return changed(fitted, update=update)


class UploadsItsChange(FedMF):
    def fit(self, shared, private, *rest):
        before = np.array(private["vector"])
        fitted = super().fit(shared, private, *rest)
        moved = np.concatenate([np.zeros((len(before), 2)), fitted.private["vector"] - before], 1)
        update = Update(fitted.update.clients, fitted.update.rows, {"average": moved})
        return changed(fitted, update=update)


class UploadsOwnRows(PFedRec):
    def fit(self, *given):
        fitted = super().fit(*given)
        return changed(
            fitted, update=Update(fitted.update.clients, {"items": fitted.private["rows"]})
        )


class NeedsSomebody(FedMF):
    def fit(self, shared, private, view, now):
        assert view.positives.values[0] >= 0
        return super().fit(shared, private, view, now)


class FailsOnNewUsers(FedMF):
    def private_fields(self, view, shared, streams):
        vector = super().private_fields(view, shared, streams)["vector"].initial
        return {"vector": PerClient(vector * np.float32(np.nan if len(view) == 1 else 1))}


class ExportsOtherRows(FedMF):
    """Gives devices another table than the one that `score` reads."""

    def user_form(self, shared, private, history):
        return super().user_form({"items": shared["items"] * 1.01}, private, history)


class LearnsNothing(FedMF):
    def apply(self, shared, total):
        return shared


class PoolsMany(FedMF):
    traits = Traits(pooled=True)


BROKEN = [
    (NoName, "test_it_is_a_method"),
    (NotFrozen, "test_the_config_is_frozen"),
    (Lenient, "test_an_unknown_option_is_refused"),
    (LosesOptions, "test_the_config_survives_toml"),
    (ListsInShared, "test_init_returns_named_arrays"),
    (RandomInit, "test_init_returns_named_arrays"),
    (WrongField, "test_private_fields_are_declared"),
    (UndeclaredPrivate, "test_fit_returns_what_it_declares"),
    (ForgetsPrivate, "test_fit_returns_what_it_declares"),
    (WrongPrivateType, "test_fit_returns_what_it_declares"),
    (TooManyRows, "test_fit_returns_what_it_declares"),
    (StrayRows, "test_fit_returns_what_it_declares"),
    (MiscountsClients, "test_fit_returns_what_it_declares"),
    (NaNLosses, "test_fit_returns_what_it_declares"),
    (Reshapes, "test_apply_keeps_names_shapes_and_dtypes"),
    (Renames, "test_apply_keeps_names_shapes_and_dtypes"),
    (DoubleScores, "test_scores_are_finite_float32"),
    (InfiniteScores, "test_scores_are_finite_float32"),
    (TrainsInPlace, "test_inputs_are_left_alone"),
    (AppliesInPlace, "test_inputs_are_left_alone"),
    (ScoresInPlace, "test_inputs_are_left_alone"),
    (HiddenGenerator, "test_the_same_seed_gives_the_same_bits"),
    (HiddenCounter, "test_the_same_seed_gives_the_same_bits"),
    (LooksAtNeighbours, "test_a_batch_of_clients_equals_one_client_at_a_time"),
    (NormalisesTheStack, "test_a_batch_of_clients_equals_one_client_at_a_time"),
    (ScoresByStack, "test_a_batch_of_clients_equals_one_client_at_a_time"),
    (LooksLater, "test_rounds_to_come_are_exact_too"),
    (ServesAnOldTable, "test_what_is_served_is_enough"),
    (PoolsMany, "test_a_pooled_method_says_so"),
    (UploadsTheVector, "test_private_never_travels"),
    (UploadsItsChange, "test_private_never_travels"),
    (UploadsOwnRows, "test_private_never_travels"),
    (NeedsSomebody, "test_an_empty_batch"),
    (FailsOnNewUsers, "test_fold_in_leaves_the_shared_part_alone"),
    (ExportsOtherRows, "test_a_device_scores_as_the_run_does"),
    (LearnsNothing, "test_it_learns_or_says_that_it_does_not"),
]


@pytest.mark.parametrize(("broken", "rule"), BROKEN, ids=[b.__name__ for b, _ in BROKEN])
def test_the_contract_catches(broken, rule):
    assert issubclass(broken, Method)
    with pytest.raises((AssertionError, pytest.fail.Exception, IndexError)):
        getattr(contract_of(broken), rule)()


class LastBits(FedMF):
    """Scores as a matrix product does, whose last bits depend on the number of rows."""

    def score(self, shared, private, history):
        scores = super().score(shared, private, history)
        return scores if len(history) == 1 else np.nextafter(scores, np.float32(1))


@pytest.mark.parametrize(
    ("broken", "words"),
    [
        (LastBits, r"scores of client 5 .* last bits of a matrix product .* one client at a time"),
        (NormalisesTheStack, r"more than rounding: .* Means or maxima over the batch"),
    ],
)
def test_the_contract_says_why_a_batch_differs(broken, words):
    with pytest.raises(AssertionError, match=words):
        contract_of(broken).test_a_batch_of_clients_equals_one_client_at_a_time()


def test_every_rule_has_somebody_who_breaks_it():
    assert {rule for _, rule in BROKEN} == set(RULES)
