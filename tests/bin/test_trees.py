"""Both command lines write the recorded trees: names, keys, order, bytes, and wavs within 2 LSB."""

import json

import pytest
from commands import chat, chat_arguments, edited_yaml
from conftest import golden_files
from recorded import assert_written_as_recorded, load_case
from shared_engine import run_apart
from trees import assert_same_tree

from espnet2_vllm.bin import inference

CHAT_TREES = [path.parent for path in golden_files("opuslm/*/trees/*/data.json")]
# Draws of several hypotheses are not portable; frames to continue from cannot be given to ESPnet's command line either.
CHAT_CASES = [
    path
    for path in golden_files("opuslm/*/cases/*.json")
    if "nbest3" not in path.stem and path.stem != "audiolm_continue"
]
BAGPIPER_TREES = [path.parent for path in golden_files("bagpiper/*/trees/*/details.json")]
BAGPIPER_RUNS = [
    (tree, backend, workers, tree / expected)
    for tree in BAGPIPER_TREES
    for backend, workers, expected in [
        ("pytorch", 1, "expected"), ("vllm", 1, "expected"), ("pytorch", 2, "expected_num_workers2")
    ]
    if (tree / expected).is_dir()
]  # fmt: skip
tree_id = lambda path: f"{path.parent.parent.name}-{path.name}"  # noqa: E731


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch):
    """Conversions of the recorded models, which cannot be written to, are kept for the session."""
    monkeypatch.setenv("ESPNET2_VLLM_CACHE", str(tmp_path_factory.getbasetemp() / "converted"))


@pytest.mark.parametrize("tree", CHAT_TREES, ids=tree_id)
def test_chat_trees_are_espnets(tree, tmp_path, monkeypatch):
    model = tree.parent.parent
    monkeypatch.chdir(model)  # paths in data.json count from here
    assert chat(model, tree / "decode.yaml", tree / "data.json", tmp_path / "out") == 0
    assert_chat_tree(tmp_path / "out", tree)


def assert_chat_tree(out, tree):
    merged_by_rank = tree.name.endswith("_nproc2")
    assert_same_tree(out, tree / "expected", f"trees/{tree.name}/expected", merged_by_rank=merged_by_rank)


@pytest.mark.slow
@pytest.mark.parametrize("model", sorted({tree.parent.parent for tree in CHAT_TREES}), ids=lambda path: path.name)
def test_chat_trees_of_vllm_are_espnets(model, tmp_path):
    pytest.importorskip("vllm")
    trees = [tree for tree in CHAT_TREES if tree.parent.parent == model]
    outs = [tmp_path / tree.name for tree in trees]
    commands = [
        chat_arguments(model, tree / "decode.yaml", tree / "data.json", out, backend="vllm")
        for tree, out in zip(trees, outs, strict=True)
    ]
    run_apart(commands, model)
    for tree, out in zip(trees, outs, strict=True):
        assert_chat_tree(out, tree)


@pytest.mark.parametrize("path", CHAT_CASES, ids=tree_id)
def test_chat_cases_are_written_as_recorded(path, tmp_path, monkeypatch):
    """Tasks, dialogues, references as history, and what ESPnet's own call or writer cannot do, through the command line."""
    case, arrays = load_case(path)
    model = path.parent.parent
    monkeypatch.chdir(model)
    config, data = tmp_path / "decode.yaml", tmp_path / "data.json"
    config.write_text(json.dumps(case["inference_config"]), encoding="utf-8")  # JSON is yaml
    description = json.loads((model / case["data_json"]).read_text(encoding="utf-8"))
    data.write_text(json.dumps({**description, "examples": [case["uid"]]}), encoding="utf-8")
    more = ["--seed", case["seed"], "--inference_last_segment", str(case["inference_last_segment"]).lower()]
    assert chat(model, config, data, tmp_path / "out", *more) == 0
    assert_written_as_recorded(case, arrays, tmp_path / "out")


@pytest.mark.parametrize(
    ("tree", "backend", "workers", "expected"),
    BAGPIPER_RUNS,
    ids=[f"{tree_id(tree)}-{backend}-{workers}" for tree, backend, workers, _ in BAGPIPER_RUNS],
)
def test_bagpiper_trees_are_espnets(tree, backend, workers, expected, tmp_path, monkeypatch):
    """Greedy, with guidance of scale 3 on audio."""
    pytest.importorskip(backend if backend == "vllm" else "torch")
    command = json.loads((tree / "details.json").read_text(encoding="utf-8"))["command"]
    assert command["module"] == "espnet2.speechlm.bin.inference"
    monkeypatch.chdir(tree.parent.parent)
    for name, value in command["env"].items():
        monkeypatch.setenv(name, value)
    arguments = list(command["args"])  # ESPnet's, verbatim
    arguments[arguments.index("--num-workers") + 1] = str(workers)
    arguments[arguments.index("--output-dir") + 1] = str(tmp_path / "out")
    # As ESPnet before 202609 did, which made the recordings, with transformers 4.
    older = ["--text-format", "list", "--clean-up-text"]
    assert inference.main([*arguments, "--backend", backend, *older]) == 0
    # Both recordings name the folder that they were made in.
    (results, *_) = expected.glob("*/inference_rank0/results.json")
    wavs = [m[2] for messages in json.loads(results.read_text("utf-8")).values() for m in messages if m[1] == "audio"]
    prefix = wavs[0][: wavs[0].index(f"/{results.parent.parent.name}/")] if wavs else ""
    assert_same_tree(tmp_path / "out", expected, prefix)


@pytest.mark.parametrize("tree", BAGPIPER_TREES, ids=tree_id)
def test_both_backends_write_the_same_bagpiper_tree(tree, tmp_path, monkeypatch):
    """With sampling, whose noise is the same on both."""
    pytest.importorskip("vllm")
    monkeypatch.chdir(tree.parent.parent)
    command = json.loads((tree / "details.json").read_text(encoding="utf-8"))["command"]
    for name, value in command["env"].items():
        monkeypatch.setenv(name, value)

    def change(data):
        data["audio"].update(cfg=1, temperature=0.7)
        data["text"].update(temperature=0.9)

    arguments = list(command["args"])
    config = edited_yaml(tree / "inference.yaml", tmp_path / "inference.yaml", change)
    arguments[arguments.index("--inference-config") + 1] = str(config)
    for backend in ("pytorch", "vllm"):
        arguments[arguments.index("--output-dir") + 1] = str(tmp_path / backend)
        assert inference.main([*arguments, "--backend", backend, "--in-flight", "3"]) == 0
    assert_same_tree(tmp_path / "vllm", tmp_path / "pytorch", str(tmp_path / "pytorch"))
