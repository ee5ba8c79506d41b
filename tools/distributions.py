"""Releases of this repository: a wheel and a source archive of each folder, all of one version."""

from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CORE = ROOT
SATELLITES = tuple(
    ROOT / "services" / name for name in ("kvferry_keeper", "kvferry_plan", "kvferry_operator", "kvferry_sim")
)
