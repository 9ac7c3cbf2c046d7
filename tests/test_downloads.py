"""Opening a released Bagpiper by its tag, from an empty cache: which files the hub is asked for (doc/swap.md: how much that is)."""

import os
import subprocess
import sys

import numpy as np
import pytest
import soundfile
from hub_server import Hub
from release_folders import BACKBONE, CODEC, SFT, TOWER, make_hub

SCRIPT = """
import sys
from {module} import Decoding, from_pretrained
model = from_pretrained({tag!r}, device="cpu", **{options})
greedy = Decoding(text_temperature=0.0, audio_temperature=0.0, max_steps=12)
print(repr(model.describe(sys.argv[1], decoding=greedy)), model.render("A bell.", decoding=greedy)[0][:4])
"""
RELEASE = {"train.yaml", "model.pt", "inference_text.yaml", "inference_audio.yaml"}


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    hub = Hub(make_hub(tmp_path_factory.mktemp("served"), weights=True))
    yield hub
    hub.close()


def opened(hub, module, options, tmp_path):
    """What ``module`` answers from an empty cache, and which files it fetched."""
    soundfile.write(tmp_path / "a.wav", np.random.default_rng(5).standard_normal(12_000) * 0.1, 16_000)
    hub.fetched.clear()
    away = {"HF_HUB_OFFLINE", "HF_HUB_CACHE", "HF_TOKEN", "ESPNET2_VLLM_CACHE"}
    environment = {name: value for name, value in os.environ.items() if name not in away}
    environment |= {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / module), "HF_HUB_DISABLE_XET": "1"}
    code = SCRIPT.format(module=module, tag=SFT, options=options)
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "a.wav")], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = {}
    for repository, name in hub.fetched:
        found.setdefault(repository, set()).add(name)
    return done.stdout.strip().splitlines()[-1], found


def test_of_other_repositories_configurations_and_the_tokenizer_are_fetched(hub, tmp_path):
    ours, fetched = opened(hub, "espnet2_vllm", {"backend": "pytorch"}, tmp_path)
    size = sum(hub.fetched.values()) - hub.fetched[SFT, "model.pt"]
    assert fetched.pop(SFT) == RELEASE
    assert fetched.pop(TOWER) == {"config.json", "preprocessor_config.json"}
    assert fetched.pop(CODEC) == {"config.json"}
    names = {
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "special_tokens_map.json",
    }
    assert fetched.pop(BACKBONE) == names
    assert not fetched and size < 100_000  # of these tiny ones: no weights are among them
    # again: what is here is not fetched again
    again, fetched = opened(hub, "espnet2_vllm", {"backend": "pytorch"}, tmp_path)
    assert again == ours and not fetched

    pytest.importorskip("espnet2.bin.speechlm_inference")
    theirs, fetched = opened(hub, "espnet2.bin.speechlm_inference", {"dtype": "float32"}, tmp_path)
    assert theirs == ours
    for repository in (BACKBONE, CODEC, TOWER):
        assert "model.safetensors" in fetched[repository], "ESPnet fetches these weights"
