"""Building blocks of all workloads: sessions that begin, conversations that grow, a plan that takes requests in order.

All chance comes from generators that are seeded with the scenario's seed and a name, one for each concern: a session's
content does not change when there are more sessions, or when they come faster. Keys of segments begin with the seed, so
runs with different seeds have no content in common, and with the tenant, since tenants have none in common either.
"""

from __future__ import annotations

from itertools import accumulate
from random import Random
from typing import Literal

import msgspec

from kvferry_loadtest import arrivals
from kvferry_loadtest.plan import AnswerOf, Message, Plan, PlannedRequest, RequestId, Segment
from kvferry_loadtest.scenario import Arrivals, Scenario

Part = Segment | AnswerOf | None  # None: a segment of no tokens


class Session(msgspec.Struct, frozen=True, kw_only=True):
    """One that begins. `rng` draws what is in it."""

    session_id: str
    tenant: str
    arrival_s: float | None  # None in a closed loop
    warmup: bool
    rng: Random


class PlanBuilder:
    """Numbers requests as they are added. A request follows only what was added before."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.notes: dict[str, int] = {}  # what was left out or changed, for a report
        self._requests: list[PlannedRequest] = []
        self._warmup: set[RequestId] = set()
        self._session_to_num_requests: dict[str, int] = {}

    def __repr__(self) -> str:
        return f"PlanBuilder({self.scenario.name}, {len(self._requests)} requests)"

    def rng(self, *concern: object) -> Random:
        return Random("/".join(map(str, (self.scenario.seed, *concern))))

    def segment(self, num_tokens: int, *key: object) -> Segment | None:
        """`num_tokens` at scale 1; None for 0."""
        if not num_tokens:
            return None
        return Segment("/".join(map(str, (f"s{self.scenario.seed}", *key))), self.scenario.tokens(num_tokens))

    def sessions(self, offset_s: float = 0.0) -> list[Session]:
        """Warm-up sessions, then the measured ones; in an open loop the first may begin at `offset_s`."""
        scenario = self.scenario
        num_sessions = scenario.warmup_sessions + (scenario.num_sessions or 0)
        starts_s: list[float | None] = [None] * num_sessions
        if scenario.arrivals is not None:
            starts_s = [offset_s + at_s for at_s in self.times(scenario.arrivals, num_sessions, "arrivals")]
        names = [tenant.name for tenant in scenario.tenants] or [""]
        weights = list(accumulate([tenant.weight for tenant in scenario.tenants] or [1.0]))
        tenant_rng = self.rng("tenants")
        return [
            self.session(
                f"session-{index}",
                tenant_rng.choices(names, cum_weights=weights)[0],
                starts_s[index],
                warmup=index < scenario.warmup_sessions,
            )
            for index in range(num_sessions)
        ]

    def session(self, session_id: str, tenant: str, arrival_s: float | None, *, warmup: bool = False) -> Session:
        return Session(
            session_id=session_id, tenant=tenant, arrival_s=arrival_s, warmup=warmup, rng=self.rng(session_id)
        )

    def times(self, process: Arrivals, count: int, concern: str) -> list[float]:
        return arrivals.times(process.process, process.rate_per_s, process.burstiness or 1.0, count, self.rng(concern))

    def add(
        self,
        session: Session,
        *,
        messages: tuple[Message, ...] = (),
        tokens: tuple[Segment, ...] = (),
        max_tokens: int,
        after: tuple[RequestId, ...] = (),
        pause_s: float = 0.0,
        tools: bool = False,
    ) -> RequestId:
        """The request's id. It is due with its session when it follows nothing."""
        request_id = RequestId(len(self._requests))
        turn = self._session_to_num_requests.get(session.session_id, 0)
        self._session_to_num_requests[session.session_id] = turn + 1
        self._requests.append(
            PlannedRequest(
                request_id=request_id,
                session_id=session.session_id,
                turn=turn,
                tenant=session.tenant,
                arrival_s=None if after else session.arrival_s,
                after=after,
                pause_s=pause_s,
                messages=messages,
                tokens=tokens,
                max_tokens=max_tokens,
                tools=tools,
            )
        )
        if session.warmup:
            self._warmup.add(request_id)
        return request_id

    def plan(self) -> Plan:
        return Plan(
            scenario=self.scenario.name,
            seed=self.scenario.seed,
            requests=tuple(self._requests),
            warmup=frozenset(self._warmup),
            notes=dict(self.notes),
        )


class Conversation:
    """Grows by a question and the server's answer at a time; a fork goes its own way from there."""

    def __init__(self, builder: PlanBuilder, session: Session, system: Segment | None, *, tools: bool = False) -> None:
        self._builder = builder
        self._session = session
        self._tools = tools
        self._history = messages(("system", (system,)))
        self._last: tuple[RequestId, ...] = ()

    def ask(
        self, *parts: Part, answer_tokens: int, pause_s: float = 0.0, after: tuple[RequestId, ...] | None = None
    ) -> RequestId:
        """Follows `after`, or else this conversation's last answer, by `pause_s`; `answer_tokens` at scale 1."""
        self._history += messages(("user", parts))
        request_id = self._builder.add(
            self._session,
            messages=self._history,
            max_tokens=self._builder.scenario.tokens(answer_tokens),
            after=self._last if after is None else after,
            pause_s=pause_s,
            tools=self._tools,
        )
        self._history += messages(("assistant", (AnswerOf(request_id),)))
        self._last = (request_id,)
        return request_id

    def fork(self) -> Conversation:
        other = Conversation(self._builder, self._session, None, tools=self._tools)
        other._history, other._last = self._history, self._last
        return other


def messages(*each: tuple[Literal["system", "user", "assistant"], tuple[Part, ...]]) -> tuple[Message, ...]:
    """Without parts and messages of no tokens."""
    filled = ((role, tuple(part for part in parts if part is not None)) for role, parts in each)
    return tuple(Message(role, parts) for role, parts in filled if parts)


def pause(rng: Random, mean_s: float) -> float:
    """Exponential, as times between unrelated acts are."""
    return rng.expovariate(1 / mean_s) if mean_s else 0.0
