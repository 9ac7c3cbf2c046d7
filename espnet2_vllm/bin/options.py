"""Options that the decoding command lines share: backend, engine, journal, logging."""

from __future__ import annotations

import argparse
import contextlib
import logging
import shlex
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from ..audio_format import BITS, FORMATS
from ..engine.quantized import PRECISIONS
from ..errors import ConfigError, SpeechLMError
from ..logs import set_up_logging

log = logging.getLogger(__name__)

BACKENDS = ("vllm", "pytorch")
ESPNET = "espnet"  # no engine: another program
# Options of their own for the settings of vLLM that people change most; the rest goes through --engine_option.
_ENGINE_OPTIONS = (
    "max_num_seqs",
    "gpu_memory_utilization",
    "max_model_len",
    "enforce_eager",
    "precision",
    "kv_cache_precision",
    "tensor_parallel_size",
    "data_parallel_size",
)
_NOT_GIVEN = object()
RANDOM_SEED = "random"
CODEC_SHARE_HELP = (
    "Part of the device that the codec takes while the engine is at work on it, as 0.1: it rests between the layers of its "
    "decoder, unless many clips wait; less disturbs the engine less, and sound comes later; 1 is the whole device"
)
CODEC_TF32_HELP = "A codec on a GPU multiplies in TF32: faster, and less exact (ten bits of mantissa)"
SEED_HELP = "Random seed; 'random' draws one and logs it (a run that goes on keeps the one that it began with)"


def flag(text: str) -> bool:
    """``true``/``false`` as ESPnet's ``str2bool`` takes them."""
    value = text.lower()
    if value in ("true", "yes", "y", "on", "1"):
        return True
    if value in ("false", "no", "n", "off", "0"):
        return False
    raise argparse.ArgumentTypeError(f"{text!r} is neither true nor false")


class Repeated(argparse.Action):
    """An option that may come several times: a list of its values."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        earlier = getattr(namespace, self.dest, None)
        setattr(namespace, self.dest, [*(earlier if isinstance(earlier, list) else ()), values])


def at_least(least: int) -> Any:
    """Type of a whole number that is not below ``least``."""

    def whole(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None
        if value < least:
            raise argparse.ArgumentTypeError(f"{value} is below {least}")
        return value

    return whole


def seed(text: str) -> int | str:
    """Type of a seed: a whole number that is not below 0, or ``random``."""
    return text if text == RANDOM_SEED else at_least(0)(text)


def share(text: str) -> float:
    """Type of a number above 0 and up to 1."""
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"{value} is not above 0 and up to 1")
    return value


def positive(text: str) -> float:
    """Type of a finite number above 0."""
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{value} is not above 0 and finite")
    return value


def codec_share(text: str) -> Any:
    """Type of a ``codec.share.Share``."""
    from ..codec.share import Share

    try:
        return Share.parse(text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def add(group: Any, name: str, **settings: Any) -> None:
    """Adds ``--name``, spelled with ``-`` or ``_``; the first spelling is the one that the help shows."""
    names = list(dict.fromkeys([f"--{name}", f"--{name.replace('-', '_')}", f"--{name.replace('_', '-')}"]))
    group.add_argument(*names, **settings)


def add_decoding_options(parser: argparse.ArgumentParser, style: str = "_") -> None:
    """Adds what ESPnet's command lines do not have. ``style``: ``_`` or ``-``, how the help spells names."""

    def option(name: str, **settings: Any) -> None:
        add(group, name.replace("_", style), **settings)

    group = parser.add_argument_group("backend")
    backends = (*BACKENDS, ESPNET)
    option("backend", choices=backends, default="vllm", help="What runs the model; espnet is ESPnet's own decoder")
    option("espnet_python", help="espnet: its Python (default: the variable ESPNET_PYTHON, or this Python)")
    option(
        "vocab_order",
        choices=("yaml", "name"),
        default="yaml",
        help="Order of a Bagpiper vocabulary: that of the keys of multimodal_io in the training yaml, or text first and the others "
        "by name; must agree with vocab_intervals there",
    )
    option(
        "device", help="Device of the pytorch backend and of the codec; by default the GPU where there is one to use"
    )
    add_engine_options(option)
    option("in_flight", type=at_least(1), default=1024, help="Utterances handed to an engine at once, at most")
    group = parser.add_argument_group("recordings")
    add_reading_options(option)
    group = parser.add_argument_group("scores")
    option(
        "write_scores",
        type=flag,
        nargs="?",
        const=True,
        default=False,
        help="Write the log-probability of every generated id of every stream, after mask, guidance, top-k, temperature and top-p: "
        ".scores/<key>.npz in the output directory (in each rank's folder), read with numpy.load. Arrays of N rows and S streams: "
        "ids [N,S] as emitted (delayed), logprobs [N,S] (natural logarithm), forced [N,S] (True: imposed, no choice; its "
        "log-probability is 0), segment [N], hypothesis [N]",
    )
    group = parser.add_argument_group("sound")
    option(
        "audio_format", choices=FORMATS, default="wav", help="Of generated sound: files, or Kaldi arks named ark:byte"
    )
    option("audio_bits", choices=BITS, default="16", help="Of a sample; float only in wav")
    option("codec_share", type=codec_share, default="1", metavar="SHARE", help=CODEC_SHARE_HELP)
    option("codec_tf32", type=flag, nargs="?", const=True, default=False, help=CODEC_TF32_HELP)
    group = parser.add_argument_group("journal")
    option("resume", type=flag, nargs="?", const=True, default=True, help="Go on where an earlier run stopped")
    option("no_resume", dest="resume", action="store_false", help="Decode everything anew")
    option("overwrite", dest="resume", action="store_false", help="The same: begin anew whatever an earlier run left")


