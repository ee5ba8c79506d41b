"""YAML from outside: bounded, and never quoted."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from kvferry.util import plain_yaml
from support.waiting import PATIENCE_S


def test_plain_values_are_loaded() -> None:
    content = b"- {name: acme, share: 2.5, at: 2027-02-03T00:00:00Z, keys: [a, 'b', \"<<\"]}\n- null\n"
    first, second = plain_yaml.load(content)
    assert (first["name"], first["share"], first["keys"], second) == ("acme", 2.5, ["a", "b", "<<"], None)
    assert plain_yaml.load(b"") is None


def test_dates_are_text_before_and_after_a_library_changes_pyyaml(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "a: [2027-02-03, 2027-02-30, 2027-02-03T00:00:00Z]"
    dates = {"a": ["2027-02-03", "2027-02-30", "2027-02-03T00:00:00Z"]}
    assert plain_yaml.load(text.encode()) == yaml.load(text, Loader=plain_yaml.SafeLoader) == dates
    # As lm-format-enforcer does when vLLM imports it.
    changed = {**yaml.SafeLoader.yaml_constructors, plain_yaml._TIMESTAMP_TAG: yaml.SafeLoader.construct_yaml_null}
    for loader in (yaml.SafeLoader, yaml.CSafeLoader):
        monkeypatch.setattr(loader, "yaml_constructors", changed)
    assert plain_yaml.load(text.encode()) == yaml.load(text, Loader=plain_yaml.SafeLoader) == dates


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-3", 0.001), ("1e3", 1000.0), ("1e+06", 1e6), ("-1E5", -1e5), ("+.5e1", 5.0), ("1.0e-3", 0.001),
        ("1.5e3", 1500.0), ("5.e1", 50.0), ("12e03", 12000.0), ("0e0", 0.0),
        # As before.
        ("1_000", 1000), ("1e", "1e"), ("e3", "e3"), ("1e-", "1e-"), ("1e3x", "1e3x"), ("x1e3", "x1e3"),
        ("'1e3'", "1e3"), ("1e3.5", "1e3.5"), ("0x1e3", 0x1E3), (".e3", ".e3"), ("\u0661e3", "\u0661e3"),
    ],
)  # fmt: skip
def test_floats_with_exponents_are_those_of_yaml_1_2(text: str, value: object) -> None:
    for loaded in (plain_yaml.load(text.encode()), yaml.load(text, Loader=plain_yaml.SafeLoader)):
        assert loaded == value
        assert type(loaded) is type(value)


@pytest.mark.parametrize("text", ["1e3", "12e4", "-1E-5", ".5e1", "1e", "2027-02-03", "yes", "1_0", "a: b"])
def test_texts_that_look_like_numbers_are_written_as_texts(text: str) -> None:
    values = {"revision": text, "list": [text, 1e-05, 1000.0, 3, None, True]}
    assert plain_yaml.load(plain_yaml.dump(values).encode()) == values


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"{", "not YAML"),
        (b"\xff", "not YAML"),
        (b"secret: 0b_", "not YAML"),
        (b"secret: !!int ''", "not YAML"),
        (b"[a]: {[b]: c}", "not YAML"),
        (b"a: &x {b: c}\nd: *x", "an alias"),
        (b"a: {b: c}\nd: {<<: {e: f}}", "a merge"),
        (b"a: {b: c}\nd: {!!merge m: {e: f}}", "a merge"),
        (b"a: " + b"1" * 5000, "5000 characters; 4096"),
        (b"[" * 17 + b"]" * 17, "deeper than 16"),
        (b"? " * 40, "deeper than 16"),
        (b"secret: 1\na: [{b: 1}, {b: 2}]\nsecret: 2", "twice"),
        (b"a:\n- secret: 1\n  b: {c: 1}\n  secret: 2", "twice"),
        (b'a: {secret: 1, "secret": 2}', "twice"),
    ],
)
def test_other_content_is_refused_and_not_quoted(content: bytes, said: str) -> None:
    with pytest.raises(ValueError, match=said) as refused:
        plain_yaml.load(content)
    assert "secret" not in str(refused.value)


def test_equal_keys_of_different_mappings_are_no_double() -> None:
    content = b"a: {b: 1}\nc: [{b: 1}, {b: [a, a]}, b, b]\nb: b\n? {b: 1}\n: a\n"
    assert plain_yaml.doubled_key(content) is None


def test_the_depth_has_its_limit() -> None:
    assert plain_yaml.load(b"[" * 16 + b"]" * 16)


@pytest.mark.parametrize("content", ["'[' * 500_000", "'{a: ' * 200_000", "'- ' * 500_000", "'? ' * 200_000"])
def test_no_depth_ends_the_process(content: str) -> None:
    load = f"plain_yaml.load(({content}).encode())"
    code = f"from kvferry.util import plain_yaml\ntry: {load}\nexcept ValueError as e: print(e)"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE_S, check=True
    )
    assert result.stdout == "nested deeper than 16\n"


def test_a_large_file_is_refused_before_it_is_read(tmp_path: Path) -> None:
    file = tmp_path / "large.yaml"
    with file.open("wb") as written:
        written.truncate(1 << 40)
    with pytest.raises(ValueError, match="over 1000 bytes"):
        plain_yaml.read_bounded(file, 1000)
    file.write_bytes(b"a" * 1000)
    assert len(plain_yaml.read_bounded(file, 1000)) == 1000
