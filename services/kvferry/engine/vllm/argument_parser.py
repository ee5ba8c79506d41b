"""Values of `engine.args` and variables of `engine.env`, as vLLM's own parser takes them."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from typing import Any, NoReturn

from kvferry.errors import ConfigError

_MAX_REASON = 500  # characters


def parsed(args: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments with vLLM's types. Raises ConfigError with vLLM's reason and the argument's key."""
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
        if name not in known:
            raise ConfigError(f"engine.args.{name}: vLLM takes no such argument on its command line")
        try:
            values[name] = getattr(parser.parse_args(words(name, value)), name)
        # Types of arguments raise whatever they like.
        except Exception as error:
            raise ConfigError(f"engine.args.{name}: vLLM refuses it: {str(error)[:_MAX_REASON]}") from None
    return values


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
            near = difflib.get_close_matches(name, environment_variables, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise ConfigError(f"engine.env.{name}: vLLM has no such variable{hint}")
