"""The commands `kvferry tenant`."""

from __future__ import annotations

import asyncio
import contextlib
import csv
import functools
import json
import math
import re
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, TypeVar

import click
import msgspec
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kvferry import config as configuration
from kvferry.config import MembershipConfig, check_new_pool_name
from kvferry.errors import ConfigError, KvferryError, UnavailableError
from kvferry.tenancy.limits import LimitName, Limits, shown
from kvferry.tenancy.records import MAX_TENANTS, KeyRecord, TenantRecord, check_key_name
from kvferry.tenancy.terms import CLASSES, DEFAULT_CLASS, TIERS, TierTerms, describe
from kvferry.util import plain_yaml, satellites
from kvferry_tenants.admin import TenantAdmin

R = TypeVar("R")

_UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_MAX_FILE_BYTES = 16 << 20
_POLL_S = 0.2


@click.group(help="Create and change tenants and their API keys, which gateways read from etcd.")
def tenant() -> None:
    pass


def _administering(command: Callable[..., Awaitable[R]]) -> Callable[..., R]:
    """Add options that choose a cluster; the command gets a TenantAdmin as `admin`."""

    @click.option("--name", "cluster", help="Which cluster; by default the configured one.")
    @click.option("--config", "file", type=click.Path(path_type=Path), help="YAML file with membership.endpoints.")
    @click.option("--set", "settings", multiple=True, metavar="KEY=VALUE", help="Any setting, such as membership.user.")
    @click.option("--etcd", multiple=True, metavar="HOST:PORT", help="The cluster's etcd.")
    @functools.wraps(command)
    def wrapper(
        *args: Any, cluster: str | None, file: Path | None, settings: Sequence[str], etcd: Sequence[str], **kwargs: Any
    ) -> R:
        from kvferry.membership.etcd import EtcdMembership

        async def run(membership_config: MembershipConfig) -> R:
            membership = EtcdMembership(membership_config)
            try:
                return await command(*args, admin=TenantAdmin(membership), **kwargs)
            finally:
                await membership.close()

        try:
            return asyncio.run(run(_membership(cluster, file, [*settings], etcd)))
        except KvferryError as error:
            click.echo(f"kvferry: {error.message}", err=True)
            sys.exit(2 if isinstance(error, ConfigError) else 1)

    return wrapper


def _waiting(command: Callable[..., R]) -> Callable[..., R]:
    return click.option(
        "--wait", "wait_s", type=click.FloatRange(min=0), default=30.0, show_default=True,
        help="Seconds to wait for keepers to remove the chunks.",
    )(command)  # fmt: skip


def _for_a_pool(command: Callable[..., R]) -> Callable[..., R]:
    return click.option(
        "--allow-unknown-pool", is_flag=True, help="Also a pool with which no running gateway is configured yet."
    )(command)


def _membership(cluster: str | None, file: Path | None, settings: list[str], etcd: Sequence[str]) -> MembershipConfig:
    if cluster is not None:
        settings.append(f"name={json.dumps(cluster)}")
    if etcd:
        settings.append(f"membership.endpoints={json.dumps(list(etcd))}")
    config = configuration.load(file, flags=settings)
    if config.membership.endpoints:
        return config.membership
    named_folder = satellites.named_folder()
    record = named_folder(cluster, config.name).record() if named_folder is not None else None
    if record is None:
        raise ConfigError("no cluster runs on this machine; name another one's etcd with --etcd or --config")
    local = configuration.parse(record.config)
    if not local.gateway.tenants_in_etcd:
        click.echo(
            "kvferry: warning: the gateways of this cluster do not read tenants, so keys and shares have no effect; "
            "start the cluster with --set gateway.tenants_in_etcd=true",
            err=True,
        )
    return local.membership


