"""What documents tell people to type, and what they show for it."""

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

REPO = Path(__file__).resolve().parents[1]
DOCUMENTS = [
    *(REPO / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")),
    *sorted((REPO / "docs").rglob("*.md")),
    *(REPO / "benchmarks").glob("README.md"),
    *sorted((REPO / "examples").glob("*/README.md")),
]
PROGRAMS = ("hushrec", "make", "pip", "python", "printf")
PROMPT = "$ "


@dataclass(frozen=True)
class Step:
    """A command with the lines that are shown for it, or a piece of Python."""

    document: str
    line: int
    text: str
    shown: tuple[str, ...] = ()
    python: bool = False

    @property
    def words(self) -> list[str]:
        """The command as a program gets it."""
        return shlex.split(self.text, comments=True)

    def __str__(self) -> str:
        return f"{self.document}, line {self.line}: {self.text}"


def steps(document: Path) -> list[Step]:
    """Return what a document tells to do, in its order."""
    name = document.relative_to(REPO).as_posix()
    found: list[Step] = []
    for line, kind, block in _blocks(document.read_text("utf-8").splitlines()):
        if kind == "python":
            found.append(Step(name, line, "\n".join(block), python=True))
        elif kind in ("", "console"):
            found += _commands(name, line, block)
    return found


def titled(document: Path) -> dict[str, str]:
    """Return the files that a document shows: blocks by their title, those of one title joined."""
    found: dict[str, str] = {}
    for _, kind, block in _blocks(document.read_text("utf-8").splitlines()):
        title = re.search(r'title="([^"]+)"', kind)
        if title:
            found[title[1]] = found.get(title[1], "") + "\n".join([*block, ""])
    return found


def spoken(document: Path) -> list[Step]:
    """Return the commands of hushrec that stand in sentences."""
    name, text = document.relative_to(REPO).as_posix(), document.read_text("utf-8")
    return [
        Step(name, text[: found.start()].count("\n") + 1, " ".join(found[1].split()))
        for found in re.finditer(r"(?<!`)`(hushrec [a-z][^`]*)`(?!`)", text)
    ]


def _blocks(lines):
    """Give the first line's number, the language and the lines of every block of code."""
    block, start, kind = [], 0, None
    for number, line in enumerate([*lines, ""], 1):
        if line.startswith("```"):
            if kind not in (None, "indented"):
                yield start, kind, block
                kind = None
            else:
                block, start, kind = [], number + 1, line[3:].strip()
        elif kind not in (None, "indented"):
            block.append(line)
        elif line.startswith("    ") and (kind == "indented" or not lines[number - 2].strip()):
            if kind is None:
                block, start, kind = [], number, "indented"
            block.append(line[4:])
        elif kind == "indented":
            yield start, "", block
            kind = None


def _commands(name, start, block):
    """Take a block apart; without a prompt every line is a command or none."""
    prompted = any(line.startswith(PROMPT) for line in block)
    found, going_on = [], False
    for number, line in enumerate(block, start):
        text = line.removeprefix(PROMPT)
        if going_on:
            found[-1] = [*found[-1][:-1], found[-1][-1] + [text]]
        elif line.startswith(PROMPT) or (not prompted and text.split(" ")[0] in PROGRAMS):
            found.append([number, [], [text]])
        elif found and prompted and line.strip():
            found[-1][1].append(line)
            continue
        else:
            continue
        going_on = text.endswith("\\")
    return [
        Step(name, number, " ".join(part.rstrip("\\").strip() for part in parts), tuple(shown))
        for number, shown, parts in found
    ]
