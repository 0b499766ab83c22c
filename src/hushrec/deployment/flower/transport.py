"""Messages over Flower; beside `gate` the only module that imports it.

SuperLink and SuperNodes carry the messages (`programs` starts them). Flower's own way is to start a
process for each message, on a node with the code that the server sent. Here hushrec's process takes
the tasks of ServerApp and ClientApp (isolation "process"): a node runs its installed hushrec and no
other code, and its process stays warm between rounds.

What Flower 1.41 does when something fails, and what is done about it here and in `programs`:

- Its clients repeat a call without end while the server is away, and send their own process a
  SIGINT when it is back and does not know them. Calls here are repeated for `CALL_SECONDS`.
- A reply is announced before its content is sent, and `HttpGrid.pull_messages` waits up to 180 s
  for the rest, for all nodes at once. `GridLink` pulls what is there, and comes back for the rest.
- A SuperNode waits without end for the reply to the message that it took. If its reply cannot be
  handed over, `answer_messages` ends, and the SuperNode is started anew.
- A SuperNode makes a task of a message before it has the message, and leaves the task there when
  the run ends meanwhile; Flower's ClientApp would wait for the message for up to two hours.
- A message that a SuperNode took is not sent again, whatever becomes of it. A node that connects
  again has another time of activation, by which a `Link` tells connections apart.
- A node counts as connected for 60 s after its last heartbeat, and cannot connect again meanwhile:
  HTTP 412, as for an unknown key. `Gate` ends the last connection and tells the two apart.
- A node's clock may be 305 s behind the server's and 5 s ahead; else it gets HTTP 401.
- A SuperNode that gets a second TERM dies before it has said goodbye to the server.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from typing import TypeVar

import httpx
from flwr.app import Array, ArrayRecord, Context, Error, Message, MessageType, RecordDict
from flwr.clientapp import ClientApp
from flwr.common.constant import ErrorCode, SubStatus
from flwr.common.serde import context_from_proto, run_from_proto
from flwr.proto.message_pb2 import ConfirmMessageReceivedRequest, PullObjectRequest
from flwr.proto.node_pb2 import Node
from flwr.proto.runtime_pb2 import (
    AcquireTaskRequest,
    PullAppMessagesRequest,
    PullTaskInputRequest,
    PushTaskOutputRequest,
    SendTaskHeartbeatRequest,
)
from flwr.supercore.constant import TaskType
from flwr.supercore.heartbeat import HeartbeatSender
from flwr.supercore.inflatable.inflatable_object import iterate_object_tree
from flwr.supercore.inflatable.inflatable_utils import (
    ObjectPushError,
    inflate_object_from_contents,
)
from flwr.supercore.interceptors import (
    RuntimeTokenHttpInterceptor,
    RuntimeVersionHttpInterceptor,
    SuperExecAuthHttpInterceptor,
)
from flwr.supercore.protobuf.client import ProtobufClientInterceptor
from flwr.supercore.retry import RetryInvoker, constant
from flwr.supercore.runtime import RuntimeHttpClient
from flwr.supercore.task_identity import TaskIdentity
from flwr.superlink.grid.http_grid import HttpGrid
from flwr.supernode.runtime.run_clientapp import push_message, push_task_output

from hushrec.errors import FederationError, ServerLostError
from hushrec.federation.requests import Failure, NodeId

RECORD, ARRAY = "hushrec", "message"
"""Names under which a Flower message carries the bytes of ours."""
POLL_SECONDS = 0.2
CALL_SECONDS = 10.0
"""Seconds that one call to a SuperLink or SuperNode may take, and that it is repeated for."""
SILENT_SECONDS = 20.0
"""A SuperLink or SuperNode that answers nothing for so long is started anew."""
TTL_MARGIN = 60.0
ABANDONED_SECONDS = 600.0
"""What arrived of a reply that nobody asked for so long is dropped."""
STALLED_SECONDS = 120.0
"""A SuperNode that announced a message, and has nothing more of it after so long, is started anew.
"""
UNUSED = TaskType.CONNECTOR
"""Tasks that no federation has."""
ACQUIRE = "/flwr.proto.Runtime/AcquireTask"
Result = TypeVar("Result")
Acquire = Callable[[], tuple[str, int] | None]
"""Returns token and run of a waiting task, or None."""


@dataclass(frozen=True)
class RuntimeEndpoint:
    """The Runtime API of a SuperLink or SuperNode, which hands out tasks."""

    address: str
    secret: bytes = field(repr=False)
    """Proves that a process may take tasks."""
    authority: bytes | None = None
    """Certificate authority of a SuperLink; None for a SuperNode, which listens on loopback."""

    def client(self, *interceptors: ProtobufClientInterceptor) -> RuntimeHttpClient:
        """Connect."""
        client = RuntimeHttpClient.from_server_address(
            self.address,
            insecure=self.authority is None,
            root_certificates=self.authority,
            interceptors=[RuntimeVersionHttpInterceptor(component_name="hushrec"), *interceptors],
            retry_invoker=_repeated(),
        )
        client._client.timeout = httpx.Timeout(CALL_SECONDS)
        return client

    def responds(self) -> bool:
        """Exchange a question and its answer: a process that only listens does not respond."""
        with self.tasks(UNUSED) as acquire, suppress(httpx.HTTPError):
            acquire()
            return True
        return False

    @contextmanager
    def tasks(self, kind: TaskType) -> Iterator[Acquire]:
        """Give a function that returns token and run of a waiting task, or None."""
        sign = SuperExecAuthHttpInterceptor(master_secret=self.secret, protected_methods={ACQUIRE})
        # One connection for all polls: opening one costs more than a poll.
        with closing(self.client(sign)) as client:
            client._retry_invoker = None  # whoever polls asks again anyway

            def acquire() -> tuple[str, int] | None:
                reply = client.AcquireTask(AcquireTaskRequest(supported_task_types=[kind]))
                return (reply.token, reply.task.run_id) if reply.token else None

            yield acquire


# ------------------------------------------------------------ coordinator


@dataclass
class _Reply:
    """A reply that was announced, and what of its content has arrived."""

    number: str
    """Flower's id of the message."""
    missing: list[str]
    """Ids of the objects that have not arrived."""
    asked: float
    """When it was last asked for."""
    contents: dict[str, bytes] = field(default_factory=dict)


