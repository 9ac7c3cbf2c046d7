#!/usr/bin/env python3
"""Stands in for ``--python`` of the recipe: answers the two decoders in their place, and is Python for everything else.

Writes what the decoders would write for their utterances; FAKE_LOSE names one that gets no result.
"""

import json
import os
import pathlib
import sys

DECODERS = ("espnet2_vllm.bin.speechlm_inference_chat", "espnet2_vllm.bin.inference")


def options_of(words):
    return {word: words[index + 1] for index, word in enumerate(words[:-1]) if word.startswith("--")}


def chat(options):
    data = json.loads(pathlib.Path(options["--data_path_and_name_and_type"].split(",")[0]).read_text(encoding="utf-8"))
    output = pathlib.Path(options["--output_dir"])
    for path in ("--model_file", "--train_config", "--inference_config_file"):
        assert pathlib.Path(options[path]).is_file(), options[path]
    keys = [f"{data['task']}_{utt}" for utt in data["examples"] if utt != os.environ.get("FAKE_LOSE")]
    if "dialogue" in data["task"]:
        (output / "dialogue").mkdir(parents=True, exist_ok=True)
        records = [{key: [["assistant", "text_bpe", False, f"{options['--backend']} answers"]]} for key in keys]
        (output / "dialogue" / "dialogue.json").write_text(json.dumps(records), encoding="utf-8")
    else:
        (output / "wav.scp").mkdir(parents=True, exist_ok=True)
        samples = [f"{key}_sample{k}" for key in keys for k in range(int(options["--nbest"]))]
        for name in ("wav.scp", "wav.scp_token.scp"):
            lines = (f"{sample} {output}/wav.scp/{sample}.wav\n" for sample in samples)
            (output / "wav.scp" / name).write_text("".join(lines), encoding="utf-8")
    return int(len(keys) < len(data["examples"]))


def _sets(words):
    """The data sets of a command line."""
    from espnet2_vllm.io.specifiers import parse_specifiers

    kinds = ("--test-unregistered-specifier", "--test-registered-specifier")
    texts = {kind: [b for a, b in zip(words, words[1:], strict=False) if a == kind] for kind in kinds}
    return [one for kind in kinds if texts[kind] for one in parse_specifiers(texts[kind], registered=kind == kinds[1])]


def inference(options, words):
    workers = int(options["--num-workers"])
    first, world = (int(options["--rank"]) - 1) * workers, int(options["--world-size"]) * workers
    lost = False
    for found in _sets(words):
        samples = json.loads(found.path.read_text(encoding="utf-8"))["samples"]
        for rank in range(first, first + workers):
            ids = samples[rank::world]
            kept = [utt for utt in ids if utt != os.environ.get("FAKE_LOSE")]
            folder = pathlib.Path(options["--output-dir"]) / f"{found.task}_{found.name}" / f"inference_rank{rank}"
            folder.mkdir(parents=True, exist_ok=True)
            results = {utt: [["assistant", "text", f"{options['--backend']} answers"]] for utt in kept}
            (folder / "results.json").write_text(json.dumps(results), encoding="utf-8")
            lost = lost or len(kept) < len(ids)
    return int(lost)


if __name__ == "__main__":
    if sys.argv[1:2] == ["-m"] and sys.argv[2] in DECODERS:
        print("fake decoder:", *sys.argv[3:])
        given = options_of(sys.argv[3:])
        sys.exit(chat(given) if sys.argv[2] == DECODERS[0] else inference(given, sys.argv[3:]))
    os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
