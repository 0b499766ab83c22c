"""Count the modules that one use of hushrec passes: ``python tests/traced.py train`` or ``round``.

A module is passed if one of its functions runs while nothing is being imported. The use runs in
a process of its own: what an earlier use has cached would not be counted.
"""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from tempfile import TemporaryDirectory

import hushrec

ROOT = str(Path(hushrec.__file__).parent)
SHORT = ("--set", "newton_rounds=2", "--set", "network_rounds=2")


class Trace:
    """A profile function that notes files, and the time outside of imports only."""

    def __init__(self):
        self.passed: set[str] = set()

    def __call__(self, frame, event, argument):
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(ROOT):
            name = str(Path(code.co_filename).relative_to(ROOT))
            if name not in self.passed and name.endswith(".py") and not self.importing(frame):
                self.passed.add(name)

    @staticmethod
    def importing(frame) -> bool:
        while frame is not None:
            if frame.f_code.co_name == "<module>" and frame.f_code.co_filename.startswith(ROOT):
                return True
            frame = frame.f_back
        return False

    def __enter__(self) -> Trace:
        threading.setprofile(self)
        sys.setprofile(self)
        return self

    def __exit__(self, *_):
        sys.setprofile(None)
        threading.setprofile(None)


def train(folder: str) -> set[str]:
    """Train the default as the command line does, with few rounds, and write the report."""
    from hushrec.cli import main

    words = ["train", "--data", "demo", "--out", f"{folder}/run", "--quiet", *SHORT]
    with Trace() as trace:
        main(words, standalone_mode=False)
    return trace.passed


def secure_round(folder: str) -> set[str]:
    """Train one round of the default over nodes that sum securely, both sides in this process."""
    sys.path.insert(0, str(Path(__file__).parent / "deployment" / "node"))
    from secure_nodes import World

    world = World(Path(folder), method="fedmix")
    with Trace() as trace:
        world.train()
    return trace.passed


if __name__ == "__main__":
    with TemporaryDirectory() as place:
        uses = {"train": train, "round": secure_round}
        print("\n".join(sorted(uses[sys.argv[1]](place))))
