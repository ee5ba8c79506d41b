"""Chunks of writers that are gone where the index has another file with the same chunk."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvferry_keeper.store import adoption, paths
from kvferry_keeper.store.adoption import ADOPT_AFTER_S, REMOVE_AFTER_S
from kvferry_keeper.store.keyring import SecretsKeyring
from kvferry_keeper.store.volume import Outcome, Volume
from support.tier_chunks import CHUNK_BYTES, LAYOUT, chunk, empty, flip, payload, truth
from support.tier_volumes import Opened, opened_volumes

DIGEST = LAYOUT.digest
MINE, OTHER = SecretsKeyring({"*": b"m" * 32}), SecretsKeyring({"*": b"o" * 32})
NEITHER = SecretsKeyring({"*": b"n" * 32})


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def opened(tmp_path: Path, clock: Clock) -> Iterator[Opened]:
    with opened_volumes(tmp_path) as open_volume:
        yield lambda writer, **values: open_volume(writer=writer, **{"shared": True, "monotonic": clock, **values})


def put(target: Volume, *numbers: int) -> None:
    """Write chunks that other writers have too."""
    for number in numbers:
        target._index.begin_remove(DIGEST, chunk(number), only_ours=True)
        assert target.write(DIGEST, chunk(number), payload(chunk(number))) is Outcome.OK


def get(source: Volume, number: int) -> Outcome:
    into = empty()
    outcome = source.read(DIGEST, chunk(number), into)
    assert outcome is not Outcome.OK or bytes(into) == truth(chunk(number))
    return outcome


def path_of(volume: Volume, number: int, writer: str) -> Path:
    return volume.path / paths.chunk_path(writer, DIGEST, chunk(number))


def foreign_and_living(opened: Opened, keyring: SecretsKeyring) -> tuple[Volume, Volume]:
    """Return a writer with another key, and one that indexed its copy of chunk 1 instead of that of `dead`."""
    foreign = opened("foreign", keyring=OTHER)
    put(foreign, 1)
    file = path_of(foreign, 1, "dead")
    file.rename(aside := foreign.path / "aside")
    living = opened("living", keyring=keyring)
    aside.rename(file)
    assert [entry.writer for entry in living._index.entries()] == ["foreign"]
    return foreign, living


def rescan_after(clock: Clock, living: Volume, *pauses_s: float, beside: Volume | None = None) -> None:
    living.rescan()
    for pause_s in pauses_s:
        clock.now_s += pause_s
        if beside is not None:
            beside.say_alive()
        living.rescan()


def test_a_readable_chunk_replaces_a_hidden_one(opened: Opened, clock: Clock) -> None:
    dead = opened("dead", keyring=MINE)
    put(dead, 1)
    dead.close()
    before = opened("living", keyring=OTHER)
    put(before, 1)
    before.close()
    living = opened("living", keyring=MINE, chunks=1)  # full
    assert get(living, 1) is Outcome.UNDECRYPTABLE
    rescan_after(clock, living, ADOPT_AFTER_S, ADOPT_AFTER_S)
    assert get(living, 1) is Outcome.OK
    assert (living.stats.bytes_used, path_of(living, 1, "dead").exists()) == (CHUNK_BYTES, False)


def test_a_readable_chunk_is_adopted_beside_one_of_another_key(opened: Opened, clock: Clock) -> None:
    dead = opened("dead", keyring=MINE)
    put(dead, 1)
    dead.close()
    foreign, living = foreign_and_living(opened, MINE)
    rescan_after(clock, living, ADOPT_AFTER_S, ADOPT_AFTER_S, beside=foreign)
    assert get(living, 1) is get(foreign, 1) is Outcome.OK


@pytest.mark.parametrize("damaged", ["living", "dead"])
def test_of_two_copies_the_whole_one_stays(opened: Opened, clock: Clock, damaged: str) -> None:
    living, dead = opened("living"), opened("dead")
    put(living, 1)
    put(dead, 1)
    dead.close()
    flip(path_of(living, 1, damaged), 8 * 5000)
    rescan_after(clock, living, ADOPT_AFTER_S, ADOPT_AFTER_S)
    assert get(living, 1) is Outcome.OK
    living.check()


def test_two_unreadable_copies_stay_until_others_had_time_to_take_them(opened: Opened, clock: Clock) -> None:
    dead = opened("dead", keyring=MINE)
    put(dead, 1)
    dead.close()
    foreign, living = foreign_and_living(opened, NEITHER)
    rescan_after(clock, living, ADOPT_AFTER_S, ADOPT_AFTER_S, beside=foreign)
    assert path_of(living, 1, "dead").exists()
    rescan_after(clock, living, REMOVE_AFTER_S - ADOPT_AFTER_S, beside=foreign)
    assert not path_of(living, 1, "dead").exists()
    assert get(foreign, 1) is Outcome.OK


def test_a_call_compares_a_limited_number(opened: Opened, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adoption, "MAX_COMPARED", 2)
    living, dead = opened("living"), opened("dead")
    put(living, *range(5))
    put(dead, *range(5))
    dead.close()
    left = []
    rescan_after(clock, living, ADOPT_AFTER_S)
    clock.now_s += ADOPT_AFTER_S
    for _ in range(3):
        living.rescan()
        left.append(sum(path_of(living, number, "dead").exists() for number in range(5)))
    assert left == [3, 1, 0]