@tenant.command(help="Create the tenant NAME.")
@click.argument("name")
@click.option("--key", "key_name", help="Also make an API key of this name, and print it once.")
@click.option("--pool", default="", help="Pool of workers that alone serves it.")
@_for_a_pool
@_administering
async def create(admin: TenantAdmin, name: str, key_name: str | None, pool: str, allow_unknown_pool: bool) -> None:
    if key_name is not None:
        try:
            check_key_name(key_name)
        except ValueError as error:
            raise ConfigError(f"--key: {error}") from None
    if not allow_unknown_pool:
        await _require_pool(admin, _pool(pool))
    record = await admin.create(name, pool=_pool(pool))
    click.echo(f"created tenant {name}, epoch {record.epoch}", err=True)
    await _warn_of_pools(admin, record)
    if key_name is not None:
        click.echo(await admin.add_key(name, key_name))


@tenant.command(name="list", help="List all tenants.")
@click.option("--deleted", is_flag=True, help="Those that were deleted and are not forgotten instead.")
@click.option("--json", "as_json", is_flag=True, help="For programs.")
@_administering
async def list_tenants(admin: TenantAdmin, deleted: bool, as_json: bool) -> None:
    tenants = await admin.tenants()
    for name, fault in tenants.faults.items():
        click.echo(f"kvferry: the record of tenant {name[:64]!r} cannot be read: {fault}", err=True)
    listed = [record for record in tenants.records.values() if record.is_deleted == deleted]
    if as_json:
        click.echo(json.dumps([_shown(record) for record in listed], indent=2))
        return
    table = _table("tenant", "class", "share", "pool", "epoch", "keys")
    for record in listed:
        facts = (record.name, record.class_name, f"{record.share:g}", record.pool or "-", str(record.epoch))
        table.add_row(*facts, escape(", ".join(key.name for key in record.keys)) or "none")
    _print(table)


@tenant.command(help="Show the tenant NAME and its keys; not the keys themselves, which nothing holds.")
@click.argument("name")
@click.option("--json", "as_json", is_flag=True, help="For programs.")
@_administering
async def show(admin: TenantAdmin, name: str, as_json: bool) -> None:
    record = await admin.get(name)
    if as_json:
        click.echo(json.dumps(_shown(record), indent=2))
        return
    click.echo(f"tenant {record.name}, class {record.class_name}, share {record.share:g}, epoch {record.epoch}")
    click.echo(f"served by pool {record.pool} and no other" if record.pool else "no pool of its own")
    click.echo(_limits(record))
    for tier, terms in record.tiers.items():
        click.echo(f"{tier} tier: {describe(terms)}")
    table = _table("key", "made", "expires", "group", "operator")
    for key in record.keys:
        ends = "never" if key.expires_unix_s is None else _time(key.expires_unix_s)
        ends += " (expired)" if key.is_expired(time.time()) else ""
        made = _time(key.created_unix_s) if key.created_unix_s else "unknown"
        table.add_row(key.name, made, ends, key.group or "-", "yes" if key.operator else "no")
    _print(table)


@tenant.command(
    name="set", help="Change the class, the share or the pool of the tenant NAME, for requests from now on."
)
@click.argument("name")
@click.option("--class", "class_name", type=click.Choice(list(CLASSES)), help="Presets of the contract.")
@click.option("--share", type=float, help="Its share of a saturated cluster's work, relative to the shares of others.")
@click.option("--class-share", is_flag=True, help="The share of its class again.")
@click.option("--pool", help="Pool of workers that alone serves it; `none` takes it away.")
@_for_a_pool
@_administering
async def set_contract(
    admin: TenantAdmin,
    name: str,
    class_name: str | None,
    share: float | None,
    class_share: bool,
    pool: str | None,
    allow_unknown_pool: bool,
) -> None:
    if class_name is None and share is None and not class_share and pool is None:
        raise ConfigError("nothing to change: give --class, --share, --class-share or --pool")
    if share is not None and class_share:
        raise ConfigError("--share and --class-share exclude each other")
    if pool is not None and not allow_unknown_pool:
        await _require_pool(admin, _pool(pool))
    record = await admin.set_contract(
        name,
        class_name=class_name,
        share=share,
        keeps_share=not class_share,
        pool=None if pool is None else _pool(pool),
    )
    says_pool = f", pool {record.pool or 'none'}" if record.pool or pool is not None else ""
    click.echo(f"tenant {name} has class {record.class_name}, share {record.share:g}{says_pool}")
    if pool is not None:
        await _warn_of_pools(admin, record)


