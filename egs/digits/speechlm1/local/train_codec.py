"""Train the codec: ESPnet's DAC of conf/train_codec.yaml, on all voices; written as ESPnet writes a codec.

Three parts of the given time: first without quantiser (it is then started by k-means); then all together; then encoder and
codebooks stand still, rounded to float16 (the codes are final: they can be dumped while training goes on), and the decoder alone
learns on. The checkpoint is rewritten every two minutes, so training can be stopped at any time.
"""

from __future__ import annotations

import argparse
import math
import os
import time
from pathlib import Path

import numpy as np
import torch
import yaml
from clips import Clips
from codec_losses import SpectralDistance
from espnet2.tasks.gan_codec import GANCodecTask

_HOP = 320
_DROPOUT = 0.25  # share of a batch that uses a random number of codebooks
_DEAD = 0.05  # a code that is used less often than this share of the mean is put elsewhere
# Of log mel, mel magnitude, waveform. The recogniser listens to the valleys between formants, which only logarithms show.
_WEIGHTS = {"joint": (1.0, 2.0, 5.0), "decoder": (3.0, 1.0, 0.5)}
_SAVE_EVERY = 120.0  # seconds
_CHECKPOINT = "1epoch.pth"


def build(config: Path, output: Path, seed: int) -> torch.nn.Module:
    """ESPnet's model with random weights, and its config.yaml in ``output``."""
    args = GANCodecTask.get_parser().parse_args(
        ["--config", str(config), "--output_dir", str(output), "--iterator_type", "none", "--seed", str(seed)]
    )
    args.version = "202511"
    output.mkdir(parents=True, exist_ok=True)
    written = {name: value for name, value in vars(args).items() if name != "config"}
    written["output_dir"] = "exp/codec"
    (output / "config.yaml").write_text(yaml.safe_dump(written, indent=4, sort_keys=False), encoding="utf-8")
    torch.manual_seed(seed)
    return GANCodecTask.build_model(args)


@torch.no_grad()
def round_to_half(module: torch.nn.Module) -> None:
    for tensor in (*module.parameters(), *module.buffers()):
        tensor.copy_(tensor.half().to(tensor.dtype))


def save(model: torch.nn.Module, output: Path) -> None:
    """The generator in float16. A code's running sum is its entry times its count: with counts of one they are one tensor."""
    state = {}
    for name, tensor in model.state_dict().items():
        if name.startswith("codec.generator."):
            state[name] = (torch.ones_like(tensor) if name.endswith("cluster_size") else tensor.half()).cpu()
    for name in [name for name in state if name.endswith(".embed")]:
        state[name + "_avg"] = state[name]
    torch.save(state, output / "part.pth")
    os.replace(output / "part.pth", output / _CHECKPOINT)


