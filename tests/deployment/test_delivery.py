"""Requests to nodes that fail, go silent, or come back: everybody else is waited for no longer."""

from dataclasses import dataclass, field, replace
from types import SimpleNamespace

import pytest
from flwr.app import Message, MessageType
from flwr.proto.message_pb2 import ConfirmMessageReceivedResponse, PullObjectResponse
from flwr.proto.runtime_pb2 import PullAppMessagesResponse
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree
from flwr.supercore.task_identity import TaskIdentity
from test_coordinator import rehearsal

from hushrec.deployment.coordinator.delivery import Delivery
from hushrec.deployment.coordinator.planning import Policy
from hushrec.deployment.coordinator.run import MODEL, newest_run, without_model
from hushrec.deployment.coordinator.session import EventLog
from hushrec.deployment.flower import transport
from hushrec.deployment.node.database import NodeDatabase
from hushrec.deployment.node.runs import NodeRuns
from hushrec.errors import FederationError, StoppedError
from hushrec.federation.contract import SecureSums
from hushrec.federation.requests import EvaluationRequest, Failure
from hushrec.io.codec import kind_of
from hushrec.testing import taste_world
from hushrec.testing.backend import MemoryLink
from test_api import StopAfter


class Unsteady(MemoryLink):
    """Nodes that are away, or say nothing, for spans of seconds since the first round began."""

    def __init__(self, nodes):
        super().__init__(nodes)
        self.began = None
        self.away, self.mute = {}, {}
        """Spans, by node."""
        self.sent = []

    def at(self):
        return -1.0 if self.began is None else self.now() - self.began

    def _within(self, spans, node):
        return any(start <= self.at() < end for start, end in spans.get(node, ()))

    def present(self):
        """A node that was away has connected again."""
        ends = {n: sum(end <= self.at() for _, end in s) for n, s in self.away.items()}
        return {
            node: f"connection {ends.get(node, 0)}"
            for node in self.nodes
            if not self._within(self.away, node)
        }

    def send(self, node, request, seconds):
        if self.began is None and kind_of(request) in ("train", "stage"):
            self.began = self.now()
        if self._within(self.away, node):
            return None
        self.sent.append((node, self.at(), request))
        if self._within(self.mute, node):
            return f"{node} at {self.at()}"
        return super().send(node, request, seconds)


def trains(request):
    return kind_of(request) == "train"


def told(run):
    lines = []
    return replace(run, events=EventLog(run.folder.path / "events.jsonl", lines.append)), lines


def unsteady(tmp_path, **more):
    """A federation whose nodes' times can be set, and the result of one that nothing happens to."""
    begin, lossy = rehearsal(tmp_path / "a", taste_world(), "pfedrec")
    whole = begin().train(lossy.link())
    begin, lossy = rehearsal(tmp_path / "b", taste_world(), "pfedrec")
    run, lines = told(begin(first_round_factor=1.0, slowest_factor=1.0, **more))
    return run, lines, Unsteady(lossy.link().nodes), whole


@pytest.mark.parametrize("span", [(0.0, 70.0), (0.0, 90.0), (0.0, 295.0)])
def test_an_absence_shorter_than_the_deadline_loses_nothing(tmp_path, span):
    run, lines, link, whole = unsteady(tmp_path)
    link.away["node-2"] = [span]
    assert run.train(link).test == whole.test
    assert not [line for line in lines if line.event == "sat out"]
    missing = [line for line in lines if line.event == "no answer" and line.node == "node-2"]
    assert "not connected" in missing[0].why, "it is named while it is waited for"


def test_a_mute_node_costs_one_deadline_and_the_others_count(tmp_path):
    """It is connected and says nothing: the round goes on without it, and a later one with it."""
    run, lines, link, _ = unsteady(tmp_path, round_seconds=45.0)
    link.mute["node-1"] = [(0.0, 44.0)]
    run.train(link)
    rounds = {line.round: line for line in lines if line.event == "round"}
    assert set(rounds) == {1, 2, 3}
    out = [line for line in lines if line.event == "sat out"]
    assert [(line.node, line.round) for line in out] == [("node-1", 1)]
    answered = {(line.node, line.round) for line in lines if line.event == "answered"}
    assert {("node-2", 1), ("node-3", 1), ("node-1", 2), ("node-1", 3)} <= answered
    first = [at for node, at, request in link.sent if node == "node-2" and trains(request)]
    assert first[1] - first[0] < 45 + 10, "a deadline and no more"


