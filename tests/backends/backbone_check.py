"""Every setting of a backbone that the table lets through, by transformers' plain forward pass and on both backends.

    python backbone_check.py FOLDER KIND [NAME ...]

in a process of its own, since vLLM changes transformers' OLMo-2 classes for good: what they give is asked first. Prints a line a
setting; exit code 0 if all are equal.
"""

import json
import pathlib
import sys

sys.path.append(str(pathlib.Path(__file__).resolve().parent.parent))

import numpy as np  # noqa: E402
import torch  # noqa: E402
from checkpoint_samples import change_tensors, copy_of  # noqa: E402
from transformers import AutoConfig, AutoModelForCausalLM  # noqa: E402

from espnet2_vllm.backends import decode, make_engine  # noqa: E402
from espnet2_vllm.checkpoint import convert, open_checkpoint  # noqa: E402
from espnet2_vllm.decoding import load_decoding  # noqa: E402
from espnet2_vllm.prompt.bagpiper import bagpiper_utterance  # noqa: E402
from espnet2_vllm.text import TextTokenizer  # noqa: E402

OUT = object()
TEXT_IDS, ROWS, TOLERANCE = 456, 70, 1e-3
SIZES = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 128, "rms_norm_eps": 1e-5, "vocab_size": TEXT_IDS, "hidden_act": "silu", "rope_theta": 500.0,
    "initializer_range": 0.3, "head_dim": 32,
}  # fmt: skip
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
ROPES = {
    "plain": {},
    "llama3": {"rope_scaling": {"rope_type": "llama3", **LLAMA3}},
    "llama3 of transformers 5": {
        "rope_theta": OUT, "rope_parameters": {"rope_type": "llama3", "rope_theta": 500.0, **LLAMA3}
    },
    "yarn": {"rope_scaling": YARN},
    "yarn with bounds": {"rope_scaling": {**YARN, "beta_fast": 8.0, "beta_slow": 0.5, "truncate": True}},
    "no rope_theta": {"rope_theta": OUT},
}  # fmt: skip
OWN = {
    "qwen3": {
        "keys that are not read": {
            "sliding_window": 4, "use_sliding_window": False, "max_window_layers": 1, "tie_word_embeddings": True,
            "pretraining_tp": 2, "qkv_bias": False, "partial_rotary_factor": 1.0, "quantization_config": None,
        },
        "one head each": {"num_key_value_heads": None, "num_attention_heads": 2},
    },
    "llama": {
        "attention bias": {"attention_bias": True},
        "mlp bias": {"mlp_bias": True},
        "both biases": {"attention_bias": True, "mlp_bias": True},
        "keys that are not read": {"bias": False, "qkv_bias": False, "sliding_window": None, "rope_interleaved": False},
        "head size by division": {"head_dim": None, "num_attention_heads": 2, "num_key_value_heads": 1},
    },
    "olmo2": {
        "attention bias": {"attention_bias": True},
        "keys that are not read": {"clip_qkv": None, "mlp_bias": False, "is_causal": True},
        "head size by division": {"head_dim": OUT, "num_attention_heads": 2, "num_key_value_heads": 2},
    },
}  # fmt: skip


def config_of(kind: str, changes: dict) -> dict:
    """config.json with ``changes``, of which OUT leaves a key out."""
    merged = {"model_type": kind, **SIZES, **changes}
    return {key: value for key, value in merged.items() if value is not OUT}


def random_model(folder, vocab_size: int):
    """What transformers makes of config.json in ``folder``, with every weight drawn, biases and norms too."""
    config = AutoConfig.from_pretrained(folder)
    config.vocab_size, config.tie_word_embeddings = vocab_size, False
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    for name, tensor in model.state_dict().items():
        if name.endswith(".bias") or "norm" in name:
            tensor.normal_(1.0 if "norm" in name else 0.0, 0.3)
    return model


