"""Checkpoints as ESPnet 202609 and later describe, write and load them, judged by ESPnet's own classes."""

import itertools
import json

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
import yaml
from checkpoint_samples import (
    add_encoder,
    change_tensors,
    copy_of,
    golden_layout,
    model_file,
    state_dict,
    take_other_encoder,
)
from safetensors.torch import load_file
from todays_espnet import answered, job_of, model_of
from transformers import AutoModelForCausalLM

from espnet2_vllm.checkpoint import convert, ensure_converted, open_checkpoint
from espnet2_vllm.decoding_choice import Decoding
from espnet2_vllm.errors import CheckpointError
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


# -- one head and embedding ---------------------------------------------------------------------------------------------
def tie(folder):
    def change(arguments):
        arguments["model"]["model_conf"]["tie_word_embeddings"] = True

    rewrite(folder, change)


@torch.inference_mode()
def logits_of(directory, rows):
    """[T, S, V] from a converted directory by transformers' own forward pass over ``rows`` as fed."""
    model = AutoModelForCausalLM.from_pretrained(directory, attn_implementation="sdpa").eval()
    (shard,) = directory.glob("model-*.safetensors")
    streams = load_file(shard)["stream_emb.weight"].clone()
    streams[0] = 0
    vectors = model.get_input_embeddings()(rows)
    vectors[:, 1:][rows[:, 1:] == 0] = 0
    hidden = model.get_decoder()(inputs_embeds=vectors.sum(1)[None]).last_hidden_state[0]
    return model.lm_head(hidden[:, None] + streams)


