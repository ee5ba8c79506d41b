"""Sealing keys from a file of secrets."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path

import pytest

from kvferry.errors import ConfigError
from kvferry.tenancy.namespace import Namespace
from kvferry_keeper.store import keyring as keyring_module
from kvferry_keeper.store.keyring import MAX_SECRETS, MAX_TENANTS, SealingKeyFile, SecretsKeyring, load_keyring

SECRET = "ab" * 32


def saved(tmp_path: Path, text: str, mode: int = 0o600) -> Path:
    file = tmp_path / "keys.json"
    file.write_text(text)
    file.chmod(mode)
    return file


def test_no_two_namespaces_share_a_key(tmp_path: Path) -> None:
    keyring = load_keyring(saved(tmp_path, json.dumps({"*": SECRET, "bank": "cd" * 32})))
    namespaces = [Namespace(tenant, epoch) for tenant in ("a", "a-1", "bank") for epoch in (0, 1, 10)]
    keys = {keyring.keys(namespace, volume) for namespace in namespaces for volume in ("v-1", "v-2")}
    assert len(keys) == 2 * len(namespaces)
    assert all(len(of_one) == 1 for of_one in keys)
    assert keyring.keys(namespaces[0], "v-1") == keyring.keys(Namespace("a", 0), "v-1")


def test_a_tenant_without_a_secret_has_no_key() -> None:
    keyring = SecretsKeyring({"bank": bytes(32)})
    assert keyring.keys(Namespace("bank"), "v")
    assert not keyring.keys(Namespace("other"), "v")


def test_a_tenant_without_a_secret_is_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    keys = SealingKeyFile(saved(tmp_path, json.dumps({"bank": SECRET})))
    for _ in range(3):
        assert keys.keys(Namespace("bank"), "v")
        assert not keys.keys(Namespace("other"), "v")
    file = tmp_path / "keys.json"
    assert caplog.messages == [f"{file} has no secret for tenant other: its chunks are not kept"]


def test_the_log_names_so_many_tenants_without_a_secret(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client may name any number of them."""
    monkeypatch.setattr(keyring_module, "_MAX_TOLD", 2)
    keys = SealingKeyFile(saved(tmp_path, json.dumps({"bank": SECRET})))
    for number in range(4):
        assert not keys.keys(Namespace(f"t{number}"), "v")
    assert len(caplog.records) == 2


def test_a_key_file_has_another_key_for_each_volume(tmp_path: Path) -> None:
    keys = SealingKeyFile(saved(tmp_path, json.dumps({"*": SECRET})))
    assert keys.keys(Namespace("a"), "v-1") != keys.keys(Namespace("a"), "v-2")


def test_there_may_be_so_many_tenants_and_secrets_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keyring_module, "MAX_TENANTS", 2)
    secrets = [bytes([number]) * 32 for number in range(MAX_SECRETS)]
    keyring = SecretsKeyring({"a": secrets, "b": secrets})
    assert len(keyring.keys(Namespace("a"), "v")) == MAX_SECRETS
    with pytest.raises(ValueError, match="3 tenants; at most 2"):
        SecretsKeyring(dict.fromkeys("abc", secrets))


def test_derived_keys_are_kept_up_to_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keyring_module, "_MAX_DERIVED", 2)
    keyring = SecretsKeyring({"*": bytes(32)})
    a, b, c = (Namespace(tenant) for tenant in "abc")
    first = keyring.keys(a, "v")
    keyring.keys(b, "v")
    assert keyring.keys(a, "v") is first
    keyring.keys(b, "v")
    keyring.keys(c, "v")
    assert keyring.keys(a, "v") is not first
    assert keyring.keys(a, "v") == first


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "not JSON"),
        ("[]", "not an object"),
        ("{}", "no tenant"),
        (f'{{"a": "{SECRET}", "b": "{SECRET}", "a": "{SECRET}"}}', "a tenant is there twice"),
        ('{"a": 5}', "hexadecimal"),
        ('{"a": "xyz"}', "hexadecimal"),
        (json.dumps({"a": [SECRET, 5]}), "hexadecimal"),
        (json.dumps({"a": [SECRET, [SECRET]]}), "hexadecimal"),
        (json.dumps({"a": []}), "0 secrets"),
        (json.dumps({"a": [f"{i:02x}" * 32 for i in range(MAX_SECRETS + 1)]}), "9 secrets; at least 1 and at most 8"),
        (json.dumps({"a": [SECRET, SECRET]}), "twice"),
        (json.dumps({f"t{i}": SECRET for i in range(MAX_TENANTS + 1)}), "65537 tenants"),
        ("[" * 100_000, "not"),
        ('{"a": "abcd"}', "2 bytes"),
        (json.dumps({"A!": SECRET}), "tenant"),
    ],
)
def test_a_bad_file_is_a_configuration_error_that_shows_no_secret(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as error:
        load_keyring(saved(tmp_path, text))
    assert SECRET not in error.value.message
    assert "keys.json" in error.value.message


@pytest.mark.parametrize("given", ["acme", "00", [], [SECRET, SECRET], "cd" * 32, ["cd" * 32] * 2])
@pytest.mark.parametrize("tenant", [SECRET, SECRET.upper(), SECRET[:-2], SECRET + "xyz"])
def test_a_secret_in_the_place_of_a_tenant_is_not_shown(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, tenant: str, given: object
) -> None:
    keys = SealingKeyFile(saved(tmp_path, json.dumps({"*": SECRET})))
    saved(tmp_path, json.dumps({"*": SECRET, tenant: given}))
    keys.refresh()
    if (tenant, given) == (SECRET[:-2], "cd" * 32):  # a valid name of a tenant
        return
    assert "entry 2" in caplog.text
    assert SECRET[:16] not in caplog.text.lower()


def test_a_file_that_others_may_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="chmod 600"):
        load_keyring(saved(tmp_path, json.dumps({"*": SECRET}), mode=0o640))