@torch.inference_mode()
def plain_logits(model, stream_emb, layout, rows) -> tuple[torch.Tensor, torch.Tensor]:
    """transformers' forward pass over ``rows`` as fed: [T, V] of stream 0 and [T, S-1, W] of the others' candidates."""
    ids = torch.as_tensor(rows, dtype=torch.long)
    vectors = model.get_input_embeddings()(ids)
    vectors[:, 1:][ids[:, 1:] == layout.pad] = 0
    hidden = model.get_decoder()(inputs_embeds=vectors.sum(1)[None]).last_hidden_state[0]
    candidates = torch.tensor(layout.auxiliary_candidates())
    others = [model.lm_head(hidden + stream_emb[s])[:, candidates[s - 1]] for s in range(1, layout.num_streams)]
    return model.lm_head(hidden), torch.stack(others, dim=1)


def check_rows(request, result, model, stream_emb, layout) -> None:
    """Logits and ids of a backend against the plain forward pass over the same rows."""
    rows = np.concatenate([request.prompt, result.rows])
    primary, others = plain_logits(model, stream_emb, layout, rows[:-1])
    start, candidates, allowed = len(request.prompt) - 1, layout.auxiliary_candidates(), slice(*layout.streams[0])
    for place, (mine, mine_others) in enumerate(result.logits):
        np.testing.assert_allclose(mine, primary[start + place], atol=TOLERANCE)
        if place:  # behind the modality come rows of audio, all of their streams
            np.testing.assert_allclose(mine_others, others[start + place], atol=TOLERANCE)
            best = [candidates[s][int(row.argmax())] for s, row in enumerate(others[start + place])]
            best.insert(0, allowed.start + int(primary[start + place][allowed].argmax()))
            assert result.rows[place].tolist() == best


def make(folder: pathlib.Path, kind: str, changes: dict):
    """A converted checkpoint of that backbone, what transformers makes of it, and its stream embedding."""
    source = copy_of("bagpiper", folder, "qwen3-s8-cb64")
    (source / "backbone/config.json").write_text(json.dumps(config_of(kind, changes)), encoding="utf-8")
    model = random_model(source / "backbone", 1232 - 456 + TEXT_IDS)
    kept = {}

    def change(tensors):
        kept["stream_emb"] = tensors["stream_emb.weight"]
        for name in [name for name in tensors if name.startswith(("model.", "lm_head."))]:
            del tensors[name]
        tensors.update(model.state_dict())

    change_tensors(source, change)
    convert(source, folder / "converted")
    return open_checkpoint(folder / "converted"), model, kept["stream_emb"]


def rows_of(backend: str, checkpoint, **options):
    """Request and result of one greedy audio segment of ROWS rows."""
    settings = {"dtype": "float32", "enforce_modality": ["audio"]}
    settings["audio"] = {"temperature": 0.0, "topk": 1, "max_step": ROWS, "min_step": ROWS}
    text = TextTokenizer(checkpoint.tokenizer_dir)
    utterance = bagpiper_utterance(checkpoint.layout, text, [["user", "text", "tell me something"]], key="a")
    engine = make_engine(backend, checkpoint, "float32", keep_logits=True, **options)
    try:
        (result,) = decode(engine, [utterance], load_decoding(settings, "bagpiper"), seed=0)
    finally:
        engine.close()
    ((request, rows),) = result.hypotheses[0].requests
    assert len(rows.rows) == ROWS + 1, result.reason
    return request, rows


def main(folder: str, kind: str, *names: str) -> None:
    settings = {**ROPES, **OWN[kind]}
    made = {}
    for name in names or settings:
        made[name] = make(pathlib.Path(folder, name), kind, settings[name])
    expected = {}
    for name, (checkpoint, model, stream_emb) in made.items():
        expected[name] = rows_of("pytorch", checkpoint)
        check_rows(*expected[name], model, stream_emb, checkpoint.layout)
    for name, (checkpoint, _, _) in made.items():
        (_, mine), (_, theirs) = rows_of("vllm", checkpoint, max_num_seqs=2), expected[name]
        np.testing.assert_array_equal(mine.rows, theirs.rows)
        for one, other in zip(mine.logits, theirs.logits, strict=True):
            np.testing.assert_allclose(one[0], other[0], atol=TOLERANCE)
            np.testing.assert_allclose(one[1], other[1], atol=TOLERANCE)
        print(f"{kind}: {name}: the same", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
