"""Where codec files are looked for."""

import sys

import pytest

from espnet2_vllm.codec.espnet import model_zoo_caches
from espnet2_vllm.codec.locate import locate_directory, locate_file
from espnet2_vllm.errors import CheckpointError


def make_snapshot(cache, owner, name):
    """A hub cache with one downloaded revision."""
    repo = cache / f"models--{owner}--{name}"
    snapshot = repo / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text("0" * 40, encoding="utf-8")
    (snapshot / "config.yaml").write_text("codec: dac", encoding="utf-8")
    return snapshot


def test_base_dir_comes_before_the_working_directory(tmp_path, monkeypatch):
    for place in ("base", "work"):
        (tmp_path / place / "codec").mkdir(parents=True)
    (tmp_path / "work" / "only").mkdir()
    (tmp_path / "work" / "w.pth").touch()
    monkeypatch.chdir(tmp_path / "work")
    base = tmp_path / "base"
    assert locate_directory("codec", base_dir=base, what="codec") == base / "codec"
    assert locate_directory("codec", base_dir=None, what="codec") == tmp_path / "work" / "codec"
    assert locate_directory("only", base_dir=base, what="codec") == tmp_path / "work" / "only"
    assert locate_file("w.pth", base_dir=base, what="weights") == tmp_path / "work" / "w.pth"
    with pytest.raises(CheckpointError, match=f"weights 'v.pth' not found: .*{base}/v.pth and {tmp_path}/work/v.pth"):
        locate_file("v.pth", base_dir=base, what="weights")


def test_hub_tag_is_found_in_the_hub_cache_or_in_espnet_model_zoos(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    snapshot = make_snapshot(tmp_path / "hub", "someone", "codec")
    assert locate_directory("someone/codec", base_dir=tmp_path, what="codec") == snapshot
    zoo = tmp_path / "site" / "espnet_model_zoo"
    zoo.mkdir(parents=True)
    (zoo / "__init__.py").touch()
    monkeypatch.setattr(sys, "path", [str(tmp_path / "site"), *sys.path])
    snapshot = make_snapshot(zoo, "someone", "other")
    caches = model_zoo_caches()
    assert caches == [zoo]
    assert locate_directory("someone/other", base_dir=None, what="codec", other_caches=caches) == snapshot
    with pytest.raises(CheckpointError, match=f"local cache at {tmp_path}/hub and {zoo}.*hf download someone/third"):
        locate_directory("someone/third", base_dir=None, what="codec", other_caches=caches)