COMMANDS_HELP = (
    "Names of recordings that end in | are run by the shell: those of Kaldi files and Lhotse manifests (scp), those in "
    "conversations too (allow), or none (refuse). OpusLM's data.json has none that is run"
)


def add_reading_options(option: Callable[..., None]) -> None:
    """Adds what ``reading_options`` reads. ``option`` takes a name and the settings of ``add_argument``."""
    option("commands", choices=("scp", "allow", "refuse"), default="scp", help=COMMANDS_HELP)
    option("command_seconds", type=positive, default=600.0, help="That a command may take before it is killed")
    option("command_megabytes", type=positive, default=2048.0, help="That a command may write")
    samples_help = "Of one recording that are taken (of one channel), at most; longer ones are refused"
    option("max_audio_samples", type=at_least(1), default=2**27, help=samples_help)


def check_commands_of_espnet(args: argparse.Namespace) -> None:
    """ConfigError if commands are to be refused in a program that has no such setting."""
    if args.commands == "refuse":
        raise ConfigError("--commands refuse: ESPnet's own decoder runs commands all the same; give another --backend")


def reading_options(args: argparse.Namespace, notes: Any = None) -> Any:
    """The ``audio.Reading`` of these options; ``notes`` counts recordings of which not everything was taken."""
    from ..audio.reading import reading_of

    names = ("command_seconds", "command_megabytes", "max_audio_samples")
    return reading_of(args.commands, channel="first", notes=notes, **{name: getattr(args, name) for name in names})


def add_engine_options(option: Callable[..., None]) -> None:
    """Adds what ``engine_options`` reads. ``option`` takes a name and the settings of ``add_argument``."""
    option("max_num_seqs", type=at_least(1), help="vllm: requests in one step at most")
    option("gpu_memory_utilization", type=share, help="vllm: share of the GPU's memory")
    option("max_model_len", type=at_least(2), help="vllm: rows of a sequence at most, prompt included")
    option("enforce_eager", type=flag, nargs="?", const=True, help="vllm: no CUDA graphs")
    fp8 = {
        "choices": PRECISIONS,
        "help": "vllm on a GPU: of the layers' weights, quantised as they are loaded (faster)",
    }
    option("precision", **fp8)
    option("kv_cache_precision", **{**fp8, "help": "vllm on a GPU: of the cache, of which twice as much fits"})
    option("tensor_parallel_size", type=at_least(1), help="vllm: GPUs that one model is spread over")
    option("data_parallel_size", type=at_least(1), help="vllm: engines that share the utterances, each on its own GPUs")
    option("engine_option", action="append", default=[], metavar="NAME=VALUE", help="Any other option of the engine")


def engine_options(args: argparse.Namespace) -> dict[str, Any]:
    """Keyword arguments of the engine: those that were given.

    Raises:
        ConfigError: for an ``--engine_option`` that is not NAME=VALUE, or comes twice.
    """
    from ..safe_yaml import parse_yaml

    options = {name: getattr(args, name) for name in _ENGINE_OPTIONS if getattr(args, name) is not None}
    for pair in args.engine_option:
        name, equals, value = pair.partition("=")
        if not equals or not name.isidentifier():
            raise ConfigError(f"--engine_option {pair!r}: expected NAME=VALUE, as in max_num_batched_tokens=8192")
        if name in options:
            raise ConfigError(f"--engine_option {pair!r}: {name} is given twice")
        options[name] = parse_yaml(value, f"--engine_option {pair!r}: the value", ConfigError)
    for name in ("tensor_parallel_size", "data_parallel_size"):
        if not isinstance(size := options.get(name, 1), int) or size < 1:
            raise ConfigError(f"--engine_option {name}={size}: expected a whole number of at least 1")
    return options


