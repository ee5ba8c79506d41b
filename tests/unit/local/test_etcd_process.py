"""The etcd that `kvferry up` starts: which clients it takes."""

from __future__ import annotations

import signal
import ssl
import tempfile
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from bench.etcd_server import find_binary
from kvferry.config import MembershipConfig, TlsConfig
from kvferry.errors import UnavailableError
from kvferry.membership.etcd import EtcdMembership
from kvferry_local.authority import make_certificates
from kvferry_local.child import Pace
from kvferry_local.etcd_process import Etcd, start_etcd
from kvferry_local.run_folder import RunFolder
from support.local_machine import listening_ports
from support.waiting import wait_until

pytestmark = pytest.mark.skipif(find_binary() is None, reason="no etcd on this machine")


@pytest.fixture(scope="module")
def started() -> Iterator[tuple[Etcd, TlsConfig]]:
    with tempfile.TemporaryDirectory(prefix="kvf-", dir="/tmp") as parent:
        folder = RunFolder(Path(parent).resolve() / "r")
        folder.prepare()
        folder.new_tokens()
        tls = make_certificates(folder.tls)
        etcd = start_etcd(folder, tls, Pace())
        try:
            yield etcd, tls
        finally:
            etcd.child.identity.send(signal.SIGKILL)
            wait_until(etcd.child.has_ended, what="etcd has ended")


async def members_by(config: MembershipConfig) -> int:
    membership = EtcdMembership(config)
    try:
        return len(await membership.members())
    finally:
        await membership.close()


async def test_a_client_needs_a_certificate_of_the_run(started: tuple[Etcd, TlsConfig], tmp_path: Path) -> None:
    etcd, tls = started
    registry = MembershipConfig(
        endpoints=(etcd.endpoint,), ca_file=tls.ca_file, cert_file=tls.cert_file, key_file=tls.key_file
    )
    assert await members_by(registry) == 0
    other = make_certificates(tmp_path / "tls")
    without = {"cert_file": None, "key_file": None}
    for stranger in (without, {**without, "ca_file": None}, {"cert_file": other.cert_file, "key_file": other.key_file}):
        with pytest.raises(UnavailableError):
            await members_by(registry.model_copy(update=stranger))
    # It shows a certificate of the run too: another process on its port is no etcd of ours.
    with pytest.raises(UnavailableError):
        await members_by(registry.model_copy(update={"ca_file": other.ca_file}))


def test_no_port_of_it_answers_without_a_certificate(started: tuple[Etcd, TlsConfig]) -> None:
    etcd, _ = started
    ports = listening_ports((etcd.child.identity,))
    assert len(ports) == 2, "for clients, and for peers"
    blind = ssl.create_default_context()
    blind.check_hostname, blind.verify_mode = False, ssl.CERT_NONE
    for port in ports:
        for scheme in ("http", "https"):
            with httpx.Client(verify=blind, trust_env=False) as client, pytest.raises(httpx.HTTPError):
                client.get(f"{scheme}://127.0.0.1:{port}/version").raise_for_status()
