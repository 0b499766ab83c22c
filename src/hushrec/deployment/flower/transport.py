"""Messages over Flower: the only module that imports it.

SuperLink and SuperNodes carry the messages (`programs` starts them). Flower's own way is to start a
process for each message, on a node with the code that the server sent. Here hushrec's process takes
the tasks of ServerApp and ClientApp (isolation "process"): a node runs its installed hushrec and no
other code, and its process stays warm between rounds.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from typing import TypeVar

import httpx
from flwr.app import Array, ArrayRecord, Context, Error, Message, MessageType, RecordDict
from flwr.clientapp import ClientApp
from flwr.common.constant import ErrorCode, SubStatus
from flwr.common.serde import run_from_proto
from flwr.proto.runtime_pb2 import (
    AcquireTaskRequest,
    PullTaskInputRequest,
    PushTaskOutputRequest,
    SendTaskHeartbeatRequest,
)
from flwr.serverapp import Grid
from flwr.supercore.constant import TaskType
from flwr.supercore.heartbeat import HeartbeatSender
from flwr.supercore.interceptors import (
    RuntimeTokenHttpInterceptor,
    RuntimeVersionHttpInterceptor,
    SuperExecAuthHttpInterceptor,
)
from flwr.supercore.protobuf.client import ProtobufClientInterceptor
from flwr.supercore.runtime import RuntimeHttpClient
from flwr.supercore.task_identity import TaskIdentity
from flwr.superlink.grid.http_grid import HttpGrid
from flwr.supernode.runtime.run_clientapp import pull_task_input, push_message, push_task_output

from hushrec.errors import FederationError
from hushrec.federation.requests import Failure, NodeId

RECORD, ARRAY = "hushrec", "message"
"""Names under which a Flower message carries the bytes of ours."""
POLL_SECONDS = 0.2
ACQUIRE = "/flwr.proto.Runtime/AcquireTask"
Result = TypeVar("Result")


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
        return RuntimeHttpClient.from_server_address(
            self.address,
            insecure=self.authority is None,
            root_certificates=self.authority,
            interceptors=[RuntimeVersionHttpInterceptor(component_name="hushrec"), *interceptors],
        )

    @contextmanager
    def tasks(self, kind: TaskType) -> Iterator[Callable[[], tuple[str, int] | None]]:
        """Give a function that returns token and run of a waiting task, or None."""
        sign = SuperExecAuthHttpInterceptor(master_secret=self.secret, protected_methods={ACQUIRE})
        # One connection for all polls: opening one costs more than a poll.
        with closing(self.client(sign)) as client:

            def acquire() -> tuple[str, int] | None:
                reply = client.AcquireTask(AcquireTaskRequest(supported_task_types=[kind]))
                return (reply.token, reply.task.run_id) if reply.token else None

            yield acquire


# ------------------------------------------------------------ coordinator


class GridLink:
    """A `Link` over Flower's grid."""

    def __init__(self, grid: Grid) -> None:
        self.grid = grid

    def present(self) -> list[NodeId]:
        """Return the nodes that are connected now."""
        with _reached():
            return sorted(str(node) for node in self.grid.get_node_ids())

    def ask(
        self, requests: Mapping[NodeId, bytes], seconds: float
    ) -> Iterator[tuple[NodeId, bytes | Failure]]:
        """Send each node its request; yield a reply or, after ``seconds``, a failure for each."""
        deadline, sent = time.monotonic() + seconds, {}
        for node, request in requests.items():
            message = Message(_wrap(request), int(node), MessageType.QUERY, ttl=max(1.0, seconds))
            with _reached():
                numbers = list(self.grid.push_messages([message]))
            if numbers and numbers[0]:
                sent[numbers[0]] = node
            else:
                yield node, Failure("not connected")
        while sent:
            # The reader of a reply may take long: what arrived meanwhile is in time.
            late = time.monotonic() >= deadline
            with _reached():
                replies = list(self.grid.pull_messages(list(sent)))
            for reply in replies:
                sender = sent.pop(reply.metadata.reply_to_message_id, None)
                if sender is not None:
                    yield sender, _unwrap(reply)
            if late:
                break
            if sent and not replies:
                time.sleep(POLL_SECONDS)
        for node in sent.values():
            yield node, Failure("no answer in time")

    def wait(self, seconds: float) -> None:
        """Sleep."""
        time.sleep(seconds)


def run_on_grid(
    endpoint: RuntimeEndpoint, run_id: int, seconds: float, work: Callable[[GridLink], Result]
) -> Result:
    """Do ``work`` in this process, in place of the ServerApp of a Flower run; return its result.

    ``seconds`` is how long the SuperLink may take to hand out the run's task. Heartbeats are sent
    while the work is done, and its end is reported.
    """
    token = _token(endpoint, run_id, seconds)
    grid = HttpGrid(endpoint.address, root_certificates=endpoint.authority, token=token)
    client, ended = grid._runtime_client, SubStatus.FAILED
    heartbeats = HeartbeatSender(_heartbeat(client))
    heartbeats.start()
    try:
        task = client.PullTaskInput(PullTaskInputRequest())
        TaskIdentity.task_id, TaskIdentity.run_id = task.task_id, task.run.run_id
        TaskIdentity.node_id = task.context.node_id
        grid.set_run(run_from_proto(task.run))
        result = work(GridLink(grid))
        ended = SubStatus.COMPLETED
        return result
    finally:
        heartbeats.stop()
        grid._retry_invoker.max_tries = 1
        with _reached():
            client.PushTaskOutput(PushTaskOutputRequest(sub_status=ended, details=""))
        grid.close()


def _token(endpoint: RuntimeEndpoint, run_id: int, seconds: float) -> str:
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
) -> None:
    """Answer the messages that a SuperNode receives, one by one, while ``goes_on()`` holds.

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

    with endpoint.tasks(TaskType.CLIENT_APP) as acquire:
        while goes_on():
            try:
                task = acquire()
                if task is None:
                    time.sleep(POLL_SECONDS)
                else:
                    _answer_one(endpoint, task[0], app)
            except httpx.HTTPError:
                time.sleep(POLL_SECONDS)  # the SuperNode or the run ended


def _answer_one(endpoint: RuntimeEndpoint, token: str, app: ClientApp) -> None:
    client = endpoint.client(RuntimeTokenHttpInterceptor(token))
    heartbeats = HeartbeatSender(_heartbeat(client))
    heartbeats.start()
    context, ended = None, SubStatus.FAILED
    try:
        # The app's code, which comes with the task, is dropped unread.
        message, context, _, _ = pull_task_input(client)
        try:
            reply = app(message, context)
        except Exception as error:  # no message may end a node
            reply = Message(
                Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, type(error).__name__), reply_to=message
            )
        push_message(client, reply, context)
        ended = SubStatus.COMPLETED
    finally:
        heartbeats.stop()
        push_task_output(client, context, ended, "")
        client.close()


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


@contextmanager
def _reached() -> Iterator[None]:
    """Raise a `FederationError` if the SuperLink cannot be reached."""
    try:
        yield
    except httpx.HTTPError as error:
        raise FederationError(
            f"the SuperLink does not answer ({type(error).__name__}): completed rounds are saved; "
            "start 'hushrec federate server' again, and continue with --resume"
        ) from None
