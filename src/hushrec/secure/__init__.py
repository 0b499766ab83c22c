"""Sums that nobody can open: the server learns what all nodes' vectors add up to, and no vector.

Bonawitz et al., "Practical Secure Aggregation for Privacy-Preserving Machine Learning" (CCS 2017),
with signed keys and the round of consistency, over whole numbers modulo 2^64. No transport is known
here: both sides are state machines that take bytes and give bytes. `docs/secure-sums.md` says who
is kept from learning what, and where that ends.
"""

from hushrec.secure.keys import Identity
from hushrec.secure.layout import Layout
from hushrec.secure.node import Node
from hushrec.secure.server import Server
from hushrec.secure.state import NodeState
from hushrec.secure.terms import Stage, Terms

__all__ = ["Identity", "Layout", "Node", "NodeState", "Server", "Stage", "Terms"]
