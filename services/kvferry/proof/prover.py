"""Proves transfers between the engines of a gateway's workers, and says which are proven."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import secrets
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from typing import Final, NamedTuple

from msgspec import structs

from kvferry.engine.base import EngineOutput, EngineRequest
from kvferry.errors import EngineDead, KvferryError, Overloaded, UnavailableError, WorkerLost, printable
from kvferry.link.worker_link import WorkerLink
from kvferry.membership.base import MemberId, MemberKind, RecordChange, Records, RecordStore
from kvferry.proof.certificates import (
    AGAIN_S,
    FOLDER,
    MAX_LOST,
    Certificate,
    Certificates,
    EngineKind,
    Way,
    can_transfer,
    key_of,
    kind_of,
)
from kvferry.proof.measure import Answered, Ask, Measurement, NotComparable, answered
from kvferry.proof.verdict import MIN_PROMPT, Distances, Outcome, judge, prompts

log = logging.getLogger(__name__)

REQUEST_TIMEOUT_S: Final = 60.0
PROOF_TIMEOUT_S: Final = 300.0
CLAIM_S: Final = PROOF_TIMEOUT_S + 60.0  # after which a claim of another gateway no longer counts
NUM_LOOKS, LOOK_S = 40, 0.05  # for requests of tenants that wait, before each request of a proof
RETRY_S: Final = 5.0  # after a failure of the registry, or while workers are too busy
RECHECK_S: Final = 60.0  # between looks for results that are due again
# Between proofs of a way by one gateway: gateways with different clocks or secrets would else redo each other's.
REPEAT_S: Final = AGAIN_S[Outcome.UNDECIDED]
PENDING: Final = "not proven yet"
MIN_TOKENS: Final = 16  # different ones that prompts are made of


class Subject(NamedTuple):
    """What is proven: a way between two workers, each for all of its kind."""

    prefill: WorkerLink
    decode: WorkerLink
    way: Way
    adapter: str = ""

    @property
    def key(self) -> str:
        return key_of(kind_of(self.prefill.member), kind_of(self.decode.member), self.way)

    @property
    def in_pool(self) -> tuple[str, str]:
        return self.key, self.decode.member.pool

    def __str__(self) -> str:
        prefill, decode = self.prefill.member, self.decode.member
        devices = f"{prefill.device or 'unknown'} to {decode.device or 'unknown'}"
        return printable(f"{self.way} of {decode.model.rpartition('/')[2]} ({devices})")


class Prover:
    def __init__(
        self,
        store: RecordStore,
        certificates: Certificates,
        gateway_id: MemberId,
        *,
        usable: Callable[[MemberKind], Sequence[WorkerLink]],
        is_wanted: Callable[[str], bool],
        read_tokens: Callable[[str], Awaitable[Sequence[int]]],
        longest: Callable[[str, int], int],
        on_change: Callable[[], None],
    ) -> None:
        """By pool: `is_wanted`, `read_tokens` of a text that prompts are made of, `longest` by page size."""
        self._store = store
        self._certificates = certificates
        self._gateway_id = gateway_id
        self._usable = usable
        self._is_wanted = is_wanted
        self._read_tokens = read_tokens
        self._longest = longest
        self._on_change = on_change
        self._known: dict[str, Certificate] = {}
        self._claims_since_s: dict[tuple[str, str], float] = {}  # of other gateways, by key and gateway
        self._not_before_s: dict[tuple[str, str], float] = {}  # when it may be proven again here, by key and pool
        self._num_failures: Counter[tuple[str, str]] = Counter()  # in a row, likewise
        self._changed = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._has_read = asyncio.Event()

    def start(self) -> None:
        self._tasks = [asyncio.create_task(self._follow()), asyncio.create_task(self._prove_all())]

    async def close(self) -> None:
        """Idempotent."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def workers_changed(self) -> None:
        self._changed.set()

    def is_proven(self, prefill: EngineKind, decode: EngineKind, *, has_adapter: bool) -> bool:
        way = Way.ADAPTER if has_adapter else Way.TRANSFER
        certificate = self._known.get(key_of(prefill, decode, way))
        return certificate is not None and certificate.is_proven

    def results(self) -> Iterator[tuple[Subject, Certificate | None]]:
        """Yield each way between linked workers, with its result if there is one."""
        return ((subject, self._known.get(subject.key)) for subject in self._subjects())

    # What is to be proven

    def _subjects(self) -> list[Subject]:
        """Return one for each key and pool."""
        found: dict[tuple[str, str], Subject] = {}
        decoding = _one_of_each_kind(self._usable(MemberKind.DECODE))
        for prefill in _one_of_each_kind(self._usable(MemberKind.PREFILL)):
            for decode in decoding:
                if not can_transfer(prefill.member, decode.member) or not self._is_wanted(decode.member.pool):
                    continue
                subjects = [Subject(prefill, decode, Way.TRANSFER)]
                if adapters := sorted(prefill.adapters & decode.adapters):
                    subjects.append(Subject(prefill, decode, Way.ADAPTER, adapters[0]))
                for subject in subjects:
                    found.setdefault(subject.in_pool, subject)
        return list(found.values())

    def _next(self) -> Subject | None:
        now_unix_s, now_s = time.time(), time.monotonic()
        for subject in self._subjects():
            known = self._known.get(subject.key)
            if now_s < self._not_before_s.get(subject.in_pool, -math.inf):
                continue
            if known is None:
                return subject
            if known.claimed_by and known.claimed_by != self._gateway_id:
                since_s = self._claims_since_s.setdefault((subject.key, known.claimed_by), now_s)
                if now_s - since_s < CLAIM_S:
                    continue
            if known.claimed_by or known.is_due(now_unix_s):
                return subject
        return None

    async def _prove_all(self) -> None:
        await self._has_read.wait()
        while True:
            self._changed.clear()
            while (subject := self._next()) is not None:
                key = subject.in_pool
                try:
                    await self._prove(subject)
                    self._num_failures.pop(key, None)
                except Exception as error:
                    if (task := asyncio.current_task()) is not None and task.cancelling():
                        return  # the claim could not be given back
                    pause_s = min(RECHECK_S, RETRY_S * 2 ** min(self._num_failures[key], 10))
                    self._num_failures[key] += 1
                    self._not_before_s[key] = time.monotonic() + pause_s  # others are not held up
                    if isinstance(error, KvferryError | TimeoutError):
                        log.warning("no proof of %s now, again in %.0f s: %s", subject, pause_s, _message(error))
                    else:
                        log.exception("a proof failed; again in %.0f s", pause_s)
            here, now_s = {subject.in_pool for subject in self._subjects()}, time.monotonic()
            self._num_failures = Counter({key: num for key, num in self._num_failures.items() if key in here})
            self._not_before_s = {key: at_s for key, at_s in self._not_before_s.items() if at_s > now_s}
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(RETRY_S if self._num_failures else RECHECK_S):
                    await self._changed.wait()

    # Records

    async def _follow(self) -> None:
        while True:
            try:
                async for change in self._store.watch(FOLDER):
                    self._apply(change)
                    self._has_read.set()
                    self._changed.set()
                    self._on_change()
            except KvferryError as error:
                log.warning("proofs cannot be followed: %s", error.message)
            except Exception:
                log.exception("following the proofs failed; trying again")
            await asyncio.sleep(RETRY_S)

    def _apply(self, change: RecordChange) -> None:
        values: Mapping[str, bytes | None]
        if isinstance(change, Records):
            values = {**dict.fromkeys(self._known), **change.by_name}
        else:
            values = {change.name: change.value}
        for name, value in values.items():
            if value is not None:
                self._learn(name, value)
            else:  # an operator wants it proven again
                self._known.pop(name, None)
                self._not_before_s = {each: at_s for each, at_s in self._not_before_s.items() if each[0] != name}
                self._certificates.drop(name)

    def _learn(self, name: str, value: bytes) -> None:
        certificate = self._certificates.decode(name, value)
        if certificate is None:
            self._known.pop(name, None)
            return
        if not certificate.claimed_by:
            self._claims_since_s = {each: since for each, since in self._claims_since_s.items() if each[0] != name}
        self._known[name] = certificate

    # One proof

    async def _prove(self, subject: Subject) -> None:
        key, known = subject.key, self._known.get(subject.key)
        record = await self._store.read(f"{FOLDER}/{key}")
        before = self._certificates.decode(key, record.value) if record is not None else None
        if record is not None and before is not None and before != known:
            self._learn(key, record.value)  # another gateway was at work
            return
        if record is not None and before is None:
            self._not_before_s[subject.in_pool] = time.monotonic() + REPEAT_S
        kept = await asyncio.to_thread(self._certificates.load, key) if before is None else None
        if kept is not None and not kept.is_due(time.time()):
            await self._write(kept, record.revision if record is not None else 0)
            log.info("%s is %s, as an earlier start found", subject, kept.outcome)
            return
        began = _unproven(subject) if before is None else structs.replace(before, claimed_by="")
        claim = structs.replace(began, claimed_by=self._gateway_id)
        if not await self._write(claim, record.revision if record is not None else 0):
            return  # another gateway was first
        log.info("proving the %s", subject)
        result = began  # which is due again at once, where the proof fails for a reason that passes
        try:
            result = await self._result(subject, began)
            _log_result(subject, result)
        except (UnavailableError, Overloaded, TimeoutError) as error:
            result = structs.replace(began, reason=f"the proof could not be made: {_message(error)}")
            raise
        finally:
            is_written = await self._conclude(result)
        if is_written:
            self._not_before_s[subject.in_pool] = time.monotonic() + REPEAT_S
            await asyncio.to_thread(self._certificates.keep, result)

    async def _conclude(self, result: Certificate) -> bool:
        # Meanwhile the claim may have been taken over, or deleted to have it proven anew.
        record = await self._store.read(f"{FOLDER}/{result.key}")
        claim = self._certificates.decode(result.key, record.value) if record is not None else None
        if record is None or claim is None or claim.claimed_by != self._gateway_id:
            return False
        return await self._write(result, record.revision)

    async def _write(self, certificate: Certificate, revision: int) -> bool:
        value = self._certificates.encode(certificate)
        written = await self._store.write(f"{FOLDER}/{certificate.key}", value, revision)
        if written:
            self._learn(certificate.key, value)
            self._on_change()
        return written

    async def _result(self, subject: Subject, began: Certificate) -> Certificate:
        begun_s = time.monotonic()
        measured: list[Distances] = []
        reason, num_lost = "", 0
        try:
            async with asyncio.timeout(PROOF_TIMEOUT_S):
                async for distances in self._measure(subject):
                    measured += distances
        except (WorkerLost, EngineDead) as error:
            if error.is_blameless if isinstance(error, EngineDead) else not error.has_vanished:
                raise  # another request is suspect; or the worker was drained, or this gateway ends
            num_lost, reason = began.num_lost + 1, f"an engine was lost during the proof: {_message(error)}"
        except (UnavailableError, Overloaded):
            raise
        except (KvferryError, NotComparable) as error:
            reason = _message(error)
        if subject.key != began.key:
            raise UnavailableError("a worker became one of another kind during the proof")
        verdict = judge(measured)
        outcome = verdict.outcome
        if reason:
            outcome = Outcome.REFUTED if num_lost >= MAX_LOST else Outcome.UNDECIDED
        reason, now_unix_s = reason or verdict.reason, time.time()
        if began.is_proven and outcome is Outcome.UNDECIDED and not num_lost:
            # Workers may have been too busy. What was proven holds, and is proven again soon.
            return structs.replace(
                began, reason=reason, unix_s=now_unix_s - AGAIN_S[began.outcome] + AGAIN_S[Outcome.UNDECIDED]
            )
        return structs.replace(
            began,
            outcome=outcome,
            reason=reason,
            model=subject.decode.member.model.rpartition("/")[2],
            gateway=self._gateway_id,
            unix_s=now_unix_s,
            took_s=round(time.monotonic() - begun_s, 3),
            num_lost=num_lost,
            limits=verdict.limits,
            distances=tuple(measured),
        )

    async def _measure(self, subject: Subject) -> AsyncIterator[Sequence[Distances]]:
        member = subject.decode.member
        tokens = await self._read_tokens(member.pool)
        if len(set(tokens)) < MIN_TOKENS:
            raise NotComparable(f"the text of the proof has fewer than {MIN_TOKENS} different tokens of this model")
        longest = self._longest(member.pool, member.block_size)
        if longest < MIN_PROMPT:
            raise NotComparable(f"prompts of the proof have at least {MIN_PROMPT} tokens, and the context ends before")
        seed = secrets.randbits(32)
        measurement = Measurement(
            self._ask(subject.prefill),
            self._ask(subject.decode),
            block_size=member.block_size,
            tokens=tokens,
            name=f"proof-{seed:08x}",
            pool=member.pool,
            adapter=subject.adapter,
        )
        for number, prompt in enumerate(prompts(tokens, member.block_size, longest, seed)):
            yield await measurement.distances(number, prompt)

    def _ask(self, link: WorkerLink) -> Ask:
        async def ask(request: EngineRequest) -> Answered:
            await _until_quiet(link)
            outputs: list[EngineOutput] = []
            remote = link.submit(request, outputs.append)
            try:
                async with asyncio.timeout(REQUEST_TIMEOUT_S):
                    await remote.wait()
            finally:
                remote.cancel()
            return answered(request, outputs)

        return ask


