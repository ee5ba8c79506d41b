"""engine/vllm/grammar_process.py"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from kvferry import config as configuration
from kvferry import model_folder
from kvferry.engine.grammar_checks import GrammarChecks
from kvferry.engine.vllm.renderer import VllmRenderer
from kvferry.errors import InvalidRequest
from kvferry.gateway.lifecycle import build_renderer

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.usefixtures("without_wall_limits"),
]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def renderer(without_wall_limits: None) -> AsyncIterator[VllmRenderer]:
    config = configuration.parse({"model": {"tool_parser": "hermes"}, "gateway": {"grammar_processes": 1}})
    made = await asyncio.to_thread(build_renderer, config, str(model_folder.resolve("default")))
    assert isinstance(made, VllmRenderer)
    made.start()
    yield made
    await made.close()


@pytest.fixture
def checks(renderer: VllmRenderer) -> GrammarChecks:
    assert renderer._grammars is not None
    return renderer._grammars


def chain(length: int) -> dict[str, Any]:
    links = {f"d{i}": {"type": "object", "properties": {"x": {"$ref": f"#/$defs/d{i + 1}"}}} for i in range(length)}
    return {"$defs": {**links, f"d{length}": {"type": "string"}}, "$ref": "#/$defs/d0"}


PARAMETERS = {"type": "object", **chain(4_000), "properties": {"x": {"$ref": "#/$defs/d0"}}}
del PARAMETERS["$ref"]


def tag_of(schema: dict[str, Any]) -> dict[str, Any]:
    structures = [{"begin": "<a>", "schema": schema, "end": "</a>"}]
    return {"type": "structural_tag", "structures": structures, "triggers": ["<a>"]}


@pytest.mark.parametrize(
    "spec",
    [
        {"json": {"type": "object", "properties": {"a": {"type": "string"}, "b": {"enum": [1, 2]}}}},
        {"json": chain(100)},
        {"json_object": True},
        {"regex": "[a-z]{1,100}"},
        {"choice": ["yes", "no"]},
        {"grammar": 'root ::= "a" root | "b"'},
        {"structural_tag": json.dumps(tag_of({"type": "object"}))},
    ],
    ids=lambda spec: next(iter(spec)),
)
async def test_what_engines_can_compile_passes(checks: GrammarChecks, spec: dict[str, Any]) -> None:
    await checks.check(json.dumps(spec), param=None)


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        ({"json": chain(10_000)}, "nests too deeply"),
        ({"structural_tag": json.dumps(tag_of(chain(10_000)))}, "nests too deeply"),
        (
            {
                "json": {
                    "type": "object",
                    "properties": {
                        f"p{i}": {"type": "string", "minLength": 100_000 + i, "maxLength": 900_000 + i}
                        for i in range(300)
                    },
                }
            },
            "over 2 s of CPU time",
        ),
        # Passes vLLM's validation and fails in its engine.
        ({"json": {"type": "string", "pattern": "^[a-z0-9]{1,2000}$"}}, "Check failed"),
        ({"json": {"type": "array", "uniqueItems": True}}, "not supported by xgrammar"),
        ({"grammar": "root ::= nothing"}, "Invalid grammar"),
    ],
)
async def test_what_they_cannot_is_refused(checks: GrammarChecks, spec: dict[str, Any], reason: str) -> None:
    with pytest.raises(InvalidRequest, match=reason):
        await checks.check(json.dumps(spec), param="response_format")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": tag_of(chain(10_000))}, "response_format"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": chain(10_000)}}},
            "response_format",
        ),
        ({"structured_outputs": {"structural_tag": json.dumps(tag_of(chain(10_000)))}}, "structured_outputs"),
        (
            {
                "tools": [{"type": "function", "function": {"name": "f", "strict": True, "parameters": PARAMETERS}}],
                "tool_choice": "required",
            },
            "tools",
        ),
    ],
    ids=["structural_tag", "json_schema", "structured_outputs", "tools"],
)
async def test_a_body_is_refused_before_vllm_reads_its_grammar_here(
    renderer: VllmRenderer, fields: dict[str, Any], param: str
) -> None:
    """As if the gateway's own limits did not exist. vLLM would end this process."""
    with pytest.raises(InvalidRequest, match="nests too deeply") as refused:
        await renderer.render_chat({"messages": [{"role": "user", "content": "hi"}], **fields})
    assert refused.value.param == param


async def test_a_body_and_its_sampling_name_the_same_grammar(renderer: VllmRenderer, checks: GrammarChecks) -> None:
    """So it is compiled once."""
    schema = {"type": "object", "properties": {"once": {"type": "string"}}, "required": ["once"]}
    before = checks.outcomes["ok"]
    for fields in (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}},
        {"structured_outputs": {"json": schema}},
    ):
        await renderer.render_chat({"messages": [{"role": "user", "content": "hi"}], **fields})
    (rendered,) = await renderer.render_completion({"prompt": "hi", "structured_outputs": {"json": schema}})
    assert checks.outcomes["ok"] == before + 1
    assert json.loads(rendered.sampling.structured_outputs) == {"json": schema}
