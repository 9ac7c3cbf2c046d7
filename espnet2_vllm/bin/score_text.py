"""Word and character error rates of decoded text against the references of its set (stage 10 of the recipe).

Every utterance of the set counts: one without a result counts as an empty hypothesis and is reported, so that a decoder
that lost half of a set cannot look better for it.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from espnet2_vllm.bin.split_data import entries_of, task_of, utterances_of
from espnet2_vllm.bin.utf8 import insist_on_utf8
from espnet2_vllm.errors import ConfigError, DataError, SpeechLMError, complain
from espnet2_vllm.io.data_json import folder_of, read_json
from espnet2_vllm.io.dataset_json import DialogueReader, TextReader
from espnet2_vllm.io.dataset_json import entries_of as dataset_entries
from espnet2_vllm.io.files import whole_file
from espnet2_vllm.io.json_lines import keyed_messages, read_json_values
from espnet2_vllm.io.kaldi import locate
from espnet2_vllm.io.keyed import read_keyed
from espnet2_vllm.reports.collect import collect
from espnet2_vllm.reports.page import write_report

_NAMED = 20  # keys that a line names
_BAGPIPER_AUDIO_TASKS = ("text_to_audio",)


@dataclass(frozen=True)
class Set:
    """One decoded set: where its results lie, its references, and its first hypotheses, by utterance.

    ``ids``: of all utterances of a set of the recipe; ``prefix`` is what their results' keys begin with.
    """

    results: Path
    references: Mapping[str, str]
    hypotheses: Mapping[str, str]
    ids: Sequence[str] = ()
    prefix: str = ""


def load_opuslm(data_json: Path, results_root: Path) -> Set | None:
    """The set of a ``data.json``; None if its results are audio. Raises DataError."""
    description = read_json(data_json)
    task, ids = task_of(data_json, description), utterances_of(data_json, description)
    results = results_root / f"{task}_{_set_name(data_json)}"
    base_dir = folder_of(data_json, description)
    entries = entries_of(data_json, description)
    dialogue = next((entry for entry in entries if entry.kind == "dialogue_json"), None)
    if dialogue is not None:
        references = _dialogue_references(read_keyed(locate(str(dialogue.path), base_dir)), ids, base_dir)
        path = results / "dialogue.json"
        written = {key: turns for records in _results(path) for key, turns in keyed_messages(records, path)}
        hypotheses = {uid: _answer(written.get(f"{task}_{uid}", []), "text_bpe") for uid in ids}
        return Set(results, references, _known(hypotheses), ids, f"{task}_")
    target = entries[-1]
    if target.modality != "text_bpe" or len(entries) < 2:
        return None
    lines = read_keyed(results / target.name)
    hypotheses = {uid: lines.get(f"{task}_{uid}_sample0") for uid in ids}
    references = read_keyed(locate(str(target.path), base_dir))
    references = {uid: references[uid] for uid in ids if uid in references}
    return Set(results, references, _known(hypotheses), ids, f"{task}_")


def _set_name(path: Path) -> str:
    """The name of the set's folder, which its results are named after, also where ``path`` does not say it."""
    return Path(os.path.abspath(path)).parent.name


def _dialogue_references(index: Mapping[str, str], ids: Sequence[str], base_dir: Path) -> dict[str, str]:
    """The last text of the assistant in each dialogue that has one. Raises DataError for a pack that is damaged."""
    packs: dict[str, Mapping[str, Any]] = {}
    references = {}
    for uid in ids:
        if not (name := index.get(uid)):
            continue
        if name not in packs:
            path = locate(name, base_dir)
            packs[name] = dict(keyed_messages(read_json(path), path))
        references[uid] = _answer(packs[name].get(uid, []), "text_bpe")
    return _known(references)


def load_bagpiper(dataset_json: Path, results_root: Path, task: str) -> Set | None:
    """The set of a ``dataset.json``; None if its results are audio or it has no references. Raises DataError."""
    if task in _BAGPIPER_AUDIO_TASKS:
        return None
    description = read_json(dataset_json)
    ids = utterances_of(dataset_json, description)
    results = results_root / f"{task}_{_set_name(dataset_json)}"
    references = _bagpiper_references(dataset_json, description, ids)
    if not references:
        return None
    path = results / "results.json"
    written = {key: turns for records in _results(path) for key, turns in keyed_messages(records, path)}
    hypotheses = {uid: _last(written.get(uid, []), "text") for uid in ids}
    return Set(results, references, _known(hypotheses), ids)


