"""A node that is killed once, when it has sent its masked vector of the first round."""

import os
import signal
import sys
from pathlib import Path

from hushrec.cli import main
from hushrec.deployment.flower import transport as flower
from hushrec.deployment.node.worker import Worker
from hushrec.federation.sums import StageRequest
from hushrec.io.codec import kind_of
from hushrec.secagg import Stage

if __name__ == "__main__":
    done, masked = Path(sys.argv[1]) / "died", []
    plain_answer, plain_push = Worker.answer, flower.push_message

    def answer(self, message):
        if kind_of(message) == "stage" and StageRequest.from_bytes(message).stage == Stage.MASKED:
            masked.append(True)
        return plain_answer(self, message)

    def push(*arguments):
        plain_push(*arguments)
        if masked and not done.exists():
            done.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    Worker.answer, flower.push_message = answer, push
    main(["federate", "node", sys.argv[1]])
