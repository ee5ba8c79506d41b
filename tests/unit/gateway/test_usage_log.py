"""Usage records in files: what is written, what is lost, and what the sums make of damaged files."""

from __future__ import annotations

import asyncio
import os
import threading
from pathlib import Path

import pytest

from kvferry.gateway import usage_log
from kvferry.gateway.usage_log import UsageLog, UsageRecord, read
from kvferry.gateway.usage_totals import totals

DAY_S = 86400.0


def record(tenant: str = "acme", unix_s: float = 0.0, **fields: object) -> UsageRecord:
    values: dict[str, object] = {
        "unix_s": unix_s,
        "tenant": tenant,
        "request_id": "cmpl-1",
        "endpoint": "completions",
        "outcome": "ok",
        "prompt_tokens": 10,
        "cached_tokens": 4,
        "generated_tokens": 3,
        "seconds": 0.5,
    }
    return UsageRecord(**(values | fields))  # type: ignore[arg-type]


def files_of(folder: Path) -> list[Path]:
    return sorted(folder.iterdir())


def refuse(file: Path, number: int) -> None:
    raise AssertionError(f"{file}:{number}")


async def write(folder: Path, *records: UsageRecord, gateway_id: str = "gateway-1", day: float = 0.0) -> UsageLog:
    log = UsageLog(folder, gateway_id, clock=lambda: day * DAY_S)
    log.start()
    for each in records:
        log.add(each)
    await log.close()
    return log


async def test_records_are_in_a_private_file_of_the_day_and_the_gateway(tmp_path: Path) -> None:
    folder = tmp_path / "usage"
    await write(folder, record(), record("beta"))
    await write(folder, record("beta"), gateway_id="gateway-2", day=1.0)
    names = sorted(file.name for file in folder.iterdir())
    assert names == ["usage-1970-01-01-gateway-1.jsonl", "usage-1970-01-02-gateway-2.jsonl"]
    assert folder.stat().st_mode & 0o777 == 0o700
    assert all(file.stat().st_mode & 0o777 == 0o600 for file in folder.iterdir())
    assert list(read(folder, refuse)) == [record(), record("beta"), record("beta")]


async def test_closing_waits_for_a_flush_that_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, free = threading.Event(), threading.Event()

    class SlowDrive(UsageLog):
        def _write(self, records: list[UsageRecord]) -> None:
            begun.set()
            free.wait(30)
            super()._write(records)

    monkeypatch.setattr(usage_log, "FLUSH_S", 0.0)
    log = SlowDrive(tmp_path / "usage", "gateway-1", clock=lambda: 0.0)
    log.add(record())
    log.start()
    assert await asyncio.to_thread(begun.wait, 30)
    log.add(record("beta"))
    closing = asyncio.create_task(log.close())
    await asyncio.sleep(0)
    free.set()
    await asyncio.wait_for(closing, 30)
    assert list(read(tmp_path / "usage", refuse)) == [record(), record("beta")]


async def test_a_large_file_is_followed_by_another_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(usage_log, "MAX_FILE_BYTES", 100)
    for _ in range(3):
        await write(tmp_path, record())
    files = files_of(tmp_path)
    assert len(files) == len(list(read(tmp_path, refuse))) == 3


async def test_a_drive_that_fails_costs_records_and_no_request(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    log = await write(tmp_path / "file" / "below", *[record()] * 5)
    assert log.num_lost == 5
    log = UsageLog(tmp_path, "g")
    for _ in range(usage_log.MAX_WAITING + 7):
        log.add(record())
    assert log.num_lost == 7
    await log.close()
    assert len(list(read(tmp_path, refuse))) == usage_log.MAX_WAITING


async def test_a_write_that_fails_half_way_leaves_no_torn_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    await write(tmp_path, record())
    real = os.write

    def full(fd: int, data: memoryview) -> int:
        if len(data) > 20:
            return real(fd, data[:20])
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "write", full)
        log = await write(tmp_path, record("beta"))
    assert log.num_lost == 1
    await write(tmp_path, record("gamma"))
    assert [each.tenant for each in read(tmp_path, refuse)] == ["acme", "gamma"]


async def test_sums_are_by_day_and_tenant_and_skip_what_is_no_record(tmp_path: Path) -> None:
    await write(
        tmp_path,
        record(unix_s=1.0),
        record(unix_s=2.0, outcome="refused", prompt_tokens=0, cached_tokens=0, generated_tokens=0),
        record("beta", unix_s=3.0),
        record(unix_s=DAY_S + 1.0),
    )
    bad = tmp_path / "usage-1970-01-03-gateway-9.jsonl"
    bad.write_bytes(b'{"tenant": "acme"}\n' + b"x" * 100_000 + b"\n\xff\n" + b'{"unix_s": 1.0, "tenant": "ac')
    sums = totals(tmp_path, None, None, None)
    assert list(sums.rows()) == [
        ("1970-01-01", "acme", 1, 1, 0, 0, 10, 4, 3),
        ("1970-01-01", "beta", 1, 0, 0, 0, 10, 4, 3),
        ("1970-01-02", "acme", 1, 0, 0, 0, 10, 4, 3),
    ]
    assert (sums.num_bad, sums.first_bad) == (4, f"{bad}:1")
    assert [row[1] for row in totals(tmp_path, 2.0, 4.0, None).rows()] == ["acme", "beta"]
    assert [row[0] for row in totals(tmp_path, None, None, "acme").rows()] == ["1970-01-01", "1970-01-02"]
    with pytest.raises(OSError, match="no folder"):
        totals(tmp_path / "absent", None, None, None)
