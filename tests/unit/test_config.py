"""Configuration: which source wins, and what a fault says."""

from __future__ import annotations

import contextlib
import importlib
import itertools
import re
from pathlib import Path
from typing import Any

import pytest

from kvferry.config import MAX_POOLS, ClusterConfig, TierConfig, entry_of, is_of_entry, load, parse
from kvferry.config.section import PATTERN_TO_RULE
from kvferry.errors import ConfigError
from kvferry.util import satellites


def fault(**sections: object) -> str:
    with pytest.raises(ConfigError) as caught:
        parse(sections)
    return caught.value.message


def test_defaults_make_a_configuration() -> None:
    config = load(environ={})
    assert config == ClusterConfig()
    assert config.gateway.http_port == 8000


def test_the_file_overrides_defaults(tmp_path: Path) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text("gateway: {http_port: 8101}\nengine:\n  kind: sim\n")
    config = load(file, environ={})
    assert (config.gateway.http_port, config.engine.kind) == (8101, "sim")
    assert config.gateway.max_requests == ClusterConfig().gateway.max_requests


def test_the_environment_overrides_the_file_and_flags_override_both(tmp_path: Path) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text("gateway: {http_port: 8101}\nworker: {max_requests: 7}\ndecode: {replicas: 5}\n")
    environ = {"KVFERRY__GATEWAY__HTTP_PORT": "8102", "KVFERRY__WORKER__MAX_REQUESTS": "8", "OTHER": "1"}
    config = load(file, environ=environ, flags=["gateway.http_port=8103"])
    assert config.gateway.http_port == 8103
    assert config.worker.max_requests == 8
    assert config.decode.replicas == 5


def test_a_later_flag_wins() -> None:
    assert load(environ={}, flags=["decode.replicas=2", "decode.replicas=3"]).decode.replicas == 3


def test_flag_values_are_yaml() -> None:
    config = load(environ={}, flags=["membership.endpoints=[a:1, b:2]", "insecure=true", "model.max_model_len=null"])
    assert config.membership.endpoints == ("a:1", "b:2")
    assert config.insecure is True
    assert config.model.max_model_len is None


def test_an_empty_file_is_all_defaults(tmp_path: Path) -> None:
    file = tmp_path / "empty.yaml"
    file.write_text("# nothing\n")
    assert load(file, environ={}) == ClusterConfig()


def test_what_is_dumped_can_be_read_again() -> None:
    config = load(environ={}, flags=["engine.kind=sim", "membership.endpoints=[127.0.0.1:2379]"])
    assert parse(config.model_dump(mode="json")) == config


def test_a_configuration_cannot_be_changed() -> None:
    with pytest.raises(ValueError, match="frozen"):
        ClusterConfig().gateway.http_port = 1  # type: ignore[misc]


def test_no_clusters_keys_lie_among_those_of_another() -> None:
    assert parse({}).membership.prefix == "/kvferry/clusters/kvferry"
    assert parse({"name": "blue"}).membership.prefix == "/kvferry/clusters/blue"
    again = parse(parse({"name": "blue"}).model_dump(mode="json"))
    assert again.membership.prefix == "/kvferry/clusters/blue"
    # Also with prefixes of one's own, and names that are folders in a cluster's part of etcd.
    parts = ("kvferry", "clusters", "tenants", "blue")
    prefix_to_name: dict[str, str] = {}
    for path in itertools.chain.from_iterable(itertools.product(parts, repeat=n) for n in range(1, 5)):
        for name in parts:
            with contextlib.suppress(ConfigError):
                config = parse({"name": name, "membership": {"prefix": f"/{'/'.join(path)}/"}})
                assert prefix_to_name.setdefault(config.membership.prefix, name) == name
    assert len(prefix_to_name) == 52  # 1, 3 and 9 places for 4 names
    assert [pair for pair in itertools.permutations(prefix_to_name, 2) if pair[0].startswith(pair[1])] == []


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"gateway": {"http_port": 70000}}, ["gateway.http_port", "70000", "65535"]),
        ({"gateway": {"http_port": "many"}}, ["gateway.http_port", "'many'", "integer"]),
        ({"engine": {"kind": "tgi"}}, ["engine.kind", "'tgi'", "'vllm'", "'sim'"]),
        (
            {"engine": {"kv_cache_dtype": "int8_per_token_head"}},
            ["engine.kv_cache_dtype", "int8_per_token_head", "bfloat16"],
        ),
        ({"engine": {"block_size": 16}}, ["engine", "block_size 16", "multiple of 32"]),
        ({"decode": {"replicas": -1}}, ["decode.replicas", "-1", "greater than or equal to 0"]),
        ({"membership": {"prefix": "kvferry"}}, ["membership.prefix", "'kvferry'", "pattern"]),
        *(
            ({"name": name, "membership": {"prefix": prefix}}, ["membership.prefix", f"must end with /clusters/{name}"])
            for name, prefix in (
                ("blue", "/kvferry"),
                ("blue", "/kvferry/clusters/kvferry"),
                ("blue", "/kvferry/clusters/red/clusters/blue"),
            )
        ),
        ({"membership": {"lease_ttl_s": 1}}, ["membership.lease_ttl_s", "1", "greater than or equal to 2"]),
        ({"membership": {"cert_file": "c.pem"}}, ["membership", "cert_file and key_file"]),
        ({"membership": {"user": "u"}}, ["membership", "user and password_file"]),
        ({"tier": {"volumes": [{"path": "/a", "capacity_gib": 1}]}}, ["tier", "volumes", "enabled: true"]),
        (
            {"tier": {"enabled": True, "volumes": [{"path": "pages", "capacity_gib": 1}]}},
            ["tier.volumes[0].path", "absolute path", "pages"],
        ),
        (
            {"tier": {"enabled": True, "volumes": [{"path": "/a", "capacity_gib": 0}]}},
            ["tier.volumes[0].capacity_gib", "greater than 0"],
        ),
        (
            {
                "tier": {
                    "enabled": True,
                    "volumes": [{"path": "/a", "capacity_gib": 1}, {"path": "/b/../a", "capacity_gib": 2}],
                }
            },
            ["tier", "volumes 0 and 1", "the same directory", "/a"],
        ),
        (
            {
                "tier": {
                    "enabled": True,
                    "volumes": [{"path": "/a/b", "capacity_gib": 1}, {"path": "/a", "capacity_gib": 2}],
                }
            },
            ["tier", "volume 0 (/a/b) lies inside volume 1 (/a)"],
        ),
        ({"tier": {"cpu_gib": float("inf")}}, ["tier.cpu_gib", "finite"]),
        ({"tier": {"socket_dir": "run"}}, ["tier.socket_dir", "absolute path"]),
        ({"tier": {"socket_dir": "/" + "d" * 95}}, ["tier.socket_dir", "at most 95 bytes"]),
        ({"tier": {"host": "0.0.0.0"}}, ["tier.host", "0.0.0.0", "loopback"]),
        ({"name": "No Spaces"}, ["name", "'No Spaces'", "pattern"]),
        ({"gateway": 5}, ["gateway", "5"]),
    ],
    ids=lambda value: ".".join(value) if isinstance(value, dict) else "",
)
def test_a_bad_value_is_named_with_its_key_and_what_is_allowed(sections: dict[str, object], said: list[str]) -> None:
    message = fault(**sections)
    for part in said:
        assert part in message


