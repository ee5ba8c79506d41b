"""Distances between log-probabilities, and what they say about a KV transfer. Pure."""

# The decode engine answers a prompt from four kinds of pages: its own; its own again, with the prompt cut elsewhere
# (the noise of this model on this device); transferred ones; and wrong ones, transferred from another prompt (the
# controls). The last tokens are computed in the same steps each time, so on most devices right pages are at distance 0
# exactly. Where they are not, they may be as far away as noise is. Every control has to be far beyond the limit that
# was used: a comparison that cannot fail proves nothing.

from __future__ import annotations

import enum
import math
import random
from collections.abc import Iterable, Mapping, Sequence

import msgspec

NUM_LIKELIEST = 5  # tokens of a position that are compared
EXACT = 1e-3  # at most: right without a look at the noise, as log-probabilities travel with few digits
FINEST = 1e-6  # where a prompt's controls are below `EXACT`: about the last digit of a log-probability
FINE_FACTOR = 10.0  # how much nearer than them a transfer has to be there
NOISE_FACTOR = 2.0  # how far beyond noise a transfer may be, in the mean and at most
CONTROL_FACTOR = 2.0  # how far beyond the limit each control has to be

MIN_PROMPT = 8  # tokens
FARTHEST = 1e6  # distance at most, as that from what is no number: JSON has no inf

LONGEST_ON_CPU, LONGEST_ON_GPU = 161, 4200  # tokens; on a GPU, where they cost little, over ends of chunks and windows
TEXT = (
    "Every morning the pilot reads the tide tables, counts the crates on the quay and writes both numbers down.",
    "1, 2, 3, 5, 8, 13: each number is the sum of the two before it, and 21 follows.",
    "def area(width, height):\n    return width * height\n",
    "Die Stadt liegt am Fluss; ses rues descendent vers le port, y la plaza queda vacia al mediodia.",
    "Water boils at 100 degrees Celsius at sea level, but near the summit of a high mountain it boils at about 70.",
    'What did she answer? "Not today," she said, "but ask me again when the ice has gone."',
)

Logprobs = Mapping[int, float]  # natural logarithms by token id, of one position


class View(enum.StrEnum):
    """direct: the token after a transfer, from a partial page too. held: the same one again, from whole held pages."""

    DIRECT = "direct"
    HELD = "held"


class Outcome(enum.StrEnum):
    PROVEN = "proven"
    REFUTED = "refuted"
    UNDECIDED = "undecided"


class Distances(msgspec.Struct, frozen=True):
    """How far answers to one prompt are from the answer of the decode engine's own pages."""

    prompt: int  # its number
    num_tokens: int
    view: View
    transferred: float
    noise: float
    controls: tuple[float, ...]


class Verdict(msgspec.Struct, frozen=True):
    outcome: Outcome
    reason: str = ""
    limits: Mapping[str, float] = {}  # by view


def distance(own: Sequence[Logprobs], other: Sequence[Logprobs]) -> float:
    """Return the mean difference at the likeliest tokens of `own`, in natural logarithms, FARTHEST at most.

    A token that `other` does not name counts as its least likely one.
    """
    differences = []
    for here, there in zip(own, other, strict=True):
        least = min(there.values(), default=-math.inf)
        likeliest = sorted(here, key=here.__getitem__, reverse=True)[:NUM_LIKELIEST]
        differences += [abs(here[token] - there.get(token, least)) for token in likeliest]
    mean = sum(differences) / len(differences) if differences else math.inf
    return FARTHEST if math.isnan(mean) else min(mean, FARTHEST)