class Training:
    def __init__(self, model: torch.nn.Module, train: Clips, test: Clips, args: argparse.Namespace) -> None:
        self.model, self.generator, self.args = model, model.codec.generator.to(args.device).train(), args
        self.vq = self.generator.quantizer.vq
        self.vq.quantizer_dropout = _DROPOUT
        for layer in self.vq.layers:
            layer._codebook.threshold_ema_dead_code = _DEAD * args.batch * args.frames / layer.codebook_size
        self.distance = SpectralDistance().to(args.device)
        self.train, self.rng = train, np.random.default_rng(args.seed)
        held_out = test.crops(16, 100 * _HOP, np.random.default_rng(0))
        self.held_out = held_out.to(args.device)
        self.optimizer = torch.optim.AdamW(self.generator.parameters(), lr=1e-3, betas=(0.8, 0.99), weight_decay=1e-3)
        self.started, self.step, self.frozen, self.quantised = time.monotonic(), 0, False, False

    @property
    def progress(self) -> float:
        return (time.monotonic() - self.started) / (60 * self.args.minutes)

    def batch(self, count: int | None = None) -> torch.Tensor:
        return self.train.crops(count or self.args.batch, self.args.frames * _HOP, self.rng).to(self.args.device)

    def in_half(self) -> torch.autocast:
        """Convolutions in bfloat16: twice as fast, on processors too."""
        return torch.autocast(self.args.device, torch.bfloat16, enabled=self.args.half)

    def start_quantiser(self) -> None:
        with torch.no_grad():
            self.vq(self.generator.encoder(self.batch(256)[:, None]))
        self.quantised = True

    def freeze(self) -> None:
        for part in (self.generator.encoder, self.generator.quantizer):
            part.requires_grad_(False).eval()
            round_to_half(part)
        self.frozen = True
        self.optimizer = torch.optim.AdamW(self.generator.decoder.parameters(), lr=1e-3, betas=(0.8, 0.99))
        save(self.model, self.args.output)
        print(f"step {self.step}: encoder and codebooks stand still from here", flush=True)

    def rate(self) -> float:
        """Of learning: a short rise, then half a cosine over each of the two parts."""
        joint = self.args.joint
        if not self.frozen:
            fall = 0.5 * (1 + math.cos(math.pi * min(self.progress / joint, 1)))
            return self.args.rate * min(1, (self.step + 1) / 100) * (0.15 + 0.85 * fall)
        fall = 0.5 * (1 + math.cos(math.pi * min((self.progress - joint) / (1 - joint), 1)))
        return 0.6 * self.args.rate * (0.01 + 0.99 * fall)

    def one_step(self) -> dict[str, float]:
        wav = self.batch()
        commitment = torch.zeros((), device=wav.device)
        if self.frozen:
            with torch.no_grad():
                hidden = self.generator.quantizer.decode(self.generator.encode(wav[:, None]))
        else:
            with self.in_half():
                hidden = self.generator.encoder(wav[:, None])
            hidden = hidden.float()
            if self.quantised:
                hidden, _, commitments, _ = self.vq(hidden)
                commitment = commitments.sum()
        with self.in_half():
            found = self.generator.decoder(hidden)[:, 0]
        found = found.float()
        logs, magnitudes = self.distance(found, wav)
        shape = (found - wav).abs().mean()
        weights = _WEIGHTS["decoder" if self.frozen else "joint"]
        loss = weights[0] * logs + weights[1] * magnitudes + weights[2] * shape + 0.1 * commitment
        figures = {"log": logs, "magnitude": magnitudes, "shape": shape, "commitment": commitment}
        for group in self.optimizer.param_groups:
            group["lr"] = self.rate()
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.generator.parameters(), 1.0)
        self.optimizer.step()
        self.step += 1
        return {name: float(value.detach()) for name, value in figures.items()}

    @torch.no_grad()
    def evaluate(self) -> str:
        """Held-out distances through all codebooks, and the perplexity of each codebook's use."""
        self.generator.eval()
        codes = self.generator.encode(self.held_out[:, None])
        found = self.generator.decode(codes)[:, 0]
        logs, magnitudes = self.distance(found, self.held_out)
        self.generator.train()
        if self.frozen:
            self.generator.encoder.eval(), self.generator.quantizer.eval()
        use = []
        for book in codes.flatten(1):
            share = torch.bincount(book, minlength=2) / len(book)
            use.append(int(torch.exp(-(share * (share + 1e-9).log()).sum())))
        return f"held out: log mel {logs:.4f} magnitude {magnitudes:.4f}, perplexity of books {use}"

    def resume(self) -> None:
        state = torch.load(self.args.output / _CHECKPOINT, weights_only=True)
        self.model.load_state_dict(state, strict=False)
        mean = self.args.batch * self.args.frames / self.vq.layers[0].codebook_size
        for layer in self.vq.layers:
            layer._codebook.cluster_size.mul_(mean)
            layer._codebook.embed_avg.mul_(mean)
        self.quantised = True

    def run(self) -> None:
        saved, sums, counted = time.monotonic(), {}, 0
        while self.progress < 1 and (self.args.steps is None or self.step < self.args.steps):
            if not self.quantised and self.step >= self.args.unquantised:
                self.start_quantiser()
            if not self.frozen and self.quantised and self.progress >= self.args.joint:
                self.freeze()
            for name, value in self.one_step().items():
                sums[name] = sums.get(name, 0.0) + value
            counted += 1
            if self.step % self.args.log_every == 0:
                means = " ".join(f"{name} {value / counted:.4f}" for name, value in sums.items())
                seconds = time.monotonic() - self.started
                held_out = self.evaluate() if self.quantised else ""
                print(f"step {self.step} {seconds:.0f} s rate {self.rate():.2e}: {means}; {held_out}", flush=True)
                sums, counted = {}, 0
            if self.quantised and time.monotonic() - saved > _SAVE_EVERY:
                save(self.model, self.args.output)
                saved = time.monotonic()
        save(self.model, self.args.output)
        print(f"done: {self.step} steps in {time.monotonic() - self.started:.0f} s", flush=True)


def main() -> None:
    here = Path(__file__).resolve().parent.parent
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("data", type=Path, help="made by synthesise.py")
    parser.add_argument("output", type=Path, help="config.yaml and the checkpoint come here")
    parser.add_argument("--config", type=Path, default=here / "conf" / "train_codec.yaml")
    parser.add_argument("--minutes", type=float, default=40.0)
    parser.add_argument(
        "--joint", type=float, default=0.6, help="share of the time until encoder and codebooks stand still"
    )
    parser.add_argument("--steps", type=int, help="stop earlier, after so many")
    parser.add_argument("--unquantised", type=int, default=150, help="steps before the quantiser starts")
    parser.add_argument("--batch", type=int, help="crops (6 on a CPU, 64 on a GPU)")
    parser.add_argument("--half", action=argparse.BooleanOptionalAction, default=True, help="convolutions in bfloat16")
    parser.add_argument(
        "--resume",
        action="store_true",
        help="go on from the checkpoint in OUTPUT; with --joint 0 the decoder alone, and codes stay what they are",
    )
    parser.add_argument("--frames", type=int, default=32, help="of a crop, 20 ms each")
    parser.add_argument("--rate", type=float, default=1.5e-3, help="highest rate of learning")
    parser.add_argument("--log-every", type=int, default=200, help="steps")
    parser.add_argument("--seed", type=int, default=9)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    args.batch = args.batch or (6 if args.device == "cpu" else 64)
    torch.set_num_threads(args.threads)
    model = build(args.config, args.output, args.seed)
    size = sum(tensor.numel() for tensor in model.codec.generator.parameters())
    books = sum(layer.codebook.numel() for layer in model.codec.generator.quantizer.vq.layers)
    print(
        f"seed {args.seed}, {args.device}, {args.threads} threads; {size} weights and {books} numbers in codebooks",
        flush=True,
    )
    training = Training(model, Clips(args.data / "train"), Clips(args.data / "test"), args)
    if args.resume:
        training.resume()
    training.run()


if __name__ == "__main__":
    main()