def test_an_unknown_key_is_named_with_the_keys_beside_it_and_the_closest() -> None:
    message = fault(gateway={"http_prot": 8001})
    assert "gateway.http_prot" in message
    assert "8001" in message
    assert "did you mean 'http_port'?" in message
    assert "max_body_bytes" in message


def test_a_key_of_a_section_that_was_given_without_it_is_named() -> None:
    assert "max_model_len: unknown key (value 1024); did you mean 'model.max_model_len'?" in fault(max_model_len=1024)
    assert "models[0].max_model_len: unknown key (value 1)." in fault(models=[{"name": "a", "max_model_len": 1}])
    assert "engine.blok_size: unknown key (value 16); did you mean 'block_size'?" in fault(engine={"blok_size": 16})
    assert "foo: unknown key (value 1). Allowed here: adapters, " in fault(foo=1)
    assert "dedicated: unknown key (value 1). " in fault(dedicated=1), "it stands in an entry of pools"


def test_an_unknown_key_of_an_entry_is_named_with_the_keys_beside_it() -> None:
    message = fault(tier={"enabled": True, "volumes": [{"path": "/a", "capacity_gb": 1}]})
    assert "tier.volumes[0].capacity_gb" in message
    assert "did you mean 'capacity_gib'?" in message
    assert "write_gib_per_day" in message


def test_volumes_can_be_dumped_and_read_again() -> None:
    volume = "{path: /a, capacity_gib: 1.5, shared: true, write_gib_per_day: 100}"
    config = load(environ={"KVFERRY__TIER__VOLUMES": f"[{volume}]"}, flags=["tier.enabled=true"])
    assert config.tier.volumes[0].path == Path("/a")
    assert parse(config.model_dump(mode="json")) == config


def test_an_unknown_section_is_named_with_the_sections() -> None:
    message = fault(gatway={"http_port": 1})
    assert "gatway" in message
    assert "'gateway'" in message
    assert "membership" in message


def test_every_fault_is_said_at_once() -> None:
    message = fault(gateway={"http_port": -1}, engine={"kind": "tgi"}, nonsense=1)
    assert [key in message for key in ("gateway.http_port", "engine.kind", "nonsense")] == [True] * 3


def test_an_unknown_environment_variable_of_ours_is_a_fault() -> None:
    with pytest.raises(ConfigError, match=r"gateway\.http_prot.*did you mean 'http_port'"):
        load(environ={"KVFERRY__GATEWAY__HTTP_PROT": "1"})


@pytest.mark.parametrize("flag", ["gateway.http_port", "=1", ""])
def test_a_flag_that_is_no_assignment_is_refused(flag: str) -> None:
    with pytest.raises(ConfigError, match=r"expected section\.key=value"):
        load(environ={}, flags=[flag])


def test_floats_may_have_an_exponent_alone(tmp_path: Path) -> None:
    file = tmp_path / "cluster.yaml"
    args = "{custom_histogram_buckets: {request_latency: [1e-3, 1e-2, 1]}}"
    file.write_text(f"engine: {{max_num_batched_tokens: 1e+06, args: {args}}}\n")
    config = load(file, environ={}, flags=["engine.args.watermark=1e-3"])
    buckets = {"request_latency": [0.001, 0.01, 1]}
    assert config.engine.args == {"custom_histogram_buckets": buckets, "watermark": 0.001}
    assert config.engine.max_num_batched_tokens == 1_000_000
    with pytest.raises(ConfigError, match=r"^model\.revision: expected a text: quote it, not 120000\.0$"):
        load(environ={}, flags=["model.revision=12e4"])


