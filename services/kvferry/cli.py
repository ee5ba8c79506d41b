"""The command `kvferry`. Exit codes: 0 done, 1 failed, 2 bad usage or configuration, 130 interrupted."""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import click
from rich.console import Console
from rich.table import Table

import kvferry
from kvferry import config as configuration
from kvferry.config import ROLES, ClusterConfig
from kvferry.errors import ConfigError, Interrupted, KvferryError
from kvferry.util import plain_yaml

P = ParamSpec("P")
R = TypeVar("R")

_INTERRUPTED_EXIT_CODE = 130

# Commands of other distributions, which register them as entry points of the group `kvferry.commands`.
_DISTRIBUTIONS = {
    **dict.fromkeys(("down", "explain", "prove", "status", "up"), "kvferry-local"),
    **dict.fromkeys(("plan", "quality"), "kvferry-plan"),
    "tenant": "kvferry-tenants",
    "tier": "kvferry-keeper",
}


class _Commands(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted({*super().list_commands(ctx), *_DISTRIBUTIONS})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        command = super().get_command(ctx, cmd_name)
        if command is None and cmd_name in _DISTRIBUTIONS:
            for entry in entry_points(group="kvferry.commands", name=cmd_name):
                command = entry.load()
                assert isinstance(command, click.Command)
                return command
            return _not_installed(cmd_name, _DISTRIBUTIONS[cmd_name])
        return command


def _not_installed(name: str, distribution: str) -> click.Command:
    @click.command(
        name,
        short_help=f"Not installed: pip install {distribution}",
        add_help_option=False,
        context_settings={"ignore_unknown_options": True},
    )
    @click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
    def command(arguments: Sequence[str]) -> None:
        click.echo(f"kvferry: {name} is a command of the package {distribution}: pip install {distribution}", err=True)
        sys.exit(2)

    return command


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(kvferry.__version__, prog_name="kvferry")
def main() -> None:
    """Serve large language models, prefill and decode apart."""


def reported(command: Callable[P, R]) -> Callable[P, R]:
    """Print a KvferryError as one message on stderr, never as a traceback."""

    @functools.wraps(command)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return command(*args, **kwargs)
        except (Interrupted, KeyboardInterrupt):
            click.echo("kvferry: interrupted; nothing is left running", err=True)
            sys.exit(_INTERRUPTED_EXIT_CODE)
        except KvferryError as error:
            click.echo(f"kvferry: {error.message}", err=True)
            sys.exit(2 if isinstance(error, ConfigError) else 1)

    return wrapper


def configured(command: Callable[..., R]) -> Callable[..., R]:
    """Add the options that choose a configuration; the command gets it as `config`."""

    @click.option(
        "--engine", type=click.Choice(["vllm", "sim"]), help="vllm: a real model. sim: simulated, in seconds."
    )
    @click.option("--model", help="`default`, a folder, or a hub id.")
    @click.option(
        "--config", "file", type=click.Path(path_type=Path), help="YAML file; environment and flags override it."
    )
    @click.option(
        "--set", "settings", multiple=True, metavar="KEY=VALUE", help="Any setting, such as decode.replicas=2."
    )
    @click.option("--etcd", multiple=True, metavar="HOST:PORT", help="A running etcd; without it one is started.")
    @click.option("--http-port", type=int, help="Where the gateway listens; 0: any free port.")
    @click.option("--grpc-port", type=int, help="Where it answers gRPC; 0: any free port.")
    @click.option("--insecure", is_flag=True, help="Allow listeners that others can reach, without authentication.")
    @functools.wraps(command)
    def wrapper(
        *args: Any,
        engine: str | None,
        model: str | None,
        file: Path | None,
        settings: Sequence[str],
        etcd: Sequence[str],
        http_port: int | None,
        grpc_port: int | None,
        insecure: bool,
        **kwargs: Any,
    ) -> R:
        flags = list(settings)
        if engine is not None:
            flags.append(f"engine.kind={engine}")
        if model is not None:
            flags.append(f"model.path={json.dumps(model)}")
        if etcd:
            flags.append(f"membership.endpoints={json.dumps(list(etcd))}")
        if http_port is not None:
            flags.append(f"gateway.http_port={http_port}")
        if grpc_port is not None:
            flags.append(f"gateway.grpc_port={grpc_port}")
        if insecure:
            flags.append("insecure=true")
        return command(*args, config=configuration.load(file, flags=flags), **kwargs)

    return wrapper


@main.command(name="config")
@click.option("--vllm", "role", type=click.Choice(ROLES), help="Print this role's vLLM command line instead.")
@click.option("--entry", default="", help="With --vllm: the name of an entry of `models`.")
@reported
@configured
def show_config(config: ClusterConfig, role: str | None, entry: str) -> None:
    """Print the effective configuration as YAML."""
    from kvferry.engine.quality_report import check_quality_report
    from kvferry.engine.vllm.rendering.chat_template import read_chat_template

    entries = [each.name for each in config.models]
    if entry and role is None:
        raise click.UsageError("--entry needs --vllm prefill or --vllm decode")
    if entry and entry not in entries:
        raise ConfigError(f"--entry {entry[:64]!r}: the entries of `models` are: {', '.join(entries) or 'none'}")
    if role is not None and not entry and not config.serves_default:
        raise ConfigError(
            f"--vllm {role}: this cluster has no default model; choose one with --entry: {', '.join(entries)}"
        )
    for name in ("", *entries):
        check_quality_report(config.of_model(name))
        if config.engine.kind == "vllm":
            read_chat_template(config.of_model(name).model)
    if role is not None:
        from kvferry.engine.vllm.rendering.text_model import use_cpu_platform
        from kvferry.engine.vllm.start.command_line import command_line

        use_cpu_platform()
        click.echo(command_line(config, role, entry))
        return
    click.echo(plain_yaml.dump(config.model_dump(mode="json")), nl=False)


@main.group()
def model() -> None:
    """Prepare models."""


@model.command(name="manifest")
@click.argument("folder", type=click.Path(path_type=Path, exists=True, file_okay=False))
@reported
def write_manifest(folder: Path) -> None:
    """Write digests of a model's weights beside them, so that no machine has to read them all before it serves.

    Copy the file with the weights. Write it anew whenever they change: sizes and samples are compared with it.
    """
    from kvferry.engine.vllm.start.weights import write_manifest

    click.echo(f"wrote {write_manifest(folder)}")


@main.group()
def key() -> None:
    """Make API keys."""


@key.command(name="new")
@click.option("--tenant", required=True, help="Whose key: lower-case letters, digits and dashes.")
@click.option("--name", required=True, help="What to call it, to tell it from the tenant's other keys.")
@click.option("--file", "into", type=click.Path(path_type=Path), help="Where to add it; by default gateway.keys_file.")
@click.option("--operator", is_flag=True, help="Also lets it read metrics of all tenants and the list of targets.")
@click.option("--metrics", is_flag=True, help="Lets it read metrics and the list of targets, and nothing else.")
@reported
def new_key(tenant: str, name: str, into: Path | None, operator: bool, metrics: bool) -> None:
    """Print a new key, once, and add its hash to a file of keys.

    Gateways that use the file take the key within a second. To end a key, remove its line.
    """
    from kvferry.gateway.identity import key_file

    file = into or configuration.load().gateway.keys_file
    if file is None:
        raise ConfigError("--file is needed: no gateway.keys_file is configured (KVFERRY__GATEWAY__KEYS_FILE)")
    click.echo(key_file.new_key(file, tenant, name, operator=operator, metrics=metrics))


def plain_table(texts: Sequence[str], numbers: Sequence[str]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in texts:
        table.add_column(heading, no_wrap=True)
    for heading in numbers:
        table.add_column(heading, justify="right", no_wrap=True)
    return table


def print_wide(table: Table, width: int = 200) -> None:
    # Into a file or a pipe the whole table goes, whatever width a terminal would have.
    console = Console()
    (console if console.is_terminal else Console(width=width)).print(table)


def format_bytes(count: int) -> str:
    if count < 1024:
        return f"{count} B"
    value = float(count)
    for unit in ("KiB", "MiB", "GiB", "TiB"):
        value /= 1024
        if value < 1024:
            return f"{value:.1f} {unit}"
    return f"{value / 1024:.1f} PiB"


if __name__ == "__main__":
    main()
