"""Lets requests onto the engine by tenants' shares: prompts that it computes, and streams of its batch."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import heapq
import math
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

from kvferry.engine.base import Backlogs, CachedTokens, EngineOutput, EngineRequest, Turn
from kvferry.errors import Overloaded, Preempted
from kvferry.tenancy.namespace import DEFAULT_NAMESPACE
from kvferry.tenancy.pages.outcome import OTHER
from kvferry.tenancy.shares.debts import Debts
from kvferry.tenancy.shares.expected_wait import BacklogCurve
from kvferry.tenancy.shares.fair_queue import FairQueue, QueueParameters
from kvferry.tenancy.shares.slots import DecodeSlots
from kvferry.tenancy.shares.tenant_queue import Slice

# Prefill work left inside an engine when the next prompt is submitted: enough that the engine never waits, also with
# several short prompts in a step. All of it is added to the time to first token of a tenant that returns.
DEPTH_MS: Final = 30.0
# Share of the batch's slots reserved for tenants below their share: always, and at most when they lately wanted more.
RESERVED_SHARE: Final = 1 / 32
MAX_RESERVED_SHARE: Final = 1 / 8
# A stream that is preempted computes again what is no longer cached, so it keeps its slot for this long at least.
MIN_GENERATING_S: Final = 0.25
MAX_GENERATING_S: Final = 5.0  # the same, where its time before the first token was this long

MAX_NAMED: Final = 64  # tenants in a report
MAX_KNOWN: Final = 2048  # tenants whose work is counted; those that sent nothing for longest are forgotten first
# Estimates may be wrong: pages that an earlier request was to compute never come when it is cancelled. So prompts
# inside the engine have at most so many times the depth's work, or the longest one's, if nothing of them is cached.
MAX_UNCACHED_DEPTHS: Final = 4.0
MAX_COUNTED: Final = 200  # tenants with series of their own
MAX_RATE_CHANGE: Final = 4.0  # that one prompt can teach

_NO_TURN: Final = Turn(DEFAULT_NAMESPACE.tenant, 1.0)
_FIRST_MS_PER_TOKEN: Final = 0.1  # until prompts were measured
_FIXED_MS: Final = 1.0  # of a prompt that is wholly cached
_GAIN: Final = 0.2
_MIN_PAUSE_MS: Final = 2.0
_MIN_TOKENS: Final = 32  # fewer say nothing about the rate
_LOOK_AGAIN_S: Final = 0.05  # for a stream that may be preempted


@dataclass(slots=True)
class TenantTimes:
    charged_s: float = 0.0
    num_waits: int = 0  # of prompts for their turns
    waited_s: float = 0.0
    num_slot_waits: int = 0  # of streams for slots of the batch
    slot_waited_s: float = 0.0
    num_prompt_tokens: int = 0  # of requests that ended
    cached: CachedTokens = field(default_factory=CachedTokens)  # of these


class OnEngine:
    """One request on the engine. Tell it every output until the first with tokens."""

    __slots__ = ("_begun_s", "_end_prompt", "_stream", "_times", "count_tokens", "due_ms", "is_computing")

    def __init__(
        self,
        end_prompt: Callable[[EngineOutput | None], None] | None = None,
        stream: _Stream | None = None,
        due_ms: float = 0.0,
        times: TenantTimes | None = None,
    ) -> None:
        self.count_tokens: Callable[[int], None] | None = None  # called with the prompt's, at the request's end
        self.due_ms = due_ms  # for the engine, as in Engine.generate
        self._times = times
        self.is_computing = end_prompt is not None or stream is not None
        self._end_prompt = end_prompt
        self._stream = stream
        self._begun_s = _now_s() if stream is not None else 0.0

    def note(self, output: EngineOutput | None) -> None:
        """End the prompt's turn; None for a request that ends without an output."""
        if not self.is_computing or not (output is None or output.token_ids or output.finish_reason is not None):
            return
        self.is_computing = False
        if self._stream is not None:
            # What going on costs is not paid more often than it is used.
            now_s = _now_s()
            self._stream.may_end_s = now_s + min(max(MIN_GENERATING_S, now_s - self._begun_s), MAX_GENERATING_S)
        if self._end_prompt is not None:
            end_prompt, self._end_prompt = self._end_prompt, None
            end_prompt(output)

    def finished(self, last: EngineOutput) -> None:
        if last.sources is None:
            return
        if self.count_tokens is not None:
            self.count_tokens(last.sources.total)
        if self._times is not None:
            self._times.num_prompt_tokens += last.sources.total
            self._times.cached += last.cached or CachedTokens()


