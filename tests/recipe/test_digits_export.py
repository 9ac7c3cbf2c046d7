"""egs/digits: an exported checkpoint opens, and gives the logits that it was trained with."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

from espnet2_vllm.backends.network import Network
from espnet2_vllm.backends.pytorch import Branch
from espnet2_vllm.checkpoint import ensure_converted
from espnet2_vllm.errors import CheckpointError
from espnet2_vllm.protocol import AUDIO, TEXT

REPO = Path(__file__).parents[2]
LOCAL = REPO / "egs/digits/speechlm1/local"
CODEC = REPO / "tests/golden/opuslm/tiny-llama/codec"  # 8 books of 32
SIZE = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "intermediate_size": 48,
}
SEED = 21


@pytest.fixture(scope="module", autouse=True)
def recipe():
    sys.path.insert(0, str(LOCAL))
    yield
    sys.path.remove(str(LOCAL))


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    from lm_tokenizer import make_tokenizer

    folder = tmp_path_factory.mktemp("tokenizer")
    make_tokenizer(folder, 300)
    return folder


@pytest.mark.parametrize("family", ["bagpiper", "opuslm"])
def test_exported_checkpoint_gives_the_logits_of_training(family, tokenizer, tmp_path):
    from lm_export import export_bagpiper, export_opuslm
    from lm_model import Net, backbone_config
    from train_speechlm import build_layout

    torch.manual_seed(SEED)
    shutil.copytree(CODEC, tmp_path / "codec")
    layout, tokens = build_layout(family, tokenizer, {"text_size": 300, "units": 7}, tmp_path / "codec")
    config = backbone_config(family, 300, SIZE)
    net = Net(layout, config, half=False)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.copy_((parameter * 3).half())
    out = tmp_path / family
    if family == "bagpiper":
        export_bagpiper(net, config, tokenizer, tmp_path / "codec", out, 0.1)
    else:
        export_opuslm(net, config, tokenizer, tmp_path / "codec", out, tokens)
    checkpoint = ensure_converted(out)
    assert checkpoint.layout == layout
    network = Network(checkpoint, torch.float32, torch.device("cpu"), "sdpa")
    rng = np.random.default_rng(SEED)
    spans = layout.code_spans
    rows = np.stack([rng.integers(*span, size=12) for span in spans], axis=1)
    rows[:4, 1:] = layout.pad
    rows[:4, 0] = rng.integers(*layout.text, size=4)
    if family == "bagpiper":
        rows[0] = layout.pad  # as the unconditional branch of guidance begins
    hidden = net.hidden(torch.from_numpy(rows)[None])[0]
    theirs = Branch(network).feed(rows)
    assert torch.allclose(hidden, theirs, atol=1e-4)
    for place in (3, 11):
        logits = network.logits(theirs[place])
        for phase in (TEXT, AUDIO):
            ours = net._primary_logits(hidden[place : place + 1], phase)[0]
            assert torch.allclose(ours, logits.primary[getattr(net, f"ids_{phase}")], atol=1e-4)
        assert torch.allclose(net._auxiliary_logits(hidden[place : place + 1])[0], logits.auxiliary, atol=1e-4)


LOAD = """
import torch, yaml
from espnet2.speechlm.bin.inference import load_checkpoint
from espnet2.speechlm.model import _all_job_types
config = yaml.safe_load(open("train.yaml"))
job = _all_job_types[config["job_type"]](config)
model = load_checkpoint(job.build_model(), "mp_rank_00_model_states.pt")
job.build_preprocessor()
assert torch.equal(model.vocab_weight, job.vocab_meta["vocab_weight"])
print({name: [list(pair) for pair in pairs] for name, pairs in job.vocab_meta["vocab_intervals"].items()})
"""


def test_what_training_writes_is_what_espnet_loads(tokenizer, tmp_path):
    """Strictly, from its folder, where only what ESPnet takes of a disk is named; with the record of its vocabulary."""
    from lm_export import export_bagpiper
    from lm_model import Net, backbone_config
    from train_speechlm import build_layout

    shutil.copytree(CODEC, tmp_path / "codec")
    layout, _ = build_layout("bagpiper", tokenizer, {"text_size": 300}, tmp_path / "codec")
    config, out = backbone_config("bagpiper", 300, SIZE), tmp_path / "bagpiper"
    export_bagpiper(Net(layout, config, half=False), config, tokenizer, tmp_path / "codec", out, 0.1)
    shutil.rmtree(tmp_path / "codec")
    here = {**os.environ, "HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run([sys.executable, "-c", LOAD], cwd=out, env=here, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    written = yaml.safe_load((out / "train.yaml").read_text(encoding="utf-8"))
    assert done.stdout.splitlines()[-1] == str(written["vocab_intervals"])
    assert ensure_converted(out).layout == layout
    (out / "codec.zip").write_bytes((out / "codec.zip").read_bytes()[:5000])
    with pytest.raises(CheckpointError, match=r"cannot unpack the codec .*codec\.zip"):
        ensure_converted(out)
