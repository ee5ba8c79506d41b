"""The worker's end of one gateway's link, over either transport.

A session owns its requests; when its link ends, they are aborted and their pages released.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from google.protobuf.message import DecodeError

from kvferry.engine.base import (
    Engine,
    EngineOutput,
    EngineRequest,
    TransferParams,
)
from kvferry.errors import (
    DeadlineExceeded,
    EngineDead,
    EngineError,
    InvalidRequest,
    KvferryError,
    Overloaded,
    TenantOverloaded,
    WorkerDraining,
    WorkerLost,
)
from kvferry.link import codec
from kvferry.link.engine_admission import FirstOutputs, ImageRoom, WaitingImages
from kvferry.link.flow_control import SILENCE_LIMIT_S
from kvferry.link.identity import QUARANTINE, identity_of, why_no_adapter, why_other_pool
from kvferry.link.outgoing_queue import OutgoingQueue
from kvferry.link.tenants import SessionTenants, TenantMeter
from kvferry.observability.tracing import Span
from kvferry.util.task_set import TaskSet
from kvferry.wire.v1 import worker_pb2 as pb

log = logging.getLogger(__name__)

# Stats go with the first step after this, and by themselves when no step came for IDLE_STATS_DELAY_S: reading an
# engine's counters and sending them with every step would cost as much as a few tokens.
STATS_INTERVAL_S = 0.05
IDLE_STATS_DELAY_S = 0.07

_MAX_LOGGED = 32  # requests, when an engine dies


class SessionTransport(Protocol):
    def messages_pending(self) -> None:
        """Call `GatewaySession.pop_messages` now, or when messages can be sent."""
        ...

    def abort(self) -> None: ...


class InstrumentedRequest(Protocol):
    """`finished` or `failed` is called once."""

    @property
    def span(self) -> Span | None: ...
    def finished(self, last: EngineOutput) -> None: ...
    def failed(self, error: BaseException) -> None: ...


class OnEngine(Protocol):
    is_computing: bool
    due_ms: float  # of the request on this engine

    def note(self, output: EngineOutput) -> None: ...
    def finished(self, last: EngineOutput) -> None: ...


class RequestInstrumentation(Protocol):
    def refused(self) -> None: ...
    def begin(self, request: EngineRequest) -> InstrumentedRequest: ...


class SessionHost(Protocol):
    @property
    def engine(self) -> Engine: ...
    @property
    def heartbeat_s(self) -> float: ...
    @property
    def instrumentation(self) -> RequestInstrumentation: ...

    def welcome(self, hello: pb.Hello | None = None) -> pb.Welcome: ...
    @property
    def meter(self) -> TenantMeter | None:
        """Requests of all sessions, on decode workers whose tenants have limits."""
        ...

    @property
    def image_room(self) -> ImageRoom: ...
    @property
    def first_outputs(self) -> FirstOutputs: ...
    def stats(self) -> pb.Load: ...
    def refusal(self, tenant: str = "", *, is_resumed: bool = False, has_place: bool = False) -> KvferryError | None:
        """Return why no new request can be accepted now, or None. One that `has_place` counts already."""
        ...

    def turn(self, request: EngineRequest) -> contextlib.AbstractAsyncContextManager[OnEngine]:
        """Enter when the engine may have the request."""
        ...

    def begin_trial(self, owner: object) -> bool:
        """Let a suspect in; False while the worker has another one. `end_trial` must follow."""
        ...

    def end_trial(self, owner: object) -> None:
        """Idempotent."""
        ...

    def served_ms(self) -> Mapping[str, float]:
        """Return the engine's work by tenant, since its start."""
        ...

    def elsewhere(self, message: pb.Elsewhere, source: GatewaySession) -> None:
        """Note what other workers did for tenants that wait here."""
        ...

    def quarantine(self, message: pb.Downward, source: GatewaySession) -> None:
        """Remember requests, and pass them on to the other gateways."""
        ...

    def requests_changed(self) -> None:
        """Count requests anew: one began or ended."""
        ...

    def note_output(self) -> None:
        """The engine gave an output: it does not hang."""
        ...

    def engine_died(self, reason: str) -> None: ...


