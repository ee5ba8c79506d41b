"""Bills beside what clients got and what engines computed: equal, or each difference has a known cause.

Three books are compared, answer by answer: receipts of clients, usage records of gateways, and rows of engines. Where
they disagree in a way that no kill of a gateway explains, that is a fault. Work that is not billed is listed by its
cause, in tokens.
"""

from __future__ import annotations

import asyncio
import enum
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from bench.chaos.fleet import Fleet, usage_folder, work_folder
from bench.chaos.receipts import Ending, Receipt
from bench.chaos.work import Attempt, End, read_attempts
from bench.results import BenchFailed
from kvferry.gateway.usage.usage_log import UNFINISHED, UsageRecord, read
from kvferry.membership.base import MemberKind
from kvferry_tenants.usage_totals import totals

LOSS_S: Final = 10.0  # of each answer, that a gateway which is killed may leave out of its records
# A gateway that is killed so soon after an answer's end may not have written its record yet.
UNWRITTEN_S: Final = 2.0


class Cause(enum.StrEnum):
    """Why an engine computed tokens that are not billed."""

    FIRST_TOKEN = "first_token_of_prefill"  # the decode engine computes it again
    HANDOVER = "last_page_at_handover"  # of prompts: pages that are not full do not move
    LOST_WORKER = "lost_worker"
    PREEMPTED = "preempted"
    CLIENT_LEFT = "client_left"
    GATEWAY_KILLED = "gateway_killed"
    UNEXPLAINED = "unexplained"


@dataclass(slots=True)
class _Answer:
    """All that is known of one answer."""

    receipt: Receipt | None = None
    finals: list[UsageRecord] = field(default_factory=list)
    unfinished: UsageRecord | None = None  # the last one
    attempts: list[Attempt] = field(default_factory=list)  # in the order in which engines got them
    killed_s: float | None = None  # when its gateway was, if that may have cost records of it

    @property
    def bill(self) -> UsageRecord | None:
        return self.finals[-1] if self.finals else self.unfinished

    @property
    def billed(self) -> tuple[int, int, int]:
        """Prompt tokens, those of them that were cached, and generated tokens."""
        bill = self.bill
        return (0, 0, 0) if bill is None else (bill.prompt_tokens, bill.cached_tokens, bill.generated_tokens)

    @property
    def is_lost(self) -> bool:
        """Whether a killed gateway kept its last record from being written."""
        return not self.finals and self.killed_s is not None

    @property
    def tenant(self) -> str:
        named = self.receipt or self.bill or self.attempts[0]
        return named.tenant

    @property
    def decodes(self) -> list[Attempt]:
        return [attempt for attempt in self.attempts if not attempt.is_prefill]

    @property
    def num_prompt(self) -> int:
        """A request that goes on has tokens of the answer in its prompt."""
        return min((attempt.num_prompt for attempt in self.attempts), default=0)

    def first_computed(self) -> tuple[Attempt | None, Attempt | None]:
        """Return the attempts of prefill and decode that gave the first output; None for what there was not."""
        first = [attempt for attempt in self.attempts if attempt.num_prompt == self.num_prompt]
        decode = next((each for each in reversed(first) if not each.is_prefill and each.num_generated), None)
        ends_s = decode.begun_s if decode is not None else float("inf")
        prefill = next(
            (each for each in reversed(first) if each.is_prefill and each.num_generated and each.begun_s < ends_s), None
        )
        return prefill, decode


@dataclass(slots=True)
class _Sums:
    """Tokens of one kind, of one tenant."""

    computed: int = 0
    billed: int = 0
    not_billed: Counter[Cause] = field(default_factory=Counter)

    def figures(self) -> dict[str, Any]:
        return {
            "computed": self.computed,
            "billed": self.billed,
            "not_billed": {cause.value: num for cause, num in sorted(self.not_billed.items()) if num},
        }


@dataclass(slots=True)
class _OfTenant:
    answers: int = 0  # whole ones
    asked_prompt_tokens: int = 0  # of whole answers, as clients were told
    delivered_tokens: int = 0
    by_outcome: Counter[str] = field(default_factory=Counter)
    billed_prompt_tokens: int = 0  # of whole answers, as the next
    billed_generated_tokens: int = 0
    lost_prompt_tokens: int = 0  # of whole answers whose record a killed gateway did not write
    lost_generated_tokens: int = 0
    prompt: _Sums = field(default_factory=_Sums)
    generated: _Sums = field(default_factory=_Sums)


@dataclass(slots=True)
class Audit:
    """`faults` has a sentence for each disagreement."""

    figures: dict[str, Any]
    faults: list[str]


