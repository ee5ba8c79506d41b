"""The simulator: an Engine whose tokens come from a hash."""

from kvferry_sim.engine import SimEngine
from kvferry_sim.kv_transfer import PullFault
from kvferry_sim.renderer import SimRenderer
from kvferry_sim.step_loop import Faults
from kvferry_sim.tokenizer import SimTokenizer

__version__ = "0.1.0"

__all__ = ["Faults", "PullFault", "SimEngine", "SimRenderer", "SimTokenizer"]
