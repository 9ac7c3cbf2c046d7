"""The last lines of run.sh: how many utterances, how long, where the files lie. Exit code 1 if a result is missing."""

import argparse
import json
import sys
from pathlib import Path


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=int, required=True)
    parser.add_argument("results", nargs="+", type=Path, help="<result root>/<task>_<set>")
    args = parser.parse_args()
    directories = args.results
    summaries = [directory / "summary.json" for directory in directories]
    if not any(path.is_file() for path in summaries):
        print(f"no results yet (stage inference has not run): {args.seconds} s")
        return 0
    total, done, failed = 0, 0, False
    print()
    for directory, path in zip(directories, summaries, strict=True):
        if not path.is_file():
            print(f"no results: {directory.absolute()}")
            failed = True
            continue
        summary = json.loads(path.read_text(encoding="utf-8"))
        total += summary["utterances"]
        done += summary["with_results"]
        audio = f", {summary['audio_seconds']:.1f} s of audio" if summary["audio_seconds"] else ""
        print(f"{summary['with_results']} of {summary['utterances']} utterances{audio}: {directory.absolute()}")
    print(
        f"{done} of {total} utterances in {args.seconds} s; the directories above hold text, wav.scp, results.json and wavs"
    )
    return 0 if done == total and not failed else 1


if __name__ == "__main__":
    sys.exit(main())
