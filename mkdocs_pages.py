"""What makes one site of files that each have their place in the repository.

README and its like are pages too, and are read where they are. A link is written for the
repository: here it leads to the page of the file it names, to the file itself if that is a drawing,
and where there is neither, its words stay and say the path. A line that is nothing but a link to a
Python file becomes that file. A notebook is a page of its texts and its code.
"""

from __future__ import annotations

import json
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parent
ELSEWHERE = {
    "index.md": "README.md",
    "contributing.md": "CONTRIBUTING.md",
    "security.md": "SECURITY.md",
    "changelog.md": "CHANGELOG.md",
    "benchmarks.md": "benchmarks/README.md",
    **{
        f"notebooks/{name}.md": f"examples/notebooks/{name}.ipynb"
        for name in ("compare-methods", "own-data", "privacy")
    },
}
"""Pages by the file that they are read from."""
DRAWN = (".svg", ".png")
SOURCE = re.compile(r"^\[[^\]]*\]\((?P<target>[^)\s]+\.py)\)$", re.M)
LINK = re.compile(r"\[(?P<words>[^\]]*)\]\((?P<target>[^)\s]+)\)")


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that are read from elsewhere, and the drawings that pages show."""
    for name, source in ELSEWHERE.items():
        text = (ROOT / source).read_text("utf-8")
        text = notebook_page(text, source) if source.endswith(".ipynb") else text
        files.append(File.generated(config, name, content=text))
    for drawing in sorted(ROOT.glob("experiments/**/*.svg")):
        name = drawing.relative_to(ROOT).as_posix()
        files.append(File.generated(config, name, abs_src_path=str(drawing)))
    return files


def notebook_page(text: str, source: str) -> str:
    """Return a notebook as a page; it says where to find the notebook, to run it."""
    title, *cells = json.loads(text)["cells"]
    parts = [
        "".join(title["source"]),
        f"This page is the notebook `{source}`: run it to see results.",
    ]
    for cell in cells:
        body = "".join(cell["source"])
        parts.append(f"```python\n{body}\n```" if cell["cell_type"] == "code" else body)
    return "\n\n".join([*parts, ""])


def on_page_markdown(markdown: str, page: Page, config: Any, files: Files) -> str:
    """Lead every link where the site has what it names."""
    source = ELSEWHERE.get(page.file.src_uri, f"docs/{page.file.src_uri}")
    folder = posixpath.dirname(source)

    def led(found: re.Match[str]) -> str:
        words, target = found["words"], found["target"]
        if re.match(r"[a-z]+:|#", target):
            return found[0]
        path, mark, anchor = target.partition("#")
        named = posixpath.normpath(posixpath.join(folder, path))
        if not (ROOT / named).exists():
            return found[0]  # a strict build names it
        page_of = {file: name for name, file in ELSEWHERE.items()}
        name = page_of.get(named, named.removeprefix("docs/"))
        if named in page_of or named.startswith("docs/") or named.endswith(DRAWN):
            here = posixpath.dirname(page.file.src_uri) or "."
            return f"[{words}]({posixpath.relpath(name, here)}{mark}{anchor})"
        return words if words == named else f"{words} (`{named}`)"

    def quoted(found: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join(folder, found["target"]))
        return f'```python title="{path}"\n{(ROOT / path).read_text("utf-8")}```'

    return LINK.sub(led, SOURCE.sub(quoted, markdown))
