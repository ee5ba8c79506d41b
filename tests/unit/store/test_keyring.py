"""Sealing keys from a file of secrets."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from kvferry.errors import ConfigError
from kvferry.store.keyring import SecretsKeyring, load_keyring
from kvferry.tenancy.namespace import Namespace

SECRET = "ab" * 32


def saved(tmp_path: Path, text: str, mode: int = 0o600) -> Path:
    file = tmp_path / "keys.json"
    file.write_text(text)
    file.chmod(mode)
    return file


def test_no_two_namespaces_share_a_key(tmp_path: Path) -> None:
    keyring = load_keyring(saved(tmp_path, json.dumps({"*": SECRET, "bank": "cd" * 32})))
    namespaces = [Namespace(tenant, epoch) for tenant in ("a", "a-1", "bank") for epoch in (0, 1, 10)]
    keys = {keyring.key(namespace) for namespace in namespaces}
    assert len(keys) == len(namespaces)
    assert None not in keys
    assert keyring.key(namespaces[0]) == keyring.key(Namespace("a", 0))


def test_a_tenant_without_a_secret_has_no_key() -> None:
    keyring = SecretsKeyring({"bank": bytes(32)})
    assert keyring.key(Namespace("bank")) is not None
    assert keyring.key(Namespace("other")) is None


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "not JSON"),
        ("[]", "not an object"),
        ('{"a": 5}', "not an object"),
        ('{"a": "xyz"}', "hexadecimal"),
        ('{"a": "abcd"}', "2 bytes"),
        (json.dumps({"A!": SECRET}), "tenant"),
    ],
)
def test_a_bad_file_is_a_configuration_error_that_shows_no_secret(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as error:
        load_keyring(saved(tmp_path, text))
    assert SECRET not in error.value.message
    assert "keys.json" in error.value.message


def test_a_file_that_others_may_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="chmod 600"):
        load_keyring(saved(tmp_path, json.dumps({"*": SECRET}), mode=0o640))


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
