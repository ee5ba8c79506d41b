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
from kvferry.tenancy.namespace import Namespace
from kvferry.util.files import file_signature
from kvferry_keeper.store.chunk_file import SEALING_KEY_BYTES

ANY_TENANT = "*"
MAX_SECRETS = 8  # of a tenant
MAX_TENANTS = 65_536
_MIN_SECRET_BYTES = 32
_MAX_FILE_BYTES = 64 << 20
_MAX_TOLD = 256
_MAX_DERIVED = 4096  # of namespaces and volumes, whose keys are kept

log = logging.getLogger(__name__)


class SecretsKeyring:
    def __init__(self, tenant_to_secrets: Mapping[str, bytes | Sequence[bytes]]) -> None:
        """Raises ValueError with an entry's number: a tenant may be a secret by mistake."""
        if not tenant_to_secrets:
            raise ValueError(f'no tenant; "{ANY_TENANT}" stands for all')
        if len(tenant_to_secrets) > MAX_TENANTS:
            raise ValueError(f"{len(tenant_to_secrets)} tenants; at most {MAX_TENANTS}")
        self._tenant_to_secrets: dict[str, tuple[bytes, ...]] = {}
        for number, (tenant, given) in enumerate(tenant_to_secrets.items(), 1):
            if tenant != ANY_TENANT and not _is_tenant(tenant):
                raise ValueError(f"entry {number}: a tenant has lower-case letters, digits and dashes, at most 63")
            secrets = (given,) if isinstance(given, bytes) else tuple(given)
            if not 1 <= len(secrets) <= MAX_SECRETS:
                raise ValueError(f"entry {number} has {len(secrets)} secrets; at least 1 and at most {MAX_SECRETS}")
            for secret in secrets:
                if len(secret) < _MIN_SECRET_BYTES:
                    raise ValueError(
                        f"a secret of entry {number} has {len(secret)} bytes; at least {_MIN_SECRET_BYTES}"
                    )
            if len(set(secrets)) < len(secrets):
                raise ValueError(f"a secret of entry {number} is there twice")
            self._tenant_to_secrets[tenant] = secrets
        self._derived = functools.lru_cache(_MAX_DERIVED)(self._derive)

    def __repr__(self) -> str:
        return f"<SecretsKeyring of {sorted(self._tenant_to_secrets)}>"

    def keys(self, namespace: Namespace, volume_id: str) -> tuple[bytes, ...]:
        return self._derived(namespace, volume_id)

    def _derive(self, namespace: Namespace, volume_id: str) -> tuple[bytes, ...]:
        from cryptography.hazmat.primitives import hashes
        from cryptography.hazmat.primitives.kdf.hkdf import HKDF

        tenant = namespace.tenant if namespace.tenant in self._tenant_to_secrets else ANY_TENANT
        # The text is unique to volume and namespace: neither contains a space.
        info = f"kvferry chunk {volume_id} {namespace}".encode()
        return tuple(
            HKDF(hashes.SHA256(), SEALING_KEY_BYTES, salt=None, info=info).derive(secret)
            for secret in self._tenant_to_secrets.get(tenant, ())
        )


class SealingKeyFile:
    """A keyring from a file that may change. Thread-safe."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._seen = file_signature(file)
        self._keyring = load_keyring(file)
        self._fault = ""
        self._without_secret: set[str] = set()  # tenants, of which the log has told

    def __repr__(self) -> str:
        return f"<SealingKeyFile {self._file}: {self._keyring!r}>"

    def keys(self, namespace: Namespace, volume_id: str) -> tuple[bytes, ...]:
        keys = self._keyring.keys(namespace, volume_id)
        if not keys and namespace.tenant not in self._without_secret and len(self._without_secret) < _MAX_TOLD:
            self._without_secret.add(namespace.tenant)
            log.warning("%s has no secret for tenant %s: its chunks are not kept", self._file, namespace.tenant)
        return keys

    def refresh(self) -> None:
        """Read the file again if it changed. One that cannot be used changes nothing."""
        signature = file_signature(self._file)
        if signature == self._seen:
            return
        try:
            self._keyring = load_keyring(self._file)
        except ConfigError as error:
            # Read again until it can be used: a lack of descriptors passes without a change of the file.
            if error.message != self._fault:
                self._fault = error.message
                log.error("sealing keys are as they were: %s", error.message)
        else:
            self._seen, self._fault = signature, ""
            log.info("sealing keys are read again: %s", self._file)


def _without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        raise ValueError("a tenant is there twice")
    return values


def load_keyring(file: Path) -> SecretsKeyring:
    """Raises ConfigError for an absent, malformed or not private file."""
    try:
        with open(file, "rb", opener=_open_at_once) as opened:
            status = os.fstat(opened.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise ConfigError(f"{file}: not a regular file")
            # A secret mounted by Kubernetes belongs to root and is readable through the pod's group.
            refused = 0o077 if status.st_uid == os.geteuid() else 0o027
            if stat.S_IMODE(status.st_mode) & refused:
                raise ConfigError(f"{file}: others may read these secrets; allow it to its owner only (chmod 600)")
            secrets = json.loads(opened.read(_MAX_FILE_BYTES), object_pairs_hook=_without_doubles)
        if not isinstance(secrets, dict):
            raise ValueError("not an object from tenant to secrets")
        return SecretsKeyring(
            {tenant: _parse_secrets(number, given) for number, (tenant, given) in enumerate(secrets.items(), 1)}
        )
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror}") from None
    except RecursionError:
        raise ConfigError(f"{file}: not an object from tenant to secrets") from None
    except ValueError as error:
        raise ConfigError(f"{file}: {_without_secrets(error)}") from None


def _open_at_once(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)  # a pipe would wait for a writer


def _is_tenant(tenant: str) -> bool:
    try:
        Namespace(tenant)
    except ValueError:
        return False
    return True


def _parse_secrets(number: int, given: object) -> list[bytes]:
    texts: list[Any] = given if isinstance(given, list) else [given]
    try:
        if all(isinstance(text, str) for text in texts):
            return [bytes.fromhex(text) for text in texts]
    except ValueError:
        pass
    raise ValueError(f"secrets of entry {number} are no hexadecimal digits, nor a list of such")


def _without_secrets(error: ValueError) -> str:
    # JSONDecodeError would show the line, which may contain a secret.
    return f"not JSON, line {error.lineno}" if isinstance(error, json.JSONDecodeError) else str(error)
