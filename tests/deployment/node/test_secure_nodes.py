"""Secure sums on nodes: lost, cheated, killed and asked twice; noise that nobody can remove."""

import math
from collections import Counter
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from scipy.stats import chi2
from secure_nodes import QUICK, World, same
from test_nodes_backend import federated

from hushrec.aggregation import ExactSum, FixedPoint, KeyedRows, LossSum, Update, UploadShape
from hushrec.data.splitting import make_split
from hushrec.deployment.coordinator.run import RemoteBackend
from hushrec.deployment.coordinator.summing import JournalEntry, RecoveryJournal
from hushrec.deployment.node.tables import NodeConnection
from hushrec.deployment.node.worker import Worker
from hushrec.errors import ConfigError, FederationError, MessageError, RunError
from hushrec.federation import sums as vectors
from hushrec.federation.client import Download
from hushrec.federation.contract import Catalogue, Contract, SecureSums
from hushrec.federation.experiment import ExperimentRequest
from hushrec.federation.requests import EvaluationRequest, Refusal, TrainRequest
from hushrec.federation.rounds import Callback, run_rounds
from hushrec.federation.setup import set_up
from hushrec.federation.sums import ExpectedSum, StageReply, StageRequest, round_shape
from hushrec.secagg import Identity, Stage, VectorLayout
from hushrec.secagg import vectors as secagg_vectors
from hushrec.secagg.messages import Announcement
from hushrec.streams import SecretRound, Streams
from hushrec.testing import taste_world
from secure_sums import CHANCE, FRAME, body, least_likely

CENTRAL = {"privacy.mode": "central", "privacy.epsilon": 8.0, "privacy.clip": 1.0}
DISTRIBUTED = {**CENTRAL, "privacy.mode": "distributed", "privacy.nodes": 4}
PATIENT = QUICK.model_copy(update={"backoff_seconds": 1e-6})


@pytest.fixture
def world(tmp_path):
    return World(tmp_path)


# ------------------------------------------------------------ who is lost


def test_one_of_four_lost_after_the_masks_is_left_out(world):
    world.wire.lost = {("node-3", Stage.MASKED)}
    same(world.train(), world.exact(without=["node-3"]))
    assert world.rounds() == [1, 1, 0, 1]
    world.wire.lost = set()
    assert world.train(2).summed.clients == len(world.cohort), "it is back in the next round"
    assert world.rounds() == [2, 2, 2, 2]


def test_who_is_lost_after_its_vector_came_is_in_the_sum(world):
    world.wire.lost = {("node-3", Stage.CONSISTENCY)}
    same(world.train(), world.exact())


@pytest.mark.parametrize("stage", Stage)
def test_two_of_four_lost_fails_closed_and_goes_on_later(world, stage):
    """Nothing is opened; who has not revealed is in another sum, with the same result."""
    world.wire.lost = {("node-2", stage), ("node-4", stage)}
    with pytest.raises(FederationError, match=r"2 of 4 nodes .* 3 are needed .* go on with"):
        world.train()
    world.wire.lost = set()
    before = len(world.wire.seen)
    same(world.train(), world.exact())
    # A sum that was about to be opened is opened; any other is made anew.
    stages = {step.stage for _, step, _, _ in world.wire.seen[before:]}
    assert stages == ({Stage.REVEALED} if stage == Stage.REVEALED else set(Stage))
    assert world.rounds() == [1, 1, 1, 1]


def test_a_server_that_died_after_the_sum_was_opened_still_has_it(world):
    opened = world.train()
    before = len(world.wire.seen)
    same(opened, world.train())
    assert len(world.wire.seen) == before, "nobody was asked again"


def test_a_round_that_nodes_have_closed_is_lost_without_its_sum(world):
    world.train()
    world.made.journal.clear()
    collected = world.train()
    assert collected.lost
    assert collected.summed.clients == 0
    (told,) = world.events.of("lost")
    assert "opened before by node-1, node-2, node-3, node-4" in told.why
    assert world.train(2).summed.clients == len(world.cohort)


class Kept(Callback):
    """Keeps the records and the models of all rounds."""

    def __init__(self, state):
        self.state, self.lines, self.models = state, [], []

    def on_round_end(self, record):
        self.lines.append(record)
        self.models.append(self.state.shared)


