"""Result of a run: the file that `run` writes, and that `report` and `compare` read.

Latencies are in milliseconds, rates per second, everything else says its unit in its name.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from kvferry_loadtest.errors import ResultError

FORMAT = "kvferry-loadtest/1"

# The latencies that a result has, and how a report calls them.
LATENCIES = {
    "ttft": "TTFT from the scheduled time",
    "ttft_sent": "TTFT from sending",
    "tpot": "time per output token",
    "itl": "inter-token latency",
    "e2e": "end to end from the scheduled time",
    "e2e_sent": "end to end from sending",
    "predecessor_wait": "wait for the turn before",
    "lateness": "lateness of the harness",
}


class Distribution(msgspec.Struct, frozen=True, kw_only=True):
    """A latency, in ms. `histogram` is an HdrHistogram in its own base64 encoding (units: microseconds)."""

    count: int
    mean: float
    p50: float
    p90: float
    p99: float
    p999: float
    max: float
    histogram: str = ""


class Counts(msgspec.Struct, frozen=True, kw_only=True):
    """Requests by outcome, warm-up left out; they add up to `planned`."""

    planned: int
    ok: int
    refused: int
    failed: int
    timed_out: int
    skipped: int


class Objective(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of a request that counts for goodput. None: no limit."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None
    e2e_ms: float | None = None


class Group(msgspec.Struct, frozen=True, kw_only=True):
    """The figures of all requests, or of one tenant's."""

    counts: Counts
    latencies: dict[str, Distribution]  # by the keys of LATENCIES; one is missing when nothing was measured
    requests_per_s: float
    output_tokens_per_s: float
    prompt_tokens_per_s: float
    goodput_requests_per_s: float  # requests that ended well and kept to the objective
    goodput_share: float  # of all planned requests: refusals, failures and timeouts are misses


class Floor(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens that no cache avoids computing: those that no earlier prompt (and answer) of the run began with alike."""

    page_tokens: int  # granularity: only whole pages are found again
    prompt_tokens: int  # of the plan
    recompute_tokens: int  # with answers found again
    recompute_share: float
    recompute_share_without_answers: float  # when what decoding computed is not kept
    recompute_share_within_sessions: float  # when nothing is found again across sessions


class Server(msgspec.Struct, frozen=True, kw_only=True):
    """From the target's /metrics, after minus before; None where it does not say."""

    dialect: str  # kvferry, vllm, dynamo, or empty when nothing was understood
    prompt_tokens: float | None = None
    computed_tokens: float | None = None  # prefill tokens really computed
    cached_tokens_by_source: dict[str, float] = {}  # local, ferried, cpu, volume ... as the server names them
    recompute_share: float | None = None  # computed / prompt
    preemptions: float | None = None
    kv_utilisation_mean: float | None = None  # 0..1, over the samples of the run
    kv_utilisation_max: float | None = None
    queue_depth_mean: float | None = None
    ttft_queue_correlation: float | None = None  # Pearson's r of TTFT and the queue depth at sending
    bytes_by_tier: dict[str, float] = {}


class Harness(msgspec.Struct, frozen=True, kw_only=True):
    """Whether the harness itself can be trusted."""

    ok: bool
    reason: str  # why not; empty when it can
    cpu_share: float  # of one core, over the run
    lateness_p99_ms: float
    loop_stall_max_ms: float  # longest time its event loop did not turn


class Second(msgspec.Struct, frozen=True, kw_only=True):
    """One second of the run, for plots."""

    t_s: int
    sent: int
    ok: int
    missed: int  # refused, failed, timed out
    in_flight: int  # at its end
    ttft_p50_ms: float | None
    ttft_p99_ms: float | None
    queue_depth: float | None
    kv_utilisation: float | None


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """A run against one deployment."""

    format: str = FORMAT
    deployment: str  # what a report calls it
    scenario: str
    parameters: dict[str, Any]  # the scenario as it was run
    seed: int
    repeat: int = 0  # which of several like runs
    loop: str  # open or closed
    target: dict[str, str]  # url, model; never a key
    machine: str
    started_at: str  # ISO 8601, UTC
    duration_s: float
    objective: Objective
    overall: Group
    tenants: dict[str, Group] = {}
    floor: Floor | None = None
    server: Server
    harness: Harness
    seconds: tuple[Second, ...] = ()
    errors: dict[str, int] = {}  # what failed requests met, by text
    imported_from: str = ""  # aiperf, guidellm: figures that such a file does not have are missing
    # Figures that are not known although their field holds a 0: dotted names from here on, such as "seed" or
    # "overall.goodput_share". Of an imported result, none of the harness's figures is known.
    missing: tuple[str, ...] = ()
    versions: dict[str, str] = {}  # of whatever had a part in it: the harness, Python, the server


def write_result(path: Path, result: Result) -> None:
    path.write_bytes(msgspec.json.format(msgspec.json.encode(result), indent=1) + b"\n")


def read_result(path: Path) -> Result:
    """Raises ResultError when there is no such file, or it is no result of this version."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ResultError(f"{path}: {error.strerror}") from None
    try:
        version = msgspec.json.decode(data, type=dict[str, Any]).get("format")
        if version != FORMAT:
            raise ResultError(f"{path}: not a result of this version ({FORMAT}), but {version or 'something else'}")
        return msgspec.json.decode(data, type=Result)
    except msgspec.MsgspecError as error:
        raise ResultError(f"{path}: not a result: {error}") from None
