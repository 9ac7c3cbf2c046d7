"""Replays recorded cases through the public interface: ``python tests/replay_golden.py MODEL_DIR CASES_DIR --backend vllm``.

Prints a line a case, then how many are exact. Exit code 0 if all are, 1 if one differs, 2 for a usage error.
"""

import argparse
import logging
import os
import pathlib
import sys

import yaml

# As in conftest.py: the engine in this process, on a CPU with a small cache, nothing downloaded.
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

sys.path[:0] = [str(pathlib.Path(__file__).resolve().parent), str(pathlib.Path(__file__).resolve().parent.parent)]

from espnet2_vllm.backends import BACKENDS, DTYPES  # noqa: E402
from espnet2_vllm.errors import ConfigError, SpeechLMError  # noqa: E402


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(
        description="Replay recorded cases through the public interface and compare exactly."
    )
    result.add_argument("model_dir", type=pathlib.Path, help="a recorded model, in ESPnet's own layout")
    result.add_argument("cases_dir", type=pathlib.Path, help="a folder of <case>.json and <case>.npz")
    result.add_argument("--backend", choices=BACKENDS, default="vllm")
    result.add_argument("--logits", action="store_true", help="compare raw logits too (tolerance 1e-3)")
    result.add_argument(
        "--stream", action="store_true", help="decode by streaming; what is heard must be the codec's whole decode"
    )
    result.add_argument("--only", metavar="PATTERN", default="*", help="cases whose name matches or holds PATTERN")
    result.add_argument("--dtype", choices=DTYPES, default="float32")
    result.add_argument(
        "--engine-option",
        metavar="NAME=VALUE",
        action="append",
        default=[],
        help="keyword argument of the engine; repeatable",
    )
    return result


def engine_options(pairs: list[str]) -> dict:
    options = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not (name and equals):
            raise ConfigError(f"--engine-option {pair!r}: expected NAME=VALUE")
        options[name.replace("-", "_")] = yaml.safe_load(value)
    return options


def main(argv: list[str] | None = None) -> int:
    args = parser().parse_args(argv)
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    try:
        return run(args)
    except SpeechLMError as error:
        print(f"replay_golden: {error}", file=sys.stderr)
        return error.exit_code


def run(args: argparse.Namespace) -> int:
    from golden_cases import DIFFERS, Model, case_files, replay, summary

    for directory in (args.model_dir, args.cases_dir):
        if not directory.is_dir():
            raise ConfigError(f"no such folder: {directory}")
    paths = case_files(args.cases_dir, args.only)
    if not paths:
        raise ConfigError(f"{args.cases_dir}: no case (<name>.json with <name>.npz) matches {args.only!r}")
    options = engine_options(args.engine_option)
    if args.stream:
        if args.logits:
            raise ConfigError("--stream and --logits: rows that are streamed come without logits")
        from streamed import StreamedModel as Model
    model = Model(args.model_dir, args.backend, compare_logits=args.logits, dtype=args.dtype, **options)
    verdicts = []
    try:
        for path in paths:
            verdicts.append(replay(model, path))
            print(verdicts[-1], flush=True)
    finally:
        model.engine.close()
    print(summary(verdicts))
    if args.stream:
        print(f"{model.heard} audio segments were heard as they came")
    return int(any(v.verdict == DIFFERS for v in verdicts))


if __name__ == "__main__":
    sys.exit(main())
