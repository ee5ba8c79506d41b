"""A gateway's side of the stream to one worker.

A link dials for as long as it is open, and dials again when the stream breaks. Requests on a broken stream end with
WorkerLost; the worker aborts them on its side.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import AsyncIterator, Callable

import grpc

from kvferry import __version__
from kvferry.engine.base import EngineLoad, EngineOutput, EngineRequest, PromptSources
from kvferry.errors import EngineError, KvferryError, WorkerLost
from kvferry.membership.base import Member
from kvferry.wire.v1 import worker_pb2 as pb
from kvferry.wire.v1 import worker_pb2_grpc
from kvferry.worker import codec
from kvferry.worker.server import CHANNEL_OPTIONS

log = logging.getLogger(__name__)

# A worker sends a load at every heartbeat (1 s). One that says nothing for this long is not serving, whatever its TCP
# says.
SILENCE_LIMIT_S = 15.0
REDIAL_FIRST_S = 0.1
REDIAL_MOST_S = 3.0


Sink = Callable[[EngineOutput], None]
Orphaned = Callable[[EngineOutput], None]


class RemoteRequest:
    """A request on a worker. Its outputs go to the sink as they arrive; `wait` for the end, `cancel` to stop it.

    The sink runs within the link's reading of a step, for all requests of that step in turn: it must be quick. One that
    raises ends its own request.
    """

    __slots__ = ("_ended", "_link", "_number", "_result", "_sink", "_waiter")

    def __init__(self, link: WorkerLink, number: int, sink: Sink) -> None:
        self._link = link
        self._number = number
        self._sink = sink
        self._result: EngineOutput | KvferryError | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._ended = False  # nobody is told anything any more

    async def wait(self) -> EngineOutput:
        """The last output, which the sink got too. Raises the KvferryError the request failed with."""
        if self._result is None:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        self._ended = True
        if isinstance(self._result, KvferryError):
            raise self._result
        assert self._result is not None
        return self._result

    def take(self, item: EngineOutput | KvferryError) -> bool:
        """Pass on what arrived; True when nothing follows it."""
        if isinstance(item, KvferryError):
            self._end(item)
            return True
        try:
            self._sink(item)
        except KvferryError as error:
            self._end(error)
            self._link.cancel(self._number, None)
            return True
        except Exception:
            log.exception("the reader of request %d of worker %s failed", self._number, self._link.member.member_id)
            self._end(EngineError("the gateway failed on this request; its log says why"))
            self._link.cancel(self._number, None)
            return True
        if item.finish_reason is None:
            return False
        self._end(item)
        return True

    def cancel(self, orphaned: Orphaned | None = None) -> None:
        """Stop the request on the worker and release its pages; may be repeated, and after the end.

        A request may finish before its cancel reaches the worker. Its last output then goes to `orphaned`: it may name
        pages that an engine keeps for whoever takes them.
        """
        if self._ended:
            return
        self._ended = True
        self._sink = _nobody
        if orphaned is not None and isinstance(self._result, EngineOutput):
            orphaned(self._result)
        self._link.cancel(self._number, orphaned)

    def _end(self, result: EngineOutput | KvferryError) -> None:
        self._result = result
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


def _nobody(output: EngineOutput) -> None:
    pass


class WorkerLink:
    """Owns channel, stream and the requests on it.

    `on_change` is called when the link comes up, goes down or starts draining.
    """

    def __init__(self, member: Member, gateway_id: str, on_change: Callable[[], None]) -> None:
        self.member = member
        self.load = EngineLoad()
        self.draining = False
        self.connected = False
        self.generation = 0  # how often it connected: a worker that was lost and came back is another try
        self.welcome: pb.Welcome | None = None
        self._gateway_id = gateway_id
        self._on_change = on_change
        self._requests: dict[int, RemoteRequest] = {}
        self._number_to_orphaned: dict[int, Orphaned] = {}  # cancelled here; the worker has not yet said how they ended
        self._next_number = 1
        self._outgoing: asyncio.Queue[pb.Downward] = asyncio.Queue()
        self._task = asyncio.create_task(self._keep_attached())

    def __repr__(self) -> str:
        state = "connected" if self.connected else "dialling"
        if self.draining:
            state += " draining"
        return f"<WorkerLink {self.member.member_id} {state} requests={len(self._requests)}>"

    @property
    def usable(self) -> bool:
        """May be given new requests."""
        return self.connected and not self.draining

    @property
    def num_requests(self) -> int:
        """Requests of this gateway that have not ended."""
        return len(self._requests)

    def submit(self, request: EngineRequest, sink: Sink) -> RemoteRequest:
        """Send a request whose outputs go to `sink`. Never waits; raises WorkerLost when the link is down."""
        if not self.connected:
            raise WorkerLost(f"worker {self.member.member_id} is not connected")
        number = self._next_number
        message = codec.submit_to_wire(number, request)
        self._next_number += 1
        remote = self._requests[number] = RemoteRequest(self, number, sink)
        self._outgoing.put_nowait(message)
        return remote

    def cancel(self, number: int, orphaned: Orphaned | None) -> None:
        if self._requests.pop(number, None) is None or not self.connected:
            return
        if orphaned is not None:
            self._number_to_orphaned[number] = orphaned
        self._outgoing.put_nowait(pb.Downward(cancel=pb.Cancel(number=number)))

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
        """One stream from dialling to its end; True when it ever worked."""
        worked = False
        self._outgoing = asyncio.Queue()
        outgoing = self._outgoing
        async with grpc.aio.insecure_channel(self.member.address, options=CHANNEL_OPTIONS) as channel:
            call = worker_pb2_grpc.WorkerStub(channel).Attach(self._messages(outgoing))
            try:
                while True:
                    # Not wait_for: before Python 3.12 it swallows a cancel that comes together with a message, and
                    # `close` would wait for ever.
                    async with asyncio.timeout(SILENCE_LIMIT_S):
                        message = await call.read()
                    if message is grpc.aio.EOF:
                        reason = "it ended the stream"
                        break
                    if message.WhichOneof("kind") == "welcome":
                        if message.welcome.worker_id != self.member.member_id:
                            # Another process took the port of one that is gone.
                            reason = f"{self.member.address} is now {message.welcome.worker_id}"
                            break
                        worked = True
                        self._connected(message.welcome)
                    else:
                        self._take(message.step)
            except TimeoutError:
                reason = f"it was silent for {SILENCE_LIMIT_S:g} s"
            except grpc.aio.AioRpcError as error:
                reason = f"the stream broke ({error.code().name})"
            except asyncio.CancelledError:
                # grpc.aio cancels its own call when it cannot write a message. That must not end the link.
                task = asyncio.current_task()
                if task is None or task.cancelling():
                    raise
                reason = "this gateway could not write to it"
            except Exception:
                log.exception("a message of worker %s cannot be read", self.member.member_id)
                reason = "a message of it cannot be read"
            finally:
                call.cancel()
            self._disconnected(reason)
        return worked

    async def _messages(self, outgoing: asyncio.Queue[pb.Downward]) -> AsyncIterator[pb.Downward]:
        yield pb.Downward(hello=pb.Hello(gateway_id=self._gateway_id, version=__version__))
        while True:
            yield await outgoing.get()

    def _connected(self, welcome: pb.Welcome) -> None:
        self.welcome = welcome
        self.connected = True
        self.generation += 1
        self._take_load(welcome.load)
        log.info("worker %s attached at %s", self.member.member_id, self.member.address)
        self._on_change()

    def _disconnected(self, reason: str) -> None:
        was_connected, self.connected = self.connected, False
        requests, self._requests = self._requests, {}
        self._number_to_orphaned.clear()
        for remote in requests.values():
            remote.take(WorkerLost(f"worker {self.member.member_id} was lost: {reason}"))
        if was_connected:
            log.warning("worker %s lost with %d requests: %s", self.member.member_id, len(requests), reason)
            self._on_change()

    def _take(self, step: pb.Step) -> None:
        requests = self._requests
        for number, item in codec.outputs_of(step):
            remote = requests.get(number)
            if remote is None:
                # Cancelled here; what the worker sent meanwhile has no reader.
                ended = isinstance(item, KvferryError) or item.finish_reason is not None
                orphaned = self._number_to_orphaned.pop(number, None) if ended else None
                if orphaned is not None and isinstance(item, EngineOutput):
                    orphaned(item)
                continue
            if remote.take(item):
                requests.pop(number, None)
        if step.HasField("load"):
            self._take_load(step.load)

    def _take_load(self, load: pb.Load) -> None:
        self.load = codec.load_from_wire(load)
        if load.draining != self.draining:
            self.draining = load.draining
            self._on_change()


def pages_of(sources: PromptSources, block_size: int) -> int:
    """Pages that a transfer of these tokens moved, the last one partly filled."""
    return -(-sources.external_kv_transfer // block_size)
