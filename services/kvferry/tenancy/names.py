"""Which names tenants may have."""

from __future__ import annotations

from kvferry.tenancy.namespace import DEFAULT_NAMESPACE, Namespace
from kvferry.tenancy.pages.outcome import OTHER


def check_name(name: str) -> None:
    """Raises ValueError for a name that no tenant may have, wherever it stands: a record, a key file, a certificate."""
    Namespace(name)
    if name == OTHER:
        raise ValueError(f"tenant {name!r}: metrics have the sum of tenants that they do not name under it")


def check_claimed_name(name: str) -> None:
    """Raises ValueError for a name that a token or certificate may not claim where no record has it.

    `default` is the tenant of clients that nobody identifies: it shares their pages, and no turn of its own limits it.
    Operators may give it keys; who issues tokens and certificates names other tenants.
    """
    check_name(name)
    if name == DEFAULT_NAMESPACE.tenant:
        raise ValueError(
            f"tenant {name!r}: it is of clients without a name; only keys and `kvferry tenant create` give it"
        )
