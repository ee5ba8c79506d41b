"""The worker's gRPC server: one Attach stream per gateway, one message per engine step for all its requests.

Ownership: an attachment owns the requests that came over it. When its stream ends, for whatever reason, they are
aborted and their pages released. Nothing a gateway sends can make another gateway's requests fail.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator

import grpc

from kvferry import __version__
from kvferry.addresses import join_host_port
from kvferry.engine.base import Engine, EngineLoad, EngineOutput, EngineRequest
from kvferry.errors import (
    EngineDead,
    EngineError,
    InvalidRequest,
    KvferryError,
    Overloaded,
    WorkerDraining,
    WorkerLost,
)
from kvferry.wire.v1 import worker_pb2 as pb
from kvferry.wire.v1 import worker_pb2_grpc
from kvferry.worker import codec

log = logging.getLogger(__name__)

MAX_MESSAGE_BYTES = 64 << 20

# A gateway that stopped reading: when more than this waits for it, its requests end. Well below MAX_MESSAGE_BYTES,
# because all that waits becomes one message.
MAX_PENDING_BYTES = 16 << 20

CHANNEL_OPTIONS = (
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    # A silent peer (machine gone, cable cut) is found within seconds, not by TCP's minutes.
    ("grpc.keepalive_time_ms", 5_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    # What grpcio 1.85 really waits for; with keepalive_timeout_ms alone a hung peer is never noticed.
    ("grpc.http2.ping_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 4_000),
)


class WorkerServer:
    """Serves one engine.

    `start` binds, `drain` refuses new requests and waits for those in flight, `stop` ends everything.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        worker_id: str,
        role: str,
        host: str,
        max_requests: int,
        heartbeat_s: float,
    ) -> None:
        self._engine = engine
        self._worker_id = worker_id
        self._role = role
        self._host = host
        self._max_requests = max_requests
        self._heartbeat_s = heartbeat_s
        self._server: grpc.aio.Server | None = None
        self._attachments: set[_Attachment] = set()
        self._ending: set[asyncio.Task[None]] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        self.port = 0
        self.draining = False
        self.died = asyncio.Event()  # set once the engine was seen dead

    def __repr__(self) -> str:
        return (
            f"<WorkerServer {self._worker_id} port={self.port} attachments={len(self._attachments)} "
            f"requests={self.num_requests}{' draining' if self.draining else ''}>"
        )

    @property
    def num_requests(self) -> int:
        return sum(len(attachment.tasks) for attachment in self._attachments)

    async def start(self) -> None:
        self._server = grpc.aio.server(options=CHANNEL_OPTIONS)
        worker_pb2_grpc.add_WorkerServicer_to_server(_Servicer(self), self._server)
        self.port = self._server.add_insecure_port(join_host_port(self._host, 0))
        await self._server.start()

    def refuse_new(self) -> None:
        """Take no new requests from now on, and tell every gateway at once."""
        self.draining = True
        for attachment in self._attachments:
            attachment.send_load()

    async def drain(self, timeout_s: float) -> bool:
        """Refuse new requests; True when those in flight finished in time."""
        self.refuse_new()
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True

    async def stop(self, grace_s: float = 1.0) -> None:
        if self._server is not None:
            server, self._server = self._server, None
            for attachment in list(self._attachments):
                attachment.close()
            await server.stop(grace_s)
            await asyncio.gather(*self._ending, return_exceptions=True)

    def welcome(self) -> pb.Welcome:
        info = self._engine.info
        return pb.Welcome(
            worker_id=self._worker_id,
            version=__version__,
            role=self._role,
            engine_id=info.engine_id,
            model=info.model,
            max_model_len=info.max_model_len,
            block_size=info.block_size,
            page_bytes=info.page_bytes,
            load=self.load(),
        )

    def load(self) -> pb.Load:
        try:
            load = self._engine.load()
        except KvferryError:
            load = EngineLoad()
        return codec.load_to_wire(load, draining=self.draining)

    # What attachments call.

    def accept(self) -> KvferryError | None:
        """Why a new request cannot be taken now, if so."""
        if self.draining:
            return WorkerDraining(f"worker {self._worker_id} is draining")
        if self.num_requests >= self._max_requests:
            return Overloaded(f"worker {self._worker_id} has {self._max_requests} requests, its limit")
        return None

    def settle(self) -> None:
        """Called when a request was added or ended."""
        if self.num_requests:
            self._idle.clear()
        else:
            self._idle.set()

    def attach(self, messages: AsyncIterator[pb.Downward]) -> _Attachment:
        attachment = _Attachment(self, messages)
        self._attachments.add(attachment)
        return attachment

    def detach(self, attachment: _Attachment) -> asyncio.Task[None]:
        """End the requests of an attachment; it counts until they are gone."""

        async def end() -> None:
            try:
                await attachment.abort_all()
            finally:
                self._attachments.discard(attachment)
                self.settle()

        ending = asyncio.create_task(end())
        self._ending.add(ending)
        ending.add_done_callback(self._ending.discard)
        return ending

    @property
    def engine(self) -> Engine:
        return self._engine

    @property
    def heartbeat_s(self) -> float:
        return self._heartbeat_s


