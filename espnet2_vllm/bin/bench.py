"""``espnet2-vllm bench``: speed of this engine, of plain-text vLLM on the same backbone, and of the sequential backend.

All are measured one after the other, each on the whole device. Every unit of work has a random prompt and a
length that is set beforehand; so many units as are in flight are handed over at once and run to their end, prompts included.
"""

from __future__ import annotations

import argparse
import logging
import os
import shlex
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import ConfigError, EngineError, SpeechLMError
from .options import add, add_engine_options, at_least, codec_share, engine_options, flag, run_command
from .utf8 import insist_on_utf8

if TYPE_CHECKING:
    from ..bench.cost import Peaks
    from ..bench.geometry import Geometry
    from ..bench.measure import Settings

log = logging.getLogger(__name__)

DTYPES = ("bfloat16", "float16", "float32")
ONLY = ("engine", "plain", "pytorch")
_SYSTEMS = ("engine", "plain", "plain-same", "pytorch")
_CONTEXT = 4096  # rows of a sequence that the engines are started for, unless a load needs more


def get_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="espnet2-vllm bench",
        description="Measure rows/s, latency, use of the device and memory; print a table, write json and a plot.",
        epilog="Lists are separated by commas. Example: espnet2-vllm bench bagpiper-8b --in-flight 1,64,256,512 --json b.json",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument(
        "models",
        nargs="*",
        metavar="MODEL",
        help="bagpiper-8b, opuslm-7b, opuslm-dialogue-1.7b (random weights, no download), or a converted directory",
    )
    _add_load_options(parser)
    _add_codec_options(parser)
    group = parser.add_argument_group("engine")
    option = option_adder(group)
    option("dtype", choices=DTYPES, default="bfloat16", help="Of weights and activations, in all systems")
    option("device", help="Device of the pytorch backend; by default the GPU where there is one")
    add_engine_options(option)
    option(
        "scratch", type=Path, metavar="DIR", help="Keep configurations here: vLLM finds again what it compiled for them"
    )
    group = parser.add_argument_group("output")
    option = option_adder(group)
    option("peak_tflops", type=positive, help="Of the device, where its name is not known here")
    option("peak_bandwidth", type=positive, help="GB/s of the device's memory, where its name is not known here")
    option("json", type=Path, metavar="FILE", help="Write everything that was measured, after each system")
    option("plot", type=Path, metavar="FILE", help="Write rows/s against requests in flight as PNG (needs matplotlib)")
    option("plot_from", type=list_of(Path), default=[], metavar="FILES", help="Measure nothing: show these json files")
    levels = ("CRITICAL", "ERROR", "WARNING", "INFO", "DEBUG", "NOTSET")
    option("log_level", type=str.upper, default="INFO", choices=levels, help="The verbose level of logging")
    return parser


def _add_load_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("load")
    option = option_adder(group)
    option(
        "only",
        type=list_of(_system),
        default=",".join(ONLY),
        metavar="SYSTEMS",
        help="Of engine, plain (text on vLLM as it is), plain-same (text with this engine's attention), pytorch",
    )
    option("workload", type=list_of(str), default="audio", metavar="LIST", help="Of audio, text, text-audio[:RATIO]")
    option("guidance", type=list_of(_guidance), default="1", metavar="LIST", help="Scales for audio rows; 1 is none")
    option("in_flight", type=list_of(at_least(1)), default="1,64,256,512", metavar="LIST", help="Units at once")
    option(
        "lengths", type=list_of(parse_lengths), default="128:256", metavar="PROMPT:OUTPUT,...", help="Rows of a unit"
    )
    option("temperature", type=positive, default=0.8, help="Of all streams, and of plain text")
    option("topk", type=at_least(1), default=20, help="Of all streams, and of plain text; 1 is greedy")
    option("pytorch_rows", type=at_least(1), default=64, help="Rows of the one request that times the pytorch backend")
    option("repeat", type=at_least(1), default=1, help="Runs of each load, of which the median counts")
    option("seed", type=at_least(0), default=0, help="Of prompts and sampling")
    option("profile", action="store_true", help="Show where a decode step goes: host parts and kernels of each load")


def _add_codec_options(parser: argparse.ArgumentParser) -> None:
    option = option_adder(parser.add_argument_group("codec"))
    option(
        "codec",
        type=list_of(str),
        default=[],
        metavar="LIST",
        help="Measure these codecs beside this engine instead: dac-large, xcodec (released geometries, random weights), dac-tiny, "
        "xcodec-tiny, own (the converted directory's)",
    )
    both = {"type": list_of(flag), "nargs": "?", "const": [True], "default": "false", "metavar": "LIST"}
    for name, what in (
        ("codec_tf32", "Codecs on a GPU multiply in TF32: faster, and less exact"),
        ("codec_tune", "Try cuDNN's algorithms when a codec starts, and take the fastest"),
    ):
        option(name, **both, help=f"{what}; false,true measures both")
    option(
        "codec_share",
        type=list_of(codec_share),
        default="1",
        metavar="LIST",
        help="Parts of the device that codecs take while the engine is at work: 0.1 (by rests between layers), 0.1:space (by a "
        "green context of so many multiprocessors), 1 (the whole device)",
    )
    option("clips", type=at_least(5), default=2000, help="Decoded by each codec to see whether memory grows")