def test_a_value_that_is_no_yaml_is_a_text() -> None:
    for value in ("2026-11-25", "2026-13-45", "[1", "[" * 3000, "1" * 5000):
        assert load(environ={}, flags=[f"model.revision={value}"]).model.revision == value


def test_a_flag_below_a_value_is_refused() -> None:
    with pytest.raises(ConfigError, match="'name' is a value, not a section"):
        load(environ={}, flags=["name=x", "name.y=1"])


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("- a\n- b\n", "expected a mapping of sections, found list"),
        ("a: [1\n", "not YAML"),
        ("a: " + "1" * 5000, "not YAML: Exceeds the limit"),
        ("a: \udcff\n", "not YAML: 'utf-8' codec"),
        ("a: " + "[" * 3000 + "]" * 3000, "nested too deeply"),
        ("engine: &a\n  args: *a\n", "a section contains itself"),
        ("tier:\n  enabled: true\n  enabled: false\n", "the key 'enabled' is there twice"),
    ],
)
def test_a_file_that_is_no_mapping_is_refused(tmp_path: Path, content: str, said: str) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text(content, errors="surrogateescape")
    with pytest.raises(ConfigError) as caught:
        load(file, environ={})
    assert said in caught.value.message
    assert str(file) in caught.value.message


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent\.yaml: No such file"):
        load(tmp_path / "absent.yaml", environ={})


@pytest.mark.parametrize("key", ["gateway.host", "worker.host", "engine.side_channel_host"])
@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.7", "example.org"])
def test_a_listener_that_others_reach_is_refused_unless_told_so(key: str, host: str) -> None:
    flag = f"{key}='{host}'"
    with pytest.raises(ConfigError) as caught:
        load(environ={}, flags=[flag])
    assert caught.value.message.startswith(f"{key}: {host!r}")
    assert "insecure" in caught.value.message
    load(environ={}, flags=[flag, "insecure=true"])


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "::1", "localhost"])
def test_loopback_listeners_are_fine(host: str) -> None:
    assert load(environ={}, flags=[f"gateway.host='{host}'"]).gateway.host == host


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ({}, "SmolLM2-135M-Instruct"),
        ({"path": "default"}, "SmolLM2-135M-Instruct"),
        ({"path": "/models/mine/"}, "mine"),
        ({"path": "owner/thing"}, "thing"),
        ({"path": "/models/mine", "served_name": "chat"}, "chat"),
    ],
)
def test_the_served_name_is_the_last_part_of_the_path_unless_given(model: dict[str, str], name: str) -> None:
    assert parse({"model": model}).served_name == name


TLS = {"cert_file": "a.pem", "key_file": "a.key", "ca_file": "ca.pem"}


@pytest.mark.parametrize("path", ["s3://bucket/model", "gs://b", "HTTPS://hub/x", "file:///models/x"])
def test_a_model_is_not_read_from_a_url(path: str) -> None:
    said = f"expected `default`, a folder or a hub id (owner/name): models are not read from URLs, not '{path}'"
    assert fault(model={"path": path}) == f"model.path: {said}"
    # Whatever reads the weights: their digest is computed from files.
    for args in ({"load_format": "runai_streamer"}, {"load_format": "dummy"}):
        assert said in fault(model={"path": path}, engine={"args": args})
    assert said in fault(models=[{"name": "a", "model": {"path": path}}])


def test_insecure_may_name_its_listeners() -> None:
    config = parse(
        {
            "insecure": ["engine.side_channel_host"],
            "engine": {"side_channel_host": "10.0.0.1"},
            "worker": {"host": "10.0.0.1", "tls": TLS},
            "tier": {"host": "10.0.0.1"},
        }
    )
    assert config.insecure == ("engine.side_channel_host",)
    assert parse(config.model_dump(mode="json")) == config
    # Of the others it says nothing.
    assert "worker.host" in fault(insecure=["engine.side_channel_host"], worker={"host": "10.0.0.1"})
    message = fault(insecure=["gateway"])
    for said in ("insecure", "gateway", "gateway.host", "engine.side_channel_host"):
        assert said in message


@pytest.mark.parametrize(
    "gateway",
    [
        {"keys_file": "keys.yaml"},
        {"tls": {"cert_file": "a.pem", "key_file": "a.key", "client_ca_file": "ca.pem"}},
    ],
    ids=["keys", "client certificates"],
)
def test_a_gateway_may_be_reached_by_whoever_shows_something(gateway: dict[str, object]) -> None:
    assert parse({"gateway": {"host": "0.0.0.0", **gateway}}).gateway.host == "0.0.0.0"


def test_tls_alone_keeps_nobody_out() -> None:
    message = fault(gateway={"host": "0.0.0.0", "tls": {"cert_file": "a.pem", "key_file": "a.key"}})
    for said in ("gateway.host", "0.0.0.0", "gateway.keys_file", "gateway.tls.client_ca_file", "insecure"):
        assert said in message


