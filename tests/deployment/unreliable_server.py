"""A run on a server that kills itself, as ``kill -9`` would, once at each point; then it is well.

``python unreliable_server.py SERVER FATE [--resume]``: FATE is a file that remembers.
"""

import os
import signal
import sys
from pathlib import Path

from hushrec.cli import main
from hushrec.deployment.coordinator.session import Session
from hushrec.runs.recording import CheckpointCallback

POINTS = ("among-the-answers", "before-the-checkpoint", "after-the-checkpoint")


def doom(file):
    def meets(point, number):
        done = len(file.read_text().split()) if file.exists() else 0
        if done < len(POINTS) and POINTS[done] == point and number == done + 1:
            with file.open("a") as out:
                out.write(f"{point}\n")
            os.kill(os.getpid(), signal.SIGKILL)

    plain_exchange, plain_save = Session.exchange, CheckpointCallback.save

    def exchange(self, what, number, *rest):
        for found in plain_exchange(self, what, number, *rest):
            meets("among-the-answers", number)
            yield found

    def save(self):
        meets("before-the-checkpoint", self.state.round)
        plain_save(self)
        meets("after-the-checkpoint", self.state.round)

    Session.exchange, CheckpointCallback.save = exchange, save


if __name__ == "__main__":
    server, fate, *more = sys.argv[1:]
    doom(Path(fate))
    main(["federate", "run", server, "--json", *more])
