"""``espnet2-vllm compare``: the same requests on two backends or precisions, id by id and logit by logit.

Both sides draw with the same noise, so that without differences in arithmetic they give the same ids, sampled or not. Logits are
compared in all rows before which both sides have the same history: up to the first row that differs, which is one of them.
"""

from __future__ import annotations

import argparse
import json
import logging
import shlex
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ..engine.quantized import PRECISIONS
from ..errors import ConfigError
from .bench import option_adder, parse_lengths, positive, prepare_environment
from .options import BACKENDS, add_engine_options, at_least, engine_options, run_command
from .utf8 import insist_on_utf8

if TYPE_CHECKING:
    from ..bench.geometry import Geometry
    from ..bench.numerics import Comparison
    from ..checkpoint import Checkpoint

log = logging.getLogger(__name__)

DTYPES = ("float32", "bfloat16", "float16", "float64")
_CONTEXT = 4096  # rows of a sequence that vLLM is started for, unless the requests need more


class Side(NamedTuple):
    """What runs the requests."""

    backend: str
    dtype: str
    precision: str = ""  # of the layers' weights, if not the dtype

    def __str__(self) -> str:
        return " ".join(filter(None, self))


def side(text: str) -> Side:
    """Type of BACKEND:DTYPE[:PRECISION]."""
    backend, _, dtype = text.partition(":")
    dtype, colon, precision = dtype.partition(":")
    if backend not in BACKENDS or dtype not in DTYPES:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not BACKEND:DTYPE with a backend of {', '.join(BACKENDS)} and a dtype of {', '.join(DTYPES)}"
        )
    if colon and (backend != "vllm" or precision not in PRECISIONS):
        raise argparse.ArgumentTypeError(f"{text!r}: behind the dtype of vllm may come {' or '.join(PRECISIONS)}")
    return Side(backend, dtype, precision)