@tenant.command(
    name="set-limits", help="Change the limits of the tenant NAME, which hold over all gateways; `none` takes one away."
)
@click.argument("name")
@click.option("--requests-per-minute", metavar="NUMBER", help="A request of several choices counts as many.")
@click.option("--tokens-per-minute", metavar="NUMBER", help="Of prompts and of answers.")
@click.option("--max-choices", metavar="NUMBER", help="In flight.")
@_administering
async def set_limits(admin: TenantAdmin, name: str, **limits: str | None) -> None:
    wanted = {field: _limit(field, text) for field, text in limits.items() if text is not None}
    if not wanted:
        raise ConfigError("nothing to change: give --requests-per-minute, --tokens-per-minute or --max-choices")
    record = await admin.set_limits(name, wanted)
    click.echo(f"tenant {name}: {_limits(record)}")


@tenant.command(
    name="set-tier",
    help="Change what the tenant NAME may keep in a tier, as parts of what each node, or each engine, gives to it.",
)
@click.argument("name")
@click.argument("tier", type=click.Choice(TIERS))
@click.option("--floor", type=float, help="From 0 to 1: demand of other tenants cannot evict it.")
@click.option("--cap", type=float, help="From 0 to 1: beyond it own pages go first, once the tier is full.")
@click.option(
    "--ttl", metavar="AGE", help="Remove content that was not used for this long: 7d, 12h, 30m, 90s, or never."
)
@click.option("--borrow/--no-borrow", default=None, help="Whether it may hold more than its floor.")
@click.option("--of-class", is_flag=True, help="The terms of its class again.")
@_administering
async def set_tier(
    admin: TenantAdmin,
    name: str,
    tier: str,
    floor: float | None,
    cap: float | None,
    ttl: str | None,
    borrow: bool | None,
    of_class: bool,
) -> None:
    terms: dict[str, Any] = {"floor": floor, "cap": cap, "borrow": borrow}
    terms = {field: value for field, value in terms.items() if value is not None}
    if ttl is not None:
        terms["ttl_s"] = None if ttl == "never" else seconds_of(ttl)
    if bool(terms) == of_class:
        raise ConfigError("give --of-class, or one or more of --floor, --cap, --ttl, --borrow, --no-borrow")
    record = await admin.set_tier(name, tier, None if of_class else terms)
    click.echo(f"tenant {name} in the {tier} tier: {describe(record.tiers[tier])}")


@tenant.command(
    help="Delete the tenant NAME: its keys end within a second, its requests with 401, and no page of it is read again."
)
@click.argument("name")
@click.option("--yes", is_flag=True, help="Without a question.")
@_waiting
@_administering
async def delete(admin: TenantAdmin, name: str, yes: bool, wait_s: float) -> None:
    if not await admin.exists(name):
        raise ConfigError(f"there is no tenant {name!r}")
    if not yes:
        click.confirm(f"Delete the tenant {name}, its keys and all its pages?", abort=True)
    record = await admin.delete(name)
    click.echo(f"deleted tenant {name}; a new one of this name begins with epoch {record.epoch}")
    await _print_purges(admin, record, wait_s)


@tenant.command(
    name="reset-pages",
    help="Begin a new epoch of the tenant NAME: none of the pages that it has now is read again. Its keys stay.",
)
@click.argument("name")
@_waiting
@_administering
async def reset_pages(admin: TenantAdmin, name: str, wait_s: float) -> None:
    record = await admin.raise_epoch(name)
    click.echo(f"tenant {name} has epoch {record.epoch}")
    await _print_purges(admin, record, wait_s)


@tenant.command(
    help="Remove what is kept of the deleted tenant NAME, so that it no longer counts: once its chunks are removed."
)
@click.argument("name")
@_administering
async def forget(admin: TenantAdmin, name: str) -> None:
    await admin.forget(name)
    click.echo(f"forgot tenant {name}")
    click.echo("keys that a key file of gateways has for it count again", err=True)


