"""grammar_process.py and rendering/grammars.py: what passes, what is refused, and what answers can be."""

from __future__ import annotations

import asyncio
import json
import tracemalloc
from collections.abc import AsyncIterator
from typing import Any

import jsonschema
import pytest
import pytest_asyncio

from kvferry import config as configuration
from kvferry import model_folder
from kvferry.engine.base import Asker, CacheSalt, TenantName
from kvferry.engine.grammar_checks import GrammarChecks
from kvferry.engine.vllm.rendering.grammars import grammar_of, prepared_schema
from kvferry.engine.vllm.rendering.renderer import VllmRenderer
from kvferry.engine.vllm.rendering.structural_tags import SpecialTokens
from kvferry.errors import InvalidRequest
from kvferry.gateway.lifecycle import build_renderer
from support.grammar_walks import GrammarWalker

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.usefixtures("without_wall_limits"),
]

TEXT, ONE, BOOLEAN = {"type": "string"}, {"type": "integer", "minimum": 1, "maximum": 9}, {"type": "boolean"}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def renderer(without_wall_limits: None) -> AsyncIterator[VllmRenderer]:
    config = configuration.parse({"model": {"tool_parser": "hermes"}})
    made = await asyncio.to_thread(build_renderer, config, str(model_folder.resolve("default")))
    assert isinstance(made, VllmRenderer)
    made.start()
    yield made
    await made.close()


@pytest.fixture
def checks(renderer: VllmRenderer) -> GrammarChecks:
    assert renderer._grammars is not None
    return renderer._grammars


@pytest.fixture(scope="module")
def walker() -> GrammarWalker:
    return GrammarWalker()


def answers_of(walker: GrammarWalker, grammar: str, num_seeds: int) -> list[str]:
    walks = (walker.walk(grammar, seed) for seed in range(num_seeds))
    return [walker.tokenizer.decode(tokens) for tokens in walks if tokens is not None]


def chain(length: int) -> dict[str, Any]:
    links = {f"d{i}": {"type": "object", "properties": {"x": {"$ref": f"#/$defs/d{i + 1}"}}} for i in range(length)}
    return {"$defs": {**links, f"d{length}": TEXT}, "$ref": "#/$defs/d0"}


def closed(properties: dict[str, Any], **more: Any) -> dict[str, Any]:
    required = {"required": list(properties), "additionalProperties": False}
    return {"type": "object", "properties": properties, **required, **more}


SET = {"uniqueItems": False}
PARAMETERS = {"type": "object", **chain(6_000), "properties": {"x": {"$ref": "#/$defs/d0"}}}
del PARAMETERS["$ref"]


def tag_of(schema: dict[str, Any]) -> dict[str, Any]:
    structures = [{"begin": "<a>", "schema": schema, "end": "</a>"}]
    return {"type": "structural_tag", "structures": structures, "triggers": ["<a>"]}


async def grammar_for(renderer: VllmRenderer, **fields: Any) -> str:
    """Return the grammar of a chat, as engines get it."""
    rendered = await renderer.render_chat({"messages": [{"role": "user", "content": "hi"}], **fields})
    return grammar_of(rendered.sampling.structured_outputs)


