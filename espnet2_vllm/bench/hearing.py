"""What the continuous audio encoder costs: ``python -m espnet2_vllm.bench.hearing``.

Random weights in the geometry of the released encoder (Qwen3-Omni-30B-A3B: 32 layers of 1280) and of the adaptor to a backbone of
4096. Prints seconds of the front end and of the tower for one clip and for many together, and what steps of a stand-in for
decoding (an 8-billion-parameter model's weights read once a step, in a process of its own as vLLM's engine is) lose meanwhile.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

ENCODER = {
    "model_type": "qwen3_omni_moe_audio_encoder", "num_mel_bins": 128, "d_model": 1280, "encoder_layers": 32,
    "encoder_attention_heads": 20, "encoder_ffn_dim": 5120, "downsample_hidden_size": 480, "output_dim": 2048,
    "n_window": 50, "n_window_infer": 800, "conv_chunksize": 500, "max_source_positions": 1500,
}  # fmt: skip
FEATURES = {
    "feature_extractor_type": "WhisperFeatureExtractor", "sampling_rate": 16000, "hop_length": 160, "n_fft": 400,
    "feature_size": 128, "chunk_length": 30, "n_samples": 480000, "padding_value": 0.0, "return_attention_mask": True,
}  # fmt: skip
HIDDEN = 4096
STAND_IN = 16 * 2**30  # bytes of weights that a decode step reads
STEPS = 400


def make_checkpoint(folder: Path, seed: int = 0) -> Any:
    """What ``AudioTower`` needs of a converted directory, with random weights in bfloat16."""
    import torch
    from safetensors.torch import save_file
    from transformers.models.qwen3_omni_moe.configuration_qwen3_omni_moe import Qwen3OmniMoeAudioEncoderConfig
    from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import Qwen3OmniMoeAudioEncoder

    torch.manual_seed(seed)
    tower = Qwen3OmniMoeAudioEncoder._from_config(Qwen3OmniMoeAudioEncoderConfig(**ENCODER), dtype=torch.bfloat16)
    tensors = {f"audio_tower.{name}": tensor.contiguous() for name, tensor in tower.state_dict().items()}
    tensors["adaptor.weight"] = torch.randn(HIDDEN, ENCODER["output_dim"], dtype=torch.bfloat16) * 0.02
    tensors["adaptor.bias"] = torch.zeros(HIDDEN, dtype=torch.bfloat16)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"audio_config": ENCODER}), encoding="utf-8")
    (folder / "preprocessor_config.json").write_text(json.dumps(FEATURES), encoding="utf-8")
    names = {"config": "config.json", "preprocessor_config": "preprocessor_config.json", "weights": "model.safetensors"}
    return SimpleNamespace(path=folder, continuous_audio={"encoder": "random", **names})


def clips(count: int, seconds: float, seed: int) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(round(seconds * FEATURES["sampling_rate"])).astype(np.float32) for _ in range(count)]


def measure(tower: Any, count: int, seconds: float, repeats: int = 3) -> dict[str, float]:
    """Median seconds of the front end and of everything, for ``count`` clips together."""
    import torch

    front, whole = [], []
    for repeat in range(repeats + 2):
        wavs = clips(count, seconds, repeat)  # new ones, since those that come again are not encoded
        begun = time.perf_counter()
        tower._log_mel(wavs)
        if tower.device.type == "cuda":
            torch.cuda.synchronize()
        middle = time.perf_counter()
        tower.encode([[wav] for wav in wavs])
        if repeat > 1:
            front.append(middle - begun)
            whole.append(time.perf_counter() - middle)
    return {"front end": float(np.median(front)), "all": float(np.median(whole))}


def decode_beside(ready: Any, stop: Any, found: Any) -> None:
    """Steps of the stand-in until ``stop``; their seconds go to ``found``."""
    import torch

    weights = torch.zeros(STAND_IN // 2, dtype=torch.bfloat16, device="cuda").view(-1, HIDDEN)
    state = torch.zeros(HIDDEN, 64, dtype=torch.bfloat16, device="cuda")

    def step() -> None:
        for part in weights.split(weights.shape[0] // 32):
            part @ state

    graph = torch.cuda.CUDAGraph()
    step()
    with torch.cuda.graph(graph):
        step()
    times = []
    while not stop.is_set():
        begun = time.perf_counter()
        graph.replay()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - begun)
        if len(times) == STEPS:
            ready.set()
    found.put(times)


def beside_decoding(tower: Any, count: int, seconds: float) -> None:
    """Prints the stand-in's steps alone, and while batches of ``count`` clips are encoded one after the other."""
    context = multiprocessing.get_context("spawn")
    sounds = [clips(count, seconds, 100 + repeat) for repeat in range(8)]
    ready, stop, found = context.Event(), context.Event(), context.Queue()
    process = context.Process(target=decode_beside, args=(ready, stop, found))
    process.start()
    ready.wait(120)
    for wavs in sounds:
        tower.encode([[wav] for wav in wavs])
    stop.set()
    times = np.array(found.get()) * 1000
    process.join()
    for name, part in (("alone", times[20:STEPS]), (f"beside {count} clips at a time", times[STEPS:])):
        quantiles = ", ".join(f"p{q} {np.percentile(part, q):.2f} ms" for q in (50, 99, 100))
        print(f"decoding {name}: {quantiles} ({len(part)} steps)", flush=True)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clips", type=int, nargs="+", default=[1, 16, 64], help="clips encoded together")
    parser.add_argument("--seconds", type=float, default=10.0, help="of each clip")
    parser.add_argument("--dtype", nargs="+", default=["bfloat16"])
    parser.add_argument("--device", default="cuda")
    args = parser.parse_args(argv)
    from ..audio.tower import AudioTower

    with tempfile.TemporaryDirectory() as folder:
        checkpoint = make_checkpoint(Path(folder))
        for dtype in args.dtype:
            tower = AudioTower(checkpoint, dtype=dtype, device=args.device)
            for count in args.clips:
                took = measure(tower, count, args.seconds)
                shown = ", ".join(f"{name} {1000 * value:.1f} ms" for name, value in took.items())
                print(f"{dtype}: {count} clips of {args.seconds:g} s together: {shown}", flush=True)
            if args.device == "cuda":
                beside_decoding(tower, args.clips[-1], args.seconds)


if __name__ == "__main__":
    main()
