"""hushrec: personalised, private, federated recommendation.

>>> data = hushrec.load(frame, user="customer", item="product", time="date")
>>> run = hushrec.train(data)
>>> run.evaluate("hr@10", "coverage@10").to_pandas()
>>> run.recommend(k=10).to_pandas()
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hushrec.api import Run, SeedRuns, train
    from hushrec.data import Interactions, load
    from hushrec.errors import HushrecError
    from hushrec.federation.backends import Machine
    from hushrec.federation.rounds import Callback
    from hushrec.runs.compared import Comparison
    from hushrec.runs.comparison import compare
    from hushrec.serving.data import Recommendation
    from hushrec.serving.model import Model

__all__ = [
    "Callback",
    "Comparison",
    "HushrecError",
    "Interactions",
    "Machine",
    "Model",
    "Recommendation",
    "Run",
    "SeedRuns",
    "compare",
    "load",
    "train",
]
__version__ = "0.1.0"
_HOMES = {
    "Callback": "hushrec.federation.rounds",
    "Comparison": "hushrec.runs.compared",
    "HushrecError": "hushrec.errors",
    "Interactions": "hushrec.data",
    "Machine": "hushrec.federation.backends",
    "Model": "hushrec.serving.model",
    "Recommendation": "hushrec.serving.data",
    "Run": "hushrec.api",
    "SeedRuns": "hushrec.api",
    "compare": "hushrec.runs.comparison",
    "load": "hushrec.data",
    "train": "hushrec.api",
}
"""The module of each name; it is imported when the name is first used. Extensions import from
`hushrec.extend`."""


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'hushrec' has no attribute '{name}'")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
