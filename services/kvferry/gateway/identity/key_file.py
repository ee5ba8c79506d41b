"""API keys and tenants in a YAML file, reread when changed: `{tenant, name, sha256}` each, and what is optional.

`operator`: the key also reads what is not of one tenant. `metrics`: it reads metrics and the list of targets alone.
`pool`: the workers that serve the tenant, the same for all its keys.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import logging
import os
import stat
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from kvferry.config import check_pool_name
from kvferry.errors import ConfigError
from kvferry.tenancy.namespace import check_name
from kvferry.tenancy.records import KeyRecord, make_key
from kvferry.util import plain_yaml
from kvferry.util.files import FileSignature, file_signature

log = logging.getLogger(__name__)

LOOK_INTERVAL_S = 1.0  # the file is looked at no more often
# Larger files are read in a thread, and the old keys hold until it ends: 10,000 keys take 0.6 s.
READ_AT_ONCE_BYTES = 8 << 10
MAX_FILE_BYTES = 16 << 20

_FIELDS = ("tenant", "name", "sha256")
_OPERATOR = "operator"
_METRICS = "metrics"
_POOL = "pool"


@dataclass(frozen=True, slots=True)
class ApiKey:
    """An entry without the key itself. Raises ValueError for an invalid tenant, name or digest."""

    tenant: str
    name: str
    sha256: str  # of the whole key, prefix included; hexadecimal
    operator: bool = False  # may also read what is not of one tenant: metrics, targets
    pool: str = ""  # of workers that serve the tenant, also where it shows a token
    metrics: bool = False  # may read metrics and targets alone

    def __post_init__(self) -> None:
        check_name(self.tenant)
        if self.operator and self.metrics:
            raise ValueError("a key is for operators, or for metrics alone")
        if self.pool:
            check_pool_name(self.pool)
        KeyRecord(name=self.name, sha256=self.sha256).check()


class KeyFile:
    def __init__(self, file: Path, *, clock: Callable[[], float] = time.monotonic) -> None:
        """Raises ConfigError for a file that is not a key file."""
        self._file = file
        self._clock = clock
        self._seen = file_signature(file)
        self._looked_s = clock()
        self._take_keys(_by_digest(read_keys(file)))
        self._fault = ""
        self._reading: tuple[FileSignature | None, Future[dict[bytes, ApiKey]]] | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="key-file")
        if not self._digest_to_key:
            log.warning("%s has no keys: nobody can use this gateway", file)

    def __repr__(self) -> str:
        return f"<KeyFile {self._file} keys={len(self._digest_to_key)}>"

    def find(self, digest: bytes) -> ApiKey | None:
        """Look a key up by its SHA-256, which reveals nothing about a key that nearly matches."""
        self._look()
        return self._digest_to_key.get(digest)

    def pool_of(self, tenant: str) -> str:
        """Return the pool that the file gives to the tenant; empty for none."""
        self._look()
        return self._tenant_to_pool.get(tenant, "")

    def _take_keys(self, digest_to_key: dict[bytes, ApiKey]) -> None:
        self._digest_to_key = digest_to_key
        self._tenant_to_pool = {key.tenant: key.pool for key in digest_to_key.values() if key.pool}

    def _look(self) -> None:
        if self._reading is not None:
            signature, reading = self._reading
            if reading.done():
                self._reading = None
                self._take(signature, reading.result)
            return
        now_s = self._clock()
        if now_s - self._looked_s < LOOK_INTERVAL_S:
            return
        self._looked_s = now_s
        signature = file_signature(self._file)
        if signature == self._seen:
            return
        if signature is None or signature.size_bytes <= READ_AT_ONCE_BYTES:
            self._take(signature, self._read)
        else:
            self._reading = signature, self._thread.submit(self._read)

    def _read(self) -> dict[bytes, ApiKey]:
        return _by_digest(read_keys(self._file))

    def _take(self, signature: FileSignature | None, read: Callable[[], dict[bytes, ApiKey]]) -> None:
        try:
            self._take_keys(read())
        except ConfigError as error:
            self._complain(error)
            return
        self._seen, self._fault = signature, ""
        log.info("%s was read again: %d keys", self._file, len(self._digest_to_key))

    def _complain(self, error: ConfigError) -> None:
        # A secret that is half written must not lock every client out.
        if error.message != self._fault:
            self._fault = error.message
            log.error("keys stay as they were: %s", error.message)


def read_keys(file: Path) -> list[ApiKey]:
    """Raises ConfigError naming the file, the entry and the fault."""
    try:
        values = plain_yaml.load(plain_yaml.read_bounded(file, MAX_FILE_BYTES))
    except OSError as error:
        raise ConfigError(f"gateway.keys_file: {file}: {error.strerror}", param="gateway.keys_file") from None
    except ValueError as error:
        raise ConfigError(f"gateway.keys_file: {file}: {error}", param="gateway.keys_file") from None
    if values is None:
        return []
    if not isinstance(values, list):
        raise ConfigError(f"gateway.keys_file: {file}: expected a list of {{tenant, name, sha256}}")
    keys: list[ApiKey] = []
    names: set[tuple[str, str]] = set()
    digest_to_key: dict[str, ApiKey] = {}
    tenant_to_pool: dict[str, str] = {}
    for number, value in enumerate(values, start=1):
        where = f"gateway.keys_file: {file}: entry {number}"
        if not isinstance(value, dict) or value.keys() - {_OPERATOR, _METRICS, _POOL} != set(_FIELDS):
            raise ConfigError(
                f"{where}: expected exactly {', '.join(_FIELDS)}, {_OPERATOR} or {_METRICS} where it is true, "
                f"{_POOL} if there is one"
            )
        if not all(isinstance(value[field], str) for field in _FIELDS):
            raise ConfigError(f"{where}: {', '.join(_FIELDS)} are strings; quote what YAML takes for a number")
        for field in (_OPERATOR, _METRICS):
            if not isinstance(value.get(field, False), bool):
                raise ConfigError(f"{where}: {field} is true or false")
        if not isinstance(pool := value.get(_POOL, ""), str):
            raise ConfigError(f"{where}: {_POOL} is a string; quote what YAML takes for a number")
        try:
            operator, metrics = value.get(_OPERATOR, False), value.get(_METRICS, False)
            key = ApiKey(value["tenant"], value["name"], value["sha256"], operator, pool, metrics)
        except ValueError as error:
            raise ConfigError(f"{where}: {error}") from None
        if (key.tenant, key.name) in names:
            raise ConfigError(f"{where}: the tenant {key.tenant!r} has a key {key.name!r} already")
        if (other := digest_to_key.get(key.sha256)) is not None:
            raise ConfigError(f"{where}: the same key as {other.tenant}/{other.name}")
        if (known := tenant_to_pool.setdefault(key.tenant, key.pool)) != key.pool:
            raise ConfigError(
                f"{where}: the tenant {key.tenant!r} has pool {key.pool!r} here and {known!r} in an entry before it"
            )
        names.add((key.tenant, key.name))
        digest_to_key[key.sha256] = key
        keys.append(key)
    return keys


def new_key(file: Path, tenant: str, name: str, *, operator: bool = False, metrics: bool = False) -> str:
    """Make and return a key; add its hash to the file, created if missing. It has the pool of the tenant's other keys.

    Raises ConfigError for an unusable file, and for names that are invalid or in use.
    """
    key, digest = make_key()
    try:
        added = ApiKey(tenant, name, digest, operator, metrics=metrics)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    with _locked(file):
        known = read_keys(file) if file.exists() else []
        if any((entry.tenant, entry.name) == (tenant, name) for entry in known):
            raise ConfigError(f"{file}: the tenant {tenant!r} has a key {name!r} already")
        pool = next((entry.pool for entry in known if entry.tenant == tenant), "")
        _write(file, [*known, dataclasses.replace(added, pool=pool)])
    return key


def _write(file: Path, keys: Sequence[ApiKey]) -> None:
    """Replace the file atomically, since gateways read it meanwhile."""
    lines = [
        f"- {{tenant: {key.tenant!r}, name: {key.name!r}, sha256: {key.sha256!r}"
        f"{', operator: true' if key.operator else ''}{', metrics: true' if key.metrics else ''}"
        f"{f', pool: {key.pool!r}' if key.pool else ''}}}\n"
        for key in keys
    ]
    comments, mode = [], 0o600
    if file.exists():
        mode = stat.S_IMODE(file.stat().st_mode)
        comments = [line for line in file.read_text(encoding="utf-8").splitlines(keepends=True) if line[:1] == "#"]
    handle, name = tempfile.mkstemp(prefix=f".{file.name}.", dir=file.parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as written:
            os.fchmod(written.fileno(), mode)
            written.writelines((*comments, *lines))
            written.flush()
            os.fsync(written.fileno())
        Path(name).replace(file)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


@contextlib.contextmanager
def _locked(file: Path) -> Iterator[None]:
    try:
        folder = os.open(file.parent, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise ConfigError(f"{file.parent}: {error.strerror}") from None
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror}") from None
    finally:
        os.close(folder)


def _by_digest(keys: Sequence[ApiKey]) -> dict[bytes, ApiKey]:
    return {bytes.fromhex(key.sha256): key for key in keys}
