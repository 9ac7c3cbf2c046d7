"""Make a test set's ``data.json`` (OpusLM) or ``dataset.json`` (Bagpiper) from a Kaldi data directory.

Only what a decoder reads is made: targets are what it produces, so a text-to-speech set needs no audio. Tasks whose
conditions are discrete audio take a directory that ``tokenize_audio`` wrote.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from espnet2_vllm.bin.utf8 import insist_on_utf8
from espnet2_vllm.errors import ConfigError, DataError, SpeechLMError, complain
from espnet2_vllm.io.files import whole_file
from espnet2_vllm.io.keyed import read_keyed, sorted_by_key, write_keyed
from espnet2_vllm.prompt.tasks import TASKS as OPUSLM_TASKS


def opuslm_entries(args: argparse.Namespace) -> list[str]:
    """One file an entry of the task's template (``prompt.tasks``): ``text``, and recordings as tokens (`tokenize_audio`).

    The utterances are those of the first condition (of the target, where there is none). Files of targets are references, and
    may be missing. Where speakers are named (``utt2spk``), ``wav.scp`` is what their prompts are taken from.
    """
    task = OPUSLM_TASKS[args.task]
    needed = [entry.name for entry in task.conditions] or [entry.name for entry in task.targets]
    speakers = [entry.name for entry in task.conditions if entry.modality == "spk"]
    tables = {name: _texts(args.data_dir) if name == "text" else _nonempty(args.data_dir / name) for name in needed}
    ids = list(tables[needed[0]])
    for name in needed:
        if absent := [key for key in ids if key not in tables[name]]:
            raise DataError(
                f"{args.data_dir / name}: no line for {len(absent)} utterances of {needed[0]}, the first is {absent[0]!r}"
            )
        # A speaker's other utterances are prompts, so that file is kept whole.
        tables[name] = tables[name] if name in speakers else {key: tables[name][key] for key in ids}
    tokenised = recordings(args.task, args.data_dir)  # others lie there as they are: no references
    for entry in task.targets:
        path = args.data_dir / entry.name
        there = entry.name in tokenised if entry.modality == "codec_ssl" else path.is_file()
        if entry.name not in tables and there:
            records = _nonempty(path)
            tables[entry.name] = records if speakers else {key: records[key] for key in ids if key in records}
    files = []
    for entry in task.entries:
        if entry.name in tables:
            path = args.output_dir / "index_files" / entry.name
            write_keyed(path, tables[entry.name])
            files.append(f"{path},{entry.modality},{entry.kind}")
    _write_data_json(args, files, ids)
    return ids


def opuslm_text_dialogue(args: argparse.Namespace) -> list[str]:
    """One user turn that says the transcript, and the assistant's turn, whose reference is ``answer`` or the transcript."""
    text = _texts(args.data_dir)
    answers = _answers(args.data_dir, text)
    dialogues = {}
    for key, words in sorted_by_key(text):
        turns = [["system", "text_bpe", False, args.system_prompt]] if args.system_prompt else []
        dialogues[key] = [*turns, ["user", "text_bpe", False, words], ["assistant", "text_bpe", True, answers[key]]]
    pack = args.output_dir / "dialogue.json"
    _write_json(pack, dialogues)
    write_keyed(args.output_dir / "index_files" / "dialogue", dict.fromkeys(text, str(pack)))
    _write_data_json(args, [f"{args.output_dir}/index_files/dialogue,dialogue,dialogue_json"], list(text))
    return list(text)


def bagpiper_text_to_audio(args: argparse.Namespace) -> list[str]:
    """The user's text; the assistant's audio is what is decoded."""
    text = _texts(args.data_dir)
    write_keyed(args.output_dir / "text1", text)
    _write_dataset_json(args, [("text1", "text1", "text")], list(text))
    return list(text)


def bagpiper_dialogue(args: argparse.Namespace) -> list[str]:
    """As `opuslm_text_dialogue`; decoding stops reading before the assistant's turn, which is the reference.

    With a question the user lets the recording be heard, from the ``wav.scp`` that stage ``format`` wrote, and asks it. Who has
    none there is in the set all the same: the decoder refuses that utterance, and its outcome says why there is no answer.
    """
    text = _texts(args.data_dir)
    answers = _answers(args.data_dir, text)
    recordings = _nonempty(args.data_dir / "wav.scp") if args.question else {}
    if absent := [key for key in text if args.question and key not in recordings]:
        message = f"{args.data_dir / 'wav.scp'}: no recording for {len(absent)} utterances, the first is {absent[0]!r}"
        if len(absent) == len(text):
            raise DataError(message)
        print(f"prepare_data: {message}; they will be refused", file=sys.stderr)
    with whole_file(args.output_dir / "dialogue.jsonl") as file:
        for key, words in sorted_by_key(text):
            turns = [["system", "text", args.system_prompt]] if args.system_prompt else []
            if args.question:
                turns += [["user", "audio", recordings.get(key, "")], ["user", "text", args.question]]
            else:
                turns.append(["user", "text", words])
            turns.append(["assistant", "text", answers[key]])
            record = {"example_id": key, "messages": turns}
            file.write(json.dumps(record, ensure_ascii=False) + "\n")
    _write_dataset_json(args, [("dialogue", "dialogue.jsonl", "dialogue")], list(text))
    return list(text)


def bagpiper_audio_to_text(args: argparse.Namespace) -> list[str]:
    """The user's audio, from the ``wav.scp`` that stage ``format`` wrote; transcripts, where there are any, as references."""
    recordings = _nonempty(args.data_dir / "wav.scp")
    entries = [("audio1", "audio1.scp", "kaldi_audio")]
    write_keyed(args.output_dir / "audio1.scp", recordings)
    if (args.data_dir / "text").is_file():
        write_keyed(args.output_dir / "text1", read_keyed(args.data_dir / "text"))
        entries.append(("text1", "text1", "text"))
    _write_dataset_json(args, entries, list(recordings))
    return list(recordings)


