"""Headroom and thresholds: symptom, cause, what to look at, action and what it disrupts, for docs and `plan`."""

# Each rule names its source: an entry of the published figures, or kvferry's own documentation. Alerts are the chart's
# (deploy/helm/kvferry/files/alerts.yaml), which name the rule that they watch; `query` is PromQL for rules without one.

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

Severity = Literal["info", "warning", "critical"]


@dataclass(frozen=True, slots=True)
class Rule:
    """One rule. `look`: the first command or query; `action`: what is safe to do, and `disrupts` what of running
    requests it touches. `caution`: what the source gets wrong."""

    name: str
    severity: Severity
    symptom: str
    cause: str
    look: str
    action: str
    disrupts: str
    source: str
    query: str = ""  # PromQL where no alert watches; empty: nothing measures it
    threshold: float | None = None
    caution: str = ""


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
        look="`kvferry_worker_kv_pages_used / kvferry_worker_kv_pages`, by worker and role",
        action="add workers of the role (`roles.ROLE.replicas`); `kvferry plan` with this load says how many",
        disrupts="nothing: only what is added is touched",
        source="002.mon.usage.high",
        caution="cached pages of ended requests count as free in this gauge",
    ),
    Rule(
        name="kv-thrashing", severity="critical", threshold=KV_USE_THRASHING,
        symptom="KV pages of an engine are used to more than 95 % for minutes",
        cause="running requests take pages from each other: preempted ones are computed again",
        look="the same, and `kvferry_worker_requests_waiting`",
        action="add decode workers; then, to admit less, lower `worker.max_requests` or `engine.max_num_seqs`",
        disrupts="adding touches nothing; both settings replace all workers, each after its requests "
        "(docs/operator/scale-and-upgrade.md)",
        source="002.mon.usage.thrash",
    ),
    Rule(
        name="preemptions", severity="warning", threshold=PREEMPTION_RATE,
        symptom="engines preempt more than 1 % of their requests (tenants that take slots from each other are another "
        "matter)",
        cause="answers grow into pages that are not there; vLLM recomputes, it has no swapping",
        look="the query below, by worker",
        action="lower `max_num_seqs` to what `kvferry plan` gives, or add decode workers",
        disrupts="`max_num_seqs` of a role replaces all workers; adding touches nothing",
        query="rate(vllm:num_preemptions_total[5m]) / rate(vllm:request_success_total[5m]) "
        f"> {PREEMPTION_RATE:g}",
        source="002.mon.preempt",
        caution="a preemption is an event, and one request may have several",
    ),
    Rule(
        name="ttft-slow", severity="warning", threshold=TTFT_P99_S,
        symptom="p99 of the time to first token is over 500 ms",
        cause="prefill, its queue, the KV transfer or a restore",
        look="`kvferry_queued_requests` and `kvferry_worker_requests_waiting`; of one request `GET "
        "/kvferry/v1/requests/ID` at its gateway (`kvferry explain ID` for a cluster on one machine)",
        action="add prefill workers where prompts queue, decode workers where all are full; with no queue compare "
        "with the TTFT parts of `kvferry plan --explain`",
        disrupts="nothing: only what is added is touched",
        source="000.slo.ttft",
        caution="the source's own benchmark misses it in two of four rows; the threshold is the objective of your "
        "workload, which `kvferry plan --emit values.yaml` sets: 2 s for rag, 60 s for batch",
    ),
    Rule(
        name="ttft-follows-queue", severity="warning",
        symptom="the time to first token rises with the number of waiting requests",
        cause="KV capacity, not compute: requests wait for pages",
        look="the query below, by worker",
        action="add decode workers, or have clients send fewer tokens a request",
        disrupts="nothing: only what is added is touched",
        query="sum by (worker) (avg_over_time(vllm:num_requests_waiting[5m])) > 0 and "
        f"sum by (worker) (avg_over_time(vllm:kv_cache_usage_perc[5m])) > {KV_USE_HIGH:g}",
        source="002.mon.ttft",
        caution="waiting requests with free pages point to compute or to max_num_seqs instead",
    ),
    Rule(
        name="hit-rate-collapse", severity="warning", threshold=HIT_RATE_DROP,
        symptom="the prefix hit rate of a worker fell below half of the day's",
        cause="changed system prompts, templates with timestamps, a new salt, a restart, or routing without residency",
        look="`kvferry_worker_cached_prompt_tokens_total / kvferry_worker_prompt_tokens_total`, by worker; of one "
        "request `GET /kvferry/v1/requests/ID`",
        action="compare prompts' first tokens; have clients keep what changes (dates, names) at the prompt's end",
        disrupts="nothing",
        source="003.trouble.hits-low",
        caution="a radix tree, the source's remedy, does not help with prompts that differ",
    ),
    Rule(
        name="out-of-memory-at-start", severity="critical",
        symptom="an engine does not start: out of memory",
        cause="gpu_memory_utilization counts all device memory, and another process has some",
        look="`nvidia-smi` on the node, and the worker's log",
        action="lower `gpu_memory_utilization` (0.85), or `max_num_batched_tokens`, which sizes activations",
        disrupts="replaces all workers, and leaves fewer pages",
        source="003.trouble.oom-start",
    ),
    Rule(
        name="out-of-memory-under-load", severity="critical",
        symptom="an engine ends with out of memory under load",
        cause="activations of a step that was larger than the one profiled at start; pages cannot run out so",
        look="the worker's log: which step, with how many tokens",
        action="lower `max_num_batched_tokens` or `gpu_memory_utilization`",
        disrupts="replaces all workers; prompts take more steps, or fewer pages are left",
        source="003.trouble.oom-load",
        caution="the source advises FP8 KV: vLLM preempts when pages are short, it does not end",
    ),
    Rule(
        name="ttft-drifts", severity="info",
        symptom="the time to first token grows over hours or days",
        cause="queueing, host memory, or hot prefixes that are evicted; pages cannot fragment",
        look="`kvferry_queued_requests` and the hit rate over days",
        action="add what queues; a restart hides the cause",
        disrupts="nothing: only what is added is touched",
        source="003.trouble.ttft-drift",
        caution="the source blames fragmentation of the KV cache, which paging excludes",
    ),
    Rule(
        name="restore-slow", severity="info",
        symptom="prefixes come back from CPU memory or volumes more slowly than prefill computes them",
        cause="PCIe, or more restores at once than the volumes read",
        look="`tiers` of `kvferry plan --json` against the prefill of the same prompt",
        action="turn the tier off if it loses (`tier.enabled: false`)",
        disrupts="replaces all workers; pages of the tier are computed again",
        source="003.trouble.offload-slow",
    ),
    Rule(
        name="transfer-slow", severity="warning",
        symptom="KV transfers between prefill and decode take longer than the plan's",
        cause="TCP where RDMA was meant, or a network that both directions share",
        look="bytes per second that `kvferry plan --explain` needs, against the network's",
        action="`rdma` and `UCX_TLS` of the chart's roles",
        disrupts="replaces all workers of the role",
        source="003.trouble.disagg",
    ),
    Rule(
        name="wrong-output-fp8", severity="critical",
        symptom="answers degrade with FP8 KV pages",
        cause="scales of 1.0, or e5m2's two bits of mantissa",
        look="`kvferry quality`, which compares",
        action="the model's own KV dtype; with vLLM alone fp8_e4m3 and a checkpoint that has KV scales",
        disrupts="replaces all engines, and halves the tokens that their pages hold",
        source="003.trouble.fp8-wrong",
        caution="kvferry serves vLLM engines with the model's own KV dtype alone",
    ),
    Rule(
        name="long-context-quality", severity="warning",
        symptom="answers degrade at long context",
        cause="quantized keys under scaled rotary positions",
        look="`kvferry quality --lengths` beyond 65,536 tokens",
        action="the model's own KV dtype above 65,536 tokens, as the profiles do, or a model with latents (MLA)",
        disrupts="replaces all engines, and halves the tokens that their pages hold",
        source="003.trouble.long-quality",
    ),
    Rule(
        name="attention-backend", severity="info",
        symptom="decode is slower than the plan on GPUs",
        cause="a KV dtype that excludes FlashAttention, or FlashInfer without a compiler",
        look="the backend in the engine's log; `kvferry plan --json` lists those of the KV dtype",
        action="install a compiler for FlashInfer, or take a KV dtype that FlashAttention has",
        disrupts="replaces all engines",
        source="001.flash.check",
    ),
)  # fmt: skip


def at_risk(kv_use: float) -> tuple[Rule, ...]:
    """Return the rules that a plan with this share of used KV pages runs into."""
    return tuple(rule for rule in RULES if rule.name.startswith("kv-") and rule.threshold and kv_use > rule.threshold)