@tenant.command(
    name="apply",
    help="Make tenants and keys those of a file: a list of {name, class, share, pool, "
    "limits: {requests_per_minute, tokens_per_minute, max_choices}, tiers: {volume: {floor, cap, borrow, ttl}}, "
    "keys: [{name, sha256, expires, operator, group}]}. "
    "Prints each change. Keys of a named tenant that the file leaves out end.",
)
@click.option("-f", "--file", "source", type=click.Path(path_type=Path), required=True, help="YAML; - for stdin.")
@click.option("--dry-run", is_flag=True, help="Only print what would change.")
@click.option("--prune", is_flag=True, help="Delete tenants that the file does not name.")
@_administering
async def apply_file(admin: TenantAdmin, source: Path, dry_run: bool, prune: bool) -> None:
    wanted = read_wanted(source)
    changes = await (admin.differences(wanted, prune=prune) if dry_run else admin.apply(wanted, prune=prune))
    for change in changes:
        click.echo(f"{change.tenant}: {change.line}")
    await _warn_of_pools(admin, *wanted)
    if not changes:
        click.echo("nothing to change")
    elif dry_run:
        click.echo("nothing was changed (--dry-run)", err=True)


@tenant.command(name="usage", help="Sum the usage records that gateways wrote (gateway.usage_dir).")
@click.option("--dir", "folder", type=click.Path(path_type=Path), required=True, help="gateway.usage_dir.")
@click.option("--from", "begin", type=click.DateTime(), help="In UTC, this time included.")
@click.option("--to", "end", type=click.DateTime(), help="In UTC, this time excluded.")
@click.option("--tenant", "name", help="Of one tenant only.")
@click.option("--csv", "as_csv", is_flag=True, help="A line for each day, tenant and outcome, for programs.")
def usage(folder: Path, begin: datetime | None, end: datetime | None, name: str | None, as_csv: bool) -> None:
    from kvferry.gateway.usage.usage_log import check_folder
    from kvferry_tenants.usage_totals import COLUMNS, totals

    begin_s, end_s = (None if each is None else each.replace(tzinfo=UTC).timestamp() for each in (begin, end))
    try:
        check_folder(folder)
        sums = totals(folder, begin_s, end_s, name)
    except ConfigError as error:
        click.echo(f"kvferry: {error.message}", err=True)
        sys.exit(2)
    except OSError as error:
        click.echo(f"kvferry: {error.filename}: {error.strerror}", err=True)
        sys.exit(1)
    if as_csv:
        writer = csv.writer(sys.stdout, lineterminator="\n")
        writer.writerow(COLUMNS)
        writer.writerows(sums.rows())
    else:
        table = _table(*COLUMNS)
        for row in sums.rows():
            table.add_row(*map(str, row))
        _print(table)
    if sums.num_bad:
        click.echo(f"{sums.num_bad} lines are no records; the first: {sums.first_bad}", err=True)


@tenant.group(help="Make and end API keys of a tenant.")
def key() -> None:
    pass


@key.command(
    name="new", help="Print a new key NAME of TENANT, once. Only its hash is kept; gateways take it within a second."
)
@click.argument("tenant_name", metavar="TENANT")
@click.argument("name")
@click.option("--expires", metavar="AGE", help="For example 90d, 12h, 30m. Without it the key does not expire.")
@click.option("--operator", is_flag=True, help="Also lets it read metrics of all tenants and the list of targets.")
@click.option("--group", default="", help="Keys of other groups share no pages with this one.")
@_administering
async def new_key(
    admin: TenantAdmin, tenant_name: str, name: str, expires: str | None, operator: bool, group: str
) -> None:
    ends_s = None if expires is None else time.time() + seconds_of(expires)
    click.echo(await admin.add_key(tenant_name, name, expires_unix_s=ends_s, operator=operator, group=group))


