"""The types of options and arguments that are paths: checked before anything is done with them."""

from __future__ import annotations

from click.types import FuncParamType

from hushrec.paths import checked


def _left_as_given(name: str) -> str:
    """Check what may be a path, or the name of something."""
    checked(name)
    return name


PLACE = FuncParamType(checked)
"""A file or a folder, as a `Path` that can be worked with."""
PLACE.name = "path"
SOURCE = FuncParamType(_left_as_given)
"""The name of something that ships, or a file, as text."""
SOURCE.name = "source"
