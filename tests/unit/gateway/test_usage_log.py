"""Usage records in files: what is written, what is lost, and what the sums make of damaged files."""

from __future__ import annotations

import asyncio
import contextlib
import os
import stat
import threading
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner

from kvferry.cli import main
from kvferry.errors import ConfigError
from kvferry.gateway.usage import usage_log
from kvferry.gateway.usage.usage_log import UNFINISHED, UsageLog, UsageRecord, read
from kvferry_tenants.usage_totals import totals
from support.waiting import until

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
        ("1970-01-01", "acme", "ok", 1, 10, 4, 3),
        ("1970-01-01", "acme", "refused", 1, 0, 0, 0),
        ("1970-01-01", "beta", "ok", 1, 10, 4, 3),
        ("1970-01-02", "acme", "ok", 1, 10, 4, 3),
    ]
    assert (sums.num_bad, sums.first_bad) == (4, f"{bad}:1")
    assert [row[1:3] for row in totals(tmp_path, 2.0, 4.0, None).rows()] == [("acme", "refused"), ("beta", "ok")]
    assert [row[0] for row in totals(tmp_path, None, None, "acme").rows()] == ["1970-01-01", "1970-01-01", "1970-01-02"]
    with pytest.raises(OSError, match="no folder"):
        totals(tmp_path / "absent", None, None, None)


async def test_a_request_counts_as_its_last_record_says_or_as_it_was_seen_last(tmp_path: Path) -> None:
    """Its gateway may be killed: what it streamed until then is billed."""
    so_far = {"outcome": UNFINISHED, "request_id": "cmpl-1"}
    await write(
        tmp_path,
        record(unix_s=1.0, **so_far),
        record(unix_s=2.0, generated_tokens=30, **so_far),
        record(unix_s=2.0, outcome=UNFINISHED, request_id="cmpl-2"),
        record("beta", unix_s=2.0, **so_far),
        record(unix_s=3.0, generated_tokens=50, request_id="cmpl-2"),
    )
    assert list(totals(tmp_path, None, None, None).rows()) == [
        ("1970-01-01", "acme", "ok", 1, 10, 4, 50),
        ("1970-01-01", "acme", UNFINISHED, 1, 10, 4, 30),
        ("1970-01-01", "beta", UNFINISHED, 1, 10, 4, 3),
    ]
    assert [row[2] for row in totals(tmp_path, 2.5, None, None).rows()] == ["ok"]


async def test_files_of_a_gateway_are_read_in_the_order_in_which_it_wrote_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(usage_log, "MAX_FILE_BYTES", 1)
    log = UsageLog(tmp_path, "gateway-1", clock=lambda: 0.0)
    for number in range(12):
        log.add(record(generated_tokens=number))
        await log._flush()
    assert len(files_of(tmp_path)) == 12
    assert [each.generated_tokens for each in read(tmp_path, refuse)] == list(range(12))


async def test_requests_that_go_on_are_written_again_and_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(usage_log, "FLUSH_S", 0.0)
    monkeypatch.setattr(usage_log, "UNFINISHED_S", 0.0)
    asked = iter(range(1, 1000))

    def unfinished() -> list[UsageRecord]:
        return [record(outcome=UNFINISHED, generated_tokens=next(asked))]

    log = UsageLog(tmp_path, "gateway-1", clock=lambda: 0.0, read_unfinished=unfinished)
    log.start()
    await until(lambda: len(list(tmp_path.glob("*"))) == 1 and len(list(read(tmp_path, refuse))) >= 3)
    await log.close()
    written = [each.generated_tokens for each in read(tmp_path, refuse)]
    assert written == list(range(1, len(written) + 1))


async def test_records_wait_while_no_thread_can_be_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(usage_log, "FLUSH_S", 0.0)
    log = UsageLog(tmp_path, "gateway-1", clock=lambda: 0.0)
    refused = []

    def refuse_threads(*_: object) -> None:
        refused.append(1)
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(asyncio.get_running_loop(), "run_in_executor", refuse_threads)
        log.add(record())
        log.start()
        await until(lambda: len(refused) > 3)
    log.add(record("beta"))
    await until(lambda: len(list(tmp_path.glob("*"))) == 1)
    await log.close()
    assert [each.tenant for each in read(tmp_path, refuse)] == ["acme", "beta"]
    assert log.num_lost == 0
    assert caplog.text.count("can't start new thread") == 1


async def test_whatever_ends_a_write_costs_its_records_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(usage_log, "FLUSH_S", 0.0)
    log = UsageLog(tmp_path, "gateway-1", clock=lambda: 0.0)
    with monkeypatch.context() as patched:
        patched.setattr(UsageLog, "_write", lambda *_: 1 / 0)
        log.start()
        log.add(record())
        await until(lambda: log.num_lost == 1)
    log.add(record("beta"))
    await log.close()
    assert [each.tenant for each in read(tmp_path, refuse)] == ["beta"]
    assert "ZeroDivisionError" in caplog.text


@pytest.mark.parametrize(("mode", "taken"), [(0o700, True), (0o2775, True), (0o757, False), (0o1777, False)])
def test_a_folder_that_every_user_may_write_to_is_refused_and_keeps_its_mode(
    tmp_path: Path, mode: int, taken: bool
) -> None:
    folder = tmp_path / "usage"
    folder.mkdir()
    folder.chmod(mode)
    (folder / "usage-2026-01-01-planted.jsonl").write_bytes(msgspec.json.encode(record()) + b"\n")
    with contextlib.nullcontext() if taken else pytest.raises(ConfigError, match=r"gateway\.usage_dir: every user may"):
        UsageLog(folder, "gateway-1")
    result = CliRunner().invoke(main, ["tenant", "usage", "--dir", str(folder)])
    assert (result.exit_code, "every user may write" in result.stderr) == ((0, False) if taken else (2, True))
    assert stat.S_IMODE(folder.stat().st_mode) == mode
