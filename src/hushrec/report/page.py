"""How pages are rendered: escaped, words from anywhere made safe, nothing undefined."""

from __future__ import annotations

from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined

from hushrec.plain_text import plain
from hushrec.report.units import figure, human_duration, human_size, percent


def environment(*packages: str) -> Environment:
    """Return what renders the templates that lie in these packages."""
    made = Environment(
        loader=ChoiceLoader([PackageLoader(package, ".") for package in packages]),
        autoescape=True,
        finalize=_shown,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters |= {
        "figure": figure,
        "percent": percent,
        "size": human_size,
        "duration": human_duration,
        "count": "{:,}".format,
    }
    return made


def _shown(value: object) -> object:
    """Make words from anywhere safe; what is drawn already is."""
    return plain(value) if type(value) is str else value
