"""The catalogue of GPUs, and a user's own over it."""

from __future__ import annotations

import json

import pytest

from kvferry.errors import ConfigError
from kvferry_plan.planner import gpu_catalogue
from kvferry_plan.planner.gpu_catalogue import MAX_FILE_BYTES, MAX_GPUS, find, merged, shipped


def test_the_asked_for_gpus_are_there_with_source_and_date() -> None:
    assert set(shipped()) == {
        "h100", "h200", "b200", "gb200", "a100", "l40s", "rtx-pro-6000", "mi300x", "mi355x", "cpu-node",
    }  # fmt: skip
    for gpu in shipped().values():
        assert gpu.source
        assert gpu.source_date is not None
        for price in gpu.prices:
            assert price.source
            assert price.date is not None


def test_memory_is_what_drivers_report() -> None:
    assert shipped()["h100"].memory_bytes == 81_559 << 20
    assert shipped()["h200"].memory_bytes == 143_771 << 20
    # The label of neither.
    assert shipped()["h100"].memory_bytes > 80e9
    assert shipped()["b200"].memory_bytes < 192 << 30


def test_compute_falls_back_to_the_next_wider_type() -> None:
    assert shipped()["h100"].flops_of("fp8") == (1978.9e12, "fp8")
    # FP4 weights beside activations of 16 bits: without FP4 hardware vLLM's kernels (Marlin) unpack them.
    assert shipped()["h100"].flops_of("fp4") == (989.4e12, "bfloat16")
    assert shipped()["a100"].flops_of("fp8") == (312.0e12, "bfloat16")
    assert shipped()["cpu-node"].flops_of("float32") == (14.3e12, "float32")


def test_a_users_file_wins_key_by_key() -> None:
    gpus = merged(b"gpus: {h100: {prices: [{usd_per_hour: 1.5}]}}", "own.yaml")
    price = gpus["h100"].price()
    assert price is not None
    assert (price.usd_per_hour, price.kind) == (1.5, "own")
    assert gpus["h100"].memory_bytes == shipped()["h100"].memory_bytes
    assert gpus["h200"] == shipped()["h200"]


def test_a_users_own_price_goes_before_others() -> None:
    gpus = merged(b"gpus: {b200: {prices: [{usd_per_hour: 9, kind: spot}, {usd_per_hour: 10}]}}", "own.yaml")
    price = gpus["b200"].price()
    assert price is not None
    assert price.usd_per_hour == 10


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"[1]", "expected one key, `gpus`"),
        (b"gpus: {h100: {memory_bytes: -1}}", "own.yaml: gpus.h100.memory_bytes"),
        (b"gpus: {h100: {memory: 1}}", "own.yaml: gpus.h100.memory"),
        (b"gpus: {mine: {title: x}}", "gpus.mine.compute_capability"),
        (b"gpus: {h100: {memory_bytes_s: .inf}}", "memory_bytes_s"),
        (b"gpus: {h100: {memory_bytes_s: .nan}}", "memory_bytes_s"),
        (b"gpus: {'UPPER case': {}}", "UPPER case"),
        (b"gpus: {h100: 3}", "gpus.h100"),
        (b"gpus: &a {h100: *a}", "alias"),
        (b"{", "not YAML"),
    ],
)
def test_a_bad_file_is_refused_by_name(content: bytes, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        merged(content, "own.yaml")
    assert "own.yaml" in caught.value.message
    assert says in caught.value.message


def test_the_limits_of_a_file() -> None:
    entry = shipped()["h100"].model_dump(mode="json")
    room = MAX_GPUS - len(shipped())

    def content(count: int) -> bytes:
        return json.dumps({"gpus": {f"own-{i}": entry for i in range(count)}}).encode()

    assert len(merged(content(room), "own.yaml")) == MAX_GPUS
    with pytest.raises(ConfigError, match="at most 256"):
        merged(content(room + 1), "own.yaml")
    with pytest.raises(ConfigError, match="limit"):
        merged(b" " * (MAX_FILE_BYTES + 1), "own.yaml")


def test_an_unknown_gpu_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="h100, h200"):
        find(shipped(), "h300")


def test_too_many_prices_are_refused() -> None:
    prices = ", ".join(["{usd_per_hour: 1}"] * (gpu_catalogue.MAX_PRICES + 1))
    with pytest.raises(ConfigError, match="prices"):
        merged(f"gpus: {{h100: {{prices: [{prices}]}}}}".encode(), "own.yaml")
