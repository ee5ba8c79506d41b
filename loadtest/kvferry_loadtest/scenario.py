"""A scenario: what load to make, as a TOML file says it. Shipped ones lie in `scenarios/`.

Token counts are for `scale` 1; lengths of time are seconds. An unknown key, a wrong type and a value out of range are
refused in one line that names file, key, value and what is allowed.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from random import Random
from typing import Annotated, Any, Literal, get_args

import msgspec
from msgspec import Meta, inspect

from kvferry_loadtest import schema
from kvferry_loadtest.arrivals import Process
from kvferry_loadtest.errors import ScenarioError
from kvferry_loadtest.result import Objective
from kvferry_loadtest.trace import BLOCK_TOKENS

Count = Annotated[int, Meta(ge=1)]
CountOrNone = Annotated[int, Meta(ge=0)]  # 0: none at all
Seconds = Annotated[float, Meta(ge=0)]
Positive = Annotated[float, Meta(gt=0)]
Share = Annotated[float, Meta(ge=0, le=1)]
Text = Annotated[str, Meta(min_length=1)]

Kind = Literal["rag", "chat", "agent", "documents", "burst", "neighbours", "trace"]


class Table(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One table of a scenario file."""


class Span(Table, frozen=True, kw_only=True):
    """A whole number drawn for each use, all values from `min` to `max` alike."""

    min: Count
    max: Count

    def __post_init__(self) -> None:
        if self.min > self.max:
            raise ValueError("min must not be above max")

    def draw(self, rng: Random) -> int:
        return rng.randint(self.min, self.max)


class Arrivals(Table, frozen=True, kw_only=True):
    """When sessions begin in an open loop (see `arrivals.py`)."""

    process: Process
    rate_per_s: Positive
    burstiness: Positive | None = None  # gamma only: the shape; 1 is Poisson, smaller is burstier

    def __post_init__(self) -> None:
        if self.process == "gamma" and self.burstiness is None:
            raise ValueError("gamma arrivals need burstiness, a number above 0")
        if self.process != "gamma" and self.burstiness is not None:
            raise ValueError("burstiness is for gamma arrivals only")


class Tenant(Table, frozen=True, kw_only=True):
    """Who sends. Tenants share no content: each has its own system prompts and documents."""

    name: Text
    weight: Positive = 1.0  # its share of sessions is this by the sum of all
    api_key_env: str = ""  # environment variable that holds its API key; empty: the run's own


