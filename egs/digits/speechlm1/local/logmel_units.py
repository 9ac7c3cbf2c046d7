"""Discrete units that stand in for those of XEUS: the nearest of a few k-means centres to a frame's log-mel spectrum.

OpusLM takes the units of a large SSL model in its first stream. This recipe has none; its units are plain acoustic classes and are
called log-mel units wherever they are written down.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import kaldiio
import numpy as np
import torch

from espnet2_vllm.bin.options import at_least

SAMPLE_RATE, HOP, WINDOW, MELS = 16000, 320, 512, 40
_FLOOR = 1e-5
_ROUNDS = 12


@cache
def _filters() -> torch.Tensor:
    """[MELS, WINDOW // 2 + 1] triangles on the mel scale."""
    mel = torch.linspace(0, 2595 * np.log10(1 + SAMPLE_RATE / 2 / 700), MELS + 2, dtype=torch.float64)
    edges = 700 * (10 ** (mel / 2595) - 1)
    frequencies = torch.linspace(0, SAMPLE_RATE / 2, WINDOW // 2 + 1, dtype=torch.float64)
    rising = (frequencies - edges[:-2, None]) / (edges[1:-1] - edges[:-2])[:, None]
    falling = (edges[2:, None] - frequencies) / (edges[2:] - edges[1:-1])[:, None]
    return torch.minimum(rising, falling).clamp(min=0).float()


def log_mel(wav: np.ndarray) -> torch.Tensor:
    """[n] at 16 kHz, int16 or float of full scale 1 -> [floor(n / 320), 40]; the mean of the clip is taken out (loudness)."""
    samples = torch.from_numpy(np.asarray(wav, dtype=np.float32) / (32768 if wav.dtype == np.int16 else 1))
    frames = len(samples) // HOP
    around = torch.nn.functional.pad(samples[: frames * HOP], ((WINDOW - HOP) // 2, (WINDOW - HOP) // 2))
    windows = around.unfold(0, WINDOW, HOP) * torch.hann_window(WINDOW)
    energy = torch.fft.rfft(windows).abs().square() @ _filters().T
    found = (energy + _FLOOR).log()
    return found - found.mean()


def nearest(features: torch.Tensor, centres: torch.Tensor) -> torch.Tensor:
    """[n, D] and [k, D] -> [n], from 0."""
    return (centres.square().sum(1) - 2 * features @ centres.T).argmin(1)


def fit(features: torch.Tensor, count: int, seed: int) -> torch.Tensor:
    """Lloyd's k-means: [n, D] -> [count, D]. An empty class takes a frame at random."""
    generator = torch.Generator().manual_seed(seed)
    centres = features[torch.randperm(len(features), generator=generator)[:count]].clone()
    for _ in range(_ROUNDS):
        classes = nearest(features, centres)
        sizes = torch.bincount(classes, minlength=count)
        sums = torch.zeros_like(centres).index_add_(0, classes, features)
        empty = sizes == 0
        centres = sums / sizes.clamp(min=1)[:, None]
        centres[empty] = features[torch.randint(len(features), (int(empty.sum()),), generator=generator)]
    return centres


def units_of(wav: np.ndarray, centres: torch.Tensor) -> np.ndarray:
    """[frames] int16 from 1: unit 0 is never used, since OpusLM reads a 0 as a pad."""
    return (nearest(log_mel(wav), centres) + 1).numpy().astype(np.int16)


def _wav(found: Any, uid: str) -> np.ndarray:
    rate, wav = found[uid]
    assert rate == SAMPLE_RATE, f"{uid} has {rate} Hz, expected {SAMPLE_RATE}"
    return wav


def _some_spectra(directory: Path, frames: int, generator: torch.Generator) -> torch.Tensor:
    """[at least ``frames`` if there are so many, MELS] of utterances taken at random."""
    found = kaldiio.load_scp(str(directory / "wav.scp"))
    uids, spectra, count = list(found), [], 0
    for index in torch.randperm(len(uids), generator=generator).tolist():
        spectra.append(log_mel(_wav(found, uids[index])))
        count += len(spectra[-1])
        if count >= frames:
            break
    return torch.cat(spectra)


def _units_in(directory: Path, uids: Sequence[str], centres: torch.Tensor) -> dict[str, np.ndarray]:
    torch.set_num_threads(1)
    found = kaldiio.load_scp(str(directory / "wav.scp"))
    return {uid: units_of(_wav(found, uid), centres) for uid in uids}


def units_in(directory: Path, centres: torch.Tensor, jobs: int) -> dict[str, np.ndarray]:
    """The units of all utterances of a Kaldi directory, by ``jobs`` processes, in file order."""
    uids = list(kaldiio.load_scp(str(directory / "wav.scp")))
    parts = [uids[first::jobs] for first in range(jobs)]
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        results = pool.map(_units_in, [directory] * jobs, parts, [centres] * jobs)
        found = {uid: units for part in results for uid, units in part.items()}
    return {uid: found[uid] for uid in uids}


def read_centres(path: Path) -> torch.Tensor:
    return torch.from_numpy(np.load(path).astype(np.float32))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("data", type=Path, help="directory with train/, answers/ and test/, each with a wav.scp")
    parser.add_argument("output", type=Path, help="centres.npy and an npz for each are written here")
    parser.add_argument("--units", type=int, default=64, help="how many")
    parser.add_argument("--frames", type=int, default=100_000, help="frames that the centres are fitted to")
    parser.add_argument("--seed", type=int, default=9)
    parser.add_argument("--jobs", type=at_least(1), default=os.cpu_count(), help="processes")
    args = parser.parse_args()
    args.output.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(args.seed)
    spectra = _some_spectra(args.data / "train", 4 * args.frames, generator)
    chosen = torch.randperm(len(spectra), generator=generator)[: args.frames]
    centres = fit(spectra[chosen], args.units, args.seed).half().float()
    np.save(args.output / "centres.npy", centres.half().numpy())
    for name in ("train", "answers", "test"):
        found = units_in(args.data / name, centres, args.jobs)
        np.savez(args.output / f"{name}.npz", **found)
        print(
            f"{name}: {len(found)} utterances, {len(np.unique(np.concatenate(list(found.values()))))} log-mel units in use"
        )


if __name__ == "__main__":
    main()
