"""The arithmetic of bench/kv_transfer.py: which raw transfer repeats one of engines, and the figures of both."""

from __future__ import annotations

import importlib
import json
from itertools import pairwise
from types import ModuleType, SimpleNamespace

import pytest


@pytest.fixture(scope="module")
def raw() -> ModuleType:
    return importlib.import_module("bench.raw_nixl")


@pytest.fixture(scope="module")
def bench(raw: ModuleType) -> ModuleType:
    return importlib.import_module("bench.kv_transfer")


@pytest.mark.parametrize("num_pages", [1, 16, 17, 128])
@pytest.mark.parametrize("num_runs", [1, 5, 16, 128])
def test_pages_make_as_many_runs_as_asked(raw: ModuleType, num_pages: int, num_runs: int) -> None:
    if num_runs > num_pages:
        with pytest.raises(ValueError, match="runs"):
            raw.page_ids(num_pages, num_runs, 3, 728)
        return
    ids = raw.page_ids(num_pages, num_runs, 3, 728)
    assert len(set(ids)) == num_pages
    assert ids == sorted(ids)
    assert ids[0] == 3
    assert 1 + sum(b - a > 1 for a, b in pairwise(ids)) == num_runs


def test_pages_stay_inside_the_registered_memory(raw: ModuleType) -> None:
    assert raw.page_ids(4, 1, 6, 10) == [6, 7, 8, 9]
    with pytest.raises(ValueError, match="do not fit into 10 pages"):
        raw.page_ids(4, 1, 7, 10)


def test_descriptors_are_all_pages_of_each_layer_in_turn(raw: ModuleType) -> None:
    layout = raw.Layout(num_layers=3, num_pages=10, row_bytes=64)
    assert raw.descriptor_ids([2, 5], layout) == [2, 5, 12, 15, 22, 25]


def test_a_transfer_has_the_shape_of_its_bytes_and_descriptors(bench: ModuleType, raw: ModuleType) -> None:
    layout = raw.Layout(num_layers=30, num_pages=728, row_bytes=49_152)
    seen = raw.Transfer(16 * 30 * 49_152, 5 * 30, 0.01, 0.01, 0.01)
    assert bench.shape_of(seen, layout) == (16, 5)
    with pytest.raises(bench.BenchFailed, match="no whole pages"):
        bench.shape_of(raw.Transfer(16 * 30 * 49_152 + 1, 30, 0.01, 0.01, 0.01), layout)
    with pytest.raises(bench.BenchFailed, match="no whole pages"):
        bench.shape_of(raw.Transfer(16 * 30 * 49_152, 31, 0.01, 0.01, 0.01), layout)


def test_the_layout_is_that_of_the_first_transfer(bench: ModuleType, raw: ModuleType) -> None:
    info = SimpleNamespace(num_pages=728, page_bytes=30 * 49_152)

    def layout_of(num_descriptors: int, *, is_on_gpu: bool = False) -> object:
        first = raw.Transfer(16 * info.page_bytes, num_descriptors, 0.01, 0.01, 0.01)
        return bench.layout_of(info, 30, first, is_on_gpu=is_on_gpu)

    assert layout_of(5 * 30) == raw.Layout(30, 728, 49_152)
    assert layout_of(16, is_on_gpu=True) == raw.Layout(1, 728, 30 * 49_152, on_gpu=True)  # all layers side by side
    assert (raw.Layout(1, 1, 1).memory, raw.Layout(1, 1, 1, on_gpu=True).memory) == ("DRAM", "VRAM")
    for num_descriptors in (17, 17 * 30):
        with pytest.raises(bench.BenchFailed, match="are no known layout of pages"):
            layout_of(num_descriptors)


def test_the_engines_statistics_become_transfers(bench: ModuleType) -> None:
    step = {
        "transfer_duration": [0.02, 0.03],
        "post_duration": [0.01, 0.02],
        "bytes_transferred": [100, 200],
        "num_descriptors": [1, 2],
        "num_failed_transfers": [],
    }
    transfers = bench.transfers_of(step)
    assert [(t.size_bytes, t.num_descriptors, t.transfer_s, t.post_s) for t in transfers] == [
        (100, 1, 0.02, 0.01),
        (200, 2, 0.03, 0.02),
    ]
    assert bench.transfers_of({"num_kv_expired_reqs": [1]}) == []
    with pytest.raises(bench.BenchFailed, match="failed"):
        bench.transfers_of(step | {"num_failed_transfers": [1]})


async def test_the_log_hands_out_each_transfer_once_and_passes_everything_on(bench: ModuleType) -> None:
    passed_on: list[object] = []
    counters = SimpleNamespace(record=lambda *args, **kwargs: passed_on.append(args))
    log = bench.KvTransferLog(counters)
    step = {"transfer_duration": [0.02], "post_duration": [0.01], "bytes_transferred": [9], "num_descriptors": [1]}
    counters.record(None, "iteration")
    counters.record(SimpleNamespace(kv_connector_stats=None), "iteration")
    assert len(log) == 0
    counters.record(SimpleNamespace(kv_connector_stats=step), "iteration")
    assert (await log.next(0, 0.0)).transfer_s == 0.02
    assert len(passed_on) == 3
    failed = SimpleNamespace(kv_connector_stats=step | {"num_failed_transfers": [1]})
    counters.record(failed, "iteration")  # vLLM's loop goes on
    with pytest.raises(bench.BenchFailed, match="a transfer between the engines failed"):
        await log.next(1, 0.0)
    assert len(passed_on) == 4


def test_the_json_says_one_transfer_of_each_length_at_its_median(bench: ModuleType, raw: ModuleType) -> None:
    def transfers(size_bytes: int, *seconds: float) -> list[object]:
        return [raw.Transfer(size_bytes, 30, s, s / 2, s * 2) for s in seconds]

    sizes = [
        bench.summarize(512, transfers(10**9, 0.5, 1.0, 9.0), transfers(10**9, 0.4, 0.5, 0.6)),
        bench.summarize(1024, transfers(3 * 10**9, 1.0), transfers(3 * 10**9, 0.5)),
    ]
    assert sizes[0]["gb_s"] == 1.0
    assert sizes[0]["best_gb_s"] == 2.0
    assert sizes[0]["raw_gb_s"] == 2.0
    assert sizes[0]["ratio"] == 0.5
    assert sizes[0]["descriptors"] == 30
    assert bench.overall(sizes) == {"gb_s": 2.0, "raw_gb_s": 4.0, "ratio": 0.5}
    json.dumps(sizes)
    console = bench.Console(width=120, record=True, quiet=True)
    results = {**bench.overall(sizes), "sizes": sizes, "machine": "here", "load_average": [0, 0]}
    bench.show(results | {"kv_cache_dtype": "float32", "block_size": 32, "ucx_tls": "tcp"}, console)


def test_lengths_are_numbers_by_commas(bench: ModuleType) -> None:
    assert bench.lengths("2048,512,512") == [512, 2048]
    for text in ("", "many", "0,5"):
        with pytest.raises(bench.argparse.ArgumentTypeError):
            bench.lengths(text)
