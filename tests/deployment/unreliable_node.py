"""A node that kills itself, as ``kill -9`` would, once at each point of a round; then it is well.

``python unreliable_node.py NODE POINT [POINT ...]``: at the first point in the first round that it
trains, at the second in the second round, and so on.
"""

import os
import signal
import sys
from pathlib import Path

from hushrec.cli import main
from hushrec.deployment.flower import transport as flower
from hushrec.deployment.node.runs import NodeRuns
from hushrec.deployment.node.training import NodeTrainer

POINTS = ("before-fit", "after-fit", "in-transaction", "before-reply", "after-reply")


class Fate:
    """Which point is next; it outlives the process."""

    def __init__(self, folder, points):
        self.file, self.points = Path(folder) / "fate", points
        self.round = 0

    @property
    def next(self):
        done = len(self.file.read_text().split()) if self.file.exists() else 0
        return (done + 1, self.points[done]) if done < len(self.points) else (0, None)

    def meets(self, point):
        if self.next == (self.round, point):
            with self.file.open("a") as file:
                file.write(f"{point}\n")
            os.kill(os.getpid(), signal.SIGKILL)


def before(owner, name, fate, point):
    """Let a function begin with its fate."""
    plain = getattr(owner, name)

    def function(*arguments, **named):
        fate.meets(point)
        return plain(*arguments, **named)

    setattr(owner, name, function)


def doom(folder, points):
    fate = Fate(folder, points)
    plain_train, plain_push = NodeTrainer.train, flower.push_message

    def train(self, run, request, digest):
        fate.round = request.download.round
        fate.meets("before-fit")
        return plain_train(self, run, request, digest)

    def push(*arguments):
        fate.meets("before-reply")
        plain_push(*arguments)
        fate.meets("after-reply")

    NodeTrainer.train, flower.push_message = train, push
    before(NodeRuns, "finish_round", fate, "after-fit")
    before(NodeRuns, "_write_private", fate, "in-transaction")


if __name__ == "__main__":
    node, *points = sys.argv[1:]
    doom(node, points)
    main(["federate", "node", node])
