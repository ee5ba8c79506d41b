"""Verifies JSON Web Tokens (RFC 7519) with an issuer's keys, from a file or URL."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Final

import httpx
import jwt

from kvferry.config import JwtConfig
from kvferry.errors import ConfigError, Unauthenticated
from kvferry.util.files import FileSignature, file_signature

log = logging.getLogger(__name__)

MAX_TOKEN_CHARS: Final = 8 << 10
MAX_JWKS_BYTES: Final = 256 << 10
MAX_JWKS_KEYS: Final = 64
LOOK_INTERVAL_S: Final = 1.0  # the file is looked at no more often
REFRESH_S: Final = 300.0
MIN_REFRESH_S: Final = 30.0  # after a token with a key that is not known
MAX_AGE_S: Final = 24 * 3600.0  # of keys that were last read then: an issuer that is away cannot revoke any
FETCH_TIMEOUT_S: Final = 5.0
_LEEWAY_S: Final = 30.0
_NUM_KEPT: Final = 4096
_KEPT_S: Final = 60.0  # verified tokens, so that a key which the issuer removed ends soon


def looks_like_jwt(token: str) -> bool:
    return token.count(".") == 2


class JwtTokens:
    def __init__(
        self,
        config: JwtConfig,
        *,
        transport: httpx.AsyncBaseTransport | None = None,
        clock: Callable[[], float] = time.monotonic,
        now_unix_s: Callable[[], float] = time.time,
    ) -> None:
        """Raises ConfigError for a file without a key that can be used."""
        self._config = config
        self._transport = transport
        self._clock = clock
        self._now_unix_s = now_unix_s
        self._keys: dict[str, jwt.PyJWK] = {}
        self._verified: OrderedDict[bytes, tuple[float, str]] = OrderedDict()  # digest: until when, and the tenant
        self._seen: FileSignature | None = None
        self._looked_s = self._read_s = clock()
        self._task: asyncio.Task[None] | None = None
        self._wanted = asyncio.Event()  # a token's key is not known
        if config.jwks_file is not None:
            self._seen = file_signature(config.jwks_file)
            self._keys = read_jwks(_file_bytes(config), str(config.jwks_file))
            if not self._keys:
                raise ConfigError(f"{config.jwks_file}: no key that can verify a signature")

    def __repr__(self) -> str:
        return f"<JwtTokens issuer={self._config.issuer} keys={len(self._keys)}>"

    @property
    def have_keys(self) -> bool:
        # Not when the issuer has revoked all, or was away for too long.
        return bool(self._keys)

    def start(self) -> None:
        if self._config.jwks_url:
            self._task = asyncio.create_task(self._refresh(), name="fetch the issuer's keys")

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def tenant_of(self, token: str) -> str:
        """Return the tenant that a token names. Raises Unauthenticated, without repeating the token."""
        if len(token) > MAX_TOKEN_CHARS:
            raise Unauthenticated(f"the token has {len(token)} characters; {MAX_TOKEN_CHARS} is the limit")
        self._look()
        digest = hashlib.sha256(token.encode(errors="surrogatepass")).digest()
        known = self._verified.get(digest)
        if known is not None and self._now_unix_s() < known[0]:
            return known[1]
        claims, ends_s = self._verify(token)
        tenant = claims.get(self._config.tenant_claim)
        if not isinstance(tenant, str) or not tenant:
            raise Unauthenticated(f"the token has no text claim {self._config.tenant_claim!r}, which names the tenant")
        self._verified[digest] = min(ends_s, self._now_unix_s() + _KEPT_S), tenant
        self._verified.move_to_end(digest)
        if len(self._verified) > _NUM_KEPT:
            self._verified.popitem(last=False)
        return tenant

    def _verify(self, token: str) -> tuple[dict[str, Any], float]:
        """Return the claims, and their end in seconds since 1970."""
        config = self._config
        try:
            header = jwt.get_unverified_header(token)
            algorithm, key_id = header.get("alg"), header.get("kid")
            if algorithm not in config.algorithms:
                raise Unauthenticated(f"tokens are signed with {', '.join(config.algorithms)} here")
            key = self._key(key_id)
            if key.algorithm_name != algorithm:
                raise Unauthenticated("the token's algorithm is not its key's")
            claims = jwt.decode(
                token,
                key,
                algorithms=[algorithm],
                issuer=config.issuer,
                audience=config.audience,
                leeway=_LEEWAY_S,
                options={"require": ["exp", "iss", "aud"]},
            )
            return claims, float(claims["exp"])
        except jwt.ExpiredSignatureError:
            raise Unauthenticated("the token has expired") from None
        except jwt.InvalidIssuerError:
            raise Unauthenticated("the token is of another issuer") from None
        except jwt.InvalidAudienceError:
            raise Unauthenticated("the token is for another audience") from None
        except jwt.MissingRequiredClaimError as error:
            raise Unauthenticated(f"the token has no claim {error.claim!r}") from None
        except (jwt.PyJWTError, ValueError, TypeError, RecursionError, OverflowError):
            raise Unauthenticated("this is not a valid token of the issuer") from None

    def _key(self, key_id: Any) -> jwt.PyJWK:
        if (key := self._keys.get(key_id)) is not None:
            return key
        if key_id is None and len(self._keys) == 1:
            return next(iter(self._keys.values()))
        self._wanted.set()
        raise Unauthenticated("the token's key is not among the issuer's")

    def _take(self, content: bytes, source: str) -> None:
        keys = read_jwks(content, source)
        if self._keys and not keys:
            log.error("%s: no key that can verify a signature: tokens are refused until there is one", source)
        self._keys, self._read_s = keys, self._clock()
        self._verified.clear()

    def _end_old_keys(self) -> None:
        if self._keys and self._clock() - self._read_s > MAX_AGE_S:
            log.error("the issuer's keys could not be read for %g hours and end", MAX_AGE_S / 3600)
            self._keys = {}
            self._verified.clear()

    def _look(self) -> None:
        file, now_s = self._config.jwks_file, self._clock()
        if file is None or now_s - self._looked_s < LOOK_INTERVAL_S:
            return
        self._looked_s = now_s
        self._end_old_keys()
        if (signature := file_signature(file)) == self._seen:
            return
        self._seen = signature
        try:
            self._take(_file_bytes(self._config), str(file))
        except ConfigError as error:
            log.error("the issuer's keys stay as they were, for at most 24 hours: %s", error.message)

    async def _refresh(self) -> None:
        url, pause_s = self._config.jwks_url, LOOK_INTERVAL_S
        while True:
            self._wanted.clear()
            try:
                self._take(await self._fetch(), url)
                pause_s = LOOK_INTERVAL_S
            except ConfigError as error:
                log.error("the issuer's keys stay as they were: %s", error.message)
            except (httpx.HTTPError, TimeoutError) as error:
                log.error("%s: %s; the issuer's keys stay as they were", url, type(error).__name__)
            except Exception:
                log.exception("reading the issuer's keys failed; they stay as they were")
            self._end_old_keys()
            await asyncio.sleep(MIN_REFRESH_S if self._keys else pause_s)
            pause_s = min(2 * pause_s, MIN_REFRESH_S)
            try:
                async with asyncio.timeout(REFRESH_S - MIN_REFRESH_S if self._keys else 0.0):
                    await self._wanted.wait()
            except TimeoutError:
                pass

    async def _fetch(self) -> bytes:
        url = self._config.jwks_url
        async with (
            asyncio.timeout(FETCH_TIMEOUT_S),
            httpx.AsyncClient(transport=self._transport) as client,
            client.stream("GET", url) as answer,
        ):
            if answer.status_code != 200:
                raise ConfigError(f"{url}: status {answer.status_code}")
            body = b""
            async for piece in answer.aiter_bytes():
                body += piece
                if len(body) > MAX_JWKS_BYTES:
                    raise ConfigError(f"{url}: over {MAX_JWKS_BYTES} bytes, the limit")
            return body


def _file_bytes(config: JwtConfig) -> bytes:
    assert config.jwks_file is not None
    try:
        with config.jwks_file.open("rb") as file:
            return file.read(MAX_JWKS_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"gateway.jwt.jwks_file: {config.jwks_file}: {error.strerror}") from None


def read_jwks(content: bytes, source: str) -> dict[str, jwt.PyJWK]:
    """Return keys for signatures by their ids. Raises ConfigError naming `source`, never the content.

    Keys that cannot be used are passed over, as RFC 7517 asks, and symmetric and private ones. A set without others is
    empty: the issuer has revoked its keys.
    """
    if len(content) > MAX_JWKS_BYTES:
        raise ConfigError(f"{source}: over {MAX_JWKS_BYTES} bytes, the limit")
    try:
        entries = json.loads(content)["keys"]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise ConfigError(f"{source}: not a JSON object with a list `keys`") from None
    if not isinstance(entries, list) or len(entries) > MAX_JWKS_KEYS:
        raise ConfigError(f"{source}: `keys` is not a list of at most {MAX_JWKS_KEYS}")
    keys: dict[str, jwt.PyJWK] = {}
    for number, entry in enumerate(entries):
        if not isinstance(entry, dict) or entry.get("use", "sig") != "sig":
            continue
        if entry.get("kty") == "oct" or "d" in entry:
            kind = "private" if "d" in entry else "symmetric"
            log.error("%s: entry %d is a %s key, and is passed over: its readers can sign tokens", source, number, kind)
            continue
        try:
            key = jwt.PyJWK.from_dict(entry)
        except Exception:  # of PyJWT and of cryptography, for a kind or a value that they do not know
            continue
        keys[str(entry.get("kid", f"#{number}"))] = key
    return keys
