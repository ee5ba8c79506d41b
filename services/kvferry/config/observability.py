"""Sections `metrics` and `tracing`."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field, model_validator

from kvferry.config.section import MutualTlsConfig, Section


class MetricsConfig(Section):
    """Prometheus listeners of gateways, workers and keepers.

    A port other than 0 is the first of 16 to try, because several processes of one kind may share a machine.
    """

    host: str = "127.0.0.1"  # auto: this node's address
    gateway_port: int = Field(0, ge=0, le=65520)
    worker_port: int = Field(0, ge=0, le=65520)
    keeper_port: int = Field(0, ge=0, le=65520)
    # Mutual: Prometheus shows a certificate of ca_file, not always worker.tls's.
    tls: MutualTlsConfig = Field(default_factory=MutualTlsConfig)


class TracingConfig(Section):
    # OTLP over gRPC: host:port, or http://host:port or https://host:port. Empty: no traces.
    endpoint: str = Field("", pattern=r"^((https?://)?[^/\s:]+:[0-9]{1,5}|(https?://)?\[[0-9A-Fa-f:.]+\]:[0-9]{1,5})?$")
    sample_ratio: float = Field(1.0, ge=0, le=1)  # of requests whose client did not decide
    prompts: bool = False  # record prompts and answers in spans
    ca_file: Path | None = None  # CA of the collector's certificate; empty, with https: the system's CAs

    @property
    def uses_tls(self) -> bool:
        return self.endpoint.startswith("https://") or self.ca_file is not None

    @model_validator(mode="after")
    def _makes_sense(self) -> TracingConfig:
        if not self.endpoint and (self.prompts or self.ca_file is not None):
            raise ValueError("prompts and ca_file need an endpoint")
        if self.ca_file is not None and self.endpoint.startswith("http://"):
            raise ValueError("ca_file needs an endpoint with https://")
        return self
