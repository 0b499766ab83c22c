"""Sums that nobody can open: the server learns what all nodes' vectors add up to, and no vector.

Bonawitz et al., "Practical Secure Aggregation for Privacy-Preserving Machine Learning" (CCS 2017),
with signed keys and the round of consistency, over whole numbers modulo 2^64. No transport is known
here: both sides are state machines that take bytes and give bytes. `docs/secure-sums.md` says who
is kept from learning what, and where that ends.
"""

from hushrec.secagg.keys import Identity
from hushrec.secagg.layout import Layout
from hushrec.secagg.messages import Stage, Terms
from hushrec.secagg.node import Node, NodeState
from hushrec.secagg.server import Server

__all__ = ["Identity", "Layout", "Node", "NodeState", "Server", "Stage", "Terms"]