def _bagpiper_references(path: Path, description: Mapping[str, Any], ids: Sequence[str]) -> dict[str, str]:
    """The assistant's first turn of each dialogue, if it is text, or ``text1``. Raises DataError."""
    readers = dataset_entries(description.get("data_entry"), path)
    if "dialogue" in readers:
        dialogues = DialogueReader.open(locate(readers["dialogue"][0], path.parent)).dialogues
        return _known({uid: _last(_first_answer(dialogues.get(uid)), "text") for uid in ids})
    where, reader = readers.get("text1", ("", ""))
    if reader != "text":
        return {}
    table = TextReader.open(locate(where, path.parent)).table
    return {uid: table[uid] for uid in ids if uid in table}


def _first_answer(messages: Any) -> list[list[Any]]:
    """The assistant's first message, in a list; none where there is none, or no conversation."""
    whole = messages if isinstance(messages, list) else []
    return [turn for turn in whole if isinstance(turn, list) and len(turn) == 3 and turn[0] == "assistant"][:1]


def load_files(references: Path, hypotheses: Path, task: str | None) -> Set:
    """Texts of two files: ``id words...``, and the same or ESPnet's ``results.json`` or ``dialogue.json``.

    Ids of results lose the ``<task>_`` in front and the ``_sample0`` behind; further samples are left out. Raises DataError.
    """
    found: dict[str, str | None] = {}
    if hypotheses.suffix == ".json":
        for key, turns in (item for records in _results(hypotheses) for item in keyed_messages(records, hypotheses)):
            found[key] = _answer(turns, "text", "text_bpe")
    else:
        found.update(read_keyed(hypotheses))
    kept = {}
    for key, text in found.items():
        name, sample, number = key.rpartition("_sample")
        if sample and number.isdecimal():
            if int(number):
                continue
            key = name
        kept[key.removeprefix(f"{task}_") if task else key] = text
    return Set(hypotheses.parent, read_keyed(references), _known(kept))


def score(scored: Set) -> dict:
    """Error rates over all references; what is said where a reference is empty counts as inserted.

    Raises ConfigError if jiwer is not installed, DataError.
    """
    try:
        import jiwer
    except ImportError as error:
        raise ConfigError(
            "jiwer is not installed; tools/setup.sh or pip install 'espnet2_vllm[score]' installs it"
        ) from error
    references = scored.references
    spoken = [key for key, text in references.items() if text.strip()]
    if not spoken:
        raise DataError(f"{scored.results}: no reference has words; there is nothing to compare with")
    truth = [references[key] for key in spoken]
    decoded = [scored.hypotheses.get(key, "") for key in spoken]
    # jiwer takes no empty reference.
    silent = [scored.hypotheses.get(key, "").split() for key in references if key not in set(spoken)]
    words, characters = jiwer.process_words(truth, decoded), jiwer.process_characters(truth, decoded)
    return {
        "utterances": len(references),
        "without_result": sorted(key for key in references if key not in scored.hypotheses),
        "without_reference": sorted(key for key in scored.hypotheses if key not in references),
        "wer": _rate(words, sum(map(len, silent))),
        "cer": _rate(characters, sum(len(" ".join(said)) for said in silent)),
        "words": {
            "hits": words.hits,
            "substitutions": words.substitutions,
            "deletions": words.deletions,
            "insertions": words.insertions + sum(map(len, silent)),
        },
    }


def _rate(found: Any, inserted: int) -> float:
    """Errors for each word (or character) of the references. ``inserted``: more, where references are empty."""
    length = found.hits + found.substitutions + found.deletions
    return (found.substitutions + found.deletions + found.insertions + inserted) / length


