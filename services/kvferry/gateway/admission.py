"""Admission of requests over HTTP and gRPC: limits of one request, and budgets of all requests in flight."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, Self

import msgspec

from kvferry.config import DEFAULT_POOL, GatewayConfig
from kvferry.engine.base import RenderedPrompt
from kvferry.errors import InvalidRequest, KvferryError, NotReady, Overloaded, TenantOverloaded
from kvferry.gateway.choices import Usage
from kvferry.gateway.identity.tenant_requests import GatewayLimits, TenantRequests
from kvferry.gateway.metrics import GatewayMetrics
from kvferry.gateway.models import Route
from kvferry.gateway.request_trace import RequestTrace
from kvferry.gateway.usage.usage_log import UNFINISHED, UsageRecord
from kvferry.observability.tracing import Tracing

# Limits of one answer: choices times `max_tokens`, and these times `top_logprobs` + 1. A whole answer is kept until its
# end; an entry of log-probabilities has about 200 bytes.
MAX_ANSWER_TOKENS = 4 << 20
MAX_LOGPROB_ENTRIES = 1 << 20
# In one engine step: decoding and encoding take 3 to 5 us for a choice with log-probabilities, and 0.6 to 0.9 us for
# each alternative (AMD EPYC).
MAX_LOGPROB_CHOICES = 64
MAX_STEP_LOGPROB_ENTRIES = 256
# Limits bodies in flight until their prompts are rendered; unread answers may hold as many bytes again. It is more than
# one body may have (12 MiB), or the largest could never be read.
MAX_PENDING_BODY_BYTES = 256 << 20
# Limits prompts in flight, once for each of their choices: 64 MiB of them, and more than the context of any model.
MAX_PENDING_PROMPT_TOKENS = 16 << 20
# A body that took longer to arrive makes room for others.
PATIENCE_S = 1.0
# Between what is missing and the name of its pool, in `waiting_for`.
OF_POOL = " of pool "
_NO_USE = Usage()


class Readiness(msgspec.Struct, frozen=True):
    """Whether requests can be answered now; `waiting_for` names missing parts.

    `left_out`: workers that this gateway must not work with. `unpaired`: those that exchange KV pages with no worker of
    the other role. `unproven`: transfers and tiers that are not used. `pools`: numbers of usable workers by role.
    """

    ready: bool
    waiting_for: Sequence[str]
    members: Sequence[str]
    left_out: Sequence[str] = ()
    unpaired: Sequence[str] = ()
    unproven: Sequence[str] = ()
    pools: Mapping[str, Mapping[str, int]] = {}

    def for_strangers(self) -> Readiness:
        """Return readiness without names of workers and pools, and without differences of workers."""
        waiting_for = [part.partition(OF_POOL)[0] for part in self.waiting_for]
        return Readiness(self.ready, waiting_for, members=())

    def for_tenant(self, pool: str) -> Readiness:
        """Return readiness with one pool only, and without names of workers."""
        waiting_for = [part for part in self.waiting_for if part.partition(OF_POOL)[2] in ("", pool)]
        name = pool or DEFAULT_POOL
        pools = {name: self.pools[name]} if name in self.pools else {}
        return Readiness(self.ready, waiting_for, members=(), pools=pools)


class Work(Protocol):
    """Work of workers for one request."""

    answer_id: str

    @property
    def first_token_after_s(self) -> float | None: ...
    @property
    def token_gap_s(self) -> float | None: ...
    def usage(self) -> Usage: ...
    def num_admitted_tokens(self) -> int: ...


@dataclass(slots=True, eq=False)
class Budget:
    # What all requests may hold of one thing; where it is shared, a tenant no more than it leaves for others.

    what: str
    limit: str  # begins the sentence that says `most`
    most: int
    param: str = "n"
    is_shared: bool = False
    num_taken: int = 0
    by_tenant: dict[str, int] = field(default_factory=dict)  # where it is shared

    def __str__(self) -> str:
        return f"{self.num_taken}/{self.most} {self.what}"

    def take(self, tenant: str, num: int, *, num_held: int) -> None:
        """Raises InvalidRequest where an idle gateway would refuse it too; else Overloaded, or TenantOverloaded."""
        if num_held + num > self.most:
            raise InvalidRequest(
                f"{num_held + num} {self.what} are too many; {self.limit} {self.most}", param=self.param
            )
        self.require_room(num)
        self.take_for_tenant(tenant, num, self.num_taken, self.most)
        self.num_taken += num

    def require_room(self, num: int) -> None:
        if self.num_taken + num > self.most:
            raise Overloaded(f"this gateway has no room for {num} more {self.what} now; {self.limit} {self.most}")

    def give_back(self, tenant: str, num: int) -> None:
        self.num_taken -= num
        self.give_back_for_tenant(tenant, num)

    def take_for_tenant(self, tenant: str, num: int, num_taken: int, most: int) -> None:
        if not self.is_shared:
            return
        if 2 * num > most:
            raise InvalidRequest(
                f"{num} {self.what} are too many; of this gateway's {most} a tenant may have half", param=self.param
            )
        held = self.by_tenant.get(tenant, 0) + num
        if held > most - num_taken - num:
            # Never with what is left: it says what other tenants have in flight.
            raise TenantOverloaded(
                f"with this request the tenant would have {held} {self.what} in flight at this gateway, "
                f"more than would be left of {most} for others"
            )
        if held:
            self.by_tenant[tenant] = held

    def give_back_for_tenant(self, tenant: str, num: int) -> None:
        if self.is_shared and num:
            self.by_tenant[tenant] -= num
            if not self.by_tenant[tenant]:
                del self.by_tenant[tenant]


class Claim:
    """Reservations of one request in a gateway's budgets; the admission releases them at the request's end."""

    __slots__ = ("_admission", "_held", "is_cut", "num_limited", "num_limited_tokens", "route", "tenant", "work")

    def __init__(self, admission: Admission) -> None:
        self._admission = admission
        self._held: dict[Budget, int] = {}
        self.is_cut = False  # its body made room for others
        self.tenant = ""
        self.route: Route | None = None  # once the request is read
        self.work: Work | None = None  # once the request is rendered
        self.num_limited = 0  # choices that count against the tenant's limits
        self.num_limited_tokens = 0

    @property
    def num_body_bytes(self) -> int:
        return self._held.get(self._admission.body_bytes, 0)

    def add_body_bytes(self, num_bytes: int) -> None:
        """Cut slow bodies where room is short. Raises Overloaded, and holds what it held, for none or if cut itself."""
        admission = self._admission
        if self.is_cut:
            raise Overloaded(f"the body took longer than {PATIENCE_S:g} s, while others waited to be read")
        budget = admission.body_bytes
        while budget.num_taken + num_bytes > budget.most and admission.cut_slow_body(self):
            pass
        budget.require_room(num_bytes)
        self._take(budget, num_bytes)

    @contextlib.contextmanager
    def arriving(self, limit: asyncio.Timeout) -> Iterator[None]:
        """Let the body be cut while it is read within `limit`."""
        arriving = self._admission.arriving
        arriving[self] = limit, asyncio.get_running_loop().time()
        try:
            yield
        finally:
            arriving.pop(self, None)

    def take_choices(self, num_choices: int) -> None:
        """Call once the body is complete. Raises as `Budget.take` does."""
        self._take(self._admission.choices, num_choices)

    def take_prompt_tokens(self, num_tokens: int) -> None:
        """Raises as `Budget.take` does. A prompt's tokens count once for each of its choices."""
        self._take(self._admission.prompt_tokens, num_tokens)

    def hold_images(self, num_bytes: int) -> None:
        """Replace what it holds for images. Raises as `Budget.take` does."""
        budget = self._admission.image_bytes
        if (num_less := self._held.get(budget, 0) - num_bytes) > 0:
            self._held[budget] = num_bytes
            budget.give_back(self.tenant, num_less)
        elif num_less:
            self._take(budget, -num_less)

    @contextlib.contextmanager
    def fetching(self, num_images: int, num_running: int, most: int) -> Iterator[None]:
        """Raises as `Budget.take` does. `num_running` of `most` are the fetcher's."""
        fetches = self._admission.fetches
        fetches.take_for_tenant(self.tenant, num_images, num_running, most)
        try:
            yield
        finally:
            fetches.give_back_for_tenant(self.tenant, num_images)

    def _take(self, budget: Budget, num: int) -> None:
        num_held = self._held.get(budget, 0)
        budget.take(self.tenant, num, num_held=num_held)
        self._held[budget] = num_held + num

    def _give_back(self, budget: Budget) -> None:
        budget.give_back(self.tenant, self._held.pop(budget, 0))

    def count(self, num_choices: int) -> None:
        """Raises as `GatewayLimits.admit`."""
        # Before its images and texts cost anything; it stays counted where they are refused.
        limits = self._admission.limits
        if limits is not None and limits.admit(self.tenant, num_choices, 0):
            self.num_limited = num_choices

    def take_answer(self, prompts: Sequence[RenderedPrompt], n: int) -> None:
        """Take the prompts' tokens and images for an answer of `n` choices per prompt; give the body's bytes back.

        Raises InvalidRequest for an answer that may become too large, and as `take_prompt_tokens` does.
        """
        num_choices = n * len(prompts)
        max_tokens = max(prompt.sampling.max_tokens for prompt in prompts)
        num_top = prompts[0].sampling.logprobs  # the same for all
        num_tokens = num_choices * max_tokens
        if num_tokens > MAX_ANSWER_TOKENS:
            raise InvalidRequest(
                f"{num_choices} choices with max_tokens {max_tokens} (left out: the rest of the context) make "
                f"{num_tokens} tokens; at most {MAX_ANSWER_TOKENS} are allowed",
                param="max_tokens",
            )
        if num_top is not None:
            _check_logprobs(num_choices, max_tokens, num_top)
        num_prompt_tokens = n * sum(len(prompt.token_ids) for prompt in prompts)
        self.take_prompt_tokens(num_prompt_tokens)
        self.hold_images(n * sum(len(image.features) for prompt in prompts for image in prompt.images))
        if self._admission.limits is not None and self.num_limited:
            self._admission.limits.used(self.tenant, 0, num_prompt_tokens)
            self.num_limited_tokens = num_prompt_tokens
        self._give_back(self._admission.body_bytes)

    def take_back_limits(self) -> None:
        # What no worker has computed of a request that this cluster refused or failed.
        limits = self._admission.limits
        if limits is None or not self.num_limited:
            return
        num_computed = self.work.num_admitted_tokens() if self.work is not None else 0
        num_requests = 0 if num_computed else self.num_limited
        limits.take_back(self.tenant, num_requests, self.num_limited_tokens - num_computed)
        self.num_limited_tokens = num_computed

    def release(self) -> None:
        for budget in list(self._held):
            self._give_back(budget)
        limits = self._admission.limits
        if self.num_limited and limits is not None:
            limits.end(self.tenant, self.num_limited)
            self.num_limited = 0

    def cut_body(self) -> None:
        self.is_cut = True
        self._give_back(self._admission.body_bytes)