class Turns:
    """The order of requests on one engine. Belongs to one event loop."""

    def __init__(self, num_slots: int | None, depth_ms: float = DEPTH_MS) -> None:
        """`num_slots` of the batch are shared out; None for a prefill worker, whose streams end with their prompts."""
        self._prompts = _Prompts(depth_ms)
        self._slots = None if num_slots is None else _Slots(num_slots)
        self._known: OrderedDict[str, int] = OrderedDict()  # tenants and `prompt_tokens`, least recently seen first

    def __repr__(self) -> str:
        return f"<Turns {self._prompts!r} {self._slots!r}>"

    @property
    def num_waiting(self) -> int:
        return self._prompts.num_waiting + (0 if self._slots is None else self._slots.num_waiting)

    @property
    def num_prompts(self) -> int:
        """Prompts that wait here, or are on the engine and not computed yet."""
        return self._prompts.num_waiting + self._prompts.num_inside

    @property
    def waiting_tokens(self) -> int:
        """Prompt tokens of requests that wait and are computed here, cached ones included."""
        return self._prompts.waiting_tokens + (0 if self._slots is None else self._slots.waiting_tokens)

    def backlogs(self) -> Backlogs | None:
        return self._prompts.backlogs()

    @property
    def served_ms(self) -> Mapping[str, float]:
        return self._prompts.served_ms

    @property
    def counts(self) -> Mapping[str, TenantTimes]:
        """Return what tenants were charged and how long they waited, by name or as `OTHER`, since the start."""
        return self._prompts.counts

    @property
    def prompt_tokens(self) -> Mapping[str, int]:
        # Prompt tokens of ended requests, by tenant, since the tenant is known.
        return self._known

    def elsewhere(self, got_ms: Mapping[str, float], num_workers: int) -> None:
        self._prompts.elsewhere(got_ms, num_workers)

    @contextlib.asynccontextmanager
    async def turn(self, request: EngineRequest) -> AsyncIterator[OnEngine]:
        """Enter when the engine may have the request, and leave when it is gone.

        Raises Overloaded, and Preempted when a tenant below its share needs the slot of a request that allows it.
        """
        turn = request.turn or _NO_TURN
        self._note(turn.tenant)
        count_tokens = functools.partial(self._count_tokens, turn.tenant)
        async with contextlib.AsyncExitStack() as stack:
            stream: _Stream | None = None
            if self._slots is not None:
                begun_s = _now_s()
                stream = await stack.enter_async_context(self._slots.slot(turn, request))
                times = self._prompts.times_of(turn.tenant)
                times.num_slot_waits += 1
                times.slot_waited_s += _now_s() - begun_s
            if request.transfer_params is not None:
                on_engine = OnEngine(stream=stream, times=self._prompts.times_of(turn.tenant))
                on_engine.count_tokens = count_tokens
                yield on_engine
                return
            if stream is not None:
                stream.may_end_s = -math.inf  # it has computed nothing yet
            on_engine = await self._prompts.begin(turn, request, stream)
            on_engine.count_tokens = count_tokens
            try:
                yield on_engine
            finally:
                on_engine.note(None)

    def _count_tokens(self, tenant: str, num_tokens: int) -> None:
        if tenant in self._known:
            self._known[tenant] += num_tokens

    def _note(self, tenant: str) -> None:
        self._known.setdefault(tenant, 0)
        self._known.move_to_end(tenant)
        if len(self._known) > MAX_KNOWN:
            forgotten, _ = self._known.popitem(last=False)
            self._prompts.forget(forgotten)
            if self._slots is not None:
                self._slots.forget(forgotten)