class Forgetful:
    """A server that forgets in round 2 that it had this sum."""

    def __init__(self, world):
        self.nodes, self.journal = world.backend(), world.made.journal

    def train(self, download, *more):
        if download.round == 2:
            self.nodes.train(download, *more)
            self.journal.clear()
        return self.nodes.train(download, *more)

    def __getattr__(self, name):
        return getattr(self.nodes, name)


def test_the_loop_goes_on_without_a_lost_round(tmp_path):
    world = World(tmp_path, **CENTRAL)
    kept = Kept(world.state)
    run_rounds(replace(world.server, backend=Forgetful(world)), world.state, [kept])
    assert [line.lost for line in kept.lines] == [False, True, False]
    assert kept.lines[1].loss is None
    first, second, third = kept.models
    assert all(np.array_equal(first[name], second[name]) for name in first)
    assert not all(np.array_equal(first[name], third[name]) for name in first)
    (rounds,) = (event["count"] for event in world.state.account)
    assert rounds == 3, "it is accounted for all the same: somebody may have seen the sum"


def test_a_method_that_builds_on_every_round_stops(tmp_path):
    world = World(tmp_path, method="fedmf", **CENTRAL)
    world.experiment = world.experiment.model_copy(update={"rounds": 1})
    world.train()
    world.made.journal.clear()
    with pytest.raises(FederationError, match="fedmf cannot do without it: begin a new run"):
        world.train()


# ------------------------------------------------------------ what the server sees


def masked(world, name="node-1"):
    said = dict(world.wire.answers(Stage.MASKED))[name]
    return body(StageReply.from_bytes(said).message)


def test_what_the_server_gets_is_uniform(tmp_path):
    world = World(tmp_path, d=64)
    world.train()
    vector = exact_vector(world)
    assert len(masked(world)) == len(vector) > 3000
    for name in world.made.partition:
        assert least_likely(masked(world, name), vector) > CHANCE
    first = masked(world)
    world.backend().evaluate(world.task.method.serving(world.task.initial), "valid")
    assert least_likely(masked(world), np.zeros(1)) > CHANCE, "a look is masked too"
    # Nor do two sums of the same vector tell anything together.
    world.train(2)
    assert least_likely(masked(world) - first, vector) > CHANCE


def test_without_masks_it_is_not(tmp_path, monkeypatch):
    class Zeros:
        def update_into(self, data, into):
            into[:] = data

        def update(self, data):
            return data

    monkeypatch.setattr(secagg_vectors, "keystream", lambda key: Zeros())
    world = World(tmp_path, d=64)
    same(world.train(), world.exact())
    assert least_likely(masked(world), exact_vector(world)) < CHANCE


def exact_vector(world):
    """The vector of all nodes together, which each one's is like."""
    found, download = world.exact(), world.download()
    protection = world.task.protection_of(download.to(world.cohort[:0]))
    shape = vectors.round_shape(world.task, protection, download)
    form = vectors.RoundVector(shape, len(world.cohort), 2**30)
    total = vectors.NodeSum("run", 1, found.summed, found.loss, found.up_bytes, found.zeroed_out)
    return np.frombuffer(b"".join(form.pack(total, 1)), np.int64)


# ------------------------------------------------------------ a server that cheats


def test_a_forged_key_is_noticed_by_name(world):
    def forge(name, step, request):
        if step is None or name != "node-1" or step.stage != Stage.SHARES:
            return request
        said = bytearray(step.message)
        said[FRAME + 1 + Announcement.size(32)] ^= 1  # the key of the second node
        return replace(step, message=bytes(said)).to_bytes()

    world.wire.change = forge
    same(world.train(), world.exact(without=["node-1"]))
    (told,) = world.events.of("declined")
    assert told.node == "node-1"
    assert "the keys of node 'node-2' are not signed by it" in told.why


