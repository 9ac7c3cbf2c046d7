"""``espnet2-vllm COMMAND ...``: every command line of the package under one name."""

import difflib
import importlib
import sys

from espnet2_vllm import __version__
from espnet2_vllm.bin.utf8 import insist_on_utf8
from espnet2_vllm.errors import SpeechLMError

# command: (module with main(argv) -> exit code, what it does)
COMMANDS = {
    "convert": ("espnet2_vllm.bin.convert", "write the directory that vLLM loads from an ESPnet checkpoint"),
    "check": ("espnet2_vllm.bin.check", "verify a converted directory"),
    "chat": ("espnet2_vllm.bin.speechlm_inference_chat", "decode data.json sets with an OpusLM checkpoint"),
    "speechlm": ("espnet2_vllm.bin.speechlm_inference", "the same with the options of ESPnet's older decoder"),
    "inference": ("espnet2_vllm.bin.inference", "decode dataset.json sets with a Bagpiper checkpoint"),
    "describe": ("espnet2_vllm.bin.describe", "say what is in a recording"),
    "render": ("espnet2_vllm.bin.render", "make the sound of a described scene"),
    "prepare-data": ("espnet2_vllm.bin.prepare_data", "make data.json or dataset.json from a Kaldi data directory"),
    "split-data": ("espnet2_vllm.bin.split_data", "split data.json into one part a job"),
    "merge-outputs": ("espnet2_vllm.bin.merge_outputs", "merge what the jobs of one set wrote"),
    "report": ("espnet2_vllm.bin.report", "what became of a set: a table, report.json and report.html"),
    "bench": ("espnet2_vllm.bin.bench", "measure speed against plain-text vLLM and the sequential backend"),
    "compare": ("espnet2_vllm.bin.compare", "compare two result trees, or ids and logits of two backends"),
    "tokenize-audio": ("espnet2_vllm.bin.tokenize_audio", "make OpusLM's token arks of recordings"),
    "score-text": ("espnet2_vllm.bin.score_text", "word and character error rates of decoded text"),
    "score-speech": (
        "espnet2_vllm.bin.score_speech",
        "naturalness of generated speech (UTMOS), where VERSA is installed",
    ),
    "doctor": ("espnet2_vllm.bin.doctor", "what is installed here, which ESPnet is used, and what would not work"),
}


def usage() -> str:
    """The help text."""
    width = max(map(len, COMMANDS))
    lines = [
        "usage: espnet2-vllm COMMAND [OPTIONS]",
        "",
        "Decode ESPnet SpeechLM checkpoints on vLLM.",
        "",
        "commands:",
    ]
    lines += [f"  {name:<{width}}  {summary}" for name, (_, summary) in COMMANDS.items()]
    lines += ["", "espnet2-vllm COMMAND --help shows the options of a command; --version shows the version."]
    return "\n".join(lines)


def unknown_command(name: str) -> str:
    """The message for a ``name`` that is no command, with the nearest one that is."""
    nearest = difflib.get_close_matches(name, COMMANDS, n=1, cutoff=0.5)
    hint = f"did you mean '{nearest[0]}'?" if nearest else f"known commands: {', '.join(COMMANDS)}"
    return f"espnet2-vllm: unknown command '{name}'; {hint}"


def run(name: str, argv: list[str]) -> int:
    """Run command ``name`` with ``argv``; a `SpeechLMError` becomes its message on stderr and its exit code."""
    # argparse names the program after this in usage lines and errors
    sys.argv[0] = f"espnet2-vllm {name}"
    try:
        return importlib.import_module(COMMANDS[name][0]).main(argv)
    except SpeechLMError as error:
        print(f"espnet2-vllm {name}: {error}", file=sys.stderr)
        return error.exit_code
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] in ("", "espnet2_vllm"):
            raise
        print(
            f"espnet2-vllm {name}: the Python package '{error.name}' is not installed in {sys.prefix}; "
            "tools/setup.sh of the repository installs the engine, torch and ESPnet",
            file=sys.stderr,
        )
        return 1


def main(argv: list[str] | None = None) -> int:
    """Entry point of ``espnet2-vllm``. Exit code 2 for a command that does not exist."""
    if argv is None:
        insist_on_utf8()
    argv = sys.argv[1:] if argv is None else argv
    if not argv:
        print(usage(), file=sys.stderr)
        return 2
    name, *rest = argv
    if name in ("-h", "--help", "help"):
        print(usage())
        return 0
    if name == "--version":
        print(f"espnet2-vllm {__version__}")
        return 0
    if name not in COMMANDS:
        print(unknown_command(name), file=sys.stderr)
        return 2
    return run(name, rest)


if __name__ == "__main__":
    sys.exit(main())
