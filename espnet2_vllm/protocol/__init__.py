"""The rules of each family as pure Python step functions.

They are the oracle: the tensor versions in ``engine`` are tested against them, the ``pytorch`` backend runs on them, and a
request that comes back after preemption is put where it was by replaying them.
"""

from .bagpiper import BagpiperRules, BagpiperState, ModalityRules
from .opuslm import OpusLMRules, OpusLMState
from .rules import AUDIO, BRIDGE, DONE, EVERY, MODALITY, PHASES, TEXT, Advance, Constraint, Rules, Sampling, replay

__all__ = [
    "AUDIO",
    "BRIDGE",
    "DONE",
    "EVERY",
    "MODALITY",
    "PHASES",
    "TEXT",
    "Advance",
    "BagpiperRules",
    "BagpiperState",
    "Constraint",
    "ModalityRules",
    "OpusLMRules",
    "OpusLMState",
    "Rules",
    "Sampling",
    "replay",
]
