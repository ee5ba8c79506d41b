"""Which transfers of a cluster are proven, from its members and the records of proofs."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

from kvferry.config import ClusterConfig, entry_of, is_of_entry
from kvferry.config.engine import Proof
from kvferry.errors import LocalError, printable
from kvferry.gateway.identity.tenants import read_secret
from kvferry.membership.base import Member, MemberKind, Record
from kvferry.membership.etcd import EtcdMembership
from kvferry.proof.certificates import FOLDER, Certificate, Certificates, Way, can_transfer, key_of, kind_of
from kvferry.proof.verdict import Distances, Outcome

PENDING: Final = "pending"  # no gateway has begun, or could make a proof
UNDER_WAY: Final = "under way"
_POLL_S: Final = 0.5
_BAR: Final = 24  # characters


@dataclass(frozen=True, slots=True)
class ProofStatus:
    """One way between engines of two kinds; field names are those of `--json`."""

    key: str
    way: str
    pool: str
    model: str
    prefill_device: str
    decode_device: str
    outcome: str
    reason: str = ""
    took_s: float = 0.0
    distance: float | None = None  # the largest of transferred pages
    wrong_from: float | None = None  # the smallest of wrong pages
    unix_s: float = 0.0
    limits: Mapping[str, float] = field(default_factory=dict)
    distances: tuple[Distances, ...] = ()
    needed: Proof = "required"  # engine.proof

    @property
    def is_proven(self) -> bool:
        return self.outcome == Outcome.PROVEN

    def line(self) -> str:
        """Say it in one line."""
        devices = " to ".join(dict.fromkeys((self.prefill_device, self.decode_device)))
        figures = ""
        if self.distance is not None and self.wrong_from is not None:
            figures = f": transferred pages differ by {self.distance:.4g}, wrong ones by {self.wrong_from:.4g} or more"
        use = (
            "pages are transferred (engine.proof: report), though"
            if self.needed == "report"
            else "decode workers compute prompts:"
        )
        reason = f"; {use} {self.reason}" if self.reason and not self.is_proven else ""
        where = f" in pool {self.pool}" if self.pool else ""
        return printable(f"{self.way}{where} {self.outcome} on {devices or 'unknown devices'}{figures}{reason}")


def proofs_of(
    config: ClusterConfig, members: Collection[Member], records: Mapping[str, Record]
) -> tuple[ProofStatus, ...]:
    """Return one for each pool and kind of way that has to be proven."""
    file = config.gateway.salt_secret_file
    certificates = Certificates(None, read_secret(file) if file is not None and file.exists() else b"")
    found: dict[tuple[str, str], ProofStatus] = {}
    for prefill, decode in _pairs(members):
        if (needed := _needed_proof(config, decode.pool)) == "off":
            continue
        for way in Way:
            key = key_of(kind_of(prefill), kind_of(decode), way)
            record = records.get(key)
            known = certificates.decode(key, record.value) if record is not None else None
            if known is not None or way is Way.TRANSFER:  # which workers have adapters, gateways know
                found.setdefault((key, decode.pool), _status(key, way, prefill, decode, known, needed))
    return tuple(found.values())


def _needed_proof(config: ClusterConfig, pool: str) -> Proof:
    name = entry_of(pool)
    try:
        engine = (config.of_model(name) if is_of_entry(pool) else config).engine_of("decode", name)
    except KeyError:
        return "required"  # of a configuration before or after this one
    return engine.needed_proof


def _pairs(members: Collection[Member]) -> Iterator[tuple[Member, Member]]:
    for prefill in members:
        for decode in members:
            if (prefill.kind, decode.kind) == (MemberKind.PREFILL, MemberKind.DECODE) and can_transfer(prefill, decode):
                yield prefill, decode


def _status(
    key: str, way: Way, prefill: Member, decode: Member, known: Certificate | None, needed: Proof
) -> ProofStatus:
    outcome = PENDING
    if known is not None and (known.claimed_by or known.unix_s):  # else it could not be made, and is tried again
        outcome = UNDER_WAY if known.claimed_by and not known.is_proven else known.outcome.value
    return ProofStatus(
        key=key,
        way=way.value,
        pool=entry_of(decode.pool),
        model=decode.model.rpartition("/")[2],
        prefill_device=prefill.device,
        decode_device=decode.device,
        outcome=outcome,
        reason=known.reason if known is not None else "",
        took_s=known.took_s if known is not None else 0.0,
        distance=known.distance if known is not None else None,
        wrong_from=known.wrong_from if known is not None else None,
        unix_s=known.unix_s if known is not None else 0.0,
        limits=known.limits if known is not None else {},
        distances=known.distances if known is not None else (),
        needed=needed,
    )


async def prove(
    config: ClusterConfig, *, again: bool, timeout_s: float, on_progress: Callable[[str], None]
) -> tuple[ProofStatus, ...]:
    """Return results, once gateways have one for each way. With `again`, they prove anew.

    `on_progress` gets a line for each state of a way without a result.
    Raises UnavailableError without etcd, ConfigError without the secret, LocalError without results in time.
    """
    if (file := config.gateway.salt_secret_file) is not None:
        read_secret(file)
    membership = EtcdMembership(config.membership)
    try:
        async with asyncio.timeout(timeout_s):
            # By clocks of gateways, which differ from this machine's.
            before_s = {each.key: each.unix_s for each in await _read(config, membership)} if again else {}
            if again:
                for key in before_s:
                    record = await membership.records.read(f"{FOLDER}/{key}")
                    if record is not None:
                        await membership.records.write(f"{FOLDER}/{key}", None, record.revision)
            reported: set[str] = set()
            while True:
                found = await _read(config, membership)
                waiting = [
                    each.line()
                    for each in found
                    if each.outcome in (PENDING, UNDER_WAY) or each.unix_s <= before_s.get(each.key, -math.inf)
                ]
                if not waiting:
                    return found
                for line in waiting:
                    if line not in reported:
                        reported.add(line)
                        on_progress(line)
                if not any(each.kind is MemberKind.GATEWAY for each in await membership.members()):
                    raise LocalError("no gateway is registered in etcd, and it is gateways that prove transfers")
                await asyncio.sleep(_POLL_S)
    except TimeoutError:
        raise LocalError(
            f"no result within {timeout_s:g} s; the logs of the gateways say why, as does `kvferry status`"
        ) from None
    finally:
        await membership.close()


async def _read(config: ClusterConfig, membership: EtcdMembership) -> tuple[ProofStatus, ...]:
    return proofs_of(config, await membership.members(), await membership.records.read_all(FOLDER))


def bars(proof: ProofStatus) -> Iterator[str]:
    """Yield a line for each distance, with a bar as long as it is beside the largest."""
    every = [(each, name, value) for each in proof.distances for name, value in _figures(each)]
    largest = max((value for _, _, value in every), default=0.0)
    for each, name, value in every:
        length = round(_BAR * (value / largest)) if largest else 0
        yield f"{each.num_tokens:>6} tokens  {each.view:<6}  {name:<11}  {value:<9.4g}  {'#' * length}"


def _figures(each: Distances) -> Iterator[tuple[str, float]]:
    yield "transferred", each.transferred
    yield "noise", each.noise
    for control in each.controls:
        yield "wrong pages", control
