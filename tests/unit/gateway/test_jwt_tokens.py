"""JSON Web Tokens: which are accepted, and how others are refused."""

from __future__ import annotations

import asyncio
import base64
import hmac
import json
import os
import tracemalloc
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import jwt
import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa

from kvferry.config import GatewayConfig, JwtConfig
from kvferry.errors import ConfigError, PermissionDenied, Unauthenticated
from kvferry.gateway.identity import jwt_tokens
from kvferry.gateway.identity.access import Access
from kvferry.gateway.identity.jwt_tokens import MAX_JWKS_BYTES, MAX_TOKEN_CHARS, JwtTokens, read_jwks
from kvferry.gateway.identity.tenants import Tenant, Tenants
from support.virtual_time import run

ISSUER, AUDIENCE, NOW_S = "https://issuer.example", "kvferry", 2_000_000_000.0
SECRET = bytes(range(32))
RSA = rsa.generate_private_key(65537, 2048)
OTHER_RSA = rsa.generate_private_key(65537, 2048)
EC = ec.generate_private_key(ec.SECP256R1())
ED = ed25519.Ed25519PrivateKey.generate()


@pytest.fixture(autouse=True)
def _tokens_are_of_now(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyJWT reads the wall clock; tests choose it."""
    import datetime

    class Then(datetime.datetime):
        @classmethod
        def now(cls, tz: datetime.tzinfo | None = None) -> datetime.datetime:
            return datetime.datetime.fromtimestamp(NOW_S, tz)

    monkeypatch.setattr("jwt.api_jwt.datetime", Then)


ALGORITHMS: dict[type, Any] = {
    rsa.RSAPrivateKey: jwt.algorithms.RSAAlgorithm,
    ec.EllipticCurvePrivateKey: jwt.algorithms.ECAlgorithm,
    ed25519.Ed25519PrivateKey: jwt.algorithms.OKPAlgorithm,
}


def jwk(key: Any, key_id: str) -> dict[str, Any]:
    (algorithm,) = (algorithm for kind, algorithm in ALGORITHMS.items() if isinstance(key, kind))
    return {**algorithm.to_jwk(key.public_key(), as_dict=True), "kid": key_id, "use": "sig"}


def jwks(**keys: Any) -> bytes:
    return json.dumps({"keys": [jwk(key, key_id) for key_id, key in keys.items()]}).encode()


def token(key: Any = RSA, algorithm: str = "RS256", key_id: str | None = "r", **claims: Any) -> str:
    body = {"iss": ISSUER, "aud": AUDIENCE, "exp": NOW_S + 300, "sub": "acme"} | claims
    headers = {} if key_id is None else {"kid": key_id}
    return jwt.encode({name: value for name, value in body.items() if value is not None}, key, algorithm, headers)


def tokens(tmp_path: Path, content: bytes | None = None, now_s: list[float] | None = None, **fields: Any) -> JwtTokens:
    file = tmp_path / "jwks.json"
    file.write_bytes(jwks(r=RSA, e=EC, o=ED) if content is None else content)
    config = JwtConfig(issuer=ISSUER, audience=AUDIENCE, jwks_file=file, **fields)
    now = now_s if now_s is not None else [NOW_S]
    return JwtTokens(config, clock=lambda: now[0], now_unix_s=lambda: now[0])


def part(values: Any) -> str:
    return base64.urlsafe_b64encode(json.dumps(values).encode()).rstrip(b"=").decode()


@pytest.mark.parametrize(("key", "algorithm", "key_id"), [(RSA, "RS256", "r"), (EC, "ES256", "e"), (ED, "EdDSA", "o")])
def test_a_token_of_the_issuer_names_its_tenant(tmp_path: Path, key: Any, algorithm: str, key_id: str) -> None:
    assert tokens(tmp_path).tenant_of(token(key, algorithm, key_id)) == "acme"


def test_the_claim_that_names_the_tenant_is_configured(tmp_path: Path) -> None:
    assert tokens(tmp_path, tenant_claim="org").tenant_of(token(org="beta")) == "beta"


CLAIMS = part({"iss": ISSUER, "aud": AUDIENCE, "exp": NOW_S + 300, "sub": "acme"})
UNSIGNED = f"{part({'alg': 'none', 'kid': 'r'})}.{CLAIMS}."


def signed_with_public_key() -> str:
    """Return a token whose sender takes the public key for a shared secret."""
    shared = RSA.public_key().public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    signed = f"{part({'alg': 'HS256', 'typ': 'JWT', 'kid': 'r'})}.{CLAIMS}"
    signature = hmac.new(shared, signed.encode(), "sha256").digest()
    return f"{signed}.{base64.urlsafe_b64encode(signature).rstrip(b'=').decode()}"


INVALID = "this is not a valid token of the issuer"
UNKNOWN_KEY = "the token's key is not among the issuer's"
REFUSED = {
    "unsigned": (UNSIGNED, "tokens are signed with RS256, ES256, EdDSA here"),
    "signed with the public key": (signed_with_public_key(), "tokens are signed with RS256, ES256, EdDSA here"),
    "another key": (token(OTHER_RSA), INVALID),
    "the key of another algorithm": (token(EC, "ES256", "r"), "the token's algorithm is not its key's"),
    "another algorithm": (token(RSA, "PS256"), "tokens are signed with RS256, ES256, EdDSA here"),
    "an unknown key": (token(key_id="unknown"), UNKNOWN_KEY),
    "no key among three": (token(key_id=None), UNKNOWN_KEY),
    "another issuer": (token(iss="https://issuer.example.evil"), "the token is of another issuer"),
    "no issuer": (token(iss=None), "the token has no claim 'iss'"),
    "another audience": (token(aud="another"), "the token is for another audience"),
    "no audience": (token(aud=None), "the token has no claim 'aud'"),
    "expired": (token(exp=NOW_S - 30), "the token has expired"),
    "no end": (token(exp=None), "the token has no claim 'exp'"),
    "an end that is a text": (token(exp="soon"), INVALID),
    "an infinite end": (token(exp=1e400), INVALID),
    "an end beyond all floats": (token(exp=10**400), INVALID),
    "not yet valid": (token(nbf=NOW_S + 300), INVALID),
    "no tenant": (token(sub=None), "the token has no text claim 'sub', which names the tenant"),
    "an empty tenant": (token(sub=""), "the token has no text claim 'sub', which names the tenant"),
    "another signature": (token()[:-6] + "AAAAAA", INVALID),
    "too long": (token()[:9] + "A" * (MAX_TOKEN_CHARS - 8), "the token has 8193 characters; 8192 is the limit"),
    "nothing": ("..", INVALID),
    "no base64": ("a.b.c", INVALID),
    "a header that is a list": (f"{part([])}.{part({})}.x", INVALID),
    "an algorithm that is a list": (f"{part({'alg': ['RS256'], 'kid': 'r'})}.{part({})}.x", INVALID),
    "a key that is an object": (f"{part({'alg': 'RS256', 'kid': {}})}.{part({})}.x", INVALID),
    "surrogates": ("\ud800.\ud800.\ud800", INVALID),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_other_tokens_are_refused_without_repeating_them(tmp_path: Path, kind: str) -> None:
    shown, reason = REFUSED[kind]
    with pytest.raises(Unauthenticated) as refused:
        tokens(tmp_path).tenant_of(shown)
    message = refused.value.message
    assert message.startswith(reason)
    assert len(message) < 200
    assert len(shown) < 10 or shown not in message
    assert "acme" not in message


def test_clocks_may_differ_by_less_than_half_a_minute(tmp_path: Path) -> None:
    assert tokens(tmp_path).tenant_of(token(exp=NOW_S - 29)) == "acme"
    assert tokens(tmp_path).tenant_of(token(nbf=NOW_S + 30)) == "acme"


def test_a_token_of_the_largest_size_is_taken(tmp_path: Path) -> None:
    shown = [
        token(ED, "EdDSA", "o", pad="x" * number, a=pad) for number in range(5900, 6000) for pad in ("", "y", "yy")
    ]
    largest = next(one for one in shown if len(one) == MAX_TOKEN_CHARS)
    assert tokens(tmp_path).tenant_of(largest) == "acme"


def test_a_token_that_names_no_key_is_of_the_only_one(tmp_path: Path) -> None:
    verifier = tokens(tmp_path, jwks(o=ED))
    assert verifier.tenant_of(token(ED, "EdDSA", None)) == "acme"
    with pytest.raises(Unauthenticated, match="not among"):
        verifier.tenant_of(token(ED, "EdDSA", "another"))


def test_a_claim_that_is_no_text_is_refused(tmp_path: Path) -> None:
    for value in (["acme"], {"a": 1}, 7, True):
        with pytest.raises(Unauthenticated, match="org"):
            tokens(tmp_path, tenant_claim="org").tenant_of(token(org=value))


def test_a_verified_token_ends_with_its_time_and_with_its_key(tmp_path: Path) -> None:
    now_s = [NOW_S]
    verifier = tokens(tmp_path, now_s=now_s)
    shown = token(exp=NOW_S + 5)
    assert verifier.tenant_of(shown) == "acme"
    (tmp_path / "jwks.json").write_bytes(jwks(e=EC))
    os.utime(tmp_path / "jwks.json", ns=(1, 1))
    now_s[0] += jwt_tokens.LOOK_INTERVAL_S
    with pytest.raises(Unauthenticated, match="not among"):
        verifier.tenant_of(shown)


def test_a_file_that_cannot_be_used_changes_nothing_later_and_stops_a_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    now_s = [NOW_S]
    verifier = tokens(tmp_path, now_s=now_s)
    (tmp_path / "jwks.json").write_text("{")
    for _ in range(3):
        now_s[0] += jwt_tokens.LOOK_INTERVAL_S
        assert verifier.tenant_of(token()) == "acme"
    assert len(caplog.messages) == 1, "a file that did not change is not read again"
    assert "the issuer's keys stay as they were, for at most 24 hours: " in caplog.text
    assert "jwks.json: not a JSON object" in caplog.text
    with pytest.raises(ConfigError, match=r"jwks\.json"):
        tokens(tmp_path, b"{")


def test_a_file_is_looked_at_once_a_second(tmp_path: Path) -> None:
    now_s = [NOW_S]
    verifier = tokens(tmp_path, jwks(r=RSA), now_s)
    shown = token(EC, "ES256", "e")
    (tmp_path / "jwks.json").write_bytes(jwks(r=RSA, e=EC))
    now_s[0] = NOW_S + 0.9
    with pytest.raises(Unauthenticated):
        verifier.tenant_of(shown)
    now_s[0] = NOW_S + 1.0
    assert verifier.tenant_of(shown) == "acme"
    (tmp_path / "jwks.json").write_bytes(jwks(r=RSA))
    now_s[0] = NOW_S + 1.9
    assert verifier.tenant_of(shown) == "acme"
    now_s[0] = NOW_S + 2.0
    with pytest.raises(Unauthenticated):
        verifier.tenant_of(shown)


@pytest.fixture
def verified(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the tokens whose signatures were verified, in order."""
    shown: list[str] = []

    def decode(token: str, *values: Any, **options: Any) -> Any:
        shown.append(token)
        return decode_as_before(token, *values, **options)

    decode_as_before = jwt.decode
    monkeypatch.setattr(jwt, "decode", decode)
    return shown


def test_verified_tokens_are_remembered_up_to_a_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verified: list[str]
) -> None:
    """The token that was verified least recently is forgotten first."""
    monkeypatch.setattr(jwt_tokens, "_NUM_KEPT", 3)
    now_s = [NOW_S]
    verifier = tokens(tmp_path, now_s=now_s)
    shown = [token(ED, "EdDSA", "o", sub=f"t{number}") for number in range(4)]
    for number in (0, 1, 2, 0, 1, 2):
        assert verifier.tenant_of(shown[number]) == f"t{number}"
    assert verified == shown[:3]
    now_s[0] += jwt_tokens._KEPT_S
    for number in (0, 3):
        assert verifier.tenant_of(shown[number]) == f"t{number}"
    verified.clear()
    assert verifier.tenant_of(shown[0]) == "t0"
    assert verifier.tenant_of(shown[3]) == "t3"
    assert not verified, "0 was verified after 1 and 2"


