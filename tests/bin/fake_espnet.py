#!/usr/bin/env python3
"""Stands in for the Python of an ESPnet tree with a decoder of OpusLM models, which no ESPnet on the registry has.

Writes what that decoder would write, and its command line to ``$FAKE_LOG``. FAKE_LOSE names an utterance that gets no result,
FAKE_CODE is the exit code.
"""

import json
import os
import pathlib
import sys


def main(first, *words):
    if first == "-c":  # which ESPnet it has, and whether the module named last is a command of it
        print(json.dumps(["202511", words[-1].startswith("espnet2.bin.")]))
        return 0
    pathlib.Path(os.environ["FAKE_LOG"]).write_text(json.dumps(words), encoding="utf-8")
    chat(dict(zip(words[1::2], words[2::2], strict=True)))
    return int(os.environ.get("FAKE_CODE", "0"))


def chat(options):
    data = json.loads(pathlib.Path(options["--data_path_and_name_and_type"].split(",")[0]).read_text(encoding="utf-8"))
    keys = [f"{data['task']}_{uid}" for uid in data["examples"] if uid != os.environ.get("FAKE_LOSE")]
    out = pathlib.Path(options["--output_dir"])
    if "dialogue" in data["task"]:
        (out / "dialogue").mkdir(parents=True)
        lists = [json.dumps([{key: [["assistant", "text_bpe", False, "x"]]}]) for key in keys]
        (out / "dialogue" / "dialogue.json").write_text("".join(lists), encoding="utf-8")  # one list a rank, as ESPnet
        return
    (out / "text").mkdir(parents=True)
    (out / "text" / "text").write_text("".join(f"{key}_sample0 word\n" for key in keys), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
