"""Write configuration.md and engine-arguments.md of docs/operator/; with --check fail when one of them differs.

The first is made from kvferry.config, the second from kvferry.arguments.vllm_arguments.

Types, defaults and limits come from the models, meanings from the comments beside and above the fields.
"""

from __future__ import annotations

import ast
import inspect
import sys
import types
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

import yaml
from generated_pages import write_or_check
from helm_check import CHART, CHART_DECIDES
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from kvferry import config as configuration
from kvferry.arguments import argument_values, vllm_arguments

DOCS = Path(__file__).resolve().parent.parent / "docs" / "operator"

_HEAD = """\
# Configuration

Generated from `services/kvferry/config/` by `make config-doc`; `make check` says when it is not up to date.

Every key of a YAML file (`kvferry up --config FILE`), of the environment (`KVFERRY__GATEWAY__HTTP_PORT=8001`), of flags
(`--set gateway.http_port=8001`), and of the chart's value `config`. Later sources win, in this order. An unknown key or
a bad value is refused by name; `kvferry config` prints what would be used. The chart decides about keys marked †: its
value `config` does not take them, but for `models` and `pools`, and [the last section](#what-the-chart-has-instead)
names its own.
"""
# What most clusters set, in this order; the page begins with these keys.
COMMON = (
    "name",
    "log_level",
    "model.path",
    "model.served_name",
    "model.max_model_len",
    "engine.device",
    "engine.kv_cache_gib",
    "engine.gpu_memory_utilization",
    "engine.max_num_seqs",
    "engine.tensor_parallel_size",
    "prefill.replicas",
    "prefill.num_gpus",
    "decode.replicas",
    "decode.num_gpus",
    "gateway.replicas",
    "gateway.host",
    "gateway.http_port",
    "gateway.grpc_port",
    "gateway.keys_file",
    "gateway.tenants_in_etcd",
    "gateway.max_requests",
    "gateway.request_timeout_s",
    "gateway.queue_timeout_s",
    "worker.max_requests",
    "membership.endpoints",
    "tier.enabled",
    "tier.cpu_gib",
    "tier.volumes",
    "metrics.host",
    "tracing.endpoint",
)
# What of the chart's values stands for the keys that it decides about; empty: nothing, the chart knows.
_COUNTERPARTS = {
    "insecure": "insecure",
    "prefill": "roles.prefill",
    "decode": "roles.decode",
    "metrics": "monitoring.members",
    "pools": "",
    "models": "",
    "engine.side_channel_host": "",
    "worker.host": "",
    "worker.tls": "internalTls",
    "gateway.replicas": "gateway.replicas",
    "gateway.num_cpus": "gateway.resources",
    "gateway.resources": "gateway.resources",
    "gateway.host": "",
    "gateway.http_port": "gateway.httpPort",
    "gateway.grpc_port": "gateway.grpcPort",
    "gateway.keys_file": "auth.keysSecret",
    "gateway.tls": "gateway.tls",
    "gateway.linger_s": "gateway.lingerSeconds",
    "membership.endpoints": "etcd.endpoints",
    "membership.ca_file": "etcd.external.tlsSecret",
    "membership.cert_file": "etcd.external.tlsSecret",
    "membership.key_file": "etcd.external.tlsSecret",
    "membership.user": "etcd.external.user",
    "membership.password_file": "etcd.external.passwordSecret",
    "tier.enabled": "tier.enabled",
    "tier.cpu_gib": "tier.cpuGiB",
    "tier.volumes": "tier.volumes",
    "tier.host": "",
    "tier.encryption_keys_file": "tier.encryptionKeysSecret",
}

# Which of these keys the chart's value `config` takes after all, and with what beside them.
_TAKEN = {
    "pools": "`config.pools`, with `ray.mode: existing` alone",
    "models": "`config.models`, beside [`roles.models`](models-in-a-cluster.md#with-the-chart) for the two roles",
}