class GridLink:
    """A `Link` over Flower's grid. Its tickets are Flower's ids of requests."""

    def __init__(self, grid: HttpGrid) -> None:
        self.grid = grid
        self.announced: dict[str, _Reply] = {}
        """Replies that have not arrived as a whole, by ticket."""

    def present(self) -> dict[NodeId, str]:
        """Return the nodes that are connected now, with the time of their activation."""
        with _reached():
            nodes = {str(node.node_id): node.last_activated_at for node in self.grid.get_nodes()}
        return dict(sorted(nodes.items()))

    def send(self, node: NodeId, request: bytes, seconds: float) -> str | None:
        """Send a request."""
        # The reply is dropped with the request, so it has to outlast the deadline.
        content, ttl = _wrap(request), seconds + TTL_MARGIN
        message, numbers = Message(content, int(node), MessageType.QUERY, ttl=ttl), list[str]()
        with _reached(), suppress(ObjectPushError):
            numbers += self.grid.push_messages([message])
        return numbers[0] or None if numbers else None

    def receive(self, tickets: Sequence[str]) -> Iterator[tuple[str, bytes | Failure]]:
        """Yield the replies that have arrived as a whole; the pieces of others are kept."""
        client, now = self.grid._runtime_client, time.monotonic()
        fresh = [ticket for ticket in tickets if ticket not in self.announced]
        if fresh:
            with _reached():
                found = client.PullMessages(PullAppMessagesRequest(message_ids=fresh))
            for message, tree in zip(found.messages_list, found.message_object_trees, strict=True):
                parts = list(dict.fromkeys(each.object_id for each in iterate_object_tree(tree)))
                reply = _Reply(message.metadata.message_id, parts, now)
                self.announced[message.metadata.reply_to_message_id] = reply
        for ticket in tickets:
            if ticket in self.announced:
                with _reached():
                    answer = self._pull(client, self.announced[ticket])
                if answer is not None:
                    del self.announced[ticket]
                    yield ticket, answer
        for ticket, reply in list(self.announced.items()):
            if now - reply.asked > ABANDONED_SECONDS:
                del self.announced[ticket]

    def _pull(self, client: RuntimeHttpClient, reply: _Reply) -> bytes | Failure | None:
        """Pull what is there of a reply; return the reply if that is all of it."""
        run, reply.asked = self.grid.run.run_id, time.monotonic()
        while reply.missing:
            part = reply.missing[0]
            request = PullObjectRequest(node=self.grid.node, run_id=run, object_id=part)
            found = client.PullObject(request)
            if not found.object_found:
                return Failure("its reply was cut short")
            if not found.object_available:
                return None
            reply.contents[part] = found.object_content
            reply.missing.pop(0)
        client.ConfirmMessageReceived(
            ConfirmMessageReceivedRequest(
                node=self.grid.node, run_id=run, message_object_id=reply.number
            )
        )
        try:
            message = inflate_object_from_contents(reply.number, reply.contents)
        except (ValueError, KeyError, TypeError) as error:
            return Failure(f"its reply is damaged ({type(error).__name__})")
        return _unwrap(message) if isinstance(message, Message) else b""

    def wait(self, seconds: float) -> None:
        """Sleep."""
        time.sleep(seconds)

    def now(self) -> float:
        """Return the time of this machine."""
        return time.monotonic()