# Tasks made of text and of recordings as tokens.
_ENTRIES = [
    *("codec_ssl_plain_tts", "codec_ssl_tts", "ag_codecssl", "textlm", "codec_ssl_asr", "aac_codecssl"),
    *("codec_ssl_se", "codec_ssl_tse", "codec_ssl_denoise"),
]

TASKS: dict[str, dict[str, Callable[[argparse.Namespace], list[str]]]] = {
    "opuslm": {
        **dict.fromkeys(_ENTRIES, opuslm_entries),
        "text_dialogue": opuslm_text_dialogue,
    },
    "bagpiper": {
        "text_to_audio": bagpiper_text_to_audio,
        "audio_to_text": bagpiper_audio_to_text,
        "dialogue": bagpiper_dialogue,
    },
}


def recordings(task_name: str, data_dir: Path) -> list[str]:
    """Names of the files of recordings of an OpusLM task: what has to be tokenised. References count where there are any."""
    task = OPUSLM_TASKS[task_name]
    speakers = any(entry.modality == "spk" for entry in task.conditions)
    names = [entry.name for entry in task.conditions if entry.modality == "codec_ssl"]
    targets = [entry.name for entry in task.targets if entry.modality == "codec_ssl"]
    # A reference alone is no reason to need an SSL model.
    return names + [name for name in targets if speakers or (names and (data_dir / name).is_file())]


def _texts(data_dir: Path) -> dict[str, str]:
    """Transcripts of the set. Raises DataError if one is empty: there would be nothing to decode from."""
    text = _nonempty(data_dir / "text")
    if empty := [key for key, words in text.items() if not words]:
        raise DataError(
            f"{data_dir / 'text'}: {len(empty)} of {len(text)} utterances have no words, the first is {empty[0]!r}; "
            "remove these lines"
        )
    return text


def _answers(data_dir: Path, text: Mapping[str, str]) -> Mapping[str, str]:
    path = data_dir / "answer"
    if not path.is_file():
        return text
    answers = read_keyed(path)
    if absent := [key for key in text if key not in answers]:
        raise DataError(f"{path}: no line for {len(absent)} utterances of text, the first is {absent[0]!r}")
    return answers


def _nonempty(path: Path) -> dict[str, str]:
    records = read_keyed(path)
    if not records:
        raise DataError(f"{path}: 0 utterances; expected at least one line")
    return records


def _write_data_json(args: argparse.Namespace, data_files: list[str], ids: list[str]) -> None:
    ids = sorted(ids, key=lambda key: key.encode("utf-8"))
    description = {"task": args.task, "vocabularies": [], "data_files": data_files}
    _write_json(args.output_dir / "data.json", {**description, "num_examples": len(ids), "examples": ids})


def _write_dataset_json(args: argparse.Namespace, entries: list[tuple[str, str, str]], ids: list[str]) -> None:
    folder = args.output_dir.absolute()
    listed = [{"name": name, "path": str(folder / file), "reader": reader} for name, file, reader in entries]
    ids = sorted(ids, key=lambda key: key.encode("utf-8"))
    _write_json(args.output_dir / "dataset.json", {"data_entry": listed, "samples": ids})


def _write_json(path: Path, content: Mapping) -> None:
    with whole_file(path) as file:
        json.dump(content, file, indent=4, ensure_ascii=False)


def get_parser() -> argparse.ArgumentParser:
    known = "; ".join(f"{family}: {', '.join(tasks)}" for family, tasks in TASKS.items())
    parser = argparse.ArgumentParser(prog="prepare_data", description=__doc__)
    parser.add_argument("--family", choices=list(TASKS), required=True)
    parser.add_argument("--task", required=True, help=known)
    parser.add_argument("--data-dir", type=Path, required=True, help="with text, and wav.scp where recordings are read")
    parser.add_argument("--output-dir", type=Path, help="its name is the name of the set")
    show_help = "print the names of the files of recordings that the task needs as tokens, and do nothing else"
    parser.add_argument("--show", choices=["recordings"], help=show_help)
    parser.add_argument("--system-prompt", default="", help="what the system says first in a dialogue")
    question_help = "bagpiper dialogue: what the user asks about each recording, in place of saying the transcript"
    parser.add_argument("--question", default="", help=question_help)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Prints how many utterances the set has. Exit code 1 for data, 2 for options that cannot be used."""
    args = get_parser().parse_args(argv)
    try:
        tasks = TASKS[args.family]
        if args.task not in tasks:
            raise ConfigError(
                f"--task {args.task}: cannot be prepared here for {args.family}; expected one of {', '.join(tasks)}. For other "
                "tasks give the data.json of ESPnet's own stage 5 (recipe: --test_jsons)"
            )
        if args.question and (args.family, args.task) != ("bagpiper", "dialogue"):
            raise ConfigError("--question: recordings are asked about in task dialogue of family bagpiper only")
        if args.show:
            tokenised = args.family == "opuslm" and args.task in _ENTRIES
            print(*(recordings(args.task, args.data_dir) if tokenised else []))
            return 0
        if args.output_dir is None:
            raise ConfigError("--output-dir is needed")
        ids = tasks[args.task](args)
    except (SpeechLMError, OSError) as error:
        return complain("prepare_data", error)
    print(f"{args.output_dir}: {len(ids)} utterances of {args.task}")
    return 0


if __name__ == "__main__":
    insist_on_utf8()
    sys.exit(main())
