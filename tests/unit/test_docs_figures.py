"""Figures in the prose of docs/ equal the constants and defaults that they speak of."""

from __future__ import annotations

import ast
import itertools
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvferry.config import ClusterConfig, TierConfig, VolumeConfig

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
VALUES = ROOT / "deploy" / "helm" / "kvferry" / "values.yaml"
SERVICES = ROOT / "services"
UNITS = {"KiB": 1 << 10, "MiB": 1 << 20, "minutes": 60, "%": 0.01, "us": 1e-6, "ms": 1e-3}
# Words of small numbers, where a page writes them out.
WORDS = {2: "two", 3: "three", 4: "four", 5: "five", 8: "eight"}

# By page: a phrase, with a place for each figure, and where each figure comes from: `module:CONSTANT` of kvferry, or
# with the package; `config:KEY` and `chart:KEY` for defaults, `pin:PACKAGE` for a pinned version; `/UNIT` where
# the page has another unit than the code, `/words` for a number in words.
FIGURES: dict[str, list[tuple[str, ...]]] = {
    "user/clients.md": [
        ("OpenAI API over HTTP (`gateway.http_port`, {:d})", "config:gateway.http_port"),
        ("over gRPC (`gateway.grpc_port`, {:d})", "config:gateway.grpc_port"),
        ("its last {} requests", "router.dispatch:NUM_RECENT"),
        ("A stream is never silent for longer than {} s", "gateway.http.stream_writer:MAX_SILENCE_S"),
        ("`cache_salt` (1 to {} characters", "gateway.bodies.openai_bodies:MAX_CACHE_SALT_CHARS"),
        ("at the first token of each choice | {} s", "config:gateway.first_token_timeout_s"),
        ("at the next one of the same choice | {} s", "config:gateway.inter_token_timeout_s"),
        ("at the end of the answer | {} s", "config:gateway.request_timeout_s"),
    ],
    "user/limits.md": [
        ("| {} grammars wait to be tried", "engine.grammar_checks:MAX_WAITING"),
        ("| {} chats with images wait to be rendered", "engine.image_chats:MAX_WAITING"),
        ("at once; after {} s if the request lost its worker", "router.request_run:WORKER_WAIT_S"),
        ("until the start is {} s old", "engine.fork_process:_SLOW_START_S"),
        ("a body is still arriving after {} s", "gateway.admission:PATIENCE_S"),
        ("from the last completions: 1 to {}, and 1", "router.room_queue:MAX_RETRY_AFTER_S"),
        (
            "| {} KiB in {} lines, URL {} KiB (431, 414); complete within {} s (408)",
            "gateway.http.uvicorn_connection:MAX_HEAD_BYTES/KiB",
            "gateway.http.uvicorn_connection:MAX_HEADERS",
            "gateway.http.uvicorn_connection:MAX_URL_BYTES/KiB",
            "gateway.http.uvicorn_connection:HEAD_TIMEOUT_S",
        ),
        (
            "(pipelining) | {}, and {} KiB with their bodies",
            "gateway.http.uvicorn_connection:MAX_PIPELINED",
            "gateway.http.uvicorn_connection:MAX_PIPELINED_BYTES/KiB",
        ),
        ("| {} connections are open", "gateway.http.connection_limits:MAX_CONNECTIONS"),
        ("over gRPC | {}; of one address", "gateway.http.connection_limits:MAX_CONNECTIONS"),
        ("`gateway.max_body_bytes`: {} MiB", "config:gateway.max_body_bytes/MiB"),
        (
            "in a body over {} KiB; fields of a gRPC message | {};",
            "gateway.bodies.large_bodies:UNCOUNTED_BYTES/KiB",
            "gateway.bodies.large_bodies:MAX_VALUES",
        ),
        ("| backslashes in a body over 64 KiB | {} |", "gateway.bodies.large_bodies:MAX_BACKSLASHES"),
        ("| a number | {} characters |", "gateway.bodies.large_bodies:MAX_NUMBER_CHARS"),
        ("any JSON in a text | {} values |", "gateway.bodies.large_bodies:MAX_VALUES"),
        ("| choices: prompts times `n` | {};", "gateway.bodies.openai_bodies:MAX_CHOICES"),
        ("| choices times `max_tokens` | {} |", "gateway.admission:MAX_ANSWER_TOKENS"),
        ("where log-probabilities are asked for | {} |", "gateway.admission:MAX_LOGPROB_CHOICES"),
        ("`logprobs` in `/v1/completions` | {}: 12 choices", "gateway.admission:MAX_STEP_LOGPROB_ENTRIES"),
        ("asked for | {}: 49,932 tokens of one choice with 20", "gateway.admission:MAX_LOGPROB_ENTRIES"),
        ("tool calls of all messages | {} each |", "gateway.bodies.openai_bodies:MAX_MESSAGES"),
        ("tool calls of all messages | {} each |", "gateway.bodies.openai_bodies:MAX_PARTS"),
        ("tool calls of all messages | {} each |", "gateway.bodies.openai_bodies:MAX_TOOL_CALLS"),
        (
            "| `tools` | {}; their schemas together {} KiB |",
            "gateway.bodies.openai_bodies:MAX_TOOLS",
            "gateway.bodies.structured_limits:MAX_TOOLS_BYTES/KiB",
        ),
        (
            "| `stop` | {} strings of {} characters |",
            "gateway.bodies.openai_bodies:MAX_STOP_STRINGS",
            "gateway.bodies.openai_bodies:MAX_STOP_CHARS",
        ),
        (
            "| `bad_words` | {} of {} characters |",
            "gateway.bodies.openai_bodies:MAX_BAD_WORDS",
            "gateway.bodies.openai_bodies:MAX_BAD_WORD_CHARS",
        ),
        ("`logit_bias` | {} each |", "gateway.bodies.openai_bodies:MAX_TOKEN_IDS"),
        ("`chat_template_kwargs` | {} KiB |", "gateway.bodies.structured_limits:MAX_SPEC_BYTES/KiB"),
        (
            "a `grammar` | {} KiB, and 250 groups in one another; {} rules of EBNF |",
            "gateway.bodies.structured_limits:MAX_SPEC_BYTES/KiB",
            "engine.vllm.rendering.grammars:_MAX_EBNF_RULES",
        ),
        ("| a schema: nesting | {} levels;", "gateway.bodies.structured_limits:MAX_NESTING"),
        (
            "in a process of its own | {} s of CPU time, 128 MiB, a stack of 32 MiB; {} ms of CPU time for a token |",
            "engine.grammar_checks:_CPU_S",
            "engine.grammar_process:MAX_TOKEN_S/ms",
        ),
        (
            "following it in an engine | {} s of CPU time, and {} ms for each token",
            "engine.vllm.plugins.grammars:MAX_START_S",
            "engine.vllm.plugins.grammars:MAX_TOKEN_S/ms",
        ),
        ("| grammars that wait to be tried | {} (429) |", "engine.grammar_checks:MAX_WAITING"),
        ("`gateway.images.max_per_request`: {} |", "config:gateway.images.max_per_request"),
        ("`gateway.images.max_bytes`: {} MiB;", "config:gateway.images.max_bytes/MiB"),
        ("`gateway.images.max_pixels`: {} |", "config:gateway.images.max_pixels"),
        ("processor prepares them | {} MiB; one alone", "engine.image_chats:MAX_PREPARED_BYTES/MiB"),
        (
            "in a process of its own | {} s of CPU time; `gateway.images.memory_mib`: {} MiB |",
            "engine.image_chats:CPU_S",
            "config:gateway.images.memory_mib",
        ),
        (
            "that is fetched | {} characters; all of a request within {} s |",
            "gateway.bodies.image_fetch:MAX_URL_CHARS",
            "gateway.bodies.image_fetch:TIMEOUT_S",
        ),
        ("an error's message | {} bytes:", "errors:MAX_ERROR_BYTES"),
        ("`gateway.max_requests`: {} |", "config:gateway.max_requests"),
        ("once for each of its choices | {} |", "gateway.admission:MAX_PENDING_PROMPT_TOKENS"),
        (
            "is reached, prompts have {} tokens, or bodies {} MiB |",
            "gateway.admission:MAX_PENDING_PROMPT_TOKENS",
            "gateway.admission:MAX_PENDING_BODY_BYTES/MiB",
        ),
        ("until the prompt is rendered | {} MiB; beyond", "gateway.admission:MAX_PENDING_BODY_BYTES/MiB"),
        ("cut instead of a 429) | {} MiB |", "gateway.admission:MAX_PENDING_BODY_BYTES/MiB"),
        ("`gateway.images.max_pending_mib`: {} MiB;", "config:gateway.images.max_pending_mib"),
        ("or {} images are being fetched", "gateway.bodies.image_fetch:MAX_FETCHES"),
        ("images that are fetched | {} |", "gateway.bodies.image_fetch:MAX_FETCHES"),
        (
            "(more wait in the client) | {}; {} |",
            "gateway.grpc.grpc_server:MAX_CALLS",
            "gateway.grpc.grpc_server:MAX_STREAMS_PER_CONNECTION",
        ),
        (
            "as many as fit {} MiB, each for {} s;",
            "gateway.admission:MAX_PENDING_BODY_BYTES/MiB",
            "gateway.grpc.grpc_messages:MESSAGE_TIMEOUT_S",
        ),
    ],
    "user/adapters.md": [
        ("max_rank: {} ", "config:adapters.max_rank"),
        ("max_active: {} ", "config:adapters.max_active"),
        ("`served` has at most {};", "config.model:MAX_ADAPTERS"),
        ("or above {};", "engine.vllm.adapter_folder:_MAX_WEIGHT"),
        ("a `lora_alpha` above {};", "engine.vllm.adapter_folder:_MAX_ALPHA"),
        ("enlarge a layer's input over {} times", "engine.vllm.adapter_folder:_MAX_GROWTH"),
    ],
    "user/models.md": [("A prompt may have {} images", "engine.base:MAX_IMAGES")],
    "operator/scale-and-upgrade.md": [
        ("(`worker.drain_timeout_s`, {} s)", "config:worker.drain_timeout_s"),
        ("(`gateway.drain_timeout_s`, {} s)", "config:gateway.drain_timeout_s"),
        ("clients that read nothing for {} s are cut", "gateway.unread_answers:STALL_S"),
        ("{} s, the longest silence of a stream", "gateway.http.stream_writer:MAX_SILENCE_S"),
        ("Workers take `worker.max_requests` ({}) each", "config:worker.max_requests"),
        ("`gateway.max_queued_requests` ({})", "config:gateway.max_queued_requests"),
        ("at most `gateway.queue_timeout_s` ({} s)", "config:gateway.queue_timeout_s"),
    ],
    "operator/image.md": [("Clusters run etcd's own image, {} by default", "chart:etcd.image.tag")],
    "operator/install.md": [("installs `vllm=={}` and `nixl=={}` with CUDA", "pin:vllm", "pin:nixl")],
    "operator/monitoring.md": [("For {} minutes the same request", "link.quarantine:QUARANTINE_S/minutes")],
    "operator/sizing.md": [
        ("bodies and unread answers | {} MiB each", "gateway.admission:MAX_PENDING_BODY_BYTES/MiB"),
        ("{} more processes of 128 MiB", "engine.grammar_checks:NUM_FORKS"),
        ("{} more processes of 1,024 MiB", "config:gateway.images.processes"),
        ("and {} MiB of prepared images", "gateway.lifecycle:IMAGE_CACHE_BYTES/MiB"),
    ],
    "operator/security.md": [
        ("with {} s for clocks that differ", "gateway.identity.jwt_tokens:_LEEWAY_S"),
        ("at most every {} s when a token names", "gateway.identity.jwt_tokens:MIN_REFRESH_S"),
        ("is written {} times a minute", "util.log_limit:MAX_PER_WINDOW"),
        ("handshakes count as connections and end after {} s", "gateway.http.tls_handshake:HANDSHAKE_TIMEOUT_S"),
        ("A tenant may have {} secrets", "kvferry_keeper.store.keyring:MAX_SECRETS"),
        ("secrets of {} bytes or more", "kvferry_keeper.store.keyring:_MIN_SECRET_BYTES"),
    ],
    "operator/tenants.md": [
        ("There may be {} tenants", "tenancy.records:MAX_TENANTS"),
        ("and {} keys per tenant", "tenancy.records:MAX_KEYS"),
        ("At most {} pools;", "config.workers:MAX_POOLS"),
        ("YAML of at most {} MiB", "kvferry_tenants.commands:_MAX_FILE_BYTES/MiB"),
        ("at most {} s ahead", "worker.server:MAX_RETRY_AFTER_S"),
    ],
    "operator/models-in-a-cluster.md": [
        ("more than {} entries and pools together", "config.workers:MAX_POOLS"),
        (
            "its first {} characters or {} tokens",
            "gateway.canary:PREFIX_CHARS",
            "gateway.canary:PREFIX_TOKENS",
        ),
    ],
    "operator/hub-models.md": [
        ("a listing of more than {} MiB", "hub_model.hub:MAX_LISTING_BYTES/MiB"),
        ("a listing that takes over {} s", "hub_model.hub:LIST_TIMEOUT_S"),
        ("a wrong hash {} times", "hub_model.fill:MAX_MISMATCHES/words"),
        ("asked again, {} times without another file", "hub_model.fill:MAX_FAILURES"),
        ("wait, and say so every {} s", "hub_model.fill:REPORT_S"),
        ("# a line every {} s", "hub_model.fill:PROGRESS_S"),
    ],
    "operator/volumes.md": [("It also refuses for {} minutes", "kvferry_keeper.store.folder:ALIVE_FOR_S/minutes")],
    "operator/tier-settings.md": [
        ("| `cpu_gib` | GiB | {} |", "config:tier.cpu_gib"),
        ("take at most {} MiB, those of one engine", "keeper.client_jobs:MAX_QUEUED_BYTES/MiB"),
        ("Each volume has {} threads", "kvferry_keeper.volumes.volume_io:NUM_IO_THREADS"),
        ("at most {} tokens; simulated engine", "engine.vllm.plugins.tier.tier_connector:_MAX_CHUNK_TOKENS"),
    ],
    "operator/metrics.md": [
        ("the first of {}\neach that are tried", "observability.metrics_listener:NUM_PORTS"),
        ("Bytes of bodies that are read or rendered; at most {} MiB", "gateway.admission:MAX_PENDING_BODY_BYTES/MiB"),
        ("once for each choice; at most {}. |", "gateway.admission:MAX_PENDING_PROMPT_TOKENS"),
        ("`queue_full`: {} MiB of writes wait", "kvferry_keeper.volumes.volume_set:MAX_QUEUED_WRITE_BYTES/MiB"),
    ],
    "contributor/architecture/failures.md": [
        ("with {} MiB waiting, its requests", "link.outgoing_queue:MAX_PENDING_BYTES/MiB"),
        ("after {} s of silence its link ends", "link.flow_control:SILENCE_LIMIT_S"),
        ("with {} MiB unread; its request ends", "gateway.unread_answers:MAX_STREAM_BYTES/MiB"),
        ("none that has room, the request waits {} s", "router.request_run:WORKER_WAIT_S"),
        ("nothing heard for {} s ends the link", "link.flow_control:SILENCE_LIMIT_S"),
        ("the only one on the engine | {} such losses |", "router.engine_losses:MAX_LOSSES"),
        (
            "all others on the engine | {} such losses in a row without a new token in between, or {} in all |",
            "router.engine_losses:MAX_LOSSES_WITHOUT_PROGRESS",
            "router.engine_losses:MAX_SHARED_LOSSES",
        ),
        ("| any of these | {} losses in a row", "router.engine_losses:MAX_LOSSES_IN_A_ROW"),
        ("for {} minutes (`link/quarantine.py`)", "link.quarantine:QUARANTINE_S/minutes"),
        ("when {} newer ones have come", "link.quarantine:MAX_QUARANTINED"),
        ("or after {} s: it may ask another gateway", "router.worker_pool:QUARANTINE_TIMEOUT_S"),
        ("heard in the last {} s, if there are any", "link.flow_control:QUIET_S"),
    ],
    "contributor/architecture/request.md": [
        (
            "at most {} messages or {} MiB ahead",
            "link.flow_control:MAX_UNREAD_MESSAGES",
            "link.flow_control:MAX_UNREAD_BYTES/MiB",
        ),
        ("under a lease ({} s, renewed by the decode engine)", "engine.vllm.start.arguments:TRANSFER_LEASE_S"),
        ("is cut with {} MiB unread", "gateway.unread_answers:MAX_STREAM_BYTES/MiB"),
        ("the client reads nothing for {} s", "gateway.unread_answers:STALL_S"),
    ],
    "contributor/architecture/routing.md": [
        ("gathered\nfor {} ms", "worker.residency_publisher:FLUSH_AFTER_S/ms"),
        ("A rate that was not observed for {} s", "router.prices.rates:_STALE_S"),
        (
            "or for {} + {} x workers placements",
            "router.prices.rates:_STALE_PLACEMENTS",
            "router.prices.rates:_STALE_SHARE",
        ),
        ("is bounded to {} times the rate", "router.prices.rates:_MAX_RATIO"),
        ("If {} in a row exceed that bound", "router.prices.rates:_NUM_BELIEVED/words"),
    ],
    "contributor/architecture/tiers.md": [
        ("a page has less than {} MiB", "engine.vllm.plugins.tier.tier_connector:_MIN_CHUNK_BYTES/MiB"),
        ("at most {} tokens). With volumes", "engine.vllm.plugins.tier.tier_connector:_MAX_CHUNK_TOKENS"),
        ("has not touched its lock for {} minutes", "kvferry_keeper.store.folder:ALIVE_FOR_S/minutes"),
        ("other writers {} s after its last look ended", "kvferry_keeper.volumes.volume_io:_RESCAN_PERIOD_S"),
    ],
    "contributor/architecture/kv-transfer.md": [
        (
            "the size and {} samples of {} KiB",
            "engine.vllm.start.weights:_NUM_SAMPLES",
            "engine.vllm.start.weights:_SAMPLE_BYTES/KiB",
        ),
    ],
    "contributor/architecture/tenants.md": [
        ("have about {} ms of work left", "worker.turns:DEPTH_MS"),
        ("has given tokens for {} s", "worker.turns:MIN_GENERATING_S"),
        ("A worker knows the {} tenants", "worker.turns:MAX_KNOWN"),
        ("Reports name {} tenants", "worker.turns:MAX_NAMED"),
        ("such a tenant sent requests in the last {} s", "tenancy.shares.slots:_SEEN_S"),
        ("the oldest at the latest after {} others", "tenancy.shares.tenant_queue:_MAX_PASSES"),
        ("news of room goes to {} of them in turn", "router.room_queue:WOKEN_AT_ONCE"),
        ("while others came within {} s", "engine.fair_turns:_SEEN_S"),
        ("Texts up to {} characters do not wait", "engine.vllm.rendering.renderer:MOST_CHARS_AT_ONCE"),
    ],
    "operator/usage.md": [
        ("names the first {} tenants", "gateway.usage.tenant_uses:MAX_NAMED"),
        ("`unfinished` every {} s", "gateway.usage.usage_log:UNFINISHED_S"),
        ("after each {} MiB", "gateway.usage.usage_log:MAX_FILE_BYTES/MiB"),
    ],
    "contributor/architecture/retention.md": [
        ("uses it for {} s after its own last report", "tenancy.floor_exchange:LEASE_S"),
        ("or {} s after that node's last", "tenancy.floor_exchange:DROP_S"),
        ("The {} largest floors move", "tenancy.floor_exchange:MAX_TENANTS"),
        ("among the first {} workers of a role", "worker.engine_terms:MAX_MOVING"),
        ("contracts for the {} tenants", "tenancy.terms:MAX_KNOWN"),
        ("the first {} tenants with a record", "tenancy.pages.usage_report:MAX_COUNTED"),
        ("too many to count ({})", "tenancy.pages.page:MAX_COUNTED_REUSES"),
        ("remembers the uses of {}\nevicted ones", "kvferry_keeper.store.index.eviction:GHOSTS_PER_CHUNK/words"),
    ],
    "contributor/caches-and-queues.md": [
        ("salt and digest; {} MiB |", "gateway.lifecycle:IMAGE_CACHE_BYTES/MiB"),
        ("| {} workers that went away |", "router.engine_losses:MAX_VANISHED"),
        ("tenant, prompt and sampling; {}, 5 minutes", "link.quarantine:MAX_QUARANTINED"),
        ("a number of the worker's; {} |", "worker.quarantine_relay:MAX_ASKED"),
        ("names in {} verified certificates", "gateway.tls:_NUM_NAMES"),
        ("{} keys of namespaces", "kvferry_keeper.store.keyring:_MAX_DERIVED"),
        ("its tenant and operators may read; {} |", "router.dispatch:NUM_RECENT"),
        ("usage records that wait for the drive | {} |", "gateway.usage.usage_log:MAX_WAITING"),
        ("gateway; {} MiB, then its requests end", "link.outgoing_queue:MAX_PENDING_BYTES/MiB"),
        ("texts of over {} characters", "engine.vllm.rendering.renderer:MOST_CHARS_AT_ONCE"),
        ("tenant; 1 at a time, {} wait", "engine.vllm.rendering.renderer:MAX_WAITING"),
        (
            "tenant; {} at a time, {} wait",
            "engine.grammar_checks:NUM_FORKS",
            "engine.grammar_checks:MAX_WAITING",
        ),
        ("`gateway.images.processes` at a time, {} wait", "engine.image_chats:MAX_WAITING"),
        ("in a thread, {} wait", "engine.vllm.engine:_MAX_REPLAYS"),
        ("that passed | salt and digest; {} |", "engine.grammar_checks:MAX_PASSED"),
        ("salt and the parameters; {} |", "engine.vllm.rendering.plain_prompts:_NUM_KEPT_SAMPLINGS"),
        (
            "connection; {}, {} KiB |",
            "gateway.http.uvicorn_connection:MAX_PIPELINED",
            "gateway.http.uvicorn_connection:MAX_PIPELINED_BYTES/KiB",
        ),
    ],
    "adr/0007-frames-beside-grpc.md": [
        (
            "at most {} messages or {} MiB unacknowledged",
            "link.flow_control:MAX_UNREAD_MESSAGES",
            "link.flow_control:MAX_UNREAD_BYTES/MiB",
        ),
        (
            "acknowledges every {} messages, {} KiB or\n  {} s",
            "link.flow_control:ACK_EVERY_MESSAGES",
            "link.flow_control:ACK_EVERY_BYTES/KiB",
            "link.flow_control:ACK_EVERY_S",
        ),
    ],
}


