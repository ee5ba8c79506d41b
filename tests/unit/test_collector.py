"""kvferry/collector.py, in a process of its own: this one's settings stay."""

from __future__ import annotations

import json
import subprocess
import sys

from kvferry.util.collector import THRESHOLDS
from support.waiting import PATIENCE_S

PROGRAM = """
import gc, json, weakref
from kvferry.util import collector

class Node:
    pass

def cycle():
    node = Node()
    node.itself = node
    return weakref.ref(node)

before = cycle()
collector.collect_rarely()
collector.freeze_loaded()
num_frozen, after = gc.get_freeze_count(), cycle()
gc.collect()
print(json.dumps([gc.get_threshold(), num_frozen, before() is None, after() is None, len(gc.get_objects())]))
"""


def test_what_is_loaded_is_left_out_of_collections_and_later_garbage_is_not() -> None:
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True, timeout=PATIENCE_S
    )
    thresholds, num_frozen, was_collected, is_collected, num_seen = json.loads(ran.stdout)
    assert thresholds == list(THRESHOLDS)
    assert num_frozen > 5_000 > num_seen
    assert was_collected
    assert is_collected
