"""vLLM's renderer and parsers on a chat with tools: what the model is told, and what is made of what it says.

No engine runs: the "model" says what each test wants, in tokens of the default model's tokenizer.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvferry import model_folder
from kvferry.config import EngineConfig, ModelConfig
from kvferry.engine.base import AnswerDelta, Continued, EngineRequest, FinishReason, RenderedPrompt, RequestId, Sampling
from kvferry.engine.vllm.engine import VllmEngine
from kvferry.engine.vllm.parsing import Parsers, texts_of
from kvferry.engine.vllm.rendering.renderer import VllmRenderer
from kvferry.engine.vllm.rendering.structured_outputs import StructuredOutputValidator
from kvferry.errors import ConfigError, EngineError, InvalidRequest
from support.waiting import PATIENCE_S, until

pytestmark = pytest.mark.vllm


def vllm_params(sampling: Sampling) -> Any:
    from kvferry.engine.vllm.sampling import to_vllm  # it imports vLLM

    return to_vllm(sampling, transfer_params=None)


MODEL = ModelConfig(tool_parser="hermes", reasoning_parser="deepseek_r1")
# Special tokens that no text of these tests has, under names that the reasoning parser looks for.
RENAMED = {"<repo_name>": "<think>", "<file_sep>": "</think>"}
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "of a place",
            "parameters": {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]},
        },
    },
    {"type": "function", "function": {"name": "wait", "parameters": {"type": "object", "properties": {}}}},
]
TEMPLATE = """{% if tools %}<|im_start|>system
{{ tools | tojson }}<|im_end|>
{% endif %}{% for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}{% if message.tool_calls %}{{ message.tool_calls | tojson }}{% endif %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
Render = Callable[..., RenderedPrompt]
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "how is it in Ulm?"}]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The default model with tokens for reasoning, and a chat template that knows tools."""
    copy: Path = tmp_path_factory.mktemp("model")
    for file in Path(model_folder.resolve("default")).iterdir():
        if file.name in ("tokenizer.json", "tokenizer_config.json"):
            text = file.read_text()
            for old, new in RENAMED.items():
                text = text.replace(f'"{old}"', f'"{new}"')
            (copy / file.name).write_text(text)
        elif file.name != "chat_template.jinja":
            (copy / file.name).symlink_to(file)
    (copy / "chat_template.jinja").write_text(TEMPLATE)
    return str(copy)


@pytest.fixture(scope="module")
def runner() -> Iterator[asyncio.Runner]:
    """One loop for all: a renderer's grammar process belongs to it."""
    with asyncio.Runner() as made:
        yield made


@pytest.fixture(scope="module")
def renderer(folder: str, runner: asyncio.Runner) -> Iterator[VllmRenderer]:
    made = VllmRenderer(folder, "m", MODEL)
    yield made
    runner.run(made.close())


@pytest.fixture(scope="module")
def tools_only(folder: str, runner: asyncio.Runner) -> Iterator[VllmRenderer]:
    made = VllmRenderer(folder, "m", ModelConfig(tool_parser="hermes"))
    yield made
    runner.run(made.close())


@pytest.fixture(scope="module")
def render(runner: asyncio.Runner) -> Render:
    def render(renderer: VllmRenderer, **changes: Any) -> RenderedPrompt:
        return runner.run(renderer.render_chat({**CHAT, **changes}))

    return render


@pytest.fixture(scope="module")
def tokenizer(renderer: VllmRenderer) -> Any:
    return renderer._vllm.online.renderer.get_tokenizer()


@pytest.fixture(scope="module")
def parsers(renderer: VllmRenderer, tokenizer: Any) -> Parsers:
    return Parsers(MODEL, tokenizer, renderer._vllm.online.model_config)


