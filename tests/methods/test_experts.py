"""Our experts keep the contract that other people's are held to."""

from hushrec.config import names
from hushrec.methods.statistics.embedded_experts import (
    Categories,
    Cooccurrence,
    PopularityExpert,
    RecentTransitions,
    Transitions,
)
from hushrec.methods.statistics.experts import expert_class
from hushrec.testing import ExpertContract


class TestTransitions(ExpertContract):
    expert = Transitions


class TestRecentTransitions(ExpertContract):
    expert = RecentTransitions


class TestCooccurrence(ExpertContract):
    expert = Cooccurrence


class TestCooccurrenceWithASmallHead(ExpertContract):
    expert = Cooccurrence
    options = {"dense_items": 10, "factors": 4}  # noqa: RUF012


class TestPopularity(ExpertContract):
    expert = PopularityExpert


class TestCategories(ExpertContract):
    expert = Categories


def test_every_installed_expert_of_ours_is_here():
    checked = {Transitions, RecentTransitions, Cooccurrence, PopularityExpert, Categories}
    ours = [expert_class(name) for name in names("experts")]
    assert {one for one in ours if one.__module__.startswith("hushrec.")} == checked
