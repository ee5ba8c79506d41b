"""Commands of one machine."""

from __future__ import annotations

import asyncio
import functools
import json
from collections.abc import Sequence
from typing import Any

import click
import msgspec
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kvferry import config as configuration
from kvferry.cli import configured, format_bytes, plain_table, print_wide, reported
from kvferry.config import ClusterConfig
from kvferry.errors import LocalError
from kvferry.util.addresses import join_host_port
from kvferry_local import cluster, proofs
from kvferry_local.explain import explain as ask
from kvferry_local.first_answer import FirstAnswer
from kvferry_local.progress import ConsoleProgress
from kvferry_local.run_folder import named_folder
from kvferry_local.status import NotRunning
from kvferry_local.status import status as look


@click.command()
@click.option("--ask/--no-ask", default=True, help="Send one request when ready and show where it went.")
@click.option("--timeout", "timeout_s", type=click.FloatRange(min=0, min_open=True), help="Seconds until ready.")
@reported
@configured
def up(config: ClusterConfig, ask: bool, timeout_s: float | None) -> None:
    """Start a cluster on this machine and leave it running."""
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


@click.command()
@click.option("--name", help="Which cluster; by default the configured one.")
@click.option("--json", "as_json", is_flag=True, help="For programs.")
@reported
def status(name: str | None, as_json: bool) -> None:
    """Show members, roles and load."""
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
    for proof in seen.proofs:
        click.echo(proof.line())
    _print_warnings(seen.warnings)


@click.command()
@click.option("--name", help="Which cluster; by default the configured one.")
@click.option("--again", is_flag=True, help="Prove anew what has a result; meanwhile decode workers compute prompts.")
@click.option(
    "--timeout", default=600.0, type=click.FloatRange(0, min_open=True), help="Seconds until there are results."
)
@click.option("--json", "as_json", is_flag=True, help="For programs.")
@reported
@configured
def prove(config: ClusterConfig, name: str | None, again: bool, timeout: float, as_json: bool) -> None:
    """Show whether KV pages survive the transfer between the engines of a running cluster.

    The cluster's gateways prove it. The exit code is 0 only if every way is proven.
    """
    record = named_folder(name, config.name if name is None else name).record()
    if record is None and not config.membership.endpoints:
        raise NotRunning("no cluster runs here, and no membership.endpoints are configured; `kvferry up` starts one")
    cluster_config = config if record is None else configuration.parse(record.config)
    show = functools.partial(click.echo, err=True)
    found = asyncio.run(proofs.prove(cluster_config, again=again, timeout_s=timeout, on_progress=show))
    if as_json:
        click.echo(json.dumps([msgspec.to_builtins(each) for each in found], indent=2))
    else:
        for each in found:
            click.echo(each.line())
            for line in proofs.bars(each):
                click.echo(line)
    if not found:
        raise LocalError(
            "nothing is to be proven: no prefill and decode workers that could exchange pages are registered, or "
            "engine.proof is off, as it is for simulated engines"
        )
    if not all(each.is_proven for each in found):
        raise LocalError("not every transfer is proven")


@click.command()
@click.argument("request_id")
@click.option("--name", help="Which cluster; by default the configured one.")
@click.option("--json", "as_json", is_flag=True, help="For programs.")
@reported
def explain(request_id: str, name: str | None, as_json: bool) -> None:
    """Show why a request went where it went, with prices in milliseconds.

    REQUEST_ID is the id of an answer, or its x-request-id header.
    """
    requests = ask(named_folder(name, _name(name)), request_id)
    if as_json:
        click.echo(json.dumps(requests, indent=2))
        return
    console = Console()
    console = console if console.is_terminal else Console(width=200)
    for request in requests:
        _print_explanation(console, request)


@click.command()
@click.option("--name", help="Which cluster; by default the configured one.")
@reported
def down(name: str | None) -> None:
    """End the cluster on this machine and remove all it left, in whatever state it is."""
    cleaned = cluster.down(named_folder(name, _name(name)), ConsoleProgress(Console()))
    if not cleaned.anything:
        click.echo("nothing was running")
        return
    files = len(cleaned.shared_memory_names)
    click.echo(f"ended {cleaned.num_processes} processes" + (f", removed {files} shared-memory files" if files else ""))


def _name(given: str | None) -> str:
    return configuration.load(flags=[f"name={json.dumps(given)}"] if given is not None else []).name


def _print_first_answer(console: Console, answer: FirstAnswer) -> None:
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
        line("ferried", f"nothing: the decode worker computed the prompt itself; {_why_nothing(answer)}")


def _why_nothing(answer: FirstAnswer) -> str:
    if answer.reason == "unproven":
        return "until it is proven that pages survive the transfer (`kvferry prove` waits for it)"
    return "the logs of the prefill worker say why"


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
        + (f", {state} now" if (state := request.get("state", "ended")) != "ended" else "")
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


def _duration(seconds: float) -> str:
    whole = int(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"
