"""Sealing keys, derived from a file of secrets by HKDF-SHA-256.

JSON: from tenant, or "*" for others, to its secrets of at least 64 hexadecimal digits. The first one seals, all open.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvferry.errors import ConfigError
from kvferry.store.chunk_file import SEALING_KEY_BYTES
from kvferry.tenancy.namespace import Namespace

ANY_TENANT = "*"
MAX_SECRETS = 8  # of a tenant
MAX_TENANTS = 65_536
_MIN_SECRET_BYTES = 32
_MAX_FILE_BYTES = 64 << 20

log = logging.getLogger(__name__)


class SecretsKeyring:
    def __init__(self, tenant_to_secrets: Mapping[str, bytes | Sequence[bytes]]) -> None:
        """Raises ValueError for an invalid tenant, secrets below 32 bytes, none, or too many."""
        if len(tenant_to_secrets) > MAX_TENANTS:
            raise ValueError(f"{len(tenant_to_secrets)} tenants; at most {MAX_TENANTS}")
        self._tenant_to_secrets: dict[str, tuple[bytes, ...]] = {}
        for tenant, given in tenant_to_secrets.items():
            if tenant != ANY_TENANT:
                Namespace(tenant)
            secrets = (given,) if isinstance(given, bytes) else tuple(given)
            if not 1 <= len(secrets) <= MAX_SECRETS:
                raise ValueError(f"{tenant!r} has {len(secrets)} secrets; at least 1 and at most {MAX_SECRETS}")
            for secret in secrets:
                if len(secret) < _MIN_SECRET_BYTES:
                    raise ValueError(f"a secret of {tenant!r} has {len(secret)} bytes; at least {_MIN_SECRET_BYTES}")
            if len(set(secrets)) < len(secrets):
                raise ValueError(f"a secret of {tenant!r} is there twice")
            self._tenant_to_secrets[tenant] = secrets
        self._derived = functools.lru_cache(maxsize=4096)(self._derive)

    def __repr__(self) -> str:
        return f"<SecretsKeyring of {sorted(self._tenant_to_secrets)}>"

    def keys(self, namespace: Namespace, volume_id: str) -> tuple[bytes, ...]:
        return self._derived(namespace, volume_id)

    def _derive(self, namespace: Namespace, volume_id: str) -> tuple[bytes, ...]:
        from cryptography.hazmat.primitives import hashes
        from cryptography.hazmat.primitives.kdf.hkdf import HKDF

        tenant = namespace.tenant if namespace.tenant in self._tenant_to_secrets else ANY_TENANT
        # The text is unique to volume and namespace: neither contains a space.
        info = f"kvferry chunk {volume_id} {namespace}".encode("ascii")
        return tuple(
            HKDF(hashes.SHA256(), SEALING_KEY_BYTES, salt=None, info=info).derive(secret)
            for secret in self._tenant_to_secrets.get(tenant, ())
        )


class KeyFile:
    """A keyring from a file that may change. Thread-safe."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._seen = _version_of(file)
        self._keyring = load_keyring(file)

    def __repr__(self) -> str:
        return f"<KeyFile {self._file}: {self._keyring!r}>"

    def keys(self, namespace: Namespace, volume_id: str) -> tuple[bytes, ...]:
        return self._keyring.keys(namespace, volume_id)

    def refresh(self) -> None:
        """Read the file again if it changed. One that cannot be used changes nothing."""
        seen = _version_of(self._file)
        if seen == self._seen:
            return
        self._seen = seen
        try:
            self._keyring = load_keyring(self._file)
        except ConfigError as error:
            log.error("sealing keys are as they were: %s", error.message)
        else:
            log.info("sealing keys are read again: %s", self._file)


def load_keyring(file: Path) -> SecretsKeyring:
    """Raises ConfigError for an absent, malformed or not private file."""
    try:
        with file.open("rb") as opened:
            status = os.fstat(opened.fileno())
            # A secret mounted by Kubernetes belongs to root and is readable through the pod's group.
            refused = 0o077 if status.st_uid == os.geteuid() else 0o027
            if stat.S_IMODE(status.st_mode) & refused:
                raise ConfigError(f"{file}: others may read these secrets; allow it to its owner only (chmod 600)")
            secrets = json.loads(opened.read(_MAX_FILE_BYTES))
        if not isinstance(secrets, dict):
            raise ValueError("not an object from tenant to secrets")
        return SecretsKeyring({tenant: _parse_secrets(tenant, given) for tenant, given in secrets.items()})
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror}") from None
    except RecursionError:
        raise ConfigError(f"{file}: not an object from tenant to secrets") from None
    except ValueError as error:
        raise ConfigError(f"{file}: {_without_secrets(error)}") from None


def _parse_secrets(tenant: str, given: object) -> list[bytes]:
    texts: list[Any] = given if isinstance(given, list) else [given]
    try:
        if all(isinstance(text, str) for text in texts):
            return [bytes.fromhex(text) for text in texts]
    except ValueError:
        pass
    raise ValueError(f"secrets of {tenant[:64]!r} are no hexadecimal digits, nor a list of such")


def _without_secrets(error: ValueError) -> str:
    # JSONDecodeError would show the line, which may contain a secret.
    return f"not JSON, line {error.lineno}" if isinstance(error, json.JSONDecodeError) else str(error)


def _version_of(file: Path) -> tuple[int, int, int] | None:
    try:
        status = file.stat()
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns, status.st_size
