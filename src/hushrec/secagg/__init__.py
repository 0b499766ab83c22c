"""Secure aggregation: the server learns the sum of the nodes' vectors, and no vector.

Bonawitz et al., "Practical Secure Aggregation for Privacy-Preserving Machine Learning" (CCS 2017),
with signed keys and the consistency check, over whole numbers modulo 2^64. Both sides are state
machines over bytes, independent of the transport. `docs/secure-sums.md` states what is hidden from
whom, and under which assumptions.
"""

from hushrec.secagg.keys import Identity
from hushrec.secagg.messages import Stage, SumTerms
from hushrec.secagg.protocol import NodeState, SumNode, SumServer
from hushrec.secagg.vectors import VectorLayout

__all__ = ["Identity", "NodeState", "Stage", "SumNode", "SumServer", "SumTerms", "VectorLayout"]