def run_on_grid(
    endpoint: RuntimeEndpoint, token: str, work: Callable[[GridLink], Result]
) -> Result:
    """Do ``work`` in this process, in place of the ServerApp of a Flower run; return its result.

    ``token`` is that of the run's task. Heartbeats are sent while the work is done, and its end is
    reported.
    """
    grid = HttpGrid(endpoint.address, root_certificates=endpoint.authority, token=token)
    grid._retry_invoker = _repeated()
    client, ended = grid._runtime_client, SubStatus.FAILED
    client._client.timeout = httpx.Timeout(CALL_SECONDS)
    heartbeats = HeartbeatSender(_heartbeat(client))
    heartbeats.start()
    try:
        with _reached():
            task = client.PullTaskInput(PullTaskInputRequest())
        TaskIdentity.task_id, TaskIdentity.run_id = task.task_id, task.run.run_id
        TaskIdentity.node_id = task.context.node_id
        grid.set_run(run_from_proto(task.run))
        result = work(GridLink(grid))
        ended = SubStatus.COMPLETED
        return result
    finally:
        heartbeats._stop_event.set()  # `stop` would wait for a call that may take long
        grid._retry_invoker.max_tries = 1
        with suppress(httpx.HTTPError):  # whoever waits for the end learns it from the files
            client.PushTaskOutput(PushTaskOutputRequest(sub_status=ended, details=""))
        grid.close()


def take_task(endpoint: RuntimeEndpoint, run_id: int, seconds: float) -> str:
    """Wait for the task of a run; tasks of abandoned runs are skipped."""
    deadline = time.monotonic() + seconds
    with endpoint.tasks(TaskType.SERVER_APP) as acquire:
        while time.monotonic() < deadline:
            with _reached():
                task = acquire()
            if task is not None and task[1] == run_id:
                return task[0]
            time.sleep(POLL_SECONDS)
    raise FederationError(
        f"the SuperLink handed out no task of its run in {seconds:g} s: start the server again"
    )


# ------------------------------------------------------------ node


def answer_messages(
    endpoint: RuntimeEndpoint, answer: Callable[[bytes], bytes], goes_on: Callable[[], bool]
) -> str:
    """Answer the messages that a SuperNode receives, one by one, as long as it works; return what
    was wrong with it. ``goes_on`` says whether its process lives.

    A message of another type than ``query``, and one for which ``answer`` raises, gets an error
    that names its kind and nothing else.
    """
    app = ClientApp()

    @app.query()
    def query(message: Message, context: Context) -> Message:
        received = _unwrap(message)
        # A message in another format is answered like any other that cannot be decoded.
        reply = answer(received if isinstance(received, bytes) else b"")
        return Message(_wrap(reply), reply_to=message)

    heard, task = time.monotonic(), None
    with endpoint.tasks(TaskType.CLIENT_APP) as acquire:
        while goes_on():
            try:
                task = task or acquire()
            except httpx.HTTPError:
                if time.monotonic() - heard > SILENT_SECONDS:
                    return "does not answer"
                time.sleep(POLL_SECONDS)
                continue
            if task is None:
                time.sleep(POLL_SECONDS)
            else:
                try:
                    task = _answer_one(endpoint, task[0], app, acquire)
                except _StuckError as error:
                    return str(error)
            heard = time.monotonic()
    return "ended"


class _StuckError(Exception):
    """A SuperNode waits for something that will not come."""


