"""``espnet2-vllm check``: is a converted directory whole and consistent?"""

import argparse
import sys
from collections.abc import Sequence

from .utf8 import insist_on_utf8


def get_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="espnet2-vllm check",
        description="Verify a converted directory: every tensor's name, shape and dtype, the vocabulary, the tokenizer, the "
        "codec. Prints a line a finding; exit code 1 if one is bad.",
    )
    parser.add_argument("directory", metavar="DIR", help="a directory that espnet2-vllm convert wrote")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0 if everything is as it should be, else 1; 2 for wrong arguments."""
    args = get_parser().parse_args(argv)

    from ..checkpoint.checking import check_directory

    findings = check_directory(args.directory)
    for finding in findings:
        print(f"{'ok  ' if finding.ok else 'BAD '} {finding.what}")
    bad = sum(not finding.ok for finding in findings)
    print(f"{args.directory}: {f'{bad} of {len(findings)} findings are bad' if bad else 'whole and consistent'}")
    return 1 if bad else 0


if __name__ == "__main__":
    insist_on_utf8()
    sys.exit(main())
