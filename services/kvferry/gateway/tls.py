"""TLS of a gateway's listeners, from replaceable files."""

from __future__ import annotations

import functools
import logging
import ssl
from dataclasses import dataclass
from pathlib import Path

import grpc
from cryptography import x509
from cryptography.x509.oid import NameOID

from kvferry.config import ServerTlsConfig
from kvferry.errors import ConfigError
from kvferry.mutual_tls import AlertingSslObject
from kvferry.util.files import FileSignature, file_signature

log = logging.getLogger(__name__)

_NUM_NAMES = 1024  # of clients, that are kept
_PEM = b"-----BEGIN"


@dataclass(frozen=True, slots=True)
class _Files:
    cert: bytes
    key: bytes
    client_ca: bytes | None
    context: ssl.SSLContext


class GatewayTls:
    """Certificates of one gateway; new connections get the newest usable files.

    HTTP without a client certificate is refused in the application, so that probes work; gRPC in the handshake.
    """

    def __init__(self, config: ServerTlsConfig) -> None:
        """Raises ConfigError naming the file that cannot be used."""
        assert config.cert_file is not None
        assert config.key_file is not None
        self._cert_file, self._key_file = config.cert_file, config.key_file
        self._client_ca_file = config.client_ca_file
        self._seen = self._signatures()
        self._files = self._read()

    def http_context(self) -> ssl.SSLContext:
        """Return a listener's context, which checks for new files at each handshake."""
        context = self._files.context

        def at_hello(connection: ssl.SSLSocket | ssl.SSLObject, _name: str | None, _context: ssl.SSLContext) -> None:
            if (newest := self._newest().context) is not context:
                connection.context = newest

        # Called for every client, whether or not it names a server.
        context.sni_callback = at_hello
        return context

    def grpc_credentials(self) -> grpc.ServerCredentials:
        shown = self._files

        def newest() -> grpc.ServerCertificateConfiguration | None:
            nonlocal shown
            files = self._newest()
            if files is shown:
                return None
            shown = files
            return _grpc_certificates(files)

        return grpc.dynamic_ssl_server_credentials(
            _grpc_certificates(shown),
            newest,  # type: ignore[arg-type]  # None says that nothing changed, which its stubs do not know
            require_client_authentication=self._client_ca_file is not None,
        )

    def _newest(self) -> _Files:
        """Thread-safe, for gRPC's threads: two may read the same files."""
        signatures = self._signatures()
        if signatures != self._seen:
            self._seen = signatures
            try:
                self._files = self._read()
                log.info("gateway.tls: certificates were read again")
            except ConfigError as error:
                # Such as a certificate that was replaced before its key: looked at again when the key changes.
                log.error("certificates stay as they were: %s", error.message)
        return self._files

    def _signatures(self) -> tuple[FileSignature | None, ...]:
        files = (self._cert_file, self._key_file, self._client_ca_file)
        return tuple(file_signature(file) if file is not None else None for file in files)

    def _read(self) -> _Files:
        cert = _read("cert_file", self._cert_file)
        key = _read("key_file", self._key_file)
        client_ca = _read("client_ca_file", self._client_ca_file) if self._client_ca_file is not None else None
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_alpn_protocols(["http/1.1"])
        context.sslobject_class = AlertingSslObject
        try:
            context.load_cert_chain(self._cert_file, self._key_file)
            if client_ca is not None:
                context.load_verify_locations(cadata=client_ca.decode("ascii"))
                context.verify_mode = ssl.CERT_OPTIONAL
                # A session that is resumed shows no certificate again, also when its authority is no longer believed.
                context.num_tickets = 0
                context.options |= ssl.OP_NO_TICKET
        except (ssl.SSLError, ValueError) as error:
            reason = error.reason if isinstance(error, ssl.SSLError) else str(error)
            files = ", ".join(str(file) for file in (self._cert_file, self._key_file, self._client_ca_file) if file)
            raise ConfigError(f"gateway.tls: {files} cannot be used: {reason}", param="gateway.tls") from None
        return _Files(cert, key, client_ca, context)


def _grpc_certificates(files: _Files) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration([(files.key, files.cert)], root_certificates=files.client_ca)


def _read(name: str, file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise ConfigError(f"gateway.tls.{name}: {file}: {error.strerror}", param=f"gateway.tls.{name}") from None


@functools.lru_cache(_NUM_NAMES)
def common_name(certificate: bytes) -> str:
    """Return the first common name of a verified certificate, DER or PEM; empty where none can be read."""
    # One parser for HTTP and gRPC: two could read two names in one.
    load = x509.load_pem_x509_certificate if certificate.startswith(_PEM) else x509.load_der_x509_certificate
    try:
        names = load(certificate).subject.get_attributes_for_oid(NameOID.COMMON_NAME)
    except ValueError:
        return ""
    value = names[0].value if names else ""
    return value if isinstance(value, str) else ""