def gpus_wanted(args: argparse.Namespace) -> int:
    """GPUs that the engines of these options take."""
    options = engine_options(args)
    return options.get("tensor_parallel_size", 1) * options.get("data_parallel_size", 1)


def gpus_of_run(args: argparse.Namespace) -> int:
    """GPUs that engines and codec take; the codec has one of its own where ``--device`` names one behind the engines'."""
    kind, _, index = (args.device or "").partition(":")
    return max(gpus_wanted(args), int(index) + 1 if kind == "cuda" and index.isdigit() else 1)


def in_flight(args: argparse.Namespace) -> int:
    """Utterances handed to all engines at once, at most."""
    return args.in_flight * engine_options(args).get("data_parallel_size", 1)


def parse_with_given(
    parser: argparse.ArgumentParser, argv: Sequence[str] | None
) -> tuple[argparse.Namespace, frozenset[str]]:
    """The arguments, and the names of those that stood on the command line."""
    args = parser.parse_args(argv)
    blank = argparse.Namespace(**dict.fromkeys(vars(args), _NOT_GIVEN))
    # An option with action "append" would be appended to the mark.
    blank.engine_option = []
    seen = vars(parser.parse_args(argv, blank))
    return args, frozenset(name for name, value in seen.items() if value is not _NOT_GIVEN)


def run_command(
    parser: argparse.ArgumentParser,
    run: Callable[[argparse.Namespace, frozenset[str]], int],
    argv: Sequence[str] | None,
) -> int:
    """Runs a command line: logging, and an exit code for everything that can be said in a sentence.

    Args:
        run: takes the arguments and the names of those that were given; returns the exit code.
    """
    args, given = parse_with_given(parser, argv)
    set_up_logging(args.log_level)
    args.command = f"{parser.prog} {shlex.join(sys.argv[1:] if argv is None else argv)}"
    log.info("command: %s", args.command)
    with _heeding_signals():
        try:
            return run(args, given)
        except SpeechLMError as error:
            log.error("%s", error)
            return error.exit_code
        except ModuleNotFoundError as error:
            if (error.name or "").partition(".")[0] in ("", "espnet2_vllm"):
                raise
            log.error(
                "the Python package %s is not installed in %s; tools/setup.sh installs it", error.name, sys.prefix
            )
            return 1
        except OSError as error:
            # Output that cannot be written: no permission, no space, no such place.
            log.error("%s", error, exc_info=log.isEnabledFor(logging.DEBUG))
            return 1
        except KeyboardInterrupt as error:
            number = signal.SIGTERM if isinstance(error, TerminatedError) else signal.SIGINT
            log.error("%s; what was finished is in the journal, the same command goes on from there", number.name)
            return 128 + number


class TerminatedError(KeyboardInterrupt):
    """SIGTERM, which batch systems send before they kill: ends the work in order, as Ctrl-C does."""


@contextlib.contextmanager
def _heeding_signals() -> Iterator[None]:
    """Within the block SIGINT or SIGTERM ends the work in order, and the same one again the process at once.

    A launcher sends both of them where it was interrupted itself; the first says what it was.
    """
    came: list[int] = []

    def end(number: int, frame: Any) -> None:
        came.append(number)
        if len(came) == 1:
            raise TerminatedError if number == signal.SIGTERM else KeyboardInterrupt
        if came.count(number) > 1:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)

    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may handle signals
        return
    # A shell's background jobs do not listen to SIGINT, and neither does what they start.
    heeded = [n for n in (signal.SIGINT, signal.SIGTERM) if signal.getsignal(n) is not signal.SIG_IGN]
    before = {number: signal.signal(number, end) for number in heeded}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def choose_device(wanted: str | None, *, gpu: bool) -> str:
    """A torch device: ``wanted``, or the GPU if ``gpu`` and there is one, or the CPU.

    Raises:
        ConfigError: if ``wanted`` is no device of this machine.
    """
    import torch

    if wanted is None:
        return "cuda" if gpu and torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(wanted)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(f"--device {wanted}: torch cannot use it here: {str(error).splitlines()[0]}") from error
    return str(device)