def judge(measured: Sequence[Distances]) -> Verdict:
    """Return PROVEN only if the pages of every prompt are right in every view of it."""
    if not measured:
        return Verdict(Outcome.UNDECIDED, "nothing was measured")
    limits = {view.value: _limit([each for each in measured if each.view is view]) for view in View}
    undecided = ""
    for each in measured:
        limit = limits[each.view]
        if _is_exact(each, max(other.noise for other in measured if other.view is each.view)):
            continue
        if not _are_controls_beyond(limit, each):
            undecided = undecided or f"this comparison would not notice wrong pages {_at(each, limit)}"
        elif each.transferred > limit:
            reason = f"transferred pages differ from the engine's own {_at(each, limit)}"
            return Verdict(Outcome.REFUTED, reason, limits)
    return Verdict(Outcome.UNDECIDED if undecided else Outcome.PROVEN, undecided, limits)


def _is_exact(each: Distances, noise: float) -> bool:
    if _are_controls_beyond(EXACT, each):
        return each.transferred <= EXACT
    # One token matters little to this model, as to those with random weights.
    is_seen = _are_controls_beyond(max(FINEST, noise), each)
    return is_seen and each.transferred <= min(each.controls) / FINE_FACTOR


def _limit(measured: Sequence[Distances]) -> float:
    noise = [each.noise for each in measured]
    limit = max(EXACT, NOISE_FACTOR * max(noise, default=0.0))
    # Less than every prompt's noise, and in all of them, is no noise.
    is_beyond = _mean(each.transferred for each in measured) > max(EXACT, NOISE_FACTOR * _mean(noise))
    return EXACT if is_beyond else limit


def _are_controls_beyond(limit: float, each: Distances) -> bool:
    return bool(each.controls) and min(each.controls) > CONTROL_FACTOR * limit


def _at(each: Distances, limit: float) -> str:
    return (
        f"at {each.num_tokens} tokens ({each.view}): wrong ones by {min(each.controls, default=math.nan):.4g} or more, "
        f"transferred ones by {each.transferred:.4g}, the engine's own by {each.noise:.4g} where the prompt is cut "
        f"elsewhere (limit {limit:.4g})"
    )


def _mean(values: Iterable[float]) -> float:
    found = list(values)
    return sum(found) / len(found) if found else 0.0


def longest_prompt(max_model_len: int, block_size: int, *, on_gpu: bool) -> int:
    # As `lengths` wants for any size of pages. A token is answered.
    return min(max(5 * block_size + 1, LONGEST_ON_GPU if on_gpu else LONGEST_ON_CPU), max_model_len - 1)


def lengths(block_size: int, longest: int) -> list[int]:
    """Return lengths of prompts: under a page, some pages and a few tokens, some and one, and near `longest`."""

    # Few, as the token that differs in a control is before them, and models may hardly look back.
    def pages_and(rest: int, most: int) -> int:
        return min(most, (longest - rest) // block_size) * block_size + rest

    if longest <= block_size:
        return [longest]
    wanted = (block_size - 2, pages_and(min(16, block_size // 2), 3), pages_and(1, 5), pages_and(1, longest))
    return sorted({min(longest, max(MIN_PROMPT, each)) for each in wanted})


def prompts(tokens: Sequence[int], block_size: int, longest: int, seed: int) -> list[list[int]]:
    """Return pieces of a text of `tokens`, and prompts of them in any order, in turn."""
    draw = random.Random(seed)
    made = []
    for number, length in enumerate(lengths(block_size, longest)):
        if number % 2:
            made.append([draw.choice(tokens) for _ in range(length)])
        else:
            begin = draw.randrange(len(tokens))
            made.append([tokens[(begin + place) % len(tokens)] for place in range(length)])
    return made


def wrong_prompts(prompt: Sequence[int], block_size: int, tokens: Sequence[int], seed: int) -> list[list[int]]:
    """Return prompts whose pages are wrong for `prompt`: one token differs, or all of the last page."""
    draw = random.Random(seed)
    whole = (len(prompt) - 1) // block_size * block_size
    end = whole or len(prompt) - 1  # of what is transferred: the engine computes the last token itself
    found = []
    for places in ([end - 2], range(max(0, end - block_size), end)):
        wrong = list(prompt)
        for place in places:
            wrong[place] = draw.choice([each for each in tokens if each != prompt[place]])
        found.append(wrong)
    return found
