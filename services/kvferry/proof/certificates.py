"""Results of proofs, as records of etcd and files of the cache folder."""

from __future__ import annotations

import enum
import functools
import hashlib
import hmac
import logging
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Final, NamedTuple

import msgspec
from msgspec import structs

from kvferry.membership.base import Member
from kvferry.proof.verdict import Distances, Outcome

log = logging.getLogger(__name__)

FOLDER: Final = "proofs"
MAX_RECORD_BYTES: Final = 64 << 10
MAX_REASON_CHARS: Final = 500
MAX_LOST: Final = 2  # engines that a proof may end before the way counts as refuted
# After how long a result is proven again. Until the new one is there, the old one holds.
AGAIN_S: Final[Mapping[Outcome, float]] = {
    Outcome.PROVEN: 30 * 86_400.0,
    Outcome.REFUTED: 86_400.0,
    Outcome.UNDECIDED: 600.0,
}


class Way(enum.StrEnum):
    TRANSFER = "transfer"
    ADAPTER = "transfer-with-adapter"


class EngineKind(NamedTuple):
    """Engines of a kind compute the same pages in the same way."""

    exchange_digest: str
    device: str
    version: str  # of kvferry


class Certificate(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a proof, or the claim of a gateway that it is at work on one."""

    prefill: EngineKind
    decode: EngineKind
    way: Way
    outcome: Outcome
    reason: str = ""  # why it is not proven
    model: str = ""
    gateway: str = ""  # that proved it
    claimed_by: str = ""  # gateway that is proving it now
    unix_s: float = 0.0  # when it was proven
    took_s: float = 0.0
    num_lost: int = 0  # engines that ended in the proof, in a row
    limits: Mapping[str, float] = {}  # by view
    distances: tuple[Distances, ...] = ()

    @property
    def key(self) -> str:
        return key_of(self.prefill, self.decode, self.way)

    @property
    def distance(self) -> float | None:
        """Return that of transferred pages; None if nothing was measured."""
        return max((each.transferred for each in self.distances), default=None)

    @property
    def wrong_from(self) -> float | None:
        return min((control for each in self.distances for control in each.controls), default=None)

    @property
    def is_proven(self) -> bool:
        return self.outcome is Outcome.PROVEN

    @property
    def is_final(self) -> bool:
        """Whether the way is refuted because engines ended in its proof: it is proven again by hand only."""
        return self.num_lost >= MAX_LOST

    def is_due(self, now_unix_s: float) -> bool:
        # Clocks of gateways differ, and one that was wrong must not keep a result for ever.
        return not self.is_final and abs(now_unix_s - self.unix_s) >= AGAIN_S[self.outcome]


class _Signed(msgspec.Struct):
    certificate: msgspec.Raw  # signed as it was written: a later release may know more fields
    signature: str  # by the cluster's secret; empty where it has none


@functools.lru_cache(1024)  # made once for each member
def kind_of(member: Member) -> EngineKind:
    return EngineKind(member.exchange_digest, member.device, member.version)


def can_transfer(prefill: Member, decode: Member) -> bool:
    """Whether pages of one could go to the other. Without a digest nothing says what their bytes mean."""
    is_known = bool(decode.exchange_digest) and decode.block_size > 0
    return is_known and (prefill.pool, prefill.exchange_digest) == (decode.pool, decode.exchange_digest)


@functools.lru_cache(4096)
def key_of(prefill: EngineKind, decode: EngineKind, way: Way) -> str:
    text = msgspec.json.encode((prefill, decode, way))
    return hashlib.blake2b(text, digest_size=16).hexdigest()


class Certificates:
    """Reads and writes certificates, signed with `secret` unless it is empty."""

    def __init__(self, cache: Path | None, secret: bytes = b"") -> None:
        self._cache = cache
        self._secret = secret

    def encode(self, certificate: Certificate) -> bytes:
        value = msgspec.json.encode(structs.replace(certificate, reason=certificate.reason[:MAX_REASON_CHARS]))
        return msgspec.json.encode(_Signed(msgspec.Raw(value), self._signature(value)))

    def decode(self, name: str, value: bytes) -> Certificate | None:
        """Return None, and log, for a record that cannot be read, or is not signed as it should be."""
        why = f"it has {len(value)} bytes"
        if len(value) <= MAX_RECORD_BYTES:
            try:
                signed = msgspec.json.decode(value, type=_Signed)
                certificate = msgspec.json.decode(signed.certificate, type=Certificate)
            except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
                why = str(error)[:200]
            else:
                signature = self._signature(bytes(signed.certificate))
                if certificate.key != name:
                    why = "it is of other engines than its name says"
                elif not hmac.compare_digest(signed.signature.encode(), signature.encode()):
                    why = "its signature is not that of this cluster (gateway.salt_secret_file)"
                else:
                    return certificate
        log.warning("the proof %.64r is passed over: %s", name, why)
        return None

    def _signature(self, value: bytes) -> str:
        return hmac.new(self._secret, b"proof\0" + value, hashlib.sha256).hexdigest() if self._secret else ""

    def load(self, name: str) -> Certificate | None:
        """Return what `keep` wrote, unless others could have."""
        if self._cache is None:
            return None
        try:
            with (self._cache / f"{name}.json").open("rb") as file:
                status = os.fstat(file.fileno())
                if status.st_uid != os.getuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
                    log.warning("%s is passed over: other users can write it", file.name)
                    return None
                return self.decode(name, file.read(MAX_RECORD_BYTES + 1))
        except FileNotFoundError:
            return None
        except OSError as error:
            log.warning("proofs of earlier clusters cannot be read: %s", error)
            return None

    def keep(self, certificate: Certificate) -> None:
        """Keep it for later clusters; if it is undecided, forget an earlier one. Blocks."""
        if self._cache is None or certificate.outcome is Outcome.UNDECIDED:
            return self.drop(certificate.key)
        file = self._cache / f"{certificate.key}.json"
        partial = file.with_suffix(f".{os.getpid()}")
        try:
            self._cache.mkdir(mode=0o700, parents=True, exist_ok=True)
            descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            with os.fdopen(descriptor, "wb") as written:
                written.write(self.encode(certificate))
            partial.replace(file)
        except OSError as error:
            log.warning("the proof is not kept for later clusters: %s", error)

    def drop(self, name: str) -> None:
        """Undo `keep`."""
        if self._cache is None:
            return
        try:
            (self._cache / f"{name}.json").unlink(missing_ok=True)
        except OSError as error:
            log.warning("a proof of an earlier cluster cannot be removed: %s", error)
