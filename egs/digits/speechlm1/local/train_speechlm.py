"""Train a small SpeechLM of one family on codes: text to speech, speech to text and spoken dialogues in one model.

Runs on a CPU or on one GPU, for a time or for a number of steps. Its folder can be decoded from after every export.
"""

from __future__ import annotations

import argparse
import math
import random
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import yaml
from codec_of import codec_files
from lm_align import aligned
from lm_data import BagpiperTasks, Batches, OpusLMTasks, Pool, grouped, held_out, load_corpus, loader
from lm_export import SPEAKER_ROWS, export_bagpiper, export_opuslm, opuslm_tokens
from lm_model import Batch, Losses, Net, backbone_config
from lm_rows import Example
from lm_tokenizer import make_tokenizer

from espnet2_vllm.layout import Layout
from espnet2_vllm.prompt.opuslm import Facts
from espnet2_vllm.text import TextTokenizer

_VALID_ONE_IN = 50  # utterances that are only looked at
_WARM_UP = 0.04  # of the training
_METERED = 10  # of so many steps, one's losses are looked at: a device that is asked for them stands still meanwhile


def build_layout(family: str, tokenizer: Path, config: dict[str, Any], codec: Path) -> tuple[Layout, Any]:
    """(layout, tokens of OpusLM or None)."""
    arguments = yaml.safe_load(codec_files(codec)[0].read_text(encoding="utf-8"))
    size = arguments["codec_conf"]["generator_params"]
    books, entries = size["quantizer_n_q"], size["quantizer_bins"]
    if family == "bagpiper":
        return Layout.bagpiper(config["text_size"], [entries + 1] * books), None
    tokens = opuslm_tokens(tokenizer, config["text_size"], config["units"] + 1, books, entries)
    return Layout.opuslm(*tokens, books + 1), tokens


