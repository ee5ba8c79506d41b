"""Keys and certificates, over HTTP and gRPC: who gets in, who is refused and how, and what is seen of it."""

from __future__ import annotations

import asyncio
import functools
import logging
import socket
import ssl
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from openai import AsyncOpenAI, AuthenticationError

from bench.etcd_server import Authority, EtcdServer, find_binary
from kvferry import config as configuration
from kvferry.config import MembershipConfig
from kvferry.errors import ConfigError
from kvferry.gateway.identity import key_file
from kvferry.gateway.identity.key_file import new_key
from kvferry.gateway.lifecycle import GatewayHost
from kvferry.inference.v1 import inference_pb2 as pb
from kvferry.membership.base import MemberKind
from kvferry.membership.etcd import EtcdMembership
from kvferry_local.authority import make_certificates
from kvferry_sim.membership import MemoryMembership
from support.waiting import PATIENCE_S, until

from .conftest import MODEL, SimCluster, running
from .test_gateway_grpc import details_of, refused, stub_on

PROMPT = " ".join(f"w{i}" for i in range(64))  # several pages
BODY: dict[str, Any] = {"model": MODEL, "prompt": PROMPT, "max_tokens": 4, "temperature": 0, "ignore_eos": True}
REQUEST = pb.GenerateRequest(
    model=MODEL, text=PROMPT, sampling=pb.Sampling(max_tokens=4, temperature=0, ignore_eos=True)
)


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    return tmp_path / "keys.yaml"


def without(keys: Path, name: str) -> None:
    keys.write_text("".join(line for line in keys.read_text().splitlines(keepends=True) if name not in line))


class Certificates:
    """Files of two authorities, and who may show what."""

    def __init__(self, folder: Path) -> None:
        (folder / "theirs").mkdir()
        self.ours, self.theirs = Authority(folder, "ours"), Authority(folder / "theirs", "theirs")
        self.server = self.ours.issue("gateway")

    def config(self, *, mutual: bool = False) -> dict[str, str]:
        cert, key = self.server
        files = {"cert_file": str(cert), "key_file": str(key)}
        return {**files, "client_ca_file": str(self.ours.ca_file)} if mutual else files

    def context(self, client: tuple[Path, Path] | None = None, ca: Path | None = None) -> ssl.SSLContext:
        context = ssl.create_default_context(cafile=ca or self.ours.ca_file)
        if client is not None:
            context.load_cert_chain(*client)
        return context

    def credentials(self, client: tuple[Path, Path] | None = None, ca: Path | None = None) -> grpc.ChannelCredentials:
        cert, key = (file.read_bytes() for file in client) if client is not None else (None, None)
        return grpc.ssl_channel_credentials((ca or self.ours.ca_file).read_bytes(), key, cert)


@pytest.fixture
def certificates(tmp_path: Path) -> Certificates:
    return Certificates(tmp_path)


@asynccontextmanager
async def http_to(cluster: SimCluster, verify: ssl.SSLContext) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(
        base_url=cluster.url.replace("http:", "https:"), verify=verify, timeout=PATIENCE_S
    ) as http:
        yield http


def grpc_to(cluster: SimCluster, credentials: grpc.ChannelCredentials | None = None) -> grpc.aio.Channel:
    assert cluster.gateway is not None
    address = f"127.0.0.1:{cluster.gateway.grpc.port}"
    if credentials is None:
        return grpc.aio.insecure_channel(address)
    return grpc.aio.secure_channel(address, credentials)


async def test_two_keys_in_one_request_are_refused(keys: Path) -> None:
    key, other = new_key(keys, "acme", "ci"), new_key(keys, "beta", "ci")
    async with running(gateway={"keys_file": str(keys)}) as cluster, httpx.AsyncClient(base_url=cluster.url) as http:
        assert (await http.get("/v1/models", headers=bearer(key))).status_code == 200
        both = [("authorization", f"Bearer {each}") for each in (key, other)]
        answer = await http.get("/v1/models", headers=both)
    assert answer.status_code == 401
    assert "more than one" in answer.json()["error"]["message"]


