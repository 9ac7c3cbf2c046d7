"""Encode the wavs of Kaldi directories: uid -> int16 [floor(n / 320), 8] codes, in OUTPUT/NAME.npz."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import numpy as np
import torch
from clips import Clips
from codec_of import codec_of

from espnet2_vllm.codec import Codec


def dump(codec: Codec, clips: Clips) -> dict[str, np.ndarray]:
    """Each clip by itself: filled up to the length of another, its last frames would get other codes."""
    pairs = zip(clips.uids, clips.wavs, strict=True)
    return {uid: codec.encode(wav.astype(np.float32) / 32768).astype(np.int16) for uid, wav in pairs}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("codec", type=Path)
    parser.add_argument("data", type=Path, help="with train/, answers/ and test/")
    parser.add_argument("output", type=Path)
    parser.add_argument("--every", type=int, default=1, help="only one utterance in so many, to try things out")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    codec = codec_of(args.codec, args.device)
    args.output.mkdir(parents=True, exist_ok=True)
    for name in ("test", "answers", "train"):
        started = time.monotonic()
        clips = Clips(args.data / name)
        clips.uids, clips.wavs = clips.uids[:: args.every], clips.wavs[:: args.every]
        codes = dump(codec, clips)
        np.savez(args.output / f"{name}.npz", **codes)
        frames = sum(map(len, codes.values()))
        print(f"{name}: {len(codes)} utterances, {frames} frames in {time.monotonic() - started:.0f} s", flush=True)


if __name__ == "__main__":
    main()