def test_nodes_that_are_sent_different_models_have_no_sum(world):
    """Else a server could make all others' updates nothing, and read what is left."""
    backend, download = world.backend(), world.download()
    protection = world.task.protection_of(download.to(world.cohort[:0]))
    requests = {}
    for name, assignment in backend.assignments.items():
        shift = np.float32(name == "node-2")
        common = {key: array + shift for key, array in download.common.items()}
        shared = replace(download, common=common, own={}).to_bytes()
        requests[name] = TrainRequest(assignment, 0, assignment.clients, shared)
    shape = round_shape(world.task, protection, download)
    expected = ExpectedSum(backend.roster.run, 1, 0, shape, 1e6, 2**60)
    _, names = backend.summing.train(requests, expected)
    assert names == ("node-1", "node-3", "node-4")
    (told,) = world.events.of("refused")
    assert told.node == "node-2"
    assert "goes by other terms" in told.why


def test_a_node_trains_all_of_its_clients_or_none(world):
    world.cohort = world.cohort[1:]
    world.train()
    told = world.events.of("declined")
    assert [each.node for each in told] == ["node-1"], "who holds the client that was left out"
    assert "some of this node's clients" in told[0].why


def test_a_round_is_summed_again_from_the_same_only(world):
    world.wire.lost = {("node-2", Stage.CONSISTENCY), ("node-4", Stage.CONSISTENCY)}
    with pytest.raises(FederationError):
        world.train()
    world.wire.lost = set()
    shared = {name: array + np.float32(1) for name, array in world.task.initial.items()}
    with pytest.raises(FederationError):
        world.train(shared=shared)
    assert {told.why for told in world.events.of("declined")} == {
        "the server asks for round 1 again, with something else than before"
    }


def asked_of(world, name):
    assignment, download = world.backend().assignments[name], world.download()
    own, shared = download.to(assignment.clients).own, replace(download, own={}).to_bytes()
    return TrainRequest(assignment, 0, assignment.clients, shared, own)


def test_nothing_leaves_in_the_clear(world):
    assignment = world.backend().assignments["node-1"]
    serving = Download(1, world.task.method.serving(world.task.initial)).to_bytes()
    evaluate = EvaluationRequest(assignment, 1, "valid", 0, False, serving)
    for request in (asked_of(world, "node-1"), evaluate):
        answer = Refusal.from_bytes(world.made.answering("node-1")(request.to_bytes()))
        assert "this node sends none in the clear" in answer.why
    with (
        world.made.store("node-1") as store,
        pytest.raises(ConfigError, match="has no identity for them: start it from its folder"),
    ):
        Worker(store)


def test_a_vector_beyond_all_measure_is_refused(tmp_path, monkeypatch):
    world = World(tmp_path, secure=SecureSums(most_bytes=2**10))
    with pytest.raises(ConfigError, match=r"than the 1,024 .* use a method with smaller uploads"):
        world.train()
    allowed = vectors.RoundVector.layout
    monkeypatch.setattr(vectors.RoundVector, "layout", property(lambda form: longer(form)))

    def longer(form):
        return allowed.func(replace(form, most_bytes=2**30)) if on_server else allowed.func(form)

    on_server = True
    answers = world.made.wire.workers

    def answer(name, message):
        nonlocal on_server
        on_server = False
        try:
            return answers[name](message)
        finally:
            on_server = True

    world.wire.nodes = {name: partial(answer, name) for name in answers}
    with pytest.raises(FederationError, match="0 nodes answered"):
        world.train()
    assert {
        "the contract lets a node send" in told.why for told in world.events.of("declined")
    } == {True}


@pytest.mark.parametrize("stage", list(Stage)[1:])
def test_steps_out_of_order_are_refused(world, stage):
    world.train()
    answer = world.made.answering("node-1")
    away = "not in the set-up of sums 70" if stage == Stage.SHARES else "not in sum 70"
    for number, word in ((1, "due" if stage == Stage.MASKED else "sent"), (70, away)):
        said = Refusal.from_bytes(answer(StageRequest("run", number, stage).to_bytes()))
        assert word in said.why


# ------------------------------------------------------------ pieces, and many sums


def in_pieces(monkeypatch, size=1024):
    monkeypatch.setattr(vectors, "PIECE_BYTES", size)


def not_zero(arrays):
    """The rows of a sum that are not zero: a secure sum does not tell the others from none."""
    out = dict(arrays)
    for name in [name for name in arrays if name.startswith("ids/")]:
        rows = name.replace("ids/", "rows/", 1)
        some = arrays[rows].any(1)
        out |= {name: arrays[name][some], rows: arrays[rows][some]}
    return out


