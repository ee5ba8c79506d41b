"""The simulator: an Engine whose tokens come from a hash."""

from kvferry.engine.sim.engine import SimEngine
from kvferry.engine.sim.kv_transfer import PullFault
from kvferry.engine.sim.renderer import SimRenderer
from kvferry.engine.sim.step_loop import Faults
from kvferry.engine.sim.tokenizer import SimTokenizer

__all__ = ["Faults", "PullFault", "SimEngine", "SimRenderer", "SimTokenizer"]
