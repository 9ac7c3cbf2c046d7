"""What one process of the fuzzer does: a range of worlds, one world, or a soak."""

import argparse
import json
import os
import pathlib

from . import soak
from .groups import NAMES
from .running import Bench, Interrupted, Place, Report, run
from .world import SETTINGS, World, draw

SETTINGS_ON_CUDA = ("async-16", "sync-32")


def main(args: argparse.Namespace) -> int:
    place = Place(args.runner, args.device, args.fused)
    bench = Bench(place, pathlib.Path(os.environ["FUZZ_FOLDER"]))
    if args.soak:
        return soak.main(bench, args.soak)
    if args.replay:
        world = World.from_json(args.replay)
        report = run(bench, [world], shrinking=0)
        return _told(report, [world.seed, world.seed])
    first, last = args.seeds
    settings = SETTINGS_ON_CUDA if args.device == "cuda" else SETTINGS
    scale = "small" if args.small else "usual"
    worlds = (draw(seed, args.models or NAMES, scale, settings) for seed in range(first, last + 1))
    seconds = float(os.environ["FUZZ_SECONDS"])
    report = run(bench, worlds, seconds=seconds, shrinking=args.shrink, interrupted=Interrupted())
    return _told(report, [first, first - 1 if report.last is None else report.last])


def _told(report: Report, seeds: list[int]) -> int:
    summary = {"seeds": seeds, "models": sorted(report.models), **report.counts, "failures": report.failures}
    for key in ("worlds", "requests", "aborted", "guided", "preempted", "rows"):
        summary.setdefault(key, 0)
    print("summary " + json.dumps(summary), flush=True)
    return 1 if report.failures else 0
