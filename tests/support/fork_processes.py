"""Gateways' processes of forks on a machine that is as busy as can be."""

from __future__ import annotations

# Of a test, for what hangs: vLLM's start takes 15 s of CPU time, which a busy machine gives in many minutes.
TIMEOUT_S = 3600
