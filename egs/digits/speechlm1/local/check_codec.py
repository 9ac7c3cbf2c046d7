"""What the codec costs: word errors of the independent recogniser on strings of no training text, as made and through it."""

from __future__ import annotations

import argparse
from pathlib import Path

import jiwer
import numpy as np
import torch
from clips import Clips
from codec_losses import SpectralDistance
from codec_of import codec_of
from recognise import DigitRecogniser

from espnet2_vllm.io.keyed import read_keyed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("codec", type=Path)
    parser.add_argument("data", type=Path, help="with train/text and test/")
    parser.add_argument("--count", type=int, default=200, help="utterances, of the speakers tts*")
    parser.add_argument("--original", action=argparse.BooleanOptionalAction, default=True, help="the wavs as made, too")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    codec, recogniser, distance = codec_of(args.codec), DigitRecogniser(), SpectralDistance()
    texts = read_keyed(args.data / "test" / "text")
    seen = set(read_keyed(args.data / "train" / "text").values())
    clips = Clips(args.data / "test")
    pairs = [
        (uid, wav)
        for uid, wav in zip(clips.uids, clips.wavs, strict=True)
        if uid.startswith("tts") and "-digits-" in uid and texts[uid] not in seen
    ]
    chosen = np.unique(np.linspace(0, len(pairs) - 1, args.count).round().astype(int))
    pairs = [pairs[index] for index in chosen]
    heard, logs = {"original": {}, "codec": {}}, []
    for uid, wav in pairs:
        wav = wav[: len(wav) // codec.hop * codec.hop]
        floats = wav.astype(np.float32) / 32768
        decoded = codec.decode(codec.encode(floats))
        logs.append(float(distance(torch.from_numpy(decoded)[None], torch.from_numpy(floats)[None])[0]))
        heard["codec"][uid] = recogniser((np.clip(decoded, -1, 1) * 32767).astype(np.int16))
        if args.original:
            heard["original"][uid] = recogniser(wav)
    print(f"{len(pairs)} utterances, log mel distance {np.mean(logs):.4f}")
    for name, found in heard.items():
        for speaker in ["tts", *sorted({uid.split("-")[0] for uid in found})] if found else []:
            uids = [uid for uid in found if uid.startswith(speaker)]
            rates = jiwer.process_words([texts[uid] for uid in uids], [found[uid] for uid in uids])
            counts = f"{rates.substitutions} substitutions, {rates.deletions} deletions, {rates.insertions} insertions"
            print(f"{name} {speaker}: {len(uids)} utterances, WER {100 * rates.wer:.1f} % ({counts})")


if __name__ == "__main__":
    main()
