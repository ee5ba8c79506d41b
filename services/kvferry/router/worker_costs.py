"""Workers' cost terms that no request changes, kept between decisions. Pure."""

from __future__ import annotations

from kvferry.membership.base import MemberId
from kvferry.router.expected_pages import ExpectedPages, WorkerPages
from kvferry.router.ledger import Ledger, WorkerAccount
from kvferry.router.placement import Candidate, page_format
from kvferry.router.rates import CostDefaults, RatePool, WorkerRates


class WorkerCosts:
    """Cost terms of one worker, valid for `candidate`; None after a change."""

    __slots__ = (
        "account",
        "arriving_pages",
        "candidate",
        "compute_weight",
        "expected_pages",
        "foreign_prompts",
        "free_pages",
        "full_ms_per_page",
        "group",
        "kv_transfer_page_ms",
        "ms_per_step",
        "ms_per_token",
        "node",
        "rates",
        "step_ms",
        "unreported_streams",
        "wait_ms",
    )

    def __init__(self, account: WorkerAccount, pages: WorkerPages, rates: WorkerRates) -> None:
        self.account = account
        self.expected_pages = pages.computed
        self.arriving_pages = pages.arriving
        self.rates = rates
        self.candidate: Candidate | None = None
        self.group = 0  # of workers that can exchange pages
        self.node = ""
        self.ms_per_token = 0.0
        self.foreign_prompts = 0.0  # other gateways' prompts before a new one
        self.kv_transfer_page_ms = 0.0
        self.step_ms = 0.0  # with one more stream
        self.ms_per_step = 0.0  # what a step of one more stream costs it and the others
        self.wait_ms = 0.0  # until it gets a place among the streams
        self.compute_weight = 0.0  # what a ms of compute here costs the request and the streams
        self.unreported_streams = 0  # that the report does not count
        self.free_pages = 0.0  # before memory gets tight
        self.full_ms_per_page = 0.0

    def update(self, candidate: Candidate, group: int, cost_defaults: CostDefaults, output_tokens: float) -> None:
        self.candidate = candidate
        self.group = group
        self.node = candidate.member.node
        account, stats, rates = self.account, candidate.stats, self.rates
        self.ms_per_token = rates.prefill_ms_per_token.value
        self.kv_transfer_page_ms = rates.kv_transfer_page_ms.value
        # The prompt that runs is half done.
        self.foreign_prompts = max(0.0, stats.num_running + stats.num_waiting - len(account.prefills) - 0.5)
        self.unreported_streams = len(account.incoming) + account.num_streams_since(candidate.reported_s)
        streams = stats.num_running + stats.num_waiting + self.unreported_streams
        scale = rates.step_scale.value
        self.step_ms = scale * (cost_defaults.step_ms + cost_defaults.step_ms_per_stream * (streams + 1))
        self.ms_per_step = self.step_ms + scale * cost_defaults.step_ms_per_stream * streams
        # Each waiting request waits for a stream to end; the ends of the running ones are spread over an answer's time.
        self.wait_ms = stats.num_waiting * output_tokens * self.step_ms / max(1, stats.num_running)
        self.compute_weight = 1.0 + cost_defaults.work_weight + cost_defaults.interference_weight * (streams + 1)
        if stats.num_pages:
            self.free_pages = cost_defaults.pages_full_share * stats.num_pages - stats.num_pages_used
            self.full_ms_per_page = cost_defaults.pages_full_ms / (
                (1.0 - cost_defaults.pages_full_share) * stats.num_pages
            )
        else:
            self.free_pages, self.full_ms_per_page = float("inf"), 0.0


class CostPool:
    def __init__(
        self,
        ledger: Ledger,
        expected_pages: ExpectedPages,
        cost_defaults: CostDefaults,
        groups: dict[tuple[str, int, str], int],
    ) -> None:
        self._ledger = ledger
        self._expected_pages = expected_pages
        self._cost_defaults = cost_defaults
        self._groups = groups
        self._rates = RatePool(cost_defaults)
        self.by_member: dict[MemberId, WorkerCosts] = {}

    def update(self, candidate: Candidate, output_tokens: float) -> WorkerCosts:
        member = candidate.member
        costs = self.by_member.get(member.member_id)
        if costs is None:
            costs = self.by_member[member.member_id] = WorkerCosts(
                self._ledger.account(member.member_id),
                self._expected_pages.of(member.member_id),
                self._rates.of(member.member_id),
            )
        group = self._groups.setdefault(page_format(member), len(self._groups))
        costs.update(candidate, group, self._cost_defaults, output_tokens)
        return costs

    def invalidate(self, member_id: MemberId) -> None:
        """Unknown workers are ignored."""
        costs = self.by_member.get(member_id)
        if costs is not None:
            costs.candidate = None

    def observed_prefill(
        self, member_id: MemberId, computed_tokens: int, elapsed_ms: float, queued_ahead_tokens: int
    ) -> None:
        rates = self._rates.of(member_id)
        if rates.observed_prefill(self._cost_defaults, computed_tokens, elapsed_ms, queued_ahead_tokens):
            self._note_rate(member_id)

    def observed_kv_transfer(self, member_id: MemberId, num_pages: int, elapsed_ms: float) -> None:
        if self._rates.of(member_id).observed_kv_transfer(self._cost_defaults, num_pages, elapsed_ms):
            self._note_rate(member_id)

    def observed_step(self, member_id: MemberId, step_ms: float, num_streams: int) -> None:
        if self._rates.of(member_id).observed_step(self._cost_defaults, step_ms, num_streams):
            self._note_rate(member_id)

    def forget(self, member_id: MemberId) -> None:
        self.by_member.pop(member_id, None)
        self._rates.forget(member_id)

    def check(self) -> None:
        for member_id, costs in self.by_member.items():
            assert costs.account is self._ledger.account(member_id), f"{member_id} is priced by another account"
            pages = self._expected_pages.of(member_id)
            assert costs.expected_pages is pages.computed, f"{member_id} is priced by other expected pages"
            assert costs.arriving_pages is pages.arriving, f"{member_id} is priced by other arriving pages"
            assert costs.rates is self._rates.of(member_id), f"{member_id} is priced by other rates"

    def _note_rate(self, member_id: MemberId) -> None:
        if self._rates.changed():
            for costs in self.by_member.values():
                costs.candidate = None
        else:
            self.invalidate(member_id)
