"""Grammars of structured outputs as engines get them."""

from __future__ import annotations

import functools
import json
import logging
import re
from collections import deque
from collections.abc import Iterator
from typing import Any, Final

from kvferry.engine.vllm.rendering.structural_tags import FORMATS, SpecialTokens, lark_of
from kvferry.errors import InvalidRequest

log = logging.getLogger(__name__)

# A small model that may add any white space adds line ends until its answer is cut.
_COMPACT: Final = {"whitespace_flexible": False, "key_separator": ": ?", "item_separator": ", ?"}
_UNKNOWN_KEYWORDS = re.compile(r"Unimplemented keys: (\[.*\])")
_MAX_EBNF_RULES = 1000
_MAX_POINTER_CHARS = 200
_ONE_OF = "oneOf constraints are not supported"
_NAMED_SCHEMAS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_SCHEMAS = (
    "items", "additionalItems", "additionalProperties", "not", "if", "then", "else", "contains", "propertyNames",
    "unevaluatedItems", "unevaluatedProperties",
)  # fmt: skip


def special_tokens_of(tokenizer: Any) -> SpecialTokens:
    """Return the special tokens of a Hugging Face tokenizer."""
    added = getattr(tokenizer, "added_tokens_decoder", {})
    return SpecialTokens({token.content: token_id for token_id, token in added.items() if token.special})


def prepared_spec(spec: str, special_tokens: SpecialTokens) -> str:
    """Return a Sampling's `structured_outputs` in a form that vLLM's guidance backend enforces.

    Raises InvalidRequest, without the field's name.
    """
    values = json.loads(spec)
    prepare = functools.partial(prepared_schema, special_tokens=special_tokens)
    try:
        if "structural_tag" in values:
            return json.dumps({"grammar": lark_of(json.loads(values["structural_tag"]), special_tokens, prepare)})
        if "json_object" in values:
            return json.dumps({"json": prepare({"type": "object"})})
        if "grammar" in values:
            return json.dumps({**values, "grammar": _without_blank_lines(values["grammar"])})
        if "json" not in values:
            return spec
        schema = json.loads(values["json"]) if isinstance(values["json"], str) else values["json"]
        if values.get("disable_additional_properties"):
            from vllm.v1.structured_output.backend_guidance import process_for_additional_properties

            schema = process_for_additional_properties(schema)
        return json.dumps({"json": prepare(schema)})
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        # A value has a type that no schema's or tag's value has.
        log.debug("a client's grammar", exc_info=True)
        raise InvalidRequest(f"it is no valid schema or tag ({type(error).__name__})") from None


def _without_blank_lines(grammar: str) -> str:
    """Raises InvalidRequest for more rules than llguidance's conversion of EBNF takes in a moment."""
    # Its regexes take the square of a run of white space, and its loops the square of the rules, with the GIL.
    if grammar.count("::=") > _MAX_EBNF_RULES:
        raise InvalidRequest(
            f"{grammar.count('::=')} rules of EBNF are too many; at most {_MAX_EBNF_RULES} are allowed"
        )
    return "\n".join(line for line in grammar.split("\n") if line.strip())


def grammar_of(spec: str) -> str:
    """Return the grammar that vLLM's guidance backend makes of a Sampling's `structured_outputs`.

    Raises InvalidRequest, without the field's name.
    """
    from vllm.exceptions import VLLMValidationError
    from vllm.v1.structured_output.backend_guidance import serialize_guidance_grammar
    from vllm.v1.structured_output.request import get_structured_output_key

    from kvferry.engine.vllm.sampling import structured_from_json

    try:
        params = structured_from_json(spec)
        assert params is not None
        return str(serialize_guidance_grammar(*get_structured_output_key(params)))
    except (ValueError, KeyError, TypeError, IndexError, RecursionError, VLLMValidationError) as error:
        raise InvalidRequest(str(error).strip().partition("\n")[0] or "it is no valid grammar") from None


def prepared_schema(schema: Any, special_tokens: SpecialTokens) -> Any:
    """Return a copy for answers without needless white space. Raises InvalidRequest for a text with a special token."""
    copy = json.loads(json.dumps(schema))
    for each, _ in _subschemas(copy):
        # llguidance does not know these, which restrict nothing.
        if isinstance(each.get("format"), str) and each["format"] not in FORMATS:
            del each["format"]
        if each.get("uniqueItems") is False:
            del each["uniqueItems"]
        texts = [*_listed(each.get("enum")), each.get("const"), *_listed(each.get("properties"))]
        # llguidance would force the token, and then refuse it.
        search = special_tokens.pattern.search
        if found := next((found for text in texts if isinstance(text, str) and (found := search(text))), None):
            raise InvalidRequest(f"no text of a schema may have the special token {found[0]!r}")
    if copy is True:
        copy = {}
    if isinstance(copy, dict):
        copy["x-guidance"] = _COMPACT
    return copy


def _listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | dict) else []


def with_place(reason: str, made: str) -> str:
    """Return llguidance's reason with the place of the keywords that it names.

    `made` is `prepared_spec`'s.
    """
    if reason.startswith("panic: "):
        return "its grammar is too large"
    found, is_one_of = _UNKNOWN_KEYWORDS.search(reason), _ONE_OF in reason
    if not (found or is_one_of):
        return reason
    keywords = json.loads(found[1]) if found is not None else ["oneOf"]
    schema = json.loads(made).get("json")
    place = next((place for each, place in _subschemas(schema) if each.keys() & set(keywords)), None)
    where = f"#{_pointer(place)}: " if schema is not None else ""
    named = f"{where}{' and '.join(map(repr, keywords))} of JSON schemas cannot be enforced"
    return f"{named} where a value may fit several of its schemas; anyOf can" if is_one_of else named


_Place = tuple[Any, ...]  # the outer schema's place, and names


def _pointer(place: _Place | None) -> str:
    names: list[str] = []
    while place:
        place, *last = place
        names[:0] = [str(name).replace("~", "~0").replace("/", "~1") for name in last]
    return "".join(f"/{name}" for name in names)[:_MAX_POINTER_CHARS]


def _subschemas(schema: Any) -> Iterator[tuple[dict[str, Any], _Place]]:
    """Yield each schema in a schema, itself first, and its place."""
    waiting: deque[tuple[Any, _Place]] = deque([(schema, ())])
    while waiting:
        each, place = waiting.popleft()
        if not isinstance(each, dict):
            continue
        yield each, place
        for name in _NAMED_SCHEMAS:
            if isinstance(each.get(name), dict):
                waiting += [(value, (place, name, key)) for key, value in each[name].items()]
        for name in _LISTS:
            if isinstance(each.get(name), list):
                waiting += [(value, (place, name, i)) for i, value in enumerate(each[name])]
        waiting += [(each[name], (place, name)) for name in _SCHEMAS if isinstance(each.get(name), dict)]