def test_a_verified_token_is_remembered_for_a_minute(tmp_path: Path, verified: list[str]) -> None:
    """So that a key which the issuer removed ends soon."""
    now_s = [NOW_S]
    verifier = tokens(tmp_path, now_s=now_s)
    shown = token()
    verifier.tenant_of(shown)
    now_s[0] = NOW_S + 59.9
    verifier.tenant_of(shown)
    assert verified == [shown]
    now_s[0] = NOW_S + 60
    verifier.tenant_of(shown)
    assert verified == [shown] * 2


def test_a_verified_token_is_verified_again_when_it_has_ended(tmp_path: Path, verified: list[str]) -> None:
    now_s = [NOW_S]
    verifier = tokens(tmp_path, now_s=now_s)
    shown = token(exp=NOW_S + 5)
    verifier.tenant_of(shown)
    now_s[0] = NOW_S + 4.9
    verifier.tenant_of(shown)
    assert verified == [shown]
    now_s[0] = NOW_S + 5
    verifier.tenant_of(shown)
    assert verified == [shown] * 2


NO_SET = "jwks.json: not a JSON object with a list `keys`"
NO_LIST = "jwks.json: `keys` is not a list of at most 64"
NO_SETS = {
    "empty": (b"", NO_SET),
    "a list": (b"[]", NO_SET),
    "without keys": (b"{}", NO_SET),
    "keys that are a number": (b'{"keys": 1}', NO_LIST),
    "keys that are an object": (b'{"keys": {"a": {}}}', NO_LIST),
    "deeply nested": (b"[" * 100_000, NO_SET),
    "too large": (jwks(r=RSA).ljust(MAX_JWKS_BYTES + 1), "jwks.json: over 262144 bytes, the limit"),
    "too many": (json.dumps({"keys": [{}] * 65}).encode(), NO_LIST),
}


