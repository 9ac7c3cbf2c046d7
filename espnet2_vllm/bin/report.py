"""``espnet2-vllm report``: what became of a decoded set, from the journals of its jobs."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import SpeechLMError, complain
from ..io.journal import FOLDER
from ..reports.collect import collect, text_table, write_run
from ..reports.page import write_report
from .utf8 import insist_on_utf8

if TYPE_CHECKING:
    from .job import Tally

log = logging.getLogger(__name__)


def end_of_run(
    directories: Sequence[Path], tally: Tally, seconds: float, title: str, command: str, keys: Iterable[str]
) -> None:
    """Logs the table of a run, and leaves it with its page in the journal folder of the first of ``directories``."""
    for number, directory in enumerate(directories):
        own = {"rows": tally.rows, "audio_seconds": tally.audio_seconds, "taken_over": tally.taken_over}
        # One engine served them all: its figures stand with the first.
        figures = own if number == 0 else dict.fromkeys(own, 0)
        write_run(directory, seconds=seconds, command=command, **figures)
    report = collect(directories, title, keys)
    page = write_report(report, directories[0] / FOLDER)
    for line in (title, *text_table(report.table()).splitlines()):
        log.info("%s", line)
    log.info("report: %s", page)


def get_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="espnet2-vllm report",
        description="Print the table of a decoded set and write report.json and report.html.",
        epilog="Example: espnet2-vllm report exp/speechlm_x/decode_valid.acc.ave/codec_ssl_tts_test/log/output.*",
    )
    parser.add_argument(
        "directories",
        type=Path,
        nargs="+",
        metavar="DIR",
        help="output directories of a decoder, or folders above them",
    )
    where = "where the two files go (default: the first DIR)"
    parser.add_argument("--output-dir", "--output_dir", type=Path, metavar="DIR", help=where)
    parser.add_argument("--title", help="heading of the page (default: the first DIR)")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 1 if there is no journal, or an utterance has no result; 2 for wrong usage."""
    args = get_parser().parse_args(argv)
    try:
        report = collect(args.directories, args.title or str(args.directories[0]))
        page = write_report(report, args.output_dir or args.directories[0])
    except (SpeechLMError, OSError) as error:
        return complain("espnet2-vllm report", error)
    print(f"{report.title}\n{text_table(report.table())}\nreport: {page}")
    return 1 if report.failures else 0


if __name__ == "__main__":
    insist_on_utf8()
    sys.exit(main())
