"""The recipe's test utterances as the sets that the command lines of both families take."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import kaldiio
from lm_rows import Spoken, spliced

from espnet2_vllm.layout import Layout


def write_bagpiper_set(folder: Path, utterances: Sequence[Spoken], scp: dict[str, str], *, listen: bool) -> Path:
    """dataset.json of text_to_audio (``text1``) or audio_to_text (``audio1``). ``scp``: id -> recording."""
    folder.mkdir(parents=True, exist_ok=True)
    name = "audio1" if listen else "text1"
    lines = [f"{one.uid} {scp[one.uid] if listen else one.text}\n" for one in utterances]
    (folder / name).write_text("".join(lines), encoding="utf-8")
    entry = {"name": name, "path": str(folder / name), "reader": "kaldi_audio" if listen else "text"}
    content = {"data_entry": [entry], "samples": [one.uid for one in utterances]}
    (folder / "dataset.json").write_text(json.dumps(content, indent=1), encoding="utf-8")
    return folder / "dataset.json"


def write_opuslm_set(
    folder: Path, utterances: Sequence[Spoken], layout: Layout, *, voice: Spoken | None = None
) -> Path:
    """data.json of codec_ssl_asr, or with the recording of a ``voice`` that is asked for, of codec_ssl_tts."""
    folder.mkdir(parents=True, exist_ok=True)
    task = "codec_ssl_asr" if voice is None else "codec_ssl_tts"
    files = {"text": ("text_bpe", "text"), "wav.scp": ("codec_ssl", "kaldi_ark")}
    if voice is not None:
        files = {"text": ("text_bpe", "text"), "utt2spk": ("spk", "kaldi_ark"), "wav.scp": ("codec_ssl", "kaldi_ark")}
    (folder / "text").write_text("".join(f"{one.uid} {one.text}\n" for one in utterances), encoding="utf-8")
    arks = {"wav.scp": utterances} if voice is None else {"wav.scp": utterances, "utt2spk": [voice] * len(utterances)}
    for name, spoken in arks.items():
        with kaldiio.WriteHelper(f"ark,scp:{folder / name}.ark,{folder / name}") as writer:
            for key, one in zip(utterances, spoken, strict=True):
                writer(key.uid, spliced(layout, one).flatten())
    content = {
        "task": task,
        "vocabularies": [],
        "data_files": [f"{folder / name},{modality},{kind}" for name, (modality, kind) in files.items()],
        "num_examples": len(utterances),
        "examples": [one.uid for one in utterances],
    }
    (folder / "data.json").write_text(json.dumps(content, indent=1), encoding="utf-8")
    return folder / "data.json"