def test_who_connects_again_is_asked_again_at_once(tmp_path):
    run, lines, link, whole = unsteady(tmp_path)
    link.mute["node-3"] = [(0.0, 3.0)]  # what it is sent then is lost with its connection
    link.away["node-3"] = [(2.9, 3.0)]
    assert run.train(link).test == whole.test
    again = [line.why for line in lines if line.event == "no answer" and line.node == "node-3"]
    assert again == ["it has connected again; asked again"]
    assert max(at for _, at, request in link.sent if trains(request)) < 60, "at once"


def test_a_lost_message_is_sent_again_when_nothing_comes(tmp_path):
    """The message was taken and lost, and the connection is the same: only time tells."""
    run, lines, link, whole = unsteady(tmp_path)
    answer, lost = link.nodes["node-2"], []

    def forgetful(message):
        if kind_of(message) == "train" and not lost:
            lost.append(message)
            link.mute["node-2"] = [(0, link.at() + 1)]
            raise AssertionError("not asked")
        return answer(message)

    plain = link.send

    def send(node, request, seconds):
        try:
            return plain(node, request, seconds)
        except AssertionError:
            return "a ticket that nothing comes for"

    link.nodes["node-2"], link.send = forgetful, send
    assert run.train(link).test == whole.test
    why = [line.why for line in lines if line.event == "no answer" and line.node == "node-2"]
    assert why == ["no answer for 60 s; asked again"]


def test_who_stays_away_is_waited_for_once(tmp_path):
    run, lines, link, _ = unsteady(tmp_path)
    link.away["node-2"] = [(0.0, 1e9)]
    begun = link.nodes["node-1"]

    def later(message):
        if kind_of(message) == "train":
            link.waited += 1.0
        return begun(message)

    link.nodes["node-1"] = later
    run.train(link)
    out = [line for line in lines if line.event == "sat out"]
    assert {line.node for line in out} == {"node-2"} and len(out) > 3
    assert all("not connected" in line.why for line in out)
    assert link.at() < 2 * 300, "one deadline for all rounds, not one for each"


def test_too_few_nodes_are_waited_for_to_the_deadline(tmp_path):
    run, _, link, whole = unsteady(tmp_path)
    link.away = {"node-2": [(0.0, 250.0)], "node-3": [(0.0, 250.0)]}
    assert run.train(link).test == whole.test
    begin, lossy = rehearsal(tmp_path / "c", taste_world(), "pfedrec")
    link = Unsteady(lossy.link().nodes)
    link.away = {"node-2": [(0.0, 1e9)], "node-3": [(0.0, 1e9)]}
    with pytest.raises(FederationError, match=r"1 nodes answered.*2 are needed"):
        begin().train(link)


def test_an_invitation_does_not_spend_the_deadline_of_a_round(tmp_path):
    """A node that was never met is connected and mute: the others are asked at once."""
    begin, lossy = rehearsal(tmp_path / "f", taste_world(), "pfedrec")
    with pytest.raises(StoppedError):
        begin().train(lossy.link(), [StopAfter(1)])
    link = Unsteady(lossy.link().nodes)
    link.mute["node-3"] = [(-1.0, 1e9)]
    again, lines = told(begin(resume=True, enrol_seconds=20.0, first_round_factor=1.0))
    again.train(link)
    done = [line for line in lines if line.event == "answered" and line.to == "train"]
    assert {line.node for line in done} == {"node-1", "node-2"}
    assert min(line.seconds for line in done) < 10, "and their answers count at once"


def test_a_reply_to_any_sending_counts_once():
    link = Unsteady({"a": lambda data: data})
    link.began = link.now()
    delivery = Delivery(link, Policy(resend_seconds=5.0), until=link.now() + 100)
    link.mute["a"] = [(0, 12)]
    delivery.add("a", lambda: b"request")
    found = []
    for _ in range(40):
        found += delivery.poll()
        link.wait(1.0)
    answers = [each.answer for each in found]
    assert answers[:-1] == [Failure(f"no answer for {n} s; asked again") for n in (5, 10)]
    assert answers[-1] == b"request" and found[-1].sendings == 3
    assert delivery.requests == {}


# ------------------------------------------------------------ Flower's grid


