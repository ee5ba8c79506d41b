"""`kvferry tier`."""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

import click
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress

from kvferry.cli import format_bytes, plain_table, print_wide, reported
from kvferry.errors import ConfigError, TierError
from kvferry_keeper.store import fsck as checking
from kvferry_keeper.store.folder import FoundChunk
from kvferry_keeper.store.keyring import load_keyring
from kvferry_keeper.store.seal_counts import MAX_SEALS

R = TypeVar("R")


@click.group()
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
@reported
@_volume
def fsck(path: Path, as_json: bool, mend: bool, keys: Path | None) -> None:
    """Read and verify every chunk of the volume at PATH.

    Exit codes: 0 all chunks are whole, 1 some are not (moved or not), 2 it could not be checked.
    """
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
@reported
@_volume
def ls(path: Path, as_json: bool, limit: int) -> None:
    """List the chunks of the volume at PATH, newest first. With --json one object per line."""
    found = sorted(checking.list_chunks(path), key=lambda chunk: -chunk.modified_s)
    shown = found[: limit or None]
    if as_json:
        for one in shown:
            click.echo(json.dumps(_listed(one)))
        return
    table = plain_table(("tenant.epoch", "key", "route key", "layout", "writer", "written"), ("bytes",))
    for one in shown:
        facts = _listed(one)
        written = datetime.fromtimestamp(one.modified_s, UTC).strftime("%Y-%m-%d %H:%M:%S")
        key, layout = f"{facts['key'][:8]}…{facts['key'][-16:]}", facts["layout"][:12]
        names = (str(one.chunk.namespace), key, facts["route_key"], layout, one.writer)
        table.add_row(*map(escape, names), written, format_bytes(one.num_bytes))
    print_wide(table)
    if len(shown) < len(found):
        click.echo(f"and {len(found) - len(shown)} more; --limit 0 lists all")


@tier.command()
@reported
@_volume
def du(path: Path, as_json: bool) -> None:
    """Add up what takes room in the volume at PATH."""
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
    table = plain_table(("tenant.epoch", "model", "dtype", "layout", "writer"), ("chunks", "bytes"))
    for use in uses:
        layout = layouts.get(use.layout)
        model, dtype = (layout.model, layout.kv_cache_dtype) if layout is not None else ("?", "?")
        names = (str(use.namespace), model, dtype, use.layout.hex()[:12], use.writer)
        table.add_row(*map(escape, names), str(use.num_chunks), format_bytes(use.num_bytes))
    table.add_section()
    total = (sum(use.num_chunks for use in uses), sum(use.num_bytes for use in uses))
    table.add_row("all", "", "", "", "", str(total[0]), format_bytes(total[1]))
    if quarantined_bytes:
        table.add_row("in quarantine", "", "", "", "", "", format_bytes(quarantined_bytes))
    print_wide(table)


@tier.command(name="keys")
@click.option("--keys", type=click.Path(path_type=Path), help="The key file (tier.encryption_keys_file).")
@reported
@_volume
def show_keys(path: Path, as_json: bool, keys: Path | None) -> None:
    """Show what each sealing key has sealed in the volume at PATH. With --keys, which secret it is of."""
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
    table = plain_table(("fingerprint", "tenant.epoch", "secret"), ("chunks", "bytes", "sealed ever", "of budget"))
    for usage in usages:
        secret = "" if keys is None or not usage.fingerprint else str(usage.secret or "unknown")
        names = ", ".join(map(str, usage.namespaces[:3])) + (", …" if len(usage.namespaces) > 3 else "")
        table.add_row(
            *map(escape, (usage.fingerprint or "not sealed", names, secret)),
            str(usage.num_chunks),
            format_bytes(usage.num_bytes),
            str(usage.num_sealed) if usage.fingerprint else "",
            f"{usage.num_sealed / MAX_SEALS:.1%}" if usage.fingerprint else "",
        )
    print_wide(table)


@tier.command()
@click.option("--tenant", required=True, help="Whose chunks.")
@click.option("--epoch", type=click.IntRange(min=0), help="Of one epoch; by default of all.")
@reported
@_volume
def purge(path: Path, as_json: bool, tenant: str, epoch: int | None) -> None:
    """Remove a tenant's chunks from the volume at PATH, from quarantine too.

    Keepers may serve the volume meanwhile. Stop the tenant's requests before: engines write their pages again.
    """
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


def _print_report(report: checking.Report) -> None:
    if report.faults:
        table = plain_table(("cause", "file", "moved to"), ("bytes",))
        for fault in report.faults:
            table.add_row(*map(escape, (fault.cause, fault.path, fault.mended_to or "")), format_bytes(fault.num_bytes))
        print_wide(table, width=400)
        click.echo()
    said = f"{report.num_chunks} chunks, {format_bytes(report.num_bytes)}: "
    said += ", ".join(f"{count} {cause}" for cause, count in report.by_cause.items()) or "all whole"
    if report.num_unchecked:
        said += f"; {report.num_unchecked} sealed ones by their headers only (--keys)"
    click.echo(said)