class _Waiting:
    __slots__ = ("_rate", "granted", "num_cached", "num_missing", "tenant")

    def __init__(self, request: EngineRequest, turn: Turn, rate: Callable[[], float]) -> None:
        num_tokens = len(request.prompt_token_ids)
        self.tenant = turn.tenant
        self.num_missing = num_tokens if turn.missing_tokens is None else min(turn.missing_tokens, num_tokens)
        self.num_cached = num_tokens - self.num_missing
        self.granted: asyncio.Future[Slice[_Waiting]] = asyncio.get_running_loop().create_future()
        self._rate = rate

    @property
    def cost_ms(self) -> float:
        return _FIXED_MS + self.num_missing * self._rate()

    @property
    def uncached_ms(self) -> float:
        """What it costs if nothing of it is cached."""
        return _FIXED_MS + (self.num_missing + self.num_cached) * self._rate()

    @property
    def prefix(self) -> int:
        return self.num_cached


class _Prompts:
    def __init__(self, depth_ms: float) -> None:
        # Prompts are not cut, so a turn is the quantum by which debts are measured.
        parameters = QueueParameters(slice_ms=math.inf, depth_ms=depth_ms, is_ordered=True)
        self._queue: FairQueue[_Waiting] = FairQueue(parameters, _num_cached, Debts(parameters.turn_ms))
        self._ms_per_token = _FIRST_MS_PER_TOKEN
        # Prompts inside, oldest first, and how long each was computed: the engine computes the one that is due first.
        self._inside: dict[Slice[_Waiting], float] = {}
        self._noted_s = 0.0  # until then
        self._uncached_ms: dict[Slice[_Waiting], float] = {}  # of those inside
        self._timer: asyncio.TimerHandle | None = None
        self.waiting_tokens = 0
        self.counts = {OTHER: TenantTimes()}

    def __repr__(self) -> str:
        return repr(self._queue)

    @property
    def num_waiting(self) -> int:
        return self._queue.num_requests

    @property
    def num_inside(self) -> int:
        return len(self._inside)

    @property
    def served_ms(self) -> Mapping[str, float]:
        return self._queue.served_ms

    def elsewhere(self, got_ms: Mapping[str, float], num_workers: int) -> None:
        self._queue.elsewhere(got_ms, num_workers, _now_s())

    def forget(self, tenant: str) -> None:
        self._queue.forget(tenant)

    def backlogs(self) -> Backlogs | None:
        if not (self._queue.num_requests or self._inside):
            return None
        self._note_computed()
        waiting = self._queue.backlogs()
        for piece, computed_ms in self._inside.items():
            ms, share = waiting.get(piece.tenant, (0.0, self._queue.weight_of(piece.tenant)))
            waiting[piece.tenant] = (ms + max(0.0, piece.ms - computed_ms), share)
        if len(waiting) <= MAX_NAMED:
            return Backlogs(waiting)
        named = dict(heapq.nlargest(MAX_NAMED, waiting.items(), key=lambda item: item[1][0]))
        others = BacklogCurve.of(backlog for tenant, backlog in waiting.items() if tenant not in named)
        return Backlogs(named, others.buckets)

    async def begin(self, turn: Turn, request: EngineRequest, stream: _Stream | None) -> OnEngine:
        num_tokens = len(request.prompt_token_ids)
        self._queue.set_weight(turn.tenant, turn.share)
        waiting = _Waiting(request, turn, lambda: self._ms_per_token)
        limit = self._queue.add(waiting, _now_s(), is_continued=request.is_resumed)
        if limit is not None:
            raise Overloaded(f"too many requests wait at a worker (worker.{limit.value})")
        self.waiting_tokens += num_tokens
        added_s = _now_s()
        self._feed()
        try:
            piece = await waiting.granted
        except asyncio.CancelledError:
            if not waiting.granted.cancelled():
                self._end(waiting.granted.result(), 0.0)
            elif self._queue.cancel(waiting, _now_s()):
                self._feed()
            raise
        finally:
            self.waiting_tokens -= num_tokens
        begun_s = _now_s()
        times = self.times_of(turn.tenant)
        times.num_waits += 1
        times.waited_s += begun_s - added_s
        if stream is not None:
            stream.may_end_s = math.inf
        return OnEngine(lambda output: self._end_prompt(piece, output), stream, piece.due_ms, times)

    def _end_prompt(self, piece: Slice[_Waiting], output: EngineOutput | None) -> None:
        if output is None:  # cancelled, or failed
            self._note_computed()
            ms = min(self._inside[piece], self._uncached_ms[piece])
            rest_ms = self._inside.pop(piece) - ms
            if (computed := self._computed()) is not None:
                self._inside[computed] += rest_ms
            self._end(piece, ms)
            return
        self._note_computed(piece)
        elapsed_ms = self._inside[piece]
        durations = output.times.durations() if output.times is not None else None
        if durations is not None and durations.prefill_ms is not None and durations.prefill_share is not None:
            ms = durations.prefill_ms * durations.prefill_share
        else:
            # The engine tells its own times at the end of an answer. It computes prompts one after another.
            ms = min(elapsed_ms, MAX_RATE_CHANGE * self._uncached_ms[piece])
        num_computed = output.sources.local_compute if output.sources is not None else piece.request.num_missing
        if num_computed >= _MIN_TOKENS:
            rate = self._ms_per_token
            measured = min(max(ms / num_computed, rate / MAX_RATE_CHANGE), rate * MAX_RATE_CHANGE)
            self._ms_per_token += _GAIN * (measured - rate)
        self._end(piece, ms)

    def _end(self, piece: Slice[_Waiting], ms: float) -> None:
        self._inside.pop(piece, None)
        self._uncached_ms.pop(piece, None)
        self.times_of(piece.tenant).charged_s += ms / 1e3
        self._queue.measured(piece, ms, _now_s())
        self._feed()

    def _note_computed(self, ended: Slice[_Waiting] | None = None) -> None:
        """Give the time since the last call to the prompt that has `ended`, or to the one that is due first."""
        now_s = _now_s()
        if (computed := ended or self._computed()) is not None:
            self._inside[computed] += (now_s - self._noted_s) * 1e3
        self._noted_s = now_s

    def _computed(self) -> Slice[_Waiting] | None:
        return min(self._inside, key=lambda piece: piece.due_ms, default=None)

    def _done_ms(self) -> float:
        piece = self._computed()
        return 0.0 if piece is None else min(piece.ms, self._inside[piece])

    def _feed(self) -> None:
        self._feed_now()
        if self._timer is None and self._queue.num_requests and self._inside:
            # The engine is to have the next prompt before it has done all others.
            self._note_computed()
            left_ms = self._queue.inside_ms - self._done_ms() - self._queue.parameters.depth_ms
            self._timer = asyncio.get_running_loop().call_later(max(_MIN_PAUSE_MS, left_ms) / 1e3, self._feed_later)

    def _feed_later(self) -> None:
        self._timer = None
        self._feed()

    def _feed_now(self) -> None:
        self._note_computed()
        while self._may_take_more() and (piece := self._queue.next_slice(self._done_ms())) is not None:
            self._inside[piece] = 0.0
            self._uncached_ms[piece] = piece.request.uncached_ms
            if piece.request.granted.cancelled():  # in this turn of the loop: its task has not run yet
                del self._inside[piece], self._uncached_ms[piece]
                self._queue.measured(piece, 0.0, _now_s())
            else:
                piece.request.granted.set_result(piece)

    def times_of(self, tenant: str) -> TenantTimes:
        times = self.counts.get(tenant)
        if times is None:
            times = self.counts[OTHER]
            if len(self.counts) <= MAX_COUNTED:
                times = self.counts[tenant] = TenantTimes()
        return times

    def _may_take_more(self) -> bool:
        inside_ms = self._uncached_ms.values()
        most_ms = max(self._queue.parameters.depth_ms, max(inside_ms, default=0.0))
        return sum(inside_ms) < MAX_UNCACHED_DEPTHS * most_ms


