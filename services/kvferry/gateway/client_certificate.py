"""The name in a client's certificate, read by one parser for HTTP and gRPC: two could read two names in one."""

from __future__ import annotations

import functools

from cryptography import x509
from cryptography.x509.oid import NameOID

_NUM_KEPT = 1024
_PEM = b"-----BEGIN"


@functools.lru_cache(_NUM_KEPT)
def common_name(certificate: bytes) -> str:
    """Return the first common name of a verified certificate, DER or PEM; "" where there is none that can be read."""
    load = x509.load_pem_x509_certificate if certificate.startswith(_PEM) else x509.load_der_x509_certificate
    try:
        names = load(certificate).subject.get_attributes_for_oid(NameOID.COMMON_NAME)
    except ValueError:
        return ""
    value = names[0].value if names else ""
    return value if isinstance(value, str) else ""