_ARGUMENTS_HEAD = """\
# Arguments of vLLM's engine

Generated from `services/kvferry/arguments/vllm_arguments.py` by `make config-doc`.

```yaml
engine:
  args: {seed: 7, num_gpu_blocks_override: 4096}    # both roles
  env: {VLLM_LOGGING_LEVEL: INFO}
decode:
  engine:
    args: {watermark: 0.02}                         # this role; replaces a value of `engine.args`, null removes it
```

Names are those of vLLM 0.32's command line, with underscores; arguments of its server, such as `--port` and
`--tool-call-parser`, are not of the engine, and have keys of kvferry's own ([configuration](configuration.md)).
Each argument of the engine is accepted, but for those that are [refused](#refused), some of them
[with tiers](#refused-with-tiers) alone. Both roles have the same, in
`engine.args`, unless an argument is [free](#free): `prefill.engine.args` and `decode.engine.args` take these,
[n-grams](#speculative-decoding) in `decode` alone, and some [load formats](#how-weights-are-read). What an argument
does to pages that engines exchange is not looked up in a list: `engine.proof` decides what is transferred.

A value [out of range](#expected-values) is refused when the configuration is read. Names and values are given to vLLM's
own parser and configuration classes when an engine starts, and one that these refuse ends the start with the argument's
key and vLLM's reason; so does what the machine lacks (NUMA nodes, or memory for `num_gpu_blocks_override` on the CPU).
Where vLLM's own processes die, the error has the keys of all arguments that were given, and the log above it the cause.

`kvferry config --vllm prefill` prints the command line that results, `decode` that of decode engines; it runs names and
values through the same parser and classes. It needs no cluster, no GPU and no model, and prints the line of a real
engine also where `engine.kind` is `sim`; simulated engines check only ranges, and ignore the values. Arguments that do
not fit each other or settings of `engine` are refused when the configuration is read. What needs the model or the
machine is checked when an engine starts: a draft model, its folder too, the files that `load_format` reads, and
`max_num_scheduled_tokens` where `engine.max_num_batched_tokens` is empty. With the chart, arguments of one role are
`roles.decode.engine.args` and `roles.prefill.engine.args`.

Values of `engine.env` are texts: `{VLLM_LOG_STATS_INTERVAL: "5"}`, on a command line
`--set 'engine.env.VLLM_LOG_STATS_INTERVAL="5"'`. All variables of vLLM are accepted (`VLLM_*`), except those that
kvferry sets and secrets. Others are set for the processes themselves.

**Exchange digest**: engines exchange pages, directly and over volumes, only with equal values of all arguments that are
not free, and of all variables but {variables}.
After a change of one, engines do not read earlier pages on volumes.

## Speculative decoding

```yaml
decode:
  engine:
    args:
      speculative_config: {method: ngram, num_speculative_tokens: 4, prompt_lookup_max: 4, prompt_lookup_min: 2}
```

Decode engines then guess `num_speculative_tokens` (at most {max_drafts}) tokens, those that followed the same n-gram
earlier in the request, and check them in one step. It helps answers that repeat their prompts (code, extraction,
summaries) while few streams run; with many, the checked tokens cost more than they save. Answers are those of an
engine without, token for token (float32, greedy), also after a transfer, from every tier, and when another worker
continues them; sampled answers have the same distribution, and a seed gives its answer again on engines with the same
setting, unless one lacks memory and computes the request in two parts, or another worker continues it. `min_p` and
`logit_bias`, which vLLM then does not accept, are refused with 400. So are [adapters](../user/adapters.md) beside it.

A smaller model can make the drafts, with the same guarantees:

```yaml
engine:
  args:
    speculative_config: {method: draft_model, model: /models/qwen3-0.6b, num_speculative_tokens: 3}
```

It stands in `engine.args`: the draft model has KV pages of its own beside the model's, which prefill engines compute
with a prompt, and which are transferred and kept in tiers and on volumes with it. A page holds both, so fewer fit into
the same memory, and a prefill engine, which drafts one token, computes every prompt with both models. `model` is a
folder on all nodes (with the chart always) or a hub id, whose newest revision is used; engines exchange pages only if
the digests of its files are equal. The draft model has a [served](../user/models.md) architecture, the model's
vocabulary and data type, and at least its context; refused are sliding windows, quantized weights (of either)
and `tensor_parallel_size` above 1 beside it. Of [several models](models-in-a-cluster.md), an entry without drafts says
`engine: {args: {speculative_config: null}}`.

An EAGLE head drafts from what the model itself has computed, and has one layer of pages: `method: eagle` or `eagle3`,
`model` its folder or hub id, with the same limits. Tested with Llama heads (`LlamaForCausalLM`,
`LlamaForCausalLMEagle3`) of `LlamaForCausalLM`, also with a vocabulary of the head's own and a shorter
context: where a request of a step is longer than that (`max_position_embeddings` of its config.json), vLLM drafts
nothing in it. Of a cached prefix vLLM
recomputes the last page, because the head's KV there depends on the next token. Heads of other models are
refused when an engine starts.

Other methods of vLLM (`mtp`, `medusa`, `suffix` and more) stand in `engine.args` too. `model` is a folder or hub id in
them as above, if there is one. Which of them start with which model is vLLM's and the [models'](../user/models.md)
matter.

The acceptance rate is a quotient of two counters that vLLM exports, on the [listeners](metrics.md) of decode workers
(not on the gateway's; `/kvferry/v1/targets` has their addresses). Simulated engines have neither. The lines below are
for a gateway without keys and listeners without TLS.

```promql
sum(rate(vllm:spec_decode_num_accepted_tokens_total[5m])) / sum(rate(vllm:spec_decode_num_draft_tokens_total[5m]))
```

Without Prometheus, of one worker since its start:

```sh
curl -s http://127.0.0.1:8000/kvferry/v1/targets    # its address, beside kind: decode
curl -s http://ADDRESS/metrics | awk '/^vllm:spec_decode_num_accepted_tokens_total/ {a += $NF}
  /^vllm:spec_decode_num_draft_tokens_total/ {d += $NF} END {if (d) print a / d}'
```

To try a draft model where none is at hand, the model's first layers make one (of Llama, Qwen and others that keep them
in `model.layers`). Few of its tokens are accepted: 1 of 48 in an answer of SmolLM2-135M, with its first 4 of 30 layers.

```python
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained("/models/qwen3-8b", dtype="auto")
model.model.layers, model.config.num_hidden_layers = model.model.layers[:4], 4
if hasattr(model.config, "layer_types"):
    model.config.layer_types = model.config.layer_types[:4]
model.save_pretrained("/models/qwen3-8b-4-layers")
```

## How weights are read

`load_format` may be `auto` (the default), `safetensors` or `runai_streamer`, in each role another one: answers are
equal token for token, and engines exchange pages, because the same files are read. `model_loader_extra_config` has
`concurrency` and `memory_limit` (bytes) for `runai_streamer`, `enable_multithread_load` and `num_threads` for others.

```yaml
engine:
  args: {load_format: runai_streamer, model_loader_extra_config: {concurrency: 16}}
```

`runai_streamer` needs the package runai-model-streamer (0.17, the extra `streamer`), in an image of your own too;
an engine without it ends with the package's name. So does one whose format would read other files than `auto`: a folder
without `*.safetensors`, with `consolidated*.safetensors`, or, for `runai_streamer`, with files that
`model.safetensors.index.json` leaves out. `model.path` is a folder for every format, and no URL of an object store: the
digest of the weights is computed from its files.

Other formats and their options stand in `engine.args` alone, and engines with them exchange pages only with those that
have the same values: `dummy` has random weights, `pt`, `npcache`, `mistral`, `sharded_state` and `tensorizer` read
other files, whose content no digest has.
"""