def get_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="espnet2-vllm compare",
        description="Run the same requests twice; report equal ids, the first row that differs, and RMSE of the logits.",
        epilog="Example: espnet2-vllm compare bagpiper-8b --a pytorch:float32 --b vllm:bfloat16 --requests 8. With two folders "
        "in place of MODEL (espnet2-vllm compare A B) two result trees are compared.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument(
        "model",
        metavar="MODEL",
        help="a converted directory, or bagpiper-8b, opuslm-7b, opuslm-dialogue-1.7b: random weights whose decisions are not ties",
    )
    option = option_adder(parser)
    option("a", type=side, default="pytorch:float32", metavar="BACKEND:DTYPE", help="The one that counts as right")
    option(
        "b",
        type=side,
        default="vllm:bfloat16",
        metavar="BACKEND:DTYPE",
        help="The other; vllm:bfloat16:fp8: weights in fp8",
    )
    option = option_adder(parser.add_argument_group("requests"))
    option("requests", type=at_least(1), default=8, help="How many; of a data set, how many of its utterances")
    option("data", metavar="DATA", help="PATH/data.json or task:name:PATH/dataset.json; random prompts if not given")
    option("inference_config", type=Path, metavar="YAML", help="Decoding yaml for --data")
    option("workload", default="audio", help="Random prompts: audio, text, text-audio[:RATIO]")
    option(
        "lengths", type=parse_lengths, default="128:64", metavar="PROMPT:OUTPUT", help="Random prompts: rows of each"
    )
    option("temperature", type=positive, default=1.0, help="Random prompts: of all streams")
    option("topk", type=at_least(1), default=1, help="Random prompts: of all streams; 1 is greedy")
    option("guidance", type=positive, default=1.0, help="Random prompts: scale for audio rows; 1 is none")
    option("seed", type=at_least(0), default=0, help="Of weights, prompts and sampling")
    option = option_adder(parser.add_argument_group("engine"))
    option("device", help="Device of the pytorch backend; by default the GPU where there is one")
    add_engine_options(option)
    option = option_adder(parser.add_argument_group("output"))
    option(
        "scratch",
        type=Path,
        metavar="DIR",
        help="Where random weights are written (16 GB for bagpiper-8b), and removed",
    )
    option("json", type=Path, metavar="FILE", help="Write the report and each request that differs")
    option("require_equal", action="store_true", help="Exit code 1 if an id differs")
    levels = ("CRITICAL", "ERROR", "WARNING", "INFO", "DEBUG", "NOTSET")
    option("log_level", type=str.upper, default="INFO", choices=levels, help="The verbose level of logging")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0; 1 if requests cannot be run, or differ with ``--require-equal``; 2 for wrong usage."""
    argv = sys.argv[1:] if argv is None else argv
    if len(argv) > 1 and not argv[0].startswith("-") and not argv[1].startswith("-"):
        from .compare_trees import main as compare_trees

        return compare_trees(argv)
    return run_command(get_parser(), lambda args, _: run(args, argv), argv)


def run(args: argparse.Namespace, argv: Sequence[str]) -> int:
    from ..bench.geometry import find_geometry
    from ..bench.numerics import compare

    if (args.data is None) != (args.inference_config is None):
        raise ConfigError("--data and --inference-config belong together; without both, prompts are random")
    if args.a == args.b:
        raise ConfigError(f"--a and --b are both {args.a}; there is nothing to compare")
    geometry = find_geometry(args.model)
    if args.data is not None and geometry.path is None:
        raise ConfigError(f"--data needs a converted directory with its tokenizer; {args.model} has random weights")
    prepare_environment()
    options = engine_options(args)
    with _opened(geometry, args) as checkpoint:
        requests = _Requests(checkpoint, args)
        finished = {}
        # pytorch first: vLLM changes transformers' OLMo-2 classes for good.
        for which in sorted((args.a, args.b)):
            log.info("%s: %d requests", which, args.requests)
            finished[which] = _run_side(which, checkpoint, requests, options, args.device)
    comparison = compare(checkpoint.layout, finished[args.a], finished[args.b])
    print(_text(args, geometry, comparison), flush=True)
    if args.json is not None:
        _write(args, argv, geometry, comparison)
    return int(args.require_equal and not comparison.equal)


@contextmanager
def _opened(geometry: Geometry, args: argparse.Namespace) -> Iterator[Checkpoint]:
    """The model's own checkpoint, or one with random weights that is gone afterwards."""
    import torch

    from ..bench.weights import write_weights
    from ..checkpoint import open_checkpoint

    if geometry.path is not None:
        yield open_checkpoint(geometry.path)
        return
    if args.scratch is not None:
        args.scratch.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="espnet2_vllm.compare.", dir=args.scratch) as folder:
        device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
        log.info("writing random weights of %s to %s", geometry.name, folder)
        yield write_weights(geometry, Path(folder), seed=args.seed, device=device)


class _Requests:
    """The requests, made anew for each side. What is wrong with them is found before an engine starts."""

    def __init__(self, checkpoint: Checkpoint, args: argparse.Namespace) -> None:
        from ..bench.dataset import read_data
        from ..bench.workload import parse_workload
        from ..decoding import load_decoding
        from ..protocol import Sampling

        self.args, self.layout = args, checkpoint.layout
        self.longest = 0
        if args.data is not None:
            self.config = load_decoding(args.inference_config, checkpoint.family)
            self.config.check_vocabulary(self.layout.vocab_size)
            self.utterances = read_data(checkpoint, args.data, args.requests, seed=args.seed)
            return
        self.workload, self.sampling = parse_workload(args.workload), Sampling(args.temperature, args.topk)
        self.workload.content_rows(self.layout, args.lengths[1])
        if args.guidance > 1 and checkpoint.family == "opuslm":
            raise ConfigError("--guidance: the opuslm family has none")
        self.longest = sum(args.lengths) + 2
        if self.longest > checkpoint.max_rows:
            raise ConfigError(
                f"--lengths need {self.longest} rows, but the context of {args.model} has {checkpoint.max_rows}"
            )

    def run(self, engine: Any) -> list[tuple[Any, Any]]:
        """All requests on ``engine``, each with its result."""
        from ..bench.dataset import decode_all
        from ..bench.workload import run_units

        if self.args.data is not None:
            return decode_all(engine, self.utterances, self.config, seed=self.args.seed)
        return run_units(engine, list(self._units()))

    def _units(self) -> Iterator[Any]:
        import numpy as np

        from ..bench.workload import random_prompt, speech_unit

        args = self.args
        rng = np.random.default_rng(args.seed)
        prompt_rows, rows = args.lengths
        for number in range(args.requests):
            prompt = random_prompt(self.layout, rng, prompt_rows, self.workload.modalities[0])
            key, seed = f"u{number}", int(rng.integers(2**62))
            yield speech_unit(
                self.layout, self.workload, key, prompt, rows, self.sampling, guidance=args.guidance, seed=seed
            )


