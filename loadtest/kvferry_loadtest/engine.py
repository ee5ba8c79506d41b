"""Sends a plan when it is due and records what happens.

One dispatcher, no task per request: requests wait in a heap by the time they are due, the dispatcher sleeps until the
next one, and everything else happens where bytes arrive. What can be made before a request is due (its body) is made
while nothing is due.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import math
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from typing import Literal

from kvferry_loadtest.apis import Api, Exchange, Reader, Sampling
from kvferry_loadtest.plan import AnswerOf, Plan, PlannedRequest, RequestId
from kvferry_loadtest.record import Outcome, Record
from kvferry_loadtest.stream import error_text

# Bodies made ahead of their time: enough for a burst, little enough for memory.
NUM_PREPARED = 64
# Nothing is prepared when something is due sooner than this: a long prompt takes a few milliseconds.
PREPARE_MARGIN_S = 0.01
REFUSALS = (429, 503)
# A body is text of a few kilobytes a thousand tokens; an error body longer than this says nothing more.
MAX_ERROR_BYTES = 1 << 16


class Engine:
    """One run of one plan. `run` may be called once."""

    def __init__(
        self,
        plan: Plan,
        apis: Sequence[Api],
        sampling: Sampling,
        *,
        loop_kind: Literal["open", "closed"],
        num_users: int = 1,
        tenant_to_key: Mapping[str, str] | None = None,
        default_key: str = "",
    ) -> None:
        self.plan = plan
        self.num_sent = 0
        self.num_in_flight = 0
        self.records = [
            Record(
                request_id=request.request_id,
                session_id=request.session_id,
                turn=request.turn,
                tenant=request.tenant,
                warmup=request.request_id in plan.warmup,
                due_s=0.0,
                predecessor_wait_s=0.0,
            )
            for request in plan.requests
        ]
        self.num_ended = 0
        self.num_ok = 0
        self._ended: deque[Record] = deque(maxlen=1000)
        self._apis = apis  # that speak alike
        self._in_turn = itertools.cycle(apis)
        self._sampling = sampling
        self._loop_kind = loop_kind
        self._num_users = num_users
        self._keys = dict(tenant_to_key or {})
        self._default_key = default_key
        self._bodies: dict[RequestId, bytes] = {}
        self._due: list[tuple[float, RequestId]] = []
        self._to_prepare: deque[RequestId] = deque()  # by the time they are due
        self._answers: dict[RequestId, str] = {}
        self._exchanges: set[_Exchange] = set()
        self._awake = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._start_s = self._first_s = 0.0
        self._followers: dict[RequestId, list[RequestId]] = {}
        self._num_open: dict[RequestId, int] = {}  # predecessors that have not ended
        self._last_use: dict[RequestId, int] = {}  # how many requests still need an answer's text
        for request in plan.requests:
            self._num_open[request.request_id] = len(set(request.after))
            for earlier in set(request.after):
                self._followers.setdefault(earlier, []).append(request.request_id)
            for earlier in _answers_in(request):
                self._last_use[earlier] = self._last_use.get(earlier, 0) + 1
        # Closed loop: sessions wait for a user, in the order of the plan.
        self._session_to_open: dict[str, int] = {}  # requests that have not ended
        self._session_to_first: dict[str, list[RequestId]] = {}
        for request in plan.requests:
            session_id = request.session_id
            self._session_to_open[session_id] = self._session_to_open.get(session_id, 0) + 1
            first = self._session_to_first.setdefault(session_id, [])
            if not request.after:
                first.append(request.request_id)
        self._sessions: deque[str] = deque()

    def now_s(self) -> float:
        """Seconds since the run began. Not the event loop's clock: uvloop's stands still within a turn of the loop."""
        return time.perf_counter() - self._start_s

    def recently_ended(self, since_s: float) -> Iterator[Record]:
        """The latest of those that ended after `since_s`."""
        return (record for record in self._ended if (record.end_s or 0.0) >= since_s)

    async def run(self, after_warmup: Callable[[], Awaitable[None]] | None = None) -> list[Record]:
        """Until every request has ended or was skipped, warm-up first. On cancellation what is in flight is given up.

        Times of the records count from the end of `after_warmup` (those of the warm-up from its own begin).
        """
        warmup = self.plan.warmup
        try:
            await self._run([request for request in self.plan.requests if request.request_id in warmup])
            if after_warmup is not None:
                await after_warmup()
            await self._run([request for request in self.plan.requests if request.request_id not in warmup])
        finally:
            for exchange in list(self._exchanges):
                exchange.give_up(Outcome.SKIPPED, "the run was ended")
        return self.records

    async def _run(self, phase: list[PlannedRequest]) -> None:
        num_ended = self.num_ended + len(phase)
        first = [request for request in phase if not request.after]
        first.sort(key=lambda request: request.arrival_s or 0.0)
        self._to_prepare.extend(request.request_id for request in first)
        self._prepare_ahead(None)
        # A plan leaves the warm-up time before its other arrivals; it takes as long as it takes.
        arrivals_s = [request.arrival_s for request in first if request.arrival_s is not None]
        self._first_s = min(arrivals_s, default=0.0) if self.plan.warmup else 0.0
        if self._loop_kind == "closed":
            self._sessions.extend(dict.fromkeys(request.session_id for request in phase))
            for _ in range(self._num_users):
                self._next_session(0.0)
        else:
            for request in first:
                self._schedule(request.request_id, self._arrival_s(request) or 0.0, 0.0)
        # Last: what it took to get here is no lateness of the first requests.
        self._start_s = time.perf_counter()
        while self.num_ended < num_ended:
            await self._until_due()
            self.send_due(self.now_s())

    # When.

    def _next_session(self, now_s: float) -> None:
        if self._sessions:
            for request_id in self._session_to_first[self._sessions.popleft()]:
                self._schedule(request_id, now_s, 0.0)

    def _arrival_s(self, request: PlannedRequest) -> float | None:
        """On this run's clock."""
        return None if request.arrival_s is None else max(0.0, request.arrival_s - self._first_s)

    def _schedule(self, request_id: RequestId, due_s: float, predecessor_wait_s: float) -> None:
        record = self.records[request_id]
        record.due_s, record.predecessor_wait_s = due_s, predecessor_wait_s
        if not self._due or due_s < self._due[0][0]:
            self._awake.set()
        heapq.heappush(self._due, (due_s, request_id))

    async def _until_due(self) -> None:
        """Sleep until something is due, or until there is nothing more to wait for."""
        self._awake.clear()
        if not self._due:
            await self._awake.wait()
            return
        self._prepare_ahead(self._due[0][0])
        wait_s = self._due[0][0] - self.now_s()
        if wait_s > 0:
            # uvloop's timers count milliseconds: rounded down, this would spin until then.
            timer = self._loop.call_later(math.ceil(wait_s * 1e3) / 1e3, self._awake.set)
            await self._awake.wait()
            timer.cancel()
        else:
            # Answers are read between two that are late, or lateness would feed itself.
            await asyncio.sleep(0)

    def send_due(self, now_s: float) -> None:
        """Send what is due. Also called while answers are read: hundreds may have arrived at once, and take a while."""
        while self._due and self._due[0][0] <= now_s:
            _, request_id = heapq.heappop(self._due)
            self._send(self.plan.requests[request_id])

    # What.

    def _prepare_ahead(self, next_due_s: float | None) -> None:
        """Make bodies while there is time before `next_due_s`; None: there is."""
        while self._to_prepare and len(self._bodies) < NUM_PREPARED:
            if next_due_s is not None and next_due_s - self.now_s() < PREPARE_MARGIN_S:
                return
            request_id = self._to_prepare.popleft()
            if self.records[request_id].sent_s is None:
                self._bodies[request_id] = self._body(self.plan.requests[request_id])

    def _body(self, request: PlannedRequest) -> bytes:
        return self._apis[0].body(request, self._sampling, self._answers.__getitem__)

    def _send(self, request: PlannedRequest) -> None:
        body = self._bodies.pop(request.request_id, None) or self._body(request)
        api = next(self._in_turn)
        exchange = _Exchange(self, self.records[request.request_id], api.reader())
        self._exchanges.add(exchange)
        self.num_sent += 1
        self.num_in_flight += 1
        # "Sent" includes opening a connection: the client is not late for what the server's backlog costs.
        exchange.record.sent_s = self.now_s()
        key = self._keys.get(request.tenant, self._default_key)
        exchange.begin(api.send(request, body, key, exchange), self._sampling.timeout_s)

    # What exchanges call.

    def ended(self, exchange: _Exchange, text: str) -> None:
        self._exchanges.discard(exchange)
        self.num_in_flight -= 1
        record = exchange.record
        self._ended.append(record)
        if record.outcome is Outcome.OK:
            self.num_ok += 1
            if self._last_use.get(record.request_id):
                self._answers[record.request_id] = text
        self._settle(record)

    def _settle(self, record: Record) -> None:
        """After a request's end, well or not: release the requests that follow it, or wait for its user."""
        now_s = self.now_s() if record.end_s is None else record.end_s
        waiting = [record]
        while waiting:
            ended = waiting.pop()
            self.num_ended += 1
            if not self._due:
                self._awake.set()  # it may have been the last
            request = self.plan.requests[ended.request_id]
            for earlier in _answers_in(request):
                self._last_use[earlier] -= 1
                if not self._last_use[earlier]:
                    self._answers.pop(earlier, None)
            for follower_id in self._followers.get(ended.request_id, ()):
                follower = self.plan.requests[follower_id]
                self._num_open[follower_id] -= 1
                if self._num_open[follower_id]:
                    continue
                arrival_s = self._arrival_s(follower)
                due_s = max(arrival_s or 0.0, now_s + follower.pause_s)
                if all(self.records[earlier].outcome is Outcome.OK for earlier in follower.after):
                    self._schedule(follower_id, due_s, 0.0 if arrival_s is None else due_s - arrival_s)
                    self._to_prepare.appendleft(follower_id)
                else:
                    skipped = self.records[follower_id]
                    skipped.due_s = due_s
                    skipped.error = "a turn before it did not end well"
                    waiting.append(skipped)
            if self._loop_kind == "closed":
                self._session_to_open[ended.session_id] -= 1
                if not self._session_to_open[ended.session_id]:
                    self._next_session(now_s)