@key.command(help="Print a key NEW with the rights of the key NAME of TENANT, which ends after the overlap.")
@click.argument("tenant_name", metavar="TENANT")
@click.argument("name")
@click.argument("new_name", metavar="NEW")
@click.option("--overlap", default="1d", show_default=True, metavar="AGE", help="How long the old key still works.")
@click.option("--expires", metavar="AGE", help="Of the new key, or `never`; needed where the old one has an end.")
@_administering
async def rotate(
    admin: TenantAdmin, tenant_name: str, name: str, new_name: str, overlap: str, expires: str | None
) -> None:
    ends_s = None if expires is None else math.inf if expires == "never" else time.time() + seconds_of(expires)
    click.echo(await admin.rotate_key(tenant_name, name, new_name, seconds_of(overlap), expires_unix_s=ends_s))


@key.command(help="End the key NAME of TENANT. Requests that it began go on.")
@click.argument("tenant_name", metavar="TENANT")
@click.argument("name")
@_administering
async def revoke(admin: TenantAdmin, tenant_name: str, name: str) -> None:
    await admin.revoke_key(tenant_name, name)
    click.echo(f"revoked key {name} of tenant {tenant_name}")


async def _print_purges(admin: TenantAdmin, record: TenantRecord, wait_s: float) -> None:
    """Print what keepers removed from their volumes, once all have, or the time is up."""
    ends_s = time.monotonic() + wait_s
    done, left = await admin.purges(record)
    while left and time.monotonic() < ends_s:
        await asyncio.sleep(_POLL_S)
        done, left = await admin.purges(record)
    if not (done or left):
        click.echo("no keeper serves a volume now; chunks that volumes have are removed when one does", err=True)
    for purge in done:
        click.echo(f"{purge.keeper_id} removed {purge.num_chunks} chunks from volume {purge.volume_id}")
    for keeper_id, volume_id in left:
        click.echo(f"{keeper_id} has not yet removed chunks from volume {volume_id}", err=True)


def seconds_of(age: str) -> float:
    """Return the seconds of a text such as 90d. Raises ConfigError."""
    match = re.fullmatch(r"(\d{1,6})([smhd])", age)
    if match is None:
        raise ConfigError(f"{age!r}: expected a number of up to 6 digits with s, m, h or d, such as 90d")
    return int(match[1]) * _UNITS_S[match[2]]


def read_wanted(source: Path) -> list[TenantRecord]:
    """Return the tenants of a file for `apply`. Raises ConfigError naming the entry and the fault."""
    try:
        if str(source) == "-":
            content = sys.stdin.buffer.read(_MAX_FILE_BYTES + 1)
            plain_yaml.check_size(content, _MAX_FILE_BYTES)
        else:
            content = plain_yaml.read_bounded(source, _MAX_FILE_BYTES)
        entries = plain_yaml.load(content)
    except OSError as error:
        raise ConfigError(f"{source}: {error.strerror}") from None
    except ValueError as error:
        raise ConfigError(f"{source}: {error}") from None
    if not isinstance(entries, list) or len(entries) > MAX_TENANTS:
        raise ConfigError(f"{source}: expected a list of at most {MAX_TENANTS} tenants")
    wanted: list[TenantRecord] = []
    for number, entry in enumerate(entries, start=1):
        try:
            record = _wanted(entry)
            record.check()
        except (ConfigError, ValueError, TypeError) as error:
            raise ConfigError(f"{source}: entry {number}: {error}") from None
        if any(other.name == record.name for other in wanted):
            raise ConfigError(f"{source}: entry {number}: a tenant {record.name!r} comes before it")
        wanted.append(record)
    return wanted