@pytest.mark.parametrize(
    ("tls", "said"),
    [
        ({"cert_file": "a.pem"}, "cert_file and key_file go together"),
        ({"client_ca_file": "ca.pem"}, "client_ca_file needs cert_file and key_file"),
    ],
)
def test_files_of_a_gateways_tls_go_together(tls: dict[str, str], said: str) -> None:
    message = fault(gateway={"tls": tls})
    assert "gateway.tls" in message
    assert said in message


def test_grpc_may_be_left_out_and_may_have_any_port() -> None:
    assert load(environ={}, flags=["gateway.grpc_port=null"]).gateway.grpc_port is None
    assert load(environ={}, flags=["gateway.grpc_port=0"]).gateway.grpc_port == 0
    assert "gateway.grpc_port" in fault(gateway={"grpc_port": 70000})


def test_workers_may_be_reached_behind_mutual_tls() -> None:
    config = parse({"worker": {"host": "10.0.0.1", "tls": TLS}})
    assert config.worker.tls.enabled
    assert "worker.tls" in fault(worker={"host": "10.0.0.1"})
    assert "worker.tls" in fault(tier={"host": "10.0.0.1"})
    # It says nothing about the other listeners.
    assert "gateway.host" in fault(gateway={"host": "10.0.0.1"}, worker={"tls": TLS})


def test_tls_files_go_together() -> None:
    message = fault(worker={"tls": {"cert_file": "a.pem", "ca_file": "ca.pem"}})
    assert "missing: key_file" in message
    assert "worker.tls" in message
    assert "server_name" in fault(worker={"tls": {"server_name": "x"}})


def test_an_unknown_tls_key_is_named() -> None:
    assert "server_name" in fault(worker={"tls": {"servername": "x"}})


def test_auto_is_the_address_of_each_node() -> None:
    hosts = {"gateway": {"host": "auto"}, "worker": {"host": "auto"}, "engine": {"side_channel_host": "auto"}}
    config = parse({"insecure": True, **hosts})
    here = config.on_node("10.0.0.7")
    assert (here.gateway.host, here.worker.host, here.engine.side_channel_host) == ("10.0.0.7",) * 3
    assert here.tier.host == "127.0.0.1"
    # It is not loopback, so it needs what other addresses need.
    assert "worker.host" in fault(worker={"host": "auto"})


def test_a_role_has_an_engine_of_its_own_where_it_says_so() -> None:
    config = parse(
        {"engine": {"max_num_seqs": 32}, "decode": {"engine": {"max_num_seqs": 256, "max_num_batched_tokens": 512}}}
    )
    assert config.engine_of("prefill").max_num_seqs == 32
    assert config.engine_of("decode").max_num_seqs == 256
    assert config.engine_of("prefill").max_num_batched_tokens is None
    assert config.engine_of("decode").max_num_batched_tokens == 512
    assert "decode.engine.block_size" in fault(decode={"engine": {"block_size": 16}})


def ranks(of_prefill: int, of_decode: int) -> dict[str, Any]:
    return {
        role: {"engine": {"tensor_parallel_size": size}}
        for role, size in (("prefill", of_prefill), ("decode", of_decode))
    }


def test_roles_may_have_other_tensor_parallel_sizes_that_fit() -> None:
    for sizes in ((1, 2), (4, 2), (1, 1), (3, 9)):
        config = parse({**ranks(*sizes), "pools": {"p": ranks(*reversed(sizes))}})
        assert tuple(config.engine_of(role).tensor_parallel_size for role in ("prefill", "decode")) == sizes
    with pytest.raises(ConfigError, match=r"prefill.*\(2\) and decode's \(3\): one must be a multiple"):
        parse(ranks(2, 3))
    with pytest.raises(ConfigError, match=r"pools\.p\.prefill\.engine\.tensor_parallel_size \(4\) and decode's \(3\)"):
        parse({"pools": {"p": ranks(4, 3)}})


def test_each_rank_has_a_gpu_where_ray_counts_them() -> None:
    role = {"num_gpus": 1, "engine": {"tensor_parallel_size": 2}}
    gpu: dict[str, Any] = {"kind": "vllm", "device": "gpu"}
    with pytest.raises(ConfigError, match=r"decode\.num_gpus: 1 are too few for tensor_parallel_size 2"):
        parse({"engine": gpu, "decode": role})
    with pytest.raises(ConfigError, match=r"pools\.p\.prefill\.num_gpus: 1\.5 are too few"):
        parse({"engine": gpu | {"tensor_parallel_size": 2}, "pools": {"p": {"prefill": {"num_gpus": 1.5}}}})
    for enough in (0, 2, 4):
        assert parse({"engine": gpu, "decode": role | {"num_gpus": enough}}).decode.num_gpus == enough
    shared = parse({"engine": gpu, "prefill": {"num_gpus": 0.5}, "decode": {"num_gpus": 0.5}})
    assert shared.decode.num_gpus == 0.5
    assert parse({"engine": gpu | {"device": "cpu"}, "decode": role}).decode.num_gpus == 1


def test_volumes_need_equal_tensor_parallel_sizes() -> None:
    volumes = {"tier": {"enabled": True, "volumes": [{"path": "/v", "capacity_gib": 1}]}}
    with pytest.raises(ConfigError, match=r"must be equal with tier\.volumes"):
        parse({**ranks(1, 2), **volumes})
    parse({**ranks(2, 2), **volumes})
    # A dedicated pool has no volume of others.
    parse({**volumes, "pools": {"p": {**ranks(1, 2), "dedicated": True}}})