class Said:
    """The parts of an answer, put together."""

    def __init__(self, deltas: Iterable[AnswerDelta | None]) -> None:
        self.content = self.reasoning = ""
        self.calls: dict[int, list[str]] = {}  # index -> name, arguments
        self.ids: list[str] = []
        for delta in deltas:
            if delta is not None:
                self.content += delta.content
                self.reasoning += delta.reasoning
                for piece in delta.tool_calls:
                    if piece.id is not None:
                        self.ids.append(piece.id)
                    call = self.calls.setdefault(piece.index, ["", ""])
                    call[0] += piece.name or ""
                    call[1] += piece.arguments

    @property
    def parts(self) -> tuple[Any, ...]:
        return self.content, self.reasoning, self.calls


class Worker:
    """What an engine does with a request whose answer is known."""

    def __init__(self, parsers: Parsers, tokenizer: Any, prompt: RenderedPrompt, answer: str) -> None:
        self._parsers = parsers
        self._prompt = prompt
        self.token_ids: list[int] = tokenizer.encode(answer, add_special_tokens=False)
        self.params = vllm_params(prompt.sampling)
        self.pieces = texts_of(tokenizer, prompt.token_ids, self.token_ids, self.params)

    def begin(self, continued: Continued | None = None) -> Any:
        assert self._prompt.parse is not None
        prompt = list(self._prompt.token_ids)
        if continued is not None:
            prompt += self.token_ids[: continued.num_tokens]
        request = EngineRequest(
            RequestId("r"), prompt, self._prompt.sampling, continued=continued, parse=self._prompt.parse
        )
        return self._parsers.begin(request, self.params)

    def outputs(self, start: int = 0, size: int = 1) -> Iterator[tuple[Sequence[int], str, bool]]:
        """Of one engine step each; `size` tokens where the reader was slow."""
        for i in range(start, len(self.pieces), size):
            part = self.pieces[i : i + size]
            yield [token for token, _ in part], "".join(text for _, text in part), i + size >= len(self.pieces)

    def say(self) -> list[AnswerDelta | None]:
        answer = self.begin().answer
        return [answer.on_output(ids, text, finished=last) for ids, text, last in self.outputs()]


CALLS = (
    'Let me see.\n<tool_call>\n{"name": "weather", "arguments": {"place": "Ulm, ünï 漢字 😀"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "wait", "arguments": {}}\n</tool_call>'
)
THOUGHT = "It rains.</think>"


def test_tools_change_the_prompt(renderer: VllmRenderer, tokenizer: Any, render: Render) -> None:
    plain, told = render(renderer), render(renderer, tools=TOOLS)
    assert "weather" not in tokenizer.decode(plain.token_ids)
    assert '"weather"' in tokenizer.decode(told.token_ids)
    call = {"id": "call-1", "type": "function", "function": {"name": "weather", "arguments": '{"place": "Ulm"}'}}
    messages = [
        *CHAT["messages"],
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call-1", "content": "rain, all day"},
    ]
    text = tokenizer.decode(render(renderer, tools=TOOLS, messages=messages).token_ids)
    assert '"place": "Ulm"' in text
    assert "rain, all day" in text


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "wait"}}])
def test_a_call_that_must_be_made_becomes_a_grammar(renderer: VllmRenderer, choice: Any, render: Render) -> None:
    grammar = render(renderer, tools=TOOLS, tool_choice=choice).sampling.structured_outputs
    assert "wait" in grammar
    assert ("weather" in grammar) == (choice == "required")
    vllm_params(render(renderer, tools=TOOLS, tool_choice=choice).sampling)


def test_plain_chats_still_go_the_short_way(renderer: VllmRenderer, tools_only: VllmRenderer, render: Render) -> None:
    for one, parses in ((renderer, True), (tools_only, False)):
        assert one.renders_plain_prompts_itself
        rendered = render(one)
        assert (rendered.parse is not None) == parses
        plain, one._plain = one._plain, None
        try:
            slowly = render(one)
        finally:
            one._plain = plain
        assert rendered == slowly
        assert render(one, tools=TOOLS).parse is not None


