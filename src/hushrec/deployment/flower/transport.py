"""Flower as the transport of a federation: the only module that imports it.

Flower's SuperLink and SuperNodes carry messages, over TLS and between parties that know each other
(`hushrec.deployment` starts them). What runs is a ServerApp and a ClientApp of ours. Flower would
start a process for each message, and on a node one with code that the server sent. Here the process
that starts a SuperNode, or begins a run, executes the app itself (isolation "process"): nodes run
their own hushrec and nothing else, and stay warm between rounds.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import httpx
from flwr.app import Array, ArrayRecord, Context, Error, Message, MessageType, RecordDict
from flwr.clientapp import ClientApp
from flwr.common.constant import ErrorCode, SubStatus
from flwr.common.serde import context_from_proto, run_from_proto
from flwr.proto.runtime_pb2 import (
    AcquireTaskRequest,
    PullTaskInputRequest,
    PushTaskOutputRequest,
    SendTaskHeartbeatRequest,
)
from flwr.serverapp import Grid, ServerApp
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

from hushrec.deployment.transport import Failure, NodeId
from hushrec.errors import FederationError

RECORD, ARRAY = "hushrec", "message"
"""Where in a message of Flower's ours is."""
POLL_SECONDS = 0.2
ACQUIRE = "/flwr.proto.Runtime/AcquireTask"
Answer = Callable[[bytes], bytes]


@dataclass(frozen=True)
class Runtime:
    """Where a SuperLink or a SuperNode hands out its tasks."""

    address: str
    secret: bytes = field(repr=False)
    """Who does not know it is given no task."""
    authority: bytes | None = None
    """Certificate to believe in; None for a SuperNode, which listens to its own machine only."""

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
        """Give a function that returns the token and the run of a task to be done, if any waits."""
        sign = SuperExecAuthHttpInterceptor(master_secret=self.secret, protected_methods={ACQUIRE})
        # One connection for all times that it is asked: making one costs more than asking.
        client = self.client(sign)

        def acquire() -> tuple[str, int] | None:
            found = client.AcquireTask(AcquireTaskRequest(supported_task_types=[kind]))
            return (found.token, found.task.run_id) if found.token else None

        try:
            yield acquire
        finally:
            client.close()


# ------------------------------------------------------------ the server's side


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
        """Send each node its request; after so many seconds none is waited for."""
        until, sent = time.monotonic() + seconds, {}
        for node, request in requests.items():
            message = Message(_wrap(request), int(node), MessageType.QUERY, ttl=max(1.0, seconds))
            with _reached():
                numbers = list(self.grid.push_messages([message]))
            if numbers and numbers[0]:
                sent[numbers[0]] = node
            else:
                yield node, Failure("not connected")
        while sent and time.monotonic() < until:
            with _reached():
                replies = list(self.grid.pull_messages(list(sent)))
            for reply in replies:
                node_asked = sent.pop(reply.metadata.reply_to_message_id, None)
                if node_asked is not None:
                    yield node_asked, _answer_in(reply)
            if sent and not replies:
                time.sleep(POLL_SECONDS)
        for node in sent.values():
            yield node, Failure("no answer in time")

    def wait(self, seconds: float) -> None:
        """Let time pass."""
        time.sleep(seconds)


def run_on_grid(
    runtime: Runtime, run_id: int, seconds: float, work: Callable[[GridLink], None]
) -> None:
    """Do the server's work of a Flower run that was begun: as its ServerApp, in this process."""
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        work(GridLink(grid))

    with _task_of(runtime, run_id, seconds) as (grid, context):
        app(grid, context)


