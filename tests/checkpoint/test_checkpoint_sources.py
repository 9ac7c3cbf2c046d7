"""Which yaml and which model file a path means."""

import pathlib
import shutil

import pytest

from espnet2_vllm.checkpoint.sources import find_source, read_yaml
from espnet2_vllm.errors import CheckpointError

BAGPIPER = "job_type: speechlm\nmultimodal_io:\n  text: {}\n"
OPUSLM = "token_list:\n- <pad>\ntoken_bias:\n  ssl: [0, 1]\n"
DEEPSPEED = "mp_rank_00_model_states.pt"


def lay(folder: pathlib.Path, **files: str) -> pathlib.Path:
    return lay_files(folder, files)


def lay_files(folder: pathlib.Path, files: dict[str, str]) -> pathlib.Path:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    return folder


@pytest.mark.parametrize(
    ("files", "family", "config", "model"),
    [
        ({"config.yaml": OPUSLM, "model.pth": "", "decode_default.yaml": "a: 1"}, "opuslm", "config.yaml", "model.pth"),
        ({"config.yaml": OPUSLM, "2epoch.pth": "", "checkpoint.pth": ""}, "opuslm", "config.yaml", "2epoch.pth"),
        (
            {"config.yaml": OPUSLM, "valid.acc.ave.pth": "", "1epoch.pth": ""},
            "opuslm",
            "config.yaml",
            "valid.acc.ave.pth",
        ),
        ({"config.yaml": OPUSLM, "model.pth": "", "valid.acc.ave.pth": ""}, "opuslm", "config.yaml", "model.pth"),
        (
            {"train.yaml": BAGPIPER, "model.pt": "", "inference_text.yaml": "dtype: x"},
            "bagpiper",
            "train.yaml",
            "model.pt",
        ),
        ({"my.yaml": BAGPIPER, "base.pt": ""}, "bagpiper", "my.yaml", "base.pt"),
        ({"train.yaml": BAGPIPER, "copy.yaml": BAGPIPER, DEEPSPEED: ""}, "bagpiper", "train.yaml", DEEPSPEED),
        (
            {"train.yaml": BAGPIPER, f"checkpoints/step_900/global_step900/{DEEPSPEED}": ""},
            "bagpiper",
            "train.yaml",
            f"checkpoints/step_900/global_step900/{DEEPSPEED}",
        ),
        (
            {"train.yaml": BAGPIPER, f"checkpoints/step_900/universal_step900/{DEEPSPEED}": ""},
            "bagpiper",
            "train.yaml",
            f"checkpoints/step_900/universal_step900/{DEEPSPEED}",
        ),
        (
            {"train.yaml": BAGPIPER, "checkpoints/step_7/.metadata": "", "checkpoints/step_7/__0_0.distcp": ""},
            "bagpiper",
            "train.yaml",
            "checkpoints/step_7",
        ),
        (
            {"train.yaml": BAGPIPER, f"step_3/global_step3/{DEEPSPEED}": ""},
            "bagpiper",
            "train.yaml",
            f"step_3/global_step3/{DEEPSPEED}",
        ),
    ],
)
def test_layouts(files, family, config, model, tmp_path):
    lay_files(tmp_path, files)
    for src in (tmp_path, tmp_path / config):
        source = find_source(src)
        assert (source.family, source.train_config, source.model_file) == (family, tmp_path / config, tmp_path / model)


def test_last_complete_step_is_taken_and_said(tmp_path):
    """By number, not by name; step_1000 was not finished."""
    lay(tmp_path, **{"train.yaml": BAGPIPER, "checkpoints/step_1000/__0_0.distcp": ""})
    for step in (90, 100, 9):
        lay_files(tmp_path, {f"checkpoints/step_{step}/global_step{step}/{DEEPSPEED}": ""})
    source = find_source(tmp_path)
    assert source.model_file == tmp_path / f"checkpoints/step_100/global_step100/{DEEPSPEED}"
    assert "step 100 is the last complete one of 3" in source.notes[0]


def test_from_inside_an_experiment(tmp_path):
    name = f"checkpoints/step_5/global_step5/{DEEPSPEED}"
    lay(tmp_path, **{"train.yaml": BAGPIPER, name: ""})
    for src in ("checkpoints/step_5", "checkpoints/step_5/global_step5", name):
        source = find_source(tmp_path / src)
        assert source.train_config == tmp_path / "train.yaml"
        assert source.model_file == tmp_path / name


