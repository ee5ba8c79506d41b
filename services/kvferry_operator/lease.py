"""The Lease of a release: one rollout acts at a time, whatever other pods of it still run.

As Kubernetes' own leader election does it: a holder is alive while the Lease changes, by this process's own clock.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Protocol

from kvferry.errors import UnavailableError
from kvferry_operator.plan import Document

DURATION_S = 30  # without a change, after which another one takes over; a holder renews in each round


class LeaseApi(Protocol):
    def read_lease(self) -> Document | None:
        """Returns the release's Lease, or None. Raises UnavailableError."""
        ...

    def write_lease(self, lease: Document) -> Document:
        """Makes the Lease, or replaces it if it is unchanged since. Raises UnavailableError."""
        ...


class Lease:
    """This rollout's part in it. Calls block."""

    def __init__(self, api: LeaseApi, identity: str, *, monotonic: Callable[[], float] = time.monotonic) -> None:
        """`identity` is that of a pod: another process in its container goes on with its Lease."""
        self._api = api
        self._identity = identity
        self._monotonic = monotonic
        self._held: Document | None = None
        self._seen = ""  # state of another holder's Lease, since
        self._seen_s = 0.0

    @property
    def is_held(self) -> bool:
        return self._held is not None

    def take(self) -> str:
        """Takes or renews it. Returns the other holder's identity, or nothing. Raises UnavailableError."""
        # Against the state of the last time: whoever took it since has changed that.
        lease = self._held or self._api.read_lease() or {}
        holder = str(lease.get("spec", {}).get("holderIdentity") or "")
        if holder not in ("", self._identity):
            version = lease["metadata"]["resourceVersion"]
            if version != self._seen:
                self._seen, self._seen_s = version, self._monotonic()
            if self._monotonic() - self._seen_s < DURATION_S:
                return holder
        self._held = None  # unless it can be written
        self._held = self._api.write_lease(self._renewed(lease, is_new=holder != self._identity))
        return ""

    def release(self) -> None:
        """Lets another one take it at once. Raises UnavailableError."""
        held, self._held = self._held, None
        if held is not None:
            spec = {key: value for key, value in held["spec"].items() if key != "holderIdentity"}
            self._api.write_lease({**held, "spec": spec})

    def _renewed(self, lease: Document, *, is_new: bool) -> Document:
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        spec = {**lease.get("spec", {}), "holderIdentity": self._identity, "renewTime": now}
        spec["leaseDurationSeconds"] = DURATION_S
        if is_new:
            spec |= {"acquireTime": now, "leaseTransitions": int(spec.get("leaseTransitions", 0)) + 1}
        return {**lease, "spec": spec}


def must_hold(lease: Lease) -> None:
    """Renews a Lease before something is changed. Raises UnavailableError if another one has it."""
    if other := lease.take():
        raise UnavailableError(f"{other} rolls this release out now")