def _unproven(subject: Subject) -> Certificate:
    prefill, decode = kind_of(subject.prefill.member), kind_of(subject.decode.member)
    return Certificate(prefill=prefill, decode=decode, way=subject.way, outcome=Outcome.UNDECIDED, reason=PENDING)


def _one_of_each_kind(links: Sequence[WorkerLink]) -> Collection[WorkerLink]:
    # A cluster has many workers, and few kinds of them. One worker that is always full must not keep its kind unproven.
    found: dict[object, WorkerLink] = {}
    for link in sorted(links, key=lambda each: (each.is_full, each.stats.num_waiting)):
        found.setdefault((link.member.pool, kind_of(link.member), link.adapters), link)
    return found.values()


async def _until_quiet(link: WorkerLink) -> None:
    """Let requests of tenants that wait at the worker go first, for a while. Raises Overloaded if it is full."""
    for _ in range(NUM_LOOKS):
        if not (link.is_full or link.stats.num_waiting):
            return
        await asyncio.sleep(LOOK_S)
    if link.is_full:
        raise Overloaded("a worker is full")


def _log_result(subject: Subject, result: Certificate) -> None:
    if not result.is_proven:
        log.warning("the %s is %s: %s", subject, result.outcome, result.reason)
    elif result.reason:
        log.warning("the %s stays proven, though a new proof was undecided: %s", subject, result.reason)
    else:
        log.info(
            "the %s is proven in %.1f s: transferred pages differ by %.4g at most, wrong ones by %.4g or more",
            *(subject, result.took_s, result.distance, result.wrong_from),
        )


def _message(error: BaseException) -> str:
    if isinstance(error, TimeoutError):
        return "the engines did not answer in time"
    return printable(error.message if isinstance(error, KvferryError) else str(error))
