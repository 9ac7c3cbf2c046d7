"""Whole result trees of the ESPnet that is installed and of ours, made by the same command lines in two places."""

import importlib.metadata
import json

import pytest
from conftest import golden_models
from trees import assert_same_tree, result_files

from espnet2_vllm.bin import inference

MODEL = next(model for model in golden_models("bagpiper") if not (model / "Qwen").exists())
GREEDY = {
    "dtype": "float32",
    "enforce_modality": ["text", "audio"],
    "text": {"temperature": 0.0, "topk": 1, "max_step": 12},
    "audio": {"temperature": 0.0, "topk": 1, "cfg": 1.5, "min_step": 16, "max_step": 24},
}
SAID = {"b": "one two", "a": "“nine” zero", "c_1": "é 音", "d-2": "seven", "e.x": "what comes after three"}

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        int(importlib.metadata.version("espnet")[:6]) < 202609, reason="this ESPnet writes trees of another kind"
    ),
]


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A set of five dialogues, greedy settings, and a registry that names the set."""
    folder = tmp_path / "my data"
    folder.mkdir()
    lines = (
        {"example_id": key, "messages": [["system", "text", "answer"], ["user", "text", text]]}
        for key, text in SAID.items()
    )
    # ESPnet's reader wants something to be predicted.
    lines = ({**line, "messages": [*line["messages"], ["assistant", "text", "x"]]} for line in lines)
    (folder / "dialogues.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines), encoding="utf-8")
    entry = {"name": "dialogue", "path": str(folder / "dialogues.jsonl"), "reader": "dialogue"}
    (folder / "dataset.json").write_text(json.dumps({"data_entry": [entry], "samples": list(SAID)}), encoding="utf-8")
    (tmp_path / "greedy.yaml").write_text(json.dumps(GREEDY), encoding="utf-8")  # JSON is yaml
    registry = {"mine": {"path": str(folder / "dataset.json")}}
    (tmp_path / "registry.yaml").write_text(json.dumps(registry), encoding="utf-8")
    monkeypatch.setenv("ESPNET_DATASET_REGISTRY", str(tmp_path / "registry.yaml"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    return tmp_path


def decode(place, monkeypatch, backend, *words):
    """Results go to ``exp/out`` of a folder of the backend."""
    (place / backend).mkdir(exist_ok=True)
    monkeypatch.chdir(place / backend)
    shared = ["--train-config", MODEL / "train.yaml", "--model-checkpoint", MODEL / "mp_rank_00_model_states.pt"]
    shared += ["--inference-config", place / "greedy.yaml", "--output-dir", "exp/out", "--backend", backend]
    assert inference.main([str(word) for word in (*shared, *words)]) == 0


def test_shards_folders_names_and_bytes_are_espnets(place, monkeypatch):
    """Two jobs of two workers each; the second one names its set by the registry. Paths in results.json stay relative."""
    for backend in ("espnet", "pytorch"):
        specifier = f"dialogue:mine:{place / 'my data' / 'dataset.json'}"
        jobs = ["--num-workers", 2, "--world-size", 2]
        decode(place, monkeypatch, backend, *jobs, "--rank", 1, "--test-unregistered-specifier", specifier)
        decode(place, monkeypatch, backend, *jobs, "--rank", 2, "--test-registered-specifier", "dialogue:mine:0.5")
    theirs, mine = place / "espnet" / "exp" / "out", place / "pytorch" / "exp" / "out"
    assert_same_tree(mine, theirs, str(mine))
    shards = [json.loads((mine / f"dialogue_mine/inference_rank{r}/results.json").read_text("utf-8")) for r in range(4)]
    assert [list(shard) for shard in shards] == [["b", "e.x"], ["a"], ["c_1"], ["d-2"]]
    assert {path.name for path in result_files(mine)} >= {f"{key}_segment2.wav" for key in SAID}
    for _, _, text in (shard[key][0] for shard in shards for key in shard):
        assert isinstance(text, str)
