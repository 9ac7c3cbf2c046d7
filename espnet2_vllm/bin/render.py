"""``espnet2-vllm render``: the sound of a described scene. ESPnet's ``espnet render``."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from .asking import NothingError, add_model_options, answered
from .utf8 import insist_on_utf8


def get_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="espnet2-vllm render",
        description="Make the sound of a described scene; prints the text that the model wrote, writes a wav file. Exit code 0, 1 "
        "if no sound came, 2 for wrong options, 130 on Ctrl-C.",
        epilog="espnet2-vllm render \"A calm male voice says: 'good morning'. No background noise.\" -o morning.wav",
    )
    parser.add_argument("scene", help="the description, with spoken words in quotes; - reads it from standard input")
    parser.add_argument("-o", "--output", default="rendered.wav", help="wav file (default: rendered.wav)")
    parser.add_argument(
        "--cfg",
        type=float,
        help="scale of guidance of the sound; 1 is none (default: the release's, 3 if it says nothing)",
    )
    add_model_options(parser)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code."""
    args = get_parser().parse_args(argv)

    from ..decoding_choice import Decoding

    output = Path(args.output)
    scene = sys.stdin.read().strip() if args.scene == "-" else args.scene
    problem = None
    if not output.absolute().parent.is_dir():
        problem = f"{output}: there is no folder {output.absolute().parent}"
    elif output.is_dir():
        problem = f"{output} is a folder; name a file"
    elif args.scene == "-" and not scene:
        problem = "nothing on standard input to render"
    if problem is not None:  # before a model is fetched
        print(f"espnet2-vllm render: {problem}", file=sys.stderr)
        return 1

    def ask(model, out) -> None:
        audio, text = model.render(scene, decoding=Decoding(cfg=args.cfg), seed=args.seed)
        print(text, file=out, flush=True)
        if audio is None:
            raise NothingError(
                "the model answered with text and no sound. It makes the sound of a scene that is described, and reads nothing "
                "out: describe what is to be heard, with spoken words in quotes"
            )
        output.write_bytes(audio)
        print(f"wrote {output}", file=sys.stderr)

    return answered("render", args, ask)


if __name__ == "__main__":
    insist_on_utf8()
    sys.exit(main())