@pytest.mark.parametrize("both_names", [True, False])
def test_a_tied_head_is_espnets(both_names, tmp_path, monkeypatch):
    folder = copy_of("bagpiper", tmp_path, "qwen3-s8-cb64")
    layout = golden_layout(folder)
    change_tensors(folder, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"]}))
    tie(folder)
    _, model = model_of(folder, monkeypatch)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    if not both_names:
        change_tensors(folder, lambda t: t.pop("lm_head.weight"))
    convert(folder, tmp_path / "converted")
    torch.manual_seed(3)
    rows = torch.stack([torch.randint(*span, (12,)) for span in layout.streams], dim=1)
    rows[:4, 1:] = 0
    with torch.no_grad():
        expected, _ = model._step(input_ids=rows[None])
    torch.testing.assert_close(logits_of(tmp_path / "converted", rows), expected[0], atol=1e-4, rtol=1e-4)


def test_a_tied_head_that_differs_is_refused_and_one_that_is_missing_is_missed(tmp_path):
    folder = copy_of("bagpiper", tmp_path, "qwen3-s8-cb64")
    tie(folder)
    with pytest.raises(
        CheckpointError, match="model.embed_tokens.weight and lm_head.weight differ, though .* makes them one"
    ):
        convert(folder, tmp_path / "converted")
    loose = copy_of("bagpiper", tmp_path / "loose", "qwen3-s8-cb64")
    change_tensors(loose, lambda t: t.pop("lm_head.weight"))
    with pytest.raises(CheckpointError, match="1 missing: lm_head.weight"):
        convert(loose, tmp_path / "converted")


# -- what it hears ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("encoder", ["Qwen3-Omni", "Qwen2.5-Omni"])
def test_a_model_with_either_encoder_answers_a_long_recording_as_espnet(encoder, tmp_path, monkeypatch):
    folder = copy_of("bagpiper", tmp_path, CONTAUDIO)
    if encoder == "Qwen2.5-Omni":
        take_other_encoder(folder)
    wav = np.random.default_rng(5).standard_normal(31 * 16000 + 77).astype(np.float32)
    messages = [
        ["user", "audio", (wav, 16000)],
        ["user", "text", "what is this ?"],
        ["user", "audio", (wav[:7000], 16000)],
    ]
    with SpeechLM.from_pretrained(folder, backend="pytorch") as model:
        found = model.generate(messages, Decoding(temperature=0.0, max_step=25, min_step=3, enforce_modality=("text",)))
    block = {"temperature": 0.0, "topk": 20, "max_step": 25, "min_step": 3}
    settings = {"text": block, "audio": block, "enforce_modality": ["text"]}
    ((role, kind, (text,)),) = answered(*model_of(folder, monkeypatch), messages, settings)
    assert (role, kind, text) == ("assistant", "text", found.text) and text


# -- what describes the model -------------------------------------------------------------------------------------------
def test_keys_of_training_are_taken_and_those_that_could_change_the_model_are_not(tmp_path):
    folder = copy_of("bagpiper", tmp_path, "qwen3-s8-cb64")  # with the two of older ESPnet
    convert(folder, tmp_path / "reference")

    def change(arguments):
        arguments["model"] |= {"model_choice": "parallel_pp", "activation_checkpointing": True}
        arguments["model"]["model_conf"]["z_loss_weight"] = 1e-4

    rewrite(folder, change)
    convert(folder, tmp_path / "converted")
    assert_same_directory(tmp_path / "reference", tmp_path / "converted")
    rewrite(folder, lambda arguments: arguments["model"]["model_conf"].update(rope_scaling={"factor": 2}))
    with pytest.raises(
        CheckpointError, match=r"model.model_conf.rope_scaling is \{'factor': 2\}, which is not known here"
    ):
        convert(folder, tmp_path / "again")
    rewrite(folder, lambda arguments: arguments["model"].update(model_conf={"tie_word_embeddings": "yes"}))
    with pytest.raises(CheckpointError, match="tie_word_embeddings is 'yes', expected true or false"):
        convert(folder, tmp_path / "again")


@pytest.mark.parametrize("stated", [None, "float32", "auto"])
def test_the_body_has_the_dtype_that_espnet_makes_it_in(stated, tmp_path, monkeypatch):
    """And so its weights are rounded as they are loaded; without a word in the yaml it is that of the backbone's files."""
    folder = copy_of("bagpiper", tmp_path, "qwen3-s8-cb64")
    path = folder / "backbone/config.json"
    path.write_text(json.dumps(json.loads(path.read_text("utf-8")) | {"dtype": "bfloat16"}), "utf-8")
    conf = {"attn_implementation": "sdpa"} | ({} if stated is None else {"dtype": stated})
    rewrite(folder, lambda arguments: arguments["model"].update(model_conf=conf))
    convert(folder, tmp_path / "converted")
    (shard,) = (tmp_path / "converted").glob("model-*.safetensors")
    _, model = model_of(folder, monkeypatch)
    theirs = model.state_dict()
    for name, tensor in load_file(shard).items():
        assert tensor.dtype == theirs[name].dtype and torch.equal(tensor, theirs[name]), name
    assert model.model.norm.weight.dtype == (torch.float32 if stated == "float32" else torch.bfloat16)


def test_a_body_of_experts_is_refused_by_name(tmp_path):
    folder = copy_of("bagpiper", tmp_path, "qwen3-s8-cb64")
    path = folder / "backbone/config.json"
    path.write_text(json.dumps(json.loads(path.read_text("utf-8")) | {"model_type": "qwen3_moe"}), "utf-8")
    with pytest.raises(CheckpointError, match="type 'qwen3_moe'; supported are qwen3, llama, olmo2"):
        convert(folder, tmp_path / "converted")


def test_weights_of_the_loss_tell_of_another_order(tmp_path, monkeypatch):
    """They are dropped by name; where text and audio were swapped in the yaml, they give it away."""
    folder = copy_of("bagpiper", tmp_path, CONTAUDIO)
    weights = job_of(folder, monkeypatch).vocab_meta["vocab_weight"]
    assert weights.unique().numel() > 1
    change_tensors(folder, lambda t: t.update(vocab_weight=weights))
    assert convert(folder, tmp_path / "converted").dropped == {"vocab_weight": "buffer of the loss"}
    rewrite(folder, reorder(["discrete_audio", "text", "continuous_audio"]))
    with pytest.raises(CheckpointError, match="ids .* are text by .* vocab_weight, .* goes from .* another order"):
        convert(folder, tmp_path / "other")


# -- the ways that weights are saved ------------------------------------------------------------------------------------
def assert_same_directory(one, other):
    """Byte for byte, but for where it came from."""
    files = [
        sorted(path.relative_to(folder) for path in folder.rglob("*") if path.is_file()) for folder in (one, other)
    ]
    assert files[0] == files[1]
    for file in files[0]:
        if file.name not in ("speechlm.json", "digests.json"):  # which hold the source, and times
            assert (one / file).read_bytes() == (other / file).read_bytes(), file
    first, second = (json.loads((folder / "speechlm.json").read_text("utf-8")) for folder in (one, other))
    assert {key for key in first if first[key] != second[key]} <= {"source"}


def saved(tensors):
    """The state that ESPnet's Titan trainer gives to torch.distributed.checkpoint."""
    moments = {"state": {name: {"exp_avg": torch.zeros(2)} for name in tensors}, "param_groups": [{"lr": 0.1}]}
    return {"model": tensors, "optimizer": moments, "lr_scheduler": {"last_epoch": 7}, "global_step": 7}


def stages_of(tensors, layers):
    """The same as a pipeline of two ranks with two chunks each saves it: names begin with the number of the rank's chunk."""
    parts = [{} for _ in range(4)]
    for name, tensor in tensors.items():
        layer = int(name.split(".")[2]) if name.startswith("model.layers.") else None
        last = name.startswith(("lm_head.", "stream_emb.", "model.norm.", "vocab_weight"))
        parts[3 if last else 0 if layer is None else 1 + layer * 3 // layers].update({name: tensor})
    assert all(parts)
    return [
        {f"{chunk}.{name}": t for chunk in (0, 1) for name, t in parts[rank + 2 * chunk].items()} for rank in (0, 1)
    ]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_every_way_of_saving_gives_the_same_directory(tmp_path):
    from espnet2.speechlm.bin.export_checkpoint import export_checkpoint

    folder = copy_of("bagpiper", tmp_path, "qwen3-s8-cb64")
    add_encoder(folder)
    path = model_file(folder)
    change_tensors(folder, lambda t: t.update(vocab_weight=torch.ones(1232)))
    tensors = state_dict(path)
    convert(folder, tmp_path / "deepspeed")
    path.unlink()
    step = folder / "checkpoints/step_7"
    dcp.save(saved(tensors), checkpoint_id=step, no_dist=True)
    report = convert(folder, tmp_path / "distributed")
    assert report.dropped == {"vocab_weight": "buffer of the loss"}
    assert_same_directory(tmp_path / "deepspeed", tmp_path / "distributed")
    export_checkpoint(step, folder / "export/model.pt")
    convert(folder, tmp_path / "exported", model_file=folder / "export/model.pt")
    assert_same_directory(tmp_path / "deepspeed", tmp_path / "exported")
    for rank, part in enumerate(stages_of(tensors, 3)):
        dcp.save(
            {**saved(part), "pp_rank": rank, "pp_degree": 2},
            checkpoint_id=folder / f"checkpoints/step_9/pp_{rank:02d}_02",
            no_dist=True,
        )
    report = convert(folder, tmp_path / "pipeline")
    assert any("checkpoints of the 2 stages of step_9" in line for line in report.lines)
    assert_same_directory(tmp_path / "deepspeed", tmp_path / "pipeline")
    checkpoint = ensure_converted(folder / "train.yaml", step, cache=False)
    assert_same_directory(tmp_path / "deepspeed", checkpoint.path)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_an_export_in_another_dtype_is_read_in_it(tmp_path):
    from espnet2.speechlm.bin.export_checkpoint import export_checkpoint

    folder = copy_of("bagpiper", tmp_path, "qwen3-s8-cb64")
    dcp.save(saved(state_dict(model_file(folder))), checkpoint_id=folder / "step_7", no_dist=True)
    model_file(folder).unlink()
    export_checkpoint(folder / "step_7", folder / "model.pt", torch.bfloat16)
    convert(folder, tmp_path / "converted", model_file=folder / "model.pt")
    kinds = {
        tensor.dtype
        for path in (tmp_path / "converted").glob("model-*.safetensors")
        for tensor in load_file(path).values()
    }
    assert kinds == {torch.bfloat16, torch.float32}  # ESPnet makes the body in the float32 of the yaml


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_pipeline_that_lacks_a_stage_is_not_taken(tmp_path):
    folder = copy_of("bagpiper", tmp_path, "qwen3-s8-cb64")
    parts = stages_of(state_dict(model_file(folder)), 3)
    for rank, part in enumerate(parts):
        dcp.save(saved(part), checkpoint_id=folder / f"checkpoints/step_9/pp_{rank:02d}_02", no_dist=True)
    model_file(folder).unlink()
    (folder / "checkpoints/step_9/pp_01_02/.metadata").unlink()
    with pytest.raises(CheckpointError, match=r"no model in .*step_N/pp_\*_\*/.metadata of every stage"):
        convert(folder, tmp_path / "converted")
    dcp.save(saved(parts[0]), checkpoint_id=folder / "checkpoints/step_9/pp_01_02", no_dist=True)
    with pytest.raises(
        CheckpointError, match="pp_01_02: 0.model.* is also in .*pp_00_02; are these stages of one model"
    ):
        convert(folder, tmp_path / "converted")
