"""Sealing keys, derived from a file of secrets by HKDF-SHA-256.

JSON: from tenant, or "*" for all others, to at least 64 hexadecimal digits.
"""

from __future__ import annotations

import functools
import json
import os
import stat
from collections.abc import Mapping
from pathlib import Path

from kvferry.errors import ConfigError
from kvferry.store.chunk_file import SEALING_KEY_BYTES
from kvferry.tenancy.namespace import Namespace

ANY_TENANT = "*"
_MIN_SECRET_BYTES = 32


class SecretsKeyring:
    def __init__(self, tenant_to_secret: Mapping[str, bytes]) -> None:
        """Raises ValueError for an invalid tenant, or secrets below 32 bytes."""
        for tenant, secret in tenant_to_secret.items():
            if tenant != ANY_TENANT:
                Namespace(tenant)
            if len(secret) < _MIN_SECRET_BYTES:
                raise ValueError(f"the secret of {tenant!r} has {len(secret)} bytes; at least {_MIN_SECRET_BYTES}")
        self._tenant_to_secret = dict(tenant_to_secret)
        self._derived = functools.lru_cache(maxsize=4096)(self._derive)

    def __repr__(self) -> str:
        return f"<SecretsKeyring of {sorted(self._tenant_to_secret)}>"

    def key(self, namespace: Namespace) -> bytes | None:
        return self._derived(namespace)

    def _derive(self, namespace: Namespace) -> bytes | None:
        from cryptography.hazmat.primitives import hashes
        from cryptography.hazmat.primitives.kdf.hkdf import HKDF

        secret = self._tenant_to_secret.get(namespace.tenant, self._tenant_to_secret.get(ANY_TENANT))
        if secret is None:
            return None
        # The text is unique to the namespace: tenants contain no dot.
        info = b"kvferry page " + str(namespace).encode("ascii")
        return HKDF(hashes.SHA256(), SEALING_KEY_BYTES, salt=None, info=info).derive(secret)


def load_keyring(file: Path) -> SecretsKeyring:
    """Raises ConfigError for an absent, malformed or not private file."""
    try:
        with file.open("rb") as opened:
            status = os.fstat(opened.fileno())
            # A secret mounted by Kubernetes belongs to root and is readable through the pod's group.
            refused = 0o077 if status.st_uid == os.geteuid() else 0o027
            if stat.S_IMODE(status.st_mode) & refused:
                raise ConfigError(f"{file}: others may read these secrets; allow it to its owner only (chmod 600)")
            secrets = json.load(opened)
        if not isinstance(secrets, dict) or not all(isinstance(secret, str) for secret in secrets.values()):
            raise ValueError("not an object from tenant to secret")
        return SecretsKeyring({tenant: bytes.fromhex(secret) for tenant, secret in secrets.items()})
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror}") from None
    except ValueError as error:
        raise ConfigError(f"{file}: {_without_secrets(error)}") from None


def _without_secrets(error: ValueError) -> str:
    # JSONDecodeError would show the line, which may contain a secret.
    return f"not JSON, line {error.lineno}" if isinstance(error, json.JSONDecodeError) else str(error)
