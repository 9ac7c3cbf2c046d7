"""``espnet2-vllm describe``: what is in a recording, in words. ESPnet's ``espnet describe``."""

import argparse
import sys
from collections.abc import Sequence

from ..releases import AUTO, UNDERSTAND_PROMPT
from .asking import add_model_options, answered
from .utf8 import insist_on_utf8


def get_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="espnet2-vllm describe",
        description="Say what is in a recording. Exit code 0, 1 if there is no answer, 2 for wrong options, 130 on Ctrl-C.",
        epilog="espnet2-vllm describe a.wav --brief | espnet2-vllm render - -o again.wav",
    )
    parser.add_argument("audio", help="a recording: wav, flac, mp3, ogg, sph")
    parser.add_argument("--prompt", default=AUTO, help=f"what is asked about it (default: {UNDERSTAND_PROMPT!r})")
    parser.add_argument("--brief", action="store_true", help="leave out what the model thinks before it answers")
    add_model_options(parser)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code."""
    args = get_parser().parse_args(argv)

    from ..assistant import recording
    from ..errors import SpeechLMError
    from ..thinking import split_thinking

    try:
        recording(args.audio)
    except SpeechLMError as error:  # before a model is fetched
        print(f"espnet2-vllm describe: {error}", file=sys.stderr)
        return 1

    def ask(model, out) -> None:
        answer = model.describe(args.audio, args.prompt, seed=args.seed)
        print(split_thinking(answer)[1] if args.brief else answer, file=out)

    return answered("describe", args, ask)


if __name__ == "__main__":
    insist_on_utf8()
    sys.exit(main())