class _Stream:
    # One request that waits for a slot or has one.
    __slots__ = ("_is_preempted", "_is_preemptible", "_task", "granted", "may_end_s")

    def __init__(self, *, is_preemptible: bool) -> None:
        self.granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.may_end_s = math.inf  # preempted from then on
        self._is_preemptible = is_preemptible
        self._is_preempted = False
        self._task: asyncio.Task[object] | None = None

    @contextlib.asynccontextmanager
    async def preemptible(self) -> AsyncIterator[None]:
        """Raises Preempted once `preempt` was called, unless the task is cancelled for another reason too."""
        self._task = asyncio.current_task()
        try:
            yield
        except asyncio.CancelledError:
            if self._is_preempted and not self._uncancel():
                raise Preempted("a tenant below its share needs the slot") from None
            raise
        finally:
            if self._is_preempted:
                self._uncancel()

    def may_end(self) -> bool:
        # A second cancel would hit the engine while it takes the request out.
        return (
            self._is_preemptible
            and _now_s() >= self.may_end_s
            and self._task is not None
            and not self._task.cancelling()
        )

    def preempt(self) -> None:
        assert self._task is not None
        self._is_preempted = True
        self._task.cancel()

    def _uncancel(self) -> int:
        assert self._task is not None
        self._is_preempted = False
        return self._task.uncancel()