@pytest.mark.parametrize("gone", [None, 0, 3])
def test_the_default_method_is_counted_in_pieces(tmp_path, monkeypatch, gone):
    """Nodes restart for every piece; a node that is lost at a later piece is not in the sum."""
    in_pieces(monkeypatch, 2**12)
    world = World(tmp_path, method="fedmix")
    world.wire.lost = set() if gone is None else {("node-3", Stage.MASKED, gone)}
    found = world.train()
    exact = world.exact(without=[] if gone is None else ["node-3"])
    mine, theirs = not_zero(found.summed.to_arrays()), not_zero(exact.summed.to_arrays())
    assert mine.keys() == theirs.keys()
    for name in mine:
        np.testing.assert_array_equal(mine[name], theirs[name], err_msg=name)
    assert (found.loss, found.up_bytes, found.summed.clients) == (
        exact.loss,
        exact.up_bytes,
        exact.summed.clients,
    )
    pieces = {step.piece for _, step, _, _ in world.wire.seen if step}
    assert len(pieces) > 10
    assert max(len(said) for _, said in world.wire.answers(Stage.MASKED)) < 2**12 + 2**10
    spools = [path.name for path in (world.made.folder / "sums").glob("pieces-*/*")]
    assert spools == ["total"], "no node's vector is left"


def test_a_piece_is_the_same_again_and_nothing_else_is_sent(world, monkeypatch):
    in_pieces(monkeypatch)
    world.wire.lost = {(f"node-{k}", Stage.CONSISTENCY) for k in range(1, 5)}
    with pytest.raises(FederationError):
        world.train()
    answer = world.made.answering("node-1")
    asked = [
        (step, request, said)
        for name, step, request, said in world.wire.seen
        if name == "node-1" and step and step.stage == Stage.MASKED
    ]
    assert len(asked) > 2
    for _, request, said in reversed(asked):
        assert answer(request) == said
    first = asked[0][0]
    for wrong, word in [
        (replace(first, request=first.request + b" "), "sum 1 again, with something else"),
        (replace(first, message=first.message + b" "), "sum 1 again, with something else"),
        (replace(first, piece=len(asked), request=b"", message=b""), "has no piece"),
        (replace(first, number=2, piece=1), "not in sum 2"),
    ]:
        assert word in Refusal.from_bytes(answer(wrong.to_bytes())).why
    assert world.uploads()["node-1"] == {} and world.rounds() == [0, 0, 0, 0]


def test_vectors_are_removed_when_they_have_arrived(world):
    world.wire.lost = {(f"node-{k}", Stage.REVEALED) for k in (2, 4)}
    with pytest.raises(FederationError):
        world.train()
    for name in world.made.partition:
        assert world.table(name, "SELECT COUNT(*) FROM pieces") == [(0,)]


def stages(world):
    return Counter(step.stage for _, step, _, _ in world.wire.seen if step)


def play_rounds(world, backend, *numbers):
    for number in numbers:
        download = world.download(number)
        protection = world.task.protection_of(download.to(world.cohort[:0]))
        yield backend.train(download, protection, world.cohort)


def test_a_set_up_serves_rounds_and_evaluations_until_it_is_used_up(tmp_path):
    world = World(tmp_path, secure=SecureSums(setup_sums=3))
    backend = world.backend()
    (first,) = play_rounds(world, backend, 1)
    same(first, world.exact())
    backend.evaluate(world.task.method.serving(world.task.initial), "valid")
    list(play_rounds(world, backend, 2))
    assert stages(world)[Stage.KEYS] == stages(world)[Stage.SHARES] == 4
    assert stages(world)[Stage.MASKED] == stages(world)[Stage.REVEALED] == 3 * 4
    backend.evaluate(world.task.method.serving(world.task.initial), "valid")
    assert stages(world)[Stage.KEYS] == 8
    numbers = [step.number for _, step, _, _ in world.wire.seen if step and step.stage == 3]
    assert sorted(set(numbers)) == [1, 2, 3, 4]
    assert world.rounds() == [2, 2, 2, 2]


