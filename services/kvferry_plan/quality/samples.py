"""Texts to score, and tasks."""

from __future__ import annotations

import hashlib
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from kvferry.errors import ConfigError

SHIPPED = "shipped"
MAX_DATASET_BYTES = 16 << 20
_MIN_PARAGRAPHS = 2
_EMPTY_LINES = re.compile(r"\n[^\S\n]*\n")
_NAMES = ("Ada", "Bela", "Carl", "Dina", "Emil", "Frida", "Gero", "Hanna", "Ivo", "Jana", "Kai", "Lena", "Milo", "Nora")
_PLACES = ("Aarhus", "Bergen", "Cork", "Delft", "Essen", "Faro", "Graz", "Haarlem", "Ilmenau", "Jena", "Kiel", "Lugano")
_THINGS = (
    "lamps",
    "ropes",
    "maps",
    "clocks",
    "barrels",
    "lenses",
    "anchors",
    "bells",
    "sails",
    "books",
    "pumps",
    "nets",
)


@dataclass(frozen=True, slots=True)
class Dataset:
    name: str
    digest: str
    paragraphs: tuple[str, ...]
    is_shipped: bool = False


def load_dataset(file: Path | None) -> Dataset:
    """Read a UTF-8 text; empty lines separate paragraphs. Raises ConfigError for an unusable file."""
    if file is None:
        content = resources.files("kvferry_plan.quality").joinpath("data/prose.txt").read_bytes()
    else:
        try:
            with file.open("rb") as opened:
                content = opened.read(MAX_DATASET_BYTES + 1)
        except OSError as error:
            raise ConfigError(f"--dataset: {file} cannot be read: {error.strerror}") from None
        if len(content) > MAX_DATASET_BYTES:
            raise ConfigError(f"--dataset: {file} has more than {MAX_DATASET_BYTES} bytes")
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"--dataset: {file} is no UTF-8 text: {error.reason} at byte {error.start}") from None
    paragraphs = tuple(" ".join(each.split()) for each in _EMPTY_LINES.split(text) if each.strip())
    if len(paragraphs) < _MIN_PARAGRAPHS:
        raise ConfigError(f"--dataset: {file} has {len(paragraphs)} paragraphs; at least {_MIN_PARAGRAPHS} are needed")
    name = SHIPPED if file is None else file.name
    return Dataset(name, hashlib.blake2b(content, digest_size=16).hexdigest(), paragraphs, is_shipped=file is None)


def sample_text(dataset: Dataset, number: int, num_samples: int) -> Iterator[str]:
    """Yield paragraphs without end, each sample from another beginning."""
    # The shipped text is short: records that differ from sample to sample stand between its paragraphs.
    first = number * len(dataset.paragraphs) // num_samples
    numbers = random.Random(f"sample {number}")
    i = first
    while True:
        yield dataset.paragraphs[i % len(dataset.paragraphs)]
        if dataset.is_shipped:
            yield record_text(numbers)
        i += 1


def record_text(numbers: random.Random) -> str:
    name, place, thing = numbers.choice(_NAMES), numbers.choice(_PLACES), numbers.choice(_THINGS)
    count, price = numbers.randrange(3, 90), numbers.randrange(2, 40)
    return (
        f"Order {numbers.randrange(1000, 9999)}: {name} of {place} bought {count} {thing} at {price} crowns each and "
        f"paid {count * price} crowns. The {thing} left {numbers.choice(_PLACES)} on day {numbers.randrange(1, 366)}."
    )


def task_prompts(num_tasks: int) -> list[str]:
    """Return prompts whose answers stand in them, far from the question."""
    prompts = []
    for number in range(num_tasks):
        numbers = random.Random(f"task {number}")
        records = [record_text(numbers) for _ in range(12)]
        wanted = records[numbers.randrange(len(records))].partition(":")[0]
        prompts.append("\n".join(records) + f"\n\nRepeat the record of {wanted}.\n\n{wanted}:")
    return prompts