def _value_of_expression(value: ast.expr) -> Any:
    return eval(compile(ast.Expression(value), "constant", "eval"), {"__builtins__": {}})


def constant_of(file: Path, name: str) -> Any:
    """Return a constant's value without importing its module, which may import vLLM."""
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        match node:
            case ast.Assign(targets=[ast.Name(id=found)], value=value) if found == name:
                return _value_of_expression(value)
            case ast.AnnAssign(target=ast.Name(id=found), value=ast.expr() as value) if found == name:
                return _value_of_expression(value)
    raise AssertionError(f"{file} has no {name}")


def pinned() -> dict[str, str]:
    """Return the versions that pyproject.toml pins exactly, by package."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    return dict(each.split("==") for each in itertools.chain(*extras.values()) if "==" in each)


def value_of(source: str) -> Any:
    """Return what a page should say: a number with its thousands, or in words."""
    name, _, unit = source.partition("/")
    place, _, key = name.partition(":")
    if place == "pin":
        return pinned()[key]
    if place == "chart":
        value: Any = yaml.safe_load(VALUES.read_text(encoding="utf-8"))
        for part in key.split("."):
            value = value[part]
        return str(value).removeprefix("v")
    if place == "config" and not key.isupper():
        value = ClusterConfig()
        for part in key.split("."):
            value = getattr(value, part)
    else:
        package = SERVICES if place.startswith("kvferry_") else SERVICES / "kvferry"
        value = constant_of(package / f"{place.replace('.', '/')}.py", key)
    if unit == "words":
        return WORDS[value]
    if unit:
        value = round(value / UNITS[unit], 6)
    return Number(value)


class Number(float):
    """Is formatted as pages have it: 16,777,216 and 0.5; with `d`, as a port, without commas."""

    def __format__(self, form: str) -> str:
        return str(int(self)) if form == "d" else f"{int(self):,}" if self.is_integer() else f"{float(self):g}"


def figures() -> Iterator[Any]:
    for page, rows in FIGURES.items():
        for phrase, *sources in rows:
            yield pytest.param(page, phrase, sources, id=f"{page}-{sources[0]}")


@pytest.mark.parametrize(("page", "phrase", "sources"), list(figures()))
def test_a_figure_is_that_of_the_code(page: str, phrase: str, sources: list[str]) -> None:
    expected = phrase.format(*map(value_of, sources))
    assert expected in (DOCS / page).read_text(encoding="utf-8"), f"docs/{page} does not say: {expected}"


def test_the_table_of_tier_settings_has_each_key_with_its_default() -> None:
    page = (DOCS / "operator" / "tier-settings.md").read_text(encoding="utf-8").partition("\n## ")[0]
    rows = re.findall(r"(?m)^\| `([\w.\[\]]+)` \| [^|]*\| ([^|]+) \|", page)
    fields = {**TierConfig.model_fields, **{f"volumes[].{key}": it for key, it in VolumeConfig.model_fields.items()}}
    del fields["volumes"]
    assert {key for key, _ in rows} == set(fields)
    for key, default in rows:
        value = fields[key].default
        if isinstance(value, bool | str) and value != "":
            assert default == str(value).lower(), key
        elif isinstance(value, int | float):
            assert default == f"{Number(value)}", key


def test_numbers_are_written_as_pages_have_them() -> None:
    assert [f"{Number(value)}" for value in (16_777_216, 15.0, 0.5)] == ["16,777,216", "15", "0.5"]
    assert f"{Number(8000):d}" == "8000"
