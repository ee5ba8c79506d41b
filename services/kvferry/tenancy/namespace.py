"""A tenant's name, its identity in keys, events and files, and the salts that separate its pages."""

from __future__ import annotations

import hashlib
import hmac
import re
from dataclasses import dataclass
from typing import Final

from kvferry.tenancy.pages.outcome import OTHER

_TENANT = re.compile(r"[a-z0-9][a-z0-9-]{0,62}")
MAX_EPOCH = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class Namespace:
    """A tenant and its epoch; raising the epoch makes older data unreadable.

    Raises ValueError unless the tenant has 1 to 63 lower-case letters, digits or dashes.
    """

    tenant: str = "default"
    epoch: int = 0

    def __post_init__(self) -> None:
        if not _TENANT.fullmatch(self.tenant):
            raise ValueError(f"tenant {self.tenant!r}: lower-case letters, digits and dashes, at most 63")
        if not 0 <= self.epoch <= MAX_EPOCH:
            raise ValueError(f"epoch {self.epoch} is no unsigned 64-bit number")

    def __str__(self) -> str:
        """`<tenant>.<epoch>`, the name of its folders."""
        return f"{self.tenant}.{self.epoch}"

    @classmethod
    def parse(cls, text: str) -> Namespace:
        """Raises ValueError for anything that `str` does not make."""
        tenant, _, epoch = text.rpartition(".")
        namespace = cls(tenant, int(epoch))
        if str(namespace) != text:
            raise ValueError(f"{text!r} is no namespace")
        return namespace


DEFAULT_NAMESPACE = Namespace()


def check_name(name: str) -> None:
    """Raises ValueError for a name that no tenant may have, wherever it stands: a record, a key file, a certificate."""
    Namespace(name)
    if name == OTHER:
        raise ValueError(f"tenant {name!r}: metrics have the sum of tenants that they do not name under it")


def check_claimed_name(name: str) -> None:
    """Raises ValueError for a name that a token or certificate may not claim where no record has it.

    `default` is the tenant of clients that nobody identifies, whose pages it shares.
    """
    check_name(name)
    if name == DEFAULT_NAMESPACE.tenant:
        raise ValueError(
            f"tenant {name!r}: it is of clients without a name; only keys and `kvferry tenant create` give it"
        )


MIN_SECRET_BYTES: Final = 32
_DOMAIN: Final = b"kvferry cache salt 1"


def make_salt(secret: bytes, namespace: Namespace, group: str = "", client_salt: str | None = None) -> str:
    """Return a salt of 64 hexadecimal digits. Raises ValueError for a secret under `MIN_SECRET_BYTES`.

    Tenant, epoch, group of the key, and what the client asks for decide it, each with its length.
    """
    if len(secret) < MIN_SECRET_BYTES:
        raise ValueError(f"the secret of salts has {len(secret)} bytes; at least {MIN_SECRET_BYTES} are needed")
    parts = [_DOMAIN, namespace.tenant.encode(), str(namespace.epoch).encode(), group.encode()]
    if client_salt is not None:  # an empty one is another than none
        parts.append(client_salt.encode("utf-8", "surrogatepass"))
    message = b"".join(len(part).to_bytes(4, "big") + part for part in parts)
    return hmac.new(secret, message, hashlib.sha256).hexdigest()
