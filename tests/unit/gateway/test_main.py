"""gateway/__main__.py"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from kvferry.gateway import __main__ as program


def test_a_gateway_looks_for_no_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_TARGET_DEVICE", "cuda")
    monkeypatch.setattr(sys, "argv", ["gateway", "--config", str(tmp_path / "missing.yaml")])
    assert program.main() == 2
    assert os.environ["VLLM_TARGET_DEVICE"] == "cpu"
