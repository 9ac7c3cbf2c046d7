"""ESPnet's GAN codecs (DAC, which the OpusLM models use, EnCodec, SoundStream, FunCodec), through its own AudioCoding.

Source: AudioCoding (espnet2/bin/gan_codec_inference.py), CodecTokenizer (espnet2/speechlm/tokenizer/).
"""

import contextlib
import importlib.util
import logging
import pickle
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from espnet2_vllm.codec.base import CodecDescription
from espnet2_vllm.codec.locate import locate_directory, locate_file
from espnet2_vllm.codec.modules import for_inference
from espnet2_vllm.codec.packed import unpacked
from espnet2_vllm.codec.seanet import GrowingRecurrentFeatures, SplitDecoder, push_together
from espnet2_vllm.codec.torch_codec import GrowingFeatures, TorchCodec, check_wav
from espnet2_vllm.errors import CheckpointError, shown
from espnet2_vllm.espnet_tree import import_espnet
from espnet2_vllm.logs import printing_to_log
from espnet2_vllm.safe_yaml import read_yaml

# Encoding and decoding run through the generator alone; released files may lack the parts used in training only.
_GENERATOR = "codec.generator."


class EspnetCodec(TorchCodec):
    """A GAN codec of ESPnet that keeps its first ``num_codebooks`` codebooks. ESPnet has codes as [codebook, B, T]."""

    def __init__(self, model: torch.nn.Module, num_codebooks: int | None, device: str) -> None:
        info = model.meta_info()
        sizes = set(info["code_size_per_stream"])
        if len(sizes) != 1:
            raise CheckpointError(f"the codec's codebooks differ in size ({sorted(sizes)}); expected one size for all")
        available = info["num_streams"]
        super().__init__(
            sample_rate=info["fs"],
            hop=hop_of(model, info),
            num_codebooks=available if num_codebooks is None else min(available, num_codebooks),
            codebook_size=sizes.pop(),
            device=device,
        )
        self._model = for_inference(model, self.device)
        self._parts = SplitDecoder.of(self._model)

    def features(self, clips: Sequence[np.ndarray]) -> list[torch.Tensor]:
        codes = self.checked(clips)
        if self._parts is None:
            return codes
        together = [[clip] for clip in codes] if self.one_by_one else [codes]
        return [features for group in together for features in self._parts.features(group)]

    def growing_features(self) -> GrowingFeatures:
        return super().growing_features() if self._parts is None else GrowingRecurrentFeatures(self, self._parts)

    def push_features(self, pushes: Sequence[tuple[GrowingFeatures, np.ndarray, bool]]) -> list[torch.Tensor]:
        return super().push_features(pushes) if self._parts is None else push_together(pushes)

    def synthesize(self, features: torch.Tensor) -> torch.Tensor:
        if self._parts is None:
            return super().synthesize(features)
        return self._filled_up(self._parts.synthesize(features), features.shape[1])

    def encode_uncut(self, wav: np.ndarray) -> np.ndarray:
        """[n] float32 -> [ceil(n / hop), num_codebooks] int64: no sample cut, the last frame filled up by the codec.

        This is CodecTokenizer.encode, which makes the arks of OpusLM. ``encode`` cuts first, as Bagpiper does.
        """
        check_wav(wav)
        frames = -(-len(wav) // self.hop)
        if frames == 0:
            return np.zeros((0, self.num_codebooks), dtype=np.int64)
        return self._encode_array(np.asarray(wav, dtype=np.float32)[None, None], frames)[0]

    def _encode_tensor(self, wav: torch.Tensor) -> torch.Tensor:
        codes = self._model.encode(wav).permute(1, 2, 0)
        if codes.shape[2] < self.num_codebooks:
            raise CheckpointError(
                f"the codec encodes {codes.shape[2]} codebooks at its highest bandwidth but has {self.num_codebooks}; "
                f"keep at most {codes.shape[2]} (max_token_per_frame)"
            )
        # FunCodec's STFT makes a frame more, around the end.
        return codes[:, : -(-wav.shape[2] // self.hop)]

    def _decode_tensor(self, codes: torch.Tensor) -> torch.Tensor:
        return self._filled_up(self._model.decode(codes.permute(2, 0, 1))[:, 0], codes.shape[1])

    def _filled_up(self, wav: torch.Tensor, frames: int) -> torch.Tensor:
        """An inverse STFT gives no samples behind the middle of its last window; they are zeros here."""
        return torch.nn.functional.pad(wav, (0, max(frames * self.hop - wav.shape[1], 0)))


@torch.inference_mode()
def hop_of(model: torch.nn.Module, info: Mapping[str, Any]) -> int:
    """Samples a frame, by the codec itself where ESPnet's ``frame_shift`` is no number (FunCodec's is a tuple)."""
    if isinstance(info["frame_shift"], int):
        return info["frame_shift"]
    device = next(model.parameters()).device
    few, many = (
        model.decode(torch.zeros(info["num_streams"], 1, frames, dtype=torch.int64, device=device)).shape[-1]
        for frames in (8, 16)
    )
    return (many - few) // 8


def load(
    description: CodecDescription, *, device: str, base_dir: Path | None, state_dict: Mapping[str, Any] | None
) -> EspnetCodec:
    """See ``espnet2_vllm.codec.load_codec``."""
    config, checkpoint = find_files(description, base_dir, weights_needed=state_dict is None)
    weights, source = (state_dict, "the checkpoint's own codec weights")
    if weights is None:
        weights, source = _read_weights(checkpoint), str(checkpoint)
    # Building the model draws initial weights; the caller's random stream must not depend on when a codec is loaded.
    with torch.random.fork_rng(devices=[]), _root_logging_as_found():
        model = _build(config)
    _fill(model, weights, source, config)
    return EspnetCodec(model, description.num_codebooks, device)


def files(description: CodecDescription, base_dir: Path | None) -> list[Path]:
    """See ``espnet2_vllm.codec.codec_files``."""
    config, weights = find_files(description, base_dir, weights_needed=True)
    return [config, *([] if weights is None else [weights])]


def find_files(
    description: CodecDescription, base_dir: Path | None, *, weights_needed: bool
) -> tuple[Path, Path | None]:
    """(config.yaml, .pth); the latter None where the caller brings the weights."""
    if description.path is None:
        config = locate_file(description.config_path, base_dir=base_dir, what="codec config_path")
        if not weights_needed:
            return config, None
        if description.checkpoint_path is None:
            raise CheckpointError(f"codec {config} comes without weights: checkpoint_path is not given")
        return config, locate_file(description.checkpoint_path, base_dir=base_dir, what="codec checkpoint_path")
    package = unpacked(description.path, base_dir) or locate_directory(
        description.path, base_dir=base_dir, what="ESPnet codec", other_caches=model_zoo_caches()
    )
    return _package_files(package, weights_needed=weights_needed)


def model_zoo_caches() -> list[Path]:
    """espnet_model_zoo keeps hub snapshots inside its own package directory, not in the hub cache."""
    spec = importlib.util.find_spec("espnet_model_zoo")
    return [Path(place) for place in (spec.submodule_search_locations or [])] if spec else []


def _package_files(package: Path, *, weights_needed: bool) -> tuple[Path, Path | None]:
    """The two files of an ESPnet model package: as its meta.yaml says, or the only ones of their kind in the tree."""
    meta_path = package / "meta.yaml"
    if not meta_path.is_file():
        config = _only_file(package, "config.yaml")
        return config, _only_file(package, "*.pth") if weights_needed else None
    meta = read_yaml(meta_path, CheckpointError)
    try:
        config, checkpoint = package / meta["yaml_files"]["train_config"], package / meta["files"]["model_file"]
    except (KeyError, TypeError) as error:
        raise CheckpointError(
            f"{meta_path} is not the description of an ESPnet codec: expected yaml_files.train_config and "
            f"files.model_file, got {shown(meta)}"
        ) from error
    for path in (config, checkpoint) if weights_needed else (config,):
        if not path.is_file():
            raise CheckpointError(f"{path}, named in {meta_path}, is missing: the copy of the codec is incomplete")
    return config, checkpoint if weights_needed else None


def _only_file(package: Path, pattern: str) -> Path:
    found = sorted(package.rglob(pattern))
    if len(found) != 1:
        raise CheckpointError(
            f"ESPnet codec directory {package} has no meta.yaml, and {len(found)} files {pattern} where one was "
            "expected; name config_path and checkpoint_path instead"
        )
    return found[0]


def _read_weights(path: Path) -> Mapping[str, torch.Tensor]:
    try:
        weights = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, EOFError, ValueError, KeyError, pickle.UnpicklingError) as error:
        raise CheckpointError(f"cannot read codec weights {path}: {error}") from error
    for wrapper in ("module", "model"):
        if isinstance(weights, Mapping) and isinstance(weights.get(wrapper), Mapping):
            weights = weights[wrapper]
    if not isinstance(weights, Mapping):
        raise CheckpointError(f"codec weights {path}: expected a mapping of tensors, got {type(weights).__name__}")
    return weights


def _build(config: Path) -> torch.nn.Module:
    """The GAN codec that ``config`` describes, with random weights, on the CPU, without its discriminator."""
    arguments = read_yaml(config, CheckpointError)
    if not isinstance(arguments, Mapping) or "codec" not in arguments or "codec_conf" not in arguments:
        raise CheckpointError(f"{config} is not the config.yaml of an ESPnet GAN codec: it lacks codec and codec_conf")
    coding = import_espnet("espnet2.bin.gan_codec_inference", f"the codec of {config} needs ESPnet's")
    from typeguard import TypeCheckError

    try:
        with printing_to_log():
            model = coding.AudioCoding(train_config=config, model_file=None, device="cpu").model
    except (AttributeError, KeyError, TypeError, ValueError, RuntimeError, TypeCheckError) as error:
        raise CheckpointError(f"ESPnet cannot build the codec of {config}: {type(error).__name__}: {error}") from error
    if hasattr(model.codec, "discriminator"):
        del model.codec.discriminator
    return model


def _fill(model: torch.nn.Module, weights: Mapping[str, torch.Tensor], source: str, config: Path) -> None:
    """Load ``weights``; unlike ESPnet (strict=False) refuse to leave any part of the generator random."""
    wanted = {name: tensor.shape for name, tensor in model.state_dict().items() if name.startswith(_GENERATOR)}
    given = {name: tensor for name, tensor in weights.items() if name.startswith(_GENERATOR)}
    alphas = {name for name in wanted if name.endswith(".alpha")}
    if not alphas & given.keys():
        # Snake1d's alpha was a constant 1 before ESPnet made it a parameter: weights of that time have none.
        given.update({name: torch.ones(wanted[name]) for name in alphas})
    for verb, keys in (("lacks", wanted.keys() - given.keys()), ("has unknown", given.keys() - wanted.keys())):
        if keys:
            raise CheckpointError(
                f"{source} {verb} {len(keys)} tensors of the codec that {config} describes: "
                f"{', '.join(sorted(keys)[:5])}{', ...' if len(keys) > 5 else ''}"
            )
    for name, shape in wanted.items():
        if given[name].shape != shape:
            raise CheckpointError(
                f"{source}: {name} has shape {list(given[name].shape)}, {config} asks for {list(shape)}"
            )
    model.load_state_dict(given, strict=False)


@contextlib.contextmanager
def _root_logging_as_found() -> Iterator[None]:
    """ESPnet logs through ``logging.info``, which installs a root handler where there is none: take it away again."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    try:
        yield
    finally:
        for handler in list(root.handlers):
            if handler not in handlers:
                root.removeHandler(handler)
        root.setLevel(level)
