"""`make test-quick`: the unit and contract tests of what a change touches, without the slow ones.

A change is what differs from the upstream branch, or from the last commit where there is none,
with everything that is not committed yet. Tests mirror the sources, so a changed package means its
folder of tests; the rules of the layout are always checked.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

REPO = Path(__file__).resolve().parents[1]
ALWAYS = ("test_imports.py", "test_layout.py", "test_public.py")
BENEATH = {
    "kernels": ("methods/test_contract.py", "training"),
    "training": ("methods/test_contract.py",),
    "aggregation": ("federation", "methods/test_contract.py"),
    "private": ("methods/test_contract.py",),
    "streams": ("methods/test_contract.py",),
}
"""Tests elsewhere that show first what a change of these packages breaks."""


def git(*words: str) -> list[str]:
    """Return the lines of a command of git's; none where it fails."""
    done = subprocess.run(["git", *words], cwd=REPO, capture_output=True, text=True)
    return done.stdout.splitlines() if done.returncode == 0 else []


def changed_files() -> list[Path]:
    """Return the files that the change touches."""
    base = git("merge-base", "HEAD", "@{upstream}") or git("rev-parse", "HEAD~1") or ["HEAD"]
    names = [*git("diff", "--name-only", base[0]), *git("ls-files", "-o", "--exclude-standard")]
    return [Path(name) for name in names]


def tests_of(changed: list[Path]) -> list[str]:
    """Return the test files and folders for changed files, relative to ``tests``."""
    wanted = set(ALWAYS)
    for path in changed:
        parts = path.parts
        if parts[0] == "tests" and path.name.startswith("test_"):
            wanted.add(Path(*parts[1:]).as_posix())
        elif parts[:2] == ("src", "hushrec") and len(parts) > 2:
            package = path.stem if len(parts) == 3 else parts[2]
            wanted |= {package, f"test_{package}.py", *BENEATH.get(package, ())}
    return sorted(name for name in wanted if (REPO / "tests" / name).exists())


def main(more: list[str]) -> int:
    """Run them; further words go to pytest."""
    tests = [f"tests/{name}" for name in tests_of(changed_files())]
    words = ["-n", "2", "-m", "not slow and not browser", *tests, *more]
    return subprocess.run([sys.executable, "-m", "pytest", *words], cwd=REPO).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