@pytest.mark.parametrize(
    "spec",
    [
        {"json": closed({"a": TEXT, "b": {"enum": [1, 2]}})},
        {"json": chain(100)},
        {"json": chain(2_000)},
        {"json_object": True},
        {"regex": "[a-z]{1,100}"},
        {"choice": ["yes", "no"]},
        {"grammar": 'root ::= "a" root | "b"'},
        {"grammar": 'start: "a" start | "b"'},
        {"structural_tag": json.dumps(tag_of({"type": "object"}))},
    ],
    ids=lambda spec: next(iter(spec)),
)
async def test_what_engines_can_follow_passes(renderer: VllmRenderer, spec: dict[str, Any]) -> None:
    assert await grammar_for(renderer, structured_outputs=spec)


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        ({"json": chain(10_000)}, "nests too deeply"),
        ({"structural_tag": json.dumps(tag_of(chain(10_000)))}, "nests too deeply"),
        ({"json": {"allOf": [{"type": "string", "pattern": f"(a|b)*a(a|b){{{i}}}$"} for i in range(20)]}}, "over "),
        ({"json": closed({f"p{i}": {"maxItems": 10**6, "items": closed({"a": TEXT})} for i in range(9)})}, "big|over"),
        ({"json": closed({"a": {"type": "array", "uniqueItems": True}})}, "#/properties/a: 'uniqueItems' of JSON"),
        ({"json": {"anyOf": [{"not": BOOLEAN}, TEXT]}}, "#/anyOf/0: 'not' of JSON schemas cannot be enforced"),
        ({"json": closed({"a": {"oneOf": [TEXT, {"type": "string", "maxLength": 3}]}})}, "#/properties/a: 'oneOf' of"),
        ({"json": {"type": "object", "required": ["b"], "additionalProperties": False}}, "'b' is unsatisfiable"),
        ({"json": {"$ref": "https://example.com/s.json"}}, "https://example.com/s.json"),
        ({"json": {"type": "string", "pattern": r"^(a|b)\1$"}}, "backreferences are not supported"),
        ({"json": {"type": "string", "pattern": "^(?!red$)"}}, "look-around"),
        ({"grammar": "root ::= nothing"}, "nothing"),
        ({"json": closed({"a": {"items": {"uniqueItems": True}}, "z": SET})}, "#/properties/a/items:"),
        ({"json": closed({"a/b~c": {"not": TEXT}})}, "#/properties/a~1b~0c: 'not' of JSON"),
        ({"json": closed({"a": {"enum": ["end <|im_end|> of it"]}})}, "special token '<.im_end.>'"),
        ({"grammar": "".join(f"r{i} ::= r{i + 1}\n" for i in range(1001))}, "1001 rules of EBNF are too many"),
        ({"json": {"type": 5}}, "type must be a string"),
        ({"regex": "(a" * 300 + ")" * 300}, "nest"),
    ],
)  # fmt: skip
async def test_what_they_cannot_is_refused_with_its_reason(
    renderer: VllmRenderer, spec: dict[str, Any], reason: str
) -> None:
    with pytest.raises(InvalidRequest, match=reason) as refused:
        await grammar_for(renderer, structured_outputs=spec)
    assert refused.value.param == "structured_outputs"
    assert "\n" not in refused.value.message


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
async def test_no_library_of_grammars_reads_one_in_this_process(
    renderer: VllmRenderer, fields: dict[str, Any], param: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A chain that no stack holds would end it, and xgrammar takes minutes for some."""
    import llguidance
    import xgrammar

    def fails(*_: Any, **__: Any) -> None:
        raise AssertionError("read here")

    makers = {name: getattr(llguidance.LLMatcher, name) for name in ("grammar_from_json_schema", "grammar_from_lark")}
    monkeypatch.setattr(llguidance, "LLMatcher", type("LLMatcher", (), {"__init__": fails, **makers}))
    for name in ("from_json_schema", "from_structural_tag", "from_ebnf", "from_regex"):
        monkeypatch.setattr(xgrammar.Grammar, name, fails)
    with pytest.raises(InvalidRequest, match="nests too deeply") as refused:
        await grammar_for(renderer, **fields)
    assert refused.value.param == param


async def test_a_grammar_is_tried_once_for_each_salt(renderer: VllmRenderer, checks: GrammarChecks) -> None:
    schema = closed({"once": TEXT})
    fields = ({"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}},
              {"structured_outputs": {"json": schema}})  # fmt: skip
    chat = {"messages": [{"role": "user", "content": "hi"}]}
    before = checks.outcomes["ok"]
    for number, salt in enumerate(("one", "another"), 1):
        asker = Asker(TenantName("acme"), CacheSalt(salt))
        for field in fields:
            await renderer.render_chat({**chat, **field}, asker=asker)
        await renderer.render_completion({"prompt": ["hi", "ho"], "structured_outputs": {"json": schema}}, asker=asker)
        assert checks.outcomes["ok"] == before + number


# Ordinary ones, of which xgrammar 0.2.8 gave answers that did not fit.
SCHEMAS: dict[str, Any] = {
    "plain": closed({"a": BOOLEAN, "b": ONE, "c": {"enum": ["x", "y"]}}),
    "format and pattern": closed({"u": {"type": "string", "format": "date", "pattern": "^2026-"}}),
    "pattern and length": closed({"u": {"type": "string", "pattern": "^[a-z]+$", "minLength": 2, "maxLength": 4}}),
    "quote": closed({"a": {"type": "string", "pattern": '^say "x"$'}}),
    "backslashes": closed({"a": {"type": "string", "pattern": "^\\\\\\\\[a-z]{4}$"}}),
    "anyOf beside properties": {
        "type": "object",
        "properties": {"a": ONE},
        "required": ["a"],
        "anyOf": [{"properties": {"b": {"const": 1}}, "required": ["b"]}],
    },
    "$ref with sibling": {"$defs": {"S": {"enum": ["r", "g"]}}, **closed({"a": {"$ref": "#/$defs/S", "const": "g"}})},
    "multipleOf": closed({"a": {"type": "number", "multipleOf": 0.01, "minimum": 0, "maximum": 9}}),
    "a format of nobody": closed({"a": {"type": "string", "format": "phone", "maxLength": 3}}),
    "uniqueItems that is false": closed({"a": {"type": "array", "items": ONE, "maxItems": 2, "uniqueItems": False}}),
    "arrays": closed({"a": {"type": "array", "items": closed({"b": ONE}), "maxItems": 3}}),
    "nothing but a type": {"type": "object", "maxProperties": 2, "additionalProperties": ONE},
}


@pytest.mark.parametrize("name", SCHEMAS)
async def test_answers_are_json_that_fits_and_is_compact(
    renderer: VllmRenderer, walker: GrammarWalker, name: str
) -> None:
    grammar = await grammar_for(renderer, structured_outputs={"json": SCHEMAS[name]})
    answers = answers_of(walker, grammar, 12)
    assert len(answers) >= 6
    for answer in answers:
        value = json.loads(answer)
        jsonschema.validate(value, SCHEMAS[name])
        assert not set("\n\t") & set(answer), "a small model adds line ends without end"
        assert "  " not in answer


async def test_an_additional_property_is_refused_where_a_client_asks_for_it(
    renderer: VllmRenderer, walker: GrammarWalker
) -> None:
    schema = {"type": "object", "properties": {"a": ONE}, "required": ["a"]}
    fields = {"json": schema, "disable_additional_properties": True}
    grammar = await grammar_for(renderer, structured_outputs=fields)
    answers = answers_of(walker, grammar, 5)
    assert answers
    assert all(json.loads(answer).keys() == {"a"} for answer in answers)


async def test_blank_lines_of_a_grammar_cost_nothing(renderer: VllmRenderer) -> None:
    """llguidance's conversion takes the square of them, 32 s here, and holds the GIL."""
    for grammar in ("\n" * 60_000 + " " * 60_000 + 'root ::= "a"', 'root ::= "a"' + " \n" * 60_000):
        rendered = await renderer.render_chat(
            {"messages": [{"role": "user", "content": "hi"}], "structured_outputs": {"grammar": grammar}}
        )
        assert "\\n" not in rendered.sampling.structured_outputs


async def test_the_size_of_places_does_not_grow_with_names() -> None:
    """A name of 64 KB above 20,000 schemas took 1.3 GB."""
    tracemalloc.start()
    try:
        prepared_schema({"properties": {"k" * 64_000: {"anyOf": [{}] * 20_000}}}, SpecialTokens({}))
        assert tracemalloc.get_traced_memory()[1] < 64 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("tag", "reason"),
    [
        ({"structures": [{"begin": "<a>"}], "triggers": ["<a"]}, "no structural tag: .*`end`"),
        ({"structures": [{"begin": "<b>", "end": ""}], "triggers": ["<a"]}, "no trigger begins '<b>'"),
        ({"format": {"type": "tag", "begin": "<a>"}}, "no structural tag: .*required"),
        ({"format": {"type": "nothing"}}, "no structural tag: "),
        ({}, "no structural tag: format: Field required"),
    ],
)
async def test_what_is_no_structural_tag_is_refused_with_what_is_missing(
    renderer: VllmRenderer, tag: dict[str, Any], reason: str
) -> None:
    with pytest.raises(InvalidRequest, match=f"^structured_outputs: {reason}"):
        await grammar_for(renderer, structured_outputs={"structural_tag": json.dumps(tag)})