def test_a_request_waits_for_its_pages_as_long_as_they_may_wait_and_be_read() -> None:
    assert TierConfig(io_timeout_s=2.0).load_timeout_s == 4.0


@pytest.mark.parametrize(
    ("flag", "said"),
    [
        ("tier.volumes=5", "tier.volumes: expected a list, not 5"),
        ("tier.volumes=[3]", r"tier\.volumes\[0\]: expected a mapping of settings, not 3"),
        ("decode.resources=[1]", r"decode.resources: expected a mapping, not \[1\]"),
    ],
)
def test_a_value_of_the_wrong_kind_is_told_in_words_of_yaml(flag: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        load(environ={}, flags=[flag])


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"pools": {"Finance": {}}}, "pools: pool 'Finance': lower-case letters, digits and dashes, at most 31"),
        ({"pools": {"": {}}}, "pools: pool '': lower-case"),
        ({"pools": {"default": {}}}, "pool 'default': this is the name of the workers of `prefill` and `decode`"),
        ({"pools": {"x" * 32: {}}}, "at most 31"),
        ({"pools": {f"p{i}": {} for i in range(MAX_POOLS + 1)}}, f"pools: 17 pools; {MAX_POOLS} is the limit"),
        ({"pools": {"a": {"decode": {"replica": 1}}}}, "pools.a.decode.replica: unknown key (value 1); did you mean"),
        ({"pools": {"a": {"name": 1}}}, "Allowed here: decode, dedicated, prefill, served_name"),
        (
            {"model": {"served_name": "m"}, "pools": {"a": {"served_name": "m"}}},
            "pools.a.served_name: 'm' is the name of the default pool",
        ),
        (
            {"pools": {"a": {"served_name": "m"}, "b": {"served_name": "m"}}},
            "pools.b.served_name: 'm' is the name of pool 'a'",
        ),
        ({"pools": {"a": {"served_name": "m" * 201}}}, "pools.a.served_name: String should have at most 200"),
        (
            {"tier": {"enabled": True, "volumes": [{"path": "/v", "capacity_gib": 1, "pool": "a"}]}},
            "tier.volumes[0].pool: there is no pool 'a'",
        ),
    ],
)
def test_pools_that_make_no_sense_are_refused(sections: dict[str, Any], said: str) -> None:
    assert said in fault(**sections)


