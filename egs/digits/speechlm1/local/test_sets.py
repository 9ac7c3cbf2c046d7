"""Sets of OpusLM's tasks as ESPnet's stage 5 writes them, from what the recipe has in memory."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import kaldiio
import numpy as np

from espnet2_vllm.io.keyed import write_keyed
from espnet2_vllm.prompt.tasks import TASKS


def write_opuslm_set(folder: Path, task: str, entries: Mapping[str, Mapping[str, str | np.ndarray]]) -> Path:
    """data.json. ``entries``: by the names of the task's files, for each id a text or codes [T, S] as arks hold them."""
    files, ids = [], []
    for entry in TASKS[task].entries:
        if entry.name not in entries:
            continue
        content, path = entries[entry.name], folder / entry.name
        ids = ids or list(content)
        texts = {key: value for key, value in content.items() if isinstance(value, str)}
        if texts:
            write_keyed(path, texts)
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            with kaldiio.WriteHelper(f"ark,scp:{path}.ark,{path}") as writer:
                for key, codes in content.items():
                    writer(key, codes.flatten())
        files.append(f"{path},{entry.modality},{'text' if texts else 'kaldi_ark'}")
    description = {"task": task, "vocabularies": [], "data_files": files, "num_examples": len(ids), "examples": ids}
    (folder / "data.json").write_text(json.dumps(description, indent=1), encoding="utf-8")
    return folder / "data.json"
