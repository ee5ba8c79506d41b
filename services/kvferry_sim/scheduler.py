"""Continuous batching as in vLLM."""

from __future__ import annotations

import itertools
import math
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator

from kvferry.engine.base import CachedTokens, PromptSources, RequestId
from kvferry_sim.block_pool import BlockPool, PageHash
from kvferry_sim.sequence import Phase, TokenSequence

Plan = list[tuple[TokenSequence, int]]  # with the number of tokens to compute
StartFetch = Callable[[TokenSequence, bool], bool]


class Scheduler:
    """Decides which sequences compute how many tokens, and gives them pages. Pure.

    Each sequence is in the queue that its phase names; a waiting one holds no pages.
    """

    def __init__(self, pool: BlockPool, *, max_num_seqs: int, chunk_tokens: int, start_fetch: StartFetch) -> None:
        """`chunk_tokens` limits a step's prompt tokens.

        `start_fetch(sequence, is_first_placement)` returns False if there is nothing to fetch; else `resume` must
        follow.
        """
        self._pool = pool
        self._max_num_seqs = max_num_seqs
        self._chunk_tokens = chunk_tokens
        self._start_fetch = start_fetch
        self._id_to_sequence: dict[RequestId, TokenSequence] = {}
        self._waiting: deque[TokenSequence] = deque()
        self._fetching: set[TokenSequence] = set()
        self._running: list[TokenSequence] = []
        self.num_preemptions = 0

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._id_to_sequence

    def __len__(self) -> int:
        return len(self._id_to_sequence)

    def __iter__(self) -> Iterator[TokenSequence]:
        return iter(self._id_to_sequence.values())

    def __repr__(self) -> str:
        return f"<Scheduler running={self.num_running} fetching={len(self._fetching)} waiting={len(self._waiting)}>"

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting) + len(self._fetching)

    def get(self, request_id: RequestId) -> TokenSequence | None:
        return self._id_to_sequence.get(request_id)

    def add(self, sequence: TokenSequence) -> None:
        self._id_to_sequence[sequence.request.request_id] = sequence
        self._waiting.append(sequence)

    def remove(self, sequence: TokenSequence) -> None:
        """Idempotent."""
        match sequence.phase:
            case Phase.WAITING:
                self._waiting.remove(sequence)
            case Phase.FETCHING:
                self._fetching.discard(sequence)
            case Phase.RUNNING:
                self._running.remove(sequence)
            case Phase.ENDED:
                return
        sequence.phase = Phase.ENDED
        self._pool.free(sequence.pages)
        sequence.pages = []
        del self._id_to_sequence[sequence.request.request_id]

    def abandon(self) -> list[TokenSequence]:
        """Forget every sequence without freeing its pages, as a crash does."""
        sequences = list(self._id_to_sequence.values())
        for sequence in sequences:
            sequence.phase = Phase.ENDED
        self._id_to_sequence.clear()
        self._waiting.clear()
        self._fetching.clear()
        self._running.clear()
        return sequences

    def resume(self, sequence: TokenSequence) -> None:
        self._fetching.discard(sequence)
        self._run(sequence)

    def plan(self) -> Plan:
        plan: Plan = []
        prompts = self._plan_running(plan)
        self._plan_prompts(plan, prompts)
        return plan

    def check(self) -> None:
        queues = {Phase.WAITING: self._waiting, Phase.FETCHING: self._fetching, Phase.RUNNING: self._running}
        for phase, sequences in queues.items():
            assert all(sequence.phase is phase for sequence in sequences), f"a sequence among {phase} is not"
        num_queued = sum(map(len, queues.values()))
        assert num_queued == len(self._id_to_sequence), "a sequence is known and not queued, or queued and unknown"
        assert not any(sequence.pages for sequence in self._waiting), "a waiting sequence holds pages"

    def _plan_running(self, plan: Plan) -> list[TokenSequence]:
        """Plan a token of each sequence that generates. Return those that compute their prompts."""
        running, pool = self._running, self._pool
        prompts: list[TokenSequence] = []
        i = 0
        while i < len(running):
            sequence = running[i]
            i += 1
            # The sequence that came last gives way. If that is `sequence` itself, it waits.
            while sequence.num_tokens > sequence.capacity and sequence.phase is Phase.RUNNING:
                if pool.can_allocate(1):
                    sequence.pages += pool.allocate(1)
                    sequence.capacity += sequence.block_size
                else:
                    self._preempt(running[-1])
            if sequence.phase is not Phase.RUNNING:
                break
            if sequence.num_tokens - sequence.num_computed == 1:
                plan.append((sequence, 1))
            else:
                prompts.append(sequence)
        return [sequence for sequence in prompts if sequence.phase is Phase.RUNNING]

    def _plan_prompts(self, plan: Plan, prompts: list[TokenSequence]) -> None:
        budget = self._chunk_tokens
        being_filled = self._being_filled() if self._waiting else frozenset()
        has_slots, blocked = True, _Blocked(self._running, self._fetching)
        sequences = [*prompts, *self._waiting]
        if any(sequence.due_ms for sequence in sequences):
            sequences.sort(key=lambda sequence: sequence.due_ms)
        for sequence in sequences:
            if budget <= 0:
                break
            if sequence.phase is Phase.WAITING:
                has_slots = has_slots and len(self._running) + len(self._fetching) < self._max_num_seqs
                # vLLM finds pages from the moment they are scheduled, and computes none of them twice. Here pages are
                # found once they are computed, so the sequence lets others pass until then.
                if not has_slots or (being_filled and self._first_missing(sequence) in being_filled):
                    continue
                if blocked.blocks(tenant_of(sequence)):
                    continue
                if not self._place(sequence):
                    blocked.add(tenant_of(sequence))
                    continue
                self._waiting.remove(sequence)
                if sequence in self._fetching:
                    being_filled = being_filled.union(sequence.loading)
                else:
                    being_filled = being_filled.union(sequence.chain.page_hashes[sequence.num_stored :])
            if sequence not in self._fetching:
                num_now = min(sequence.num_tokens - sequence.num_computed, budget)
                budget -= num_now
                plan.append((sequence, num_now))

    def _being_filled(self) -> frozenset[PageHash]:
        computed = (
            page_hash
            for sequence in self._running
            if sequence.num_computed < sequence.num_prompt
            for page_hash in sequence.chain.page_hashes[sequence.num_stored :]
        )
        return frozenset(computed).union(*(sequence.loading for sequence in self._fetching))

    def _first_missing(self, sequence: TokenSequence) -> PageHash | None:
        if sequence.ticket is not None:
            return None
        cacheable = sequence.cacheable()
        num_found = len(self._pool.find_prefix(cacheable))
        return cacheable[num_found] if num_found < len(cacheable) else None

    def _place(self, sequence: TokenSequence) -> bool:
        """Return False if too few pages are left."""
        block_size, pool = sequence.block_size, self._pool
        found = pool.find_prefix(sequence.cacheable())
        num_new = math.ceil(sequence.num_tokens / block_size) - len(found)
        if not pool.can_allocate(num_new, found):
            return False
        pool.touch(found)
        sequence.pages = found + pool.allocate(num_new)
        sequence.capacity = len(sequence.pages) * block_size
        sequence.num_stored = len(found)
        sequence.num_computed = num_cached = len(found) * block_size
        is_first = sequence.sources is None
        if is_first:
            sequence.sources = PromptSources(sequence.num_prompt - num_cached, num_cached, 0)
            sequence.cached = CachedTokens(device=num_cached)
        if self._start_fetch(sequence, is_first):
            sequence.phase = Phase.FETCHING
            self._fetching.add(sequence)
        else:
            self._run(sequence)
        return True

    def _run(self, sequence: TokenSequence) -> None:
        sequence.phase = Phase.RUNNING
        sequence.times.scheduled()
        self._running.append(sequence)

    def _preempt(self, sequence: TokenSequence) -> None:
        """The sequence computes again what is no longer cached."""
        self._running.remove(sequence)
        self._pool.free(sequence.pages)
        sequence.pages = []
        sequence.capacity = sequence.num_computed = sequence.num_stored = 0
        sequence.phase = Phase.WAITING
        self._waiting.appendleft(sequence)
        self.num_preemptions += 1


def tenant_of(sequence: TokenSequence) -> str:
    return sequence.request.turn.tenant if sequence.request.turn is not None else ""


class _Blocked:
    # Tenants whose next sequence does not fit into memory. They hold up their own and those that hold as many pages.
    def __init__(self, *holders: Iterable[TokenSequence]) -> None:
        self._holders = holders
        self._num_held: Counter[str] | None = None
        self._fewest = 0

    def blocks(self, tenant: str) -> bool:
        return self._num_held is not None and self._num_held[tenant] >= self._fewest

    def add(self, tenant: str) -> None:
        is_first = self._num_held is None
        if self._num_held is None:
            self._num_held = Counter()
            for sequence in itertools.chain(*self._holders):
                self._num_held[tenant_of(sequence)] += len(sequence.pages)
        self._fewest = self._num_held[tenant] if is_first else min(self._fewest, self._num_held[tenant])
