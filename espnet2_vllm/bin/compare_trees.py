"""``espnet2-vllm compare A B``: two result trees of the same set, key by key."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import SpeechLMError, complain
from .options import at_least
from .utf8 import insist_on_utf8

if TYPE_CHECKING:
    from ..reports.trees import TreeComparison

_SHOWN = 20


def share(text: str) -> float:
    """Type of a number from 0 to 1."""
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"{value} is not from 0 to 1")
    return value


def get_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="espnet2-vllm compare",
        description="Compare two result trees: keys, texts, ids of all streams, waveforms. (With one MODEL in place of two folders "
        "the same requests run on two backends: espnet2-vllm compare MODEL --help.)",
        epilog="Example: espnet2-vllm compare exp/x/decode_espnet/codec_ssl_tts_test exp/x/decode_vllm/codec_ssl_tts_test",
    )
    parser.add_argument("a", type=Path, metavar="A", help="the tree that counts as right")
    parser.add_argument("b", type=Path, metavar="B", help="the other one")
    steps = "samples that are no more 16-bit steps apart are equal (default 2, what ways of rounding make)"
    parser.add_argument("--wav-tolerance", "--wav_tolerance", type=at_least(0), default=2, metavar="STEPS", help=steps)
    most = "exit code 1 if more than this share of the keys differs in anything (default 0)"
    parser.add_argument("--max-differing", "--max_differing", type=share, default=0.0, metavar="SHARE", help=most)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all differences")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0, 1 if the trees differ by more than is allowed or cannot be read, 2 for wrong usage."""
    from ..reports.trees import compare_trees

    args = get_parser().parse_args(argv)
    try:
        comparison = compare_trees(args.a, args.b, wav_tolerance=args.wav_tolerance)
        if args.json is not None:
            _write(args, comparison)
    except (SpeechLMError, OSError) as error:
        return complain("espnet2-vllm compare", error)
    print(summary(comparison))
    return int(comparison.share > args.max_differing)


def summary(comparison: TreeComparison) -> str:
    """The counts, and the first differences."""
    lines = [f"keys         {comparison.keys}, of which {comparison.differing} differ ({comparison.share:.2%})"]
    for kind, (compared, equal) in comparison.counts.items():
        lines.append(f"{kind:<12} {equal} of {compared} equal" if compared else f"{kind:<12} none in both trees")
    lines += [f"{d.key}: {d.kind}: {d.detail}" for d in comparison.differences[:_SHOWN]]
    if len(comparison.differences) > _SHOWN:
        lines.append(f"and {len(comparison.differences) - _SHOWN} more differences (--json FILE has them all)")
    return "\n".join(lines)


def _write(args: argparse.Namespace, comparison: TreeComparison) -> None:
    from ..io.files import whole_file

    content = {
        "format": "espnet2-vllm compare trees",
        "a": str(args.a),
        "b": str(args.b),
        "keys": comparison.keys,
        "differing": comparison.differing,
        "share": comparison.share,
        "compared": {
            kind: {"compared": compared, "equal": equal} for kind, (compared, equal) in comparison.counts.items()
        },
        "differences": [asdict(difference) for difference in comparison.differences],
    }
    with whole_file(args.json) as file:
        json.dump(content, file, indent=1, ensure_ascii=False)
        file.write("\n")


if __name__ == "__main__":
    insist_on_utf8()
    sys.exit(main())
