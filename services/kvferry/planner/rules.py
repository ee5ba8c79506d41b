"""Headroom and thresholds: symptom, cause, action, and the condition in PromQL, shared by docs, alerts and `plan`."""

# Each rule names its source: an entry of the published figures, or kvferry's own documentation. A `condition` becomes
# an alert as it stands; metrics are vLLM's (`vllm:*`, exported by workers) and kvferry's (docs/metrics.md).

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

Severity = Literal["info", "warning", "critical"]


@dataclass(frozen=True, slots=True)
class Rule:
    """One rule. `for_s`: how long the condition holds before it counts. `caution`: what the source gets wrong."""

    name: str
    severity: Severity
    symptom: str
    cause: str
    action: str
    source: str
    condition: str = ""  # PromQL; empty: nothing measures it
    for_s: int = 300
    threshold: float | None = None
    caution: str = ""

    @property
    def alert(self) -> str:
        """Name of the alert, in Prometheus' spelling."""
        return "Kvferry" + "".join(word.capitalize() for word in self.name.split("-"))


KV_USE_HIGH: Final = 0.85
KV_USE_THRASHING: Final = 0.95
PREEMPTION_RATE: Final = 0.01
TTFT_P99_S: Final = 0.5
HIT_RATE_DROP: Final = 0.5