class _Line:
    # A tenant's streams that wait: those that go on, then new ones, the first that came first.
    __slots__ = ("_new", "_resumed")

    def __init__(self) -> None:
        self._resumed: deque[_Stream] = deque()
        self._new: deque[_Stream] = deque()

    def __len__(self) -> int:
        return len(self._resumed) + len(self._new)

    def add(self, stream: _Stream, *, is_resumed: bool) -> None:
        (self._resumed if is_resumed else self._new).append(stream)

    def popleft(self) -> _Stream:
        return (self._resumed or self._new).popleft()

    def remove(self, stream: _Stream) -> bool:
        for line in (self._resumed, self._new):
            if stream in line:
                line.remove(stream)
                return True
        return False


class _Slots:
    # Each slot of the batch goes to the tenant with the fewest streams for its share.
    def __init__(self, num_slots: int) -> None:
        num_reserved, max_reserved = int(num_slots * RESERVED_SHARE), int(num_slots * MAX_RESERVED_SHARE)
        self._slots: DecodeSlots[_Stream] = DecodeSlots(num_slots, num_reserved, max_reserved)
        self._lines: dict[str, _Line] = {}
        self._preempted: _Stream | None = None  # until it has left its slot
        self._timer: asyncio.TimerHandle | None = None
        self.waiting_tokens = 0

    def __repr__(self) -> str:
        return repr(self._slots)

    @property
    def num_waiting(self) -> int:
        return sum(map(len, self._lines.values()))

    def forget(self, tenant: str) -> None:
        self._slots.forget(tenant)

    @contextlib.asynccontextmanager
    async def slot(self, turn: Turn, request: EngineRequest) -> AsyncIterator[_Stream]:
        tenant = turn.tenant
        num_tokens = 0 if request.transfer_params is not None else len(request.prompt_token_ids)
        self._slots.set_weight(tenant, turn.share)
        stream = _Stream(is_preemptible=request.is_preemptible)
        self._lines.setdefault(tenant, _Line()).add(stream, is_resumed=request.is_resumed)
        self._slots.wait(tenant, _now_s())
        self.waiting_tokens += num_tokens
        self._feed()
        try:
            await stream.granted
        except asyncio.CancelledError:
            if not stream.granted.cancelled():
                self._end(tenant, stream)
            elif (line := self._lines.get(tenant)) is not None and line.remove(stream):
                self._leave(tenant)
                self._feed()
            raise
        finally:
            self.waiting_tokens -= num_tokens
        try:
            async with stream.preemptible():
                yield stream
        finally:
            self._end(tenant, stream)

    def _end(self, tenant: str, stream: _Stream) -> None:
        if stream is self._preempted:
            self._preempted = None
        self._slots.end(tenant, stream, _now_s())
        self._feed()

    def _feed(self) -> None:
        now_s = _now_s()
        while (tenant := self._slots.next_tenant(now_s)) is not None:
            stream = self._lines[tenant].popleft()
            if stream.granted.cancelled():  # as above
                self._leave(tenant)
                continue
            self._slots.begin(tenant, stream, now_s)
            if not self._lines[tenant]:
                del self._lines[tenant]
            stream.granted.set_result(None)
        if self._preempted is None and self._slots.is_short(now_s):
            self._preempt(now_s)

    def _preempt(self, now_s: float) -> None:
        # One at a time: the slot of the last one may be all that is missing.
        victim = self._slots.victim(now_s, _Stream.may_end)
        if victim is not None:
            _, self._preempted = victim
            self._preempted.preempt()
        elif self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(_LOOK_AGAIN_S, self._look_again)

    def _look_again(self) -> None:
        self._timer = None
        self._feed()

    def _leave(self, tenant: str) -> None:
        self._slots.leave(tenant)
        if not self._lines[tenant]:
            del self._lines[tenant]


def _num_cached(prefix: object) -> int:
    assert isinstance(prefix, int)
    return prefix


def _now_s() -> float:
    return asyncio.get_running_loop().time()
