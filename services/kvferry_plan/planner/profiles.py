"""Profiles: demands and settings of common workloads, each setting with its reason."""

# `kvferry plan --profile NAME` starts from one; the chart's examples are made from them (deploy/helm/kvferry/examples).
# Lengths are those of the load-test harness's scenarios of the same kind, where there is one.

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from kvferry.errors import ConfigError

_GIB: Final = 1 << 30


@dataclass(frozen=True, slots=True)
class Reason:
    """A setting and why it has its value. `source`: an entry of the published figures."""

    setting: str
    value: str
    why: str
    source: str = ""


@dataclass(frozen=True, slots=True)
class Profile:
    """A workload. Seconds, tokens; tiers are of one node. `offload` says whether KV may wait in lower tiers."""

    name: str
    title: str
    context_tokens: int
    prompt: str  # as --prompt takes it: MEAN or MEAN:P99
    output: str
    ttft_s: float
    tpot_s: float
    prefix_share: float
    offload: bool
    max_num_batched_tokens: int
    mode: str  # any, disaggregated or aggregated
    # Wanted KV dtype by context: the first entry whose limit the context does not exceed.
    kv_cache_dtypes: tuple[tuple[int, str], ...]
    ttl_s: Mapping[str, int] = field(default_factory=dict)  # by tier, after the last use
    cpu_tier_gib: int = 0
    volume_tier_gib: int = 0
    example: str = ""  # of the chart
    reasons: tuple[Reason, ...] = ()

    def kv_cache_dtype(self, context_tokens: int) -> str:
        """Return the KV dtype that the profile wants for a context."""
        for limit, dtype in self.kv_cache_dtypes:
            if context_tokens <= limit:
                return dtype
        return "auto"


_FP8_TO_64K: Final = ((65_536, "fp8"),)
_LONG: Final = 1 << 24
_FP8_REASON: Final = Reason(
    "kv_cache_dtype", "fp8 up to 65,536 tokens, then the model's own type",
    "e4m3, since vLLM refuses e5m2 with FP8 checkpoints; half the pages of bfloat16. Quality falls at long context "
    "where positions are scaled", "003.quant.long",
)  # fmt: skip
_EXACT_REASON: Final = Reason(
    "kv_cache_dtype", "auto", "short contexts leave memory to spare, and FP8 scales are 1.0 unless calibrated",
    "000.fp8.e4m3",
)  # fmt: skip

