"""The command `kvferry`. Exit codes: 0 done, 1 failed, 2 bad usage or configuration, 130 interrupted."""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import click
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress
from rich.table import Table

import kvferry
from kvferry import config as configuration
from kvferry import tenant_commands
from kvferry.config import ROLES, ClusterConfig
from kvferry.errors import ConfigError, KvferryError, TierError
from kvferry.util import plain_yaml
from kvferry.util.addresses import join_host_port

if TYPE_CHECKING:
    from kvferry.store.folder import FoundChunk
    from kvferry.store.fsck import Report

P = ParamSpec("P")
R = TypeVar("R")

_INTERRUPTED_EXIT_CODE = 130


# Commands of other distributions, which register them as entry points of the group `kvferry.commands`.
_DISTRIBUTIONS = {"plan": "kvferry-plan", "quality": "kvferry-plan"}


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


def _reported(command: Callable[P, R]) -> Callable[P, R]:
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
@_reported
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
@_reported
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
    table = _plain_table(
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
                _bytes(load.ferried_bytes),
            )
        elif member.fault:
            numbers = (f"? {member.fault}", "", "", "", "")
        kind = "model" if member.is_of_entry else "pool"
        role = f"{member.kind} of {kind} {member.pool}" if member.pool else member.kind
        facts = (role, member.member_id, member.address, str(member.pid), _duration(member.uptime_s))
        table.add_row(*map(escape, (*facts, *numbers)))
    _print_wide(table)
    _print_warnings(seen.warnings)


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
@_reported
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
@_reported
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
@_reported
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
@_reported
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


@main.group()
def tier() -> None:
    """Look at volumes: folders of chunks of KV pages."""


def _volume(command: Callable[..., R]) -> Callable[..., R]:
    """Make a command on a volume's folder. Its failure has exit code 2, because fsck's 1 means that it found faults."""

    @click.argument("path", type=click.Path(path_type=Path, exists=True, file_okay=False))
    @click.option("--json", "as_json", is_flag=True, help="For programs.")
    @functools.wraps(command)
    def wrapper(*args: Any, **kwargs: Any) -> R:
        try:
            return command(*args, **kwargs)
        except TierError as error:
            raise ConfigError(error.message) from error

    return wrapper


@tier.command()
@click.option("--mend", is_flag=True, help="Move bad files to quarantine. No keeper may serve the volume.")
@click.option(
    "--keys", type=click.Path(path_type=Path), help="File of secrets: without it sealed payloads are not checked."
)
@_reported
@_volume
def fsck(path: Path, as_json: bool, mend: bool, keys: Path | None) -> None:
    """Read and verify every chunk of the volume at PATH.

    Exit codes: 0 all chunks are whole, 1 some are not (moved or not), 2 it could not be checked.
    """
    from kvferry.store import fsck as checking
    from kvferry.store.keyring import load_keyring

    keyring = None if keys is None else load_keyring(keys)
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=as_json or not console.is_terminal) as bar:
        task = bar.add_task("chunks", total=checking.count_files(path))
        report = checking.verify_volume(path, keyring=keyring, mend=mend, advance=lambda: bar.advance(task))
    if as_json:
        click.echo(json.dumps(report.as_json(), indent=2))
    else:
        _print_report(report)
    if report.faults:
        sys.exit(1)


@tier.command()
@click.option("--limit", type=click.IntRange(min=0), default=40, show_default=True, help="0: all of them.")
@_reported
@_volume
def ls(path: Path, as_json: bool, limit: int) -> None:
    """List the chunks of the volume at PATH, newest first. With --json one object per line."""
    from kvferry.store import fsck as checking

    found = sorted(checking.list_chunks(path), key=lambda chunk: -chunk.modified_s)
    shown = found[: limit or None]
    if as_json:
        for one in shown:
            click.echo(json.dumps(_listed(one)))
        return
    table = _plain_table(("tenant.epoch", "key", "route key", "layout", "writer", "written"), ("bytes",))
    for one in shown:
        facts = _listed(one)
        written = datetime.fromtimestamp(one.modified_s, UTC).strftime("%Y-%m-%d %H:%M:%S")
        key, layout = f"{facts['key'][:8]}…{facts['key'][-16:]}", facts["layout"][:12]
        names = (str(one.chunk.namespace), key, facts["route_key"], layout, one.writer)
        table.add_row(*map(escape, names), written, _bytes(one.num_bytes))
    _print_wide(table)
    if len(shown) < len(found):
        click.echo(f"and {len(found) - len(shown)} more; --limit 0 lists all")