RANKS: dict[str, Any] = {"decode": {"engine": {"tensor_parallel_size": 2}}}
SEEDED: dict[str, Any] = {"seed": 3}
SEEDED_DECODE: dict[str, Any] = {"decode": {"engine": {"args": SEEDED}}}
NO_DEFAULT: dict[str, Any] = {"prefill": {"replicas": 0}, "decode": {"replicas": 0}}


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"models": [{"name": "A"}]}, "models[0].name: pool 'A': lower-case letters, digits and dashes, at most 31"),
        ({"models": [{"name": "a@b"}]}, "models[0].name: pool 'a@b': lower-case letters"),
        ({"models": [{"name": "a\nb"}]}, "models[0].name: pool 'a\\nb': lower-case letters"),
        ({"models": [{"name": "default"}]}, "models[0].name: pool 'default': this is the name of the workers"),
        ({"models": [{"name": "other"}]}, "models[0].name: 'other': metrics have it for the sum of many models"),
        ({"models": [{}]}, "models[0].name: Field required"),
        ({"models": {"a": {}}}, "models: expected a list"),
        ({"models": [{"name": "a"}, {"name": "a"}]}, "models[1].name: 'a' is the name of models[0]"),
        ({"models": [{"name": "a"}], "pools": {"a": {}}}, "models[0].name: 'a' is the name of pools.a"),
        (
            {"models": [{"name": f"m{i}"} for i in range(MAX_POOLS)], "pools": {"p": {}}},
            f"models: 16 and 1 pools; {MAX_POOLS} in all is the limit",
        ),
        (
            {"model": {"served_name": "m"}, "models": [{"name": "a", "model": {"served_name": "m"}}]},
            "models[0].model.served_name: 'm' is the name of the default pool",
        ),
        (
            {"models": [{"name": "a", "model": {"aliases": ["x"]}}, {"name": "x"}]},
            "models[1].model.served_name: 'x' is the name of models[0].model.aliases[0]",
        ),
        (
            {"pools": {"p": {"served_name": "x"}}, "model": {"aliases": ["x"]}},
            "model.aliases[0]: 'x' is the name of pool 'p'",
        ),
        ({"model": {"served_name": "m", "aliases": ["m"]}}, "model.aliases[0]: 'm' is the name of the default pool"),
        ({"model": {"served_name": "a\x07"}}, "model.served_name: 'a\\x07': control characters, and spaces at an end"),
        ({"model": {"aliases": ["a\u2028b"]}}, "model.aliases: 'a\\u2028b': control characters"),
        ({"model": {"aliases": [" a"]}}, "model.aliases: ' a': control characters, and spaces at an end"),
        ({"model": {"aliases": [""]}}, "model.aliases: a model's name has 1 to 200 characters, not 0"),
        ({"model": {"aliases": ["a" * 201]}}, "model.aliases: a model's name has 1 to 200 characters, not 201"),
        ({"model": {"aliases": [f"a{i}" for i in range(17)]}}, "model.aliases: 17 aliases; 16 is the limit"),
        (
            {"model": {"canary": {"b": 5}}},
            "model.canary: 'b' is no model of this cluster; others that can take a share: none",
        ),
        ({"models": [{"name": "a", "model": {"canary": {"a": 5}}}]}, "models[0].model.canary: 'a' is the model itself"),
        ({"model": {"canary": {"default": 5}}}, "model.canary: 'default' is the model itself"),
        (
            {**NO_DEFAULT, "models": [{"name": "a", "model": {"canary": {"default": 5}}}]},
            "models[0].model.canary: 'default' is no model of this cluster",
        ),
        ({"model": {"canary": {"a": 0}}}, "model.canary: 'a': a share is above 0 and at most 100 per cent, not 0"),
        ({"model": {"canary": {"a": float("nan")}}}, "model.canary: 'a': a share is above 0 and at most 100 per cent"),
        ({"model": {"canary": {"a": 60, "b": 41}}}, "model.canary: the shares are 101 per cent in all; 100 is the"),
        (
            {"models": [{"name": "a", "engine": {"kind": "vllm"}}]},
            "models[0].engine: kind: all models of a cluster have",
        ),
        (
            {"models": [{"name": "a", "engine": {"blok_size": 3}}]},
            "models[0].engine.blok_size: unknown key (value 3); did",
        ),
        ({"models": [{"name": "a", "engine": {"block_size": 0}}]}, "models[0].engine.block_size: Input should be"),
        ({"models": [{"name": "a", "engine": {"args": 3}}]}, "models[0].engine.args: expected a mapping"),
        (
            {"models": [{"name": "a", "engine": {"args": {"no-sense": 1}}}]},
            "models[0].engine.args: no-sense: written as 'no_sense'",
        ),
        (
            {"models": [{"name": "a", "decode": {"engine": {"args": {"no-sense": 1}}}}]},
            "models[0].decode.engine.args: no-sense: written as 'no_sense'",
        ),
        (
            {"models": [{"name": "a", "prefill": {"engine": {"tensor_parallel_size": 3}}, **RANKS}]},
            "models[0].prefill.engine.tensor_parallel_size (3) and decode's (2): one must be a multiple",
        ),
        (
            {"models": [{"name": "a", "model": {"path": "m"}, "engine": {"args": SEEDED}, **SEEDED_DECODE}]},
            "models[0].decode.engine.args: seed: both roles need the same",
        ),
        (
            {
                "engine": {"kind": "vllm"},
                "models": [{"name": "a"}],
                "tier": {"enabled": True, "volumes": [{"path": "/v", "capacity_gib": 1}]},
            },
            "tier.blocks_per_chunk: must be set where models share volumes (a, default)",
        ),
        ({"model": {"chat_template": "/t.jinja"}}, "model.chat_template: simulated engines (engine.kind: sim) have no"),
        (
            {"models": [{"name": "a", "model": {"chat_template": "/t.jinja"}}]},
            "models[0].model.chat_template: simulated engines (engine.kind: sim) have no templates",
        ),
    ],
)
def test_models_that_make_no_sense_are_refused(sections: dict[str, Any], said: str) -> None:
    assert said in fault(**{"engine": {"kind": "sim"}, **sections})


def test_faults_of_an_entry_name_it_also_where_they_speak_of_several_settings() -> None:
    pages = {"name": "a", "model": {"path": "m", "dtype": "float32"}, "engine": {"kv_cache_dtype": "bfloat16"}}
    assert fault(models=[pages]).startswith(
        "models[0].engine.kv_cache_dtype: allowed are auto, and bfloat16 with models[0].model.dtype: bfloat16"
    )
    two = fault(models=[{"name": "a", "engine": {"block_size": 0, "threads": 0}}]).splitlines()
    assert [line.partition(":")[0] for line in two] == ["models[0].engine.block_size", "models[0].engine.threads"]
    assert fault(models=[{"name": "a", "model": {"path": "m"}, "engine": {"block_size": 8}}]).startswith(
        "models[0].engine: block_size 8 must be a multiple of 32"
    )


@pytest.mark.parametrize("key", ["gateway.sse_keep_alive_s", "worker.heartbeat_s", "tier.breaker_retry_s"])
def test_a_limit_that_nobody_decides_is_no_key(key: str) -> None:
    section, _, name = key.partition(".")
    assert fault(**{section: {name: 1}}).startswith(f"{key}: unknown key (value 1)")


LIMIT = "the limit is "


@pytest.mark.parametrize(
    ("pattern", "rule"), [(pattern, rule) for pattern, rule in PATTERN_TO_RULE.items() if rule.startswith(LIMIT)]
)
def test_a_setting_that_became_a_constant_names_it(pattern: str, rule: str) -> None:
    key, constant = pattern.removeprefix("*"), rule.removeprefix(LIMIT)
    module, _, name = constant.rpartition(".")
    assert hasattr(importlib.import_module(module), name)
    values: Any = 1
    for part in reversed(key.split(".")):
        values = {part: values}
    assert fault(**values) == f"{key}: no longer a setting (value 1): the limit is {constant}"
    if key.startswith("engine."):
        assert fault(models=[{"name": "a", **values}]).startswith(f"models[0].{key}: no longer a setting (value 1)")


