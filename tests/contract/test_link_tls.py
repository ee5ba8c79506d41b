"""Mutual TLS: who may link, and who is believed to be a worker."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from pathlib import Path

import pytest

from bench.etcd_server import Authority
from kvferry.config import TlsConfig, WorkerConfig
from kvferry.engine.base import EngineOutput, FinishReason
from kvferry.link.worker_link import WorkerLink
from kvferry.worker.server import WorkerServer
from support.link_peers import member_of, request, serving, simulated
from support.waiting import SOON_S, until


@dataclass
class Files:
    ours: TlsConfig
    theirs: TlsConfig  # of another authority
    mixed: TlsConfig  # trusts ours, shows a certificate of theirs
    expired: TlsConfig  # ours, of another day


@pytest.fixture
def files(tmp_path: Path) -> Files:
    ours, theirs = Authority(tmp_path, "ours"), Authority(tmp_path, "theirs")
    (cert, key), (other_cert, other_key) = ours.issue("node"), theirs.issue("stranger")
    old_cert, old_key = ours.issue("yesterday", expired=True)
    return Files(
        TlsConfig(cert_file=cert, key_file=key, ca_file=ours.ca_file),
        TlsConfig(cert_file=other_cert, key_file=other_key, ca_file=theirs.ca_file),
        TlsConfig(cert_file=other_cert, key_file=other_key, ca_file=ours.ca_file),
        TlsConfig(cert_file=old_cert, key_file=old_key, ca_file=ours.ca_file),
    )


def link_to(worker: WorkerServer, tls: TlsConfig) -> WorkerLink:
    return WorkerLink(member_of(worker), "g", lambda: None, WorkerConfig(tls=tls))


async def test_a_request_over_mutual_tls(files: Files) -> None:
    async with simulated() as engine, serving(engine, tls=files.ours) as worker:
        link = link_to(worker, files.ours)
        try:
            await until(lambda: link.usable)
            outputs: list[EngineOutput] = []
            last = await link.submit(request("a", max_tokens=300), outputs.append).wait()
            assert last.finish_reason is FinishReason.LENGTH
            assert sum(len(output.token_ids) for output in outputs) == 300
        finally:
            async with asyncio.timeout(SOON_S):
                await link.close()
        await until(lambda: not worker.sessions)


@pytest.mark.parametrize("shown", ["nothing", "theirs", "mixed", "expired", "wrong name"])
async def test_who_does_not_belong_is_not_linked(files: Files, shown: str, caplog: pytest.LogCaptureFixture) -> None:
    tls = {
        "nothing": TlsConfig(),
        "theirs": files.theirs,
        "mixed": files.mixed,
        "expired": files.expired,
        "wrong name": files.ours.model_copy(update={"server_name": "elsewhere.example"}),
    }[shown]
    async with simulated() as engine, serving(engine, tls=files.ours) as worker:
        with caplog.at_level(logging.DEBUG, logger="kvferry.link.worker_link"):
            link = link_to(worker, tls)
            try:
                # Dialled and refused, more than once.
                await until(lambda: caplog.text.count("no link to worker w yet") >= 2)
                assert not link.connected
                assert not worker.sessions
            finally:
                await link.close()


async def test_a_name_that_the_certificate_carries_will_do(files: Files) -> None:
    async with simulated() as engine, serving(engine, tls=files.ours) as worker:
        link = link_to(worker, files.ours.model_copy(update={"server_name": "localhost"}))
        try:
            await until(lambda: link.usable)
        finally:
            await link.close()


async def test_a_worker_without_tls_is_not_believed(files: Files) -> None:
    async with simulated() as engine, serving(engine) as worker:
        link = link_to(worker, files.ours)
        try:
            await until(lambda: bool(link._why_not), what="the dial came to nothing")
            assert not link.connected
            assert not worker.sessions
        finally:
            await link.close()
