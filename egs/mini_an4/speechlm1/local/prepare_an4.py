"""Kaldi data directories from the AN4 tree: ``prepare_an4.py downloads/an4 data``."""

import re
import sys
from pathlib import Path

SETS = {"train": "an4_train", "test": "an4_test"}
# "<s> WORDS </s> (id)"; the marks are absent in the test set
TRANSCRIPT = re.compile(r"(?:<s> )?(.+?)(?: </s>)? \((\S+)\)")


def read_set(corpus: Path, name: str) -> dict[str, tuple[str, str, str]]:
    """{utterance: (speaker, words, recording)} of ``an4_train`` or ``an4_test``.

    Ids begin with the speaker, as Kaldi's sorting wants: an251-fash-b becomes fash-an251-b.
    """
    recordings = {
        Path(line).name: corpus / "wav" / f"{line}.sph" for line in read_lines(corpus / "etc" / f"{name}.fileids")
    }
    utterances = {}
    for line in read_lines(corpus / "etc" / f"{name}.transcription"):
        matched = TRANSCRIPT.fullmatch(line)
        if matched is None or matched[2] not in recordings:
            raise SystemExit(f"{name}.transcription: cannot be used: {line!r}")
        before, speaker, after = matched[2].split("-")
        utterances[f"{speaker}-{before}-{after}"] = (speaker, matched[1].lower(), str(recordings[matched[2]]))
    return utterances


def read_lines(path: Path) -> list[str]:
    return [line.strip() for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]


def write_set(directory: Path, utterances: dict[str, tuple[str, str, str]]) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    for column, name in enumerate(("utt2spk", "text", "wav.scp")):
        lines = (f"{key} {utterances[key][column]}\n" for key in sorted(utterances))
        (directory / name).write_text("".join(lines), encoding="utf-8")
    print(f"{directory}: {len(utterances)} utterances")


def main() -> None:
    corpus, data = map(Path, sys.argv[1:])
    sets = {name: read_set(corpus, prefix) for name, prefix in SETS.items()}
    sets["all"] = {key: value for utterances in sets.values() for key, value in utterances.items()}
    for name, utterances in sets.items():
        write_set(data / name, utterances)


if __name__ == "__main__":
    main()
