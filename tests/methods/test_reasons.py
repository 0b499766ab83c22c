"""The reason beside an item is the largest of contributions that add up to its score."""

import numpy as np
import pytest

from hushrec.errors import ConfigError
from hushrec.methods.base import Explains, Reason, check_explains, method_class, method_names
from hushrec.methods.baselines import distinct_items
from hushrec.methods.statistics.pair_weights import solved_influence
from hushrec.testing import Federation, clients_of

HISTORIES = [[3, 9, 4], [20, 21, 22, 23, 40], [5], [], [1, 50, 1, 7]]
LISTED = np.array([[30, 3, 8, 0, -1]] * len(HISTORIES), np.int32)


def trained(name, noised=False, rounds=3, **options):
    """A few rounds: method, shared parameters, everybody's private ones, and their histories."""
    found = method_class(name).under_noise if noised else method_class(name)
    view = clients_of(HISTORIES)
    federation = Federation(found(found.Config(**options)), view)
    for _ in range(rounds):
        federation.round()
    private = federation.store.read(np.arange(len(view)))
    return federation.task.method, federation.shared, private, view


def check_by_item(parts, scores, history, found):
    """Parts [distinct items of the history, items] add up to the scores; the largest is named."""
    np.testing.assert_allclose(parts.sum(0), scores, rtol=1e-4, atol=1e-6)
    for at, item in enumerate(LISTED[0][:-1]):
        best = history[parts[:, item].argmax()] if parts[:, item].max(initial=0) > 0 else -1
        assert found[at] == Reason("similar to {}", item=best)
    assert found[-1] == Reason()


@pytest.mark.parametrize("name", ["fedals", "fcf"])
def test_a_solved_vector_is_a_sum_over_the_history(name):
    method, shared, private, view = trained(name, d=4)
    scores = method.score(shared, private, view)
    found = method.contributions(shared, private, view, LISTED)
    touched = distinct_items(view.positives)
    for client in range(len(view)):
        # The score is linear in the right side, a sum over the history: one item at a time.
        own = shared["items"][touched[client]]
        whole = method.vectors(shared["items"], touched)[client]
        if not len(own):
            assert not whole.any() and found[client][0] == Reason("similar to {}")
            continue
        c, m = method.config, len(shared["items"])
        everything = np.array([np.outer(q, q) for q in shared["items"]]).sum(0)
        factor = 1.0
        if name == "fcf":
            everything, ridge, factor = everything / c.alpha, c.ridge / c.alpha, 1 + 1 / c.alpha
        else:
            everything = everything * c.unseen
            ridge = c.ridge * (len(own) + c.unseen * m) ** c.frequency
        matrix = everything + own.T @ own + ridge * np.eye(c.d)
        parts = np.array([factor * shared["items"] @ np.linalg.solve(matrix, q) for q in own])
        fast = solved_influence(own, everything, shared["items"], ridge)
        np.testing.assert_allclose(factor * fast, parts, rtol=1e-6, atol=1e-12)
        check_by_item(parts, scores[client], touched[client], found[client])


def test_a_vector_under_noise_is_a_sum_over_the_last_items_of_the_head():
    method, shared, private, view = trained("fedals", noised=True, rounds=0, d=4)
    shared = {**shared, "head": np.arange(60) % 2 == 0}
    scores = method.score(shared, private, view)
    found = method.contributions(shared, private, view, LISTED)
    for client in range(len(view)):
        past = [item for item in view.positives[client].tolist() if item % 2 == 0][::-1]
        weights = [g**-method.config.recency for g in range(1, len(past) + 1)]
        table = shared["items"]
        parts = np.array([w * table @ table[i] for w, i in zip(weights, past, strict=True)])
        check_by_item(parts.reshape(-1, 60), scores[client], past, found[client])


@pytest.mark.parametrize(
    ("name", "options"),
    [("fedrap", {"d": 4, "bias": True}), ("pfedrec", {"d": 4}), ("pfedrec", {"own_share": 0.5})],
)
def test_two_tables_are_compared_by_what_each_adds(name, options):
    """Each part is what `score` itself gives with the other table taken out."""
    method, shared, private, view = trained(name, **options)
    scores, bias = method.score(shared, private, view), np.asarray(private["bias"])[:, None]
    if name == "fedrap":
        by_shared = method.score(*method.with_global_table(shared, private), view) - bias
        nothing = {"common": np.zeros_like(shared["common"])}
        by_own = method.score(nothing, private, view) - bias
        np.testing.assert_allclose(by_shared + by_own + bias, scores, rtol=1e-4, atol=1e-5)
    else:
        received = {**shared, "items": shared["received"]}
        by_shared = method.score(*method.with_global_table(received, private), view) - bias
        by_own = scores - bias - by_shared
    words = np.where(by_own > by_shared, "your own item table", "the shared item table")
    found = method.contributions(shared, private, view, LISTED)
    for client, listed in enumerate(LISTED):
        expected = [*words[client, listed[:-1]].tolist(), ""]
        assert [reason.words for reason in found[client]] == expected
    assert len(np.unique(words)) == 2, "both occur"


def test_baselines_say_what_they_count():
    method, shared, private, view = trained("personal-frequency", rounds=1)
    found = method.contributions(shared, private, view, LISTED)
    assert [reason.words for reason in found[0]] == ["popular", "had before", *["popular"] * 2, ""]
    popular = method_class("popularity")().contributions(shared, private, view, LISTED)
    assert [reason.words for reason in popular[0]] == [*["popular"] * 4, ""]


def test_who_gives_no_reason_says_why():
    for name in method_names():
        method = method_class(name)()
        if isinstance(method, Explains):
            check_explains(method)
        else:
            with pytest.raises(ConfigError, match=f"^{name} gives no reasons for its lists: "):
                check_explains(method)
    mlp = method_class("pfedrec").Config(score_function="mlp")
    with pytest.raises(ConfigError, match="the output of a network"):
        check_explains(method_class("pfedrec")(mlp))
