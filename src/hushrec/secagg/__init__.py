"""Secure aggregation: the server learns the sum of the nodes' vectors, and no vector.

Bonawitz et al., "Practical Secure Aggregation for Privacy-Preserving Machine Learning" (CCS 2017),
with signed keys and the consistency check, over whole numbers modulo 2^16, 2^32 or 2^64. Keys are
announced and shared for many sums at once; a vector of any length travels in pieces. Both sides are
state machines over bytes, independent of the transport. `docs/secure-sums.md` states what is hidden
from whom, and under which assumptions.
"""

from hushrec.secagg.keys import Identity
from hushrec.secagg.messages import SetupTerms, Stage, SumTerms
from hushrec.secagg.node import NodeState, SetupNode, SetupState, SumNode
from hushrec.secagg.server import SetupServer, SumServer
from hushrec.secagg.vectors import VectorLayout

__all__ = [
    "Identity",
    "NodeState",
    "SetupNode",
    "SetupServer",
    "SetupState",
    "SetupTerms",
    "Stage",
    "SumNode",
    "SumServer",
    "SumTerms",
    "VectorLayout",
]
