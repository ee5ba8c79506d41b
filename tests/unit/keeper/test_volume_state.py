"""A volume's state on its way to a gateway."""

from __future__ import annotations

from kvferry.keeper.volume_state import VolumeState

STATE = VolumeState(
    volume_id="v-1",
    read_bytes_per_s=2.5e9,
    queue_bytes=1 << 20,
    chunk_bytes=8192,
    blocks_per_chunk=4,
    breaker_open=True,
    capacity_bytes=1 << 40,
    used_bytes=1 << 39,
    num_chunks=77,
    shared=True,
    write_breaker_open=True,
    full=True,
    trips=3,
    pool="finance",
)


def test_every_field_survives_the_wire() -> None:
    message = STATE.to_wire()
    assert {field.name for field, _ in message.ListFields()} == set(message.DESCRIPTOR.fields_by_name)
    assert VolumeState.from_wire(type(message).FromString(message.SerializeToString())) == STATE


def test_an_empty_message_is_an_empty_volume() -> None:
    state = VolumeState.from_wire(type(STATE.to_wire())())
    assert state == VolumeState()
    assert state.blocks_per_chunk == 1
    assert state.is_readable
    assert state.is_writable


def test_a_full_drive_and_an_open_breaker_stop_writes() -> None:
    assert not VolumeState(full=True).is_writable
    assert not VolumeState(write_breaker_open=True).is_writable
    assert not VolumeState(breaker_open=True).is_readable
    assert VolumeState(breaker_open=True).is_writable
