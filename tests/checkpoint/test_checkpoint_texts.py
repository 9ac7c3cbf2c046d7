"""The tokenizer of a conversion is the checkpoint's, and nothing of a checkpoint is run."""

import json
import re
import shutil
import subprocess
import sys

import pytest
from checkpoint_samples import converted, copy_of, of_family
from tokenizer_kinds import KINDS, build

from espnet2_vllm.checkpoint.texts import check_texts
from espnet2_vllm.errors import CheckpointError


@pytest.mark.parametrize("kind", KINDS)
def test_a_page_of_probes_is_compared_with_the_file(kind, tmp_path):
    source = build(kind, tmp_path / "source")
    notes = " ".join(check_texts(source, shutil.copytree(source, tmp_path / "converted")))
    changed = {"gpt2-blank": "add_prefix_space", "qwen3-split": "split_special_tokens"}
    changed |= {"qwen3-added": "added and special tokens"}
    said = changed.get(kind, False)
    assert f"tokenizer_config.json changes {said}" in notes if said else "changes" not in notes


def test_where_the_installed_transformers_differs_the_report_says_so(tmp_path):
    source = build("smollm2", tmp_path / "source")
    (note,) = check_texts(source, source)
    assert re.search(
        r"transformers 5\S+ gives other ids than the tokenizer's file for \d+ of \d+ probes, such as 'Steps:", note
    )


def test_another_tokenizer_in_the_conversion_is_found(tmp_path):
    source, other = build("olmo2", tmp_path / "source"), build("smollm2", tmp_path / "other")
    with pytest.raises(CheckpointError, match="gives other ids than it should"):
        check_texts(source, other)


# -- code beside a checkpoint -----------------------------------------------------------------------------------------
BACKBONES = {"bagpiper": "backbone", "opuslm": "hf_backbone"}
CODE = "open({!r}, 'w').close()\nraise SystemExit('code of the checkpoint was run')\n"


def booby_trap(folder, file, values, marker):
    """``file`` of ``folder`` names Python code that lies beside it and leaves ``marker`` behind when it is run."""
    names = {
        "AutoConfig": "trap.Trap",
        "AutoModelForCausalLM": "trap.Trap",
        "AutoTokenizer": ["trap.Trap", "trap.Trap"],
    }
    path = folder / file
    path.write_text(json.dumps(json.loads(path.read_text()) | values | {"auto_map": names}))
    (folder / "trap.py").write_text(CODE.format(str(marker)))


def run(*arguments):
    """A command line with ``yes |`` before it."""
    command = ["bash", "-c", 'yes | "$@"', "-", sys.executable, "-m", "espnet2_vllm.bin.main", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


@pytest.mark.parametrize(
    ("family", "file", "values", "said"),
    [
        ("bagpiper", "config.json", {"model_type": "mine"}, "model_type 'mine' is defined by Python code of its own"),
        ("opuslm", "tokenizer_config.json", {"tokenizer_class": "Mine"}, "'Mine' is not known, and its own code"),
        ("opuslm", "config.json", {}, None),
        ("bagpiper", "tokenizer_config.json", {}, None),
    ],
)
def test_nobody_is_asked_whether_a_checkpoints_code_may_run(family, file, values, said, tmp_path):
    """It is refused by name where it would be needed, and ignored where transformers has a class of that name itself."""
    folder = copy_of(family, tmp_path)
    booby_trap(folder / BACKBONES[family], file, values, tmp_path / "marker")
    done = run("convert", folder, tmp_path / "converted")
    assert not (tmp_path / "marker").exists()
    assert "[y/N]" not in done.stdout + done.stderr
    if said is None:
        assert done.returncode == 0, done.stderr
        assert "auto_map" not in json.loads((tmp_path / "converted/config.json").read_text())
    else:
        assert done.returncode == 1 and said in done.stderr and "Traceback" not in done.stderr, done.stderr


def test_code_beside_a_converted_directory_is_not_run(tmp_path):
    folder = tmp_path / "converted"
    shutil.copytree(converted(of_family("bagpiper")[0]), folder)
    booby_trap(folder, "config.json", {"model_type": "mine"}, tmp_path / "marker")
    booby_trap(folder / "tokenizer", "tokenizer_config.json", {}, tmp_path / "marker")
    program = "from espnet2_vllm import SpeechLM as L; L.from_pretrained({!r}, backend='pytorch').generate([['user', 'text', 'a']])"
    command = ["bash", "-c", 'yes | "$@"', "-", sys.executable, "-c", program.format(str(folder))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert not (tmp_path / "marker").exists() and "[y/N]" not in done.stdout + done.stderr
    assert done.returncode == 1 and "CheckpointError" in done.stderr, done.stderr
