"""Releases of this repository: a wheel and a source archive of each folder, all of one version."""

from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CORE = ROOT
SATELLITES = tuple(
    ROOT / "services" / f"kvferry_{name}" for name in ("keeper", "local", "plan", "operator", "sim", "tenants")
)
