"""Checkpoints as ESPnet 202609 and later describe, write and load them, judged by ESPnet's own classes."""

import itertools

import numpy as np
import pytest
import torch
import yaml
from checkpoint_samples import change_tensors, copy_of
from todays_espnet import job_of

from espnet2_vllm.checkpoint import convert, open_checkpoint
from espnet2_vllm.decoding_choice import Decoding
from espnet2_vllm.speechlm import SpeechLM

pytest.importorskip("espnet2.speechlm")

CONTAUDIO = "qwen3-s4-cb32-contaudio"


def rewrite(folder, change):
    """Change the parsed ``train.yaml`` of ``folder``; keys keep their order, as ESPnet's trainer saves them."""
    path = folder / "train.yaml"
    arguments = yaml.safe_load(path.read_text(encoding="utf-8"))
    change(arguments)
    path.write_text(yaml.safe_dump(arguments, sort_keys=False), encoding="utf-8")
    return arguments


def reorder(names):
    def change(arguments):
        arguments["multimodal_io"] = {name: arguments["multimodal_io"][name] for name in names}

    return change


def test_ids_are_those_of_espnets_own_layout_for_every_order_of_the_keys(tmp_path, monkeypatch):
    folder = copy_of("bagpiper", tmp_path, CONTAUDIO)
    job = job_of(folder, monkeypatch)
    for names in itertools.permutations(job.multimodal_io):
        arguments = rewrite(folder, reorder(names))
        job.multimodal_io = {name: job.multimodal_io[name] for name in names}
        job.config = arguments
        job._build_vocabulary()
        convert(folder, tmp_path / "converted")
        layout = open_checkpoint(tmp_path / "converted").layout
        intervals = job.vocab_meta["vocab_intervals"]
        assert [tuple(layout.text)] == intervals["text"]
        assert [tuple(span) for span in layout.streams] == intervals["discrete_audio"]
        assert (layout.vocab_size, layout.num_streams) == (job.vocab_meta["vocab_size"], job.vocab_meta["num_stream"])


ASKED = [["user", "text", "tell me something, and say it."]]
SETTINGS = Decoding(temperature=0.0, max_step=15, min_step=4, enforce_modality=("text", "audio"), cfg=2)


@pytest.mark.parametrize("backend", ["pytorch", pytest.param("vllm", marks=pytest.mark.slow)])
def test_a_model_with_audio_before_text_answers_as_the_same_one_with_text_first(backend, tmp_path):
    pytest.importorskip("vllm" if backend == "vllm" else "torch")
    folder = copy_of("bagpiper", tmp_path, CONTAUDIO)
    with SpeechLM.from_pretrained(folder, backend="pytorch") as model:
        layout, expected = model.checkpoint.layout, model.generate(ASKED, SETTINGS)
    audio = (layout.streams[0].start, layout.streams[-1].stop)
    order = torch.cat([torch.arange(256), torch.arange(*audio), torch.arange(*layout.text)])

    def change(tensors):
        for name in ("model.embed_tokens.weight", "lm_head.weight"):
            tensors[name] = tensors[name][order]

    change_tensors(folder, change)
    rewrite(folder, reorder(["continuous_audio", "discrete_audio", "text"]))
    options = {"max_num_seqs": 4} if backend == "vllm" else {}
    with SpeechLM.from_pretrained(folder, backend=backend, **options) as model:
        assert model.checkpoint.layout.text.start == audio[1] - layout.text.size
        found = model.generate(ASKED, SETTINGS)
    assert found.text == expected.text != ""
    np.testing.assert_allclose(found.audio[0], expected.audio[0], atol=1e-5)
