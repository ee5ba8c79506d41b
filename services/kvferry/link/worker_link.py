"""A gateway's end of the link to one worker, over either transport."""

from __future__ import annotations

import asyncio
import json
import logging
import random
from collections.abc import Callable, Iterable, Mapping

from kvferry import __version__
from kvferry.config import WorkerConfig
from kvferry.engine.base import EngineOutput, EngineRequest, EngineStats, TransferParams, Turn
from kvferry.errors import InvalidRequest, KvferryError, Overloaded, TenantOverloaded, WorkerLost
from kvferry.link import codec
from kvferry.link.flow_control import ACK_EVERY_S, QUIET_S, SILENCE_LIMIT_S, AckCounter
from kvferry.link.frame_connection import FrameConnection
from kvferry.link.frames import MAX_FRAME_BYTES
from kvferry.link.identity import (
    RESERVE,
    GatewayIdentity,
    adapters_of,
    identity_of,
    why_incompatible,
    why_refused,
)
from kvferry.link.quarantine import QuarantineExchange
from kvferry.link.remote_request import OnOrphan, OnOutput, OnText, RemoteRequest
from kvferry.link.tenants import WorkerTenants, elsewhere
from kvferry.membership.base import Member
from kvferry.wire.v1 import worker_pb2 as pb

log = logging.getLogger(__name__)

REDIAL_FIRST_S = 0.1
REDIAL_MOST_S = 3.0


class Place:
    """A request's place on a worker, before the request is submitted."""

    __slots__ = ("_link", "generation", "is_used", "number")

    def __init__(self, link: WorkerLink, number: int, generation: int) -> None:
        self._link = link
        self.number = number
        self.generation = generation
        self.is_used = False

    def release(self) -> None:
        """Give the place back unless its request was submitted. Idempotent."""
        if not self.is_used:
            self.is_used = True
            self._link.release_place(self)


OnResidency = Callable[["WorkerLink", pb.Residency], None]


