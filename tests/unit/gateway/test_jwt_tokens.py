"""JSON Web Tokens: which are taken, and how those that are not are refused."""

from __future__ import annotations

import asyncio
import base64
import hmac
import json
import os
from pathlib import Path
from typing import Any

import httpx
import jwt
import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa

from kvferry.config import GatewayConfig, JwtConfig
from kvferry.errors import ConfigError, PermissionDenied, Unauthenticated
from kvferry.gateway import jwt_tokens
from kvferry.gateway.access import Access
from kvferry.gateway.jwt_tokens import MAX_JWKS_BYTES, MAX_TOKEN_CHARS, JwtTokens, read_jwks
from kvferry.gateway.tenants import Tenant, Tenants
from support.waiting import SOON_S

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


@pytest.mark.parametrize(
    "shown",
    [
        UNSIGNED,
        signed_with_public_key(),
        token(OTHER_RSA),
        token(EC, "ES256", "r"),
        token(RSA, "PS256"),
        token(key_id="unknown"),
        token(key_id=None),
        token(iss="https://issuer.example.evil"),
        token(iss=None),
        token(aud="another"),
        token(aud=None),
        token(exp=NOW_S - 60),
        token(exp=None),
        token(exp="soon"),
        token(exp=1e400),
        token(exp=10**400),
        token(nbf=NOW_S + 300),
        token(sub=None),
        token(sub=""),
        token()[:-6] + "AAAAAA",
        token() + "A" * MAX_TOKEN_CHARS,
        "..",
        "a.b.c",
        f"{part([])}.{part({})}.x",
        f"{part({'alg': ['RS256'], 'kid': {}})}.{part({})}.x",
        "\ud800.\ud800.\ud800",
    ],
)
def test_other_tokens_are_refused_without_repeating_them(tmp_path: Path, shown: str) -> None:
    with pytest.raises(Unauthenticated) as refused:
        tokens(tmp_path).tenant_of(shown)
    message = refused.value.message
    assert len(message) < 200
    assert len(shown) < 10 or shown not in message
    assert "acme" not in message


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


def test_a_file_that_cannot_be_used_changes_nothing_later_and_stops_a_start(tmp_path: Path) -> None:
    now_s = [NOW_S]
    verifier = tokens(tmp_path, now_s=now_s)
    (tmp_path / "jwks.json").write_text("{")
    now_s[0] += jwt_tokens.LOOK_INTERVAL_S
    assert verifier.tenant_of(token()) == "acme"
    with pytest.raises(ConfigError, match=r"jwks\.json"):
        tokens(tmp_path, b"{")


def test_verified_tokens_are_remembered_up_to_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jwt_tokens, "_NUM_KEPT", 3)
    verifier = tokens(tmp_path)
    for number in range(5):
        assert verifier.tenant_of(token(EC, "ES256", "e", sub=f"t{number}")) == f"t{number}"
    assert len(verifier._verified) == 3


@pytest.mark.parametrize(
    "content",
    [b"", b"[]", b"{}", b'{"keys": 1}', b"[" * 100_000, b" " * (MAX_JWKS_BYTES + 1),
     json.dumps({"keys": [{}] * 65}).encode()],
)  # fmt: skip
def test_what_is_no_set_of_keys_is_refused(content: bytes) -> None:
    with pytest.raises(ConfigError) as refused:
        read_jwks(content, "jwks.json")
    assert refused.value.message.startswith("jwks.json")


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
    assert "tokens are refused until there is one" in caplog.text
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


def test_a_verified_token_is_verified_again_when_it_has_ended(tmp_path: Path) -> None:
    now_s = [NOW_S]
    verifier = tokens(tmp_path, now_s=now_s)
    shown = token(exp=NOW_S + 5)
    assert verifier.tenant_of(shown) == "acme"
    asked = []
    verifier._verify = lambda shown: asked.append(shown) or ({"sub": "acme"}, NOW_S + 5)  # type: ignore[method-assign,assignment,func-returns-value]
    now_s[0] = NOW_S + 4.9
    assert verifier.tenant_of(shown) == "acme"
    assert not asked
    now_s[0] = NOW_S + 5
    verifier.tenant_of(shown)
    assert asked == [shown]


def test_keys_that_cannot_be_used_are_passed_over(caplog: pytest.LogCaptureFixture) -> None:
    private = {**ALGORITHMS[rsa.RSAPrivateKey].to_jwk(RSA, as_dict=True), "kid": "p"}
    unusable = [{**jwk(RSA, "n"), "alg": "none"}, {**jwk(EC, "x"), "x": 7}, {"kty": "XX"}, private]
    keys = read_jwks(json.dumps({"keys": [*unusable, jwk(EC, "e")]}).encode(), "jwks.json")
    assert list(keys) == ["e"]
    assert "entry 3 is a private key" in caplog.text
    assert private["d"] not in caplog.text


async def test_keys_come_from_a_url_and_stay_while_it_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jwt_tokens, "LOOK_INTERVAL_S", 0.0)
    monkeypatch.setattr(jwt_tokens, "MIN_REFRESH_S", 0.0)
    answers = [
        httpx.Response(500),
        httpx.Response(200, content=b"{"),
        httpx.Response(200, content=b" " * (MAX_JWKS_BYTES + 1)),
        httpx.Response(200, content=json.dumps({"keys": [{**jwk(RSA, "r"), "alg": "none"}]}).encode()),
        httpx.Response(302, headers={"location": "http://127.0.0.1:1/"}),
        httpx.Response(200, content=jwks(r=RSA)),
    ]
    asked: list[str] = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(str(request.url))
        return answers.pop(0) if answers else httpx.Response(200, content=jwks(r=RSA, e=EC))

    config = JwtConfig(issuer=ISSUER, audience=AUDIENCE, jwks_url="https://issuer.example/jwks")
    verifier = JwtTokens(config, transport=httpx.MockTransport(answer), now_unix_s=lambda: NOW_S)
    verifier.start()
    try:
        async with asyncio.timeout(SOON_S):
            while not verifier.have_keys:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            assert len(asked) == 6
            assert verifier.tenant_of(token()) == "acme"
            # A token with a new key asks for the keys again.
            while True:
                try:
                    assert verifier.tenant_of(token(EC, "ES256", "e")) == "acme"
                    break
                except Unauthenticated:
                    await asyncio.sleep(0.01)
        assert set(asked) == {"https://issuer.example/jwks"}
    finally:
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