class _Servicer(worker_pb2_grpc.WorkerServicer):
    def __init__(self, worker: WorkerServer) -> None:
        self._worker = worker

    # Not a generator: gRPC leaves one that it cancels within a blocked write to the garbage collector, and the requests
    # with it.
    async def Attach(  # noqa: N802 - the name gRPC generates
        self, request_iterator: AsyncIterator[pb.Downward], context: grpc.aio.ServicerContext[pb.Downward, pb.Upward]
    ) -> None:
        first = await anext(aiter(request_iterator), None)
        if first is None or first.WhichOneof("kind") != "hello":
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the first message must be Hello")
            return
        if first.hello.version != __version__:
            # One wheel for every role: a difference is a half-done upgrade, to be seen rather than suffered.
            log.warning("gateway %s runs %s, this worker %s", first.hello.gateway_id, first.hello.version, __version__)
        attachment = self._worker.attach(request_iterator)
        try:
            await context.write(pb.Upward(welcome=self._worker.welcome()))
            while (step := await attachment.next_step()) is not None:
                await context.write(pb.Upward(step=step))
        finally:
            # Shielded: a second cancel must not leave requests in the engine.
            await asyncio.shield(self._worker.detach(attachment))

    async def Describe(  # noqa: N802
        self, request: pb.DescribeRequest, context: grpc.aio.ServicerContext[pb.Downward, pb.Upward]
    ) -> pb.Welcome:
        return self._worker.welcome()


