"""A tenant's identity in keys, events and files."""

from __future__ import annotations

import re
from dataclasses import dataclass

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