class CountedRequest:
    """One request in flight, from entering its context to leaving it.

    `status` is its HTTP status in metrics, `trace` its span or None.
    """

    __slots__ = (
        "_admission", "begun_s", "body", "claim", "ended_by", "endpoint", "error", "expire", "has_own_end", "status",
        "tenant", "trace",
    )  # fmt: skip

    def __init__(self, claim: Claim, admission: Admission, endpoint: str) -> None:
        self.claim = claim
        self.endpoint = endpoint
        self.begun_s = time.perf_counter()
        self.body = b""  # until it is rendered
        self.status = "500"
        self.trace: RequestTrace | None = None
        self.error: KvferryError | None = None
        self.expire: Callable[[], None] | None = None  # ends its time, once it is served
        self.ended_by: KvferryError | None = None  # why it ends before its time
        self.has_own_end = False  # its client gave it a deadline, which passed: what was computed for it counts
        self.tenant = ""  # once it is known, where requests are counted by tenant
        self._admission = admission

    @property
    def answer_id(self) -> str:
        # Empty until the request is rendered.
        return "" if self.claim.work is None else self.claim.work.answer_id

    def __enter__(self) -> Self:
        self._admission.begin(self)
        return self

    def __exit__(self, *_: object) -> None:
        self._admission.end(self)

    def end(self, error: KvferryError) -> None:
        """End it with an error, now or as soon as its body is read."""
        self.ended_by = error
        if self.expire is not None:
            with contextlib.suppress(RuntimeError):  # its time has just ended by itself
                self.expire()

    def require_not_ended(self) -> None:
        """Raises the error that ended it while its body was read."""
        if self.ended_by is not None:
            raise self.ended_by

    def failed(self, error: KvferryError) -> None:
        self.status = str(error.http_status)
        self.error = error
        if self.trace is not None:
            self.trace.failed(error)

    def failed_in_stream(self, error: KvferryError) -> None:
        """Note an error that the client gets as an event, after the status 200."""
        self.error = error
        if self.trace is not None:
            self.trace.failed(error)

    def left(self, error: BaseException) -> None:
        self.status = "499"
        if self.trace is not None:
            self.trace.failed(error)