RULES: Final = (
    Rule(
        name="kv-use-high", severity="warning", threshold=KV_USE_HIGH,
        symptom="KV pages of an engine are used to more than 85 %",
        cause="as many or as long requests as the pages hold; the next burst waits or preempts",
        action="plan with this load (kvferry plan): more decode workers, FP8 KV where it is shown, lower max_num_seqs",
        condition=f"avg_over_time(vllm:kv_cache_usage_perc[5m]) > {KV_USE_HIGH:g}",
        source="002.mon.usage.high",
        caution="cached pages of ended requests count as free in this gauge",
    ),
    Rule(
        name="kv-thrashing", severity="critical", threshold=KV_USE_THRASHING,
        symptom="KV pages of an engine are used to more than 95 % for minutes",
        cause="running requests take pages from each other: preempted ones are computed again",
        action="admit less (worker.max_requests, max_num_seqs) at once, then add decode workers",
        condition=f"avg_over_time(vllm:kv_cache_usage_perc[5m]) > {KV_USE_THRASHING:g}",
        source="002.mon.usage.thrash",
    ),
    Rule(
        name="preemptions", severity="warning", threshold=PREEMPTION_RATE,
        symptom="more than 1 % of the requests are preempted",
        cause="answers grow into pages that are not there; vLLM recomputes, it has no swapping",
        action="lower max_num_seqs to what `kvferry plan` gives, or add memory for pages",
        condition="rate(vllm:num_preemptions_total[5m]) / rate(vllm:request_success_total[5m]) "
        f"> {PREEMPTION_RATE:g}",
        source="002.mon.preempt",
        caution="a preemption is an event, and one request may have several",
    ),
    Rule(
        name="ttft-slow", severity="warning", threshold=TTFT_P99_S,
        symptom="p99 of the time to first token is over 500 ms",
        cause="prefill, its queue, the KV transfer or a restore; `kvferry explain ID` shows which",
        action="compare with the TTFT parts of `kvferry plan --explain`, and add what is over plan",
        condition="histogram_quantile(0.99, sum by (le) (rate(kvferry_time_to_first_token_seconds_bucket[5m]))) "
        f"> {TTFT_P99_S:g}",
        source="000.slo.ttft",
        caution="the source's own benchmark misses it in two of four rows; set the objective of your workload",
    ),
    Rule(
        name="ttft-follows-queue", severity="warning",
        symptom="the time to first token rises with the number of waiting requests",
        cause="KV capacity, not compute: requests wait for pages",
        action="more pages: decode workers, fewer tokens a request, FP8 KV where it is shown",
        condition="sum by (worker) (avg_over_time(vllm:num_requests_waiting[5m])) > 0 and "
        f"sum by (worker) (avg_over_time(vllm:kv_cache_usage_perc[5m])) > {KV_USE_HIGH:g}",
        source="002.mon.ttft",
        caution="waiting requests with free pages point to compute or to max_num_seqs instead",
    ),
    Rule(
        name="hit-rate-collapse", severity="warning", threshold=HIT_RATE_DROP,
        symptom="the prefix hit rate of a worker fell below half of the day's",
        cause="changed system prompts, templates with timestamps, a new salt, a restart, or routing without residency",
        action="compare prompts' first tokens; keep what changes (dates, names) at the prompt's end; look at "
        "`kvferry explain ID`",
        condition="(rate(vllm:prefix_cache_hits_total[10m]) / rate(vllm:prefix_cache_queries_total[10m])) < "
        f"{HIT_RATE_DROP:g} * (rate(vllm:prefix_cache_hits_total[1d]) / rate(vllm:prefix_cache_queries_total[1d]))",
        source="003.trouble.hits-low", for_s=600,
        caution="a radix tree, the source's remedy, does not mend prompts that differ",
    ),
    Rule(
        name="out-of-memory-at-start", severity="critical",
        symptom="an engine does not start: out of memory",
        cause="gpu_memory_utilization counts all device memory, and another process has some",
        action="lower gpu_memory_utilization (0.85), or max_num_batched_tokens, which sizes activations",
        source="003.trouble.oom-start",
    ),
    Rule(
        name="out-of-memory-under-load", severity="critical",
        symptom="an engine ends with out of memory under load",
        cause="activations of a step that was larger than the one profiled at start; pages cannot run out so",
        action="lower max_num_batched_tokens or gpu_memory_utilization",
        source="003.trouble.oom-load",
        caution="the source advises FP8 KV: vLLM preempts when pages are short, it does not end",
    ),
    Rule(
        name="ttft-drifts", severity="info",
        symptom="the time to first token grows over hours or days",
        cause="queueing, host memory, or hot prefixes that are evicted; pages cannot fragment",
        action="look at waiting requests and hit rates; a restart hides the cause",
        source="003.trouble.ttft-drift",
        caution="the source blames fragmentation of the KV cache, which paging excludes",
    ),
    Rule(
        name="restore-slow", severity="info",
        symptom="prefixes come back from CPU memory or volumes more slowly than prefill computes them",
        cause="PCIe, or more restores at once than the volumes read",
        action="compare `tiers` of `kvferry plan --json` with the prefill of the same prompt; turn the tier off if it "
        "loses",
        source="003.trouble.offload-slow",
    ),
    Rule(
        name="transfer-slow", severity="warning",
        symptom="KV transfers between prefill and decode take longer than the plan's",
        cause="TCP where RDMA was meant, or a network that both directions share",
        action="UCX_TLS and rdma of the chart; `kvferry plan --explain` has the bytes per second that are needed",
        source="003.trouble.disagg",
    ),
    Rule(
        name="wrong-output-fp8", severity="critical",
        symptom="answers degrade with FP8 KV pages",
        cause="scales of 1.0, or e5m2's two bits of mantissa",
        action="fp8_e4m3 with a checkpoint that has KV scales; `kvferry quality` compares",
        source="003.trouble.fp8-wrong",
        caution="kvferry serves vLLM engines with the model's own KV dtype alone",
    ),
    Rule(
        name="long-context-quality", severity="warning",
        symptom="answers degrade at long context",
        cause="quantized keys under scaled rotary positions",
        action="the model's own KV dtype above 65,536 tokens, as the profiles do, or a model with latents (MLA)",
        source="003.trouble.long-quality",
    ),
    Rule(
        name="attention-backend", severity="info",
        symptom="decode is slower than the plan on GPUs",
        cause="a KV dtype that excludes FlashAttention, or FlashInfer without a compiler",
        action="read the backend in the engine's log; `kvferry plan --json` lists those of the KV dtype",
        source="001.flash.check",
    ),
)  # fmt: skip


def at_risk(kv_use: float) -> tuple[Rule, ...]:
    """Return the rules that a plan with this share of used KV pages runs into."""
    return tuple(rule for rule in RULES if rule.name.startswith("kv-") and rule.threshold and kv_use > rule.threshold)
