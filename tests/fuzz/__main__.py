"""Plays worlds in processes of their own and keeps the ledger: python -m tests.fuzz --help."""

import argparse
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time

TESTS = pathlib.Path(__file__).resolve().parent.parent
sys.path[:0] = [str(TESTS), str(TESTS / "interpreter")]

from fuzz import ledger  # noqa: E402
from fuzz.groups import NAMES  # noqa: E402

SUMMARY = "summary "
MOST_FAILURES = 5
WORLDS_A_PROCESS = {"cpu": 100, "cuda": 100_000}  # a fresh process now and then; on CUDA engines start slowly


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="tools/fuzz.sh", description="Random worlds on the vllm backend against the pytorch backend."
    )
    how_long = made.add_mutually_exclusive_group()
    how_long.add_argument("--minutes", type=float, help="play new worlds for so long (default 10)")
    how_long.add_argument("--worlds", type=int, help="play so many new worlds")
    how_long.add_argument("--seeds", type=int, nargs=2, metavar=("FIRST", "LAST"), help="play these again")
    how_long.add_argument("--replay", metavar="WORLD", help="play one world, given as JSON")
    how_long.add_argument("--count", action="store_true", help="print the ledger's totals and end")
    how_long.add_argument("--hostile", type=int, metavar="DRAWS", help="read so many damaged files of every kind")
    made.add_argument("--first", type=int, default=0, metavar="SEED", help="of the first draw of --hostile (default 0)")
    how_long.add_argument("--soak", type=int, metavar="REQUESTS", help="half of so many requests are aborted; memory")
    made.add_argument("--runner", choices=["v1", "v2"], help="vLLM's model runner (default: v1 on a CPU, v2 on CUDA)")
    made.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    made.add_argument("--fused", action="store_true", help="V2 on a CPU: kernels by Triton's interpreter")
    made.add_argument("--small", action="store_true", help="small requests (default for V2 on a CPU, which is slow)")
    made.add_argument("--models", nargs="+", metavar="NAME", help="of tests/fuzz/models.py (default: all)")
    made.add_argument("--shrink", type=float, default=120, metavar="SECONDS", help="for making a failing world smaller")
    made.add_argument(
        "--ledger",
        type=pathlib.Path,
        default=ledger.LOCAL,
        metavar="FILE",
        help="what runs add up in, beside tests/fuzz/ledger.jsonl (default: .fuzz/ledger.jsonl)",
    )
    made.add_argument("--no-ledger", action="store_true", help="leave the ledger as it is")
    made.add_argument("--in-process", action="store_true", help=argparse.SUPPRESS)
    return made


def main() -> int:
    args = parser().parse_args()
    for wrong, message in (
        (args.minutes is not None and args.minutes <= 0, "--minutes must be above 0"),
        (args.worlds is not None and args.worlds <= 0, "--worlds must be above 0"),
        (args.soak is not None and args.soak <= 0, "--soak must be above 0"),
        (args.seeds and args.seeds[0] > args.seeds[1], "--seeds: FIRST is above LAST"),
    ):
        if wrong:
            parser().error(message)
    if args.hostile:
        from fuzz import hostile

        return hostile.main(args.first, args.hostile)
    if args.count:
        print(ledger.table(ledger.known(args.ledger)))
        return 0
    args.runner = args.runner or ("v2" if args.device == "cuda" else "v1")
    if args.device == "cuda" and args.runner == "v1":
        parser().error("on CUDA the V2 runner serves")
    args.small = args.small or (args.runner == "v2" and args.device == "cpu")
    if unknown := set(args.models or ()) - set(NAMES):
        parser().error(f"--models {' '.join(sorted(unknown))}: expected some of {', '.join(NAMES)}")
    if args.replay:
        try:
            json.loads(args.replay)
        except json.JSONDecodeError as error:
            parser().error(f"--replay: no JSON: {error}")
    if args.in_process:
        from fuzz import process

        return process.main(args)
    if args.replay or args.soak:
        return _child(args, sys.argv[1:])[0]
    return _campaign(args)


def _campaign(args: argparse.Namespace) -> int:
    """Processes one after the other until the time, the seeds or the worlds are through; the ledger gets a line each."""
    from fuzz.groups import WORLDS_A_DECK, model_groups

    groups = model_groups(args.models, args.runner, args.device)
    deadline = time.monotonic() + 60 * (args.minutes or 10) if not (args.seeds or args.worlds) else float("inf")
    deck = WORLDS_A_DECK["small" if args.small else "usual"]
    first = ledger.next_seed(ledger.known(args.ledger), args.runner, args.device, args.small, deck)
    last = float("inf") if args.worlds is None else first + args.worlds - 1
    if args.seeds:
        first, last = args.seeds
    number, failures, asked = 0, 0, []
    # The process of the worlds is asked to end by the same signal, or is told; its summary is waited for.
    signal.signal(signal.SIGINT, lambda *_: asked.append(True))
    while first <= last and (left := deadline - time.monotonic()) > 0:
        stop = min(last, first // deck * deck + WORLDS_A_PROCESS[args.device] - 1)
        options = ["--seeds", str(first), str(stop), "--models", *groups[number % len(groups)]]
        code, summary = _child(args, _passed(args, options), None if left == float("inf") else left)
        if summary is None:
            print(f"worlds {first} to {stop}: the process ended with {code} and without a summary", flush=True)
            summary = {"seeds": [first, stop], "failures": [{"seed": first, "error": f"exit code {code}"}]}
            summary |= dict.fromkeys(ledger.COUNTED, 0)
        failures += len(summary["failures"])
        if not args.no_ledger and not args.seeds:
            about = {"runner": args.runner, "device": args.device, "fused": args.fused, "small": args.small}
            ledger.append(summary | about | ledger.versions(), args.ledger)
        first, number = summary["seeds"][1] + 1, number + 1
        if failures >= MOST_FAILURES or asked:
            break
    print(f"{failures} failures", flush=True)
    return 1 if failures else 0


def _passed(args: argparse.Namespace, options: list[str]) -> list[str]:
    flags = [f"--{name}" for name in ("fused", "small") if getattr(args, name)]
    return [*options, "--runner", args.runner, "--device", args.device, "--shrink", str(args.shrink), *flags]


def _child(args: argparse.Namespace, options: list[str], seconds: float | None = None) -> tuple[int, dict | None]:
    """Exit code and summary of a process with the environment that the runner needs."""
    with tempfile.TemporaryDirectory() as folder:
        env = os.environ | {"FUZZ_FOLDER": folder, "FUZZ_SECONDS": str(seconds or 1e9)}
        if args.runner == "v2" and args.device == "cpu":
            from environment import interpreted

            env |= interpreted(pathlib.Path(folder))
        env.setdefault("ESPNET2_VLLM_CACHE", str(pathlib.Path(folder) / "conversions"))
        env |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}
        env.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        env.setdefault("OMP_NUM_THREADS", "1")
        if args.device == "cpu":
            env["TORCH_COMPILE_DISABLE"] = "1"  # vLLM compiles its own sampler, which these models do not use
        command = [sys.executable, "-m", "tests.fuzz", "--in-process", *options]
        process = subprocess.Popen(command, env=env, cwd=TESTS.parent, stdout=subprocess.PIPE, text=True)
        summary = None
        for line in process.stdout:
            if line.startswith(SUMMARY):
                summary = json.loads(line.removeprefix(SUMMARY))
            else:
                print(line, end="", flush=True)
        return process.wait(), summary


if __name__ == "__main__":
    sys.exit(main())