class Admission:
    """Counts requests; refuses them while the gateway is full, unready or leaving."""

    # A body counts its bytes as they arrive, until it is rendered; choices and prompt tokens count from then on.

    def __init__(
        self,
        config: GatewayConfig,
        metrics: GatewayMetrics,
        read_readiness: Callable[[], Readiness],
        *,
        by_tenant: TenantRequests | None = None,
        limits: GatewayLimits | None = None,
        read_tracing: Callable[[], Tracing | None] = lambda: None,
    ) -> None:
        """`by_tenant` is None unless tenants can be deleted."""
        self.draining = False
        self._in_flight: dict[CountedRequest, None] = {}  # also those whose bodies are read
        is_shared = by_tenant is not None
        self.choices = Budget("choices", "gateway.max_requests is", config.max_requests, is_shared=is_shared)
        self.prompt_tokens = Budget(
            "prompt tokens of all choices", "a gateway takes", MAX_PENDING_PROMPT_TOKENS, is_shared=is_shared
        )
        self.image_bytes = Budget(
            "bytes of images of all choices",
            "gateway.images.max_pending_mib allows",
            config.images.max_pending_mib << 20,
            param="messages",
            is_shared=is_shared,
        )
        self.fetches = Budget("fetches of images", "", 0, param="messages", is_shared=is_shared)
        self.body_bytes = Budget("bytes of bodies", "those of all requests may have", MAX_PENDING_BODY_BYTES)
        self.arriving: dict[Claim, tuple[asyncio.Timeout, float]] = {}  # bodies and when they began, the oldest first
        self.idle = asyncio.Event()  # set while nothing is in flight
        self.idle.set()
        self.by_tenant, self.limits = by_tenant, limits
        self._read_tracing = read_tracing
        self._metrics = metrics
        self._read_readiness = read_readiness

    @property
    def tracing(self) -> Tracing | None:
        return self._read_tracing()

    @property
    def num_in_flight(self) -> int:
        # Also requests whose bodies are read.
        return len(self._in_flight)

    @property
    def in_flight(self) -> tuple[int, int, int]:
        """Choices, prompt tokens and body bytes."""
        return self.choices.num_taken, self.prompt_tokens.num_taken, self.body_bytes.num_taken

    def __repr__(self) -> str:
        budgets = (self.choices, self.prompt_tokens, self.body_bytes)
        return f"<Admission {self.num_in_flight}, {', '.join(map(str, budgets))}{' draining' if self.draining else ''}>"

    def count_request(self, endpoint: str) -> CountedRequest:
        """Return a context in which a request is in flight; its status is counted at the end."""
        return CountedRequest(Claim(self), self, endpoint)

    def begin(self, counted: CountedRequest) -> None:
        self._in_flight[counted] = None
        self.idle.clear()

    def end(self, counted: CountedRequest) -> None:
        error = counted.error
        if error is not None and not counted.has_own_end and error.http_status in (429, *range(500, 600)):
            counted.claim.take_back_limits()
        counted.claim.release()
        if counted.tenant and self.by_tenant is not None:
            self.by_tenant.remove(counted)
        counted.body = b""
        del self._in_flight[counted]
        if not self._in_flight:
            self.idle.set()
        endpoint, seconds = counted.endpoint, time.perf_counter() - counted.begun_s
        self._metrics.requests(endpoint, counted.status).inc()
        self._metrics.request_seconds[endpoint].observe(seconds)
        has_failed = counted.error is not None
        if counted.error is not None:
            self._metrics.note_refusal(counted.error.code)
            counted.error = None  # its traceback holds the request
        if counted.trace is not None:
            counted.trace.end(counted.status)
        if counted.claim.tenant:
            self._note_use(endpoint, counted, has_failed=has_failed, seconds=seconds)

    def _note_use(self, endpoint: str, counted: CountedRequest, *, has_failed: bool, seconds: float) -> None:
        claim, work = counted.claim, counted.claim.work
        if counted.status == "200":
            outcome = "failed" if has_failed else "ok"
        else:
            outcome = "cancelled" if counted.status == "499" else "refused" if counted.status < "500" else "failed"
        first_token_s, gap_s = (None, None) if work is None else (work.first_token_after_s, work.token_gap_s)
        record = _record_of(counted, outcome, seconds)
        claim.work = None
        self._metrics.tenants.note(record, first_token_s, gap_s)
        if claim.route is not None:
            self._metrics.models.note(record, claim.route.asked, first_token_s, gap_s)
            claim.route = None

    def unfinished_uses(self) -> Iterator[UsageRecord]:
        """Yield a record of each rendered request in flight."""
        for counted in self._in_flight:
            if counted.claim.tenant and counted.claim.work is not None:
                yield _record_of(counted, UNFINISHED, time.perf_counter() - counted.begun_s)

    def note_tenant(self, counted: CountedRequest, tenant: str) -> None:
        counted.claim.tenant = tenant
        if self.by_tenant is not None:
            self.by_tenant.add(counted, tenant)

    def require_admission(self, *, can_render: bool) -> None:
        """Refuse a request before its body is read. Raises NotReady, or Overloaded where no choice has room."""
        if not can_render or self.draining:
            raise NotReady(
                "this gateway is stopping" if self.draining else "this gateway is starting: " + self._missing()
            )
        self.choices.require_room(1)

    def cut_slow_body(self, newest: Claim) -> bool:
        """End the body that held the most bytes for the longest; return False if that is `newest`, or none is slow."""
        now_s = asyncio.get_running_loop().time() if self.arriving else 0.0
        slowest, most = newest, 0.0
        for claim, (_, begun_s) in self.arriving.items():
            if now_s - begun_s < PATIENCE_S:
                break
            if (held := claim.num_body_bytes * (now_s - begun_s)) > most:
                slowest, most = claim, held
        if slowest is newest:
            return False
        limit, _ = self.arriving.pop(slowest)
        slowest.cut_body()
        limit.reschedule(now_s)
        return True

    def _missing(self) -> str:
        return "waiting for " + (", ".join(self._read_readiness().for_strangers().waiting_for) or "the renderer")