def test_tools_without_a_parser_are_refused(
    tools_only: VllmRenderer, monkeypatch: pytest.MonkeyPatch, render: Render
) -> None:
    monkeypatch.setattr(tools_only, "_model", ModelConfig())
    monkeypatch.setattr(tools_only._vllm, "_model", ModelConfig())
    with pytest.raises(InvalidRequest, match=r"model\.tool_parser"):
        render(tools_only, tools=TOOLS)
    assert render(tools_only, tools=TOOLS, tool_choice="none").parse is None


def test_an_unknown_parser_fails_the_start_naming_the_known_ones(folder: str) -> None:
    with pytest.raises(ConfigError, match=r"model\.tool_parser: vLLM has no parser 'hermess'; it has .*hermes, "):
        VllmRenderer(folder, "m", ModelConfig(tool_parser="hermess"))
    with pytest.raises(ConfigError, match=r"model\.reasoning_parser: vLLM has no parser 'r1'; it has .*deepseek_r1, "):
        VllmRenderer(folder, "m", ModelConfig(reasoning_parser="r1"))


def test_a_parser_whose_tokens_the_model_lacks_fails_the_start() -> None:
    with pytest.raises(ConfigError, match=r"deepseek_r1 cannot be used with the tokenizer"):
        VllmRenderer(str(model_folder.resolve("default")), "m", MODEL)


def test_calls_and_reasoning_are_taken_apart(
    renderer: VllmRenderer, parsers: Parsers, tokenizer: Any, render: Render
) -> None:
    worker = Worker(parsers, tokenizer, render(renderer, tools=TOOLS), f"{THOUGHT}{CALLS}")
    said = Said(worker.say())
    assert said.reasoning.strip() == "It rains."
    assert said.content.strip() == "Let me see."
    assert [name for name, _ in said.calls.values()] == ["weather", "wait"]
    assert [json.loads(arguments) for _, arguments in said.calls.values()] == [{"place": "Ulm, ünï 漢字 😀"}, {}]
    assert len(set(said.ids)) == 2


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
def test_calls_that_had_to_be_made(tools_only: VllmRenderer, tokenizer: Any, choice: Any, render: Render) -> None:
    """In the form that the grammar asks for."""
    prompt = render(tools_only, tools=TOOLS, tool_choice=choice)
    assert prompt.parse is not None
    grammar = json.loads(prompt.sampling.structured_outputs)
    parsers = Parsers(ModelConfig(tool_parser="hermes"), tokenizer, tools_only._vllm.online.model_config)
    arguments = '{"place": "Ulm"}'
    if "grammar" in grammar:
        answer = f'<tool_call>\n{{"name": "weather", "arguments": {arguments}}}\n</tool_call>'
    elif choice == "required":
        answer = f'[{{"name": "weather", "parameters": {arguments}}}]'
    else:
        answer = arguments
    said = Said(Worker(parsers, tokenizer, prompt, answer).say())
    assert [(name, json.loads(text)) for name, text in said.calls.values()] == [("weather", {"place": "Ulm"})]
    assert not said.content.strip()


def test_one_call_where_calls_may_not_be_parallel(
    renderer: VllmRenderer, parsers: Parsers, tokenizer: Any, render: Render
) -> None:
    prompt = render(renderer, tools=TOOLS, parallel_tool_calls=False)
    said = Said(Worker(parsers, tokenizer, prompt, f"{THOUGHT}{CALLS}").say())
    assert [name for name, _ in said.calls.values()] == ["weather"]


def test_reasoning_that_is_not_wanted_is_left_out(
    renderer: VllmRenderer, parsers: Parsers, tokenizer: Any, render: Render
) -> None:
    prompt = render(renderer, include_reasoning=False)
    said = Said(Worker(parsers, tokenizer, prompt, f"{THOUGHT} Rain.").say())
    assert (said.content.strip(), said.reasoning) == ("Rain.", "")