@pytest.mark.parametrize(
    ("pattern", "rule"), [(pattern, rule) for pattern, rule in PATTERN_TO_RULE.items() if not rule.startswith(LIMIT)]
)
def test_a_setting_that_follows_from_others_says_so(pattern: str, rule: str) -> None:
    places = ("a",)
    if pattern.startswith("*.engine."):
        places = ("prefill", "decode", "pools.a.decode", "models[0].prefill")
    elif pattern.startswith(("*model.", "*engine.")):
        places = ("", "models[0].")
    for key in (pattern.replace("*", place) for place in places):
        values: Any = 1
        for part in reversed(key.replace("models[0]", "models").split(".")):
            values = {part: [{"name": "a", **values}] if part == "models" else values}
        assert fault(**values) == f"{key}: no longer a setting (value 1): {rule}"


def test_shares_of_100_per_cent_are_taken_whatever_their_sum_is_in_binary() -> None:
    shares = {"a": 33.1, "b": 33.2, "c": 33.7}
    assert sum(shares.values()) > 100
    models = [{"name": name} for name in shares]
    config = parse({"engine": {"kind": "sim"}, "model": {"canary": shares}, "models": models})
    assert dict(config.model.canary) == shares


def test_a_model_has_a_configuration_of_its_own_that_no_other_changes() -> None:
    beta = {
        "name": "beta",
        "model": {"path": "org/beta", "aliases": ["b"], "canary": {"alpha": 10}},
        "engine": {"block_size": 8, "args": {"seed": 3}},
        "tier": {"cpu_gib": 2},
        "decode": {"replicas": 3, "engine": {"max_num_seqs": 2}},
    }
    volumes = [{"path": "/v"}, {"path": "/w", "pool": "beta"}]
    tier = {"enabled": True, "volumes": [{**volume, "capacity_gib": 1} for volume in volumes]}

    def made(**changes: Any) -> ClusterConfig:
        return parse({"engine": {"kind": "sim", "args": {"watermark": 0.02}}, "tier": tier, **changes})

    config = made(models=[{"name": "alpha"}, beta])
    assert parse(config.model_dump(mode="json")) == config
    own = config.of_model("beta")
    assert parse(own.model_dump(mode="json")) == own, "replicas read it again"
    assert (own.served_name, own.model.path, own.model.aliases, own.model.canary) == ("beta", "org/beta", (), {})
    engine = own.engine_of("decode", "beta")
    assert (engine.block_size, engine.max_num_seqs, engine.kind) == (8, 2, "sim")
    assert engine.args == {"watermark": 0.02, "seed": 3}
    assert (own.role_of("decode", "beta").replicas, own.decode.replicas, own.models) == (3, 0, ())
    assert (own.tier.cpu_gib, own.tier.volumes, own.volumes_of("beta")) == (2, config.tier.volumes, "beta")
    assert config.of_model("alpha").volumes_of("alpha") == config.of_model().volumes_of("") == ""
    # Others come, go and change; names and shares are the gateways'.
    plain = {**beta, "model": {"path": "org/beta"}}
    assert made(models=[plain, {"name": "c"}], model={"path": "elsewhere"}).of_model("beta") == own
    assert (
        made(models=[{"name": "alpha"}, {"name": "c"}, beta], model={"aliases": ["d"]}).of_model() == config.of_model()
    )
    assert (
        made(models=[{"name": "alpha"}, {**beta, "tier": {"enabled": False}}]).of_model("beta").volumes_of("beta")
        is None
    )


def test_an_entry_removes_an_argument_of_the_section_engine_with_null() -> None:
    drafts = {"method": "draft_model", "model": "/models/draft", "num_speculative_tokens": 3}
    args = {"speculative_config": drafts, "watermark": 0.02}
    removed = {"tensor_parallel_size": 2, "args": {"speculative_config": None, "seed": 3}}
    config = parse({"engine": {"args": args}, "models": [{"name": "a", "engine": removed}]})
    assert config.of_model("a").engine_of("decode", "a").args == {"watermark": 0.02, "seed": 3}
    assert config.engine_of("decode").args == args
    assert parse(config.model_dump(mode="json")) == config
    said = fault(models=[{"name": "a", "engine": {"args": {"seeed": None}}}])
    assert "models[0].engine.args: seeed: null removes nothing: engine.args has no such argument" in said


def test_an_entry_names_its_workers_after_its_model() -> None:
    def pool(**model: Any) -> str:
        (entry,) = parse({"engine": {"kind": "sim"}, "models": [{"name": "a", "model": model}]}).models
        return entry.pool

    assert pool() == pool(aliases=["b"]) == pool(served_name="a"), "names beside the served one are the gateways'"
    different = [pool(), pool(path="x"), pool(revision="2"), pool(served_name="b"), pool(tool_parser="hermes")]
    assert len(set(different)) == len(different)
    assert all(is_of_entry(each) and entry_of(each) == "a" for each in different)
    assert (is_of_entry("a"), entry_of("a"), entry_of("")) == (False, "a", "")


@pytest.mark.parametrize(
    ("sections", "has_default"),
    [
        ({}, True),
        (NO_DEFAULT, True),
        ({"models": [{"name": "a"}]}, True),
        ({**NO_DEFAULT, "models": [{"name": "a"}]}, False),
        ({**NO_DEFAULT, "models": [{"name": "a"}], "pools": {"p": {}}}, True),
    ],
)
def test_a_default_model_has_workers_or_is_the_only_one(sections: dict[str, Any], has_default: bool) -> None:
    assert parse({"engine": {"kind": "sim"}, **sections}).serves_default is has_default


