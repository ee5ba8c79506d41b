"""The bench of tenants on a trace of its own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import tenants


def write_trace(folder: Path) -> Path:
    """Sessions that return once, after 20 others."""
    file = folder / tenants.TRACE
    rows = [
        {
            "timestamp": 1000 * turn,
            "input_length": 512 * 9 + 100,
            "hash_ids": [0, *(100 * session + i for i in range(9))],
        }
        for turn, session in enumerate([*range(1, 41), *range(20, 60)])
    ]
    file.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return file


def test_only_full_blocks_count(tmp_path: Path) -> None:
    first = tenants.read_trace(write_trace(tmp_path))[0]
    assert first.session == 100
    assert list(first.blocks) == [0, *range(100, 108)]


def test_both_caches_count_blocks_before_the_first_miss(tmp_path: Path) -> None:
    requests = tenants.read_trace(write_trace(tmp_path))
    for cache in (tenants.LruCache(9), tenants.RetentionCache(9, {"all": tenants.TierContract(cap=9)})):
        assert tenants.replay(requests[:2], cache).hits["all"] == 1
        assert cache.use(requests[1]) == 9
    assert tenants.replay(requests, tenants.LruCache(1000)).hits["all"] == 79 + 21 * 8


def test_a_neighbour_has_its_share_of_all_blocks(tmp_path: Path) -> None:
    requests = tenants.read_trace(write_trace(tmp_path))
    flood = list(tenants.neighbour(requests, 0.75, seed=1))
    num_blocks = sum(len(request.blocks) for request in flood)
    assert num_blocks == 3 * 9 * len(requests)
    assert len({block for request in flood for block in request.blocks}) == num_blocks


def test_the_last_line_is_the_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tenants, "SIZES", (2000, 4000))
    monkeypatch.setattr(tenants, "TENANT_CAPACITIES", (200,))
    monkeypatch.setattr("sys.argv", ["tenants", "--trace", str(write_trace(tmp_path)), "--seeds", "1"])
    tenants.main()
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["gain_over_lru_2k"] == result["gain_over_lru_4k"] == 1.0
    assert result["worst_vs_lru_points"] == 0.0
    assert len(result["tables"]["tenants"]) == len(tenants.NEIGHBOURS)


def test_without_the_trace_the_bench_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KVFERRY_TRACES", str(tmp_path))
    monkeypatch.setattr("sys.argv", ["tenants"])
    tenants.main()
    assert capsys.readouterr().out.startswith(f"skipped: no {tmp_path / tenants.TRACE}")