class _Attachment:
    """One gateway's stream: its requests, and the step that is being filled for it."""

    def __init__(self, worker: WorkerServer, messages: AsyncIterator[pb.Downward]) -> None:
        self._worker = worker
        self.tasks: dict[int, asyncio.Task[None]] = {}
        self._given_up: set[int] = set()  # numbers of tasks that are told to end and whose failure was said
        self._step = pb.Step()
        self._pending_bytes = 0  # of `_step`, about
        self._ready = asyncio.Event()
        self._flush_scheduled = False
        self._closed = False  # one more step, then no more
        self._gone = False  # nobody reads
        self._reader = asyncio.create_task(self._read(messages))

    async def _read(self, messages: AsyncIterator[pb.Downward]) -> None:
        """Follow what the gateway asks until its half of the stream ends."""
        try:
            async for message in messages:
                match message.WhichOneof("kind"):
                    case "submit":
                        self._submit(message.submit)
                    case "cancel":
                        self._cancel(message.cancel.number)
        finally:
            self._gone = True
            self._ready.set()

    def _submit(self, message: pb.Submit) -> None:
        number = message.number
        refusal = self._worker.accept()
        if refusal is None:
            try:
                request = codec.submit_from_wire(message)
            except ValueError as error:
                # One bad message must not end the stream, and with it every other request of that gateway.
                log.warning("request %s cannot be read: %s", message.request_id, error)
                refusal = InvalidRequest(f"the worker cannot read this request: {error}")
        if refusal is not None:
            self._end(number, refusal)
            return
        self.tasks[number] = asyncio.create_task(self._run(number, request))
        self._worker.settle()

    def _cancel(self, number: int) -> None:
        if (task := self.tasks.get(number)) is not None:
            # Not at once: a task that never ran would skip its own cleaning up. The loop runs what it was given in
            # order.
            asyncio.get_running_loop().call_soon(_cancel_once, task)

    async def _run(self, number: int, request: EngineRequest) -> None:
        try:
            async with contextlib.aclosing(self._worker.engine.generate(request)) as outputs:  # type: ignore[type-var]
                async for output in outputs:
                    self._add(number, output)
        except asyncio.CancelledError:
            self._end(number, EngineError("cancelled"))
        except KvferryError as error:
            self._end(number, error)
            if isinstance(error, EngineDead):
                self._worker.died.set()
        except Exception:
            log.exception("request %s failed", request.request_id)
            self._end(number, EngineError("the engine failed on this request; its log says why"))
        finally:
            self.tasks.pop(number, None)
            self._given_up.discard(number)
            self._worker.settle()

    def _add(self, number: int, output: EngineOutput) -> None:
        if number in self._given_up:
            return
        codec.append_output(self._step, number, output)
        self._pending_bytes += codec.approximate_bytes(output)
        if self._pending_bytes > MAX_PENDING_BYTES:
            self._give_up()
        self._schedule_flush()

    def _end(self, number: int, error: KvferryError) -> None:
        if number not in self._given_up:
            codec.append_failure(self._step, number, error)
            self._schedule_flush()

    def _give_up(self) -> None:
        """Forget what waits for a gateway that does not read, and end its requests; the stream itself goes on."""
        numbers = {*self.tasks, *(ended.number for ended in self._step.finished), *self._step.numbers}
        log.error("a gateway does not read: %d requests end, their outputs are dropped", len(numbers))
        self._step = pb.Step()
        self._pending_bytes = 0
        error = WorkerLost("the gateway read too slowly; the worker dropped its outputs")
        for number in sorted(numbers):
            codec.append_failure(self._step, number, error)
        for number in self.tasks:
            self._given_up.add(number)
            self._cancel(number)

    def _schedule_flush(self) -> None:
        # The tasks of one engine step all run in one pass of the event loop; the flush runs after them, so a step
        # becomes one message.
        if not self._flush_scheduled:
            self._flush_scheduled = True
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        self._flush_scheduled = False
        self._ready.set()

    def send_load(self) -> None:
        self._ready.set()

    async def next_step(self) -> pb.Step | None:
        """The next step to send, with the load; at least one a heartbeat, None at the end.

        While the stream is blocked nobody asks, and steps merge into one.
        """
        if not self._closed:
            with contextlib.suppress(TimeoutError):
                # Not wait_for: before Python 3.12 it swallows a cancel that comes together with an output.
                async with asyncio.timeout(self._worker.heartbeat_s):
                    await self._ready.wait()
        elif not self._ready.is_set():
            return None
        if self._gone:
            return None
        self._ready.clear()
        step, self._step = self._step, pb.Step()
        self._pending_bytes = 0
        step.load.CopyFrom(self._worker.load())
        return step

    def close(self) -> None:
        """End the stream after what is ready was sent."""
        self._closed = True
        self._ready.set()

    async def abort_all(self) -> None:
        """Read nothing more and end every request."""
        self._reader.cancel()
        await asyncio.sleep(0)  # as in _cancel: every task has begun before it is cancelled
        tasks = list(self.tasks.values())
        for task in tasks:
            _cancel_once(task)
        results = await asyncio.gather(self._reader, *tasks, return_exceptions=True)
        if isinstance(results[0], Exception):
            log.error("reading from a gateway failed", exc_info=results[0])


def _cancel_once(task: asyncio.Task[None]) -> None:
    # A second cancel would hit the engine while it takes the request out.
    if not task.cancelling():
        task.cancel()
