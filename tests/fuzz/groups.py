"""Which models share a process. Imports nothing heavy."""

from collections.abc import Sequence

# So many worlds in a row share a deck and an engine; small ones are slow ones, of which there are few.
WORLDS_A_DECK = {"usual": 25, "small": 5}
RECORDED = {"qwen3-s8-cb64": "bagpiper", "tiny-llama": "opuslm", "tiny-olmo2": "opuslm"}
RANDOM = ("bagpiper-s2", "bagpiper-s5", "opuslm-s2", "opuslm-s9")
NAMES = (*RECORDED, *RANDOM)
# vLLM serves these by transformers' classes, which are not the same afterwards: no other model in their process.
APART = ("tiny-olmo2",)
# On CUDA an engine takes long to start and keeps its memory until the process ends.
ON_CUDA = ("qwen3-s8-cb64", "bagpiper-s5", "tiny-llama")
# Triton's interpreter takes time by the stream and by the id.
INTERPRETED = ("bagpiper-s2", "bagpiper-s5", "opuslm-s2")


def model_groups(names: Sequence[str] | None, runner: str, device: str) -> list[list[str]]:
    """Models of one process after the other.

    Raises:
        ValueError: for a name that is unknown.
    """
    for name in names or ():
        if name not in NAMES:
            raise ValueError(f"model {name!r} is unknown; expected some of {', '.join(NAMES)}")
    usual = ON_CUDA if device == "cuda" else INTERPRETED if runner == "v2" else NAMES
    chosen = names or usual
    together = [name for name in chosen if name not in APART]
    apart = [[name] for name in chosen if name in APART]
    # Others have five processes for each of theirs.
    return [together, *apart, *[together] * (4 if apart else 0)] if together else apart