class WorkerLink:
    """Owns the connection and its requests; dials again until `close`.

    Requests on a broken link end with WorkerLost. `on_change` is called when the link comes up, goes down or starts
    draining; `on_residency` for residency messages, in order with the steps. Callbacks must be quick and never raise.
    """

    def __init__(
        self,
        member: Member,
        gateway_id: str,
        on_change: Callable[[], None],
        worker: WorkerConfig = WorkerConfig(),  # noqa: B008 - frozen
        *,
        identity: GatewayIdentity | None = None,
        on_residency: OnResidency = lambda link, message: None,
        on_room: Callable[[], None] = lambda: None,  # a full worker has room
        on_survived: Callable[[], None] = lambda: None,  # the worker is back with the same engine
        on_vanished: Callable[[], None] = lambda: None,  # it went away without a word
        on_quarantined: Callable[[pb.Quarantined], None] = lambda message: None,
    ) -> None:
        """`identity` is this gateway's: a worker of another cluster, model or protocol is not connected."""
        self.member = member
        self.stats = EngineStats()
        self.tenants = WorkerTenants()
        self.draining = self.connected = False
        self.generation = 0  # number of connections so far: a worker that was lost and came back may be tried again
        self.is_full = False  # it refuses new requests
        self.why_incompatible = ""  # empty unless worker and gateway must not work together
        self.features = self.adapters = frozenset[str]()  # of the worker
        self.quarantine = QuarantineExchange(
            self._send, lambda: self.features if self.connected else frozenset(), on_quarantined
        )
        self._on_residency = on_residency
        self._on_room, self._on_survived, self._on_vanished = on_room, on_survived, on_vanished
        self._engine_id = ""  # of the last connection
        self.identity = identity or GatewayIdentity()
        self._reserving: dict[int, asyncio.Future[None]] = {}
        self._gateway_id = gateway_id
        self._on_change = on_change
        self._worker = worker
        self._requests: dict[int, RemoteRequest] = {}
        self._number_to_on_orphan: dict[int, OnOrphan] = {}  # cancelled here; the worker has not yet reported their end
        self._next_number = 1
        self._connection: FrameConnection | None = None
        self._ack_counter = AckCounter()
        self._heard_s = 0.0
        self._fault = self._why_not = ""  # why this link gives up its connection, and why the last dial failed
        self._given_up = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._task = asyncio.create_task(self._keep_attached())

    def __repr__(self) -> str:
        state = "connected" if self.connected else "dialling"
        if self.draining:
            state += " draining"
        return f"<WorkerLink {self.member.member_id} {state} requests={len(self._requests)}>"

    @property
    def usable(self) -> bool:
        return self.connected and not self.draining

    @property
    def is_quiet(self) -> bool:
        """True if nothing came for QUIET_S."""
        return self._loop.time() - self._heard_s > QUIET_S

    @property
    def num_requests(self) -> int:
        return len(self._requests)

    async def reserve(self, turn: Turn | None = None, *, is_resumed: bool = False, pool: str = "") -> Place:
        """Reserve the place of a request that is submitted later. The caller submits it, or releases the place.

        Raises WorkerLost, or the worker's refusal: Overloaded, WorkerDraining. A worker that knows no places gives one
        without asking.
        """
        if not self.connected:
            raise WorkerLost("a worker is not connected")
        number = self._next_number
        self._next_number += 1
        place = Place(self, number, self.generation)
        if RESERVE not in self.features:
            return place
        answer = self._reserving[number] = self._loop.create_future()
        self._send(codec.reserve_to_wire(number, turn, is_resumed=is_resumed, pool=pool))
        try:
            await answer
        except TenantOverloaded:
            self.tenants.note_no_room(turn, self._loop.time())
            raise
        except asyncio.CancelledError:
            place.release()
            raise
        finally:
            self._reserving.pop(number, None)
        return place

    def submit(
        self,
        request: EngineRequest,
        on_output: OnOutput,
        on_text: OnText | None = None,
        place: Place | None = None,
    ) -> RemoteRequest:
        """Never waits. Raises WorkerLost when the link is down, InvalidRequest for a request over MAX_FRAME_BYTES.

        `on_text` gets outputs of only tokens and text. A place that was reserved on an earlier connection is none.
        """
        if not self.connected:
            raise WorkerLost("a worker is not connected")
        number = self._next_number
        if place is not None and place.generation == self.generation:
            number = place.number
        payload = _submit_payload(number, request)
        if number == self._next_number:
            self._next_number += 1
        else:
            assert place is not None
            place.is_used = True
        worker = self.member.member_id
        remote = self._requests[number] = RemoteRequest(worker, number, on_output, on_text, self.cancel, request.turn)
        self._send_payload(payload)
        return remote

    def cancel(self, number: int, on_orphan: OnOrphan | None) -> None:
        if self._requests.pop(number, None) is None or not self.connected:
            return
        if on_orphan is not None:
            self._number_to_on_orphan[number] = on_orphan
        self._send(pb.Downward(cancel=pb.Cancel(number=number)))

    def release_place(self, place: Place) -> None:
        if self.connected and place.generation == self.generation and RESERVE in self.features:
            self._send(pb.Downward(cancel=pb.Cancel(number=place.number)))

    def release(self, transfer_params: TransferParams) -> None:
        """Release kept pages that no decode engine was given.

        While the link is down, does nothing: their lease ends.
        """
        if self.connected:
            self._send(pb.Downward(release=pb.Release(transfer_params=json.dumps(transfer_params).encode())))

    def send_elsewhere(self, served_ms: Mapping[str, float], num_workers: int) -> None:
        if self.connected:
            self._send(elsewhere(served_ms, num_workers))

    def want_snapshot(self) -> None:
        if self.connected:
            self._send(pb.Downward(want_snapshot=pb.WantSnapshot()))

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _keep_attached(self) -> None:
        pause_s = REDIAL_FIRST_S
        try:
            while True:
                if await self._attach():
                    pause_s = REDIAL_FIRST_S
                await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))
                pause_s = min(pause_s * 2, REDIAL_MOST_S)
        finally:
            self._disconnected("this gateway closed the link")

    async def _attach(self) -> bool:
        generation = self.generation
        self._ack_counter = AckCounter()
        self._fault = ""
        self._given_up.clear()
        self._heard_s = self._loop.time()
        try:
            async with asyncio.timeout(SILENCE_LIMIT_S):
                connection = await FrameConnection.dial(self.member.link_address, self._worker.tls, self._receive)
        except TimeoutError:
            self._not_attached(f"it was silent for {SILENCE_LIMIT_S:g} s")
            return False
        except (OSError, KvferryError) as error:
            self._not_attached(str(error) or type(error).__name__)
            return False
        self._connection = connection
        try:
            self._send(pb.Downward(hello=self._hello()))
            reason = await self._until_ended(connection)
            if self.generation == generation:
                self._not_attached(reason)
            self._disconnected(reason, has_vanished=not self._fault)
        finally:
            self._connection = None
            # Before closing, which may wait: requests continue on other workers.
            self._disconnected("this gateway closed the link")
            await connection.close()
        return self.generation > generation

    def _hello(self) -> pb.Hello:
        own = self.identity.current()
        return pb.Hello(
            gateway_id=self._gateway_id,
            version=__version__,
            protocol=own.protocol(),
            cluster=own.cluster,
            model=own.model.to_wire(),
        )

    def _not_attached(self, reason: str) -> None:
        """Log the reason, as a warning only when it changes."""
        level = logging.DEBUG if reason == self._why_not else logging.WARNING
        log.log(level, "no link to worker %s yet: %s", self.member.member_id, reason)
        self._why_not = reason

    async def _until_ended(self, connection: FrameConnection) -> str:
        given_up = asyncio.create_task(self._given_up.wait())
        acked_s = self._loop.time()
        try:
            while True:
                begun_s = self._loop.time()
                wait_s = min(self._heard_s + SILENCE_LIMIT_S, acked_s + ACK_EVERY_S) - begun_s
                await asyncio.wait(
                    (connection.ended, given_up), timeout=max(0.0, wait_s), return_when=asyncio.FIRST_COMPLETED
                )
                if self._fault:
                    return self._fault
                if connection.ended.done():
                    return connection.ended.result()
                now_s = self._loop.time()
                if now_s - begun_s > max(0.0, wait_s) + 1.0:
                    # This gateway was itself stopped: messages that arrived meanwhile are not read yet.
                    self._heard_s = now_s
                if now_s - self._heard_s >= SILENCE_LIMIT_S:
                    return f"it was silent for {SILENCE_LIMIT_S:g} s"
                if now_s - acked_s >= ACK_EVERY_S:
                    acked_s = now_s
                    if self.connected:
                        self._acknowledge()
        finally:
            given_up.cancel()

    def _send(self, message: pb.Downward) -> None:
        self._send_payload(message.SerializeToString())

    def _send_payload(self, payload: bytes) -> None:
        if self._connection is not None:
            self._connection.send(payload)

    def _receive(self, payload: bytes) -> None:
        if self._fault:
            return
        self._heard_s = self._loop.time()
        try:
            message = pb.Upward.FromString(payload)
            match message.WhichOneof("kind"):
                case "step" if self.connected:
                    self._on_step(message.step)
                case "residency" if self.connected:
                    self._on_residency(self, message.residency)
                case "welcome" if not self.connected:
                    if message.welcome.worker_id != self.member.member_id:
                        # Another process took the port of a worker that is gone.
                        self._give_up("another worker has its address now")
                        return
                    peer, own = identity_of(message.welcome), self.identity.current()
                    why_not = why_incompatible(own, peer) or why_refused(message.welcome, self.member.pool)
                    self._note_incompatible(why_not)
                    if why_not:
                        self._give_up(why_not)
                        return
                    self.identity.linked(self.member.member_id, peer)
                    self.features = peer.features
                    self.adapters = adapters_of(message.welcome)
                    self._connected(message.welcome)
                case "quarantined" | "quarantine_known":
                    self.quarantine.receive(message)
                case None:
                    pass  # of a newer release
                case kind:
                    raise ValueError(f"{kind} is not expected now")
        except Exception:
            log.exception("a message of worker %s cannot be read", self.member.member_id)
            self._give_up("a message of it cannot be read")
            return
        if self._ack_counter.count(len(payload)):
            self._acknowledge()

    def _acknowledge(self) -> None:
        counter = self._ack_counter
        counter.acknowledged()
        self._send(pb.Downward(ack=pb.Ack(num_messages=counter.num_messages, num_bytes=counter.num_bytes)))

    def _give_up(self, reason: str) -> None:
        self._fault = reason
        self._given_up.set()

    def _connected(self, welcome: pb.Welcome) -> None:
        self.connected = True
        self.generation += 1
        # A worker whose engine died stays for a moment, and drains.
        lives = bool(welcome.engine_id) and welcome.engine_id == self._engine_id and not welcome.load.draining
        if lives:
            self._on_survived()
        self._engine_id = welcome.engine_id
        self._why_not = ""
        self.tenants.attach()
        self._update_stats(welcome.load)
        log.info("worker %s is linked: %s", self.member.member_id, self._connection)
        self._on_change()

    def _note_incompatible(self, why: str) -> None:
        if why != self.why_incompatible:
            self.why_incompatible = why
            self._on_change()

    def _disconnected(self, reason: str, *, has_vanished: bool = False) -> None:
        was_connected, self.connected = self.connected, False
        if was_connected and has_vanished and not self.draining:
            self._on_vanished()  # before its requests hear of it
        self.is_full = False
        requests, self._requests = self._requests, {}
        for answer in self._reserving.values():
            if not answer.done():
                answer.set_exception(WorkerLost(f"a worker was lost: {reason}"))
        self.quarantine.disconnected()
        self._number_to_on_orphan.clear()
        for remote in requests.values():
            remote.deliver(WorkerLost(f"a worker was lost: {reason}", has_vanished=has_vanished))
        if was_connected:
            log.warning("worker %s lost with %d requests: %s", self.member.member_id, len(requests), reason)
            self._on_change()

    def _on_step(self, step: pb.Step) -> None:
        for number in step.reserved:
            answer = self._reserving.get(number)
            if answer is not None and not answer.done():
                answer.set_result(None)
        for entry in step.sources:
            if (remote := self._requests.get(entry.number)) is not None:
                remote.sources = codec.sources_from_wire(entry.sources)
        if codec.is_text_only(step):
            self._deliver_texts(step)
            self._deliver_outputs(codec.ends_of(step))
        else:
            self._deliver_outputs(codec.outputs_of(step))
        if step.HasField("load"):
            self._update_stats(step.load)

    def _deliver_texts(self, step: pb.Step) -> None:
        requests = self._requests
        # Every token passes this loop.
        for number, token_ids, text in codec.texts_of(step):
            remote = requests.get(number)
            if remote is None:
                continue  # cancelled here
            try:
                remote.on_text(token_ids, text)
            except Exception as error:
                remote.fail(error)

    def _deliver_outputs(self, outputs: Iterable[tuple[int, EngineOutput | KvferryError]]) -> None:
        requests = self._requests
        for number, item in outputs:
            remote = requests.get(number)
            if remote is None and (answer := self._reserving.get(number)) is not None:
                if isinstance(item, KvferryError) and not answer.done():
                    self._note_refusal(item)
                    answer.set_exception(item)
                continue
            if remote is None:
                # Cancelled here, while the worker was still sending.
                ended = isinstance(item, KvferryError) or item.finish_reason is not None
                on_orphan = self._number_to_on_orphan.pop(number, None) if ended else None
                if on_orphan is not None and isinstance(item, EngineOutput):
                    on_orphan(item)
                continue
            if isinstance(item, TenantOverloaded):
                self.tenants.note_no_room(remote.turn, self._loop.time())
            elif isinstance(item, KvferryError):
                self._note_refusal(item)
            if remote.deliver(item):
                requests.pop(number, None)

    def has_room_for(self, turn: Turn | None) -> bool:
        return not self.is_full and self.tenants.has_room(turn, self._loop.time())

    def _note_refusal(self, error: KvferryError) -> None:
        if isinstance(error, Overloaded) and not isinstance(error, TenantOverloaded):
            # Until it says that it has room.
            self.is_full = True

    def _update_stats(self, load: pb.Load) -> None:
        self.stats = codec.stats_from_wire(load)
        self.tenants.take(load)
        was_full, self.is_full = self.is_full, load.full
        if was_full and not load.full:
            self._on_room()
        if load.draining != self.draining:
            self.draining = load.draining
            self._on_change()


def _submit_payload(number: int, request: EngineRequest) -> bytes:
    """Raises InvalidRequest for one over MAX_FRAME_BYTES."""
    of_images, payload = request.num_image_bytes, b""
    if of_images <= MAX_FRAME_BYTES:
        payload = codec.submit_to_wire(number, request).SerializeToString()
    if (size := max(len(payload), of_images)) > MAX_FRAME_BYTES:
        # The worker would end the link, and with it every other request of this gateway.
        parts = f", {of_images} of them for its {len(request.images)} images," if of_images else ""
        raise InvalidRequest(f"the request takes {size} bytes{parts} to a worker; the limit is {MAX_FRAME_BYTES}")
    return payload
