"""Contracts: tests to inherit, which every method, expert, metric, mechanism and backend must pass.

::

    from hushrec.testing import MethodContract

    class TestMine(MethodContract):
        method = MyMethod

Run it with pytest. Needs no data and no network; the world it trains on has three groups of users,
each of which touches its own third of the items.
"""

from hushrec.testing.backend import BackendContract
from hushrec.testing.checks import Federation, clients_of, taste_world
from hushrec.testing.extensions import ExpertContract, MetricContract
from hushrec.testing.mechanism import MechanismContract
from hushrec.testing.method import MethodContract

__all__ = [
    "BackendContract",
    "ExpertContract",
    "Federation",
    "MechanismContract",
    "MethodContract",
    "MetricContract",
    "clients_of",
    "taste_world",
]