def update_report(scored: Set, scores: Mapping[str, Any]) -> Path | None:
    """Puts error rates and references into the report that merging has made; None where there is none."""
    if not scored.ids or not (scored.results / "report.json").is_file():
        return None
    title = str(read_json(scored.results / "report.json").get("title") or scored.results.name)
    found = collect([scored.results], title, [scored.prefix + uid for uid in scored.ids])
    made = found.each_once({scored.prefix + uid for uid in scored.ids if uid not in scored.hypotheses})
    references = {scored.prefix + uid: text for uid, text in scored.references.items()}
    return write_report(replace(made, scores=scores, references=references), scored.results)


def _answer(turns: Sequence[Sequence], *modalities: str) -> str | None:
    """The last text of the assistant."""
    return _last([turn for turn in turns if turn[0] == "assistant"], *modalities)


def _last(turns: Sequence[Sequence], *modalities: str) -> str | None:
    """The last text of ``modalities``; None if there is none."""
    texts = [turn[-1] for turn in turns if turn[1] in modalities]
    # Some revisions of ESPnet write a list of hypotheses.
    text = texts[-1] if texts else None
    text = next(iter(text), None) if isinstance(text, list) else text
    return text if isinstance(text, str) else None


def _known(texts: Mapping[str, str | None]) -> dict[str, str]:
    return {key: text for key, text in texts.items() if text is not None}


def _results(path: Path) -> list[Any]:
    try:
        return read_json_values(path)
    except DataError as error:
        raise DataError(f"{error}; has stage inference run?") from error


def get_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="score_text", description=__doc__)
    group = parser.add_argument_group("a set of the recipe")
    group.add_argument("--family", choices=["opuslm", "bagpiper"])
    group.add_argument("--data-json", type=Path, metavar="FILE", help="data.json or dataset.json of the set")
    group.add_argument("--results-root", type=Path, help="directory that holds <task>_<set>/")
    group = parser.add_argument_group("two files")
    group.add_argument("--references", "--ref", type=Path, metavar="FILE", help="id and words, a line each")
    hyp_help = "the same, or results.json or dialogue.json"
    group.add_argument("--hypotheses", "--hyp", type=Path, metavar="FILE", help=hyp_help)
    parser.add_argument(
        "--task", help="task of a dataset.json; with two files what stands before the ids of the results"
    )
    return parser


def _load(args: argparse.Namespace) -> Set | None:
    files = (args.references, args.hypotheses)
    if any(files):
        if not all(files) or args.data_json or args.results_root:
            raise ConfigError("give --references and --hypotheses, or --family, --data-json and --results-root")
        return load_files(*files, args.task)
    missing = [name for name in ("family", "data_json", "results_root") if getattr(args, name) is None]
    if missing:
        raise ConfigError(f"--{missing[0].replace('_', '-')} is missing (or give --references and --hypotheses)")
    if args.family == "opuslm":
        return load_opuslm(args.data_json, args.results_root)
    if not args.task:
        raise ConfigError("--task is needed for --family bagpiper: a dataset.json does not name its task")
    return load_bagpiper(args.data_json, args.results_root, args.task)


def main(argv: Sequence[str] | None = None) -> int:
    """Prints one line and writes ``score.json`` beside the results. Exit code 1 if an utterance has no result."""
    args = get_parser().parse_args(argv)
    try:
        scored = _load(args)
        if scored is None:
            print(f"{args.data_json}: its results are audio, or it has no reference texts: nothing to score")
            return 0
        scores = score(scored)
        with whole_file(scored.results / "score.json") as file:
            json.dump(scores, file, indent=4, ensure_ascii=False)
        page = update_report(scored, scores)
    except (SpeechLMError, OSError) as error:
        return complain("score_text", error)
    print(
        f"{scored.results}: WER {100 * scores['wer']:.2f} %, CER {100 * scores['cer']:.2f} % over {scores['utterances']} "
        f"utterances, {len(scores['without_result'])} of them without a result"
    )
    if page is not None:
        print(f"report: {page}")
    for side in ("without_result", "without_reference"):
        if scores[side]:
            shown = ", ".join(scores[side][:_NAMED]) + (" ..." if len(scores[side]) > _NAMED else "")
            print(f"score_text: {len(scores[side])} {side.replace('_', ' ')}: {shown}", file=sys.stderr)
    return 1 if scores["without_result"] else 0


if __name__ == "__main__":
    insist_on_utf8()
    sys.exit(main())
