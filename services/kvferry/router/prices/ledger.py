"""Requests in flight, by worker. Pure."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass

from kvferry.engine.base import RequestId
from kvferry.membership.base import MemberId

# About the most tokens that an engine computes in one step: vLLM's default for long prompts is 2,048 to 8,192.
_STEP_TOKENS = 2048
# Ends of prompts that a report may not know yet: ends within this time count as one, at the last of them.
_ENDS_TOGETHER_S = 0.02
_NUM_ENDS = 64
# How old a report may be when it is first looked at: a worker sends one 50 to 120 ms after a change.
_REPORT_AGE_S = 0.15
_UNREPORTED_S = 0.01  # until a worker that reports knows of a prompt


class WorkerAccount:
    """Requests of this gateway on one worker."""

    __slots__ = (
        "arriving_pages", "begins_s", "head_since_s", "incoming", "member_id", "prefills", "prompt_ends",
        "prompt_tokens", "queued_tokens", "streams",
    )  # fmt: skip

    def __init__(self, member_id: MemberId) -> None:
        self.member_id = member_id
        # Prompts being computed here, first come first: request -> tokens. `queued_tokens` is their sum.
        self.prefills: dict[RequestId, int] = {}
        self.begins_s: dict[RequestId, float] = {}  # of these
        self.queued_tokens = 0
        self.prompt_tokens = 0  # of `prefills`, cached ones included
        self.prompt_ends: deque[tuple[float, int, float]] = deque(maxlen=_NUM_ENDS)  # (last end, tokens, first end)
        self.head_since_s = 0.0  # when the first of `prefills` began
        self.arriving_pages = 0  # of computed prompts, until the first token from here
        self.incoming: set[RequestId] = set()  # to be decoded here; a prefill worker still computes their prompts
        self.streams: dict[RequestId, float] = {}  # request -> when it was sent here, oldest first

    def __repr__(self) -> str:
        return (
            f"<{self.member_id}: {len(self.prefills)} prefills of {self.queued_tokens} tokens, "
            f"{len(self.incoming)} incoming, {len(self.streams)} streams>"
        )

    @property
    def is_idle(self) -> bool:
        return not (self.prefills or self.incoming or self.streams or self.arriving_pages)

    def prompt_tokens_at(self, reported_s: float) -> int:
        """Return this gateway's part of the queued prompt tokens in a report that was first looked at then, or more."""
        num_tokens, since_s = self.prompt_tokens, reported_s - _REPORT_AGE_S
        for ended_s, num_ended, _ in reversed(self.prompt_ends):
            if ended_s <= since_s:
                break
            num_tokens += num_ended
        return num_tokens

    def note_prompt_end(self, num_tokens: int, now_s: float) -> None:
        ends = self.prompt_ends
        if ends and now_s - ends[-1][2] < _ENDS_TOGETHER_S:
            ends[-1] = (now_s, ends[-1][1] + num_tokens, ends[-1][2])
        else:
            ends.append((now_s, num_tokens, now_s))

    def num_streams_since(self, since_s: float) -> int:
        """O(their number)."""
        num_streams = 0
        for sent_s in reversed(self.streams.values()):
            if sent_s <= since_s:
                break
            num_streams += 1
        return num_streams

    def unreported_ms(self, reported_s: float, ms_per_token: float, fixed_ms: float) -> float:
        """Return the time of prompts that a report of then may not know. O(their number)."""
        since_s, ms = reported_s - _UNREPORTED_S, 0.0
        for request_id, begin_s in reversed(self.begins_s.items()):
            if begin_s <= since_s:
                break
            ms += fixed_ms + self.prefills[request_id] * ms_per_token
        return ms

    def queue_ms(self, ms_per_token: float, fixed_ms: float, now_s: float) -> float:
        """Return the time of prompts before a new one. There must be one."""
        # The start of the first prompt is known. Once it takes longer than it should, it is assumed to need as long
        # again as it is late: the price of a worker that hangs grows by itself.
        head_tokens = next(iter(self.prefills.values()))
        head_ms = fixed_ms + head_tokens * ms_per_token
        rest_tokens = self.queued_tokens - head_tokens
        # An engine computes as many prompts in one step as fit: a burst of short ones is one step, not one each.
        rest_ms = rest_tokens * ms_per_token + min(len(self.prefills) - 1, rest_tokens / _STEP_TOKENS) * fixed_ms
        return abs(head_ms - (now_s - self.head_since_s) * 1000.0) + rest_ms


@dataclass(slots=True)
class _Flight:
    computing: WorkerAccount | None  # None once the prompt is computed
    decode: WorkerAccount
    num_tokens: int
    lacking_pages: int
    is_arriving: bool = False  # the decode worker may be pulling the pages


