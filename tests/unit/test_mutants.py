"""Which changes of a text `make mutants` takes for texts that people read."""

from __future__ import annotations

import pytest

from tools import mutants
from tools.mutants import Survivor

FUNCTION = """
def xǁGateǁopen__mutmut_orig(self, key):
    {original}
    return key


def xǁGateǁopen__mutmut_1(self, key):
    {mutant}
    return key
"""


def survivor(original: str, mutant: str, name: str = "open") -> Survivor:
    source = FUNCTION.format(original=original, mutant=mutant).replace("open", name)
    (found,) = mutants._survivors(source, {f"kvferry.gate.xǁGateǁ{name}__mutmut_1": "survived"})
    return found


@pytest.mark.parametrize(
    ("original", "mutant"),
    [
        ('raise NotReady("later")', 'raise NotReady("XXlaterXX")'),
        ('raise _Own(f"a {key}" " is refused")', 'raise _Own(f"a {key}" " IS REFUSED")'),
        ('self.end(Unauthenticated("deleted"))', 'self.end(Unauthenticated("DELETED"))'),
        (
            'log.error("of %s: %s", key, "none" if key else "one")',
            'log.error("OF %s: %s", key, "NONE" if key else "one")',
        ),
        ("raise ValueError(f\"one of {', '.join(key)}\")", "raise ValueError(f\"one of {'XX, XX'.join(key)}\")"),
    ],
)
def test_texts_of_errors_and_logs_are_for_people(original: str, mutant: str) -> None:
    assert survivor(original, mutant).is_of_texts


def test_texts_of_a_repr_are_for_people() -> None:
    assert survivor('key = "open" if key else ""', 'key = "OPEN" if key else ""', "__repr__").is_of_texts
    assert not survivor("key = 1 + 2", "key = 1 - 2", "__repr__").is_of_texts


@pytest.mark.parametrize(
    ("original", "mutant"),
    [
        ('key = self.headers.get("kid")', 'key = self.headers.get("KID")'),
        ('self.state = "open"', 'self.state = "XXopenXX"'),
        ("raise NotReady(f\"{self.names['key']} is missing\")", "raise NotReady(f\"{self.names['KEY']} is missing\")"),
        ('raise NotReady(self.text_of("key"))', 'raise NotReady(self.text_of("KEY"))'),
        ('raise NotReady("later")', "raise NotReady(None)"),
        ('log.error("later", key)', 'log.error("later", )'),
        ('log.error("later", key)', "log.error(key)"),
        ('raise NotReady(f"{key[:64]} is missing")', 'raise NotReady(f"{key[:65]} is missing")'),
    ],
)
def test_other_changes_are_not(original: str, mutant: str) -> None:
    assert not survivor(original, mutant).is_of_texts


def test_a_survivor_names_its_function_and_the_line_as_it_is_then() -> None:
    found = survivor("key = key or self.key", "key = key and self.key")
    assert (found.function, found.line) == ("Gate.open", "key = key and self.key")
    assert found.difference == "# survived\n- key = key or self.key\n+ key = key and self.key"
    assert survivor("key = self.cut(key,\n    5)", "key = self.cut(key,\n    )").line == ")"
    assert survivor("self.cut(\n    key,\n    5,\n    )", "self.cut(\n    key,\n    )").line == "without: 5,"