def test_a_node_that_was_away_at_the_set_up_is_in_the_next_one(tmp_path):
    world = World(tmp_path)
    backend = world.backend()
    away = world.wire.nodes.pop("node-3")
    (first,) = play_rounds(world, backend, 1)
    same(first, world.exact(without=["node-3"]))
    assert stages(world)[Stage.KEYS] == 3
    world.wire.nodes["node-3"] = away
    (second,) = play_rounds(world, backend, 2)
    assert second.summed.clients == len(world.cohort)
    assert stages(world)[Stage.KEYS] == 3 + 4
    # Whoever leaves later is lost in that sum only, without a new set-up.
    world.wire.lost = {("node-3", Stage.MASKED)}
    (third,) = play_rounds(world, backend, 3)
    assert third.summed.clients < len(world.cohort)
    assert stages(world)[Stage.KEYS] == 3 + 4


def test_a_node_takes_no_more_clients_than_there_are(world):
    """The words are as wide as the number of clients in the request needs."""
    form = vectors.RoundVector(
        UploadShape(3, {}, {}, {"x": (9, 1)}, {"x": FixedPoint(0)}), 2, 2**20
    )
    summed = ExactSum(3)
    rows = np.ones((3, 1), np.float32)
    pairs = KeyedRows(np.arange(4), np.zeros(3, np.int64), rows, space=9, grid=FixedPoint(0))
    summed.add(Update(3, {"x": pairs}))
    with pytest.raises(ConfigError, match="2 clients take part, and this node has more"):
        form.pack(vectors.NodeSum("run", 1, summed, LossSum(), 0, 0), 3)


# ------------------------------------------------------------ asked twice, killed


def contents(world):
    """Everything that a run leaves on the nodes, but for keys and numbers of sums."""
    queries = (
        "SELECT client, round, arrays FROM private ORDER BY client, round",
        "SELECT user, uploads FROM ledger ORDER BY user",
        "SELECT round, selected, masked FROM runs",
    )
    return {name: [world.table(name, each) for each in queries] for name in world.made.partition}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    world = World(tmp_path_factory.mktemp("undisturbed"), **CENTRAL)
    return contents(world), [world.train(number) for number in (1, 2)], contents(world)


def test_what_is_asked_twice_is_answered_alike_and_done_once(tmp_path, undisturbed):
    world = World(tmp_path, policy=PATIENT, **CENTRAL)
    for number in (1, 2):
        world.wire.unheard = {(name, stage) for name in world.made.partition for stage in Stage}
        same(world.train(number), undisturbed[1][number - 1])
        assert not world.wire.unheard
    said = {}
    for name, step, request, answer in world.wire.seen:
        if step is not None:
            said.setdefault((name, step.number, step.stage, request), []).append(answer)
    assert all(len(answers) == 2 and len(set(answers)) == 1 for answers in said.values())
    assert len(said) == 2 * 4 * 5
    assert contents(world) == undisturbed[2]


@pytest.mark.parametrize("when", ["in the transaction", "before the reply"])
def test_a_node_that_is_killed_goes_on(tmp_path, monkeypatch, undisturbed, when):
    """Every node dies at every stage: in the middle of writing, or before what it wrote is sent."""
    world = World(tmp_path, policy=PATIENT, **CENTRAL)
    died, real = set(), NodeConnection.transaction

    @contextmanager
    def dying(connection):
        path = connection.execute("PRAGMA database_list").fetchone()[2]
        with real(connection):
            yield
            queries = "SELECT first, request FROM setups", "SELECT number, request FROM sums"
            stages = tuple(connection.execute(query).fetchone() for query in queries)
            at = (path, stages, when)
            if when == "in the transaction" and at not in died:
                died.add(at)
                raise RuntimeError("killed")
        if when == "before the reply" and at not in died:
            died.add(at)
            raise RuntimeError("killed")

    monkeypatch.setattr(NodeConnection, "transaction", dying)
    for number in (1, 2):
        same(world.train(number), undisturbed[1][number - 1])
    monkeypatch.undo()
    assert len(died) >= 4 * 5 * 2
    assert contents(world) == undisturbed[2]