@contextmanager
def _task_of(runtime: Runtime, run_id: int, seconds: float) -> Iterator[tuple[HttpGrid, Context]]:
    """Take the run's task, keep it alive meanwhile, and say how it ended."""
    grid = HttpGrid(
        runtime.address, root_certificates=runtime.authority, token=_token(runtime, run_id, seconds)
    )
    client, ended = grid._runtime_client, SubStatus.FAILED
    beating = HeartbeatSender(_heartbeat(client))
    beating.start()
    try:
        found = client.PullTaskInput(PullTaskInputRequest())
        TaskIdentity.task_id, TaskIdentity.run_id = found.task_id, found.run.run_id
        TaskIdentity.node_id = found.context.node_id
        grid.set_run(run_from_proto(found.run))
        yield grid, context_from_proto(found.context)
        ended = SubStatus.COMPLETED
    finally:
        beating.stop()
        grid._retry_invoker.max_tries = 1
        with _reached():
            client.PushTaskOutput(PushTaskOutputRequest(sub_status=ended, details=""))
        grid.close()


def _token(runtime: Runtime, run_id: int, seconds: float) -> str:
    """Wait for the task of a run; those of runs that nobody works on any more are passed over."""
    until = time.monotonic() + seconds
    with runtime.tasks(TaskType.SERVER_APP) as acquire:
        while time.monotonic() < until:
            with _reached():
                found = acquire()
            if found is not None and found[1] == run_id:
                return found[0]
            time.sleep(POLL_SECONDS)
    raise FederationError(
        f"the server did not hand out its run within {seconds:g} s: start it anew"
    )


# ------------------------------------------------------------ a node's side


def answer_messages(runtime: Runtime, answer: Answer, goes_on: Callable[[], bool]) -> None:
    """Answer what a SuperNode receives, one message after the other, as long as it goes on.

    What is asked for by another name than ours, or breaks us, is answered with an error that tells
    its kind and nothing else.
    """
    app = ClientApp()

    @app.query()
    def query(message: Message, context: Context) -> Message:
        received = _answer_in(message)
        # What is no message of ours is answered like any other that cannot be read.
        return Message(
            _wrap(answer(received if isinstance(received, bytes) else b"")), reply_to=message
        )

    with runtime.tasks(TaskType.CLIENT_APP) as acquire:
        while goes_on():
            try:
                found = acquire()
                if found is None:
                    time.sleep(POLL_SECONDS)
                else:
                    _answer_one(runtime, found[0], app)
            except httpx.HTTPError:
                time.sleep(POLL_SECONDS)  # the SuperNode ended, or its run did


def _answer_one(runtime: Runtime, token: str, app: ClientApp) -> None:
    client = runtime.client(RuntimeTokenHttpInterceptor(token))
    beating = HeartbeatSender(_heartbeat(client))
    beating.start()
    context, ended = None, SubStatus.FAILED
    try:
        # The code that came with the run is not looked at.
        message, context, _, _ = pull_task_input(client)
        try:
            reply = app(message, context)
        except Exception as error:  # a node outlives whatever it is sent
            reply = Message(
                Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, type(error).__name__), reply_to=message
            )
        push_message(client, reply, context)
        ended = SubStatus.COMPLETED
    finally:
        beating.stop()
        push_task_output(client, context, ended, "")
        client.close()


# ------------------------------------------------------------ what both sides need


def _wrap(data: bytes) -> RecordDict:
    """Put our bytes into a message of Flower's, which sends arrays in pieces."""
    array = Array(dtype="uint8", shape=(len(data),), stype=RECORD, data=data)
    return RecordDict({RECORD: ArrayRecord({ARRAY: array})})


def _answer_in(reply: Message) -> bytes | Failure:
    """Return our bytes of a message; of one that is not ours, none, which nobody can read."""
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
            return True  # the task is over
        return True

    return beat


@contextmanager
def _reached() -> Iterator[None]:
    """Turn a SuperLink that is gone into a sentence."""
    try:
        yield
    except httpx.HTTPError as error:
        raise FederationError(
            f"the server's programs do not answer ({type(error).__name__}): what is done is saved; "
            "start 'hushrec federate server' again, and go on with --resume"
        ) from None
