"""The catalogue of metrics: name, kind, unit, labels, meaning and exporting process of each.

A label has a small known set of values, or names a process or a volume. docs/operator/metrics.md is generated from it.
Figures that a gateway and a worker both export have two names, so that a sum over all targets counts nothing twice.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass

from kvferry.errors import ConfigError, LocalError, TierError, UnsupportedEngine, by_code


class Kind(enum.StrEnum):
    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"
    SUMMARY = "summary"  # a count and a sum


class Exporter(enum.StrEnum):
    """The kind of process that exports a metric."""

    GATEWAY = "gateway"
    WORKER = "worker"
    KEEPER = "keeper"


@dataclass(frozen=True, slots=True)
class Label:
    """`values` is empty for labels that name processes or volumes."""

    name: str
    meaning: str
    values: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Metric:
    """An entry of the catalogue. `name` has no suffix for histograms and summaries."""

    name: str
    kind: Kind
    unit: str
    exporter: Exporter
    help: str
    labels: tuple[Label, ...] = ()
    buckets: tuple[float, ...] = ()


# Labels that a process adds to each of its series.
IDENTITY: Mapping[Exporter, tuple[Label, ...]] = {
    Exporter.GATEWAY: (),
    Exporter.WORKER: (Label("worker", "this worker's id"), Label("role", "its role, `prefill` or `decode`")),
    Exporter.KEEPER: (Label("keeper", "this keeper's id"),),
}

ENDPOINTS = (
    *("chat_completions", "completions"),
    *("grpc_generate", "grpc_generate_stream", "grpc_tokenize", "grpc_list_models"),
)
PLACEMENT_REASONS = (
    "disaggregated",
    "sibling",
    "prefix_on_decode",
    "short_tail",
    "prefill_busy",
    "no_prefill_worker",
    "unequal_pages",
    "unproven",
)
FALLBACK_CAUSES = (
    "timeout",
    "worker_lost",
    "worker_draining",
    "engine_dead",
    "overloaded",
    "engine_error",
    "pages_not_moved",
    "no_transfer",
    "error",
)
PROMPT_SOURCES = ("local_compute", "local_cache_hit", "external_kv_transfer")
CACHE_TIERS = ("device", "cpu", "volume", "ferry")
ENGINE_TIERS = ("device", "cpu")  # those that keep contracts of tenants
# Errors that never reach a client have no series.
_NOT_FOR_CLIENTS = (ConfigError, LocalError, TierError, UnsupportedEngine)
_CODE_TO_ERROR = {code: kind for code, kind in by_code().items() if not issubclass(kind, _NOT_FOR_CLIENTS)}
REFUSAL_CODES = tuple(sorted(_CODE_TO_ERROR))
# 499: the client left before the end.
STATUSES = tuple(sorted({"200", "499", "500", *(str(kind.http_status) for kind in _CODE_TO_ERROR.values())}))
CACHE_HINTS = ("wanted", "end")
FORK_OUTCOMES = ("ok", "refused", "cpu_time", "memory", "crashed", "late")
IMAGE_OUTCOMES = ("prepared", "kept")
FETCH_OUTCOMES = ("ok", "refused", "overloaded")
SPAN_OUTCOMES = ("exported", "failed", "dropped")
END_REASONS = ("stop", "length", "abort", "error", "refused", "preempted")
KV_TRANSFER_FAILURES = ("transfer", "handshake", "lease_ended")
_PAGE_OUTCOME_TO_MEANING = {
    "ok": "read or written",
    "missing": "not on the volume",
    "gone": "removed meanwhile",
    "corrupt_header": "the header's checksum is wrong",
    "corrupt_payload": "the payload's checksum is wrong",
    "wrong_key": "a whole chunk, of another key",
    "wrong_layout": "of another model or engine setting",
    "wrong_namespace": "of another tenant or epoch",
    "truncated": "a file of the wrong size",
    "undecryptable": "sealed with a key that is not there, or not sealed",
    "unreadable": "a file that this process may not read",
    "io_error": "the drive failed",
    "no_resources": "no memory or file descriptor",
    "no_space": "the drive is full",
    "refused": "the tenant may use no more room, or there is no key to seal with",
    "exists": "stored already",
    "timeout": "waited or ran too long",
    "unavailable": "no volume accepts it: a breaker is open, a drive is full, or the keeper does not have the volume",
    "queue_full": "512 MiB of writes wait",
    "budget": "`write_gib_per_day` is spent",
    "engine_gone": "the engine left meanwhile",
    "epoch_over": "the tenant was deleted, or its pages reset",
    "fault": "a bug of the keeper, see its log",
}
PAGE_OUTCOMES = tuple(_PAGE_OUTCOME_TO_MEANING)
# Outcomes of chunks whose bytes were read and did not verify.
VERIFICATION_FAILURES = (
    *("corrupt_header", "corrupt_payload", "wrong_key", "wrong_layout", "wrong_namespace"),
    *("truncated", "undecryptable"),
)
TENANT_OUTCOMES = ("ok", "refused", "failed", "cancelled")
TENANT_TOKEN_KINDS = ("prompt", "cached", "generated")
# Names of `tenancy.outcome.Cause` and `Refusal`.
EVICTION_CAUSES = ("expired", "ended", "over_cap", "borrowed", "own")
EVICTION_REFUSALS = ("limit", "no_room")
BREAKER_STATES = ("closed", "open", "half_open")
DIRECTIONS = ("read", "write")
JOBS = ("load", "store")

COUNTER, GAUGE, HISTOGRAM, SUMMARY = Kind
GATEWAY, WORKER, KEEPER = Exporter

_LATENCY_BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
_WHOLE_BUCKETS_S = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
_INTER_TOKEN_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)
_DECISION_BUCKETS_S = (0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.1)

_ENDPOINT = Label("endpoint", "the API that was called", ENDPOINTS)
_WORKER = Label("worker", "the worker's id")
_ROLE = Label("role", "the worker's role, `prefill` or `decode`")
_OF_WORKER = (_WORKER, _ROLE)
_POOL = Label("pool", "the workers' pool, an entry of `models`, or `default`")
# Without values: a way that no workers have is not at 0, which is unproven.
_WAY = Label(
    "way", "what is transferred: pages (`transfer`), or pages computed with an adapter (`transfer-with-adapter`)"
)
_SOURCE = Label(
    "source",
    "the source of the tokens' KV, as vLLM calls it; `external_kv_transfer`: a KV transfer, the CPU tier or a volume",
    PROMPT_SOURCES,
)
_CACHE_TIER = Label("tier", "the tier that had the KV", CACHE_TIERS)
_VOLUME = Label("volume", "the volume's id")
_OF_VOLUME_SEEN = (_VOLUME, Label("keeper", "the keeper that serves it"))
_SPAN_OUTCOME = Label("outcome", "`dropped`: too many waited; `failed`: the collector refused them", SPAN_OUTCOMES)
_DIRECTION = Label("direction", "the direction of the I/O", DIRECTIONS)
_JOB = Label("operation", "what the engine asked for", JOBS)
_OUTCOME = Label(
    "outcome",
    "; ".join(f"`{value}`: {meaning}" for value, meaning in _PAGE_OUTCOME_TO_MEANING.items()),
    PAGE_OUTCOMES,
)
_STATUS = Label("status", "HTTP status; 499: the client left, or was cut before its answer was written", STATUSES)
_CODE = Label("code", "the error's code, as in the body", REFUSAL_CODES)
_HINT = Label("hint", "`wanted`: pages are wanted for a time; `end`: the session ends", CACHE_HINTS)
_FORK_OUTCOME = Label("outcome", "`late`: ran out of wall-clock time", FORK_OUTCOMES)
_IMAGE_OUTCOME = Label(
    "outcome", "`kept`: its features were there from an earlier request of the tenant", IMAGE_OUTCOMES
)
_FETCH_OUTCOME = Label(
    "outcome",
    "`refused`: the URL is not allowed, or its host did not give an image in time; `overloaded`: 16 were running",
    FETCH_OUTCOMES,
)
_TENANT_OUTCOME = Label(
    "outcome",
    "`refused`: with a status below 500; `failed`: in a stream too; `cancelled`: the client left",
    TENANT_OUTCOMES,
)
_TOKEN_TYPE = Label("type", "`cached`: prompt tokens that were not computed", TENANT_TOKEN_KINDS)
_ASKED = Label("asked", "the model that the client asked for; differs from `model` under `model.canary`")
_MODEL_OUTCOME = Label("outcome", "as of kvferry_tenant_requests_total", TENANT_OUTCOMES)
_MODEL_SERVED = Label("model", "an entry of `models`, or `default`")
_PLACED_FOR = Label("reason", "why the worker was chosen (docs/contributor/architecture/routing.md)", PLACEMENT_REASONS)
_FAILED_FOR = Label("cause", "why the attempt failed", FALLBACK_CAUSES)
_WHEN = Label("when", "first: put in quarantine now; again: a repeat that was refused", ("first", "again"))
_ENDED_FOR = Label(
    "reason",
    "`refused`: draining, full or unreadable; the engine never saw it. "
    "`preempted`: a tenant below its share got its slot",
    END_REASONS,
)
_PAGE_EVICTED_FOR = Label("cause", "`borrowed`: above the floor; `own`: for the tenant's own page", EVICTION_CAUSES)
_NOT_TRANSFERRED_FOR = Label("cause", "`lease_ended`: too late, the pages may have been reused", KV_TRANSFER_FAILURES)
_PHASE = Label("phase", "`fetch`: until the other keeper lent the chunks; `read`: NIXL's read", ("fetch", "read"))
_SPOILED_FOR = Label("cause", "what was wrong", VERIFICATION_FAILURES)
_CHUNK_EVICTED_FOR = Label("cause", "`borrowed`: above the floor; `own`: for the tenant's own chunk", EVICTION_CAUSES)
_BREAKER_STATE = Label(
    "state", "`open`: the volume is not used; `half_open`: one operation is on trial", BREAKER_STATES
)
_TENANT = Label(
    "tenant",
    "one of the first 200 tenants with a record that this gateway knew; `other`: the sum of all others",
)
_MODEL = Label(
    "model", "that answered: an entry of `models`, or `default`; `other`: the sum of those after 256 pairs with `asked`"
)
_REFUSED_FOR = Label("reason", "`limit`: its own; `no_room`: all else is within floors or in use", EVICTION_REFUSALS)
_OF_TENANT_SEEN = Label("tenant", "one of the first 200 tenants that this worker met; `other`: the sum of all others")
_TENANT_TIER = (
    Label(
        "tenant",
        "one of the first 200 tenants with a record that sent this engine requests; `other`: the sum of all others",
    ),
    Label("tier", "the tier of the engine; volumes: `kvferry_tier_tenant_*` of keepers", ENGINE_TIERS),
)
_OF_TENANT = (
    _VOLUME,
    Label("tenant", "one of the first 200 tenants with a record that this keeper knew; `other`: the sum of all others"),
)

# The catalogue: one line for each metric, however long.
# ruff: noqa: E501
# fmt: off
# Gateways: requests
REQUESTS = Metric("kvferry_requests_total", COUNTER, "requests", GATEWAY, "Requests that reached an endpoint, by HTTP status. A stream that ends with an error event has 200 here.", (_ENDPOINT, _STATUS))
REQUESTS_REFUSED = Metric("kvferry_requests_refused_total", COUNTER, "requests", GATEWAY, "Requests answered with an error, an error event of a stream included, by its code.", (_CODE,))
REQUESTS_CANCELLED = Metric("kvferry_requests_cancelled_total", COUNTER, "requests", GATEWAY, "Requests whose client left before the end.")
REQUESTS_IN_FLIGHT = Metric("kvferry_requests_in_flight", GAUGE, "requests", GATEWAY, "Requests being answered now.")
CHOICES_IN_FLIGHT = Metric("kvferry_choices_in_flight", GAUGE, "choices", GATEWAY, "Choices of requests whose bodies are complete; at most gateway.max_requests.")
PROMPT_TOKENS_IN_FLIGHT = Metric("kvferry_prompt_tokens_in_flight", GAUGE, "tokens", GATEWAY, "Prompt tokens of requests in flight, once for each choice; at most 16,777,216.")
BODY_BYTES_IN_FLIGHT = Metric("kvferry_body_bytes_in_flight", GAUGE, "bytes", GATEWAY, "Bytes of bodies that are read or rendered; at most 256 MiB.")
REQUEST_SECONDS = Metric("kvferry_request_seconds", HISTOGRAM, "seconds", GATEWAY, "From a request's arrival to the end of its answer or error.", (_ENDPOINT,), buckets=_WHOLE_BUCKETS_S)
TIME_TO_FIRST_TOKEN = Metric("kvferry_time_to_first_token_seconds", HISTOGRAM, "seconds", GATEWAY, "From a request's arrival to its first token.", buckets=_LATENCY_BUCKETS_S)
INTER_TOKEN = Metric("kvferry_time_per_output_token_seconds", HISTOGRAM, "seconds", GATEWAY, "Mean time between the tokens of a request, first token excluded.", buckets=_INTER_TOKEN_BUCKETS_S)
PROMPT_TOKENS = Metric("kvferry_prompt_tokens_total", COUNTER, "tokens", GATEWAY, "Prompt tokens of finished requests.")
GENERATED_TOKENS = Metric("kvferry_generated_tokens_total", COUNTER, "tokens", GATEWAY, "Tokens generated by finished requests.")
HINTED_REQUESTS = Metric("kvferry_hinted_requests_total", COUNTER, "requests", GATEWAY, "Requests with a hint how long their pages are wanted.", (_HINT,))
SLOW_CLIENTS = Metric("kvferry_slow_clients_total", COUNTER, "requests", GATEWAY, "Clients cut because they left more than 4 MiB of a stream unread, read nothing for 30 s, or were slowest to read while unread answers exceeded 256 MiB.")
UNREAD_ANSWER_BYTES = Metric("kvferry_unread_answer_bytes", GAUGE, "bytes", GATEWAY, "Bytes of answers that wait for clients to read; over 256 MiB the slowest clients are cut.")
IMAGE_BYTES_IN_FLIGHT = Metric("kvferry_image_bytes_in_flight", GAUGE, "bytes", GATEWAY, "Bytes of images in flight, files and prepared ones; gateway.images.max_pending_mib is the limit.")
GRAMMAR_CHECKS = Metric("kvferry_grammar_checks_total", COUNTER, "grammars", GATEWAY, "Grammars of structured outputs that were tried in a process of their own, by outcome.", (_FORK_OUTCOME,))
IMAGE_CHATS = Metric("kvferry_image_chats_total", COUNTER, "requests", GATEWAY, "Chats with images that the image process prepared, by outcome; `refused`: the client's images are at fault.", (_FORK_OUTCOME,))
IMAGES = Metric("kvferry_images_total", COUNTER, "images", GATEWAY, "Images of chats that were rendered.", (_IMAGE_OUTCOME,))
IMAGE_FETCHES = Metric("kvferry_image_fetches_total", COUNTER, "images", GATEWAY, "Images by URL.", (_FETCH_OUTCOME,))
READY = Metric("kvferry_ready", GAUGE, "1", GATEWAY, "1 while a request sent now can be answered, as `/readyz` says.")

# Gateways: tenants
TENANT_REQUESTS = Metric("kvferry_tenant_requests_total", COUNTER, "requests", GATEWAY, "Requests of tenants that were identified.", (_TENANT, _TENANT_OUTCOME))
TENANT_TOKENS = Metric("kvferry_tenant_tokens_total", COUNTER, "tokens", GATEWAY, "Tokens of tenants' requests that were dispatched, also of those that ended early.", (_TENANT, _TOKEN_TYPE))
TENANT_FIRST_TOKEN = Metric("kvferry_tenant_time_to_first_token_seconds", SUMMARY, "seconds", GATEWAY, "From a request's dispatch to its first token.", (_TENANT,))
TENANT_TOKEN_GAP = Metric("kvferry_tenant_time_per_output_token_seconds", SUMMARY, "seconds", GATEWAY, "Mean time between the tokens of a request, first token excluded.", (_TENANT,))
MODEL_REQUESTS = Metric("kvferry_model_requests_total", COUNTER, "requests", GATEWAY, "Requests for which a model was chosen.", (_MODEL, _ASKED, _MODEL_OUTCOME))
MODEL_TOKENS = Metric("kvferry_model_tokens_total", COUNTER, "tokens", GATEWAY, "Tokens of requests that were dispatched, also of those that ended early.", (_MODEL, _TOKEN_TYPE))
MODEL_FIRST_TOKEN = Metric("kvferry_model_time_to_first_token_seconds", SUMMARY, "seconds", GATEWAY, "From a request's dispatch to its first token.", (_MODEL,))
MODEL_TOKEN_GAP = Metric("kvferry_model_time_per_output_token_seconds", SUMMARY, "seconds", GATEWAY, "Mean time between the tokens of a request, first token excluded.", (_MODEL,))
MODEL_READY = Metric("kvferry_model_ready", GAUGE, "", GATEWAY, "Whether requests for the model can be answered: it is loaded, and a decode worker of it is connected.", (_MODEL_SERVED,))
USAGE_RECORDS_LOST = Metric("kvferry_usage_records_lost_total", COUNTER, "records", GATEWAY, "Usage records that could not be written to gateway.usage_dir.")

# Gateways: the router
QUEUED_REQUESTS = Metric("kvferry_queued_requests", GAUGE, "requests", GATEWAY, "Choices that wait in this gateway while all workers are full; `gateway.max_queued_requests` is their limit.")
PLACEMENTS = Metric("kvferry_placements_total", COUNTER, "decisions", GATEWAY, "Placement decisions, by reason.", (_PLACED_FOR,))
PLACEMENT_SECONDS = Metric("kvferry_placement_seconds", HISTOGRAM, "seconds", GATEWAY, "Duration of a placement decision, computing route keys included.", buckets=_DECISION_BUCKETS_S)
SKIPPED_VOLUME_LOADS = Metric("kvferry_skipped_volume_loads_total", COUNTER, "decisions", GATEWAY, "Placements that compute pages although a volume has them, because that costs less.")
PREFILL_SECONDS = Metric("kvferry_prefill_seconds", HISTOGRAM, "seconds", GATEWAY, "From sending a prompt to a prefill worker until its pages were ready to be pulled.", buckets=_LATENCY_BUCKETS_S)
PREFILL_FALLBACKS = Metric("kvferry_prefill_fallbacks_total", COUNTER, "requests", GATEWAY, "Failed attempts to have a prefill worker compute a prompt, by cause.", (_FAILED_FOR,))
CONTINUED_REQUESTS = Metric("kvferry_continued_requests_total", COUNTER, "requests", GATEWAY, "Requests whose decode worker was lost mid-stream and that another one continued.")
PREEMPTED_REQUESTS = Metric("kvferry_preempted_requests_total", COUNTER, "requests", GATEWAY, "Times that a decode worker gave a request's slot to a tenant below its share; the request went on afterwards.")
QUARANTINED_REQUESTS = Metric("kvferry_quarantined_requests_total", COUNTER, "requests", GATEWAY, "Requests refused because workers were lost while computing them.", (_WHEN,))
DECODE_RETRIES = Metric("kvferry_decode_retries_total", COUNTER, "requests", GATEWAY, "Requests moved to another decode worker before their first token.")
TRANSFERRED_PAGES = Metric("kvferry_ferried_pages_total", COUNTER, "pages", GATEWAY, "KV pages that decode engines pulled for requests of this gateway.")
GATEWAY_SPANS = Metric("kvferry_trace_spans_total", COUNTER, "spans", GATEWAY, "Trace spans, by outcome.", (_SPAN_OUTCOME,))

# Gateways: workers and volumes as they see them
WORKER_CONNECTED = Metric("kvferry_worker_connected", GAUGE, "1", GATEWAY, "1 while this gateway's link to the worker is up.", _OF_WORKER)
WORKER_UNPAIRED = Metric("kvferry_worker_unpaired", GAUGE, "1", GATEWAY, "1 while the worker can exchange KV pages with no worker of the other role, as `/readyz` says.", _OF_WORKER)
TRANSFER_PROVEN = Metric("kvferry_transfer_proven", GAUGE, "1", GATEWAY, "1 while it is proven that KV pages survive the transfer between all workers of the pool; where it is not, decode workers compute prompts (`engine.proof`).", (_POOL, _WAY))
TRANSFER_DISTANCE = Metric("kvferry_transfer_proof_distance", GAUGE, "1", GATEWAY, "How far log-probabilities from transferred pages are at most from those of the decode engine's own pages, in the last proofs.", (_POOL, _WAY))
WORKER_RUNNING = Metric("kvferry_worker_requests_running", GAUGE, "requests", GATEWAY, "Requests that the worker's engine computes now.", _OF_WORKER)
WORKER_WAITING = Metric("kvferry_worker_requests_waiting", GAUGE, "requests", GATEWAY, "Requests that wait in the worker's engine.", _OF_WORKER)
WORKER_PAGES_USED = Metric("kvferry_worker_kv_pages_used", GAUGE, "pages", GATEWAY, "KV pages in use in the worker's engine.", _OF_WORKER)
WORKER_PAGES = Metric("kvferry_worker_kv_pages", GAUGE, "pages", GATEWAY, "Capacity of the worker's engine, in KV pages.", _OF_WORKER)
WORKER_PROMPT_TOKENS = Metric("kvferry_worker_prompt_tokens_total", COUNTER, "tokens", GATEWAY, "Prompt tokens, by the source of their KV.", (*_OF_WORKER, _SOURCE))
WORKER_CACHED_TOKENS = Metric("kvferry_worker_cached_prompt_tokens_total", COUNTER, "tokens", GATEWAY, "Prompt tokens whose KV was there already, by the tier that had it.", (*_OF_WORKER, _CACHE_TIER))
WORKER_TRANSFERRED_BYTES = Metric("kvferry_worker_ferried_bytes_total", COUNTER, "bytes", GATEWAY, "Bytes of KV that the worker's engine pulled from other engines.", _OF_WORKER)
WORKER_GENERATED_TOKENS = Metric("kvferry_worker_generated_tokens_total", COUNTER, "tokens", GATEWAY, "Tokens that the worker's engine generated.", _OF_WORKER)
VOLUME_READABLE = Metric("kvferry_volume_readable", GAUGE, "1", GATEWAY, "1 while the keeper reads from the volume; 0 while its breaker is open.", _OF_VOLUME_SEEN)
VOLUME_WRITABLE = Metric("kvferry_volume_writable", GAUGE, "1", GATEWAY, "1 while the keeper writes to the volume; 0 while the volume fails or is full.", _OF_VOLUME_SEEN)
VOLUME_TRIPS = Metric("kvferry_volume_breaker_trips_total", COUNTER, "trips", GATEWAY, "How often a breaker of the volume opened since its keeper started.", _OF_VOLUME_SEEN)
VOLUME_PAGES = Metric("kvferry_volume_pages", GAUGE, "pages", GATEWAY, "Chunks stored; a chunk is one or more KV pages.", _OF_VOLUME_SEEN)
VOLUME_USED = Metric("kvferry_volume_used_bytes", GAUGE, "bytes", GATEWAY, "Size of the chunk files.", _OF_VOLUME_SEEN)
VOLUME_CAPACITY = Metric("kvferry_volume_capacity_bytes", GAUGE, "bytes", GATEWAY, "Bytes that the keeper may use.", _OF_VOLUME_SEEN)
VOLUME_QUEUED = Metric("kvferry_volume_queued_read_bytes", GAUGE, "bytes", GATEWAY, "Bytes waiting to be read, or being read.", _OF_VOLUME_SEEN)
VOLUME_RATE = Metric("kvferry_volume_read_bytes_per_second", GAUGE, "bytes per second", GATEWAY, "Read rate of the last seconds, counting only time with reads; 0 without reads.", _OF_VOLUME_SEEN)

# Workers
ENGINE_ALIVE = Metric("kvferry_engine_alive", GAUGE, "1", WORKER, "1 while the engine lives; 0 once it has died.")
ENGINE_DRAINING = Metric("kvferry_engine_draining", GAUGE, "1", WORKER, "1 while the worker accepts no new requests.")
ENGINE_GATEWAYS = Metric("kvferry_engine_gateways", GAUGE, "links", WORKER, "Gateways that are linked to this worker.")
ENGINE_RUNNING = Metric("kvferry_engine_requests_running", GAUGE, "requests", WORKER, "Requests the engine computes now.")
ENGINE_WAITING = Metric("kvferry_engine_requests_waiting", GAUGE, "requests", WORKER, "Requests that wait in the engine.")
ENGINE_REQUESTS = Metric("kvferry_engine_requests_total", COUNTER, "requests", WORKER, "Requests that ended on this worker, by reason. A cancelled one is `abort`.", (_ENDED_FOR,))
ENGINE_PAGES = Metric("kvferry_engine_kv_pages", GAUGE, "pages", WORKER, "Capacity of the engine's own memory, in KV pages.")
ENGINE_PAGES_USED = Metric("kvferry_engine_kv_pages_used", GAUGE, "pages", WORKER, "KV pages in use.")
ENGINE_CPU_PAGES = Metric("kvferry_engine_cpu_tier_pages", GAUGE, "pages", WORKER, "Capacity of the engine's CPU tier, in KV pages.")
ENGINE_STEPS = Metric("kvferry_engine_steps_total", COUNTER, "steps", WORKER, "Engine steps that finished.")
ENGINE_PROMPT_TOKENS = Metric("kvferry_engine_prompt_tokens_total", COUNTER, "tokens", WORKER, "Prompt tokens, by the source of their KV.", (_SOURCE,))
ENGINE_CACHED_TOKENS = Metric("kvferry_engine_cached_prompt_tokens_total", COUNTER, "tokens", WORKER, "Prompt tokens whose KV was there already, by the tier that had it. Counted at admission.", (_CACHE_TIER,))
ENGINE_GENERATED_TOKENS = Metric("kvferry_engine_generated_tokens_total", COUNTER, "tokens", WORKER, "Tokens generated.")
ENGINE_QUEUE_SECONDS = Metric("kvferry_engine_queue_seconds", HISTOGRAM, "seconds", WORKER, "From a request's arrival in the engine until its pages were pulled or its prompt was begun.", buckets=_LATENCY_BUCKETS_S)
ENGINE_TENANT_PROMPTS = Metric("kvferry_engine_tenant_prompt_seconds_total", COUNTER, "seconds", WORKER, "Engine time charged to a tenant for its prompts, with tenants_in_etcd.", (_OF_TENANT_SEEN,))
ENGINE_TENANT_WAITS = Metric("kvferry_engine_tenant_wait_seconds", SUMMARY, "seconds", WORKER, "How long a tenant's prompts waited for their turns, with tenants_in_etcd.", (_OF_TENANT_SEEN,))
ENGINE_TENANT_SLOT_WAITS = Metric("kvferry_engine_tenant_slot_wait_seconds", SUMMARY, "seconds", WORKER, "How long a tenant's requests waited for slots of a decode worker's batch, with tenants_in_etcd.", (_OF_TENANT_SEEN,))
ENGINE_TENANT_PROMPT_TOKENS = Metric("kvferry_engine_tenant_prompt_tokens_total", COUNTER, "tokens", WORKER, "Prompt tokens of a tenant's requests that ended on this worker, with tenants_in_etcd.", (_OF_TENANT_SEEN,))
ENGINE_TENANT_CACHED = Metric("kvferry_engine_tenant_cached_prompt_tokens_total", COUNTER, "tokens", WORKER, "Prompt tokens of a tenant's ended requests that this worker did not compute, by the tier that had their KV.", (_OF_TENANT_SEEN, _CACHE_TIER))
ENGINE_TENANT_USED = Metric("kvferry_engine_tenant_used_pages", GAUGE, "pages", WORKER, "KV pages that a tenant has cached, with tenants_in_etcd; at most a second old.", _TENANT_TIER)
ENGINE_TENANT_FLOOR = Metric("kvferry_engine_tenant_floor_pages", GAUGE, "pages", WORKER, "Part of the tenant's content that other tenants cannot evict.", _TENANT_TIER)
ENGINE_TENANT_CAP = Metric("kvferry_engine_tenant_cap_pages", GAUGE, "pages", WORKER, "A tenant's cap; when it holds more, its own pages are evicted first.", _TENANT_TIER)
ENGINE_TENANT_BORROWED = Metric("kvferry_engine_tenant_borrowed_pages", GAUGE, "pages", WORKER, "Content of a tenant above its floor, which others may evict.", _TENANT_TIER)
ENGINE_TENANT_EVICTED = Metric("kvferry_engine_tenant_evicted_pages_total", COUNTER, "pages", WORKER, "KV pages of a tenant that were evicted.", (*_TENANT_TIER, _PAGE_EVICTED_FOR))
ENGINE_TENANT_DISPLACED = Metric("kvferry_engine_tenant_displaced_pages_total", COUNTER, "pages", WORKER, "KV pages of other tenants that were evicted for a tenant's.", _TENANT_TIER)
ENGINE_TENANT_REFUSED = Metric("kvferry_engine_tenant_refused_pages_total", COUNTER, "pages", WORKER, "KV pages of a tenant that its tier did not store. In an engine's own memory, requests wait instead.", (*_TENANT_TIER, _REFUSED_FOR))
ENGINE_PREFILL_SECONDS = Metric("kvferry_engine_prefill_seconds", HISTOGRAM, "seconds", WORKER, "From the beginning of a prompt's computation to the first token.", buckets=_LATENCY_BUCKETS_S)
ENGINE_DECODE_SECONDS = Metric("kvferry_engine_decode_seconds", HISTOGRAM, "seconds", WORKER, "From a request's first token to its last.", buckets=_WHOLE_BUCKETS_S)
KV_TRANSFER_SECONDS = Metric("kvferry_ferry_seconds", SUMMARY, "seconds", WORKER, "KV transfers from other engines, and their duration.")
KV_TRANSFER_BYTES = Metric("kvferry_ferry_bytes_total", COUNTER, "bytes", WORKER, "Bytes that KV transfers brought.")
KV_TRANSFER_FAILED = Metric("kvferry_ferry_failures_total", COUNTER, "transfers", WORKER, "KV transfers that failed; their prompts were computed instead.", (_NOT_TRANSFERRED_FOR,))
WORKER_SPANS = Metric("kvferry_engine_trace_spans_total", COUNTER, "spans", WORKER, "Trace spans, by outcome.", (_SPAN_OUTCOME,))

# Keepers
KEEPER_ENGINES = Metric("kvferry_keeper_engines", GAUGE, "engines", KEEPER, "Engines that are connected.")
KEEPER_REGIONS = Metric("kvferry_keeper_regions_mapped", GAUGE, "regions", KEEPER, "Engines' CPU tiers that the keeper has mapped, also those of engines that left while transfers still run.")
KEEPER_UNUSABLE_VOLUMES = Metric("kvferry_keeper_unusable_volumes", GAUGE, "volumes", KEEPER, "Configured volumes that the keeper cannot open; its log and `kvferry status` name each with its cause.")
KEEPER_JOB_SECONDS = Metric("kvferry_keeper_job_seconds", SUMMARY, "seconds", KEEPER, "Loads and stores of engines that ended, and their duration.", (_JOB,))
KEEPER_PAGES = Metric("kvferry_keeper_pages_total", COUNTER, "pages", KEEPER, "Chunks of loads and stores, by outcome: an `ok` load is a hit.", (_JOB, _OUTCOME))
KEEPER_BYTES = Metric("kvferry_keeper_bytes_total", COUNTER, "bytes", KEEPER, "Bytes that jobs moved.", (_JOB,))
KEEPER_REMOTE_PAGES = Metric("kvferry_keeper_remote_pages_total", COUNTER, "pages", KEEPER, "Chunks requested from keepers of other nodes; part of the loads.", (_OUTCOME,))
KEEPER_REMOTE_BYTES = Metric("kvferry_keeper_remote_bytes_total", COUNTER, "bytes", KEEPER, "Bytes that came from keepers of other nodes.")
KEEPER_REMOTE_SECONDS = Metric("kvferry_keeper_remote_seconds_total", COUNTER, "seconds", KEEPER, "Time spent on chunks of other nodes.", (_PHASE,))
KEEPER_UNCANCELLED = Metric("kvferry_keeper_uncancelled_transfers", GAUGE, "transfers", KEEPER, "Reads from other nodes that failed or are late, and that NIXL cannot cancel yet. Their rows of the CPU tier stay in use.")
KEEPER_LENT = Metric("kvferry_keeper_lent_pages_total", COUNTER, "pages", KEEPER, "Chunks lent to keepers of other nodes.")
KEEPER_EXPIRED = Metric("kvferry_keeper_expired_leases_total", COUNTER, "leases", KEEPER, "Leases that expired before they were released.")
TIER_PAGES = Metric("kvferry_tier_pages", GAUGE, "pages", KEEPER, "Chunks stored; a chunk is one or more KV pages.", (_VOLUME,))
TIER_USED = Metric("kvferry_tier_used_bytes", GAUGE, "bytes", KEEPER, "Size of this keeper's files.", (_VOLUME,))
TIER_CAPACITY = Metric("kvferry_tier_capacity_bytes", GAUGE, "bytes", KEEPER, "Bytes that this keeper may use.", (_VOLUME,))
TIER_QUEUE = Metric("kvferry_tier_queue_bytes", GAUGE, "bytes", KEEPER, "Bytes waiting to be moved, or being moved.", (_VOLUME, _DIRECTION))
TIER_RUNNING = Metric("kvferry_tier_operations_running", GAUGE, "operations", KEEPER, "Operations that the volume's threads run now.", (_VOLUME,))
TIER_OVERDUE = Metric("kvferry_tier_operations_overdue", GAUGE, "operations", KEEPER, "Operations past their deadline.", (_VOLUME,))
TIER_OPERATIONS = Metric("kvferry_tier_operations_total", COUNTER, "pages", KEEPER, "Reads and writes of chunks, by outcome.", (_VOLUME, _DIRECTION, _OUTCOME))
TIER_BYTES = Metric("kvferry_tier_bytes_total", COUNTER, "bytes", KEEPER, "Payload bytes moved.", (_VOLUME, _DIRECTION))
TIER_SECONDS = Metric("kvferry_tier_seconds_total", COUNTER, "seconds", KEEPER, "Time in reads and writes, summed over threads.", (_VOLUME, _DIRECTION))
TIER_READ_RATE = Metric("kvferry_tier_read_bytes_per_second", GAUGE, "bytes per second", KEEPER, "Read rate of the last seconds, counting only time with reads; 0 without reads.", (_VOLUME,))
TIER_VERIFICATION_FAILURES = Metric("kvferry_tier_verification_failures_total", COUNTER, "pages", KEEPER, "Chunks that failed verification and became misses, by cause.", (_VOLUME, _SPOILED_FOR))
TIER_QUARANTINED = Metric("kvferry_tier_quarantined_pages_total", COUNTER, "pages", KEEPER, "Bad chunks that were quarantined.", (_VOLUME,))
TIER_EVICTED = Metric("kvferry_tier_evicted_pages_total", COUNTER, "pages", KEEPER, "Chunks evicted.", (_VOLUME,))
TIER_TENANT_USED = Metric("kvferry_tier_tenant_used_bytes", GAUGE, "bytes", KEEPER, "Bytes that a tenant has stored.", _OF_TENANT)
TIER_TENANT_FLOOR = Metric("kvferry_tier_tenant_floor_bytes", GAUGE, "bytes", KEEPER, "Part of the tenant's content that other tenants cannot evict.", _OF_TENANT)
TIER_TENANT_CAP = Metric("kvferry_tier_tenant_cap_bytes", GAUGE, "bytes", KEEPER, "A tenant's cap; when it holds more, its own pages are evicted first.", _OF_TENANT)
TIER_TENANT_BORROWED = Metric("kvferry_tier_tenant_borrowed_bytes", GAUGE, "bytes", KEEPER, "Content of a tenant above its floor, which others may evict.", _OF_TENANT)
TIER_TENANT_EVICTED = Metric("kvferry_tier_tenant_evicted_pages_total", COUNTER, "pages", KEEPER, "Chunks of a tenant that were evicted.", (*_OF_TENANT, _CHUNK_EVICTED_FOR))
TIER_TENANT_DISPLACED = Metric("kvferry_tier_tenant_displaced_pages_total", COUNTER, "pages", KEEPER, "Chunks of other tenants that were evicted for a tenant's.", _OF_TENANT)
TIER_TENANT_REFUSED = Metric("kvferry_tier_tenant_refused_pages_total", COUNTER, "pages", KEEPER, "Chunks of a tenant that were not stored.", (*_OF_TENANT, _REFUSED_FOR))
TIER_BREAKER = Metric("kvferry_tier_breaker_state", GAUGE, "1", KEEPER, "1 for the state in which the volume's breaker is.", (_VOLUME, _DIRECTION, _BREAKER_STATE))
TIER_TRIPS = Metric("kvferry_tier_breaker_trips_total", COUNTER, "trips", KEEPER, "How often a breaker of the volume opened.", (_VOLUME,))
KEEPER_SPANS = Metric("kvferry_keeper_trace_spans_total", COUNTER, "spans", KEEPER, "Trace spans, by outcome.", (_SPAN_OUTCOME,))
# fmt: on

# What a gateway says of others, in the order of its readings.
TENANTS_SEEN = (TENANT_REQUESTS, TENANT_TOKENS, TENANT_FIRST_TOKEN, TENANT_TOKEN_GAP)
MODELS_SEEN = (MODEL_REQUESTS, MODEL_TOKENS, MODEL_FIRST_TOKEN, MODEL_TOKEN_GAP, MODEL_READY)
WORKERS_SEEN = (
    *(
        WORKER_CONNECTED,
        WORKER_UNPAIRED,
        WORKER_RUNNING,
        WORKER_WAITING,
        WORKER_PAGES_USED,
        WORKER_PAGES,
        WORKER_PROMPT_TOKENS,
    ),
    *(WORKER_CACHED_TOKENS, WORKER_TRANSFERRED_BYTES, WORKER_GENERATED_TOKENS),
)
PROOFS_SEEN = (TRANSFER_PROVEN, TRANSFER_DISTANCE)
VOLUMES_SEEN = (
    VOLUME_READABLE,
    VOLUME_WRITABLE,
    VOLUME_TRIPS,
    VOLUME_PAGES,
    VOLUME_USED,
    VOLUME_CAPACITY,
    VOLUME_QUEUED,
    VOLUME_RATE,
)

# All entries above: none can be forgotten.
CATALOGUE: tuple[Metric, ...] = tuple(entry for entry in list(globals().values()) if isinstance(entry, Metric))