def optimisers(net: Net, rate: float, matrix_rate: float) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of the backbone, AdamW for embeddings, heads and norms."""
    matrices = [p for name, p in net.model.named_parameters() if p.ndim == 2]
    known = set(map(id, matrices))
    others = [p for p in net.parameters() if id(p) not in known]
    return [
        torch.optim.Muon(matrices, lr=matrix_rate, momentum=0.95, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=rate, betas=(0.9, 0.95), weight_decay=0.0, fused=True),
    ]


def schedule(progress: float) -> float:
    """Linear warm-up, then a cosine to a fiftieth."""
    if progress < _WARM_UP:
        return max(progress / _WARM_UP, 0.02)
    along = (progress - _WARM_UP) / (1 - _WARM_UP)
    return 0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * min(along, 1.0)))


class Meter:
    """Means of losses by task and part."""

    def __init__(self) -> None:
        self._sums: dict[tuple[str, str], list[float]] = defaultdict(lambda: [0.0, 0])

    def add(self, table: dict[tuple[str, str], tuple[float, int]]) -> None:
        for key, (total, count) in table.items():
            self._sums[key][0] += total
            self._sums[key][1] += count

    def lines(self) -> list[str]:
        tasks = sorted({task for task, _ in self._sums})
        parts = sorted({part for _, part in self._sums}, key=lambda part: (part.startswith("audio"), part))
        found = []
        for task in tasks:
            means = {part: self._sums[task, part] for part in parts if (task, part) in self._sums}
            found.append(f"  {task:22s}" + " ".join(f"{part} {s / max(n, 1):.3f}" for part, (s, n) in means.items()))
        return found


@torch.no_grad()
def validate(net: Net, examples: Sequence[Example], rows: int) -> list[str]:
    net.eval()
    meter = Meter()
    for group in grouped(examples, rows):
        meter.add(net.losses(Batch(group).to(net.emb.weight.device)).table())
    net.train()
    return meter.lines()


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--config", type=Path, required=True, help="conf/train_bagpiper.yaml or conf/train_opuslm.yaml")
    parser.add_argument("--data", type=Path, required=True, nargs="+", help="Kaldi directories of training utterances")
    parser.add_argument(
        "--codes", type=Path, required=True, nargs="+", help="an npz of codes for each (local/dump_codes.py)"
    )
    parser.add_argument(
        "--units", type=Path, nargs="+", help="an npz of log-mel units for each (OpusLM; local/logmel_units.py)"
    )
    parser.add_argument("--codec", type=Path, required=True, help="folder of the codec: config.yaml and one .pth")
    parser.add_argument(
        "--out", type=Path, required=True, help="the checkpoint's folder; the codec is expected beside it"
    )
    parser.add_argument("--minutes", type=float, default=40, help="how long to train")
    parser.add_argument("--steps", type=int, default=0, help="train so many steps instead")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--threads", type=int, default=1, help="of a CPU")
    parser.add_argument(
        "--workers", type=int, help="processes that make batches; 0, as on a CPU: the training itself does"
    )
    parser.add_argument("--seed", type=int, default=9)
    parser.add_argument("--export-minutes", type=float, default=5, help="export so often")
    parser.add_argument("--init", type=Path, help="go on from the weights of a state that --out holds (state.pt)")
    parser.add_argument(
        "--export-only", action="store_true", help="write what --init holds anew, as with another codec"
    )
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="change entries of the config")
    args = parser.parse_args()
    if args.export_only and args.init is None:
        parser.error("--export-only: nothing is said to be exported; give --init")
    if args.workers is None:
        args.workers = 0 if args.device == "cpu" else 6
    return args


def main() -> None:
    args = parse_arguments()
    config = yaml.safe_load(args.config.read_text(encoding="utf-8"))
    config |= {key: yaml.safe_load(value) for key, value in (entry.split("=", 1) for entry in args.set)}
    if config["family"] == "opuslm" and not args.units:
        raise SystemExit(
            f"{args.config} is of an OpusLM model, whose first stream are units; give --units (local/logmel_units.py)"
        )
    torch.set_num_threads(args.threads)
    torch.backends.cuda.matmul.allow_tf32 = True
    torch.manual_seed(args.seed)
    rng = random.Random(args.seed)
    print(f"seed {args.seed}; {config}", flush=True)
    trainer = Trainer(args, config, rng)
    trainer.export(0) if args.export_only else trainer.run()


class Trainer:
    def __init__(self, args: argparse.Namespace, config: dict[str, Any], rng: random.Random) -> None:
        self.args, self.config, self.rng = args, config, rng
        self.family = config["family"]
        self.tokenizer = args.out / "tokenizer.tmp"
        make_tokenizer(self.tokenizer, config["text_size"], words=("answer", "voice"))
        self.layout, self.tokens = build_layout(self.family, self.tokenizer, config, args.codec)
        self.backbone = backbone_config(self.family, config["text_size"], config["size"])
        self.net = Net(self.layout, self.backbone, config["emb_std"], config["half"]).to(args.device)
        if args.init:
            state = torch.load(args.init, map_location=args.device, weights_only=True)
            self.net.load_state_dict(state, strict=False)
        self.aligned = False
        rows = config["batch_rows"]
        self.batch_rows = rows if isinstance(rows, int) else rows["cpu" if args.device == "cpu" else "gpu"]
        self.optimisers = optimisers(self.net, config["rate"], config["matrix_rate"])
        self._read()
        counts = {name: sum(p.numel() for p in part.parameters()) for name, part in self.net.named_children()}
        print(f"{sum(counts.values())} parameters ({counts}), {self.layout.vocab_size} ids", flush=True)

    def _read(self) -> None:
        units = self.args.units or [None] * len(self.args.data)
        corpus = [
            one
            for data, codes, classes in zip(self.args.data, self.args.codes, units, strict=True)
            for one in load_corpus(data, codes, classes)
        ]
        self.rng.shuffle(corpus)
        held, self.corpus = held_out(corpus, _VALID_ONE_IN)
        text = TextTokenizer(self.tokenizer)
        self.pool = Pool(self.corpus, self.rng)
        valid_rng = random.Random(self.args.seed + 1)
        valid = self._tasks(text, Pool(held, valid_rng), 0.0)
        self.tasks = self._tasks(text, self.pool, self.config["audio_cfg"])
        self.valid = [valid.draw() for _ in range(self.config["valid_examples"])]

    def _tasks(self, text: TextTokenizer, pool: Pool, dropout: float) -> BagpiperTasks | OpusLMTasks:
        if self.family == "bagpiper":
            return BagpiperTasks(self.layout, text, pool, self.config["shares"], dropout)
        facts = Facts(SPEAKER_ROWS, True, 2048, self.layout.num_streams)
        return OpusLMTasks(self.layout, text, pool, self.config["shares"], facts)

    def run(self) -> None:
        began = exported = said = time.monotonic()
        meter, step, rows, real, stream = Meter(), 0, 0, 0, None
        while True:
            elapsed = time.monotonic() - began
            progress = step / self.args.steps if self.args.steps else elapsed / (60 * self.args.minutes)
            if progress >= 1:
                break
            if progress >= self.config["align_at"] and not self.aligned:
                self.align()
                stream = None
            self.pool.limit = next(limit for start, limit in reversed(self.config["lengths"]) if progress >= start)
            if stream is None:
                # Of another seed than what was drawn before the alignment, or that would be drawn again.
                seed = f"{self.args.seed} {step}"
                source = Batches(self.tasks, self.batch_rows, self.config["noise"], seed)
                stream = iter(loader(source, self.args.workers))
            batch = next(stream)
            losses = self._step(batch.to(self.args.device), schedule(progress))
            if step % _METERED == 0:
                meter.add(losses.table())
            step, rows, real = step + 1, rows + len(batch), real + batch.filled
            now = time.monotonic()
            if now - said > 60:
                print(
                    f"{elapsed / 60:.1f} min, step {step}, {real / elapsed:.0f} rows/s ({real / rows:.0%} of those fed)"
                )
                print("\n".join(meter.lines()), flush=True)
                meter, said = Meter(), now
            if now - exported > 60 * self.args.export_minutes:
                self.export(step)
                exported = time.monotonic()
        self.export(step)
        print(f"done: {step} steps, {real} rows, {(time.monotonic() - began) / 60:.1f} minutes")

    def align(self) -> None:
        """From now on the speech of answers also teaches what is said next."""
        self.net.eval()
        corpus = aligned(self.net, self.corpus, self.tasks.heard, 2 * self.batch_rows, self.args.workers)
        self.net.train()
        self.pool.fill(corpus)
        self.aligned = True

    def _step(self, batch: Batch, scale: float) -> Losses:
        losses = self.net.losses(batch)
        losses.total(
            self.config["stream_weights"],
            self.config["text_weight"],
            self.config["said_weight"],
            self.config["coming_weight"],
        ).backward()
        torch.nn.utils.clip_grad_norm_(self.net.parameters(), 1.0)
        for optimiser, rate in zip(self.optimisers, (self.config["matrix_rate"], self.config["rate"]), strict=True):
            for group in optimiser.param_groups:
                group["lr"] = rate * scale
            optimiser.step()
            optimiser.zero_grad(set_to_none=True)
        return losses

    def export(self, step: int) -> None:
        print(f"step {step}: losses of utterances held out")
        print("\n".join(validate(self.net, self.valid, self.batch_rows)), flush=True)
        out = self.args.out
        if self.family == "bagpiper":
            export_bagpiper(self.net, self.backbone, self.tokenizer, self.args.codec, out, self.config["audio_cfg"])
        else:
            export_opuslm(self.net, self.backbone, self.tokenizer, self.args.codec, out, self.tokens)
        torch.save(self.net.state_dict(), out / "state.pt")


if __name__ == "__main__":
    main()