@tier.command()
@_reported
@_volume
def du(path: Path, as_json: bool) -> None:
    """Add up what takes room in the volume at PATH."""
    from kvferry.store import fsck as checking

    uses, layouts, quarantined_bytes = checking.disk_usage(path)
    if as_json:
        rows = [
            {
                "writer": use.writer,
                "layout": use.layout.hex(),
                "tenant": use.namespace.tenant,
                "epoch": use.namespace.epoch,
                "pages": use.num_chunks,
                "bytes": use.num_bytes,
            }
            for use in uses
        ]
        named = {digest.hex(): json.loads(layout.to_json()) for digest, layout in layouts.items()}
        click.echo(json.dumps({"uses": rows, "layouts": named, "quarantined_bytes": quarantined_bytes}, indent=2))
        return
    table = _plain_table(("tenant.epoch", "model", "dtype", "layout", "writer"), ("chunks", "bytes"))
    for use in uses:
        layout = layouts.get(use.layout)
        model, dtype = (layout.model, layout.kv_cache_dtype) if layout is not None else ("?", "?")
        names = (str(use.namespace), model, dtype, use.layout.hex()[:12], use.writer)
        table.add_row(*map(escape, names), str(use.num_chunks), _bytes(use.num_bytes))
    table.add_section()
    total = (sum(use.num_chunks for use in uses), sum(use.num_bytes for use in uses))
    table.add_row("all", "", "", "", "", str(total[0]), _bytes(total[1]))
    if quarantined_bytes:
        table.add_row("in quarantine", "", "", "", "", "", _bytes(quarantined_bytes))
    _print_wide(table)


@tier.command(name="keys")
@click.option("--keys", type=click.Path(path_type=Path), help="The key file (tier.encryption_keys_file).")
@_reported
@_volume
def show_keys(path: Path, as_json: bool, keys: Path | None) -> None:
    """Show what each sealing key has sealed in the volume at PATH. With --keys, which secret it is of."""
    from kvferry.store import fsck as checking
    from kvferry.store.keyring import load_keyring
    from kvferry.store.seal_counts import MAX_SEALS

    usages = checking.key_usage(path, None if keys is None else load_keyring(keys))
    if as_json:
        rows = [
            {
                "fingerprint": usage.fingerprint or None,
                "tenants": [str(namespace) for namespace in usage.namespaces],
                "pages": usage.num_chunks,
                "bytes": usage.num_bytes,
                "sealed": usage.num_sealed,
                "budget": MAX_SEALS,
                "secret": usage.secret,
            }
            for usage in usages
        ]
        click.echo(json.dumps({"keys": rows}, indent=2))
        return
    table = _plain_table(("fingerprint", "tenant.epoch", "secret"), ("chunks", "bytes", "sealed ever", "of budget"))
    for usage in usages:
        secret = "" if keys is None or not usage.fingerprint else str(usage.secret or "unknown")
        names = ", ".join(map(str, usage.namespaces[:3])) + (", …" if len(usage.namespaces) > 3 else "")
        table.add_row(
            *map(escape, (usage.fingerprint or "not sealed", names, secret)),
            str(usage.num_chunks),
            _bytes(usage.num_bytes),
            str(usage.num_sealed) if usage.fingerprint else "",
            f"{usage.num_sealed / MAX_SEALS:.1%}" if usage.fingerprint else "",
        )
    _print_wide(table)


@tier.command()
@click.option("--tenant", required=True, help="Whose chunks.")
@click.option("--epoch", type=click.IntRange(min=0), help="Of one epoch; by default of all.")
@_reported
@_volume
def purge(path: Path, as_json: bool, tenant: str, epoch: int | None) -> None:
    """Remove a tenant's chunks from the volume at PATH, from quarantine too.

    Keepers may serve the volume meanwhile. Stop the tenant's requests before: engines write their pages again.
    """
    from kvferry.store import fsck as checking

    num_chunks = checking.purge(path, tenant, epoch)
    told = f"removed {num_chunks} chunks of {tenant}" if num_chunks else f"no chunks of {tenant} are in {path}"
    click.echo(json.dumps({"removed": num_chunks}) if as_json else told)


def _listed(found: FoundChunk) -> dict[str, Any]:
    return {
        "key": found.chunk.key.hex(),
        "route_key": f"{found.chunk.route_key:016x}",
        "tenant": found.chunk.namespace.tenant,
        "epoch": found.chunk.namespace.epoch,
        "layout": found.layout.hex(),
        "writer": found.writer,
        "bytes": found.num_bytes,
        "modified_s": found.modified_s,
        "path": found.path,
    }


def _print_report(report: Report) -> None:
    if report.faults:
        table = _plain_table(("cause", "file", "moved to"), ("bytes",))
        for fault in report.faults:
            table.add_row(*map(escape, (fault.cause, fault.path, fault.mended_to or "")), _bytes(fault.num_bytes))
        _print_wide(table, width=400)
        click.echo()
    said = f"{report.num_chunks} chunks, {_bytes(report.num_bytes)}: "
    said += ", ".join(f"{count} {cause}" for cause, count in report.by_cause.items()) or "all whole"
    if report.num_unchecked:
        said += f"; {report.num_unchecked} sealed ones by their headers only (--keys)"
    click.echo(said)


def _plain_table(texts: Sequence[str], numbers: Sequence[str]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in texts:
        table.add_column(heading, no_wrap=True)
    for heading in numbers:
        table.add_column(heading, justify="right", no_wrap=True)
    return table


def _print_wide(table: Table, width: int = 200) -> None:
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
        line("ferried", f"{pages}, {_bytes(answer.transferred_bytes)}")
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