class _Exchange:
    """A Receiver that fills its record."""

    def __init__(self, engine: Engine, record: Record, reader: Reader) -> None:
        self.record = record
        self._engine = engine
        self._reader = reader
        self._error_body = b""
        self._exchange: Exchange | None = None
        self._timer: asyncio.TimerHandle | None = None

    def begin(self, exchange: Exchange, timeout_s: float) -> None:
        self._exchange = exchange
        if not exchange.is_over:
            self._timer = asyncio.get_running_loop().call_later(
                timeout_s, self.give_up, Outcome.TIMED_OUT, f"not over within {timeout_s:g} s"
            )

    def status(self, status: int) -> None:
        self.record.status = status

    def body(self, data: bytes) -> None:
        if self.record.status == 200:
            now_s = self._engine.now_s()
            self._reader.feed(data, now_s)
            self._engine.send_due(now_s)
        elif len(self._error_body) < MAX_ERROR_BYTES:
            self._error_body += data

    def ended(self, error: str) -> None:
        record, reader = self.record, self._reader
        record.end_s = self._engine.now_s()
        if not error and record.status == 200:
            reader.finish()
            error = reader.error
        if error:
            record.outcome, record.error = Outcome.FAILED, error
        elif record.status == 200:
            record.outcome = Outcome.OK
        else:
            record.outcome = Outcome.REFUSED if record.status in REFUSALS else Outcome.FAILED
            record.error = f"{record.status}: {error_text(self._error_body)}"
        self._finish()

    def give_up(self, outcome: Outcome, error: str) -> None:
        if self._exchange is not None:
            self._exchange.abort()
        self.record.end_s = self._engine.now_s()
        self.record.outcome, self.record.error = outcome, error
        self._finish()

    def _finish(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        record, reader = self.record, self._reader
        record.token_s = reader.token_s
        record.first_token_s = reader.token_s[0] if reader.token_s else None
        record.finish_reason = reader.finish_reason
        if (usage := reader.usage) is not None:
            record.prompt_tokens = usage.prompt_tokens
            record.completion_tokens = usage.completion_tokens
            record.cached_tokens = usage.cached_tokens
        self._engine.ended(self, reader.text)


def _answers_in(request: PlannedRequest) -> list[RequestId]:
    return [part.request_id for message in request.messages for part in message.parts if isinstance(part, AnswerOf)]