@pytest.mark.parametrize("size", [1, 3])
def test_an_answer_goes_on_in_another_worker_after_any_output(
    renderer: VllmRenderer, parsers: Parsers, tokenizer: Any, size: int, render: Render
) -> None:
    worker = Worker(parsers, tokenizer, render(renderer, tools=TOOLS), f"{THOUGHT}{CALLS}")
    outputs = list(worker.outputs(size=size))
    answer = worker.begin().answer
    whole = Said(answer.on_output(ids, text, finished=last) for ids, text, last in outputs)
    for num_outputs in range(1, len(outputs)):
        sizes = [len(ids) for ids, _, _ in outputs[:num_outputs]]
        num_given, num_chars = sum(sizes), sum(len(text) for _, text, _ in outputs[:num_outputs])
        lost = worker.begin().answer
        given = [lost.on_output(ids, text, finished=False) for ids, text, _ in outputs[:num_outputs]]
        continued = worker.begin(Continued(num_given, num_chars, sizes)).answer
        rest = [continued.on_output(ids, text, finished=last) for ids, text, last in worker.outputs(num_given, size)]
        assert Said([*given, *rest]).parts == whole.parts, num_given


@pytest.mark.parametrize("size", [2, 3, 7])
def test_outputs_of_several_tokens_say_the_same(
    renderer: VllmRenderer, parsers: Parsers, tokenizer: Any, size: int, render: Render
) -> None:
    worker = Worker(parsers, tokenizer, render(renderer, tools=TOOLS), f"{THOUGHT}{CALLS}")
    whole = Said(worker.say())
    answer = worker.begin().answer
    said = Said(answer.on_output(ids, text, finished=last) for ids, text, last in worker.outputs(size=size))
    assert said.calls == whole.calls
    assert (said.content.strip(), said.reasoning.strip()) == (whole.content.strip(), whole.reasoning.strip())


def test_what_the_engine_is_told_of_reasoning(
    renderer: VllmRenderer, tools_only: VllmRenderer, parsers: Parsers, tokenizer: Any, render: Render
) -> None:
    with_reasoning = Worker(parsers, tokenizer, render(renderer, tools=TOOLS, tool_choice="required"), "x").begin()
    assert set(with_reasoning.engine_arguments) == {"reasoning_parser_kwargs", "reasoning_ended"}
    without = Parsers(ModelConfig(tool_parser="hermes"), tokenizer, tools_only._vllm.online.model_config)
    assert not Worker(without, tokenizer, render(tools_only, tools=TOOLS), "x").begin().engine_arguments


class SaidByVllm:
    """In place of AsyncLLM: gives what it was told to, and notes what it was asked with."""

    errored = False
    model_config = SimpleNamespace(get_vocab_size=lambda: 49152)
    output_processor = SimpleNamespace(tokenizer=SimpleNamespace(max_token_id=49151), external_req_ids=())

    def __init__(self, worker: Worker, start: int, *, aborts: bool = False) -> None:
        self._worker = worker
        self._start = start
        self._aborts = aborts
        self.asked: dict[str, Any] = {}

    async def generate(self, prompt: Any, params: Any, request_id: str, **more: Any) -> Any:
        self.asked = more
        for ids, text, last in self._worker.outputs(self._start):
            reason = ("abort" if self._aborts else "stop") if last else None
            completion = SimpleNamespace(
                token_ids=ids, text=text, logprobs=None, finish_reason=reason, stop_reason=None
            )
            yield SimpleNamespace(outputs=[completion], finished=last, kv_transfer_params=None, metrics=None)


async def outputs_of(llm: SaidByVllm, parsers: Parsers, request: EngineRequest) -> list[Any]:
    engine = VllmEngine("", MODEL, EngineConfig(), producer=False)
    engine._llm, engine._parsers = llm, parsers
    engine._prompt_sources = SimpleNamespace(get=lambda _: None, pop=lambda _: None)
    engine._continuations = SimpleNamespace(expect=lambda *_: None, forget=lambda _: None)
    processor = SimpleNamespace(model_config=None, structured_outputs_config=None, tokenizer=None)
    engine._validator = StructuredOutputValidator(SimpleNamespace(input_processor=processor))
    return [output async for output in engine.generate(request)]


