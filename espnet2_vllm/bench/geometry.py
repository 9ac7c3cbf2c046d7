"""Models to measure: the geometry of the released checkpoints with random weights, or a converted directory."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import CheckpointError, ConfigError
from ..layout import NUM_SPECIALS, OPUSLM_SPECIALS, Layout, Span

if TYPE_CHECKING:
    from ..checkpoint import Checkpoint

_COMMON = {"hidden_act": "silu", "attention_bias": False, "tie_word_embeddings": False, "torch_dtype": "bfloat16"}
_QWEN3_8B = {
    "architectures": ["SpeechLMQwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 4096,
    "head_dim": 128,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 40960,
    "rope_theta": 1000000,
    "rms_norm_eps": 1e-6,
}
_OLMO2_7B = {
    "architectures": ["SpeechLMOlmo2ForCausalLM"],
    "model_type": "olmo2",
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "max_position_embeddings": 16384,
    "rope_theta": 500000,
    "rms_norm_eps": 1e-6,
}
_SMOLLM2 = {
    "architectures": ["SpeechLMLlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 24,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "max_position_embeddings": 16384,
    "rope_theta": 130000,
    "rms_norm_eps": 1e-5,
}
_CODEBOOKS, _CODES, _SSL_UNITS, _PHONEMES = 8, 1024, 5000, 70


@dataclass(frozen=True)
class Geometry:
    """A model by its shapes.

    Attributes:
        name: as the user gave it.
        layout: vocabulary and streams.
        backbone: the content of ``config.json``.
        path: the converted directory with its weights; None for random ones.
    """

    name: str
    layout: Layout
    backbone: Mapping[str, Any]
    path: Path | None = None

    @property
    def max_rows(self) -> int:
        return int(self.backbone["max_position_embeddings"])

    def write(self, directory: Path) -> Checkpoint:
        """Writes what an engine asks for besides weights; the checkpoint of ``directory``."""
        from ..checkpoint import open_checkpoint
        from ..checkpoint.opening import write_description

        directory.mkdir(parents=True, exist_ok=True)
        _write_json(directory / "config.json", self.backbone)
        write_description(directory, self.layout, self.max_rows, {"geometry": self.name})
        return open_checkpoint(directory)

    def write_plain(self, directory: Path) -> Path:
        """Writes the configuration of the bare backbone over the same vocabulary."""
        directory.mkdir(parents=True, exist_ok=True)
        plain = [name.removeprefix("SpeechLM") for name in self.backbone["architectures"]]
        _write_json(directory / "config.json", {**self.backbone, "architectures": plain})
        return directory

    def open(self, scratch: Path) -> Checkpoint:
        """The checkpoint to decode with: the directory's own, or one without weights below ``scratch``."""
        from ..checkpoint import open_checkpoint

        return self.write(scratch / "random") if self.path is None else open_checkpoint(self.path)


def _write_json(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content, indent=1), encoding="utf-8")


def _bagpiper() -> Layout:
    """256 special ids, Qwen3's text ids, and 8 codebooks with a pad each."""
    return Layout.bagpiper(151936, [_CODES + 1] * _CODEBOOKS)


def opuslm_layout(text_ids: int, *, ssl_units: int, codes: int, codebooks: int, phonemes: int = 0) -> Layout:
    """The blocks of an OpusLM vocabulary in their order: specials, SSL units, codes, text, phonemes.

    The special ids are numbered as they come, which is not where a trained checkpoint has them; nothing measured depends on it.
    """
    bounds = [NUM_SPECIALS]
    for size in (ssl_units, *[codes] * codebooks, text_ids, phonemes):
        bounds.append(bounds[-1] + size)
    spans = [Span(start, stop) for start, stop in zip(bounds, bounds[1:], strict=False)]
    ssl, books, text = spans[0], spans[1 : codebooks + 1], spans[codebooks + 1]
    names = (*OPUSLM_SPECIALS, "modality/codec_ssl", "modality/text_bpe", "modality/spk")
    specials = {name: number for number, name in enumerate(names)}
    return Layout("opuslm", codebooks + 1, bounds[-1], text, (ssl, *books), specials)


def _opuslm(text_ids: int) -> Layout:
    return opuslm_layout(text_ids, ssl_units=_SSL_UNITS, codes=_CODES, codebooks=_CODEBOOKS, phonemes=_PHONEMES)


# name: (backbone, layout); sizes from the configurations of the released checkpoints
_RELEASED = {
    "bagpiper-8b": (_QWEN3_8B, _bagpiper),
    "opuslm-7b": (_OLMO2_7B, lambda: _opuslm(100352)),
    "opuslm-dialogue-1.7b": (_SMOLLM2, lambda: _opuslm(49152)),
}
NAMES = tuple(_RELEASED)


def random_geometry(name: str, backbone: Mapping[str, Any], layout: Layout) -> Geometry:
    """A model with random weights. ``vocab_size`` and the special ids of the backbone follow ``layout``."""
    ends = {"bos_token_id": layout.end_tokens[0], "eos_token_id": layout.end_tokens[0], "pad_token_id": layout.pad}
    return Geometry(name, layout, {**_COMMON, **backbone, **ends, "vocab_size": layout.vocab_size})


def find_geometry(name: str) -> Geometry:
    """A released geometry by name, or a converted directory.

    Raises:
        ConfigError: if it is neither, naming the nearest name.
        CheckpointError: if it is a directory that was not converted, or has no config.json.
    """
    if name in _RELEASED:
        backbone, layout = _RELEASED[name]
        return random_geometry(name, backbone, layout())
    path = Path(name)
    if not path.is_dir():
        near = difflib.get_close_matches(name, NAMES, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ConfigError(
            f"model {name!r} is neither a converted directory nor one of {', '.join(NAMES)} (random weights){hint}"
        )
    from ..checkpoint import open_checkpoint

    checkpoint = open_checkpoint(path)
    config = path / "config.json"
    try:
        backbone = json.loads(config.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"cannot read {config}: {error}; convert the checkpoint again") from error
    return Geometry(name, checkpoint.layout, backbone, checkpoint.path)
