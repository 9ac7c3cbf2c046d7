"""Encode the wavs of Kaldi directories: uid -> int16 [floor(n / 320), 8] codes, in OUTPUT/NAME.npz."""

from __future__ import annotations

import argparse
import time
from collections import defaultdict
from pathlib import Path

import numpy as np
import torch
from clips import Clips
from codec_of import codec_of

from espnet2_vllm.codec import Codec

_TOGETHER = 64  # clips


def dump(codec: Codec, clips: Clips) -> dict[str, np.ndarray]:
    """Clips of as many frames go together. Filled up to the length of another, the last frames of a clip would get other codes."""
    alike: dict[int, list[int]] = defaultdict(list)
    for index, wav in enumerate(clips.wavs):
        alike[len(wav) // codec.hop].append(index)
    found: dict[str, np.ndarray] = {}
    for indices in alike.values():
        for start in range(0, len(indices), _TOGETHER):
            part = indices[start : start + _TOGETHER]
            wavs = [clips.wavs[index].astype(np.float32) / 32768 for index in part]
            found |= {
                clips.uids[i]: codes.astype(np.int16) for i, codes in zip(part, codec.encode_batch(wavs), strict=True)
            }
    return {uid: found[uid] for uid in clips.uids}


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
