"""hushrec: personalised, private, federated recommendation.

>>> data = hushrec.load("ml-100k")
>>> run = hushrec.train(data, method="pfedrec")
>>> run.metrics["full"]["hr@10"]
>>> run.recommend("42", k=10)
"""

from hushrec.clients import TrainView
from hushrec.data import Interactions, load
from hushrec.errors import HushrecError
from hushrec.methods.base import Method
from hushrec.run import Recommendation, Run, train

__all__ = [
    "HushrecError",
    "Interactions",
    "Method",
    "Recommendation",
    "Run",
    "TrainView",
    "load",
    "train",
]
__version__ = "0.1.0"
