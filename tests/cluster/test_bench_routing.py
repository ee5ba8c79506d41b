"""`make bench-routing` on a small cluster: prompts of any tokens, and a worker that is killed."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

from bench import routing
from bench.chaos.fleet import Fleet, fleet
from bench.chaos.member import POISON
from bench.etcd_server import find_binary
from kvferry.membership.base import MemberKind
from kvferry_sim.tokenizer import SimTokenizer

pytestmark = pytest.mark.skipif(find_binary() is None, reason="no etcd on this machine")

NUM_REQUESTS = 6
KILLED_AT = NUM_REQUESTS + 3  # the third request of the second replay


def test_a_killed_worker_ends_it_and_the_figures_so_far_are_written(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (poison,) = SimTokenizer().encode(POISON)
    clusters: list[Fleet] = []
    asked: list[Sequence[int]] = []
    ask, replay = routing.ask, routing.replay

    def small_cluster(folder: Path, placement: str, tokens_per_s: float, slow: bool) -> Any:
        folder.mkdir()
        return fleet(folder, prefill=1, decode=1, gateways=1, gateway={"placement": placement})

    async def noted_replay(running: Fleet, *arguments: Any) -> Any:
        clusters.append(running)
        return await replay(running, *arguments)

    async def ask_or_kill(http: httpx.AsyncClient, url: str, request: routing.Request, debug: str) -> float:
        asked.append(request.tokens)
        if len(asked) == KILLED_AT:
            (decode,) = clusters[-1].of(MemberKind.DECODE)
            await decode.kill()
        return await ask(http, url, request, debug)

    def conversations(count: int, seed: int) -> list[routing.Request]:
        # A trace draws its tokens from the whole vocabulary, with the one that ends engines under `make chaos`.
        return [routing.Request(i * 0.01, [poison, *range(100 + i, 140 + i)], 4) for i in range(count)]

    monkeypatch.setattr(routing, "cluster_of", small_cluster)
    monkeypatch.setattr(routing, "replay", noted_replay)
    monkeypatch.setattr(routing, "ask", ask_or_kill)
    monkeypatch.setattr(routing, "make_conversations", conversations)
    monkeypatch.setattr("sys.argv", ["routing", "--cases", "replay", "--requests", str(NUM_REQUESTS)])
    assert routing.main() == 1
    *lines, last = map(json.loads, capsys.readouterr().out.splitlines())
    figures = last["replay"]["round_robin"]
    assert lines[-1] == {"replay": {"round_robin": figures}}
    assert figures["requests"] == NUM_REQUESTS
    assert figures["prefill_tokens_computed"] == NUM_REQUESTS * 41
    assert math.isfinite(figures["ttft_p99_ms"])
    assert "priced" not in last["replay"]
    # The gateway loses its worker, and the benchmark its process: either may come first.
    (decode,) = clusters[1].of(MemberKind.DECODE)
    assert last["failure"].startswith((f"{decode.member_id} ended with -9", "replay, priced: request "))
