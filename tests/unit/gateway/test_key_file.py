"""API keys in a file: what is in it, what is refused, and that it may change."""

from __future__ import annotations

import hashlib
import json
import logging
import re
import stat
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import yaml

from kvferry.errors import ConfigError
from kvferry.gateway.identity import key_file
from kvferry.gateway.identity.key_file import LOOK_INTERVAL_S, READ_AT_ONCE_BYTES, ApiKey, KeyFile, new_key, read_keys
from support.waiting import wait_until


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "keys.yaml"


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()


def entry(tenant: str = "acme", name: str = "ci", key: str = "k") -> str:
    return f"- {{tenant: {tenant}, name: {name}, sha256: {hashlib.sha256(key.encode()).hexdigest()}}}\n"


def test_a_new_key_is_found_and_only_its_hash_is_written(file: Path) -> None:
    key = new_key(file, "acme", "ci")
    assert re.fullmatch(r"kvf_[A-Za-z0-9_-]{43}", key)
    assert key not in file.read_text()
    assert key.removeprefix("kvf_") not in file.read_text()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    found = KeyFile(file).find(digest(key))
    assert found is not None
    assert (found.tenant, found.name) == ("acme", "ci")
    assert key not in repr(KeyFile(file))


def test_an_operators_key_is_marked_and_stays_marked(file: Path) -> None:
    operator = new_key(file, "acme", "prometheus", operator=True)
    other = new_key(file, "acme", "ci")
    keys = KeyFile(file)
    found = [keys.find(digest(key)) for key in (operator, other)]
    assert [key is not None and key.operator for key in found] == [True, False]


def test_a_key_for_metrics_is_marked_and_stays_marked(file: Path) -> None:
    metrics = new_key(file, "acme", "prometheus", metrics=True)
    other = new_key(file, "acme", "ci")
    keys = KeyFile(file)
    found = [keys.find(digest(key)) for key in (metrics, other)]
    assert [key is not None and (key.metrics, key.operator) for key in found] == [(True, False), (False, False)]
    with pytest.raises(ConfigError, match="a key is for operators, or for metrics alone"):
        new_key(file, "acme", "both", operator=True, metrics=True)


@pytest.mark.parametrize("change", [lambda key: key[:-1], lambda key: key + "x", lambda key: key.lower(), lambda _: ""])
def test_nothing_but_the_whole_key_is_found(file: Path, change: object) -> None:
    key = new_key(file, "acme", "ci")
    assert KeyFile(file).find(digest(change(key))) is None  # type: ignore[operator]


def test_keys_are_added_beside_others_and_comments_stay(file: Path) -> None:
    file.write_text("# who has what: see the vault\n" + entry("beta", "app", "known"))
    key = new_key(file, "acme", "ci")
    assert file.read_text().startswith("# who has what")
    keys = KeyFile(file)
    assert [keys.find(digest(one)) is not None for one in ("known", key)] == [True, True]
    assert len(yaml.safe_load(file.read_text())) == 2


def test_keys_that_are_made_at_once_are_all_there(file: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        made = list(pool.map(lambda number: new_key(file, "acme", f"k{number}"), range(16)))
    keys = KeyFile(file)
    assert all(keys.find(digest(key)) is not None for key in made)


@pytest.mark.parametrize(
    ("tenant", "name", "said"),
    [("Acme Corp", "ci", "Acme Corp"), ("acme", "a b", "a b"), ("acme", "taken", "already"), ("", "ci", "tenant")],
)
def test_a_name_that_cannot_be_one_is_refused(file: Path, tenant: str, name: str, said: str) -> None:
    file.write_text(entry("acme", "taken"))
    before = file.read_text()
    with pytest.raises(ConfigError, match=said):
        new_key(file, tenant, name)
    assert file.read_text() == before


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("a: [", "not YAML"),
        ("a: 1\n", "expected a list"),
        ("- {tenant: a, name: b}\n", "entry 1: expected exactly tenant, name, sha256"),
        ("- {tenant: a, name: b, sha256: c, key: secret}\n", "entry 1: expected exactly"),
        ("- {tenant: a, name: b, sha256: c, operator: 1}\n", "entry 1: operator is true or false"),
        ("- {tenant: a, name: b, sha256: c, metrics: 1}\n", "entry 1: metrics is true or false"),
        (f"{entry()[:-2]}, operator: true, metrics: true}}\n", "entry 1: a key is for operators, or for metrics alone"),
        ("- {tenant: a, name: 1, sha256: c}\n", "entry 1: .*strings"),
        ("- {tenant: a, name: b, sha256: c}\n", "entry 1: .*64 hexadecimal"),
        (entry() + entry("B"), "entry 2: tenant 'B'"),
        (entry() + entry(key="other"), "entry 2: .*'acme' has a key 'ci' already"),
        (entry() + entry("beta"), "entry 2: the same key as acme/ci"),
    ],
)
def test_a_file_that_is_none_is_refused_with_the_entry_and_without_quoting_it(
    file: Path, content: str, said: str
) -> None:
    file.write_text(content)
    with pytest.raises(ConfigError, match=said) as refused:
        read_keys(file)
    assert str(file) in refused.value.message
    assert "secret" not in refused.value.message


