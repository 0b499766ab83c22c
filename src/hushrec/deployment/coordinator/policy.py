"""How a federation is run: deadlines, how many nodes it takes, and what is put up with.

None of it is part of the experiment: as long as every node answers, it changes no result.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from hushrec.config import Settings

Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class Rules(Settings):
    """What the server waits for and puts up with."""

    nodes: Annotated[int, Field(ge=1)] = 2
    """Nodes that a run begins with, at least; it waits for so many to enrol."""
    min_nodes: Annotated[int, Field(ge=1)] = 2
    """Nodes that must answer for a round, or a look, to count; with fewer the run stops, and goes
    on with --resume."""
    enrol_seconds: Seconds = 300.0
    """How long to wait for them."""
    round_seconds: Seconds = 300.0
    """Deadline of a round, and of a look; who has not answered by then sits it out. Of a secure
    sum, it is that of each stage."""
    retries: Annotated[int, Field(ge=0)] = 3
    """How often a node whose answer was lost is asked again within the deadline."""
    backoff_seconds: Seconds = 2.0
    """Wait before the first time, twice as long before each of the next."""
    offences: Annotated[int, Field(ge=1)] = 3
    """Answers that cannot be used after which a node is asked no more."""
    largest_norm: Seconds = 1e6
    """Largest L2 norm of a client's part in a sum, where no clipping promises a smaller one."""
    rebind: bool = False
    """Whether a node may come back under another identity of the transport, as one without a key
    does. With authentication, leave it off: a name then belongs to the key that enrolled it."""
