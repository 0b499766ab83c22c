"""The private store: memory and files behave alike."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from hushrec.aggregation import ClientRows
from hushrec.errors import ConfigError, InputError
from hushrec.private import (
    PerClient,
    PerClientRows,
    PerClientTable,
    PrivateStore,
    StoreConfig,
    store_bytes,
)

N = 11
FIELDS = {
    "vector": PerClient(np.array([1, 2, 3], np.float32)),
    "bias": PerClient(np.array(0.5, np.float32)),
    "rows": PerClientRows(np.arange(N), 2),
}


@pytest.fixture(params=["memory", "file", "both"])
def store(request, tmp_path):
    kind = "auto" if request.param == "both" else request.param
    budget = store_bytes(FIELDS, N) / 2**30 * (0.8 if request.param == "both" else 100)
    made = PrivateStore.create(FIELDS, N, StoreConfig(kind=kind, budget_gb=budget), tmp_path)
    assert (made.folder is None) == (request.param == "memory")
    return made


def values(users, seed=0):
    rng = np.random.default_rng(seed)
    count = np.array([rng.integers(0, u + 1) for u in users])
    total = int(count.sum())
    return {
        "vector": rng.random((len(users), 3), np.float32),
        "bias": rng.random(len(users), np.float32),
        "rows": ClientRows(
            np.concatenate([[0], np.cumsum(count)]),
            rng.integers(0, 99, total).astype(np.int32),
            rng.random((total, 2), np.float32),
        ),
    }


def assert_same(first, second):
    assert first.keys() == second.keys()
    for name in first:
        if isinstance(first[name], ClientRows):
            for part in ("indptr", "ids", "rows"):
                one, two = getattr(first[name], part), getattr(second[name], part)
                np.testing.assert_array_equal(one, two)
        else:
            np.testing.assert_array_equal(first[name], second[name])
            assert first[name].dtype == second[name].dtype


def test_unvisited_users_read_their_initial_value(store):
    got = store.read(np.array([3, 0]))
    np.testing.assert_array_equal(got["vector"], [[1, 2, 3], [1, 2, 3]])
    np.testing.assert_array_equal(got["bias"], [0.5, 0.5])
    assert got["rows"].indptr.tolist() == [0, 0, 0]
    assert got["rows"].rows.shape == (0, 2)
    assert not store.visited.any()


def test_what_is_written_is_read_in_any_order(store):
    users = np.array([7, 2, 10])
    written = values(users)
    store.write(users, written)
    store.release()
    assert_same(store.read(users), written)
    back = store.read(np.array([2, 0, 10]))
    np.testing.assert_array_equal(back["vector"][0], written["vector"][1])
    np.testing.assert_array_equal(back["vector"][1], [1, 2, 3])
    assert np.flatnonzero(store.visited).tolist() == [2, 7, 10]
    shorter = values(users, seed=5)
    store.write(users, shorter)
    assert_same(store.read(users), shorter)


def test_reading_gives_copies(store):
    users = np.array([5])
    store.write(users, values(users))
    first = store.read(users)
    first["vector"][:] = 9
    first["rows"].rows[:] = 9
    assert_same(store.read(users), values(users))


def test_snapshot_is_independent(store):
    users = np.array([1, 4])
    store.write(users, values(users))
    copy = store.snapshot()
    assert (copy.folder is None) == (store.folder is None)
    more = np.array([4, 9])
    store.write(more, values(more, seed=1))
    assert_same(copy.read(users), values(users))
    assert copy.visited.sum() == 2
    again = store.snapshot(copy)
    assert again is copy
    assert_same(copy.read(np.arange(N)), store.read(np.arange(N)))


@pytest.mark.parametrize("part_bytes", [1, 40, 2**20])
def test_tensors_round_trip(store, tmp_path, monkeypatch, part_bytes):
    monkeypatch.setattr("hushrec.private.PART_BYTES", part_bytes)
    users = np.array([0, 3, 8, 10])
    store.write(users, values(users))
    parts = list(store.tensors())
    assert len(parts) == {1: 4, 40: 2 if store_bytes(FIELDS, N) // N * 2 <= 40 else 4}.get(
        part_bytes, 1
    )
    for folder in (None, tmp_path / "other"):
        other = PrivateStore(FIELDS, N, folder)
        for part in reversed(parts):
            other.restore(part)
        assert_same(other.read(np.arange(N)), store.read(np.arange(N)))
        np.testing.assert_array_equal(other.visited, store.visited)


def test_a_store_without_fields(tmp_path):
    store = PrivateStore({}, 4, tmp_path)
    store.write(np.array([1]), {})
    (part,) = store.tensors()
    other = PrivateStore({}, 4)
    other.restore(part)
    assert other.visited.tolist() == [False, True, False, False]


def test_capacity_is_a_limit(store):
    full = ClientRows(np.array([0, 4]), np.arange(4, dtype=np.int32), np.ones((4, 2), np.float32))
    rest = values(np.array([3]))
    with pytest.raises(InputError, match="more rows of 'rows' than it declared"):
        store.write(np.array([3]), {**rest, "rows": full})


def test_auto_goes_by_the_budget(tmp_path):
    # 11 users of 4 floats, and 0 + 1 + … + 10 entries of an id and two floats.
    assert store_bytes(FIELDS, N) == N * 16 + 55 * 12
    assert PrivateStore.create(FIELDS, N, StoreConfig(), tmp_path).folder is None
    tight = StoreConfig(budget_gb=1e-9)
    on_file = PrivateStore.create(FIELDS, N, tight, tmp_path)
    assert on_file.folder is not None
    assert on_file.folder.parent == tmp_path
    folder = on_file.folder
    del on_file
    assert not folder.exists()  # the files go with the store


def test_what_does_not_fit_is_refused_before_it_is_allocated(tmp_path):
    huge = {"table": PerClient(np.broadcast_to(np.float32(0), (2**20, 2**10)))}
    with pytest.raises(ConfigError, match=r"store\.kind=file"):
        PrivateStore.create(huge, 2**20, StoreConfig(kind="memory"), tmp_path)
    with pytest.raises(ConfigError, match="free"):
        PrivateStore.create(huge, 2**20, StoreConfig(), tmp_path)


def test_the_first_users_to_come_are_kept_in_memory(tmp_path):
    store = PrivateStore(FIELDS, N, tmp_path, memory_bytes=store_bytes(FIELDS, N) / 2)
    file = tmp_path / "vector.private"
    early, late = np.array([2, 1]), np.array([10, 9, 8, 7, 6])
    store.write(early, values(early))
    store.release()
    assert not file.read_bytes().strip(b"\0")  # nothing has reached the file
    store.write(late, values(late, seed=1))
    assert file.read_bytes().strip(b"\0")
    assert_same(store.read(early), values(early))
    assert_same(store.read(late), values(late, seed=1))
    mixed = np.array([9, 2, 0, 10])
    np.testing.assert_array_equal(store.read(mixed)["vector"][2], [1, 2, 3])
    np.testing.assert_array_equal(
        store.read(mixed)["vector"][[0, 1]],
        [store.read(np.array([9]))["vector"][0], store.read(np.array([2]))["vector"][0]],
    )


def test_threads_place_users_without_a_clash():
    store = PrivateStore({"vector": PerClient(np.zeros(1, np.float32))}, 4000)

    def work(worker):
        for users in np.array_split(np.arange(worker, 4000, 4), 100):
            store.write(users, {"vector": users[:, None].astype(np.float32)})

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
    np.testing.assert_array_equal(store.read(np.arange(4000))["vector"][:, 0], np.arange(4000))


def test_neighbours_tables_are_read_where_they_lie_whoever_came_first():
    initial = np.ones((3, 2), np.float32)
    store = PrivateStore({"table": PerClientTable(initial)}, N)
    tables = np.random.default_rng(0).random((N, 3, 2), np.float32)
    for users in ([7, 3, 4], [5, 6, 2]):
        store.write(np.array(users), {"table": tables[users]})
    together, apart = np.arange(3, 7), np.array([2, 4])
    lying, copied = store.read(together)["table"], store.read(apart)["table"]
    np.testing.assert_array_equal(lying, tables[together])
    np.testing.assert_array_equal(copied, tables[apart])
    assert np.shares_memory(lying, store.read(together)["table"])
    assert not np.shares_memory(copied, store.read(apart)["table"])
    assert not (lying.flags.writeable or copied.flags.writeable)


def test_pages_of_files_are_given_back_while_they_are_used(tmp_path, monkeypatch):
    fields = {"table": PerClientTable(np.zeros((4, 2), np.float32))}
    store = PrivateStore(fields, N, tmp_path)
    monkeypatch.setattr("hushrec.private.MAPPED_BYTES", 3 * store.bytes_per_user)
    released, release = [], store.release

    def counted():
        released.append(store._mapped)
        release()

    monkeypatch.setattr(store, "release", counted)
    tables = np.random.default_rng(0).random((N, 4, 2), np.float32)
    for start in range(0, N, 2):
        users = np.arange(start, min(start + 2, N))
        store.write(users, {"table": tables[users]})
        np.testing.assert_array_equal(store.read(users)["table"], tables[users])
    # Every fourth user at the latest, and what is read afterwards is what was written.
    assert len(released) >= 2 * N // 6
    assert max(released) <= 5 * store.bytes_per_user
    np.testing.assert_array_equal(store.read(np.arange(N)[::-1])["table"], tables[::-1])