def test_who_leaves_in_the_middle_takes_the_answer_along(world):
    world.wire.lost = {(f"node-{k}", Stage.CONSISTENCY) for k in range(1, 5)}
    with pytest.raises(FederationError):
        world.train()
    request = next(r for n, s, r, _ in world.wire.seen if s and s.stage == 3 and n == "node-1")
    with world.made.store("node-1") as store:
        store.forget(store.one("SELECT name FROM users LIMIT 1"))
    answer = Refusal.from_bytes(world.made.answering("node-1")(request))
    assert "went with a user who left" in answer.why
    world.wire.lost = set()
    assert world.train().summed.clients == len(world.cohort) - 1


# ------------------------------------------------------------ the ledger


def test_a_failed_sum_is_paid_for_once(tmp_path):
    """The vectors left, so the round is paid for; the same round in another sum is not again."""
    world = World(tmp_path, **CENTRAL)
    world.wire.lost = {("node-2", Stage.MASKED), ("node-4", Stage.CONSISTENCY)}
    with pytest.raises(FederationError):
        world.train()
    everybody = {name: {1: len(held.users)} for name, held in world.made.partition.items()}
    assert world.uploads() == {**everybody, "node-2": {}}
    assert world.rounds() == [0, 0, 0, 0]
    world.wire.lost = set()
    world.train()
    assert world.uploads() == everybody
    world.train(2)
    assert world.uploads() == {name: {2: paid[1]} for name, paid in everybody.items()}


BUDGETS = {
    **{"privacy.mode": "local-gaussian", "privacy.clip": 1.0, "privacy.budgets": "activity"},
    **{"privacy.epsilon_min": 1.0, "privacy.epsilon_max": 8.0, "privacy.budget_uploads": 1},
    "privacy.noise_seed": 0,
}


@pytest.mark.parametrize("again", [True, False])
def test_budgets_pay_for_a_repeated_round_once(tmp_path, again):
    """With one upload paid for, everybody is in a second sum of the first round, and in no other
    round; what was trained for a sum that failed counts for nothing."""
    world = World(tmp_path, method="fedmf", **BUDGETS)
    world.wire.lost = {("node-2", Stage.CONSISTENCY), ("node-4", Stage.CONSISTENCY)}
    with pytest.raises(FederationError):
        world.train()
    world.wire.lost = set()
    if again:
        assert world.train().summed.clients == len(world.cohort)
    assert world.train(2).summed.clients == 0
    kept = world.table("node-1", "SELECT round, COUNT(*) FROM private GROUP BY round")
    assert kept == ([(1, len(world.made.partition["node-1"].users))] if again else [])


# ------------------------------------------------------------ noise that nodes add


def noise_of(found, exact):
    """What was added to every entry of a sum, in units."""
    mine, theirs = found.summed.total(), exact.summed.total()
    parts = []
    for name, (ids, rows) in mine.rows.items():
        table = np.zeros((60, rows.shape[1]))
        table[ids] = rows
        table[theirs.rows[name][0]] -= theirs.rows[name][1]
        parts.append(table.ravel())
    parts += [(array - theirs.dense[name]).ravel() for name, array in mine.dense.items()]
    return np.concatenate(parts)


@pytest.mark.parametrize("gone", [(), ("node-3",)])
def test_the_noise_of_an_opened_sum_is_as_accounted(tmp_path, gone):
    world = World(tmp_path, d=64, **DISTRIBUTED)
    world.wire.lost = {(name, Stage.MASKED) for name in gone}
    found = world.train()
    assert found.noised
    left = noise_of(found, world.exact(without=gone))
    layer = world.plan.protection.mechanisms[-1]
    std, nodes, tolerated = layer.noise_std(), 4, 1
    assert (layer.nodes, layer.tolerated) == (nodes, tolerated)
    expected = std * math.sqrt((nodes - len(gone)) / (nodes - tolerated))
    assert expected >= std * (1 - 1e-12)
    low, high = chi2.ppf([1e-6, 1 - 1e-6], len(left)) / len(left)
    assert low < left.var() / expected**2 < high
    # And nobody adds any more.
    protection = world.task.protection_of(world.download())
    secret = SecretRound(1, world.task.secret)
    before = np.concatenate([rows.ravel() for _, rows in found.summed.total().rows.values()])
    total, _ = protection.finish(found.summed, secret, shared=found.noised)
    again = np.concatenate([rows.ravel() for _, rows in total.rows.values()])
    np.testing.assert_array_equal(again, before)