@pytest.mark.parametrize("shown", ["no key", "wrong key", "another scheme"])
async def test_whoever_has_no_key_is_refused(keys: Path, shown: str) -> None:
    key = new_key(keys, "acme", "ci")
    headers = {"no key": {}, "wrong key": bearer(key[:-1]), "another scheme": {"authorization": f"Basic {key}"}}[shown]
    async with running(gateway={"keys_file": str(keys)}) as cluster:
        async with httpx.AsyncClient(base_url=cluster.url, headers=headers) as http:
            answers = [
                await http.post("/v1/completions", json=BODY),
                await http.post("/v1/chat/completions", json={"model": MODEL, "messages": []}),
                await http.get("/v1/models"),
                await http.get(f"/v1/models/{MODEL}"),
                await http.get("/kvferry/v1/requests/cmpl-1"),
                await http.get("/metrics"),
                await http.get("/kvferry/v1/targets"),
            ]
            for answer in answers:
                assert answer.status_code == 401
                assert answer.headers["www-authenticate"] == "Bearer"
                assert answer.json()["error"]["code"] == "invalid_api_key"
                assert key[4:-1] not in answer.text
            # Probes have no key.
            for path in ("/healthz", "/readyz"):
                assert (await http.get(path)).status_code == 200
        assert cluster.metric('kvferry_requests_total{endpoint="completions",status="401"}') == 1
        async with grpc_to(cluster) as channel:
            stub, metadata = stub_on(channel), tuple(headers.items())
            for call in (
                stub.Generate(REQUEST, metadata=metadata),
                stub.GenerateStream(REQUEST, metadata=metadata),
                stub.Tokenize(pb.TokenizeRequest(model=MODEL, text="x"), metadata=metadata),
                stub.ListModels(pb.ListModelsRequest(), metadata=metadata),
                # Nothing is sent: a message that meets the end of its call is INTERNAL in grpcio's client.
                channel.stream_stream("/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo")(
                    metadata=metadata
                ),
            ):
                error = await refused(call)
                assert error.code() is grpc.StatusCode.UNAUTHENTICATED
                assert details_of(error)["ErrorInfo"].reason == "INVALID_API_KEY"
                assert key[4:-1] not in (error.details() or "")
            health = channel.unary_unary("/grpc.health.v1.Health/Check")
            assert await health(b"") == b"\x08\x01"  # serving
        for _, engine in cluster.workers:
            assert engine.stats().prompt_tokens.total == 0
        with pytest.raises(AuthenticationError):
            async with AsyncOpenAI(base_url=f"{cluster.url}/v1", api_key="wrong", max_retries=0) as client:
                await client.models.list()


async def test_whoever_has_a_key_gets_in_over_both_protocols(keys: Path) -> None:
    key = new_key(keys, "acme", "ci")
    async with running(gateway={"keys_file": str(keys)}) as cluster, grpc_to(cluster) as channel:
        async with AsyncOpenAI(base_url=f"{cluster.url}/v1", api_key=key) as client:
            over_http = await client.completions.create(
                model=MODEL, prompt=PROMPT, max_tokens=4, temperature=0, extra_body={"ignore_eos": True}
            )
        answer = await stub_on(channel).Generate(REQUEST, metadata=tuple(bearer(key).items()))
        assert answer.answers[0].text == over_http.choices[0].text