class GatewaySession:
    """Passes requests to the engine; queues outputs for the transport.

    `on_snapshot_wanted` asks for residency; answer with `send_residency`.
    """

    def __init__(
        self,
        worker: SessionHost,
        transport: SessionTransport,
        hello: pb.Hello,
        on_snapshot_wanted: Callable[[GatewaySession], None],
    ) -> None:
        self.gateway_id = hello.gateway_id
        self.features = identity_of(hello).features
        self.tasks: dict[int, asyncio.Task[None]] = {}
        self._tenants = SessionTenants(lambda number: number in self.tasks or number in self._reserved, worker.meter)
        self._reserved: set[int] = set()  # places of requests that are not submitted yet
        self._on_snapshot_wanted = on_snapshot_wanted
        self._worker = worker
        self._transport = transport
        self._loop = asyncio.get_running_loop()
        self._on_engine: set[int] = set()  # of tasks whose requests the engine has
        self._failed_numbers: set[int] = set()  # of tasks that are being cancelled, after their failure was queued
        self._releasing = TaskSet()
        welcome = worker.welcome(hello)
        self._why_refused = welcome.refusal  # requests of this gateway are refused
        self._pool = welcome.pool
        self.believes_full = welcome.load.full  # the gateway does not ask a full worker: it has to be told of room
        self._outgoing = OutgoingQueue(hello.gateway_id, welcome)
        self._flush_scheduled = False
        self._ended = False  # the link is gone
        now_s = self._loop.time()
        self._received_s = self._sent_s = self._stats_sent_s = now_s
        self._stats_due = False  # the stats changed since they were sent
        self._stats_now = False
        self._stats_timer: asyncio.TimerHandle | None = None
        self._heartbeat_due_s = now_s
        self._heartbeat_timer = self._schedule_heartbeat()

    def __repr__(self) -> str:
        ended = " ended" if self._ended else ""
        return f"<GatewaySession {self.gateway_id} requests={len(self.tasks)} {self._outgoing!r}{ended}>"

    @property
    def pending_bytes(self) -> int:
        return self._outgoing.pending_bytes

    @property
    def num_requests(self) -> int:
        """Requests, and places reserved for requests."""
        return len(self.tasks) + len(self._reserved)

    # From the gateway

    def receive(self, payload: bytes) -> None:
        """Handle a Downward message. Raises ValueError for an invalid one; end the link then."""
        self._received_s = self._loop.time()
        if self._ended:
            return
        try:
            message = pb.Downward.FromString(payload)
        except DecodeError as error:
            raise ValueError(f"not a message of ours: {error}") from None
        match message.WhichOneof("kind"):
            case "ack":
                self._outgoing.restore_credit(message.ack.num_messages, message.ack.num_bytes)
                if self._outgoing or self._stats_now:
                    self._transport.messages_pending()
            case "submit":
                self._submit(message.submit)
            case "reserve":
                self._reserve(message.reserve)
            case "cancel":
                self._cancel(message.cancel.number)
            case "release":
                self._release(message.release)
            case "want_snapshot":
                self._on_snapshot_wanted(self)
            case "elsewhere":
                self._worker.elsewhere(message.elsewhere, self)
            case "quarantined" | "quarantine_known":
                self._worker.quarantine(message, self)
            case None:
                pass  # of a newer release
            case kind:
                raise ValueError(f"{kind} is not expected now")

    def _reserve(self, message: pb.Reserve) -> None:
        number = message.number
        if number in self.tasks or number in self._reserved:
            raise ValueError(f"request number {number} is in use")
        refusal = self._refusal(message, is_resumed=message.resumed)
        if refusal is not None:
            self._refuse(number, refusal)
            return
        self._reserved.add(number)
        self._tenants.note(number, message)
        self._outgoing.add_reserved(number)
        self._worker.requests_changed()
        self._schedule_flush()

    def _refusal(
        self, message: pb.Reserve | pb.Submit, *, is_resumed: bool = False, has_place: bool = False
    ) -> KvferryError | None:
        adapters = self._worker.engine.info.adapters
        if why := self._why_refused or why_other_pool(self._pool, message.pool) or why_no_adapter(adapters, message):
            return WorkerDraining(f"this worker refuses gateway {self.gateway_id}: {why}")
        tenant = message.turn.tenant if message.HasField("turn") else ""
        return self._worker.refusal(tenant, is_resumed=is_resumed, has_place=has_place)

    def num_requests_of(self, tenant: str) -> int:
        return self._tenants.num_requests(tenant)  # O(requests)

    def _refuse(self, number: int, refusal: KvferryError) -> None:
        if isinstance(refusal, Overloaded) and not isinstance(refusal, TenantOverloaded):
            self.believes_full = True
        self._worker.instrumentation.refused()
        self._end(number, refusal)

    def _submit(self, message: pb.Submit) -> None:
        number = message.number
        if number in self.tasks:
            raise ValueError(f"request number {number} is in use")
        if number in self._reserved:
            self._reserved.discard(number)
            refusal = self._refusal(message, has_place=True)
        else:
            refusal = self._refusal(message, is_resumed=message.resumed)
        if refusal is None:
            try:
                request = codec.submit_from_wire(message)
                refusal = self._worker.image_room.refusal(request)
            except ValueError as error:
                # One bad message must not end the link, and with it every other request of that gateway.
                log.warning("request %s cannot be read: %s", message.request_id, error)
                refusal = InvalidRequest(f"the worker cannot read this request: {error}")
        if refusal is None and request.is_suspect and not self._worker.begin_trial((self, number)):
            refusal = Overloaded("another request under which an engine was lost is on a worker")
            self.send_stats()  # the worker itself is not full
        if refusal is not None:
            self._refuse(number, refusal)
            self._worker.requests_changed()
            return
        images = WaitingImages(self._worker.image_room, request)
        self.tasks[number] = self._loop.create_task(self._run(number, request, images), name=request.request_id)
        self._tenants.note(number, message)
        self._worker.requests_changed()
        self._note_stats()

    def _cancel(self, number: int) -> None:
        if number in self._reserved:
            self._reserved.discard(number)
            self._worker.requests_changed()
        elif (task := self.tasks.get(number)) is not None:
            # Not at once: a task that never ran would skip its own cleanup. The loop runs callbacks in order.
            self._loop.call_soon(_cancel_once, task)

    def _release(self, message: pb.Release) -> None:
        try:
            params = codec.transfer_params_from_wire(message.transfer_params)
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

    # From the engine

    async def _run(self, number: int, request: EngineRequest, images: WaitingImages) -> None:
        instrumented = self._worker.instrumentation.begin(request)
        trace = instrumented.span.context if instrumented.span is not None else request.trace
        output: EngineOutput | None = None
        num_generated = 0
        self._tenants.begin(request)
        try:
            # The gateway ends the request at this time too; it may be gone, or not hear of it.
            async with asyncio.timeout_at(self._deadline(request)), self._worker.turn(request) as on_engine:
                if not request.is_resumed:
                    await self._worker.first_outputs.begin((self, number), is_suspect=request.is_suspect)
                self._on_engine.add(number)
                async with contextlib.aclosing(  # type: ignore[type-var]
                    self._worker.engine.generate(request, due_ms=on_engine.due_ms, trace=trace)
                ) as outputs:
                    async for output in outputs:
                        self._worker.first_outputs.end((self, number))
                        images.leave()
                        if on_engine.is_computing:
                            on_engine.note(output)
                        self._add(number, output)
                        num_generated += len(output.token_ids)
                        if request.is_suspect:
                            self._worker.end_trial((self, number))
                assert output is not None
                on_engine.finished(output)
            instrumented.finished(output)
        except TimeoutError:
            late = DeadlineExceeded("the request's deadline passed on its worker")
            instrumented.failed(late)
            self._end(number, late)
        except asyncio.CancelledError as error:
            instrumented.failed(error)
            self._end(number, EngineError("cancelled"))
        except KvferryError as error:
            instrumented.failed(error)
            if isinstance(error, EngineDead):
                self._worker.engine_died(error.message)
            self._end(number, error)
        except Exception as error:
            instrumented.failed(error)
            log.exception("request %s failed", request.request_id)
            self._end(number, EngineError("the engine failed on this request; its log says why"))
        finally:
            self.tasks.pop(number, None)
            self._on_engine.discard(number)
            self._worker.first_outputs.end((self, number))
            self._failed_numbers.discard(number)
            if request.is_suspect:
                self._worker.end_trial((self, number))
            self._tenants.end(request, num_generated)
            images.leave()
            self._worker.requests_changed()

    def _deadline(self, request: EngineRequest) -> float | None:
        if request.deadline_s is None:
            return None
        return self._loop.time() + (request.deadline_s - time.monotonic())

    def _add(self, number: int, output: EngineOutput) -> None:
        self._worker.note_output()
        if number not in self._failed_numbers and not self._ended:
            self._outgoing.add_output(number, output)
            self._limit_pending()

    def _end(self, number: int, error: KvferryError) -> None:
        if number not in self._failed_numbers and not self._ended:
            self._outgoing.add_failure(number, error)
            self._limit_pending()

    def _limit_pending(self) -> None:
        if self._outgoing.is_overfull:
            self._outgoing.drop_residency()
            if self._outgoing.is_overfull:
                self._fail_slow_reader()
        self._schedule_flush()

    def _fail_slow_reader(self) -> None:
        """Drop pending messages and end the requests; the link itself stays."""
        # Also requests whose end was in a message that is dropped now.
        numbers = {*self.tasks, *self._outgoing.clear()}
        log.error("gateway %s does not read: %d requests end, their outputs are dropped", self.gateway_id, len(numbers))
        self._fail(numbers, WorkerLost("the gateway read too slowly; the worker dropped its outputs"))
        if self._outgoing.is_half_full:
            # The gateway goes on submitting without reading the answers.
            log.error("gateway %s is cut off", self.gateway_id)
            self._transport.abort()

    def engine_died(self, reason: str) -> None:
        """End all requests."""
        _log_requests(self.gateway_id, sorted(task.get_name() for task in self.tasks.values()))
        if self._ended:
            return
        numbers = self.tasks.keys() - self._failed_numbers
        first_outputs = self._worker.first_outputs
        suspects = {number for number in numbers if (self, number) in first_outputs}
        streams = (numbers & self._on_engine) - suspects
        self._fail(suspects, EngineDead(reason))
        self._fail(streams, EngineDead(reason, is_blameless=bool(first_outputs)))
        # Those that wait had no part in it, and are not to be counted among those that had.
        self._fail(numbers - suspects - streams, WorkerDraining(f"a worker leaves: {reason}"))
        self._schedule_flush()

    def _fail(self, numbers: set[int], error: KvferryError) -> None:
        if not self._reserved.isdisjoint(numbers):
            self._reserved -= numbers
            self._worker.requests_changed()
        for number in sorted(numbers):
            self._outgoing.add_failure(number, error)
        for number in self.tasks:
            self._failed_numbers.add(number)
            self._cancel(number)

    # To the gateway

    def send_residency(self, message: pb.Residency) -> bool:
        """Return False and drop the message when too much waits.

        Raises ValueError when it exceeds one frame.
        """
        if self._ended or not self._outgoing.add_residency(message):
            return False
        self._schedule_flush()
        return True

    def send_stats(self) -> None:
        self._stats_now = True
        self._schedule_flush()

    def send_quarantine(self, message: pb.Upward) -> None:
        """Does nothing for a gateway that does not know the message."""
        if not self._ended and QUARANTINE in self.features:
            self._outgoing.add(message)
            self._limit_pending()

    def _schedule_flush(self) -> None:
        # The tasks of one engine step all run in one pass of the event loop; the flush runs after them, so a step
        # becomes one message, or a few of MAX_STEP_BYTES.
        if not self._flush_scheduled:
            self._flush_scheduled = True
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        self._flush_scheduled = False
        self._transport.messages_pending()

    def pop_messages(self) -> list[bytes]:
        """Remove and return serialized Upward messages, to be sent in order. Empty without credit."""
        outgoing = self._outgoing
        if self._ended or not outgoing.may_send:
            return []
        now_s = self._loop.time()
        if self._stats_now or (outgoing.ends_with_step and now_s - self._stats_sent_s >= STATS_INTERVAL_S):
            stats = self._worker.stats()
            self.believes_full = stats.full
            self._tenants.add_served(stats, self._worker.served_ms(), now_s)
            outgoing.add_stats(stats)
            self._stats_now = self._stats_due = False
            self._stats_sent_s = now_s
        elif outgoing:
            self._note_stats()
        payloads = outgoing.pop_messages()
        if payloads:
            self._sent_s = now_s
        return payloads

    def close(self) -> None:
        """Send only pending messages. The transport ends the link when `pop_messages` is empty."""
        self._outgoing.close()
        self._transport.messages_pending()

    def end(self) -> None:
        """The link is gone: nothing is sent or received any more. Idempotent."""
        self._ended = True
        self._reserved.clear()
        self._outgoing.clear()
        self._heartbeat_timer.cancel()
        if self._stats_timer is not None:
            self._stats_timer.cancel()

    async def abort_all(self) -> None:
        self.end()
        await asyncio.sleep(0)  # as in _cancel: every task has begun before it is cancelled
        tasks = list(self.tasks.values())
        for task in tasks:
            _cancel_once(task)
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._releasing.wait()

    # Timers

    def _note_stats(self) -> None:
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

    def _schedule_heartbeat(self) -> asyncio.TimerHandle:
        self._heartbeat_due_s = self._loop.time() + self._worker.heartbeat_s
        return self._loop.call_later(self._worker.heartbeat_s, self._heartbeat)

    def _heartbeat(self) -> None:
        now_s = self._loop.time()
        if now_s - self._heartbeat_due_s > 1.0:
            # This worker was itself stopped: messages that arrived meanwhile are not read yet.
            self._received_s = now_s
        if now_s - self._received_s > SILENCE_LIMIT_S:
            log.warning("gateway %s was silent for %g s: its link ends", self.gateway_id, SILENCE_LIMIT_S)
            self._transport.abort()
            return
        # Half a period of tolerance: heartbeats are messages too, and each would delay the next one.
        if now_s - self._sent_s > self._worker.heartbeat_s / 2:
            self.send_stats()
        self._heartbeat_timer = self._schedule_heartbeat()


def _cancel_once(task: asyncio.Task[None]) -> None:
    # A second cancel would hit the engine while it takes the request out.
    if not task.cancelling():
        task.cancel()


def _log_requests(gateway_id: str, names: Sequence[str]) -> None:
    if names:
        more = f" and {len(names) - _MAX_LOGGED} more" if len(names) > _MAX_LOGGED else ""
        shown = ", ".join(names[:_MAX_LOGGED])
        log.error("gateway %s had %d requests on the engine: %s%s", gateway_id, len(names), shown, more)