class ObjectiveTable(Objective, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`result.Objective`, checked."""

    ttft_ms: Positive | None = None
    tpot_ms: Positive | None = None
    e2e_ms: Positive | None = None


class ChatTemplate(Table, frozen=True, kw_only=True):
    """Tokens that the served model's chat template puts before a message's text, by role, and `end` after it.

    They count in the floor. The prompt ends with those before the assistant's next message.
    """

    system: CountOrNone = 0
    user: CountOrNone = 0
    assistant: CountOrNone = 0
    tool: CountOrNone = 0
    end: CountOrNone = 0


class Rag(Table, frozen=True, kw_only=True):
    """Chats about a retrieved document, which stands before the first question and stays for the session."""

    system_tokens: CountOrNone
    document_tokens: Count
    user_tokens: Count  # of each turn
    answer_tokens: Count
    turns: Count
    think_time_s: Seconds = 0.0  # mean, exponential
    cold_fraction: Share  # share of sessions with a document of their own
    num_documents: Count  # that the other sessions choose from
    zipf_s: Seconds  # the document of rank r is chosen in proportion to r ** -zipf_s; 0: all alike
    prime_documents: bool = True  # send each of them once as warm-up, or "warm" would be a matter of luck
    prime_rate_per_s: Positive = 4.0  # open loop: how fast; sessions begin after the last


class Chat(Table, frozen=True, kw_only=True):
    """Conversations over a system prompt that all of a tenant's sessions share."""

    system_tokens: CountOrNone
    user_tokens: Span
    answer_tokens: Span
    turns: Span
    think_time_s: Seconds  # mean, exponential


class Agent(Table, frozen=True, kw_only=True):
    """Chains of steps that use tools; a chain may branch into parallel children, whose answers it waits for."""

    system_tokens: Count
    task_tokens: Span
    steps: Span  # of the chain itself, children left out
    answer_tokens: Span  # of each step
    tool_result_tokens: Span  # that the next step begins with
    tool_time_s: Seconds  # mean, exponential: from a step's end to the next
    branch_probability: Share  # after each step but the last
    fan_out: Count  # children of a branch
    branch_steps: Count  # of each child


class Documents(Table, frozen=True, kw_only=True):
    """Single requests about a document that nobody sent before."""

    system_tokens: CountOrNone
    document_tokens: Span
    answer_tokens: Span


class Burst(Table, frozen=True, kw_only=True):
    """Requests of one instant that begin alike: a session is one burst."""

    siblings: Annotated[int, Meta(ge=2)]
    system_tokens: CountOrNone  # shared by all bursts of a tenant
    shared_tokens: Count  # shared within a burst
    tail_tokens: Span  # of each request alone
    answer_tokens: Count


class Neighbours(Table, frozen=True, kw_only=True):
    """A tenant of steady chats (the first; `arrivals` are its own) beside one of long prompts (the second)."""

    steady: Chat
    noisy: Documents
    noisy_arrivals: Arrivals  # until the last steady session has begun
    noisy_start_s: Seconds = 0.0  # before it, the steady tenant is alone


class Trace(Table, frozen=True, kw_only=True):
    """A trace in Mooncake's format, sent as token ids (see `trace.py`)."""

    path: str = ""  # relative to the working directory
    time_scale: Positive = 1.0  # 2: twice as fast
    length_scale: Positive = 1.0  # of prompts and answers; a block of 512 tokens must stay a whole number of tokens
    max_requests: Count | None = None  # the first so many
    max_prompt_tokens: Count | None = None  # after scaling; longer prompts are cut at the end of a block
    output_tokens_cap: Count | None = None  # after scaling


class Contents(Table, frozen=True, kw_only=True):
    """A whole file. It has `arrivals` or `concurrency`, by its loop, and one table of a workload, named as its kind."""

    description: Text
    kind: Kind
    seed: CountOrNone = 1
    loop: Literal["open", "closed"]
    arrivals: Arrivals | None = None  # open loop
    concurrency: Count | None = None  # closed loop: users, each of whom takes the next session when free
    num_sessions: Count | None = None  # measured ones; a trace has its own
    warmup_sessions: CountOrNone = 0  # before them
    request_timeout_s: Positive = 600.0
    objective: ObjectiveTable = ObjectiveTable()
    temperature: Seconds = 0.0
    ignore_eos: bool = True  # answers are as long as planned
    page_tokens: Count = 16  # granularity of the floor
    chat_template: ChatTemplate = ChatTemplate()
    tenants: tuple[Tenant, ...] = ()
    scale: Positive = 1.0  # multiplies all token counts
    rag: Rag | None = None
    chat: Chat | None = None
    agent: Agent | None = None
    documents: Documents | None = None
    burst: Burst | None = None
    neighbours: Neighbours | None = None
    trace: Trace | None = None


class Scenario(Contents, frozen=True, kw_only=True):
    """A file's contents, checked, and where they are from."""

    name: str  # the file's, without its ending
    file: str  # for messages

    def tokens(self, num_tokens: int) -> int:
        """A token count of the file at this scale: at least 1 where it was."""
        return max(1, round(num_tokens * self.scale)) if num_tokens else 0

    def parameters(self) -> dict[str, Any]:
        """All that made the load, as plain values for a result. What leads to keys is left out."""
        values: dict[str, Any] = msgspec.to_builtins(self)
        for tenant in values["tenants"]:
            del tenant["api_key_env"]
        del values["name"], values["file"]
        return {name: _plain(value) for name, value in values.items() if value is not None}


_TYPE = inspect.type_info(Contents)


def names() -> list[str]:
    """The shipped scenarios."""
    files = resources.files("kvferry_loadtest").joinpath("scenarios").iterdir()
    return sorted(file.name.removesuffix(".toml") for file in files if file.name.endswith(".toml"))


def load(name_or_path: str, overrides: Mapping[str, str] = {}) -> Scenario:
    """A shipped scenario by its name, or a file by a path (it has a separator or ends in .toml).

    `overrides` map dotted keys (items of arrays by their number) to TOML values; text needs no quotes, and an empty
    value takes the key away. Raises ScenarioError: one line.
    """
    if "/" in name_or_path or "\\" in name_or_path or name_or_path.endswith(".toml"):
        file, name = name_or_path, Path(name_or_path).stem
        try:
            data = Path(name_or_path).read_bytes()
        except OSError as error:
            raise ScenarioError(f"{file}: {error.strerror}") from None
    else:
        file, name = f"{name_or_path}.toml", name_or_path
        if name not in names():
            raise ScenarioError(f"no scenario {name!r}; there are {', '.join(names())}, and files that end in .toml")
        data = resources.files("kvferry_loadtest").joinpath("scenarios", file).read_bytes()
    try:
        values = tomllib.loads(data.decode())
    except ValueError as error:  # not TOML, not UTF-8
        raise ScenarioError(f"{file}: not TOML: {error}") from None
    try:
        for key, text in overrides.items():
            _override(values, key, text)
        schema.check(values, _TYPE)
        scenario = schema.convert({"name": name, "file": file, **values}, Scenario)
        _require_sense(scenario)
    except schema.Fault as fault:
        raise ScenarioError(f"{file}: {' '.join(str(fault).splitlines())}") from None
    return scenario


def _override(values: dict[str, Any], key: str, text: str) -> None:
    *parents, last = key.split(".")
    place: Any = values
    for depth, part in enumerate(parents):
        if isinstance(place, dict):
            place = place.setdefault(part, {})
        elif isinstance(place, list) and part.isdecimal() and int(part) < len(place):
            place = place[int(part)]
        else:
            raise schema.Fault(key, f"{'.'.join(parents[:depth])} has nothing called {part}", text)
    if isinstance(place, list) and last.isdecimal() and int(last) < len(place):
        place[int(last)] = _value(key, text)
    elif not isinstance(place, dict):
        raise schema.Fault(key, f"{'.'.join(parents)} has nothing called {last}", text)
    elif text == "":
        place.pop(last, None)
    else:
        place[last] = _value(key, text)


def _value(key: str, text: str) -> Any:
    type_ = schema.type_at(_TYPE, key.split("."))
    if isinstance(type_, inspect.StrType | inspect.LiteralType):
        return text
    try:
        values = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    return values["value"] if len(values) == 1 else text


def _require_sense(scenario: Scenario) -> None:
    """Raises Fault where values that are right alone do not go together."""
    kind = scenario.kind
    if getattr(scenario, kind) is None:
        raise schema.Fault(kind, f'kind "{kind}" needs {schema.allowed(_field(kind))}', missing=True)
    for other in get_args(Kind):
        if other != kind and getattr(scenario, other) is not None:
            raise schema.Fault(
                other, f'not used by kind "{kind}"', _plain(msgspec.to_builtins(getattr(scenario, other)))
            )
    _require_loop(scenario)
    if kind == "trace" and scenario.num_sessions is not None:
        raise schema.Fault("num_sessions", "a trace has its own; see trace.max_requests", scenario.num_sessions)
    if kind != "trace" and scenario.num_sessions is None:
        raise schema.Fault("num_sessions", f"must be {schema.allowed(_field('num_sessions'))}", missing=True)
    tenants = [tenant.name for tenant in scenario.tenants]
    if len(set(tenants)) < len(tenants):
        raise schema.Fault("tenants", "two tenants have the same name", tenants)
    if kind == "neighbours" and (len(tenants) != 2 or any(tenant.weight != 1 for tenant in scenario.tenants)):
        raise schema.Fault("tenants", "must be two without weight: the steady one, then the noisy one", tenants)
    if scenario.trace is not None:
        _require_whole_blocks(scenario, scenario.trace)


def _require_loop(scenario: Scenario) -> None:
    if scenario.loop == "closed":
        if scenario.kind in ("burst", "neighbours", "trace"):
            raise schema.Fault("loop", f'must be "open": kind "{scenario.kind}" says when requests are due', "closed")
        if scenario.concurrency is None:
            raise schema.Fault("concurrency", "a closed loop needs a whole number of at least 1", missing=True)
        if scenario.arrivals is not None:
            raise schema.Fault("arrivals", "not used in a closed loop", _plain(msgspec.to_builtins(scenario.arrivals)))
        return
    if scenario.concurrency is not None:
        raise schema.Fault("concurrency", "not used in an open loop", scenario.concurrency)
    if scenario.kind == "trace" and scenario.arrivals is not None:
        raise schema.Fault("arrivals", "a trace has its own", _plain(msgspec.to_builtins(scenario.arrivals)))
    if scenario.kind != "trace" and scenario.arrivals is None:
        raise schema.Fault("arrivals", f"an open loop needs {schema.allowed(_field('arrivals'))}", missing=True)


def _require_whole_blocks(scenario: Scenario, trace: Trace) -> None:
    block_tokens = BLOCK_TOKENS * trace.length_scale * scenario.scale
    nearest = max(1, round(block_tokens))
    if abs(block_tokens - nearest) > 1e-3:
        raise schema.Fault(
            "trace.length_scale",
            f"makes blocks of {block_tokens:g} tokens, not a whole number;"
            f" {nearest / BLOCK_TOKENS / scenario.scale:g} makes {nearest}",
            trace.length_scale,
        )
    if trace.max_prompt_tokens is not None and trace.max_prompt_tokens < nearest:
        raise schema.Fault(
            "trace.max_prompt_tokens", f"must be at least a block, {nearest} tokens", trace.max_prompt_tokens
        )


def _field(name: str) -> inspect.Type:
    found = schema.type_at(_TYPE, [name])
    assert found is not None
    return found


def _plain(value: Any) -> Any:
    """Without what was not given."""
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items() if inner is not None}
    return [_plain(inner) for inner in value] if isinstance(value, list | tuple) else value
