"""Grammars of structured outputs as engines get them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

from kvferry.engine.vllm.structural_tags import lark_of
from kvferry.errors import InvalidRequest

# Of llguidance 1.7. The standard calls formats annotations: others restrict nothing.
FORMATS: Final = frozenset(
    {"date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "unknown", "uri", "uuid"}
)
# Free to add white space, a small model adds line ends until its answer is cut.
_COMPACT: Final = {"whitespace_flexible": False, "key_separator": ": ?", "item_separator": ", ?"}
_UNKNOWN_KEYWORDS = re.compile(r"^(?:\S+: )?Unimplemented keys: (\[.*\])")
_ONE_OF = "oneOf constraints are not supported"
_NAMED_SCHEMAS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_SCHEMAS = (
    "items", "additionalItems", "additionalProperties", "not", "if", "then", "else", "contains", "propertyNames",
    "unevaluatedItems", "unevaluatedProperties",
)  # fmt: skip


def special_tokens_of(tokenizer: Any) -> dict[str, int]:
    """Return the tokens of a Hugging Face tokenizer that match no text of a grammar, and their ids."""
    added = getattr(tokenizer, "added_tokens_decoder", {})
    return {token.content: token_id for token_id, token in added.items() if token.special}


def prepared_spec(spec: str, special_tokens: Mapping[str, int]) -> str:
    """Return a Sampling's `structured_outputs` in a form that vLLM's guidance backend enforces.

    Raises InvalidRequest, without the field's name.
    """
    values = json.loads(spec)
    if "structural_tag" in values:
        return json.dumps({"grammar": lark_of(json.loads(values["structural_tag"]), special_tokens, prepared_schema)})
    if "json_object" in values:
        return json.dumps({"json": prepared_schema({"type": "object"})})
    if "json" not in values:
        return spec
    schema = json.loads(values["json"]) if isinstance(values["json"], str) else values["json"]
    if values.get("disable_additional_properties"):
        from vllm.v1.structured_output.backend_guidance import process_for_additional_properties

        schema = process_for_additional_properties(schema)
    return json.dumps({"json": prepared_schema(schema)})


def grammar_of(spec: str) -> str:
    """Return the grammar that vLLM's guidance backend makes of a Sampling's `structured_outputs`.

    Raises InvalidRequest, without the field's name.
    """
    from vllm.v1.structured_output.backend_guidance import serialize_guidance_grammar
    from vllm.v1.structured_output.request import get_structured_output_key

    from kvferry.engine.vllm.sampling import structured_from_json

    params = structured_from_json(spec)
    assert params is not None
    try:
        return str(serialize_guidance_grammar(*get_structured_output_key(params)))
    except (ValueError, KeyError, TypeError) as error:
        raise InvalidRequest(str(error).strip().partition("\n")[0]) from None


def prepared_schema(schema: Any) -> Any:
    """Return a copy for answers without needless white space."""
    copy = json.loads(json.dumps(schema))
    for _, each in _subschemas(copy):
        # They restrict nothing, and llguidance does not know them.
        if isinstance(each.get("format"), str) and each["format"] not in FORMATS:
            del each["format"]
        if each.get("uniqueItems") is False:
            del each["uniqueItems"]
    if copy is True:
        copy = {}
    if isinstance(copy, dict):
        copy["x-guidance"] = _COMPACT
    return copy


def with_place(reason: str, spec: str) -> str:
    """Add the place of the keywords that llguidance's reason names."""
    found, schema = _UNKNOWN_KEYWORDS.search(reason), json.loads(spec).get("json")
    is_one_of = reason.startswith(_ONE_OF)
    if schema is None or not (found or is_one_of):
        return reason
    keywords = json.loads(found[1]) if found is not None else ["oneOf"]
    place = next((place for place, each in _subschemas(schema) if each.keys() & set(keywords)), "")
    named = f"#{place}: {' and '.join(map(repr, keywords))} of JSON schemas cannot be enforced"
    return f"{named} where a value may fit several of its schemas; anyOf can" if is_one_of else named


def _subschemas(schema: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each schema in a schema, itself first, and its place as a JSON pointer."""
    waiting = [("", schema)]
    while waiting:
        place, each = waiting.pop()
        if not isinstance(each, dict):
            continue
        yield place, each
        for name in _NAMED_SCHEMAS:
            if isinstance(each.get(name), dict):
                waiting += [(f"{place}/{name}/{key}", value) for key, value in each[name].items()]
        for name in _LISTS:
            if isinstance(each.get(name), list):
                waiting += [(f"{place}/{name}/{i}", value) for i, value in enumerate(each[name])]
        waiting += [(f"{place}/{name}", each[name]) for name in _SCHEMAS if isinstance(each.get(name), dict)]