@pytest.mark.parametrize("kind", NO_SETS)
def test_what_is_no_set_of_keys_is_refused(kind: str) -> None:
    content, reason = NO_SETS[kind]
    with pytest.raises(ConfigError) as refused:
        read_jwks(content, "jwks.json")
    assert refused.value.message == reason


def test_a_set_of_keys_may_have_64_and_256_kib() -> None:
    keys = {f"k{number}": ED for number in range(64)}
    assert list(read_jwks(jwks(**keys).ljust(MAX_JWKS_BYTES), "jwks.json")) == list(keys)


def test_a_file_that_is_too_large_is_not_read_whole(tmp_path: Path) -> None:
    with (tmp_path / "jwks.json").open("wb") as file:
        file.truncate(64 << 20)
    config = JwtConfig(issuer=ISSUER, audience=AUDIENCE, jwks_file=tmp_path / "jwks.json")
    tracemalloc.start()
    try:
        with pytest.raises(ConfigError, match="over 262144 bytes, the limit"):
            JwtTokens(config)
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()


def test_an_absent_file_stops_a_start(tmp_path: Path) -> None:
    config = JwtConfig(issuer=ISSUER, audience=AUDIENCE, jwks_file=tmp_path / "absent.json")
    with pytest.raises(ConfigError, match=r"jwks_file: .*absent\.json: No such file or directory"):
        JwtTokens(config)