@pytest.mark.parametrize(
    ("dtype", "said"),
    [
        ("nvfp4", "NVIDIA's Blackwell GPUs, not by CPUs"),
        ("nvfp4_4over6", "are untested between engines"),
        ("int8_per_token_head", "returns garbage"),
        ("int4_per_token_head", "returns garbage"),
        ("float64", "kv_cache_dtype: allowed are auto; float16 or bfloat16, where the model is computed in it"),
    ],
)
def test_an_untested_dtype_of_pages_is_refused_with_the_reason(dtype: str, said: str) -> None:
    message = fault(engine={"kv_cache_dtype": dtype})
    assert said in message
    assert "fp8, fp8_e4m3 or fp8_e5m2, not" in message
    assert message.endswith(f"not '{dtype}'")


def test_a_pool_has_engines_of_its_own() -> None:
    config = parse(
        {
            "engine": {"kind": "sim", "max_num_seqs": 8},
            "prefill": {"engine": {"max_num_seqs": 4}},
            "pools": {f"p{i}": {"decode": {"replicas": 3, "engine": {"max_num_seqs": 2}}} for i in range(MAX_POOLS)},
        }
    )
    assert parse(config.model_dump(mode="json")) == config
    engine = config.engine_of("decode", "p3")
    assert (engine.max_num_seqs, engine.block_size) == (2, config.engine.block_size)
    assert config.engine_of("prefill", "p3").max_num_seqs == 8, "not that of the default pool's role"
    assert config.role_of("decode", "p3").replicas == 3
    assert load(environ={"KVFERRY__POOLS__A__DEDICATED": "true"}).pools["a"].dedicated


@pytest.mark.parametrize(
    ("pool", "owners", "volumes"),
    [
        ("", ["", "own"], ""),
        ("", ["own"], None),
        ("own", ["", "own"], "own"),
        ("shared", ["", "own"], ""),
        ("shared", ["own"], None),
        ("alone", ["", "own"], None),
    ],
)
def test_which_volumes_a_pool_uses(pool: str, owners: list[str], volumes: str | None) -> None:
    config = parse(
        {
            "pools": {
                "own": {"dedicated": True},
                "alone": {"dedicated": True},
                "shared": {},
            },
            "tier": {
                "enabled": True,
                "volumes": [
                    {"path": f"/v{i}", "capacity_gib": 1, **({"pool": owner} if owner else {})}
                    for i, owner in enumerate(owners)
                ],
            },
        }
    )
    assert config.volumes_of(pool) == volumes


def test_pages_of_another_dtype_than_the_model_is_computed_in_are_refused() -> None:
    def sections(dtype: str, of_pages: str, **engine: str) -> dict[str, Any]:
        return {"model": {"dtype": dtype}, "engine": {**engine, "kv_cache_dtype": of_pages}}

    for dtype, of_pages, computed in (
        ("auto", "bfloat16", "float32"),
        ("bfloat16", "float16", "bfloat16"),
    ):
        said = fault(**sections(dtype, of_pages))
        assert f"engine.kv_cache_dtype: allowed are auto, and {of_pages} with model.dtype: {of_pages}." in said
        assert f"The model is computed in {computed}" in said
        assert ("(model.dtype: auto, on a CPU)" in said) == (dtype == "auto")
    parse(sections("bfloat16", "bfloat16"))
    parse(sections("auto", "auto"))
    parse(sections("auto", "bfloat16", kind="sim"))
    # Not known before the model is read: the engine compares it (engine/vllm/model_kinds.py).
    parse(sections("auto", "bfloat16", device="gpu"))


def test_a_pool_of_other_ranks_does_not_share_the_default_pools_volumes() -> None:
    tier = {"enabled": True, "volumes": [{"path": "/nvme", "capacity_gib": 1}]}
    ranks = {"engine": {"tensor_parallel_size": 2}}
    pools = {"equal": {}, "other": {"prefill": ranks, "decode": ranks}}
    config = parse({"engine": {"kind": "vllm"}, "tier": tier, "pools": pools})
    assert [config.volumes_of(pool) for pool in ("", "equal", "other")] == ["", "", None]


@pytest.mark.parametrize(
    ("values", "said"),
    [
        (
            {"engine": {"kind": "sim"}, "sim": {"step_ms": -1}},
            "sim.step_ms: Input should be greater than",
        ),
        (
            {"engine": {"kind": "sim"}, "sim": {"steps": 1}},
            "sim.steps: no such setting; there are",
        ),
        ({"sim": {"step_ms": 1.0}}, "sim: settings of simulated engines, and engine.kind is vllm"),
    ],
)
def test_settings_of_simulated_engines_are_checked_by_their_package(values: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)):
        parse({"model": {"path": "m"}, **values})


def test_a_simulated_engine_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(satellites, "entry_points", lambda **_: ())
    satellites._load.cache_clear()
    try:
        with pytest.raises(ConfigError, match="kvferry-sim, which is not installed"):
            parse({"model": {"path": "m"}, "engine": {"kind": "sim"}})
        with pytest.raises(ConfigError, match=r"^tier\.volumes: .*: pip install kvferry-keeper$"):
            satellites.keeper()
    finally:
        satellites._load.cache_clear()