async def compare_bills(running: Fleet, folder: Path, add: Callable[[dict[str, Any]], None]) -> None:
    """Let the gateways of a billed fleet leave, and `add` the figures. Raises BenchFailed where the books disagree."""
    await running.stop_gateways()
    # By URL: a gateway that is started again has the port of the one before.
    gateways = [each for each in (*running.processes, *running.departed) if each.kind is MemberKind.GATEWAY]
    kills_s = {gateway.url: gateway.kills_s for gateway in gateways}
    compared = await asyncio.to_thread(audit, running.receipts, usage_folder(folder), work_folder(folder), kills_s)
    add(compared.figures)
    if compared.faults:
        raise BenchFailed(f"bills: {len(compared.faults)} disagreements: {'; '.join(compared.faults[:5])}")


def audit(receipts: Iterable[Receipt], usage: Path, work: Path, kills_s: Mapping[str, Sequence[float]]) -> Audit:
    """Compare the books of a cluster whose gateways have ended.

    `usage` and `work` are folders, `kills_s` has the times of kills of gateways by URL, since the epoch. Raises OSError
    for an unreadable folder.
    """
    return _Comparison(receipts, usage, work, kills_s).run()


class _Comparison:
    def __init__(
        self, receipts: Iterable[Receipt], usage: Path, work: Path, kills_s: Mapping[str, Sequence[float]]
    ) -> None:
        self._kills_s = kills_s
        self._answers: defaultdict[str, _Answer] = defaultdict(_Answer)
        self._tenants: defaultdict[str, _OfTenant] = defaultdict(_OfTenant)
        self._endings: Counter[str] = Counter()
        self._num_lost_records = 0
        self._longest_unbilled_s = 0.0
        self._faults: list[str] = []
        self._read_receipts(receipts)
        self._read_records(usage)
        self._totals = totals(usage, None, None, None)
        for attempt in sorted(read_attempts(work), key=lambda attempt: attempt.begun_s):
            self._answers[attempt.answer_id].attempts.append(attempt)

    def run(self) -> Audit:
        for answer_id, answer in self._answers.items():
            answer.killed_s = self._killed_s(answer)
            for fault in (*self._faults_of_bill(answer), *self._faults_of_work(answer)):
                self._faults.append(f"answer {answer_id} of {answer.tenant}: {fault}")
            self._add_work(answer)
        self._compare_totals()
        ends = Counter(attempt.end for answer in self._answers.values() for attempt in answer.decodes)
        figures = {
            "requests": dict(sorted(self._endings.items())),
            "stopped_at_decode_workers": ends[End.STOPPED],
            "lost_at_decode_workers": ends[End.DIED] + ends[End.FAILED],
            "answers_without_last_record": self._num_lost_records,
            "longest_unbilled_s": round(self._longest_unbilled_s, 2),
            "tenants": {name: _figures(sums) for name, sums in sorted(self._tenants.items())},
            "disagreements": len(self._faults),
        }
        return Audit(figures, self._faults)

    def _read_receipts(self, receipts: Iterable[Receipt]) -> None:
        for receipt in receipts:
            self._endings[receipt.ending.value] += 1
            if receipt.ending is Ending.WHOLE:
                sums = self._tenants[receipt.tenant]
                sums.answers += 1
                sums.asked_prompt_tokens += receipt.num_prompt_tokens
                sums.delivered_tokens += receipt.num_generated
            if receipt.answer_id:
                self._answers[receipt.answer_id].receipt = receipt

    def _read_records(self, usage: Path) -> None:
        num_bad = 0

        def note_bad(file: Path, number: int) -> None:
            nonlocal num_bad
            num_bad += 1

        for record in read(usage, note_bad):
            if record.outcome == UNFINISHED:
                self._answers[record.request_id].unfinished = record
                continue
            self._tenants[record.tenant].by_outcome[record.outcome] += 1
            if record.request_id:
                self._answers[record.request_id].finals.append(record)
            elif record.prompt_tokens or record.generated_tokens:
                self._faults.append(f"a request of {record.tenant} that was not dispatched is billed: {record}")
        if num_bad > (num_kills := sum(map(len, self._kills_s.values()))):
            self._faults.append(f"{num_bad} lines of usage files are no records, after {num_kills} kills of gateways")

    def _compare_totals(self) -> None:
        """Compare what `kvferry tenant usage` says with the sums of all answers."""
        for name, sums in self._tenants.items():
            of_tenant = [total for (_, tenant, _), total in self._totals.by_day.items() if tenant == name]
            told = (
                sum(total.prompt_tokens - total.cached_tokens for total in of_tenant),
                sum(total.generated_tokens for total in of_tenant),
            )
            if told != (billed := (sums.prompt.billed, sums.generated.billed)):
                self._faults.append(f"kvferry tenant usage says {told} tokens of {name}, its answers have {billed}")

    def _killed_s(self, answer: _Answer) -> float | None:
        """Return when the answer's gateway was killed while it ran, or up to UNWRITTEN_S later."""
        receipt = answer.receipt
        if receipt is not None:
            begun_s, ended_s, kills_s = receipt.begun_s, receipt.ended_s, self._kills_s.get(receipt.url, ())
        else:
            # No client knows of it: its gateway was killed before it had sent anything.
            begun_s = min((attempt.begun_s for attempt in answer.attempts), default=float("inf"))
            ended_s = max((max(attempt.begun_s, attempt.ended_s) for attempt in answer.attempts), default=0.0)
            kills_s = [each for some in self._kills_s.values() for each in some]
        return next((each for each in kills_s if begun_s <= each <= ended_s + UNWRITTEN_S), None)

    def _faults_of_bill(self, answer: _Answer) -> Iterable[str]:
        """Compare what is billed with what the client got."""
        receipt, (prompt, _, generated) = answer.receipt, answer.billed
        if len(answer.finals) > 1:
            yield f"billed {len(answer.finals)} times"
        if not answer.finals and not answer.is_lost:
            yield "it has no record, and its gateway was not killed"
        self._num_lost_records += answer.is_lost
        if receipt is None:
            if answer.finals and answer.finals[-1].outcome not in ("cancelled", "refused") and answer.killed_s is None:
                yield f"billed as {answer.finals[-1].outcome}, and no client asked for it"
            return
        if receipt.ending is Ending.WHOLE:
            yield from self._faults_of_whole(answer, receipt)
        elif receipt.ending in (Ending.REFUSED, Ending.FAILED):
            # All that fails in this load is refused before its first token.
            if prompt or generated:
                yield f"it was {receipt.ending}, and {prompt} prompt tokens and {generated} generated ones are billed"
        else:
            yield from self._faults_of_part(answer, receipt)

    def _faults_of_whole(self, answer: _Answer, receipt: Receipt) -> Iterable[str]:
        sums, (prompt, _, generated) = self._tenants[receipt.tenant], answer.billed
        if len(receipt.token_times_s) != receipt.num_generated:
            yield f"the client got {len(receipt.token_times_s)} tokens, and was told of {receipt.num_generated}"
        sums.billed_prompt_tokens += prompt
        sums.billed_generated_tokens += generated
        if answer.is_lost:
            sums.lost_prompt_tokens += receipt.num_prompt_tokens - prompt
            sums.lost_generated_tokens += receipt.num_generated - generated
            yield from self._faults_of_part(answer, receipt)
            return
        expected = ("ok", receipt.num_prompt_tokens, receipt.num_generated)
        if answer.finals and (got := (answer.finals[-1].outcome, prompt, generated)) != expected:
            yield f"billed {got}, its client got {expected}"

    def _faults_of_part(self, answer: _Answer, receipt: Receipt) -> Iterable[str]:
        """Check the bill of an answer that its client got in part, or whose last record is lost."""
        times_s, (prompt, _, generated) = receipt.token_times_s, answer.billed
        if not answer.is_lost:
            if generated < len(times_s):
                yield f"billed {generated} tokens, its client got {len(times_s)}"
            return
        assert answer.killed_s is not None
        if generated < len(times_s):
            unbilled_s = answer.killed_s - times_s[generated]
            self._longest_unbilled_s = max(self._longest_unbilled_s, unbilled_s)
            if unbilled_s > LOSS_S:
                yield f"tokens are not billed that its client had {unbilled_s:.1f} s before its gateway was killed"
        if generated and not prompt:
            yield f"{generated} generated tokens are billed, and no prompt"

    def _faults_of_work(self, answer: _Answer) -> Iterable[str]:
        """Compare what is billed with what engines computed."""
        prompt, cached, generated = answer.billed
        if (num_computed := sum(attempt.num_generated for attempt in answer.decodes)) < generated:
            yield f"{generated} generated tokens are billed, and engines computed {num_computed}"
        if prompt not in (0, answer.num_prompt):
            yield f"{prompt} prompt tokens are billed of {answer.num_prompt}"
        if not (answer.finals and answer.finals[-1].outcome == "ok"):
            if prompt - cached > (most := sum(attempt.num_computed for attempt in answer.attempts)):
                yield f"{prompt - cached} prompt tokens are billed as computed, and engines computed {most}"
            return
        if prompt - cached != (expected := _num_first_computed(answer)):
            yield (
                f"{prompt - cached} prompt tokens are billed as computed, and {expected} were for its first output: "
                f"{answer.attempts}"
            )

    def _add_work(self, answer: _Answer) -> None:
        sums, (prompt, cached, generated) = self._tenants[answer.tenant], answer.billed
        sums.generated.computed += sum(attempt.num_generated for attempt in answer.attempts)
        sums.generated.billed += generated
        sums.generated.not_billed.update(_generated_not_billed(answer))
        sums.prompt.computed += sum(attempt.num_computed for attempt in answer.attempts)
        sums.prompt.billed += prompt - cached
        sums.prompt.not_billed.update(_prompt_not_billed(answer))
        for kind, some in (("generated", sums.generated), ("prompt", sums.prompt)):
            if num_tokens := some.not_billed.pop(Cause.UNEXPLAINED, 0):
                self._faults.append(f"{num_tokens} {kind} tokens are neither billed nor explained: {answer}")


