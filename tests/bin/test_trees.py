"""Both command lines write the recorded trees: names, keys, order, bytes, and wavs within 2 LSB."""

import pytest
from commands import chat
from conftest import golden_files
from trees import assert_same_tree

CHAT_TREES = [path.parent for path in golden_files("opuslm/*/trees/*/data.json")]
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
    prefix = f"trees/{tree.name}/expected"
    assert_same_tree(tmp_path / "out", tree / "expected", prefix, merged_by_rank=tree.name.endswith("_nproc2"))