async def test_a_key_is_taken_and_taken_away_while_the_gateway_serves(
    keys: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(key_file, "LOOK_INTERVAL_S", 0.0)
    new_key(keys, "acme", "first")
    async with (
        running(gateway={"keys_file": str(keys)}) as cluster,
        httpx.AsyncClient(base_url=cluster.url) as http,
    ):
        second = new_key(keys, "acme", "second")
        assert (await http.get("/v1/models", headers=bearer(second))).status_code == 200
        without(keys, "second")
        assert (await http.get("/v1/models", headers=bearer(second))).status_code == 401


async def test_two_tenants_never_share_pages_nor_see_each_others_requests(keys: Path) -> None:
    acme, beta = new_key(keys, "acme", "ci"), new_key(keys, "beta", "ci")
    async with (
        running(gateway={"keys_file": str(keys), "placement": "priced"}) as cluster,
        httpx.AsyncClient(base_url=cluster.url, timeout=PATIENCE_S) as http,
        grpc_to(cluster) as channel,
    ):
        assert cluster.gateway is not None

        async def cached(key: str, **fields: str) -> tuple[int, str]:
            answer = (await http.post("/v1/completions", json=BODY | fields, headers=bearer(key))).json()
            return answer["usage"]["prompt_tokens_details"]["cached_tokens"], answer["id"]

        async def cached_over_grpc(key: str, cache_salt: str | None = None) -> int:
            request = pb.GenerateRequest(cache_salt=cache_salt)
            request.MergeFrom(REQUEST)
            answer = await stub_on(channel).Generate(request, metadata=tuple(bearer(key).items()))
            return int(answer.usage.cached_prompt_tokens)

        num_cached, request_id = await cached(acme)
        assert num_cached == 0
        assert (await cached(acme))[0] == await cached_over_grpc(acme) == 64
        assert (await cached(beta))[0] == 0
        assert await cached_over_grpc(beta) == 64
        # A client's own salt parts its requests further, over both protocols alike.
        for key in (acme, beta):
            assert (await cached(key, cache_salt="one"))[0] == 0
            assert (await cached(key, cache_salt="one"))[0] == await cached_over_grpc(key, "one") == 64
            assert await cached_over_grpc(key, "two") == 0
            assert (await cached(key, cache_salt="two"))[0] == (await cached(key))[0] == 64
        # A salt that names another tenant's is one of the client's own.
        assert (await cached(acme, cache_salt="beta.0"))[0] == 0
        # What a router believes is where is apart too.
        path = f"/kvferry/v1/requests/{request_id}"
        assert (await http.get(path, headers=bearer(acme))).status_code == 200
        assert (await http.get(path, headers=bearer(beta))).status_code == 404


async def test_a_tenant_learns_no_names_of_workers_and_nothing_of_their_load(tmp_path: Path) -> None:
    file = tmp_path / "keys.yaml"
    key, operators = new_key(file, "acme", "ci"), new_key(file, "acme", "ops", operator=True)
    other = new_key(file, "beta", "ci")
    async with (
        running(gateway={"keys_file": str(file), "placement": "priced"}) as cluster,
        httpx.AsyncClient(base_url=cluster.url, timeout=PATIENCE_S) as http,
    ):
        workers = [host.worker_id for host, _ in cluster.workers]

        async def look(shown: str) -> tuple[dict[str, Any], dict[str, Any], str]:
            headers = {**bearer(shown), "x-kvferry-debug": "disaggregate"}
            answer = await http.post("/v1/completions", json=BODY, headers=headers)
            found = await http.get(f"/kvferry/v1/requests/{answer.json()['id']}", headers=bearer(shown))
            (request,) = found.json()["requests"]
            return answer.json()["kvferry"], request, answer.text + found.text

        debug, request, text = await look(operators)
        assert {debug["prefill_worker"], debug["decode_worker"]} == set(workers)
        assert request["choices"][0]["price"]["streams_ms"] >= 0
        assert all(worker in text for worker in workers)
        async with asyncio.TaskGroup() as others:
            streams = [others.create_task(http.post("/v1/completions", json=BODY, headers=bearer(other)))]
            debug, request, text = await look(key)
        assert streams[0].result().status_code == 200
        assert (debug["prefill_worker"], debug["decode_worker"]) == ("hidden", "hidden")
        assert request["decode_worker"] == "hidden"
        assert request["prompt_tokens_by_source"] == debug["prompt_tokens_by_source"]
        (decision,) = request["choices"]
        assert decision.keys() == {"reason", "prefill", "decode", "missing_tokens"}
        assert not any(worker in text for worker in workers)


async def test_a_client_certificate_lets_in_and_names_the_tenant(certificates: Certificates) -> None:
    client = certificates.ours.issue("acme")
    async with running(gateway={"tls": certificates.config(mutual=True)}) as cluster:
        async with http_to(cluster, certificates.context(client)) as http:
            answer = await http.post("/v1/completions", json=BODY)
            assert answer.status_code == 200
            explained = await http.get(f"/kvferry/v1/requests/{answer.json()['id']}")
            assert explained.status_code == 200
        async with grpc_to(cluster, certificates.credentials(client)) as channel:
            again = await stub_on(channel).Generate(REQUEST)
        assert again.answers[0].text == answer.json()["choices"][0]["text"]
        assert again.usage.cached_prompt_tokens == 64, "over gRPC it is another tenant"
        # One whose name is no tenant's.
        nobody = certificates.ours.issue("No Tenant")
        async with http_to(cluster, certificates.context(nobody)) as http:
            answer = await http.post("/v1/completions", json=BODY)
            assert (answer.status_code, answer.json()["error"]["code"]) == (403, "permission_denied")
        async with grpc_to(cluster, certificates.credentials(nobody)) as channel:
            error = await refused(stub_on(channel).Generate(REQUEST))
            assert error.code() is grpc.StatusCode.PERMISSION_DENIED
            assert details_of(error)["ErrorInfo"].reason == "PERMISSION_DENIED"


async def test_whoever_shows_no_certificate_is_refused_and_probes_are_not(certificates: Certificates) -> None:
    async with running(gateway={"tls": certificates.config(mutual=True)}) as cluster:
        async with http_to(cluster, certificates.context()) as http:
            answer = await http.post("/v1/completions", json=BODY)
            assert answer.status_code == 401
            assert "client certificate" in answer.json()["error"]["message"]
            assert (await http.get("/readyz")).status_code == 200
        async with grpc_to(cluster, certificates.credentials()) as channel:
            error = await refused(stub_on(channel).Generate(REQUEST))
            assert error.code() is grpc.StatusCode.UNAVAILABLE
        async with grpc_to(cluster) as channel:
            assert (await refused(stub_on(channel).Generate(REQUEST))).code() is grpc.StatusCode.UNAVAILABLE
        for _, engine in cluster.workers:
            assert engine.stats().prompt_tokens.total == 0


def why_refused(port: int, context: ssl.SSLContext) -> str:
    """What TLS tells a client that is refused. With TLS 1.3 it comes after the client's side of the handshake."""
    with (
        socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S) as plain,
        context.wrap_socket(plain, server_hostname="localhost") as connection,
        pytest.raises(ssl.SSLError) as refusal,
    ):
        connection.recv(1)
    return refusal.value.reason or ""