class _WantedKey(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    sha256: str
    # A time without a zone would be this machine's.
    expires: Annotated[datetime, msgspec.Meta(tz=True)] | None = None
    operator: bool = False
    group: str = ""


class _WantedTerms(msgspec.Struct, forbid_unknown_fields=True):
    floor: float | msgspec.UnsetType = msgspec.UNSET
    cap: float | msgspec.UnsetType = msgspec.UNSET
    borrow: bool | msgspec.UnsetType = msgspec.UNSET
    ttl: str | msgspec.UnsetType = msgspec.UNSET


class _WantedLimits(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    requests_per_minute: float | None = None
    tokens_per_minute: float | None = None
    max_choices: int | None = None


class _WantedTenant(msgspec.Struct, forbid_unknown_fields=True, rename={"class_name": "class"}):
    name: str
    class_name: str = DEFAULT_CLASS
    share: float | None = None
    pool: str = ""
    keys: tuple[_WantedKey, ...] = ()
    tiers: dict[str, _WantedTerms] = {}
    limits: _WantedLimits = _WantedLimits()


def _wanted(entry: Any) -> TenantRecord:
    read = msgspec.convert(entry, _WantedTenant)
    keys = []
    for each in read.keys:
        ends = each.expires
        if ends is not None and ends.tzinfo is None:
            ends = ends.replace(tzinfo=UTC)  # YAML turns a time with a zone into one in UTC without
        keys.append(
            KeyRecord(
                name=each.name,
                sha256=each.sha256,
                expires_unix_s=None if ends is None else ends.timestamp(),
                operator=each.operator,
                group=each.group,
            )
        )
    limits = Limits(**msgspec.structs.asdict(read.limits))
    record = TenantRecord(
        name=read.name,
        keys=tuple(keys),
        class_name=read.class_name,
        own_share=read.share,
        limits=limits,
        pool=_pool(read.pool),
    )
    record.check()
    return msgspec.structs.replace(
        record, own_tiers={tier: _wanted_terms(record, tier, terms) for tier, terms in read.tiers.items()}
    )


def _wanted_terms(record: TenantRecord, tier: str, wanted: _WantedTerms) -> TierTerms:
    fields = {field: value for field, value in msgspec.structs.asdict(wanted).items() if value is not msgspec.UNSET}
    if (ttl := fields.pop("ttl", None)) is not None:
        fields["ttl_s"] = None if ttl == "never" else seconds_of(ttl)
    return msgspec.structs.replace(record.tiers.get(tier, TierTerms()), **fields)


def _pool(text: str) -> str:
    return "" if text == "none" else text


async def _require_pool(admin: TenantAdmin, pool: str) -> None:
    # `apply` only warns: files of tenants may come to a cluster before the configuration that has their pools.
    if not pool:
        return
    try:
        check_new_pool_name(pool)
    except ValueError as error:
        raise ConfigError(f"--pool: {error}") from None
    await admin.require_known_pool(pool)


async def _warn_of_pools(admin: TenantAdmin, *tenants: TenantRecord) -> None:
    with contextlib.suppress(UnavailableError):
        for pool in await admin.unknown_pools(tenant.pool for tenant in tenants):
            click.echo(
                f"no running gateway is configured with the pool {pool}: tenants of it get 503 until one is", err=True
            )


def _limit(field: str, text: str) -> float | None:
    if text == "none":
        return None
    try:
        return int(text) if field == LimitName.CHOICES.value else float(text)
    except ValueError:
        raise ConfigError(f"{field}: {text[:80]!r} is no number, nor `none`") from None


def _limits(record: TenantRecord) -> str:
    return ", ".join(f"{name.value} {shown(getattr(record.limits, name.value))}" for name in LimitName)


def _shown(record: TenantRecord) -> dict[str, Any]:
    shown: dict[str, Any] = msgspec.to_builtins(record)
    return {
        "name": record.name,
        "epoch": record.epoch,
        "class": record.class_name,
        "share": record.share,
        "pool": record.pool or None,
        "limits": msgspec.structs.asdict(record.limits),
        "tiers": msgspec.to_builtins({tier: msgspec.structs.asdict(terms) for tier, terms in record.tiers.items()}),
        "keys": shown.get("keys", []),
    }


def _time(unix_s: float) -> str:
    return datetime.fromtimestamp(unix_s, UTC).strftime("%Y-%m-%d %H:%M UTC")


def _table(*columns: str) -> Table:
    return Table(*columns, box=box.SIMPLE_HEAD, show_edge=False)


def _print(table: Table) -> None:
    console = Console()
    (console if console.is_terminal else Console(width=200)).print(table)