def test_the_noise_of_another_sum_is_another(tmp_path):
    """Of the same round too: what failed and is summed again must not show the difference."""
    world = World(tmp_path, d=64, **DISTRIBUTED)
    world.wire.lost = {("node-2", Stage.REVEALED), ("node-4", Stage.REVEALED)}
    with pytest.raises(FederationError):
        world.train()
    vectors_left = []
    with world.made.store("node-2") as store:
        worker = Worker(store, credentials=world.made.credentials("node-2"))
        for number in (7, 8):
            request, run = asked_of(world, "node-2"), worker.runs.get("run")
            pieces, _ = worker.sums._train(run, request, "digest", number)
            vectors_left.append(np.frombuffer(b"".join(pieces), np.int64))
    # The loss comes first, and the counts last.
    one, other = (each[5:-5].astype(float) / 2**32 for each in vectors_left)
    share = world.plan.protection.mechanisms[-1].noise_std() / math.sqrt(3)
    assert (one - other).std() == pytest.approx(math.sqrt(2) * share, rel=0.1)
    for each in vectors_left:
        for part in (slice(5), slice(-5, None)):
            assert np.array_equal(each[part], vectors_left[0][part])


@pytest.mark.parametrize("method", ["pfedrec", "fednext"])
def test_a_distributed_run_ends_with_what_it_promised(tmp_path, method):
    settings = {name: value for name, value in DISTRIBUTED.items() if name != "privacy.clip"}
    world = World(tmp_path, method=method, **settings)
    run_rounds(replace(world.server, backend=world.backend()), world.state)
    said = world.plan.statement(world.state.account, world.state.round)
    assert said.epsilon <= 8
    assert said.trust == "nodes"
    assert all(np.isfinite(array).all() for array in world.state.shared.values())


# ------------------------------------------------------------ what is agreed


def test_a_node_must_be_who_it_is(world):
    made = world.made
    made.identities["node-1"] = Identity.generate()
    with (
        made.store("node-1") as store,
        pytest.raises(ConfigError, match="registered with another identity, or not at all"),
    ):
        Worker(store, credentials=made.credentials("node-1"))
    same(world.train(), world.exact(without=["node-1"]))


def test_a_journal_counts_on_and_keeps_the_last_entry(tmp_path):
    folder, layout = tmp_path / "sums", VectorLayout({"x": (3,)})
    assert RecoveryJournal(folder).read() is None
    assert [RecoveryJournal(folder).next_number() for _ in range(3)] == [1, 2, 3]
    assert RecoveryJournal(folder).next_number(count=8) == 4
    for number, about in ((1, "one"), (2, "two")):
        RecoveryJournal(folder).pieces(number, layout).write("total", 0, b"abc")
        RecoveryJournal(folder).write(JournalEntry(number, 1, about))
    assert RecoveryJournal(folder).read().about == "two"
    assert [path.name for path in folder.glob("pieces-*")] == ["pieces-2"]
    assert RecoveryJournal(folder).pieces(2, layout).read("total", 0) == b"abc"
    RecoveryJournal(folder).clear()
    assert RecoveryJournal(folder).read() is None
    assert RecoveryJournal(folder).next_number() == 12
    assert not list(folder.glob("pieces-*"))
    assert {file.stat().st_mode & 0o777 for file in folder.iterdir()} == {0o600}


@pytest.mark.parametrize("file", ["sum-kept", "pieces-1/total"])
def test_a_damaged_journal_is_a_sentence(world, file):
    world.train()
    path = world.made.folder / "sums" / file
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(RunError, match="damaged"):
        world.train()


def test_a_server_that_starts_again_goes_on_with_its_journal(world, tmp_path):
    world.made.journal = RecoveryJournal(tmp_path / "sums")
    world.train()
    world.made.journal = RecoveryJournal(tmp_path / "sums")
    same(world.train(), world.exact())
    world.train(2)
    assert world.rounds() == [2, 2, 2, 2]


def test_a_higher_threshold_is_held_to(tmp_path):
    world = World(tmp_path, secure=SecureSums(threshold=4))
    world.wire.lost = {("node-1", Stage.KEYS)}
    with pytest.raises(FederationError, match=r"3 of 4 nodes .* 4 are needed"):
        world.train()


