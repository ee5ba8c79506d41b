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


def test_a_model_that_cannot_be_had_ends_it_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (config := tmp_path / "c.yaml").write_text("membership: {endpoints: ['127.0.0.1:1']}\n")
    monkeypatch.setattr(sys, "argv", ["gateway", "--config", str(config), "--model-folder", "/absent/model"])
    assert program.main() == 2
    assert "'/absent/model' is not a folder with a config.json" in capsys.readouterr().err
