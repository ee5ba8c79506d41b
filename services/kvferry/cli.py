"""The command `kvferry`. Exit codes: 0 done, 1 could not be done, 2 asked for wrongly, 130 interrupted."""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import click
import yaml
from rich.console import Console
from rich.markup import escape
from rich.table import Table

import kvferry
from kvferry import config as configuration
from kvferry.config import ClusterConfig
from kvferry.errors import ConfigError, KvferryError

P = ParamSpec("P")
R = TypeVar("R")

_INTERRUPTED_EXIT_CODE = 130


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(kvferry.__version__, prog_name="kvferry")
def main() -> None:
    """Serve large language models, prefill and decode apart."""


def _reported(command: Callable[P, R]) -> Callable[P, R]:
    """An error of ours is one message on stderr and an exit code, never a traceback."""

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
    """Options that choose a configuration; the command gets it as `config`."""

    @click.option("--engine", type=click.Choice(["vllm", "sim"]), help="vllm: a real model. sim: its twin, in seconds.")
    @click.option("--model", help="`default`, a folder, or a hub id.")
    @click.option(
        "--config", "file", type=click.Path(path_type=Path), help="YAML file; environment and flags override it."
    )
    @click.option(
        "--set", "settings", multiple=True, metavar="KEY=VALUE", help="Any setting, such as decode.replicas=2."
    )
    @click.option("--etcd", multiple=True, metavar="HOST:PORT", help="A running etcd; without it one is started.")
    @click.option("--http-port", type=int, help="Where the gateway listens; 0: any free port.")
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
        if insecure:
            flags.append("insecure=true")
        return command(*args, config=configuration.load(file, flags=flags), **kwargs)

    return wrapper


@main.command()
@click.option("--ask/--no-ask", default=True, help="Send one request when ready and show where it went.")
@click.option("--timeout", "timeout_s", type=click.FloatRange(min=0, min_open=True), help="Seconds until ready.")
@_reported
@_configured
def up(config: ClusterConfig, ask: bool, timeout_s: float | None) -> None:
    """Start a cluster on this machine and leave it running."""
    from kvferry.local import cluster
    from kvferry.local.progress import ConsoleProgress

    console = Console()
    running = cluster.up(config, ConsoleProgress(console), with_first_answer=ask, timeout_s=timeout_s)
    if running.first_answer is not None:
        _print_first_answer(console, running.first_answer)
    body = {"model": running.config.served_name, "messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 32}
    click.echo(f"\nkvferry serves {running.config.served_name} at {running.url}\n")
    click.echo(
        f"  curl {running.url}/v1/chat/completions -H 'content-type: application/json' \\\n    -d '{json.dumps(body)}'"
    )
    click.echo("\nEnd it with: make down   (or: kvferry down)")


@main.command()
@click.option("--name", help="Which cluster; by default the configured one.")
@click.option("--json", "as_json", is_flag=True, help="For programs.")
@_reported
def status(name: str | None, as_json: bool) -> None:
    """Show members, roles and load."""
    from kvferry.local.run_folder import run_folder
    from kvferry.local.status import status as look

    seen = look(run_folder(_name(name)))
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
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("role", "member", "address", "pid", "up"):
        table.add_column(heading, no_wrap=True)
    for heading in ("running", "waiting", "pages", "generated", "ferried"):
        table.add_column(heading, justify="right", no_wrap=True)
    for member in seen.members:
        load = member.load
        numbers: tuple[str, ...] = ("", "", "", "", "")
        if load is not None:
            numbers = (
                f"{load.num_running}{' (draining)' if load.draining else ''}",
                str(load.num_waiting),
                f"{load.num_pages_used}/{load.num_pages}",
                str(load.num_generated_tokens),
                _bytes(load.ferried_bytes),
            )
        elif member.fault:
            numbers = (f"? {member.fault}", "", "", "", "")
        facts = (member.kind, member.member_id, member.address, str(member.pid), _duration(member.uptime_s))
        table.add_row(*map(escape, (*facts, *numbers)))
    # Into a file or a pipe the whole table goes, whatever width a terminal would have.
    console = Console()
    (console if console.is_terminal else Console(width=200)).print(table)


@main.command()
@click.argument("request_id")
@click.option("--name", help="Which cluster; by default the configured one.")
@click.option("--json", "as_json", is_flag=True, help="For programs.")
@_reported
def explain(request_id: str, name: str | None, as_json: bool) -> None:
    """Show why a request went where it went, with prices in milliseconds.

    REQUEST_ID is the id of an answer, or its x-request-id header.
    """
    from kvferry.local.explain import explain as ask
    from kvferry.local.run_folder import run_folder

    requests = ask(run_folder(_name(name)), request_id)
    if as_json:
        click.echo(json.dumps(requests, indent=2))
        return
    console = Console()
    console = console if console.is_terminal else Console(width=200)
    for request in requests:
        _print_explanation(console, request)


@main.command()
@click.option("--name", help="Which cluster; by default the configured one.")
@_reported
def down(name: str | None) -> None:
    """End the cluster on this machine and remove all it left, in whatever state it is."""
    from kvferry.local import cluster
    from kvferry.local.progress import ConsoleProgress
    from kvferry.local.run_folder import run_folder

    cleaned = cluster.down(run_folder(_name(name)), ConsoleProgress(Console()))
    if not cleaned.anything:
        click.echo("nothing was running")
        return
    files = len(cleaned.shared_memory_names)
    click.echo(f"ended {cleaned.num_processes} processes" + (f", removed {files} shared-memory files" if files else ""))


@main.command(name="config")
@_reported
@_configured
def show_config(config: ClusterConfig) -> None:
    """Print the effective configuration as YAML."""
    click.echo(yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False), nl=False)


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
    if answer.was_ferried:
        pages = "1 KV page" if answer.ferried_pages == 1 else f"{answer.ferried_pages} KV pages"
        line("ferried", f"{pages}, {_bytes(answer.ferried_bytes)}")
    else:
        line("ferried", "NOTHING: the decode worker computed the prompt itself; the logs of the prefill worker say why")


_PRICE_COLUMNS = ("queue_ms", "load_ms", "compute_ms", "others_ms", "ferry_ms", "streams_ms", "total_ms")


def _print_explanation(console: Console, request: dict[str, Any]) -> None:
    console.print(
        f"{request['request_id']}: {request['prompt_tokens_by_source']} prompt tokens by source, "
        f"{request['ferried_pages']} pages ferried"
        + (f", continued after {request['continued_after']} tokens" if request["continued_after"] else "")
        + (f"\nprefill failed: {request['prefill_failure']}" if request["prefill_failure"] else ""),
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


def _bytes(count: int) -> str:
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
