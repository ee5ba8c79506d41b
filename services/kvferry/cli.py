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
from rich.markup import escape
from rich.table import Table

import kvferry
from kvferry import config as configuration
from kvferry import tenant_commands
from kvferry.config import ROLES, ClusterConfig
from kvferry.errors import ConfigError, KvferryError
from kvferry.util import plain_yaml
from kvferry.util.addresses import join_host_port

P = ParamSpec("P")
R = TypeVar("R")

_INTERRUPTED_EXIT_CODE = 130


# Commands of other distributions, which register them as entry points of the group `kvferry.commands`.
_DISTRIBUTIONS = {"plan": "kvferry-plan", "quality": "kvferry-plan", "tier": "kvferry-keeper"}


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
        from kvferry.local.child import Interrupted

        try:
            return command(*args, **kwargs)
        except (Interrupted, KeyboardInterrupt):
            click.echo("kvferry: interrupted; nothing is left running", err=True)
            sys.exit(_INTERRUPTED_EXIT_CODE)
        except KvferryError as error:
            click.echo(f"kvferry: {error.message}", err=True)
            sys.exit(2 if isinstance(error, ConfigError) else 1)

    return wrapper


def _configured(command: Callable[..., R]) -> Callable[..., R]:
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


@main.command()
@click.option("--ask/--no-ask", default=True, help="Send one request when ready and show where it went.")
@click.option("--timeout", "timeout_s", type=click.FloatRange(min=0, min_open=True), help="Seconds until ready.")
@reported
@_configured
def up(config: ClusterConfig, ask: bool, timeout_s: float | None) -> None:
    """Start a cluster on this machine and leave it running."""
    from kvferry.local import cluster
    from kvferry.local.progress import ConsoleProgress
    from kvferry.local.status import status as look

    console = Console()
    running = cluster.up(config, ConsoleProgress(console), with_first_answer=ask, timeout_s=timeout_s)
    if running.first_answer is not None:
        _print_first_answer(console, running.first_answer)
    body = {"model": running.config.names[0], "messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 32}
    gateway = running.config.gateway
    grpc_says = f", gRPC at {join_host_port(gateway.host, gateway.grpc_port)}" if gateway.grpc_port is not None else ""
    click.echo(f"\nkvferry serves {', '.join(running.config.names)} at {running.url}{grpc_says}\n")
    options = " -H 'content-type: application/json'"
    if gateway.wants_bearer:
        options += ' -H "authorization: Bearer $KVFERRY_API_KEY"'
    click.echo(f"  curl {running.url}/v1/chat/completions{options} \\\n    -d '{json.dumps(body)}'")
    if gateway.tenants_in_etcd:
        click.echo("\nMake a tenant with a key: kvferry tenant create NAME --key NAME")
    if config.tier.volumes:
        _print_warnings(look(running.folder).warnings)
    click.echo("\nEnd it with: make down   (or: kvferry down)")


def _print_warnings(warnings: Sequence[str]) -> None:
    for warning in warnings:
        click.echo(f"kvferry: warning: {warning}", err=True)


@main.command()
@click.option("--name", help="Which cluster; by default the configured one.")
@click.option("--json", "as_json", is_flag=True, help="For programs.")
@reported
def status(name: str | None, as_json: bool) -> None:
    """Show members, roles and load."""
    from kvferry.local.run_folder import named_folder
    from kvferry.local.status import status as look

    seen = look(named_folder(name, _name(name)))
    if as_json:
        click.echo(json.dumps(seen.as_json(), indent=2))
        return
    click.echo(
        f"{seen.name}  {seen.url}  {seen.engine} engine, model {seen.model}, up {_duration(seen.uptime_s)}, "
        f"etcd {', '.join(seen.etcd_endpoints)}"
    )
    if seen.fault:
        click.echo(f"members unknown: {seen.fault}")
        return
    table = plain_table(
        ("role", "member", "address", "pid", "up"), ("running", "waiting", "pages", "generated", "ferried")
    )
    for member in seen.members:
        load = member.load
        numbers: tuple[str, ...] = ("", "", "", "", "")
        if load is not None:
            numbers = (
                f"{load.num_running}{' (draining)' if load.draining else ''}",
                str(load.num_waiting),
                f"{load.num_pages_used}/{load.num_pages}",
                str(load.num_generated_tokens),
                format_bytes(load.ferried_bytes),
            )
        elif member.fault:
            numbers = (f"? {member.fault}", "", "", "", "")
        kind = "model" if member.is_of_entry else "pool"
        role = f"{member.kind} of {kind} {member.pool}" if member.pool else member.kind
        facts = (role, member.member_id, member.address, str(member.pid), _duration(member.uptime_s))
        table.add_row(*map(escape, (*facts, *numbers)))
    print_wide(table)
    _print_warnings(seen.warnings)


@main.command()
@click.argument("request_id")
@click.option("--name", help="Which cluster; by default the configured one.")
@click.option("--json", "as_json", is_flag=True, help="For programs.")
@reported
def explain(request_id: str, name: str | None, as_json: bool) -> None:
    """Show why a request went where it went, with prices in milliseconds.

    REQUEST_ID is the id of an answer, or its x-request-id header.
    """
    from kvferry.local.explain import explain as ask
    from kvferry.local.run_folder import named_folder

    requests = ask(named_folder(name, _name(name)), request_id)
    if as_json:
        click.echo(json.dumps(requests, indent=2))
        return
    console = Console()
    console = console if console.is_terminal else Console(width=200)
    for request in requests:
        _print_explanation(console, request)


@main.command()
@click.option("--name", help="Which cluster; by default the configured one.")
@reported
def down(name: str | None) -> None:
    """End the cluster on this machine and remove all it left, in whatever state it is."""
    from kvferry.local import cluster
    from kvferry.local.progress import ConsoleProgress
    from kvferry.local.run_folder import named_folder

    cleaned = cluster.down(named_folder(name, _name(name)), ConsoleProgress(Console()))
    if not cleaned.anything:
        click.echo("nothing was running")
        return
    files = len(cleaned.shared_memory_names)
    click.echo(f"ended {cleaned.num_processes} processes" + (f", removed {files} shared-memory files" if files else ""))


@main.command(name="config")
@click.option("--vllm", "role", type=click.Choice(ROLES), help="Print this role's vLLM command line instead.")
@click.option("--entry", default="", help="With --vllm: the name of an entry of `models`.")
@reported
@_configured
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


main.add_command(tenant_commands.tenant)


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


def _name(given: str | None) -> str:
    return configuration.load(flags=[f"name={json.dumps(given)}"] if given is not None else []).name


def _print_first_answer(console: Console, answer: Any) -> None:
    def line(label: str, text: str) -> None:
        console.print(f"  [dim]{label:<10}[/] {escape(text)}", highlight=False, soft_wrap=True)

    console.print()
    line("question", answer.question)
    line("answer", answer.answer)
    line(
        "TTFT", f"{answer.ttft_s * 1000:.0f} ms ({answer.total_s * 1000:.0f} ms for {answer.completion_tokens} tokens)"
    )
    line("prefilled", f"{answer.prefill_worker or '(nobody)'} ({answer.prompt_tokens} prompt tokens)")
    line("decoded", answer.decode_worker)
    if answer.was_transferred:
        pages = "1 KV page" if answer.transferred_pages == 1 else f"{answer.transferred_pages} KV pages"
        line("ferried", f"{pages}, {format_bytes(answer.transferred_bytes)}")
    else:
        line("ferried", "NOTHING: the decode worker computed the prompt itself; the logs of the prefill worker say why")


_PRICE_COLUMNS = ("queue_ms", "load_ms", "compute_ms", "others_ms", "ferry_ms", "streams_ms", "total_ms")


def _sources(request: dict[str, Any]) -> str:
    sources = request["prompt_tokens_by_source"]
    tiers = request.get("cached_prompt_tokens_by_tier")
    if tiers is None:  # of a gateway or worker of an earlier release
        brought = f"{sources['external_kv_transfer']} by a KV transfer, from its CPU tier or from a volume"
    else:
        brought = f"{tiers['ferry']} by a KV transfer, {tiers['cpu']} from its CPU tier, {tiers['volume']} from volumes"
    return (
        f"prompt tokens: {sources['local_compute']} were computed by the decode worker, "
        f"{sources['local_cache_hit']} cached in its engine, {brought}"
    )


def _print_explanation(console: Console, request: dict[str, Any]) -> None:
    console.print(
        f"{request['request_id']}: {_sources(request)}, {request['ferried_pages']} pages ferried"
        + (f", in pool {request['pool']}" if request.get("pool") else "")
        + (f", continued after {request['continued_after']} tokens" if request["continued_after"] else "")
        + (f", preempted {request['num_preemptions']} times" if request.get("num_preemptions") else "")
        + (f"\nlost under it: {', '.join(request['lost_workers'])}" if request.get("lost_workers") else "")
        + (f"\nprefill failed: {request['prefill_failure']}" if request["prefill_failure"] else "")
        + (f"\nno pages were exchanged: {request['unequal_pages']}" if request.get("unequal_pages") else "")
        + (f"\nended with an error: {request['error_code']}" if request.get("error_code") else ""),
        highlight=False,
    )
    for i, choice in enumerate(request["choices"]):
        title = f"decision {i + 1}: {choice['reason']}"
        if "price" not in choice:
            console.print(f"{title}: prefill {choice['prefill'] or '(nobody)'}, decode {choice['decode']}")
            continue
        table = Table(
            title=f"{title}, first token expected in {choice['expected_ttft_ms']:.0f} ms", title_justify="left"
        )
        for heading in ("", "prefill", "decode"):
            table.add_column(heading, no_wrap=True)
        for heading in ("held", *(name.removesuffix("_ms") for name in _PRICE_COLUMNS)):
            table.add_column(heading, justify="right", no_wrap=True)
        for mark, price in (("chosen", choice["price"]), *(("", price) for price in choice["runners_up"])):
            held = "+".join(f"{tokens} {tier}" for tier, tokens in price["matched"].items() if tokens) or "0"
            numbers = (f"{price[name]:.1f}" for name in _PRICE_COLUMNS)
            table.add_row(mark, escape(price["prefill"] or "(alone)"), escape(price["decode"]), held, *numbers)
        console.print(table)
        console.print("[dim]milliseconds; held in tokens[/]")


def format_bytes(count: int) -> str:
    if count < 1024:
        return f"{count} B"
    value = float(count)
    for unit in ("KiB", "MiB", "GiB", "TiB"):
        value /= 1024
        if value < 1024:
            return f"{value:.1f} {unit}"
    return f"{value / 1024:.1f} PiB"


def _duration(seconds: float) -> str:
    whole = int(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


if __name__ == "__main__":
    main()