def test_model_file_overrides(tmp_path):
    lay(tmp_path, **{"config.yaml": OPUSLM, "model.pth": "", "3epoch.pth": "", "other/config.yaml": OPUSLM})
    assert find_source(tmp_path, model_file="3epoch.pth").model_file == tmp_path / "3epoch.pth"
    assert find_source(tmp_path, model_file=tmp_path / "3epoch.pth").model_file == tmp_path / "3epoch.pth"
    chosen = find_source(tmp_path / "model.pth", train_config=tmp_path / "other/config.yaml")
    assert (chosen.train_config, chosen.model_file) == (tmp_path / "other/config.yaml", tmp_path / "model.pth")


def test_model_file_may_be_a_step_folder(tmp_path):
    name = f"elsewhere/step_5/global_step5/{DEEPSPEED}"
    lay(tmp_path, **{"train.yaml": BAGPIPER, name: ""})
    for given in ("elsewhere/step_5", "elsewhere/step_5/global_step5"):
        assert find_source(tmp_path / "train.yaml", model_file=tmp_path / given).model_file == tmp_path / name


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({"notes.txt": ""}, ["no SpeechLM checkpoint", "multimodal_io", "token_bias", "it holds notes.txt"]),
        ({"a/b": ""}, ["no SpeechLM checkpoint", "it holds a"]),
        ({"config.yaml": "token_list:\n- a\n", "model.pth": ""}, ["no SpeechLM checkpoint"]),  # another ESPnet task
        (
            {"config.yaml": OPUSLM, "train.yaml": BAGPIPER},
            ["config.yaml (opuslm)", "train.yaml (bagpiper)", "--train-config"],
        ),
        ({"a.yaml": OPUSLM, "b.yaml": OPUSLM}, ["a.yaml (opuslm), b.yaml (opuslm)", "--train-config"]),
        ({"config.yaml": OPUSLM, "1epoch.pth": "", "2epoch.pth": ""}, ["1epoch.pth, 2epoch.pth", "--model-file"]),
        ({"train.yaml": BAGPIPER, "model.pt": "", "base.pt": ""}, ["model.pt, base.pt", "--model-file"]),
        ({"config.yaml": OPUSLM}, ["no model in", "model.pth, valid.acc.ave.pth", "it holds config.yaml"]),
        ({"train.yaml": BAGPIPER, "checkpoints/step_1/__0_0.distcp": ""}, ["no model in", DEEPSPEED, ".metadata"]),
        ({"train.yaml": BAGPIPER, DEEPSPEED: "", "mp_rank_01_model_states.pt": ""}, ["2 tensor-parallel ranks"]),
    ],
)
def test_refusals_say_what_was_looked_for(files, words, tmp_path):
    with pytest.raises(CheckpointError) as caught:
        find_source(lay_files(tmp_path, files))
    for word in words:
        assert word in str(caught.value)


def test_nothing_there(tmp_path):
    with pytest.raises(CheckpointError, match="no such checkpoint: .*/gone"):
        find_source(tmp_path / "gone")
    lay(tmp_path, **{"config.yaml": OPUSLM, "model.pth": ""})
    with pytest.raises(CheckpointError, match="no such model file: looked at gone.pth and .*/gone.pth"):
        find_source(tmp_path, model_file="gone.pth")
    with pytest.raises(CheckpointError, match="no such training yaml: gone.yaml"):
        find_source(tmp_path, train_config="gone.yaml")


def test_split_model_is_refused(tmp_path):
    name = "checkpoints/step_5/global_step5/mp_rank_0{}_model_states.pt"
    lay(tmp_path, **{"train.yaml": BAGPIPER, name.format(0): "", name.format(1): ""})
    with pytest.raises(CheckpointError, match="2 tensor-parallel ranks"):
        find_source(tmp_path)


def test_converted_directory_is_no_source(tmp_path):
    lay(tmp_path, **{"speechlm.json": "{}", "config.yaml": OPUSLM})
    with pytest.raises(CheckpointError, match="converted directory already"):
        find_source(tmp_path)


@pytest.mark.parametrize(
    ("text", "words"), [("a: [1\nb: 2\n", "line 2"), ("- a\n", "expected a mapping"), ("a: \xff\n", "read")]
)
def test_yaml_errors_name_the_place(text, words, tmp_path):
    path = tmp_path / "config.yaml"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(CheckpointError, match=words) as caught:
        read_yaml(path)
    assert str(path) in str(caught.value)


def test_relative_paths_are_made_absolute(tmp_path, monkeypatch):
    lay(tmp_path, **{"exp/config.yaml": OPUSLM, "exp/model.pth": ""})
    monkeypatch.chdir(tmp_path)
    source = find_source("exp")
    assert source.train_config == tmp_path / "exp/config.yaml"
    shutil.rmtree(tmp_path / "exp")
    assert source.arguments["token_bias"] == {"ssl": [0, 1]}
