"""``espnet2-vllm convert``: from an ESPnet checkpoint to the directory that vLLM loads."""

import argparse
import logging
import sys
from collections.abc import Sequence

from .utf8 import insist_on_utf8


def get_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="espnet2-vllm convert",
        description="Convert an ESPnet SpeechLM checkpoint (OpusLM or Bagpiper) to the directory that vLLM loads.",
        epilog="The family is found by the training yaml. Paths in it count from its folder first, then from the working "
        "directory, then they are hub tags in the local cache; nothing is downloaded.",
    )
    parser.add_argument(
        "src",
        metavar="SRC",
        help="release or experiment folder, a saved step in it, a training yaml, or a model file",
    )
    parser.add_argument("dst", metavar="DST", help="directory to write; an earlier conversion there is replaced")
    parser.add_argument(
        "--model-file",
        "--model_file",
        "--model-checkpoint",
        metavar="FILE",
        help="model file or step folder, if SRC holds several or none",
    )
    parser.add_argument(
        "--train-config", "--train_config", metavar="YAML", help="training yaml, if SRC holds several or none"
    )
    parser.add_argument(
        "--vocab-order",
        "--vocab_order",
        choices=("yaml", "name"),
        default="yaml",
        help="order of the ids in a Bagpiper vocabulary: that of the keys of multimodal_io in the training yaml, or text first and "
        "the others by name, where the keys were sorted later; must agree with vocab_intervals there; default: %(default)s",
    )
    parser.add_argument(
        "--shard-size",
        "--shard_size",
        default="4GB",
        metavar="SIZE",
        help="size of a weight file at most; memory needed is a little more; default: %(default)s",
    )
    parser.add_argument(
        "--dtype",
        choices=("keep", "bfloat16", "float16", "float32"),
        default="keep",
        help="dtype of the language model's weights; keep: as ESPnet loads them; default: %(default)s",
    )
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0; 1 if the checkpoint cannot be converted; 2 for wrong arguments."""
    args = get_parser().parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)

    from ..checkpoint import convert
    from ..checkpoint.conversion import parse_size
    from ..errors import SpeechLMError, complain

    try:
        report = convert(
            args.src,
            args.dst,
            model_file=args.model_file,
            train_config=args.train_config,
            vocab_order=args.vocab_order,
            shard_size=parse_size(args.shard_size),
            dtype=args.dtype,
        )
    except (SpeechLMError, OSError) as error:
        return complain("espnet2-vllm convert", error)
    print("\n".join(report.lines))
    return 0


if __name__ == "__main__":
    insist_on_utf8()
    sys.exit(main())