def agreed(secure, nodes=4, **settings):
    made = Contract(
        ExperimentRequest("tastes", "pfedrec", settings=settings).experiment(),
        Catalogue.of(taste_world()),
        secure,
    )
    made.check_nodes(nodes)
    return made


@pytest.mark.parametrize(
    ("secure", "settings", "match"),
    [
        (None, DISTRIBUTED, "distributed noise needs secure sums"),
        (SecureSums(), {**DISTRIBUTED, "privacy.nodes": 5}, "4 nodes are registered"),
        (SecureSums(), {**DISTRIBUTED, "privacy.tolerated": 0}, "use privacy.tolerated = 1"),
        (SecureSums(colluders=1), DISTRIBUTED, "1 may tell their noise: use privacy.tolerated = 2"),
        (SecureSums(colluders=2), {}, "claim at most 1, or raise the threshold"),
        (SecureSums(threshold=2), {}, "it must be more than half"),
        (SecureSums(threshold=5), {}, "no more than there are"),
        (SecureSums(min_nodes=5), {}, "cannot need 5 of them"),
        (
            SecureSums(),
            {"cohort.kind": "fixed", "cohort.size": 9},
            "secure sums need cohort.kind = all",
        ),
    ],
)
def test_what_does_not_fit_is_refused(secure, settings, match):
    with pytest.raises(ConfigError, match=match):
        agreed(secure, **settings)


def test_what_fits_travels_and_is_part_of_what_is_compared():
    fits = [
        agreed(SecureSums(), **DISTRIBUTED),
        agreed(SecureSums(threshold=4), **DISTRIBUTED, **{"privacy.tolerated": 0}),
        agreed(SecureSums(colluders=1), **DISTRIBUTED, **{"privacy.tolerated": 2}),
        agreed(SecureSums()),
        agreed(None),
    ]
    for each in fits:
        again = Contract.from_bytes(each.to_bytes())
        assert again.secure == each.secure
        assert again.settings_digest == each.settings_digest
    assert len({each.settings_digest for each in fits}) == len(fits)
    unsaid = fits[0].to_bytes().replace(b'\\"secure\\"', b'\\"secret\\"')
    with pytest.raises(MessageError, match="header is invalid: 'secure': Field required"):
        Contract.from_bytes(unsaid)


def test_defaults_of_noise_and_sums_fit_any_number_of_nodes():
    for nodes in range(3, 60):
        agreed(SecureSums(), nodes, **{**DISTRIBUTED, "privacy.nodes": nodes})


# ------------------------------------------------------------ what is encoded


@pytest.fixture
def encoded(monkeypatch):
    """Every download that is encoded, by the coordinator or by a node."""
    seen, plain = [], Download.to_bytes

    def to_bytes(self):
        seen.append(self)
        return plain(self)

    monkeypatch.setattr(Download, "to_bytes", to_bytes)
    return seen


def test_a_download_is_encoded_once_for_all_nodes_of_a_secure_sum(world, encoded):
    world.train()
    assert len(encoded) == 1
    shared = {
        TrainRequest.from_bytes(step.request).shared
        for _, step, _, _ in world.wire.seen
        if step and step.stage == Stage.MASKED
    }
    assert len(shared) == 1
    world.backend().evaluate(world.task.method.serving(world.task.initial), "valid")
    assert len(encoded) == 2


def test_a_download_is_encoded_once_for_all_nodes_in_the_clear(tmp_path, encoded):
    experiment = ExperimentRequest("tastes", "pfedrec", settings={"d": 8}, rounds=1).experiment()
    split = make_split(taste_world(), experiment.split, Streams(0))
    setup = set_up(experiment, split)
    _, session, roster = federated(tmp_path, split.data, experiment, 3)
    backend, task = RemoteBackend(setup.task, experiment, roster, session), setup.task
    download = task.download(1, task.initial, setup.clients, setup.plan.protection.state)
    found = backend.train(download, task.protection, setup.clients)
    assert found.summed.clients == len(setup.clients)
    assert len(encoded) == 1
    backend.evaluate(task.method.serving(task.initial), "valid", selected=True)
    assert len(encoded) == 2