def test_a_pipe_in_the_place_of_a_file_stops_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = saved(tmp_path, json.dumps({"*": SECRET}))
    keys = SealingKeyFile(file)
    file.unlink()
    os.mkfifo(file, 0o600)
    refreshing = threading.Thread(target=keys.refresh)
    refreshing.start()
    refreshing.join(10)
    is_waiting = refreshing.is_alive()
    if is_waiting:
        os.close(os.open(file, os.O_WRONLY))
        refreshing.join(10)
    assert not is_waiting
    assert "keys.json: not a regular file" in caplog.text
    assert keys.keys(Namespace("a"), "v")
    with pytest.raises(ConfigError, match="directory"):
        load_keyring(tmp_path)


def test_an_absent_file_is_a_configuration_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        load_keyring(tmp_path / "absent.json")


def test_a_keyring_shows_no_secret() -> None:
    assert "bank" in repr(SecretsKeyring({"bank": bytes(32)}))
    assert "00" not in repr(SecretsKeyring({"bank": bytes(32)}))


def test_a_file_of_root_may_be_read_through_a_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # As Kubernetes mounts secrets: the file is not the reader's own.
    another = os.geteuid() + 1
    monkeypatch.setattr(os, "geteuid", lambda: another)
    assert load_keyring(saved(tmp_path, json.dumps({"*": "ab" * 32}), 0o440))
    for mode in (0o460, 0o444):
        with pytest.raises(ConfigError, match="chmod 600"):
            load_keyring(saved(tmp_path, json.dumps({"*": "ab" * 32}), mode))


def test_old_secrets_open_and_the_first_one_seals(tmp_path: Path) -> None:
    old = SecretsKeyring({"a": b"o" * 32})
    both = load_keyring(saved(tmp_path, json.dumps({"a": [(b"n" * 32).hex(), (b"o" * 32).hex()]})))
    new, known = both.keys(Namespace("a"), "v")
    assert (known,) == old.keys(Namespace("a"), "v")
    assert new != known


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
def test_a_file_may_have_a_mark_of_its_byte_order(tmp_path: Path, encoding: str) -> None:
    file = tmp_path / "keys.json"
    file.write_bytes(json.dumps({"a": SECRET}).encode(encoding))
    file.chmod(0o600)
    assert load_keyring(file).keys(Namespace("a"), "v")


def test_a_file_that_is_too_large_is_not_read_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = saved(tmp_path, json.dumps({"a": SECRET}))
    monkeypatch.setattr(keyring_module, "_MAX_FILE_BYTES", file.stat().st_size)
    load_keyring(file)
    monkeypatch.setattr(keyring_module, "_MAX_FILE_BYTES", file.stat().st_size - 1)
    with pytest.raises(ConfigError, match="not JSON"):
        load_keyring(file)


def test_a_file_that_changed_is_read_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    file = saved(tmp_path, json.dumps({"a": SECRET}))
    keys = SealingKeyFile(file)
    before = keys.keys(Namespace("a"), "v")
    keys.refresh()
    assert keys.keys(Namespace("a"), "v") == before
    assert not caplog.messages
    saved(tmp_path, json.dumps({"a": ["cd" * 32, SECRET]}))
    for _ in range(2):
        keys.refresh()
    assert caplog.messages == [f"sealing keys are read again: {file}"]
    after = keys.keys(Namespace("a"), "v")
    assert after[1:] == before
    # One that cannot be used changes nothing, and is named once.
    for broken in ("{", None):
        caplog.clear()
        saved(tmp_path, broken) if broken is not None else file.unlink()
        for _ in range(3):
            keys.refresh()
        assert keys.keys(Namespace("a"), "v") == after
        assert caplog.text.count("sealing keys are as they were") == 1
        assert SECRET not in caplog.text


def test_a_file_that_was_repaired_by_its_mode_alone_is_read_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = saved(tmp_path, json.dumps({"a": SECRET}))
    keys = SealingKeyFile(file)
    saved(tmp_path, json.dumps({"a": ["cd" * 32, SECRET]}), mode=0o644)
    for _ in range(3):
        keys.refresh()
    assert len(keys.keys(Namespace("a"), "v")) == 1
    assert caplog.text.count("chmod 600") == 1
    file.chmod(0o600)
    keys.refresh()
    assert len(keys.keys(Namespace("a"), "v")) == 2