_TABLE = ("| key | type | default | meaning |", "|---|---|---|---|")
_EXPECTED_HEAD = (
    "Of arguments of which vLLM takes other numbers too, and then hangs, dies or exhausts memory. Of any argument, an "
    "empty text or list is refused, and so are whole numbers beyond 64 bits, texts with NUL, and lists and mappings "
    "more than 16 deep."
)
_TABLES = (
    ("Free", "Each role may have its own.", vllm_arguments.FREE),
    (
        "Refused",
        "Most are set by kvferry: `use` names the key. Some keys of `engine` may stand in "
        "[`prefill.engine` and `decode.engine`](configuration.md#decodeengine) too. "
        "More on [parallelism](gpu.md#untested-parallelism).",
        vllm_arguments.REFUSED,
    ),
    ("Refused with tiers", "With `tier.enabled`, also of one model.", vllm_arguments.REFUSED_WITH_TIERS),
)


def arguments_page() -> str:
    head = _ARGUMENTS_HEAD.replace("{variables}", _names(vllm_arguments.FREE_VARIABLES))
    parts = [head.replace("{max_drafts}", str(vllm_arguments.MAX_DRAFT_TOKENS))]
    for title, who, reasons in _TABLES:
        by_reason: dict[str, list[str]] = {}
        for name, reason in reasons.items():
            by_reason.setdefault(reason, []).append(name)
        lines = [f"## {title}", "", who, "", "| arguments | reason |", "|---|---|"]
        lines += [f"| {_names(names)} | {reason} |" for reason, names in by_reason.items()]
        parts.append("\n".join(lines) + "\n")
    lines = ["## Expected values", "", _EXPECTED_HEAD, "", "| argument | expected |", "|---|---|"]
    lines += [f"| `{name}` | {expected} |" for name, expected in argument_values.EXPECTED.items()]
    parts.insert(2, "\n".join(lines) + "\n")
    return "\n".join(parts)


