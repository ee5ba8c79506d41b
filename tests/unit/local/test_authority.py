"""Certificates that `kvferry up` makes: who believes whom, and what of it is private."""

from __future__ import annotations

import asyncio
import ssl
import stat
from pathlib import Path

import pytest

from kvferry import mutual_tls as worker_tls
from kvferry.config import TlsConfig, parse
from kvferry_local.authority import SERVER_NAME, make_certificates


async def exchanged(server: TlsConfig, client: TlsConfig, name: str = SERVER_NAME) -> bytes:
    """What a client reads that dials by the loopback address. Raises what its side of TLS raises."""

    async def greet(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"hello")
        writer.close()

    listening = await asyncio.start_server(greet, "127.0.0.1", 0, ssl=worker_tls.server_context(server))
    async with listening:
        port = listening.sockets[0].getsockname()[1]
        context = worker_tls.client_context(client)
        # As the newest Python has it by default.
        context.verify_flags |= ssl.VERIFY_X509_STRICT
        reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context, server_hostname=name)
        try:
            return await reader.read()
        finally:
            writer.close()


async def test_processes_of_one_cluster_believe_each_other(tmp_path: Path) -> None:
    tls = make_certificates(tmp_path / "tls")
    assert await exchanged(tls, tls) == b"hello"
    assert tls.server_name == SERVER_NAME
    assert parse({"worker": {"tls": tls.model_dump(mode="json")}}).worker.tls == tls


async def test_another_cluster_is_not_believed(tmp_path: Path) -> None:
    ours, theirs = make_certificates(tmp_path / "ours"), make_certificates(tmp_path / "theirs")
    with pytest.raises(ssl.SSLCertVerificationError):
        await exchanged(theirs, ours)
    # It would believe us, and shows a certificate that we did not sign.
    mixed = ours.model_copy(update={"cert_file": theirs.cert_file, "key_file": theirs.key_file})
    with pytest.raises((ssl.SSLError, ConnectionError)):
        await exchanged(ours, mixed)
    with pytest.raises(ssl.SSLCertVerificationError, match="elsewhere"):
        await exchanged(ours, ours, "elsewhere.example")


def test_nobody_else_can_read_the_key_and_the_authoritys_own_is_nowhere(tmp_path: Path) -> None:
    make_certificates(tmp_path / "tls")
    assert stat.S_IMODE((tmp_path / "tls").stat().st_mode) == 0o700
    files = {file.name: file for file in (tmp_path / "tls").iterdir()}
    assert files.keys() == {"ca.crt", "tls.crt", "tls.key"}
    assert all(stat.S_IMODE(file.stat().st_mode) == 0o600 for file in files.values())
    assert [name for name, file in files.items() if b"PRIVATE KEY" in file.read_bytes()] == ["tls.key"]


def test_a_new_start_has_new_certificates(tmp_path: Path) -> None:
    first = make_certificates(tmp_path / "tls")
    assert first.cert_file is not None
    before = first.cert_file.read_bytes()
    assert make_certificates(tmp_path / "tls") == first
    assert first.cert_file.read_bytes() != before