def _run_side(
    which: Side, checkpoint: Checkpoint, requests: _Requests, options: dict[str, Any], device: str | None
) -> list[tuple[Any, Any]]:
    """Requests and results of one side, whose engine is gone afterwards."""
    from ..backends import make_engine
    from ..bench.memory import free_device

    own: dict[str, Any] = {"device": device}
    if which.backend == "vllm":
        own = {"max_model_len": min(max(requests.longest, _CONTEXT), checkpoint.max_rows)} | options
        if which.precision:
            own["precision"] = which.precision
    engine = make_engine(which.backend, checkpoint, which.dtype, keep_logits=True, **own)
    try:
        return requests.run(engine)
    finally:
        engine.close()
        del engine
        free_device()


def _source(args: argparse.Namespace) -> str:
    if args.data is not None:
        return f"{args.requests} utterances of {args.data} at most"
    choice = "greedy" if args.topk == 1 else f"temperature {args.temperature:g}, top-k {args.topk}"
    guided = f", cfg {args.guidance:g}" if args.guidance > 1 else ""
    prompt, rows = args.lengths
    return f"{args.requests} random prompts of {prompt} rows, {rows} rows of {args.workload} each, {choice}{guided}"


def _text(args: argparse.Namespace, geometry: Geometry, comparison: Comparison) -> str:
    from ..bench.weights import DESCRIPTION

    facts = comparison.to_dict()
    weights = "its own weights" if geometry.path is not None else DESCRIPTION
    lines = [f"{geometry.name}: {weights}", _source(args), f"a: {args.a}; b: {args.b}"]
    equal = facts["ids_equal"] / max(facts["ids"], 1)
    lines.append(f"requests equal            {facts['requests_equal']} of {facts['requests']}")
    if comparison.apart:
        lines.append(f"requests not compared     {len(comparison.apart)} (their prompts differ)")
    lines.append(f"ids equal                 {facts['ids_equal']} of {facts['ids']} ({equal:.2%})")
    lines.append(f"first differing row       {_first(facts['first_difference'])}")
    lines.append(f"rows with equal history   {facts['rows_same_history']}; logit RMSE there, mean and max:")
    for name, values in facts["rmse"].items():
        shown = "-" if values is None else f"{values['mean']:.3g}  {values['max']:.3g}"
        lines.append(f"  {name.replace('_', ' '):<23} {shown}")
    if facts["margin_median"] is not None:
        lines.append(
            f"a's margins               {facts['margin_median']:.3g} median, {facts['margin_smallest']:.3g} smallest (best minus "
            "second best logit)"
        )
    return "\n".join(lines)


def _first(difference: dict[str, Any] | None) -> str:
    if difference is None:
        return "none"
    margin = "" if difference["margin"] is None else f", where a's margin is {difference['margin']:.3g}"
    where = f"stream {difference['stream']}" if difference["stream"] >= 0 else "where one of them ends"
    return f"{difference['first']} ({difference['request_id']}, {where}{margin})"


def _write(args: argparse.Namespace, argv: Sequence[str], geometry: Geometry, comparison: Comparison) -> None:
    from ..bench.report import device_facts, versions
    from ..bench.weights import DESCRIPTION
    from ..io.files import whole_file

    content = {
        "format": "espnet2-vllm compare",
        "command": f"espnet2-vllm compare {shlex.join(argv)}",
        "model": geometry.name,
        "weights": "its own" if geometry.path is not None else DESCRIPTION,
        "source": _source(args),
        "a": str(args.a),
        "b": str(args.b),
        "device": device_facts(args.device),
        "versions": versions(),
        **comparison.to_dict(),
    }
    with whole_file(args.json) as file:
        json.dump(content, file, indent=1)
        file.write("\n")


if __name__ == "__main__":
    insist_on_utf8()
    sys.exit(main())