@pytest.mark.parametrize("shown", ["expired", "of another authority"])
async def test_a_certificate_that_is_no_good_ends_the_handshake(
    certificates: Certificates, shown: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    expired = shown == "expired"
    client = certificates.ours.issue("acme", expired=True) if expired else certificates.theirs.issue("acme")
    async with running(gateway={"tls": certificates.config(mutual=True)}) as cluster:
        assert cluster.gateway is not None
        alert = "CERTIFICATE_EXPIRED" if expired else "UNKNOWN_CA"
        why = await asyncio.to_thread(why_refused, cluster.gateway.port, certificates.context(client))
        assert why.endswith(alert)
        assert "a client was refused" in caplog.text
        async with grpc_to(cluster, certificates.credentials(client)) as channel:
            error = await refused(stub_on(channel).Generate(REQUEST))
            assert error.code() is grpc.StatusCode.UNAVAILABLE


@pytest.mark.parametrize("shown", ["expired", "of another authority"])
async def test_a_gateway_whose_certificate_is_no_good_is_not_believed(certificates: Certificates, shown: str) -> None:
    ca = certificates.theirs.ca_file
    if shown == "expired":
        certificates.server, ca = certificates.ours.issue("gateway", expired=True), certificates.ours.ca_file
    async with running(gateway={"tls": certificates.config()}) as cluster:
        async with http_to(cluster, certificates.context(ca=ca)) as http:
            with pytest.raises(httpx.ConnectError, match="certificate verify failed"):
                await http.get("/readyz")
        async with grpc_to(cluster, certificates.credentials(ca=ca)) as channel:
            error = await refused(stub_on(channel).Generate(REQUEST))
            assert error.code() is grpc.StatusCode.UNAVAILABLE


async def test_keys_over_tls_and_streams_of_both_protocols(keys: Path, certificates: Certificates) -> None:
    key = new_key(keys, "acme", "ci")
    gateway = {"tls": certificates.config(), "keys_file": str(keys)}
    async with running(gateway=gateway) as cluster:
        async with http_to(cluster, certificates.context()) as http:
            streamed = await http.post(
                "/v1/completions", json={**BODY, "max_tokens": 200, "stream": True}, headers=bearer(key)
            )
            assert streamed.text.endswith("data: [DONE]\n\n")
            assert (await http.get("/v1/models")).status_code == 401
        async with grpc_to(cluster, certificates.credentials()) as channel:
            metadata = tuple(bearer(key).items())
            chunks = [chunk async for chunk in stub_on(channel).GenerateStream(REQUEST, metadata=metadata)]
            assert chunks[-1].usage.completion_tokens == 4


async def test_new_certificates_are_shown_without_a_restart(certificates: Certificates) -> None:
    """As a cluster renews them: the same files, signed by another authority, for server and clients alike."""
    client = certificates.ours.issue("acme")
    async with running(gateway={"tls": certificates.config(mutual=True)}) as cluster:
        async with grpc_to(cluster, certificates.credentials(client)) as channel:
            await stub_on(channel).Generate(REQUEST)
        for old, new in zip(certificates.server, certificates.theirs.issue("gateway"), strict=True):
            old.write_bytes(new.read_bytes())
        certificates.ours.ca_file.write_bytes(certificates.theirs.ca_file.read_bytes())
        renewed = certificates.theirs.issue("acme")
        async with http_to(cluster, certificates.context(renewed)) as http:
            assert (await http.get("/v1/models")).status_code == 200
        async with grpc_to(cluster, certificates.credentials(renewed)) as channel:
            await stub_on(channel).Generate(REQUEST)
        async with grpc_to(cluster, certificates.credentials(client)) as channel:
            assert (await refused(stub_on(channel).Generate(REQUEST))).code() is grpc.StatusCode.UNAVAILABLE
        # Half of a renewal: what was good goes on.
        certificates.server[1].write_text("nonsense")
        async with http_to(cluster, certificates.context(renewed)) as http:
            assert (await http.get("/v1/models")).status_code == 200
        async with grpc_to(cluster, certificates.credentials(renewed)) as channel:
            await stub_on(channel).Generate(REQUEST)


@pytest.mark.parametrize("missing", ["keys_file", "cert_file", "client_ca_file"])
async def test_a_gateway_does_not_start_without_the_files_it_is_told_of(
    cluster: SimCluster, certificates: Certificates, tmp_path: Path, missing: str
) -> None:
    values: dict[str, Any] = {"http_port": 0, "grpc_port": 0}
    if missing == "keys_file":
        values["keys_file"] = str(tmp_path / "absent.yaml")
    else:
        values["tls"] = {**certificates.config(mutual=True), missing: str(tmp_path / "absent.pem")}
    config = configuration.parse({**cluster.config.model_dump(mode="json"), "gateway": values})
    with pytest.raises(ConfigError, match=rf"{missing}: .*absent.*No such file"):
        GatewayHost(config, MODEL, MemoryMembership(cluster.registry))


def refused_by_all(gateway: GatewayHost) -> bool:
    links = [link for kind in MemberKind for link in gateway.worker_pool.links(kind)]
    return len(links) == 2 and all(link._why_not for link in links)


async def test_processes_of_a_cluster_know_each_other_by_certificate(tmp_path: Path) -> None:
    """What `kvferry up` makes; a gateway of another cluster gets no worker."""
    ours, theirs = make_certificates(tmp_path / "ours"), make_certificates(tmp_path / "theirs")
    worker = {"tls": ours.model_dump(mode="json")}
    async with running(worker=worker) as cluster, httpx.AsyncClient(base_url=cluster.url) as http:
        answer = await http.post("/v1/completions", json=BODY)
        assert answer.status_code == 200
        stranger = configuration.parse(
            {
                **cluster.config.model_dump(mode="json"),
                "worker": {**worker, "tls": theirs.model_dump(mode="json")},
            }
        )
        other = GatewayHost(stranger, MODEL, MemoryMembership(cluster.registry))
        await other.start()
        try:
            await until(functools.partial(refused_by_all, other), what="every dial came to nothing")
            assert not other.readiness().members
        finally:
            await other.stop()


@pytest.mark.skipif(find_binary() is None, reason="no etcd on this machine")
async def test_keys_appear_nowhere_in_clear(
    keys: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    """Not in logs, metrics, answers, the registry, the configuration or what is dumped of it; whole or in part."""
    caplog.set_level(logging.DEBUG)
    key, wrong = new_key(keys, "acme", "ci", operator=True), "kvf_" + "w" * 43
    with EtcdServer(tmp_path) as etcd:
        async with running(gateway={"keys_file": str(keys)}) as cluster:
            seen: list[str] = []
            membership = EtcdMembership(MembershipConfig(endpoints=(etcd.endpoint,)))
            registry: Mapping[str, Any] = {"membership": {"endpoints": [etcd.endpoint]}}
            config = configuration.parse({**cluster.config.model_dump(mode="json"), **registry})
            gateway = GatewayHost(config, MODEL, membership)
            worker, _ = await cluster.add_worker(MemberKind.DECODE)
            registration = await EtcdMembership(config.membership).register(worker.member)
            await gateway.start()
            try:
                await until(lambda: gateway.readiness().ready, what="the gateway has a worker and the secret")
                await until(lambda: gateway._registration is not None, what="the gateway is registered")
                url, address = f"http://127.0.0.1:{gateway.port}", f"127.0.0.1:{gateway.grpc.port}"
                async with (
                    httpx.AsyncClient(base_url=url, timeout=PATIENCE_S) as http,
                    grpc.aio.insecure_channel(address) as channel,
                ):
                    for shown, status in ((key, 200), (wrong, 401)):
                        answer = await http.post("/v1/completions", json=BODY, headers=bearer(shown))
                        assert answer.status_code == status, answer.text
                        bad = await http.post(
                            "/v1/completions",
                            content=b"{",
                            headers={**bearer(shown), "content-type": "application/json"},
                        )
                        seen += [answer.text, str(answer.headers), bad.text, str(bad.headers)]
                        call = stub_on(channel).Generate(REQUEST, metadata=tuple(bearer(shown).items()))
                        if shown == key:
                            made = await call
                            path = f"/kvferry/v1/requests/{made.request_id}"
                            seen += [str(made), (await http.get(path, headers=bearer(key))).text]
                        else:
                            seen.append(str(await refused(call)))
                    metrics = await http.get("/metrics", headers=bearer(key))
                    assert metrics.status_code == 200
                    seen.append(metrics.text)
                seen.append(await etcd.ctl("get", "", "--from-key"))
                assert gateway.gateway_id in seen[-1], "the registry was not looked at"
                assert worker.worker_id in seen[-1]
            finally:
                await registration.revoke()
                await gateway.stop()
            seen += [config.model_dump_json(), repr(config), repr(gateway.grpc)]
    seen.append(await asyncio.to_thread(keys.read_text))
    out, err = capfd.readouterr()
    seen += [caplog.text, out, err]
    assert "listens on" in caplog.text, "the logs were not looked at"
    for secret in (key, wrong):
        for text in seen:
            assert secret not in text
            assert secret[4:24] not in text
            assert secret[-20:] not in text