def _names(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def page() -> str:
    comments = _comments()
    sections, key_to_row = [], {}
    for prefix, model in _sections(configuration.ClusterConfig):
        title = f"`{prefix}`" if prefix else "Top level"
        lines, rows, above = [f"## {title}", ""], [], []
        if model.__doc__ and model.__doc__ != BaseModel.__doc__ and prefix:
            lines += [" ".join(inspect.cleandoc(model.__doc__).split()), ""]
        for name, field in model.model_fields.items():
            if _model_of(field) is not None and not _is_container(field):
                continue
            key, comment = f"{prefix}.{name}".lstrip("."), comments.get(f"{model.__name__}.{name}", "")
            if key in COMMON:
                above.append(f"`{name}`")
                key_to_row[key] = _row(key, key, field, comment)
            else:
                rows.append(_row(key, name, field, comment))
        if above:
            lines += [f"[Above](#what-most-clusters-set): {', '.join(above)}.", ""]
        if rows:
            sections.append("\n".join([*lines, *_TABLE, *rows]) + "\n")
    rows = [key_to_row[key] for key in COMMON]  # a KeyError names what is no key
    parts = [_HEAD, "\n".join(["## What most clusters set", "", *_TABLE, *rows]) + "\n", *sections]
    parts.append("\n".join(["## What the chart has instead", "", *_counterparts()]) + "\n")
    return "\n".join(parts)


def _counterparts() -> Iterator[str]:
    decided = {f"{section}.{key}".lstrip(".") for section, keys in CHART_DECIDES.items() for key in keys} | {
        "pools",
        "models",
    }
    if decided != set(_COUNTERPARTS):
        raise SystemExit(
            f"counterparts in the chart: {sorted(decided ^ set(_COUNTERPARTS))} are there on one side only"
        )
    yield "Keys, and the chart's [values](../../deploy/helm/kvferry/values.yaml) for them:"
    yield ""
    values = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))
    for key, name in _COUNTERPARTS.items():
        here = values
        for part in filter(None, name.split(".")):
            here = here[part]  # a KeyError names what is no value
        yield f"- `{key}`: {_TAKEN.get(key) or (f'`{name}`' if name else 'none')}"


def _sections(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, type[BaseModel]]]:
    yield prefix, model
    for name, field in model.model_fields.items():
        below = _model_of(field)
        if below is not None:
            mark = ("[]" if get_origin(field.annotation) is tuple else ".NAME") if _is_container(field) else ""
            yield from _sections(below, f"{prefix}.{name}{mark}".lstrip("."))


def _model_of(field: FieldInfo) -> type[BaseModel] | None:
    for each in (field.annotation, *get_args(field.annotation)):
        if isinstance(each, type) and issubclass(each, BaseModel):
            return each
    return None


