"""What ``describe`` and ``render`` share: options as of ``espnet describe`` and ``espnet render``, and some beside them."""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import re
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, TextIO

from ..decoding_rules import DTYPES
from ..errors import SpeechLMError
from ..releases import DEFAULT_TAG
from .options import BACKENDS, at_least

if TYPE_CHECKING:
    from ..assistant import Assistant

INTERRUPTED = 130


def add_model_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model", default=DEFAULT_TAG, metavar="TAG|DIR", help=f"tag or folder (default: {DEFAULT_TAG})"
    )
    parser.add_argument(
        "--device",
        type=_device,
        default="auto",
        help="auto, cpu, mps, cuda or cuda:<n>: of codec and encoder, and of the pytorch backend; vllm takes the GPUs that it "
        "sees (CUDA_VISIBLE_DEVICES) (default: auto)",
    )
    parser.add_argument(
        "--server", metavar="URL", help="ask a running server (http://127.0.0.1:9811/v1) in place of --model"
    )
    group = parser.add_argument_group("beside those of ESPnet")
    group.add_argument("--backend", choices=BACKENDS, default="vllm", help="what runs the model (default: vllm)")
    group.add_argument(
        "--dtype", choices=DTYPES, help="of weights (default: the release's, else bfloat16 on a GPU, float32 on a CPU)"
    )
    group.add_argument("--seed", type=at_least(0), help="of the sampling (default: one is drawn)")


def _device(text: str) -> str:
    if text in ("auto", "cpu", "mps", "cuda") or re.fullmatch(r"cuda:\d+", text):
        return text
    raise argparse.ArgumentTypeError(f"unknown device {text!r}: use auto, cpu, mps, cuda or cuda:<n>")


class NothingError(SpeechLMError):
    """There is nothing to ask with, or nothing to write."""


def answered(command: str, args: argparse.Namespace, ask: Callable[[Assistant, TextIO], None]) -> int:
    """Opens the model and has ``ask`` print its answer to the stream it is given; the exit code.

    Standard output is the answer's alone, so that commands can be piped into each other: what libraries print goes to standard
    error.
    """
    try:
        with _own_output() as out, contextlib.ExitStack() as stack:
            ask(_opened(command, args, stack), out)
    except (SpeechLMError, OSError) as error:
        print(f"espnet2-vllm {command}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return INTERRUPTED
    return 0


def _opened(command: str, args: argparse.Namespace, stack: contextlib.ExitStack) -> Assistant:
    from ..pretrained import from_pretrained, from_server

    if args.server is not None:
        return from_server(args.server)
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s")
    print(f"espnet2-vllm {command}: opening {args.model} (converted once) and starting the engine", file=sys.stderr)
    device = None if args.device == "auto" else args.device
    return stack.enter_context(from_pretrained(args.model, device=device, dtype=args.dtype, backend=args.backend))


@contextlib.contextmanager
def _own_output() -> Iterator[TextIO]:
    """The standard output that is there; until the end all else that is written to it goes to standard error."""
    out, place = sys.stdout, None
    with contextlib.suppress(OSError, ValueError, AttributeError):  # a stream without a file, as of a test
        place = out.fileno()
    if place is None:
        with contextlib.redirect_stdout(sys.stderr):
            yield out
        return
    out.flush()
    with os.fdopen(os.dup(place), "w", encoding="utf-8", errors="surrogateescape") as kept:
        try:
            os.dup2(sys.stderr.fileno(), place)
            with contextlib.redirect_stdout(sys.stderr):
                yield kept
            kept.flush()
        finally:
            os.dup2(kept.fileno(), place)