def _record_of(counted: CountedRequest, outcome: str, seconds: float) -> UsageRecord:
    claim = counted.claim
    usage = _NO_USE if claim.work is None else claim.work.usage()
    return UsageRecord(
        round(time.time(), 3),
        claim.tenant,
        counted.answer_id,
        counted.endpoint,
        outcome,
        usage.prompt_tokens,
        usage.cached_tokens,
        usage.completion_tokens,
        round(seconds, 4),
        claim.route.model.label if claim.route is not None else "",
        claim.route.adapter if claim.route is not None else "",
    )


def _check_logprobs(num_choices: int, max_tokens: int, num_top: int) -> None:
    """Raises InvalidRequest for more than a gateway encodes beside other streams, or keeps until an answer's end."""
    num_in_step = num_choices * (num_top + 1)
    if num_choices > MAX_LOGPROB_CHOICES or num_in_step > MAX_STEP_LOGPROB_ENTRIES:
        raise InvalidRequest(
            f"{num_choices} choices (prompts times n) with {num_top} top log-probabilities give {num_in_step} "
            f"log-probabilities a token, choices times ({num_top} + 1); with log-probabilities at most "
            f"{MAX_LOGPROB_CHOICES} choices and {MAX_STEP_LOGPROB_ENTRIES} a token are allowed",
            param="n",
        )
    if (num_entries := num_in_step * max_tokens) > MAX_LOGPROB_ENTRIES:
        raise InvalidRequest(
            f"{num_choices} choices with max_tokens {max_tokens} (left out: the rest of the context) and {num_top} top "
            f"log-probabilities make {num_entries} of them, tokens times ({num_top} + 1); "
            f"at most {MAX_LOGPROB_ENTRIES} are allowed",
            param="max_tokens",
        )
