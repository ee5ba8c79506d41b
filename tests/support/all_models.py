"""Tests that only `make test-models` runs: more kinds of models and of settings than each commit needs."""

from __future__ import annotations

import os

import pytest

ALL_MODELS = bool(os.environ.get("KVFERRY_ALL_MODELS"))
only_with_all_models = pytest.mark.skipif(not ALL_MODELS, reason="make test-models runs it")
