"""The name in a client's certificate."""

from __future__ import annotations

import datetime
import ssl

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from kvferry.gateway.tls import common_name

KEY = ec.generate_private_key(ec.SECP256R1())


def certificate(*attributes: x509.NameAttribute) -> x509.Certificate:
    name, now = x509.Name(attributes), datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)
    made = x509.CertificateBuilder(name, name, KEY.public_key(), x509.random_serial_number(), now, now)
    return made.sign(KEY, hashes.SHA256())


def named(*names: str) -> x509.Certificate:
    return certificate(*(x509.NameAttribute(NameOID.COMMON_NAME, name) for name in names))


@pytest.mark.parametrize("encoding", [serialization.Encoding.DER, serialization.Encoding.PEM])
@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["acme"], "acme"),
        (["acme\0evil"], "acme\0evil"),
        (["acme\nevil"], "acme\nevil"),
        (["acme", "evil"], "acme"),
        (["Größe"], "Größe"),
        ([], ""),
    ],
)
def test_the_first_common_name_is_read_whole(names: list[str], expected: str, encoding: serialization.Encoding) -> None:
    assert common_name(named(*names).public_bytes(encoding)) == expected


def test_another_attribute_is_no_common_name() -> None:
    other = certificate(x509.NameAttribute(NameOID.ORGANIZATION_NAME, "acme"))
    assert common_name(other.public_bytes(serialization.Encoding.DER)) == ""


def test_a_certificate_that_cannot_be_read_has_no_name() -> None:
    """OpenSSL verified it; another parser may still refuse a field."""
    assert common_name(named("acme").public_bytes(serialization.Encoding.DER)[:-10]) == ""
    assert common_name(ssl.DER_cert_to_PEM_cert(b"\x30\x03abc").encode()) == ""
