"""Section `gateway`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_validator

from kvferry.config.section import Section, ServerTlsConfig

# Algorithms with asymmetric keys only: a gateway verifies tokens and must not be able to sign any.
JwtAlgorithm = Literal["RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA"]


class JwtConfig(Section):
    """JSON Web Tokens that clients may show as bearer tokens instead of keys."""

    issuer: str = ""  # claim `iss`; empty: tokens are refused
    audience: str = ""  # claim `aud`
    # The issuer's public keys: a file, looked at once a second, or a URL, read every 5 minutes.
    jwks_file: Path | None = None
    jwks_url: str = Field("", pattern=r"^(https://\S+|http://(127\.0\.0\.1|localhost|\[::1\])([:/]\S*)?)?$")
    tenant_claim: str = Field("sub", min_length=1)  # whose text is the tenant's name
    algorithms: tuple[JwtAlgorithm, ...] = Field(("RS256", "ES256", "EdDSA"), min_length=1)

    @property
    def enabled(self) -> bool:
        return bool(self.issuer)

    @model_validator(mode="after")
    def _issuer_and_keys(self) -> JwtConfig:
        if "@" in urlsplit(self.jwks_url).netloc:
            raise ValueError("jwks_url: no user or password in it: it is logged")
        num_sources = (self.jwks_file is not None) + bool(self.jwks_url)
        if self.issuer and not (self.audience and num_sources == 1):
            raise ValueError("issuer needs audience, and either jwks_file or jwks_url")
        if not self.issuer and (self.audience or num_sources):
            raise ValueError("audience, jwks_file and jwks_url need issuer")
        return self


MAX_PROMPT_IMAGES = 64
_IMAGE_HOST = re.compile(r"(\*\.)?([a-z0-9_-]+\.)*[a-z0-9_-]+(:[0-9]{1,5})?|\[[0-9a-f:.]+\](:[0-9]{1,5})?")


class ImagesConfig(Section):
    """Images in chats, for models that take them. More than a limit gets 400, more than may be in flight 429."""

    max_per_request: int = Field(8, ge=0, le=MAX_PROMPT_IMAGES)  # 0: images are refused
    max_bytes: int = Field(8 << 20, ge=1024, le=32 << 20)  # of an image's file; those in a body fit the body's limit
    # Width times height of one. More takes more of memory_mib: with a tiny model 1,024 MiB were enough for 32,000,000
    # and not for 67,000,000.
    max_pixels: int = Field(16 << 20, ge=1, le=128 << 20)
    # Files and prepared images of all requests in flight, those of a request once for each of its choices.
    max_pending_mib: int = Field(512, ge=1)
    # Images are decoded and prepared in processes of their own; what exceeds this memory gets 400.
    processes: int = Field(2, ge=1, le=64)
    memory_mib: int = Field(1024, ge=64)
    # Hosts of images that http and https URLs may name: NAME, *.DOMAIN for all below it, or either with :PORT where
    # that is not the scheme's. Empty: data URLs alone.
    allowed_hosts: tuple[str, ...] = ()
    # Whether addresses of these hosts may be private, loopback or link-local ones.
    allow_private_addresses: bool = False

    @field_validator("allowed_hosts")
    @classmethod
    def _hosts_are_names(cls, hosts: tuple[str, ...]) -> tuple[str, ...]:
        for host in hosts:
            if not _IMAGE_HOST.fullmatch(host):
                raise ValueError(f"{host[:80]!r}: expected NAME, *.DOMAIN, or either with :PORT, in lower-case ASCII")
        return hosts


class GatewayConfig(Section):
    replicas: int = Field(1, ge=0)  # as Serve replicas; 0: gateways run elsewhere (python -m kvferry.gateway)
    num_cpus: float = Field(0.5, ge=0)
    resources: dict[str, float] = Field(default_factory=dict)
    host: str = "127.0.0.1"  # of HTTP and gRPC; auto: this node's address
    http_port: int = Field(8000, ge=0, le=65535)
    grpc_port: int | None = Field(9000, ge=0, le=65535)  # 0: any that is free; empty: no gRPC
    keys_file: Path | None = None  # API keys, hashed (`kvferry key new`); read again when it changes
    # Tenants and their keys are records in etcd (`kvferry tenant`); a keys_file may name more keys.
    tenants_in_etcd: bool = False
    jwt: JwtConfig = Field(default_factory=JwtConfig)
    # At least 32 bytes, the same on all gateways: salts of tenants' pages are made of it. Absent: the first gateway
    # makes one and keeps it in etcd.
    salt_secret_file: Path | None = None
    # Usage records, a line of JSON per request (`kvferry tenant usage`). A folder that exists keeps its mode, and is
    # refused if every user may write to it.
    usage_dir: Path | None = None
    tls: ServerTlsConfig = Field(default_factory=ServerTlsConfig)  # of HTTP and gRPC; files may be replaced meanwhile
    # At most a fifth of what a message to a worker may have: a byte of text may become a token id, which takes five.
    max_body_bytes: int = Field(8 << 20, ge=1024, le=12 << 20)
    # Choices in flight, of HTTP and gRPC: each is a request of its own on the workers. More get 429.
    max_requests: int = Field(1024, ge=1)
    max_connections_per_peer: int = Field(0, ge=0)  # of one address, over HTTP; 0: no limit, as behind a load balancer
    # Names in `Host` beside loopback ones that a gateway without keys on loopback answers to, such as a proxy's.
    allowed_hosts: tuple[str, ...] = ()
    images: ImagesConfig = Field(default_factory=ImagesConfig)
    # From a complete body to the end of the answer. A prefill may take a fifth of it; then the decode worker computes
    # the prompt itself.
    request_timeout_s: float = Field(600, gt=0)
    first_token_timeout_s: float = Field(300, gt=0)  # of each choice
    # Between tokens of a choice. Above `worker.hang_timeout_s`, or answers end before another worker continues them.
    inter_token_timeout_s: float = Field(180, gt=0)
    placement: Literal["priced", "round_robin"] = "priced"
    # While all workers are full, requests wait in line, first come first served, before anything of them is computed.
    # More than these, of each pool, get 429.
    max_queued_requests: int = Field(256, ge=0)
    queue_timeout_s: float = Field(10, ge=0)  # a request that would wait longer gets 429
    # How long a leaving gateway, which is not ready, still accepts requests: load balancers need time to notice.
    linger_s: float = Field(0, ge=0)
    drain_timeout_s: float = Field(30, ge=0)

    @property
    def wants_bearer(self) -> bool:
        """Whether clients show keys or tokens."""
        return self.keys_file is not None or self.tenants_in_etcd or self.jwt.enabled

    @model_validator(mode="after")
    def _ports_differ(self) -> GatewayConfig:
        if self.http_port and self.http_port == self.grpc_port:
            raise ValueError(f"http_port and grpc_port are both {self.http_port}; each needs its own")
        return self