def _answer_one(
    endpoint: RuntimeEndpoint, token: str, app: ClientApp, acquire: Acquire
) -> tuple[str, int] | None:
    """Answer the message of a task; return the next task, if there is one already."""
    client = endpoint.client(RuntimeTokenHttpInterceptor(token))
    heartbeats = HeartbeatSender(_heartbeat(client))
    heartbeats.start()
    context, ended, following = None, SubStatus.FAILED, None
    try:
        # The app's code, which comes with the task, is dropped unread.
        task = client.PullTaskInput(PullTaskInputRequest())
        TaskIdentity.task_id, TaskIdentity.run_id = task.task_id, task.run.run_id
        TaskIdentity.node_id = task.context.node_id
        context = context_from_proto(task.context)
        message, following = _pull_message(client, context, acquire)
        if message is None:
            return following
        try:
            reply = app(message, context)
        except Exception as error:  # no message may end a node
            reply = Message(
                Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, type(error).__name__), reply_to=message
            )
        try:
            push_message(client, reply, context)
        except Exception:  # whatever it was, the SuperNode has not got the whole reply
            raise _StuckError("did not take a reply") from None
        ended = SubStatus.COMPLETED
    except httpx.HTTPError:
        pass  # the task is over: the SuperNode says so to the server
    finally:
        heartbeats._stop_event.set()
        push_task_output(client, context, ended, "")
        client.close()
    return following


def _pull_message(
    client: RuntimeHttpClient, context: Context, acquire: Acquire
) -> tuple[Message | None, tuple[str, int] | None]:
    """Wait for the message of a task, which the SuperNode announces before it has it; give it up
    for the next task, which shows that the SuperNode has given it up."""
    listed = client.PullMessages(PullAppMessagesRequest())
    if not listed.message_object_trees:
        return None, None
    tree, contents = listed.message_object_trees[0], dict[str, bytes]()
    missing = list(dict.fromkeys(each.object_id for each in iterate_object_tree(tree)))
    node, heard = Node(node_id=context.node_id), time.monotonic()
    while missing:
        request = PullObjectRequest(node=node, run_id=context.run_id, object_id=missing[0])
        found = client.PullObject(request)
        if not found.object_found:
            return None, None
        if found.object_available:
            contents[missing.pop(0)], heard = found.object_content, time.monotonic()
            continue
        following = acquire()
        if following is not None:
            return None, following
        if time.monotonic() - heard > STALLED_SECONDS:
            raise _StuckError("announced a message that did not come")
        time.sleep(POLL_SECONDS)
    client.ConfirmMessageReceived(
        ConfirmMessageReceivedRequest(
            node=node, run_id=context.run_id, message_object_id=tree.object_id
        )
    )
    message = inflate_object_from_contents(tree.object_id, contents)
    if not isinstance(message, Message):
        return None, None
    message.metadata.__dict__["_message_id"] = tree.object_id
    return message, None


# ------------------------------------------------------------ both


def _wrap(data: bytes) -> RecordDict:
    """Put bytes into the content of a Flower message, as an array, which Flower sends in pieces."""
    array = Array(dtype="uint8", shape=(len(data),), stype=RECORD, data=data)
    return RecordDict({RECORD: ArrayRecord({ARRAY: array})})


def _unwrap(reply: Message) -> bytes | Failure:
    """Return the bytes in a Flower message; empty bytes, which do not decode, if it has none."""
    if reply.has_error():
        return Failure(f"Flower says: {reply.error.reason}"[:200])
    record = reply.content.get(RECORD) if len(reply.content) == 1 else None
    if not isinstance(record, ArrayRecord) or list(record) != [ARRAY]:
        return b""
    return record[ARRAY].data


def _heartbeat(client: RuntimeHttpClient) -> Callable[[], bool]:
    def beat() -> bool:
        try:
            client.SendTaskHeartbeat(SendTaskHeartbeatRequest())
        except httpx.TransportError:
            return False
        except httpx.HTTPStatusError:
            pass  # the task is over
        return True

    return beat


def _repeated() -> RetryInvoker:
    """Repeat a call that did not get through, for a while."""

    def is_final(error: Exception) -> bool:
        return isinstance(error, httpx.HTTPStatusError) and error.response.status_code < 502

    return RetryInvoker(
        lambda: constant(1.0),
        (httpx.TransportError, httpx.HTTPStatusError),
        max_tries=None,
        max_time=CALL_SECONDS,
        should_giveup=is_final,
    )


@contextmanager
def _reached() -> Iterator[None]:
    """Raise a `ServerLostError` if the SuperLink cannot be reached, or was started anew."""
    try:
        yield
    except httpx.HTTPError as error:
        raise ServerLostError(
            f"the SuperLink does not answer ({type(error).__name__}): completed rounds are saved; "
            "start 'hushrec federate server' again, and continue with --resume"
        ) from None
