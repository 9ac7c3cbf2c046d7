"""Names of tensors: ESPnet's on the one side, those of a converted directory on the other. Tables, and one lookup.

Sources: ESPnet's ``ARDelayLM`` with ``HFTransformerDecoder`` (OpusLM), ``ParallelLLM`` (Bagpiper).
"""

from collections.abc import Iterable
from dataclasses import dataclass

from ..errors import CheckpointError

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
STREAM_EMBEDDING = "stream_emb.weight"

LOSS_WEIGHTS = "vocab_weight"  # Bagpiper: of each id in the loss

# Parts of a converted directory.
MODEL = "model"
CODEC = "codec"
CONTINUOUS_AUDIO = "continuous_audio"

_CODEC_PREFIX = "multimodal_io_dict.discrete_audio.codec_model."
_ENCODER_PREFIX = "multimodal_io_dict.continuous_audio.model.audio_tower."

# Wrappers that leave their names in a state dict: torch.compile and activation checkpointing.
_WRAPPER_PARTS = ("_orig_mod.", "_checkpoint_wrapped_module.")


@dataclass(frozen=True)
class Rule:
    """``old`` is a whole name, or a prefix if it ends in a dot; it becomes ``new`` in ``part``.

    in_body: the tensor is a parameter that ESPnet creates in the dtype that the training yaml states, and copies into.
    """

    old: str
    new: str
    part: str = MODEL
    in_body: bool = False

    def matches(self, name: str) -> bool:
        return name.startswith(self.old) if self.old.endswith(".") else name == self.old


@dataclass(frozen=True)
class Drop:
    """Names that end in ``suffix`` or begin with ``prefix`` are left out, for ``reason``."""

    reason: str
    prefix: str = ""
    suffix: str = ""

    def matches(self, name: str) -> bool:
        return name.startswith(self.prefix) and ("." + name).endswith(self.suffix)


@dataclass(frozen=True)
class Mapped:
    """One tensor on its way: ``source`` in the checkpoint, ``name`` in ``part`` of the converted directory."""

    source: str
    name: str
    part: str
    in_body: bool


_RULES = {
    "opuslm": (
        Rule("corelm.decoders.model.", "model.", in_body=True),
        Rule("corelm.emb.weight", EMBEDDING),
        Rule("corelm.lm_head.weight", HEAD),
        Rule("corelm.head_emb.weight", STREAM_EMBEDDING),
    ),
    "bagpiper": (
        Rule(EMBEDDING, EMBEDDING),
        Rule("model.", "model.", in_body=True),
        Rule(HEAD, HEAD),
        Rule(STREAM_EMBEDDING, STREAM_EMBEDDING),
        Rule(_CODEC_PREFIX, "", part=CODEC),
        Rule(_ENCODER_PREFIX, "audio_tower.", part=CONTINUOUS_AUDIO, in_body=True),
        Rule("adaptor.continuous_audio.", "adaptor.", part=CONTINUOUS_AUDIO),
    ),
}

_ROTARY = Drop("rotary frequencies, computed from config.json", suffix=".rotary_emb.inv_freq")
_DROPS = {
    "opuslm": (
        Drop("part of the loss; its lm_head is a second copy of corelm.lm_head", prefix="criterion."),
        Drop("reference model of preference training", prefix="reflm."),
        _ROTARY,
    ),
    "bagpiper": (
        Drop("buffer of the loss", suffix="." + LOSS_WEIGHTS),
        Drop("the codec's discriminator, used in its training only", prefix=_CODEC_PREFIX + "codec.discriminator."),
        _ROTARY,
    ),
}

# Names that every checkpoint of the family has and none of the other.
_MARKERS = {"opuslm": "corelm.emb.weight", "bagpiper": STREAM_EMBEDDING}


def map_names(family: str, names: Iterable[str], where: str) -> tuple[list[Mapped], dict[str, str], list[str]]:
    """Sort the tensors of a checkpoint of ``family``.

    Returns (mapped, dropped with the reason, unknown), in the order of ``names``.
    Raises CheckpointError if the names are the other family's, or if two of them claim one place.
    """
    names = list(names)
    plain = {name: _without_wrappers(name) for name in names}
    present = set(plain.values())
    if _MARKERS[family] not in present:
        for other, marker in _MARKERS.items():
            if marker in present:
                raise CheckpointError(
                    f"{where} holds a model of the {other} family (it has {marker}), but the training yaml describes one "
                    f"of the {family} family; name the yaml that belongs to it with --train-config"
                )
    mapped: dict[tuple[str, str], Mapped] = {}
    dropped: dict[str, str] = {}
    unknown: list[str] = []
    for name, short in plain.items():
        reason = next((drop.reason for drop in _DROPS[family] if drop.matches(short)), None)
        rule = next((rule for rule in _RULES[family] if rule.matches(short)), None)
        if reason is not None:
            dropped[name] = reason
        elif rule is None:
            unknown.append(name)
        else:
            entry = Mapped(name, rule.new + short.removeprefix(rule.old), rule.part, rule.in_body)
            earlier = mapped.setdefault((entry.part, entry.name), entry)
            if earlier is not entry:
                raise CheckpointError(f"{where}: {earlier.source} and {name} are both {entry.name}")
    return list(mapped.values()), dropped, unknown


def source_name(family: str, part: str, name: str) -> str:
    """What ESPnet calls the tensor ``name`` of ``part``."""
    rules = [rule for rule in _RULES[family] if rule.part == part]
    for rule in rules:
        if rule.new == name and not rule.old.endswith("."):
            return rule.old
    for rule in rules:
        if rule.old.endswith(".") and name.startswith(rule.new):
            return rule.old + name.removeprefix(rule.new)
    return name


def _without_wrappers(name: str) -> str:
    for part in _WRAPPER_PARTS:
        name = name.replace(part, "")
    return name