@pytest.mark.parametrize("num_given", [0, 9])
async def test_the_engine_gives_deltas_beside_the_raw_text(
    renderer: VllmRenderer, parsers: Parsers, tokenizer: Any, num_given: int
) -> None:
    prompt = await renderer.render_chat({**CHAT, "tools": TOOLS})
    worker = Worker(parsers, tokenizer, prompt, f"{THOUGHT}{CALLS}")
    num_chars = sum(len(text) for _, text in worker.pieces[:num_given])
    request = EngineRequest(
        RequestId("r"),
        [*prompt.token_ids, *worker.token_ids[:num_given]],
        prompt.sampling,
        continued=Continued(num_given, num_chars) if num_given else None,
        parse=prompt.parse,
    )
    llm = SaidByVllm(worker, num_given)
    outputs = await outputs_of(llm, parsers, request)
    assert "".join(output.text for output in outputs) == "".join(text for _, text in worker.pieces[num_given:])
    first = worker.begin().answer
    given = [first.on_output([token], text, finished=False) for token, text in worker.pieces[:num_given]]
    assert Said([*given, *(output.delta for output in outputs)]).parts == Said(worker.say()).parts
    assert set(llm.asked) == {"reasoning_parser_kwargs"}


async def test_what_is_not_to_be_parsed_or_is_aborted_meets_no_parser(
    renderer: VllmRenderer, parsers: Parsers, tokenizer: Any
) -> None:
    prompt = await renderer.render_chat(CHAT)
    worker = Worker(parsers, tokenizer, prompt, f"{THOUGHT}{CALLS}")
    plain = EngineRequest(RequestId("r"), prompt.token_ids, prompt.sampling)
    llm = SaidByVllm(worker, 0)
    assert {output.delta for output in await outputs_of(llm, parsers, plain)} == {None}
    assert llm.asked == {}
    aborted = EngineRequest(RequestId("r"), prompt.token_ids, prompt.sampling, parse=prompt.parse)
    *_, last = await outputs_of(SaidByVllm(worker, 0, aborts=True), parsers, aborted)
    assert (last.finish_reason, last.delta) == (FinishReason.ABORT, None)


async def test_a_parser_that_fails_ends_the_request_with_an_error_of_its_own(
    renderer: VllmRenderer, parsers: Parsers, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise KeyError("of a model that writes what it likes")

    prompt = await renderer.render_chat({**CHAT, "tools": TOOLS})
    assert parsers._parser_class is not None
    monkeypatch.setattr(parsers._parser_class, "parse_delta", fail)
    answer = parsers.begin(
        EngineRequest(RequestId("r"), prompt.token_ids, prompt.sampling, parse=prompt.parse),
        vllm_params(prompt.sampling),
    ).answer
    with pytest.raises(EngineError, match="the answer cannot be parsed: KeyError"):
        answer.on_output([1], "x", finished=False)


async def test_answers_that_go_on_are_parsed_beside_the_loop(
    renderer: VllmRenderer, parsers: Parsers, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some parsers need seconds for long calls, in which other streams go on."""
    prompt = await renderer.render_chat({**CHAT, "tools": TOOLS})
    worker = Worker(parsers, tokenizer, prompt, f"{THOUGHT}{CALLS}")
    may_end, threads, begin = threading.Event(), [], parsers.begin

    def slow(request: EngineRequest, params: Any) -> Any:
        threads.append(threading.current_thread())
        assert may_end.wait(PATIENCE_S)
        return begin(request, params)

    monkeypatch.setattr(parsers, "begin", slow)
    requests = [
        EngineRequest(
            RequestId(f"r{number}"),
            [*prompt.token_ids, *worker.token_ids[:9]],
            prompt.sampling,
            continued=Continued(9, 9),
            parse=prompt.parse,
        )
        for number in range(2)
    ]
    asked = [asyncio.create_task(outputs_of(SaidByVllm(worker, 9), parsers, request)) for request in requests]
    await until(lambda: len(threads) == 2)
    assert threading.current_thread() not in threads
    may_end.set()
    assert all(await asyncio.gather(*asked))