NO_KEY = [
    {"keys": []},
    {"keys": [{"kty": "XX", "kid": "a"}]},
    {"keys": [{"kty": "oct", "k": "c2VjcmV0", "kid": "a"}]},
    {"keys": [{**jwk(RSA, "r"), "use": "enc"}]},
]


@pytest.mark.parametrize("values", NO_KEY)
def test_an_issuer_that_has_no_key_any_more_has_revoked_those_it_had(
    tmp_path: Path, values: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    now_s = [NOW_S]
    verifier = tokens(tmp_path, now_s=now_s)
    assert verifier.tenant_of(token()) == "acme"
    (tmp_path / "jwks.json").write_text(json.dumps(values))
    os.utime(tmp_path / "jwks.json", ns=(1, 1))
    now_s[0] += jwt_tokens.LOOK_INTERVAL_S
    with pytest.raises(Unauthenticated):
        verifier.tenant_of(token())
    assert not verifier.have_keys
    file = tmp_path / "jwks.json"
    assert f"{file}: no key that can verify a signature: tokens are refused until there is one" in caplog.text
    assert "c2VjcmV0" not in caplog.text
    with pytest.raises(ConfigError, match=r"jwks\.json: no key that can verify a signature"):
        tokens(tmp_path, json.dumps(values).encode())


def test_a_key_that_cannot_be_used_keeps_no_revoked_key(tmp_path: Path) -> None:
    now_s = [NOW_S]
    verifier = tokens(tmp_path, now_s=now_s)
    (tmp_path / "jwks.json").write_text(json.dumps({"keys": [{"kty": "oct", "k": "c2VjcmV0"}, jwk(EC, "e")]}))
    os.utime(tmp_path / "jwks.json", ns=(1, 1))
    now_s[0] += jwt_tokens.LOOK_INTERVAL_S
    with pytest.raises(Unauthenticated):
        verifier.tenant_of(token())
    assert verifier.tenant_of(token(EC, "ES256", "e")) == "acme"


def test_keys_end_when_they_could_not_be_read_for_a_day(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(jwt_tokens, "MAX_AGE_S", 60.0)
    now_s = [NOW_S]
    verifier = tokens(tmp_path, now_s=now_s)
    (tmp_path / "jwks.json").unlink()
    now_s[0] += 60.0
    assert verifier.tenant_of(token()) == "acme"
    now_s[0] += jwt_tokens.LOOK_INTERVAL_S
    with pytest.raises(Unauthenticated):
        verifier.tenant_of(token())
    assert "end" in caplog.text


def test_keys_that_cannot_be_used_are_passed_over(caplog: pytest.LogCaptureFixture) -> None:
    private = {**ALGORITHMS[rsa.RSAPrivateKey].to_jwk(RSA, as_dict=True), "kid": "p"}
    shared = {"kty": "oct", "k": "c2VjcmV0"}
    unusable: list[Any] = [
        {**jwk(RSA, "n"), "alg": "none"}, {**jwk(EC, "x"), "x": 7}, {"kty": "XX"}, private, "text", shared,
        {**jwk(RSA, "c"), "use": "enc"},
    ]  # fmt: skip
    keys = read_jwks(json.dumps({"keys": [*unusable, jwk(EC, "e")]}).encode(), "jwks.json")
    assert list(keys) == ["e"]
    assert "jwks.json: entry 3 is a private key" in caplog.text
    assert "jwks.json: entry 5 is a symmetric key" in caplog.text
    assert len(caplog.records) == 2
    assert private["d"] not in caplog.text


def test_keys_may_have_no_use_and_no_name() -> None:
    entries = [jwk(EC, "e"), jwk(ED, "o"), jwk(RSA, "r")]
    del entries[0]["use"], entries[1]["kid"]
    entries[2]["kid"] = 7
    assert list(read_jwks(json.dumps({"keys": entries}).encode(), "jwks.json")) == ["e", "#1", "7"]


class Issuer:
    """Answers of an issuer in virtual time; the last one is repeated."""

    def __init__(self, *answers: httpx.Response | Exception | bytes) -> None:
        self._answers = list(answers)
        self.asked: list[tuple[float, str]] = []  # when, and for what

    async def answer(self, request: httpx.Request) -> httpx.Response:
        self.asked.append((asyncio.get_running_loop().time(), f"{request.method} {request.url}"))
        answer = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
        if isinstance(answer, Exception):
            raise answer
        return httpx.Response(200, content=answer) if isinstance(answer, bytes) else answer

    def start(self) -> JwtTokens:
        clock = asyncio.get_running_loop().time
        config = JwtConfig(issuer=ISSUER, audience=AUDIENCE, jwks_url="https://issuer.example/jwks")
        verifier = JwtTokens(
            config, transport=httpx.MockTransport(self.answer), clock=clock, now_unix_s=lambda: NOW_S + clock()
        )
        verifier.start()
        return verifier

    @property
    def asked_s(self) -> list[float]:
        return [when_s for when_s, _ in self.asked]


async def endless() -> AsyncIterator[bytes]:
    while True:
        yield b" " * 65536


def test_keys_come_from_a_url_which_is_asked_less_often_while_it_fails(caplog: pytest.LogCaptureFixture) -> None:
    issuer = Issuer(
        httpx.Response(500, content=jwks(r=RSA)),
        b"{",
        httpx.Response(200, content=endless()),
        json.dumps({"keys": [{**jwk(RSA, "r"), "alg": "none"}]}).encode(),
        httpx.ConnectError("refused"),
        httpx.Response(302, headers={"location": "http://127.0.0.1:1/"}),
        ValueError("none that anybody expects"),
        jwks(r=RSA).ljust(MAX_JWKS_BYTES),
    )

    async def main() -> None:
        verifier = issuer.start()
        assert "fetch the issuer's keys" in {task.get_name() for task in asyncio.all_tasks()}
        with pytest.raises(Unauthenticated, match="not among"):
            verifier.tenant_of(token())
        await asyncio.sleep(22.5)
        # A set without a key is an answer: the next pause is a second again.
        assert issuer.asked_s == [0, 1, 3, 7, 8, 10, 14, 22]
        assert verifier.tenant_of(token()) == "acme"
        await verifier.close()
        assert len(asyncio.all_tasks()) == 1

    run(main())
    assert {what for _, what in issuer.asked} == {"GET https://issuer.example/jwks"}
    url = "https://issuer.example/jwks"
    assert caplog.messages == [
        f"the issuer's keys stay as they were: {url}: status 500",
        f"the issuer's keys stay as they were: {url}: not a JSON object with a list `keys`",
        f"the issuer's keys stay as they were: {url}: over 262144 bytes, the limit",
        f"{url}: ConnectError; the issuer's keys stay as they were",
        f"the issuer's keys stay as they were: {url}: status 302",
        "reading the issuer's keys failed; they stay as they were",
    ]


def test_an_issuer_that_is_away_is_asked_twice_a_minute() -> None:
    issuer = Issuer(httpx.ConnectError("refused"))

    async def main() -> None:
        verifier = issuer.start()
        await asyncio.sleep(100.0)
        await verifier.close()

    run(main())
    assert issuer.asked_s == [0, 1, 3, 7, 15, 31, 61, 91]


def test_an_issuer_that_does_not_answer_is_given_up_after_five_seconds(caplog: pytest.LogCaptureFixture) -> None:
    async def never(request: httpx.Request) -> httpx.Response:
        await asyncio.sleep(1e9)
        raise AssertionError

    async def main() -> None:
        issuer = Issuer(b"")
        issuer.answer = never  # type: ignore[method-assign]
        verifier = issuer.start()
        await asyncio.sleep(4.9)
        assert not caplog.messages
        await asyncio.sleep(0.2)
        assert caplog.messages == ["https://issuer.example/jwks: TimeoutError; the issuer's keys stay as they were"]
        await verifier.close()

    run(main())


def test_keys_are_read_every_five_minutes_and_sooner_for_a_token_with_an_unknown_one() -> None:
    issuer = Issuer(jwks(r=RSA), jwks(r=RSA, e=EC))

    async def main() -> None:
        verifier = issuer.start()
        await asyncio.sleep(1.0)
        new = token(EC, "ES256", "e")
        for _ in range(3):
            with pytest.raises(Unauthenticated, match="not among"):
                verifier.tenant_of(new)
        await asyncio.sleep(28.9)
        assert issuer.asked_s == [0], "whoever shows tokens cannot make the gateway ask more often"
        await asyncio.sleep(0.2)
        assert issuer.asked_s == [0, 30]
        assert verifier.tenant_of(new) == "acme"
        await asyncio.sleep(610.0)
        assert issuer.asked_s == [0, 30, 330, 630]
        await verifier.close()

    run(main())


def test_keys_of_a_url_end_when_they_could_not_be_read_for_a_day(caplog: pytest.LogCaptureFixture) -> None:
    issuer = Issuer(jwks(r=RSA), httpx.ConnectError("refused"))

    async def main() -> None:
        verifier = issuer.start()
        await asyncio.sleep(24 * 3600.0 + 1)
        assert verifier.have_keys
        await asyncio.sleep(300.0)
        assert not verifier.have_keys
        with pytest.raises(Unauthenticated):
            verifier.tenant_of(token())
        num_asked = len(issuer.asked)
        await asyncio.sleep(300.0)
        assert len(issuer.asked) == num_asked + 10, "twice a minute"
        await verifier.close()

    run(main())
    assert caplog.text.count("the issuer's keys could not be read for 24 hours and end") == 1


async def test_a_file_needs_no_task(tmp_path: Path) -> None:
    verifier = tokens(tmp_path)
    verifier.start()
    assert len(asyncio.all_tasks()) == 1
    await verifier.close()


@pytest.mark.parametrize(
    "fields",
    [
        {"issuer": ISSUER},
        {"audience": AUDIENCE},
        {"issuer": ISSUER, "audience": AUDIENCE},
        {"issuer": ISSUER, "audience": AUDIENCE, "jwks_file": "a", "jwks_url": "https://a"},
        {"issuer": ISSUER, "audience": AUDIENCE, "jwks_url": "http://issuer.example/jwks"},
        {"issuer": ISSUER, "audience": AUDIENCE, "jwks_url": "http://127.0.0.1.evil.example/"},
        {"issuer": ISSUER, "audience": AUDIENCE, "jwks_url": "http://localhost:x@issuer.example/jwks"},
        {"issuer": ISSUER, "audience": AUDIENCE, "jwks_url": "https://user:secret@issuer.example/jwks"},
        {"issuer": ISSUER, "audience": AUDIENCE, "jwks_file": "a", "algorithms": ["HS256"]},
        {"issuer": ISSUER, "audience": AUDIENCE, "jwks_file": "a", "algorithms": ["none"]},
        {"issuer": ISSUER, "audience": AUDIENCE, "jwks_file": "a", "algorithms": []},
    ],
)
def test_a_configuration_that_would_not_verify_tokens_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        JwtConfig(**fields)


def test_a_gateway_takes_tokens_beside_keys(tmp_path: Path) -> None:
    verifier = tokens(tmp_path)
    config = GatewayConfig(jwt=verifier._config)
    access = Access(config, Tenants(SECRET), None, verifier)
    assert not access.is_open
    assert access.identify(f"Bearer {token()}", None) == Tenant("acme", secret=SECRET)
    with pytest.raises(PermissionDenied, match="no tenant"):
        access.identify(f"Bearer {token(sub='Not A Tenant')}", None)
    for shown in (None, "", "Bearer", "Bearer kvf_a.b.c", "Bearer x"):
        with pytest.raises(Unauthenticated):
            access.identify(shown, None)
