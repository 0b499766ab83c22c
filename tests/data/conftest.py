"""Real data for the tests that need it, and a cache that is nobody's."""

import os
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def data_dir() -> Path:
    places = [os.environ.get("HUSHREC_DATA"), Path(__file__).parents[3] / "shared" / "data"]
    for place in places:
        if place and (Path(place) / "ml-100k").is_dir():
            return Path(place)
    pytest.skip("no real data: set HUSHREC_DATA to a folder with ml-100k/u.data and so on")


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    """An empty cache, and nothing elsewhere."""
    monkeypatch.delenv("HUSHREC_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "hushrec"