def _num_first_computed(answer: _Answer) -> int:
    """Return the prompt tokens that were computed for the first output."""
    prefill, decode = answer.first_computed()
    if decode is None:
        return 0
    return decode.num_computed + (min(prefill.num_computed, decode.num_transferred) if prefill is not None else 0)


def _generated_not_billed(answer: _Answer) -> Counter[Cause]:
    """The sum is what engines generated less what is billed."""
    causes = Counter({Cause.FIRST_TOKEN: sum(each.num_generated for each in answer.attempts if each.is_prefill)})
    left = sum(each.num_generated for each in answer.decodes) - answer.billed[2]
    for attempt, following in zip(answer.decodes, answer.decodes[1:], strict=False):
        # The next attempt begins with the tokens that the gateway has got by then.
        num_not_got = attempt.num_generated - (following.num_prompt - attempt.num_prompt)
        causes[_cause(attempt)] += num_not_got
        left -= num_not_got
    causes[_last_cause(answer)] += left
    return causes


def _prompt_not_billed(answer: _Answer) -> Counter[Cause]:
    """The sum is the prompt tokens that engines computed less those that are billed as computed."""
    causes: Counter[Cause] = Counter()
    prompt, cached, _ = answer.billed
    prefill, decode = answer.first_computed()
    if prefill is not None and decode is not None:
        causes[Cause.HANDOVER] = prefill.num_computed - min(prefill.num_computed, decode.num_transferred)
    before: Attempt | None = None
    for attempt in answer.attempts:
        if attempt is not prefill and attempt is not decode and attempt.num_computed:
            # A first attempt that gave nothing was lost itself; a later one makes up for the one before.
            is_first = attempt.num_prompt == answer.num_prompt
            lost = attempt if is_first or before is None else before
            is_last_of_killed = is_first and decode is None
            causes[_last_cause(answer) if is_last_of_killed else _cause(lost)] += attempt.num_computed
        if not attempt.is_prefill:
            before = attempt
    left = sum(attempt.num_computed for attempt in answer.attempts) - causes.total() - (prompt - cached)
    causes[_last_cause(answer)] += left
    return causes


def _cause(attempt: Attempt) -> Cause:
    """Return why an attempt was not the last one."""
    return Cause.PREEMPTED if attempt.end is End.STOPPED else Cause.LOST_WORKER


def _last_cause(answer: _Answer) -> Cause:
    """Return why the rest of an answer's work is not billed."""
    if answer.is_lost:
        return Cause.GATEWAY_KILLED
    if answer.finals and answer.finals[-1].outcome == "cancelled":
        return Cause.CLIENT_LEFT
    return Cause.UNEXPLAINED


def _figures(sums: _OfTenant) -> dict[str, Any]:
    return {
        "answers": sums.answers,
        "records": dict(sorted(sums.by_outcome.items())),
        "prompt_tokens_of_answers": {
            "asked": sums.asked_prompt_tokens,
            "billed": sums.billed_prompt_tokens,
            "records_lost_with_gateway": sums.lost_prompt_tokens,
        },
        "tokens_of_answers": {
            "delivered": sums.delivered_tokens,
            "billed": sums.billed_generated_tokens,
            "records_lost_with_gateway": sums.lost_generated_tokens,
        },
        "prompt_tokens_of_engines": sums.prompt.figures(),
        "tokens_of_engines": sums.generated.figures(),
    }
