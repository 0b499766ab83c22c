"""A node that answers each round with something else that must not count."""

import os
import pickle
import sys
from dataclasses import replace

import numpy as np

from hushrec.cli import main
from hushrec.deployment.node.worker import Worker
from hushrec.federation.requests import TrainRequest
from hushrec.federation.sums import NodeSumMessage
from hushrec.io.codec import kind_of
from hushrec.kernels import pairs

KINDS = ("nan", "shape", "replay", "norm", "size", "noise", "pickle")
"""By round, from the first on."""


class Evil:
    """Spoils honest answers."""

    def __init__(self):
        self.first = b""

    def spoil(self, number, honest):
        sent = NodeSumMessage.from_bytes(honest)
        arrays = dict(sent.arrays)
        self.first = self.first or honest
        name = next(name for name in arrays if not name.startswith("ids/"))
        kind, size = KINDS[number - 1], arrays[name].size
        if kind == "nan":
            arrays[name] = np.full(size // 8, np.nan)
        elif kind == "shape":
            arrays[name] = arrays[name][..., :-1]
        elif kind == "norm":
            count, whole = np.count_nonzero(arrays[name] < 128), [0] * len(sent.shifts[name])
            large = np.full((count // len(whole), len(whole)), int(1e9 / count**0.5) << 32)
            arrays[name] = pairs.write_steps(large, np.array(whole))
            sent = replace(sent, shifts={**sent.shifts, name: tuple(whole)})
        elif kind == "replay":
            return self.first
        elif kind == "size":
            return os.urandom(500_000_000)
        elif kind == "noise":
            return os.urandom(1000)
        elif kind == "pickle":
            return pickle.dumps({"rows": [1, 2, 3]})
        return replace(sent, arrays=arrays).to_bytes()


if __name__ == "__main__":
    evil, plain = Evil(), Worker.answer

    def answer(self, message):
        honest = plain(self, message)
        if kind_of(message) != "train":
            return honest
        return evil.spoil(TrainRequest.from_bytes(message).download.round, honest)

    Worker.answer = answer
    main(["federate", "node", sys.argv[1]])
