"""Codecs to measure: the geometry of the released ones with random weights, tiny ones, or a converted directory's own."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import ConfigError

if TYPE_CHECKING:
    from ..checkpoint import Checkpoint
    from ..codec.torch_codec import TorchCodec

OWN = "own"
_SEED = 1

# ESPnet's dac_large_v1.4 at 16 kHz, the codec of the released OpusLM models (egs2/amuse/codec1/conf).
_DAC_LARGE = {"width": 512, "codebook": 512, "filters": 32, "blocks": 3, "ratios": [8, 5, 4, 2], "codes": 1024}
_DAC_TINY = {"width": 24, "codebook": 8, "filters": 2, "blocks": 1, "ratios": [8, 5, 4, 2], "codes": 1024}
# XcodecConfig's defaults are the released model's; the tiny one is narrower.
_XCODEC_TINY = {"encoder_hidden_size": 8, "decoder_hidden_size": 32, "hidden_size": 16}


def _dac(sizes: dict[str, Any], codebooks: int, codes: int, device: str) -> TorchCodec:
    import torch
    from espnet2.gan_codec.shared.decoder.seanet import SEANetDecoder
    from espnet2.gan_codec.shared.quantizer.residual_vq import ResidualVectorQuantizer

    from ..codec.espnet import EspnetCodec

    class Generator(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.quantizer = ResidualVectorQuantizer(
                dimension=sizes["width"],
                codebook_dim=sizes["codebook"],
                n_q=codebooks,
                bins=codes,
                kmeans_init=False,
            )
            self.decoder = SEANetDecoder(
                dimension=sizes["width"],
                n_filters=sizes["filters"],
                n_residual_layers=sizes["blocks"],
                ratios=sizes["ratios"],
                activation="Snake",
                activation_params={},
                residual_kernel_size=7,
            )

    class Model(torch.nn.Module):
        """What ``EspnetCodec`` asks of ESPnet's own model, without what encodes and trains."""

        def __init__(self) -> None:
            super().__init__()
            self.codec = torch.nn.Module()
            self.codec.generator = Generator()

        def meta_info(self) -> dict[str, Any]:
            hop = int(self.codec.generator.decoder.hop_length)
            sizes = [codes] * codebooks
            return {"fs": 16000, "frame_shift": hop, "num_streams": codebooks, "code_size_per_stream": sizes}

        def decode(self, ids: torch.Tensor) -> torch.Tensor:
            return self.codec.generator.decoder(self.codec.generator.quantizer.decode(ids))

    return EspnetCodec(_drawn(Model), None, device)


def _xcodec(changes: dict[str, Any], codebooks: int, codes: int, device: str) -> TorchCodec:
    from transformers import DacConfig, XcodecConfig, XcodecModel

    from ..codec.xcodec import Xcodec

    config = XcodecConfig(codebook_size=codes)
    if changes:
        acoustic = {**config.acoustic_model_config.to_dict(), **changes}
        config = XcodecConfig(codebook_size=codes, acoustic_model_config=DacConfig(**acoustic))
    return Xcodec(_drawn(lambda: XcodecModel(config)), codebooks, device)


def _drawn(make: Callable[[], Any]) -> Any:
    import torch

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(_SEED)
        model = make().eval().requires_grad_(False)
        for name, values in model.named_buffers():
            if name.endswith("embed"):
                values.normal_()  # untrained codebooks may be zeros, and then no code makes a difference
        return model


_CODECS: dict[str, tuple[Callable[..., TorchCodec], dict[str, Any]]] = {
    "dac-large": (_dac, _DAC_LARGE),
    "xcodec": (_xcodec, {}),
    "dac-tiny": (_dac, _DAC_TINY),
    "xcodec-tiny": (_xcodec, _XCODEC_TINY),
}
NAMES = (*_CODECS, OWN)


def check_codec_name(name: str) -> str:
    """``name``, if there is such a codec. Raises ConfigError with the nearest one."""
    if name not in NAMES:
        near = difflib.get_close_matches(name, NAMES, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ConfigError(f"codec {name!r} is unknown; expected one of {', '.join(NAMES)}{hint}")
    return name


def make_codec(name: str, checkpoint: Checkpoint, device: str) -> TorchCodec:
    """The codec called ``name`` with as many codebooks and codes as the checkpoint's audio streams have.

    Raises:
        ConfigError: if it is the checkpoint's own and it has none, or ESPnet is missing.
    """
    layout = checkpoint.layout
    if name == OWN:
        if checkpoint.codec is None:
            raise ConfigError(f"codec {OWN}: {checkpoint.path} names no codec; take one of {', '.join(_CODECS)}")
        from ..bin.job import load_fitting_codec

        return load_fitting_codec(checkpoint.codec, Path(checkpoint.codec_base), layout, device)
    make, sizes = _CODECS[name]
    codes = {layout.code_spans[stream].size for stream in layout.codec_streams}
    try:
        return make(sizes, len(layout.codec_streams), max(codes), device)
    except ModuleNotFoundError as error:
        raise ConfigError(f"codec {name} needs the Python package {error.name!r}, which is not installed") from error
