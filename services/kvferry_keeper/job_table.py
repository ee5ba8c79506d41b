"""Jobs of engines that are not answered yet."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvferry.keeper import messages
from kvferry.keeper.layout import ChunkKey
from kvferry.keeper.messages import ProtocolError
from kvferry.observability.tracing import Span
from kvferry_keeper.engine_session import EngineSession
from kvferry_keeper.store.outcome import Outcome


class Job:
    """`failed` is index -> cause."""

    __slots__ = ("began_s", "failed", "is_load", "keys", "num_bytes", "num_left", "number", "session", "span")

    def __init__(
        self, session: EngineSession, number: int, keys: Sequence[ChunkKey], *, is_load: bool, now_s: float
    ) -> None:
        self.session = session
        self.number = number
        self.keys = keys
        self.is_load = is_load
        self.num_left = len(keys)
        self.failed: dict[int, str] = {}
        self.num_bytes = 0
        self.began_s = now_s
        self.span: Span | None = None  # of a load for a traced request


@dataclass(slots=True)
class JobCounts:
    num_begun: int = 0
    num_ended: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)  # of chunks
    num_bytes: int = 0
    seconds: float = 0.0  # from a job's arrival to its end, summed


class JobTable:
    """Answers an engine when the last chunk of its job has ended.

    If the engine reused a row before that, the new bytes could be stored under the old key.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._jobs: dict[EngineSession, dict[int, Job]] = {}
        self.loads = JobCounts()
        self.stores = JobCounts()

    def __repr__(self) -> str:
        return f"<JobTable of {sum(map(len, self._jobs.values()))} jobs>"

    def num_jobs(self, session: EngineSession) -> int:
        return len(self._jobs.get(session, ()))

    def add_session(self, session: EngineSession) -> None:
        self._jobs[session] = {}

    def discard_session(self, session: EngineSession) -> None:
        self._jobs.pop(session, None)

    def begin(self, session: EngineSession, number: int, keys: Sequence[ChunkKey], *, is_load: bool) -> Job:
        jobs = self._jobs[session]
        if number in jobs:
            raise ProtocolError(f"job {number} has not ended")
        job = jobs[number] = Job(session, number, keys, is_load=is_load, now_s=self._clock())
        self._counts_of(job).num_begun += 1
        return job

    def end_chunk(self, job: Job, index: int, outcome: str) -> None:
        self._counts_of(job).outcomes[outcome] += 1
        if outcome == Outcome.OK:
            assert job.session.region is not None
            job.num_bytes += job.session.region.row_bytes
        elif job.is_load or outcome != Outcome.EXISTS:
            job.failed[index] = outcome
        job.num_left -= 1
        if not job.num_left:
            self.end(job)

    def end(self, job: Job) -> None:
        counts = self._counts_of(job)
        counts.num_ended += 1
        counts.num_bytes += job.num_bytes
        counts.seconds += self._clock() - job.began_s
        if job.span is not None:
            _end_span(job.span, job)
        jobs = self._jobs.get(job.session)
        if jobs is not None:
            del jobs[job.number]
        job.session.answer(messages.Done(job.number, job.failed, job.num_bytes))

    def _counts_of(self, job: Job) -> JobCounts:
        return self.loads if job.is_load else self.stores


def _end_span(span: Span, job: Job) -> None:
    # Failed chunks are cache misses, not errors of the request.
    causes = sorted({str(cause) for cause in job.failed.values()})
    span.set(
        {"kvferry.bytes": job.num_bytes, "kvferry.failed_pages": len(job.failed), "kvferry.causes": causes or None}
    )
    span.end()
