"""Names of chunks and what their bytes mean."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.keeper.layout import ChunkId, ChunkKey, ChunkLayout
from kvferry.tenancy.namespace import Namespace
from support.tier_chunks import LAYOUT

TENANTS = st.from_regex(r"[a-z0-9][a-z0-9-]{0,62}", fullmatch=True)
EPOCHS = st.integers(0, 2**64 - 1)


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(ChunkLayout) if field.init])
def test_every_field_changes_the_digest(name: str) -> None:
    value: Any = getattr(LAYOUT, name)
    other = value + "x" if isinstance(value, str) else value + 4096
    changed = dataclasses.replace(LAYOUT, **{name: other})
    assert changed.digest != LAYOUT.digest
    assert changed != LAYOUT


def test_a_digest_is_a_function_of_the_fields_alone() -> None:
    # Chunks on drives outlive this code: this value may only change together with the version of the files.
    assert LAYOUT.digest.hex() == "15c7827496775b41afdda723f9d04343"
    assert dataclasses.replace(LAYOUT).digest == LAYOUT.digest


def test_a_layout_comes_back_from_its_json() -> None:
    assert ChunkLayout.from_json(LAYOUT.to_json()) == LAYOUT
    assert ChunkLayout.from_json(LAYOUT.to_json()).digest == LAYOUT.digest


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"model": "m"}',
        LAYOUT.to_json().replace(b'"NHD"', b"5").decode(),
        LAYOUT.to_json().replace(b"8192", b'"8192"').decode(),
        LAYOUT.to_json().replace(b"8192", b"8191").decode(),
        LAYOUT.to_json().replace(b"8192", b"null").decode(),
        LAYOUT.to_json().replace(b"{", b'{"more": 1, ').decode(),
    ],
)
def test_what_is_no_layout_is_a_value_error(text: str) -> None:
    with pytest.raises(ValueError):
        ChunkLayout.from_json(text)


@pytest.mark.parametrize("payload_bytes", [0, -4096, 4095, 6000])
def test_a_payload_that_cannot_be_moved_directly_is_refused(payload_bytes: int) -> None:
    with pytest.raises(ValueError, match="multiple of 4096"):
        dataclasses.replace(LAYOUT, payload_bytes=payload_bytes)


@given(TENANTS, EPOCHS)
def test_a_namespace_comes_back_from_its_name(tenant: str, epoch: int) -> None:
    namespace = Namespace(tenant, epoch)
    assert Namespace.parse(str(namespace)) == namespace


@given(st.tuples(TENANTS, EPOCHS), st.tuples(TENANTS, EPOCHS))
def test_two_namespaces_never_share_a_name(one: tuple[str, int], other: tuple[str, int]) -> None:
    assert (str(Namespace(*one)) == str(Namespace(*other))) == (one == other)


@pytest.mark.parametrize(
    "text", ["", "a", "a.", ".1", "a.-1", "a.01", "a. 1", "A.1", "a.b.1", "a/b.1", "../x.1", "a.1\n"]
)
def test_what_is_no_namespace_is_a_value_error(text: str) -> None:
    with pytest.raises(ValueError):
        Namespace.parse(text)


@pytest.mark.parametrize("tenant", ["", "-a", "a.b", "A", "a" * 64, "ä", "a\n"])
def test_a_tenant_is_a_label(tenant: str) -> None:
    with pytest.raises(ValueError, match="tenant"):
        Namespace(tenant)


@pytest.mark.parametrize("epoch", [-1, 2**64])
def test_an_epoch_fits_its_field(epoch: int) -> None:
    with pytest.raises(ValueError, match="epoch"):
        Namespace("a", epoch)


@pytest.mark.parametrize("length", [0, 35, 37])
def test_a_key_of_another_length_is_refused(length: int) -> None:
    with pytest.raises(ValueError, match="key"):
        ChunkId(ChunkKey(bytes(length)))


@pytest.mark.parametrize("route_key", [-1, 2**64])
def test_a_route_key_fits_its_field(route_key: int) -> None:
    with pytest.raises(ValueError, match="route key"):
        ChunkId(ChunkKey(bytes(36)), route_key)
