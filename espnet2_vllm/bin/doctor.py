"""``espnet2-vllm doctor``: what is installed here, and what would not work."""

import argparse
import contextlib
import io
import json
import logging
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict

from .utf8 import insist_on_utf8


def get_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="espnet2-vllm doctor",
        description="What is installed here: versions, folders, which ESPnet is imported, engine and devices; and what would not "
        "work, with the remedy. Exit code 1 for a fault; what not everybody needs is a note.",
    )
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0 if nothing that everybody needs is at fault, else 1; 2 for wrong arguments."""
    args = get_parser().parse_args(argv)

    # Libraries say much as they are imported, on both streams; what matters of it becomes a finding.
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    logging.captureWarnings(True)
    from ..diagnosis import examine

    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        findings = examine()
    faults = [finding for finding in findings if finding.state == "fault"]
    if args.json:
        print(json.dumps({"ok": not faults, "findings": [asdict(finding) for finding in findings]}, indent=2))
        return 1 if faults else 0
    width = max(len(finding.what) for finding in findings)
    said = None
    for finding in findings:
        mark = {"ok": "  ", "note": "- ", "fault": "! "}[finding.state]
        print(f"{mark}{finding.what if finding.what != said else '':<{width}}  {finding.found}")
        said = finding.what
        if finding.remedy:
            print(f"  {'':<{width}}    what to do: {finding.remedy}")
    print(f"\n{len(faults)} faults" if faults else "\nall that everybody needs is there")
    return 1 if faults else 0


if __name__ == "__main__":
    insist_on_utf8()
    sys.exit(main())
