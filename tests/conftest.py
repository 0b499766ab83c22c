"""Real data where it is there, and small worlds whose answer is known."""

import os
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, settings

from browsing import open_browser
from hushrec.data import Interactions
from shown_runs import answering, make_runs

# The first call of a kernel compiles it, and machines are shared: no deadlines, fixed examples, and
# no check of how long examples take to draw, which is a clock as well.
settings.register_profile(
    "hushrec",
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("hushrec")

REPO = Path(__file__).resolve().parents[1]
NEED_FLOWER = ("coordinator", "examples", "federation", "flower", "gateway", "processes")
collect_ignore = [] if find_spec("flwr") else [f"deployment/test_{n}.py" for n in NEED_FLOWER]


@pytest.fixture(scope="session")
def data_dir():
    """The folder of real data sets; `hushrec.load("ml-100k")` finds it too. Skips where absent."""
    for place in (os.environ.get("HUSHREC_DATA"), REPO.parent / "shared" / "data"):
        if place and (Path(place) / "ml-100k").is_dir():
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv("HUSHREC_DATA", str(place))
                yield Path(place)
            return
    pytest.skip("no real data: set HUSHREC_DATA to a folder with ml-100k/u.data and so on")


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    """An empty cache, and nothing elsewhere."""
    monkeypatch.delenv("HUSHREC_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "hushrec"


def interactions(rows, name="tiny", **more) -> Interactions:
    """Interactions from (user, item, time) rows; ids are the numbers as text, and declared."""
    user, item, time = (np.array(column) for column in zip(*rows, strict=True))
    return Interactions(
        name=name,
        user=user.astype(np.int32),
        item=item.astype(np.int32),
        value=np.arange(1, len(user) + 1, dtype=np.float32),
        time=time.astype(np.int64),
        users=np.array([f"u{k:03d}" for k in range(user.max() + 1)]),
        items=np.array([f"i{k:03d}" for k in range(item.max() + 1)]),
        **{"items_declared": True, **more},
    )


def blocks(n_users=30, n_items=40, n_blocks=2, length=8, seed=0) -> Interactions:
    """Every user likes one block of the items only: the best list is known."""
    rng = np.random.default_rng(seed)
    size = n_items // n_blocks
    rows = []
    for user in range(n_users):
        liked = user % n_blocks * size + rng.permutation(size)[: length + user % 3]
        rows += [(user, item, place) for place, item in enumerate(liked)]
    # Every item occurs in the vocabulary, touched or not.
    data = interactions(rows, name="blocks")
    return data.with_public_items(f"i{k:03d}" for k in range(n_items))


@pytest.fixture(scope="session")
def tiny() -> Interactions:
    """30 users, 40 items, two blocks of taste."""
    return blocks()


@pytest.fixture(scope="session")
def small() -> Interactions:
    """120 users, 60 items, three blocks of taste."""
    return blocks(120, 60, 3, length=9, seed=1)


@pytest.fixture(scope="session")
def driver(tmp_path_factory):
    """A browser."""
    browser = open_browser(tmp_path_factory.mktemp("profile"))
    yield browser
    browser.quit()


@pytest.fixture(scope="session")
def runs_folder(tmp_path_factory):
    """A folder of runs of all kinds, to be looked at."""
    folder = tmp_path_factory.mktemp("studio") / "runs"
    make_runs(folder)
    return folder


@pytest.fixture(scope="session")
def studio(runs_folder):
    """The address of a studio over these runs, without the slash at its end."""
    with answering(runs_folder) as place:
        yield place.url.rstrip("/")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the modules with slow tests first, so that no worker waits for one at the end."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)