class Ledger:
    """One account per worker. Every request that began must end."""

    def __init__(self) -> None:
        self._accounts: dict[MemberId, WorkerAccount] = {}
        self._flights: dict[RequestId, _Flight] = {}
        self._changed: set[MemberId] = set()

    def __repr__(self) -> str:
        return f"<Ledger of {len(self._flights)} requests on {len(self._accounts)} workers>"

    @property
    def num_in_flight(self) -> int:
        return len(self._flights)

    @property
    def is_idle(self) -> bool:
        return not self._flights and all(account.is_idle for account in self._accounts.values())

    def account(self, member_id: MemberId) -> WorkerAccount:
        account = self._accounts.get(member_id)
        if account is None:
            account = self._accounts[member_id] = WorkerAccount(member_id)
        return account

    def pop_changed(self) -> set[MemberId]:
        """Return the workers whose accounts changed since the last call."""
        changed, self._changed = self._changed, set()
        return changed

    def begin(
        self,
        request_id: RequestId,
        prefill: MemberId | None,
        decode: MemberId,
        missing_tokens: int,
        now_s: float,
        *,
        num_tokens: int,
        lacking_pages: int,
    ) -> None:
        """`prefill`, if given, else `decode` computes `missing_tokens` of `num_tokens`. `decode` pulls `lacking_pages`.

        Raises ValueError for a request in flight.
        """
        if request_id in self._flights:
            raise ValueError(f"request {request_id} is in flight already")
        decoding = self.account(decode)
        computing = decoding if prefill is None else self.account(prefill)
        if not computing.prefills:
            computing.head_since_s = now_s
        computing.prefills[request_id] = missing_tokens
        computing.begins_s[request_id] = now_s
        computing.queued_tokens += missing_tokens
        computing.prompt_tokens += num_tokens
        if prefill is None:
            decoding.streams[request_id] = now_s
        else:
            decoding.incoming.add(request_id)
        self._flights[request_id] = _Flight(computing, decoding, num_tokens, lacking_pages)
        self._note_change(computing, decoding)

    def prefilled(self, request_id: RequestId, now_s: float) -> None:
        """Unknown requests are ignored."""
        flight = self._flights.get(request_id)
        if flight is None:
            return
        self._end_prefill(request_id, flight, now_s)
        if request_id in flight.decode.incoming:
            flight.decode.incoming.remove(request_id)
            flight.decode.streams[request_id] = now_s
            flight.decode.arriving_pages += flight.lacking_pages
            flight.is_arriving = True
            self._note_change(flight.decode)

    def first_token(self, request_id: RequestId, now_s: float) -> None:
        """Unknown requests are ignored."""
        self.prefilled(request_id, now_s)
        flight = self._flights.get(request_id)
        if flight is not None:
            self._end_arrival(flight)

    def end(self, request_id: RequestId, now_s: float) -> bool:
        """Returns False for a request that is not in flight."""
        flight = self._flights.pop(request_id, None)
        if flight is None:
            return False
        self._end_prefill(request_id, flight, now_s)
        self._end_arrival(flight)
        flight.decode.incoming.discard(request_id)
        flight.decode.streams.pop(request_id, None)
        self._note_change(flight.decode)
        return True

    def forget(self, member_id: MemberId) -> None:
        """Drop an account. The worker's requests in flight must still end."""
        self._accounts.pop(member_id, None)
        self._changed.discard(member_id)

    def check(self) -> None:
        prefills: dict[int, set[RequestId]] = {}
        streams: dict[int, set[RequestId]] = {}
        prompt_tokens: Counter[int] = Counter()
        arriving: Counter[int] = Counter()
        for request_id, flight in self._flights.items():
            if flight.computing is not None:
                prefills.setdefault(id(flight.computing), set()).add(request_id)
                prompt_tokens[id(flight.computing)] += flight.num_tokens
            if flight.is_arriving:
                arriving[id(flight.decode)] += flight.lacking_pages
            streams.setdefault(id(flight.decode), set()).add(request_id)
        for account in self._accounts.values():
            computed = prefills.get(id(account), set())
            assert account.prefills.keys() == computed, f"{account} computes for requests not in flight"
            assert account.begins_s.keys() == computed
            assert account.queued_tokens == sum(account.prefills.values()), f"{account} has {account.prefills}"
            assert account.prompt_tokens == prompt_tokens[id(account)], f"{account} has prompts of other lengths"
            assert account.arriving_pages == arriving[id(account)], f"{account} waits for pages that nobody sends"
            ours = account.streams.keys() | account.incoming
            assert ours == streams.get(id(account), set()), f"{account} has streams that are not in flight"
            num_ours = len(account.streams) + len(account.incoming)
            assert len(ours) == num_ours, f"{account} has streams that are still incoming"

    def _end_prefill(self, request_id: RequestId, flight: _Flight, now_s: float) -> None:
        account, flight.computing = flight.computing, None
        if account is not None:
            if next(iter(account.prefills)) == request_id:
                account.head_since_s = now_s
            account.queued_tokens -= account.prefills.pop(request_id)
            del account.begins_s[request_id]
            account.prompt_tokens -= flight.num_tokens
            account.note_prompt_end(flight.num_tokens, now_s)
            self._note_change(account)

    def _end_arrival(self, flight: _Flight) -> None:
        if flight.is_arriving:
            flight.is_arriving = False
            flight.decode.arriving_pages -= flight.lacking_pages
            self._note_change(flight.decode)

    def _note_change(self, *accounts: WorkerAccount) -> None:
        self._changed.update(account.member_id for account in accounts)