def _is_container(field: FieldInfo) -> bool:
    return get_origin(field.annotation) in (dict, tuple)


def _row(key: str, name: str, field: FieldInfo, comment: str) -> str:
    mark = " †" if _chart_decides(key) else ""
    meaning = comment.replace("|", "\\|") or "–"
    return f"| `{name}`{mark} | {_type(field.annotation)}{_limits(field)} | {_default(field)} | {meaning} |"


def _chart_decides(path: str) -> bool:
    """Whether a key, or a section that it is in, does not simply come from the chart's value `config`."""
    parts = path.replace("[]", "").split(".")
    # Copied under other conditions (_TAKEN).
    refused = {"pools", "models", *CHART_DECIDES[""]}
    return parts[0] in refused or (len(parts) > 1 and parts[1] in CHART_DECIDES.get(parts[0], ()))


def _type(annotation: Any) -> str:
    origin = get_origin(annotation)
    if origin is Literal:
        return ", ".join(f"`{each}`" for each in get_args(annotation))
    if origin in (Union, types.UnionType):
        return " or ".join(_type(each) for each in get_args(annotation))
    if origin in (tuple, dict, list):
        (*_, last) = [each for each in get_args(annotation) if each is not Ellipsis]
        return f"{'mapping' if origin is dict else 'list'} of {_type(last)}"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "sections"
    if hasattr(annotation, "__metadata__"):
        return _type(annotation.__origin__)
    names = {
        int: "integer",
        float: "number",
        str: "text",
        bool: "true or false",
        Path: "path",
        type(None): "empty",
        Any: "values",
    }
    return names[annotation]


def _limits(field: FieldInfo) -> str:
    words = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<", "max_length": "at most", "min_length": "at least"}
    found = [
        f"{words[key]} {value:,}" if isinstance(value, int) else f"{words[key]} {value:g}"
        for each in field.metadata
        for key in words
        if isinstance(value := getattr(each, key, None), int | float)
    ]
    return f", {', '.join(found)}" if found else ""


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.default_factory() if field.default_factory else field.default  # type: ignore[call-arg]
    if value is None or value is PydanticUndefined or value == "":
        return "empty"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, tuple | list):
        return f"`[{', '.join(map(str, value))}]`"
    if isinstance(value, dict):
        return "`{}`" if not value else f"`{value}`"
    return f"`{value}`"


def _comments() -> dict[str, str]:
    """`Class.field` -> its comment: what stands above it, then what stands beside it."""
    found: dict[str, str] = {}
    for file in sorted(Path(inspect.getsourcefile(configuration) or "").parent.glob("*.py")):
        found |= _comments_of(file.read_text(encoding="utf-8"))
    return found


def _comments_of(source: str) -> dict[str, str]:
    lines = source.splitlines()
    found = {}
    for node in ast.parse(source).body:
        if not isinstance(node, ast.ClassDef):
            continue
        for statement in node.body:
            if not isinstance(statement, ast.AnnAssign) or not isinstance(statement.target, ast.Name):
                continue
            above = []
            number = statement.lineno - 1
            while lines[number - 1].strip().startswith("#"):
                number -= 1
                above.insert(0, lines[number].strip().lstrip("# "))
            last = statement.end_lineno or statement.lineno
            beside = [
                line.partition("  # ")[2] or line.partition(" # ")[2]
                for line in lines[statement.lineno - 1 : last]
                if " # " in line
            ]
            said = [_sentence(" ".join(each)) for each in (above, beside) if each]
            # A sentence after another begins with a capital.
            said[1:] = [each[:1].upper() + each[1:] for each in said[1:]]
            found[f"{node.name}.{statement.target.id}"] = ". ".join(said)
    return found


def _sentence(text: str) -> str:
    return text.rstrip(".")


def main() -> int:
    pages = {DOCS / "configuration.md": page(), DOCS / "engine-arguments.md": arguments_page()}
    return write_or_check(pages, source="the code", target="config-doc", description=__doc__)


if __name__ == "__main__":
    sys.exit(main())
