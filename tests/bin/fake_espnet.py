#!/usr/bin/env python3
"""Stands in for the Python of a user's ESPnet: writes what its decoders would write, and its command line to ``$FAKE_LOG``.

FAKE_LOSE names an utterance that gets no result, FAKE_CODE is the exit code.
"""

import json
import os
import pathlib
import sys


def main(module, *words):
    pathlib.Path(os.environ["FAKE_LOG"]).write_text(json.dumps([module, *words]), encoding="utf-8")
    options = dict(zip(words[::2], words[1::2], strict=True))
    if module == "espnet2.speechlm.bin.inference":
        inference(options)
    else:
        chat(options)
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


def inference(options):
    task, name, path = options["--test-unregistered-specifier"].split(":")
    keys = [
        uid
        for uid in json.loads(pathlib.Path(path).read_text("utf-8"))["samples"]
        if uid != os.environ.get("FAKE_LOSE")
    ]
    folder = pathlib.Path(options["--output-dir"]) / f"{task}_{name}" / "inference_rank0"
    folder.mkdir(parents=True)
    results = {key: [["assistant", "text", ["word"]]] for key in keys}
    (folder / "results.json").write_text(json.dumps(results), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main(*sys.argv[2:]))
