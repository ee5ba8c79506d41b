"""Values of `engine.args` and variables of `engine.env`, as vLLM's own parser and configuration classes take them."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import json
import re
from collections.abc import Iterable, Mapping
from typing import Any, NoReturn

from kvferry.arguments.vllm_arguments import LOAD_FORMAT, LOADER_OPTIONS
from kvferry.errors import ConfigError, printable

_MAX_REASON = 500  # characters
_MAX_BLAMED = 8  # arguments in one error


def parsed(args: Mapping[str, Any], keys: Mapping[str, str]) -> dict[str, Any]:
    """Return the arguments with vLLM's types. Raises ConfigError with vLLM's reason and the argument's key.

    `keys` is of `ClusterConfig.argument_keys`; an argument that it lacks was given in `engine.args`.
    """
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    class Parser(FlexibleArgumentParser):  # type: ignore[misc]
        def error(self, message: str) -> NoReturn:
            raise ValueError(message)

    if not args:
        return {}
    parser = AsyncEngineArgs.add_cli_args(Parser())
    known = {action.dest for action in parser._actions}
    values = {}
    for name, value in args.items():
        key = key_of(name, keys)
        if name not in known:
            raise ConfigError(f"{key}: vLLM's engine has no such argument{_nearest(name, known)}")
        try:
            values[name] = getattr(parser.parse_args(words(name, value)), name)
            reason = _why_no_field(name, values[name])
        # Types of arguments raise whatever they like.
        except Exception as error:
            reason = vllm_reason(error)
        if reason:
            raise ConfigError(f"{key}: vLLM refuses it: {reason}")
    if reason := _why_no_loader({name: values[name] for name in (LOAD_FORMAT, LOADER_OPTIONS) if name in values}):
        key = key_of(LOADER_OPTIONS if LOADER_OPTIONS in values else LOAD_FORMAT, keys)
        raise ConfigError(f"{key}: vLLM refuses it: {reason}")
    return values


def key_of(name: str, keys: Mapping[str, str]) -> str:
    return keys.get(name, f"engine.args.{name}")


def _why_no_field(name: str, value: Any) -> str:
    """Return why vLLM's configuration class refuses a value: its parser knows no ranges."""
    from pydantic import ValidationError

    for owner in _classes_by_field().get(name, ()):
        try:
            # Without the class's constructor, which may need a model.
            owner.__pydantic_validator__.validate_assignment(object.__new__(owner), name, value)
        except ValidationError as error:
            reasons = [each["msg"] for each in error.errors(include_url=False) if each["loc"][:1] == (name,)]
            if reasons:
                return "; ".join(reasons)[:_MAX_REASON]
        # Checks of several fields find the others missing.
        except Exception:
            continue
    return ""


def _why_no_loader(values: Mapping[str, Any]) -> str:
    """Return why vLLM reads no weights so: it would say it in the engine's own process, which then ends."""
    from vllm.config import LoadConfig
    from vllm.model_executor.model_loader import get_model_loader

    try:
        if values:
            get_model_loader(LoadConfig(**values))
    except Exception as error:
        return vllm_reason(error)
    return ""


@functools.cache
def _classes_by_field() -> Mapping[str, list[Any]]:
    from vllm import config

    found: dict[str, list[Any]] = {}
    for name in dir(config):
        owner = getattr(config, name)
        # A draft's settings share names with the model's.
        if (
            name.endswith("Config")
            and dataclasses.is_dataclass(owner)
            and name not in ("VllmConfig", "SpeculativeConfig")
        ):
            for field in dataclasses.fields(owner):
                found.setdefault(field.name, []).append(owner)
    return found


def vllm_reason(error: BaseException) -> str:
    """Return an error's own words, bounded, without pydantic's addresses."""
    from pydantic import ValidationError

    if isinstance(error, ValidationError):
        parts = [
            f"{'.'.join(map(str, each['loc']))}: {each['msg']}".lstrip(": ") for each in error.errors(include_url=False)
        ]
        text = f"{error.title}: {'; '.join(parts)}"
    else:
        text = str(error) or type(error).__name__
    text = re.sub(
        r" ?For further information visit https://errors\.pydantic\.dev\S*", "", printable(" ".join(text.split()))
    )
    return text if len(text) <= _MAX_REASON else text[: _MAX_REASON - 1] + "…"


def refusal(error: BaseException, args: Mapping[str, Any], keys: Mapping[str, str]) -> str:
    """Return vLLM's reason against a whole configuration, with the keys of the arguments it is about, or of all."""
    reason = vllm_reason(error)
    named = _named_by_pydantic(error, args) or [name for name in args if _is_named(name, args[name], reason)]
    blamed = [key_of(name, keys) for name in named or args]
    shown = ", ".join(blamed[:_MAX_BLAMED]) + (", …" if len(blamed) > _MAX_BLAMED else "")
    if named:
        return f"{shown}: vLLM refuses it: {reason}"
    what = "refuses this configuration" if isinstance(error, ValueError) else "did not start"
    return f"vLLM {what}: {reason}" + (f" (given to it: {shown})" if shown else "")


def _named_by_pydantic(error: BaseException, args: Mapping[str, Any]) -> list[str]:
    """Return the faulty fields among arguments, or the argument of their class."""
    from pydantic import ValidationError

    if not isinstance(error, ValidationError):
        return []
    owner = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", error.title).lower()
    if owner in args:
        return [owner]  # SpeculativeConfig has fields that are called as arguments are
    fields = {each["loc"][0] for each in error.errors(include_url=False) if each["loc"]}
    return [name for name in args if name in fields]


def _is_named(name: str, value: Any, reason: str) -> bool:
    """Whether a text is about an argument: names as `seed` and `quantization` are words of sentences too."""
    names, given = re.escape(name), re.escape(str(value)[:_MAX_REASON])
    forms = [
        rf"(['\"`]){names}\1",
        rf"--{names.replace('_', '-')}(?![\w-])",
        rf"(?<!\w){names}=['\"]?{given}(?!\w)",  # others are of a list of all values
    ]
    if "_" in name:
        forms.append(rf"(?<!\w){names}(?![\w=])")
    if any(re.search(form, reason) for form in forms):
        return True
    # As in "Unknown attention backend: 'X'".
    spoken, value_there = rf"\b{names.replace('_', '[ _-]')}\b", rf"(?<!\w){given}(?!\w)"
    is_short = isinstance(value, str | int | float) and not isinstance(value, bool) and value != ""
    return is_short and all(re.search(each, reason, re.IGNORECASE) for each in (spoken, value_there))


def words(name: str, value: Any) -> list[str]:
    """Return an argument as words of vLLM's command line."""
    option = "--" + name.replace("_", "-")
    if isinstance(value, bool):
        return [option if value else "--no-" + option[2:]]
    if isinstance(value, list) and not any(isinstance(each, dict | list) for each in value):
        return [option, *map(str, value)]
    return [option + "=" + (json.dumps(value) if isinstance(value, dict | list) else str(value))]


def check_variables(env: Mapping[str, str]) -> None:
    """Raises ConfigError for a variable that vLLM does not know."""
    from vllm.envs import environment_variables

    for name in env:
        if name not in environment_variables:
            raise ConfigError(f"engine.env.{name}: vLLM has no such variable{_nearest(name, environment_variables)}")


def _nearest(name: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, sorted(known), n=1)
    return f"; did you mean {near[0]}?" if near else ""
