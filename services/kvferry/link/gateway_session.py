"""One gateway's link to a worker, whatever carries it: its requests, and the messages that are being filled for it.

Ownership: an attachment owns the requests that came over it. When its link ends, for whatever reason, they are aborted
and their pages released. Nothing a gateway sends can make another gateway's requests fail.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import logging
from collections import deque
from collections.abc import Callable
from typing import Protocol

from google.protobuf.message import DecodeError

from kvferry.engine.base import Engine, EngineOutput, EngineRequest, TransferParams
from kvferry.errors import EngineDead, EngineError, InvalidRequest, KvferryError, WorkerLost
from kvferry.link import codec
from kvferry.link.flow_control import Credit
from kvferry.link.frames import MAX_FRAME_BYTES
from kvferry.task_set import TaskSet
from kvferry.tracing import Span
from kvferry.wire.v1 import worker_pb2 as pb

log = logging.getLogger(__name__)

# A gateway that stopped reading: when more than this waits for it, its requests end. Well below what one message may
# have, because outputs that wait become one message.
MAX_PENDING_BYTES = 16 << 20

# A gateway speaks every credit.ACK_EVERY_S. One that says nothing for this long is gone, whatever its TCP says.
SILENCE_LIMIT_S = 15.0

# A load goes with the first step after this, and by itself when no step came for IDLE_STATS_DELAY_S: reading an
# engine's counters and sending them with every step would cost as much as a few tokens.
STATS_INTERVAL_S = 0.05
IDLE_STATS_DELAY_S = 0.07

_FAILURE_BYTES = 64  # beside its message


class SessionTransport(Protocol):
    """Where the messages of an attachment leave. Each transport has one."""

    def ready(self) -> None:
        """Something may wait: take it with `GatewaySession.take`, now or when it can be sent."""
        ...

    def abort(self) -> None:
        """End the link now, unsent things and all."""
        ...


class InstrumentedRequest(Protocol):
    """Metrics and trace of one request, until `finished` or `failed` is called, once."""

    @property
    def span(self) -> Span | None: ...
    def finished(self, last: EngineOutput) -> None: ...
    def failed(self, error: BaseException) -> None: ...


class RequestInstrumentation(Protocol):
    """Metrics and traces of the requests of one worker."""

    def refused(self) -> None: ...
    def begin(self, request: EngineRequest) -> InstrumentedRequest: ...


class Serving(Protocol):
    """What an attachment needs of its worker."""

    @property
    def engine(self) -> Engine: ...
    @property
    def heartbeat_s(self) -> float: ...
    @property
    def instrumentation(self) -> RequestInstrumentation: ...

    def welcome(self) -> pb.Welcome: ...
    def stats(self) -> pb.Load: ...
    def accept(self) -> KvferryError | None:
        """Why a new request cannot be taken now, if so."""
        ...

    def settle(self) -> None:
        """A request was added or ended."""
        ...

    def note_output(self) -> None:
        """The engine gave something: it moves."""
        ...

    def engine_died(self, reason: str) -> None: ...


class _Waiting:
    """A message that was not sent yet."""

    __slots__ = ("message", "size_bytes")

    def __init__(self, message: pb.Upward, size_bytes: int = 0) -> None:
        self.message = message
        self.size_bytes = size_bytes  # about


class GatewaySession:
    """Reads what a gateway sends through `receive`; what goes to it waits until the outlet takes it.

    `on_snapshot_wanted` is called when the gateway asks for all this worker holds, to be told with `send_residency`.
    """

    def __init__(
        self,
        worker: Serving,
        transport: SessionTransport,
        hello: pb.Hello,
        on_snapshot_wanted: Callable[[GatewaySession], None] | None = None,
    ) -> None:
        self.gateway_id = hello.gateway_id
        self.tasks: dict[int, asyncio.Task[None]] = {}
        self.on_snapshot_wanted = on_snapshot_wanted
        self._worker = worker
        self._transport = transport
        self._loop = asyncio.get_running_loop()
        self._given_up: set[int] = set()  # numbers of tasks that are told to end and whose failure was said
        self._releasing = TaskSet()
        # In the order they leave. Outputs go into the last one while that is a step.
        self._waiting: deque[_Waiting] = deque([_Waiting(pb.Upward(welcome=worker.welcome()))])
        self.pending_bytes = 0  # of `_waiting`, about
        self._credit = Credit()
        self._flush_scheduled = False
        self._closing = False  # what waits may still leave, whatever the credit
        self._ended = False  # nobody reads
        now_s = self._loop.time()
        self._heard_s = self._sent_s = self._stats_sent_s = now_s
        self._stats_due = False  # something changed since a load was sent
        self._stats_now = False
        self._stats_timer: asyncio.TimerHandle | None = None
        self._beat_due_s = now_s
        self._beat_timer = self._next_beat()

    def __repr__(self) -> str:
        return (
            f"<Attachment {self.gateway_id} requests={len(self.tasks)} pending={self.pending_bytes} bytes "
            f"{self._credit!r}{' closing' if self._closing else ''}{' ended' if self._ended else ''}>"
        )

    # What the gateway says.

    def receive(self, payload: bytes) -> None:
        """A Downward message. Raises ValueError for one that no gateway would send; the link is then to be ended."""
        self._heard_s = self._loop.time()
        if self._ended:
            return
        try:
            message = pb.Downward.FromString(payload)
        except DecodeError as error:
            raise ValueError(f"not a message of ours: {error}") from None
        match message.WhichOneof("kind"):
            case "ack":
                self._credit.restore(message.ack.num_messages, message.ack.num_bytes)
                if self._waiting or self._stats_now:
                    self._transport.ready()
            case "submit":
                self._submit(message.submit)
            case "cancel":
                self._cancel(message.cancel.number)
            case "release":
                self._release(message.release)
            case "want_snapshot":
                if self.on_snapshot_wanted is not None:
                    self.on_snapshot_wanted(self)
            case kind:
                raise ValueError(f"{kind or 'an empty message'} is not expected now")

    def _submit(self, message: pb.Submit) -> None:
        number = message.number
        refusal = self._worker.accept()
        if refusal is None and number in self.tasks:
            raise ValueError(f"request number {number} is in use")
        if refusal is None:
            try:
                request = codec.submit_from_wire(message)
            except ValueError as error:
                # One bad message must not end the link, and with it every other request of that gateway.
                log.warning("request %s cannot be read: %s", message.request_id, error)
                refusal = InvalidRequest(f"the worker cannot read this request: {error}")
        if refusal is not None:
            self._worker.instrumentation.refused()
            self._end(number, refusal)
            return
        self.tasks[number] = self._loop.create_task(self._run(number, request))
        self._worker.settle()
        self._note_stats()

    def _cancel(self, number: int) -> None:
        if (task := self.tasks.get(number)) is not None:
            # Not at once: a task that never ran would skip its own cleaning up. The loop runs what it was given in
            # order.
            self._loop.call_soon(_cancel_once, task)

    def _release(self, message: pb.Release) -> None:
        try:
            params = json.loads(message.transfer_params)
        except ValueError as error:
            log.warning("gateway %s releases what cannot be read: %s", self.gateway_id, error)
            return
        if isinstance(params, dict):
            self._releasing.spawn(self._release_in_engine(params))

    async def _release_in_engine(self, params: TransferParams) -> None:
        try:
            await self._worker.engine.release(params)
        except Exception:
            log.exception("pages were not released; their lease ends them")

    # What the engine gives.

    async def _run(self, number: int, request: EngineRequest) -> None:
        instrumented = self._worker.instrumentation.begin(request)
        if instrumented.span is not None:
            request = dataclasses.replace(request, trace=instrumented.span.context)
        output: EngineOutput | None = None
        try:
            async with contextlib.aclosing(self._worker.engine.generate(request)) as outputs:  # type: ignore[type-var]
                async for output in outputs:
                    self._add(number, output)
            assert output is not None
            instrumented.finished(output)
        except asyncio.CancelledError as error:
            instrumented.failed(error)
            self._end(number, EngineError("cancelled"))
        except KvferryError as error:
            instrumented.failed(error)
            self._end(number, error)
            if isinstance(error, EngineDead):
                self._worker.engine_died(error.message)
        except Exception as error:
            instrumented.failed(error)
            log.exception("request %s failed", request.request_id)
            self._end(number, EngineError("the engine failed on this request; its log says why"))
        finally:
            self.tasks.pop(number, None)
            self._given_up.discard(number)
            self._worker.settle()

    def _add(self, number: int, output: EngineOutput) -> None:
        self._worker.note_output()
        if number in self._given_up or self._ended:
            return
        step = self._open_step()
        codec.append_output(step.message.step, number, output)
        self._grow(step, codec.approximate_bytes(output))

    def _end(self, number: int, error: KvferryError) -> None:
        if number in self._given_up or self._ended:
            return
        step = self._open_step()
        codec.append_failure(step.message.step, number, error)
        self._grow(step, _FAILURE_BYTES + len(error.message))

    def _open_step(self) -> _Waiting:
        if not self._waiting or not self._waiting[-1].message.HasField("step"):
            message = pb.Upward()
            message.step.SetInParent()
            self._waiting.append(_Waiting(message))
        return self._waiting[-1]

    def _grow(self, waiting: _Waiting, size_bytes: int) -> None:
        waiting.size_bytes += size_bytes
        self.pending_bytes += size_bytes
        if self.pending_bytes > MAX_PENDING_BYTES:
            # The gateway sees a gap and asks for a snapshot: costs less than requests.
            self._drop_residency()
        if self.pending_bytes > MAX_PENDING_BYTES:
            self._give_up()
        self._schedule_flush()

    def _give_up(self) -> None:
        """Forget what waits for a gateway that does not read, and end its requests; the link itself goes on."""
        steps = [waiting.message.step for waiting in self._waiting]
        # Also those whose end was said, in a message that is dropped now.
        numbers = {*self.tasks, *(n for step in steps for n in (*step.numbers, *(e.number for e in step.finished)))}
        log.error("gateway %s does not read: %d requests end, their outputs are dropped", self.gateway_id, len(numbers))
        self._waiting.clear()
        self.pending_bytes = 0
        self._fail(numbers, WorkerLost("the gateway read too slowly; the worker dropped its outputs"))
        if self.pending_bytes > MAX_PENDING_BYTES // 2:
            # It goes on asking without ever reading the answers.
            log.error("gateway %s is cut off", self.gateway_id)
            self._transport.abort()

    def fail_all(self, error: KvferryError) -> None:
        """End every request with `error`, after what it gave already."""
        if not self._ended and (numbers := self.tasks.keys() - self._given_up):
            self._fail(numbers, error)
            self._schedule_flush()

    def _fail(self, numbers: set[int], error: KvferryError) -> None:
        step = self._open_step()
        for number in sorted(numbers):
            codec.append_failure(step.message.step, number, error)
        size_bytes = len(numbers) * (_FAILURE_BYTES + len(error.message))
        step.size_bytes += size_bytes
        self.pending_bytes += size_bytes
        for number in self.tasks:
            self._given_up.add(number)
            self._cancel(number)

    # What goes to the gateway.

    def send_residency(self, message: pb.Residency) -> bool:
        """Send after everything that waits now. False when too much waits: it is dropped, and the gateway sees a gap.

        Raises ValueError for a message that is too large for one frame.
        """
        size_bytes = message.ByteSize()
        if size_bytes + 16 > MAX_FRAME_BYTES:
            raise ValueError(f"a Residency of {size_bytes} bytes; send it in pieces")
        if self._ended or self.pending_bytes + size_bytes > MAX_PENDING_BYTES:
            return False
        self._waiting.append(_Waiting(pb.Upward(residency=message), size_bytes))
        self.pending_bytes += size_bytes
        self._schedule_flush()
        return True

    def _drop_residency(self) -> None:
        kept = deque(waiting for waiting in self._waiting if not waiting.message.HasField("residency"))
        if num_dropped := len(self._waiting) - len(kept):
            log.warning("gateway %s reads slowly: %d messages of residency are dropped", self.gateway_id, num_dropped)
            self._waiting = kept
            self.pending_bytes = sum(waiting.size_bytes for waiting in kept)

    def send_stats(self) -> None:
        """Tell how loaded this worker is, at once."""
        self._stats_now = True
        self._schedule_flush()

    def _schedule_flush(self) -> None:
        # The tasks of one engine step all run in one pass of the event loop; the flush runs after them, so a step
        # becomes one message.
        if not self._flush_scheduled:
            self._flush_scheduled = True
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        self._flush_scheduled = False
        self._transport.ready()

    def take(self) -> list[bytes]:
        """Serialized Upward messages that may be sent now, in order. The caller sends them all.

        Without credit there are none, and steps merge into one.
        """
        if self._ended or not (self._credit.left or self._closing):
            return []
        waiting, now_s = self._waiting, self._loop.time()
        last = waiting[-1].message if waiting else None
        if self._stats_now or (
            last is not None and now_s - self._stats_sent_s >= STATS_INTERVAL_S and last.HasField("step")
        ):
            self._open_step().message.step.load.CopyFrom(self._worker.stats())
            self._stats_now = self._stats_due = False
            self._stats_sent_s = now_s
        elif last is not None:
            self._note_stats()
        payloads: list[bytes] = []
        while waiting and (self._credit.left or self._closing):
            first = waiting.popleft()
            payload = first.message.SerializeToString()
            self.pending_bytes -= first.size_bytes
            self._credit.spend(len(payload))
            payloads.append(payload)
        if payloads:
            self._sent_s = now_s
        return payloads

    def close(self) -> None:
        """Let what waits leave, then nothing more. The transport ends the link when `take` is empty."""
        self._closing = True
        self._transport.ready()

    def end(self) -> None:
        """Nobody reads any more and nothing more comes. May be repeated."""
        self._ended = True
        self._waiting.clear()
        self.pending_bytes = 0
        self._beat_timer.cancel()
        if self._stats_timer is not None:
            self._stats_timer.cancel()

    async def abort_all(self) -> None:
        """End every request, and return when they are gone."""
        self.end()
        await asyncio.sleep(0)  # as in _cancel: every task has begun before it is cancelled
        tasks = list(self.tasks.values())
        for task in tasks:
            _cancel_once(task)
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._releasing.wait()

    # Time.

    def _note_stats(self) -> None:
        """Something changed: a load follows, with a step or, when none comes, by itself."""
        self._stats_due = True
        if self._stats_timer is None:
            self._stats_timer = self._loop.call_later(IDLE_STATS_DELAY_S, self._send_idle_stats)

    def _send_idle_stats(self) -> None:
        self._stats_timer = None
        if not self._stats_due:
            return
        if self._loop.time() - self._stats_sent_s >= STATS_INTERVAL_S:
            self.send_stats()
        else:
            self._note_stats()

    def _next_beat(self) -> asyncio.TimerHandle:
        self._beat_due_s = self._loop.time() + self._worker.heartbeat_s
        return self._loop.call_later(self._worker.heartbeat_s, self._beat)

    def _beat(self) -> None:
        now_s = self._loop.time()
        if now_s - self._beat_due_s > 1.0:
            # This worker was itself stopped: what came meanwhile is not read yet.
            self._heard_s = now_s
        if now_s - self._heard_s > SILENCE_LIMIT_S:
            log.warning("gateway %s was silent for %g s: its link ends", self.gateway_id, SILENCE_LIMIT_S)
            self._transport.abort()
            return
        # Half a period of tolerance: beats themselves are messages, and each would make the next one late.
        if now_s - self._sent_s > self._worker.heartbeat_s / 2:
            self.send_stats()
        self._beat_timer = self._next_beat()


def _cancel_once(task: asyncio.Task[None]) -> None:
    # A second cancel would hit the engine while it takes the request out.
    if not task.cancelling():
        task.cancel()