@dataclass
class Grid:
    """A SuperLink with replies that may have arrived in part, in Flower's own format."""

    node: object = None
    replies: dict = field(default_factory=dict)
    """By ticket: the message and the ids of its objects that are there; None for all."""
    pulled: list = field(default_factory=list)

    def __post_init__(self):
        self.run = SimpleNamespace(run_id=7)
        self._runtime_client = self

    def reply(self, ticket, data, parts=None):
        asked = Message(transport._wrap(b"?"), 1, MessageType.QUERY)
        asked.metadata.__dict__["_message_id"] = ticket
        message = Message(transport._wrap(data), reply_to=asked)
        message.metadata.__dict__["_message_id"] = message.object_id
        contents = {key: each.deflate() for key, each in get_all_nested_objects(message).items()}
        self.replies[ticket] = message, contents, parts
        return contents

    def PullMessages(self, request):
        found = [
            self.replies[ticket][0] for ticket in request.message_ids if ticket in self.replies
        ]
        self.pulled += [message.metadata.reply_to_message_id for message in found]
        listed = PullAppMessagesResponse()
        for message in found:
            about = listed.messages_list.add()
            about.metadata.message_id = message.object_id
            about.metadata.reply_to_message_id = message.metadata.reply_to_message_id
            listed.message_object_trees.append(get_object_tree(message))
        return listed

    def PullObject(self, request):
        for _, contents, parts in self.replies.values():
            if request.object_id in contents:
                if parts == "gone":
                    return PullObjectResponse(object_found=False)
                there = parts is None or request.object_id in parts
                content = contents[request.object_id] if there else b""
                return PullObjectResponse(
                    object_found=True, object_available=there, object_content=content
                )
        raise AssertionError("an object of no reply")

    def ConfirmMessageReceived(self, request):
        return ConfirmMessageReceivedResponse()


def test_a_reply_in_part_keeps_nobody_waiting_and_is_taken_when_it_is_whole(monkeypatch):
    for name in ("_run_id", "_node_id", "_task_id"):
        monkeypatch.setattr(TaskIdentity, name, 7)
    grid = Grid()
    link, parts = transport.GridLink(grid), {}
    parts["first"] = set(list(grid.reply("first", b"a reply in part", set()))[:1])
    grid.replies["first"] = (*grid.replies["first"][:2], parts["first"])
    grid.reply("second", b"a whole reply")
    grid.reply("third", b"cut", "gone")
    found = dict(link.receive(["first", "second", "third", "fourth"]))
    assert found == {"second": b"a whole reply", "third": Failure("its reply was cut short")}
    assert list(link.receive(["first", "fourth"])) == []
    grid.replies["first"] = (*grid.replies["first"][:2], None)
    assert list(link.receive(["first", "fourth"])) == [("first", b"a reply in part")]
    assert grid.pulled.count("first") == 1, "Flower says once that a reply is there"
    assert list(link.receive(["fourth"])) == []


# ------------------------------------------------------------ the model of a run that is over


@pytest.mark.parametrize("secure", [None, SecureSums()])
def test_a_node_that_was_away_gets_the_model_when_it_is_back(tmp_path, secure):
    nodes = 4 if secure else 3
    begin, lossy = rehearsal(tmp_path / "f", taste_world(), "pfedrec", nodes=nodes, secure=secure)
    link = Unsteady(lossy.link().nodes)
    run, _ = told(begin(min_nodes=1, first_round_factor=1.0))

    link.away["node-2"] = [(0.0, 1e9)]
    run.train(link)
    folder = newest_run(tmp_path / "f" / "runs")
    assert without_model(folder) == ["node-2"] and (folder.path / MODEL).exists()

    def models():
        kept = {}
        for name, path in lossy.paths.items():
            with NodeDatabase.open(path) as store:
                found = NodeRuns(store).newest_model()
                kept[name] = None if found is None else found[1]
        return kept

    before = models()
    assert before.pop("node-2") is None and None not in before.values()
    ids = {name: name for name in lossy.paths}
    replace(run, node_ids=ids).deliver(lossy.link(), ["node-2"])
    assert without_model(folder) == [] and not (folder.path / MODEL).exists()
    got = EvaluationRequest.from_bytes(models()["node-2"])
    theirs = EvaluationRequest.from_bytes(before["node-1"])
    assert (got.shared, got.round, got.selected) == (theirs.shared, theirs.round, theirs.selected)
    assert got.assignment.digest != theirs.assignment.digest