PROFILES: Final = (
    Profile(
        name="chat", title="Chat: short prompts and answers, an answer that begins at once",
        context_tokens=8192, prompt="1500:6000", output="300:1000", ttft_s=0.5, tpot_s=0.03, prefix_share=0.3,
        offload=False, max_num_batched_tokens=8192, mode="any", kv_cache_dtypes=((_LONG, "auto"),),
        ttl_s={"device": 600},
        reasons=(
            Reason("mode", "any", "prefill apart pays from prompts of about 5,000 tokens on", "003.disagg.not"),
            Reason("offload", "no", "a restore over PCIe stands in the way of the first token", "003.offload.hurts"),
            Reason("max_num_batched_tokens", "8192", "prompts fit one step; longer steps delay tokens of others",
                   "000.vllm.batched"),
            Reason("ttl device", "600 s", "a user who thinks comes back within minutes", "000.ttl.cpu"),
            _EXACT_REASON,
        ),
    ),
    Profile(
        name="code", title="Code completion: a file as context, short answers, many requests",
        context_tokens=16384, prompt="4000:12000", output="128:512", ttft_s=0.4, tpot_s=0.02, prefix_share=0.2,
        offload=False, max_num_batched_tokens=8192, mode="any", kv_cache_dtypes=((_LONG, "auto"),),
        ttl_s={"device": 300},
        reasons=(
            Reason("kv_cache_dtype", "auto", "exact names and numbers matter; FP8 clips outliers without calibration",
                   "000.fp8.default"),
            Reason("offload", "no", "edits change the prompt's middle, so old pages seldom match", "003.offload.hurts"),
            Reason("tpot", "20 ms", "completions are read at once"),
            Reason("ttl device", "300 s", "the next edit follows within minutes"),
        ),
    ),
    Profile(
        name="rag", title="Long-context RAG: retrieved documents before a question, several turns",
        context_tokens=32768, prompt="10000:11000", output="200:600", ttft_s=2.0, tpot_s=0.04, prefix_share=0.15,
        offload=True, max_num_batched_tokens=16384, mode="disaggregated", kv_cache_dtypes=_FP8_TO_64K,
        ttl_s={"device": 30, "cpu": 600, "volume": 604_800}, cpu_tier_gib=960, volume_tier_gib=6000,
        example="8x-h200-pair",
        reasons=(
            Reason("mode", "disaggregated", "prompts over 5,000 tokens: prefill would stall the tokens of others",
                   "003.disagg.for"),
            Reason("max_num_batched_tokens", "16384", "a prompt in one step", "003.vllm.batched"),
            Reason("offload", "yes", "documents come back; reading them is faster than computing them",
                   "000.rag.dist.recompute"),
            Reason("ttl", "device 30 s, CPU 10 min, volume a week", "pages go down as sessions pause", "000.ttl.hbm"),
            _FP8_REASON,
        ),
    ),
    Profile(
        name="batch", title="Batch summarising: long documents once, nobody waits",
        context_tokens=32768, prompt="12000:28000", output="400:1000", ttft_s=60.0, tpot_s=0.2, prefix_share=0.02,
        offload=True, max_num_batched_tokens=32768, mode="aggregated", kv_cache_dtypes=_FP8_TO_64K,
        ttl_s={"device": 30}, cpu_tier_gib=256,
        reasons=(
            Reason("mode", "aggregated", "throughput counts alone; steps may be long"),
            Reason("max_num_batched_tokens", "32768", "the largest steps use the GPU best", "003.tune.batch"),
            Reason("offload", "CPU only", "for bursts; documents come once, so volumes hold nothing of use",
                   "003.offload.helps"),
            Reason("ttl device", "30 s", "pages of one-shot prompts make room for shared ones"),
            _FP8_REASON,
        ),
    ),
    Profile(
        name="agents", title="Agents with tools: prompts that grow with every step, shared instructions",
        context_tokens=65536, prompt="16000:48000", output="170:300", ttft_s=1.0, tpot_s=0.025, prefix_share=0.4,
        offload=True, max_num_batched_tokens=32768, mode="disaggregated", kv_cache_dtypes=_FP8_TO_64K,
        ttl_s={"device": 120, "cpu": 1800, "volume": 86_400}, cpu_tier_gib=1600, volume_tier_gib=20_000,
        example="70b-4plus4",
        reasons=(
            Reason("offload", "yes", "a tool may take minutes; the session's pages wait in CPU memory meanwhile",
                   "000.offload.cpu.when"),
            Reason("mode", "disaggregated", "each step prefills its tool's result beside hundreds of streams",
                   "003.disagg.for"),
            Reason("max_num_batched_tokens", "32768", "prefill workers serve no streams, so their steps may be long"),
            Reason("prefix_share", "0.4", "instructions and tool schemas are the same in all sessions",
                   "002.prefix.agent"),
            Reason("ttl", "device 2 min, CPU 30 min, volume a day", "tools answer in seconds to minutes"),
            _FP8_REASON,
        ),
    ),
    Profile(
        name="multi-tenant", title="Multi-tenant API: mixed lengths, shares and floors of tenants",
        context_tokens=32768, prompt="3000:16000", output="400:1500", ttft_s=1.5, tpot_s=0.05, prefix_share=0.1,
        offload=True, max_num_batched_tokens=8192, mode="any", kv_cache_dtypes=_FP8_TO_64K,
        ttl_s={"device": 300, "cpu": 1800, "volume": 604_800}, example="1-gpu",
        cpu_tier_gib=512, volume_tier_gib=6000,
        reasons=(
            Reason("max_num_batched_tokens", "8192", "long prompts of one tenant must not stall the tokens of others",
                   "003.tune.api"),
            Reason("kv_limit", "0.85", "floors need pages that running requests leave free", "002.mon.usage.high"),
            Reason("offload", "yes", "pages of basic tenants go down first, floors keep premium ones", "000.sla"),
            Reason("ttl", "device 5 min, CPU 30 min, volume a week", "each tenant may set its own", "000.ttl.tenant"),
            _FP8_REASON,
        ),
    ),
)  # fmt: skip


def find(name: str) -> Profile:
    """Raises ConfigError that lists the profiles."""
    for profile in PROFILES:
        if profile.name == name:
            return profile
    raise ConfigError(f"--profile {name[:40]!r}: expected one of {', '.join(each.name for each in PROFILES)}")


def tier_bytes(gib: int) -> int:
    return gib * _GIB