def test_a_missing_file_is_named(file: Path) -> None:
    with pytest.raises(ConfigError, match=r"gateway\.keys_file: .*keys\.yaml: No such file"):
        KeyFile(file)


def test_keys_come_and_go_while_it_is_open(file: Path, tmp_path: Path) -> None:
    old = new_key(file, "acme", "old")
    clock = Clock()
    keys = KeyFile(file, clock=clock)
    new = new_key(file, "acme", "new")
    assert keys.find(digest(new)) is None, "it was looked at too soon"
    clock.now_s += LOOK_INTERVAL_S
    assert keys.find(digest(new)) is not None
    # As a cluster replaces a mounted secret: another file under the same name.
    other = tmp_path / "other.yaml"
    other.write_text(entry("acme", "third", "third"))
    other.replace(file)
    clock.now_s += LOOK_INTERVAL_S
    assert keys.find(digest(old)) is None
    assert keys.find(digest("third")) is not None


def test_a_file_that_broke_changes_nothing_and_is_complained_of_once(
    file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    key = new_key(file, "acme", "ci")
    clock = Clock()
    keys = KeyFile(file, clock=clock)
    for content in ("- broken", None):
        if content is None:
            file.unlink()
        else:
            file.write_text(content)
        caplog.clear()
        for _ in range(3):
            clock.now_s += LOOK_INTERVAL_S
            with caplog.at_level(logging.INFO):
                assert keys.find(digest(key)) is not None
        assert len(caplog.records) == 1
    file.write_text(entry("acme", "ci", "next"))
    clock.now_s += LOOK_INTERVAL_S
    assert keys.find(digest("next")) is not None
    assert keys.find(digest(key)) is None


def test_a_large_file_is_read_in_a_thread(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file.write_text("".join(entry("acme", f"k{i}", f"key {i}") for i in range(200)))
    assert file.stat().st_size > READ_AT_ONCE_BYTES
    clock = Clock()
    keys = KeyFile(file, clock=clock)
    allowed = threading.Event()
    read = key_file.read_keys

    def slow(read_file: Path) -> list[ApiKey]:
        assert allowed.wait(30)
        return read(read_file)

    monkeypatch.setattr(key_file, "read_keys", slow)
    file.write_text("".join(entry("acme", f"k{i}", f"other key {i}") for i in range(200)))
    clock.now_s += LOOK_INTERVAL_S
    assert keys.find(digest("key 0")) is not None
    assert keys.find(digest("other key 0")) is None
    allowed.set()
    wait_until(lambda: keys.find(digest("other key 0")) is not None)
    assert keys.find(digest("key 0")) is None


def test_no_keys_is_a_file_that_lets_nobody_in(file: Path, caplog: pytest.LogCaptureFixture) -> None:
    file.write_text("# none yet\n")
    keys = KeyFile(file)
    assert "nobody can use this gateway" in caplog.text
    assert keys.find(digest("")) is None


def test_a_tenant_of_the_file_may_have_a_pool_which_new_keys_keep(file: Path) -> None:
    file.write_text(entry().replace("}", ", pool: finance}"))
    new_key(file, "acme", "web")
    new_key(file, "beta", "ci")
    keys = KeyFile(file)
    assert (keys.pool_of("acme"), keys.pool_of("beta"), keys.pool_of("unknown")) == ("finance", "", "")
    assert [key.pool for key in read_keys(file)] == ["finance", "finance", ""]


@pytest.mark.parametrize(
    ("pools", "said"),
    [
        (("finance", ""), "entry 2: the tenant 'acme' has pool '' here and 'finance' in an entry before it"),
        (("finance", "other"), "has pool 'other' here and 'finance'"),
        (("Finance",), "entry 1: pool 'Finance': lower-case letters"),
        ((7,), "entry 1: pool is a string"),
    ],
)
def test_a_pool_that_is_none_or_differs_is_refused(file: Path, pools: tuple[object, ...], said: str) -> None:
    file.write_text(
        json.dumps(
            [
                {"tenant": "acme", "name": f"k{i}", "sha256": f"{i}" * 64, **({"pool": pool} if pool else {})}
                for i, pool in enumerate(pools)
            ]
        )
    )
    with pytest.raises(ConfigError, match=said):
        read_keys(file)
