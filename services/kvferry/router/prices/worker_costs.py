"""Workers' cost terms that no request changes, kept between decisions. Pure."""

from __future__ import annotations

from collections.abc import Callable

from kvferry.engine.base import EngineStats, PromptSources, Turn
from kvferry.membership.base import MemberId
from kvferry.router.placement import Candidate, PageFormat, page_format
from kvferry.router.prices.expected_pages import ExpectedPages, WorkerPages
from kvferry.router.prices.ledger import Ledger, WorkerAccount
from kvferry.router.prices.rates import (
    CostDefaults,
    RatePool,
    WorkerRates,
    kv_transfer_rate,
    prefill_rate,
    step_scale,
)
from kvferry.tenancy.shares.expected_wait import BacklogCurve

# How many prompt tokens of reports decide what part of other gateways' prompts is computed, the rest being cached.
_SHARE_TOKENS = 50_000


class WorkerCosts:
    """Cost terms of one worker, valid for `candidate`; None after a change."""

    __slots__ = (
        "account",
        "arriving_pages",
        "backlogs",
        "candidate",
        "compute_weight",
        "computed_share",
        "expected_pages",
        "foreign_ms",
        "foreign_ms_per_token",
        "free_pages",
        "free_tokens",
        "full_ms_per_page",
        "full_ms_per_token",
        "group",
        "kv_transfer_fixed_ms",
        "kv_transfer_page_ms",
        "ms_per_step",
        "ms_per_token",
        "node",
        "prompt_tokens",
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
        self.foreign_ms = 0.0  # of other gateways' prompts before a new one
        self.foreign_ms_per_token = 0.0  # the same where their tokens are not reported, per token of the new one
        self.prompt_tokens = PromptSources()  # of the last report
        self.computed_share = 1.0  # of the prompt tokens in reports; the rest was cached
        self.kv_transfer_fixed_ms = (
            0.0  # of a KV transfer to this worker apart from its pages: the transfers before it, too
        )
        self.kv_transfer_page_ms = 0.0
        self.step_ms = 0.0  # with one more stream
        self.ms_per_step = 0.0  # what a step of one more stream costs it and the others
        self.wait_ms = 0.0  # until it gets a place among the streams
        self.compute_weight = 0.0  # what a ms of compute here costs the request and the streams
        self.unreported_streams = 0  # that the report does not count
        self.backlogs: BacklogCurve | None = None  # of prompts that wait for their turns there
        self.free_pages = 0.0  # before memory gets tight
        self.full_ms_per_page = 0.0
        self.free_tokens = 0.0  # the same in tokens, without the prompts that are queued
        self.full_ms_per_token = 0.0

    def update(
        self, candidate: Candidate, group: int, cost_defaults: CostDefaults, pool: RatePool, output_tokens: float
    ) -> None:
        self.candidate = candidate
        self.group = group
        self.node = candidate.member.node
        account, stats, rates = self.account, candidate.stats, self.rates
        self.ms_per_token = pool.prefill_ms_per_token(rates, is_tried=bool(account.prefills))
        self.kv_transfer_page_ms = pool.kv_transfer_page_ms(rates, is_tried=bool(account.incoming))
        self._price_foreign_prompts(candidate)
        self._price_turns(stats)
        self.kv_transfer_fixed_ms = (
            cost_defaults.kv_transfer_fixed_ms + account.arriving_pages * self.kv_transfer_page_ms
        )
        self.unreported_streams = len(account.incoming) + account.num_streams_since(candidate.reported_s)
        # Prompts without a first token have their price in the fair queue, and are no streams.
        num_waiting = max(0, stats.num_waiting - stats.num_prompts)
        streams = max(0, stats.num_running + stats.num_waiting - stats.num_prompts) + self.unreported_streams
        scale = pool.step_scale(rates, is_tried=bool(account.streams))
        self.step_ms = scale * (cost_defaults.step_ms + cost_defaults.step_ms_per_stream * (streams + 1))
        self.ms_per_step = self.step_ms + scale * cost_defaults.step_ms_per_stream * streams
        # Each waiting request waits for a stream to end; the ends of the running ones are spread over an answer's time.
        self.wait_ms = num_waiting * output_tokens * self.step_ms / max(1, stats.num_running)
        self.compute_weight = 1.0 + cost_defaults.work_weight + cost_defaults.interference_weight * (streams + 1)
        if stats.num_pages:
            self.free_pages = cost_defaults.pages_full_share * stats.num_pages - stats.num_pages_used
            self.full_ms_per_page = cost_defaults.pages_full_ms / (
                (1.0 - cost_defaults.pages_full_share) * stats.num_pages
            )
        else:
            self.free_pages, self.full_ms_per_page = float("inf"), 0.0
        block_size = max(1, candidate.member.block_size)  # 0: not known
        self.free_tokens = self.free_pages * block_size - account.queued_tokens
        self.full_ms_per_token = self.full_ms_per_page / block_size

    def fair_queue_ms(self, turn: Turn, prompt_ms: float, fixed_ms: float) -> float:
        """Return how long a prompt waits where tenants' prompts take turns. There must be backlogs."""
        assert self.backlogs is not None
        assert self.candidate is not None
        assert self.candidate.stats.backlogs is not None
        own_ms, _ = self.candidate.stats.backlogs.by_tenant.get(turn.tenant, (0.0, 0.0))
        unreported_ms = self.account.unreported_ms(self.candidate.reported_s, self.ms_per_token, fixed_ms)
        return unreported_ms + self.backlogs.wait_ms(own_ms, prompt_ms, turn.share)

    def _price_foreign_prompts(self, candidate: Candidate) -> None:
        account, stats = self.account, candidate.stats
        if stats.queued_prompt_tokens is None:  # an older worker: they count as being as long as the new prompt
            # The prompt that runs is half done.
            num_prompts = max(0.0, stats.num_running + stats.num_waiting - len(account.prefills) - 0.5)
            self.foreign_ms, self.foreign_ms_per_token = 0.0, num_prompts * self.ms_per_token
            return
        if stats.prompt_tokens is not self.prompt_tokens:
            self._learn_computed_share(stats.prompt_tokens)
        self.foreign_ms = self.foreign_ms_per_token = 0.0
        if stats.queued_prompt_tokens:
            num_tokens = max(0, stats.queued_prompt_tokens - account.prompt_tokens_at(candidate.reported_s))
            self.foreign_ms = num_tokens * self.computed_share * self.ms_per_token

    def _price_turns(self, stats: EngineStats) -> None:
        if stats.backlogs is None:
            self.backlogs = None
            return
        self.backlogs = BacklogCurve(stats.backlogs.others)
        for ms, share in stats.backlogs.by_tenant.values():
            self.backlogs.add(ms, share)

    def _learn_computed_share(self, prompt_tokens: PromptSources) -> None:
        before, self.prompt_tokens = self.prompt_tokens, prompt_tokens
        num_tokens = prompt_tokens.total - before.total
        num_computed = prompt_tokens.local_compute - before.local_compute
        if 0 <= num_computed <= num_tokens and num_tokens:  # else the engine was restarted
            gain = min(1.0, num_tokens / _SHARE_TOKENS)
            self.computed_share += gain * (num_computed / num_tokens - self.computed_share)


class CostPool:
    def __init__(
        self,
        ledger: Ledger,
        expected_pages: ExpectedPages,
        cost_defaults: CostDefaults,
        groups: dict[PageFormat, int],
        typical_of_peers: Callable[[str], float | None],
    ) -> None:
        """`typical_of_peers` as for RatePool."""
        self._ledger = ledger
        self._expected_pages = expected_pages
        self._cost_defaults = cost_defaults
        self._groups = groups
        self.rates = RatePool(cost_defaults, typical_of_peers)
        self.by_member: dict[MemberId, WorkerCosts] = {}

    def update(self, candidate: Candidate, output_tokens: float) -> WorkerCosts:
        member = candidate.member
        costs = self.by_member.get(member.member_id)
        if costs is None:
            costs = self.by_member[member.member_id] = WorkerCosts(
                self._ledger.account(member.member_id),
                self._expected_pages.of(member.member_id),
                self.rates.of(member.member_id),
            )
        group = self._groups.setdefault(page_format(member), len(self._groups))
        costs.update(candidate, group, self._cost_defaults, self.rates, output_tokens)
        return costs

    def invalidate(self, member_id: MemberId) -> None:
        """Unknown workers are ignored."""
        costs = self.by_member.get(member_id)
        if costs is not None:
            costs.candidate = None

    def advance(self, now_s: float) -> None:
        """Count a placement: rates age."""
        if self.rates.advance(now_s):
            self._refresh()

    def observed_prefill(
        self, member_id: MemberId, computed_tokens: int, elapsed_ms: float, other_tokens: float
    ) -> None:
        rate = prefill_rate(self._cost_defaults, computed_tokens, elapsed_ms, other_tokens)
        self._learn(member_id, "prefill_ms_per_token", rate, computed_tokens)

    def observed_kv_transfer(self, member_id: MemberId, num_pages: int, elapsed_ms: float, other_pages: float) -> None:
        rate = kv_transfer_rate(self._cost_defaults, num_pages, elapsed_ms, other_pages)
        self._learn(member_id, "kv_transfer_page_ms", rate, num_pages)

    def observed_step(self, member_id: MemberId, step_ms: float, num_streams: int) -> None:
        self._learn(member_id, "step_scale", step_scale(self._cost_defaults, step_ms, num_streams))

    def forget(self, member_id: MemberId) -> None:
        self.by_member.pop(member_id, None)
        self.rates.forget(member_id)

    def check(self) -> None:
        for member_id, costs in self.by_member.items():
            assert costs.account is self._ledger.account(member_id), f"{member_id} is priced by another account"
            pages = self._expected_pages.of(member_id)
            assert costs.expected_pages is pages.computed, f"{member_id} is priced by other expected pages"
            assert costs.arriving_pages is pages.arriving, f"{member_id} is priced by other arriving pages"
            assert costs.rates is self.rates.of(member_id), f"{member_id} is priced by other rates"

    def _learn(self, member_id: MemberId, name: str, rate: float | None, size: float = 1.0) -> None:
        if rate is None:
            return
        self.invalidate(member_id)
        if self.rates.observe(member_id, name, rate, size):
            self._refresh()

    def _refresh(self) -> None:
        for member_id in self.rates.refresh():
            self.invalidate(MemberId(member_id))