def option_adder(group: Any) -> Callable[..., None]:
    """A function that adds an option to ``group`` by its name and the settings of ``add_argument``."""

    def option(name: str, **settings: Any) -> None:
        add(group, name.replace("_", "-"), dest=name, **settings)

    return option


def list_of[T](kind: Callable[[str], T]) -> Callable[[str], list[T]]:
    """Type of values separated by commas."""

    def values(text: str) -> list[T]:
        return [kind(part.strip()) for part in text.split(",")]

    return values


def _system(text: str) -> str:
    if text not in _SYSTEMS:
        raise argparse.ArgumentTypeError(f"{text!r} is none of {', '.join(_SYSTEMS)}")
    return text


def positive(text: str) -> float:
    """Type of a number above 0."""
    value = _number(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return value


def _guidance(text: str) -> float:
    value = _number(text)
    if not 1 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is below 1")
    return value


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None


def parse_lengths(text: str) -> tuple[int, int]:
    """Type of PROMPT:OUTPUT."""
    prompt, colon, output = text.partition(":")
    if not colon:
        raise argparse.ArgumentTypeError(f"{text!r} is not PROMPT:OUTPUT, as in 128:256")
    return at_least(1)(prompt), at_least(2)(output)


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0; 1 if a system could not be started; 2 for wrong usage."""
    argv = sys.argv[1:] if argv is None else argv
    return run_command(get_parser(), lambda args, _: run(args, argv), argv)


def run(args: argparse.Namespace, argv: Sequence[str]) -> int:
    from ..bench.geometry import find_geometry
    from ..bench.plot import check_matplotlib

    if args.plot is not None:
        check_matplotlib()
    if bool(args.models) == bool(args.plot_from):
        raise ConfigError("give models to measure, or --plot-from with json files of earlier runs")
    if args.plot_from:
        return show(args)
    prepare_environment()
    if args.codec:
        return _run_speech(args, argv)
    settings, options = _settings(args), engine_options(args)
    geometries = [find_geometry(name) for name in args.models]
    longest = [settings.check(geometry, args.only) for geometry in geometries]
    report = _new_report(args, argv)
    measured = []
    for geometry, rows in zip(geometries, longest, strict=True):
        sized = {
            "max_model_len": min(max(rows, _CONTEXT), geometry.max_rows),
            # A guided request has a companion, which takes a place of its own.
            "max_num_seqs": max(settings.in_flight) * (2 if max(settings.guidance) > 1 else 1),
        }
        report["models"].append(_described(geometry, settings, {**sized, **options}))
        measured.append((geometry, report["models"][-1]))
    _measure_all(args, settings, measured, report)
    return _finish(args, [report])


def _run_speech(args: argparse.Namespace, argv: Sequence[str]) -> int:
    """Codecs beside the engine."""
    from ..bench.codecs import check_codec_name
    from ..bench.geometry import find_geometry
    from ..bench.speech import SpeechSettings
    from ..bench.speech_run import run_speech
    from ..bench.speech_table import speech_tables
    from .options import choose_device

    names = [check_codec_name(name) for name in args.codec]
    if len(args.models) != 1 or len(args.lengths) != 1:
        raise ConfigError("--codec measures one model, and one PROMPT:OUTPUT in --lengths")
    geometry, (prompt, output) = find_geometry(args.models[0]), args.lengths[0]
    settings = SpeechSettings(tuple(args.in_flight), prompt, output, clips=args.clips, seed=args.seed)
    sized = {"max_model_len": min(_CONTEXT, geometry.max_rows), "max_num_seqs": max(settings.in_flight)}
    report = _new_report(args, argv)
    whole = run_speech(
        geometry,
        names,
        settings,
        dtype=args.dtype,
        device=choose_device(args.device, gpu=True),
        tf32=args.codec_tf32,
        tune=args.codec_tune,
        shares=args.codec_share,
        options={**sized, **engine_options(args)},
        report=report,
        json=args.json,
    )
    print(speech_tables(report), flush=True)
    return int(not whole)


def show(args: argparse.Namespace) -> int:
    """Tables and plot of earlier runs."""
    from ..bench.report import read_report

    return _finish(args, [read_report(path) for path in args.plot_from])


def _finish(args: argparse.Namespace, reports: list[dict[str, Any]]) -> int:
    from ..bench.plot import plot
    from ..bench.report import tables

    print("\n\n".join(map(tables, reports)), flush=True)
    if args.plot is not None:
        plot(reports, args.plot)
        log.info("plot in %s", args.plot)
    systems = [facts for report in reports for model in report["models"] for facts in model["systems"].values()]
    return int(any("error" in facts for facts in systems))


def prepare_environment() -> None:
    """One process, whose steps and memory can be seen; nothing of vLLM's own between the lines of the table."""
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")


def _settings(args: argparse.Namespace) -> Settings:
    from ..bench.measure import Settings
    from ..bench.workload import parse_workload
    from ..protocol import Sampling

    return Settings(
        workloads=tuple(map(parse_workload, args.workload)),
        guidance=tuple(args.guidance),
        in_flight=tuple(args.in_flight),
        lengths=tuple(args.lengths),
        sampling=Sampling(args.temperature, args.topk),
        dtype=args.dtype,
        pytorch_rows=args.pytorch_rows,
        repeat=args.repeat,
        seed=args.seed,
        profile=args.profile,
    )


def _new_report(args: argparse.Namespace, argv: Sequence[str]) -> dict[str, Any]:
    from ..bench.cost import peaks_of
    from ..bench.report import device_facts, new_report

    device = _isolated(device_facts, args.device)
    peaks = peaks_of(device["name"], args.dtype)
    device["peak_flops"] = args.peak_tflops * 1e12 if args.peak_tflops else peaks.flops
    device["peak_bandwidth"] = args.peak_bandwidth * 1e9 if args.peak_bandwidth else peaks.bandwidth
    return new_report(f"espnet2-vllm bench {shlex.join(argv)}", device)


def _described(geometry: Geometry, settings: Settings, options: dict[str, Any]) -> dict[str, Any]:
    """A model's part of the report, before anything was measured."""
    return {
        "name": geometry.name,
        "family": geometry.layout.family,
        "streams": geometry.layout.num_streams,
        "vocab_size": geometry.layout.vocab_size,
        "weights": "random" if geometry.path is None else "its own",
        "dtype": settings.dtype,
        "engine_options": options,
        "systems": {},
        "cells": [],
    }


def _measure_all(
    args: argparse.Namespace,
    settings: Settings,
    measured: list[tuple[Geometry, dict[str, Any]]],
    report: dict[str, Any],
) -> None:
    """Fills in the models of ``report``; a system that cannot be started does not keep the others from being measured.

    The ``pytorch`` backend comes first for all models, because vLLM changes transformers' OLMo-2 classes for good.
    """
    from ..bench.cost import Peaks
    from ..bench.report import add_ratios, write_report
    from ..bench.systems import ENGINE, PLAIN, PYTORCH, SAME

    order = [(PYTORCH, number, *model) for number, model in enumerate(measured)]
    order += [(name, number, *model) for number, model in enumerate(measured) for name in (ENGINE, PLAIN, SAME)]
    peaks = Peaks(report["device"]["peak_flops"], report["device"]["peak_bandwidth"])
    with tempfile.TemporaryDirectory(prefix="espnet2_vllm.bench.") as temporary:
        for name, number, geometry, model in order:
            if name not in args.only:
                continue
            folder = Path(temporary) / str(number) if args.scratch is None else args.scratch / Path(geometry.name).name
            options = model["engine_options"]
            try:
                facts, cells = _isolated(measure_system, name, geometry, settings, options, peaks, args.device, folder)
            except EngineError as error:
                log.error("%s of %s: %s", name, geometry.name, error)
                facts, cells = {"error": str(error)}, []
            model["systems"][name] = facts
            model["cells"] += cells
            add_ratios(model["cells"])
            if args.json is not None:
                write_report(args.json, report)


def _isolated[T](function: Callable[..., T], *args: Any) -> T:
    """``function(*args)``, where there is a GPU in a process of its own."""
    import torch

    from ..bench.alone import alone

    return alone(function, *args) if torch.cuda.is_available() else function(*args)


def measure_system(
    name: str,
    geometry: Geometry,
    settings: Settings,
    options: dict[str, Any],
    peaks: Peaks,
    device: str | None,
    scratch: Path,
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Facts of one system, and the cells that it measured.

    Args:
        options: of the engine.
        peaks: of one device.
    """
    from ..bench.measure import Measurement
    from ..bench.systems import free_device, start, stop

    failure = None
    try:
        system, seconds = start(name, geometry, scratch, settings.dtype, options, device)
    except (SpeechLMError, ImportError, RuntimeError, ValueError) as error:
        # vLLM reports a start that failed (too little memory, say) as RuntimeError or ValueError; ImportError: it is not here.
        log.error("%s of %s could not be started: %s", name, geometry.name, error, exc_info=True)
        failure = str(error)
    if failure is not None:
        free_device()  # what it had begun to take
        return {"error": failure}, []
    facts: dict[str, Any] = {"start_s": seconds, "memory": system.memory()}
    log.info("%s of %s started in %.1f s", name, geometry.name, seconds)
    try:
        cells = list(Measurement(system, geometry, settings, peaks.of(system.devices)).cells())
    finally:
        facts["bytes_left_behind"] = stop(system)
    return facts, cells


if __name__ == "__main__":
    insist_on_utf8()
    sys.exit(main())
