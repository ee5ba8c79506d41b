"""Section `membership`: the registry."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field, model_validator

from kvferry.config.section import Section

DEFAULT_NAME = "kvferry"  # of a cluster


def prefix_of(name: str) -> str:
    return f"/kvferry/clusters/{name}"


class MembershipConfig(Section):
    endpoints: tuple[str, ...] = ()  # host:port of etcd; empty: `kvferry up` starts one
    # Prefix of this cluster's keys in etcd; it ends with /clusters/NAME. Absent: /kvferry/clusters/NAME.
    prefix: str = Field(prefix_of(DEFAULT_NAME), pattern=r"^/[A-Za-z0-9._/-]+$")
    lease_ttl_s: int = Field(10, ge=2)
    ca_file: Path | None = None
    cert_file: Path | None = None
    key_file: Path | None = None
    user: str = ""
    password_file: Path | None = None  # a file, so that no configuration dump shows the secret

    @model_validator(mode="after")
    def _pairs(self) -> MembershipConfig:
        if (self.cert_file is None) != (self.key_file is None):
            raise ValueError("cert_file and key_file go together")
        if bool(self.user) != (self.password_file is not None):
            raise ValueError("user and password_file go together")
        return self
