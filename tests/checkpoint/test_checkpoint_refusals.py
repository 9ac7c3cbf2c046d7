"""What is wrong with a checkpoint is said by name and place, and nothing is left behind."""

import json
import re
import shutil

import pytest
import torch
from checkpoint_samples import (
    change_tensors,
    change_text,
    converted,
    copy_of,
    golden_layout,
    model_file,
    of_family,
    state_dict,
)

from espnet2_vllm.checkpoint import convert, open_checkpoint
from espnet2_vllm.errors import CheckpointError, ConfigError

CODEC = "multimodal_io_dict.discrete_audio.codec_model."


def refused(folder, words, **options):
    """Converting ``folder`` raises CheckpointError with ``words`` (regular expression); no file appears."""
    target = folder.parent / "out" / "converted"
    with pytest.raises(CheckpointError, match=words) as caught:
        convert(folder, target, **options)
    assert not target.exists()
    assert not target.parent.exists() or not any(target.parent.iterdir())
    return str(caught.value)


@pytest.mark.parametrize("family", ["bagpiper", "opuslm"])
def test_truncated_file(family, tmp_path):
    folder = copy_of(family, tmp_path)
    path = model_file(folder)
    path.write_bytes(path.read_bytes()[:-5000])
    assert str(path) in refused(folder, "cut short")


def test_missing_and_unknown_tensors_together(tmp_path):
    folder = copy_of("opuslm", tmp_path, "tiny-olmo2")

    def rename(tensors):
        tensors["corelm.decoders.model.norm.wait"] = tensors.pop("corelm.decoders.model.norm.weight")

    change_tensors(folder, rename)
    message = refused(folder, r"1 missing: corelm.decoders.model.norm.weight \[64\]")
    assert "1 unknown: corelm.decoders.model.norm.wait bfloat16 [64]" in message


def test_shape(tmp_path):
    folder = copy_of("bagpiper", tmp_path)
    change_tensors(folder, lambda tensors: tensors.update({"model.norm.weight": torch.zeros(32)}))
    refused(folder, r"1 of another shape: model.norm.weight is \[32\], expected \[64\]")


def test_weights_that_mean_nothing(tmp_path):
    folder = copy_of("bagpiper", tmp_path)
    kept = state_dict(model_file(folder))["model.norm.weight"].clone()
    for value in (float("nan"), float("-inf")):
        changed = kept.clone()
        changed[5] = value
        change_tensors(folder, lambda tensors, changed=changed: tensors.update({"model.norm.weight": changed}))
        refused(folder, "model.norm.weight holds NaN or infinite values as .*diverged")
    change_tensors(folder, lambda tensors: tensors.update({"model.norm.weight": kept.float() + 1e6}))
    refused(folder, "model.norm.weight holds NaN or infinite values as float16", dtype="float16")
    change_tensors(folder, lambda tensors: tensors.update({"model.norm.weight": kept.long()}))
    refused(folder, r"1 of no floating type: model.norm.weight int64 \[64\]")


def test_ids_whose_weights_mean_nothing_are_told_of(tmp_path, caplog):
    """They may be ids that nobody uses."""
    folder = copy_of("bagpiper", tmp_path)

    def spoil(tensors):
        weight = tensors["model.embed_tokens.weight"].clone()
        weight[[7, 9]] = float("nan")
        tensors["model.embed_tokens.weight"] = weight

    change_tensors(folder, spoil)
    convert(folder, tmp_path / "out")
    assert "model.embed_tokens.weight holds NaN or infinite values as float32" in caplog.text
    assert re.search(r"for 2 of \d+ ids \(7, 9\), which must not be used", caplog.text)


def test_wrong_family(tmp_path):
    folder = copy_of("bagpiper", tmp_path)
    other = of_family("opuslm")[0]
    refused(folder, "bagpiper family, expected one of the opuslm family", family="opuslm")
    refused(folder, "model of the bagpiper family .* of the opuslm family", train_config=other / "config.yaml")
    with pytest.raises(CheckpointError, match="bagpiper family, expected one of the opuslm family"):
        open_checkpoint(converted(of_family("bagpiper")[0]), family="opuslm")


def test_vocabulary_that_does_not_close(tmp_path):
    folder = copy_of("opuslm", tmp_path / "a", "tiny-olmo2")
    change_tensors(folder, lambda tensors: tensors.update({"corelm.emb.weight": torch.zeros(1056, 64)}))
    refused(folder, r"does not close: corelm.emb.weight .* is \[1056, 64\], .* = 1052 ids")

    folder = copy_of("opuslm", tmp_path / "b", "tiny-olmo2")
    change_text(folder / "config.yaml", ("    - 1042\n    - 1052\n", "    - 1042\n    - 1062\n"))
    refused(folder, "token_list has 1052 entries, but token_bias ends at 1062")

    folder = copy_of("opuslm", tmp_path / "c", "tiny-olmo2")
    change_text(folder / "hf_backbone/config.json", ('"vocab_size": 480', '"vocab_size": 512'))
    refused(folder, "text 480 ids, but the backbone 'hf_backbone' .* 512")

    folder = copy_of("bagpiper", tmp_path / "d", "qwen3-s8-cb64")
    change_text(folder / "backbone/config.json", ('"vocab_size": 456', '"vocab_size": 460'))
    refused(folder, r"does not close: model.embed_tokens.weight .* is \[1232, 64\], .* 460 text .* = 1236 ids")


def test_codec_that_does_not_fit(tmp_path):
    folder = copy_of("bagpiper", tmp_path / "a", "qwen3-s8-cb64")
    change_text(
        folder / "train.yaml", ("delay_interleave: true", "delay_interleave: true\n    codec_max_token_per_frame: 4")
    )
    refused(folder, "does not close: .* 4 streams x 65 audio")

    folder = copy_of("bagpiper", tmp_path / "b", "qwen3-s8-cb64")
    change_text(folder / "codec/config.json", ('"codebook_size": 64', '"codebook_size": 128'))
    refused(folder, r"does not close: model.embed_tokens.weight .* x 129 audio")

    folder = copy_of("bagpiper", tmp_path / "c", "qwen3-s8-cb64")
    change_tensors(folder, lambda tensors: tensors.pop(CODEC + "fc.weight"))
    refused(folder, f"1 missing: {CODEC}fc.weight")

    folder = copy_of("opuslm", tmp_path / "d")
    change_text(folder / "codec/config.yaml", ("quantizer_bins: 32", "quantizer_bins: 64"))
    refused(folder, "codec does not fit the layout: .* 8 codebooks of 64 codes .* vocabulary has 8 codebooks of 32")


def swap_keys(folder):
    """discrete_audio before text in multimodal_io."""
    text = (folder / "train.yaml").read_text(encoding="utf-8")
    change_text(
        folder / "train.yaml",
        ("  text:\n    tokenizer_name: backbone\n", ""),
        ("model:\n  model_choice", "  text:\n    tokenizer_name: backbone\nmodel:\n  model_choice"),
    )
    assert (folder / "train.yaml").read_text(encoding="utf-8") != text


def test_audio_before_text_is_read_and_said(tmp_path, caplog):
    folder = copy_of("bagpiper", tmp_path, "qwen3-s8-cb64")
    layout = golden_layout(folder)
    swap_keys(folder)
    report = convert(folder, tmp_path / "converted")
    other = open_checkpoint(tmp_path / "converted").layout
    assert other.vocab_size == layout.vocab_size
    assert other.streams[0].start == 256
    assert other.streams[-1].stop == other.text.start == 256 + 8 * 65
    assert other.text.size == layout.text.size
    assert open_checkpoint(tmp_path / "converted").source["vocab_order"] == "yaml"
    warning = "names discrete_audio first and has no vocab_intervals"
    assert warning in caplog.text and any(warning in line for line in report.lines)
    convert(folder, tmp_path / "by_name", vocab_order="name")
    assert open_checkpoint(tmp_path / "by_name").layout == layout


def record(folder, layout):
    """``vocab_intervals`` of ``layout``, at the end of the yaml, as ESPnet's trainer writes it."""
    streams = [list(span) for span in layout.streams]
    kept = {"special_token": [[0, 256]], "text": [list(layout.text)], "discrete_audio": streams}
    with open(folder / "train.yaml", "a", encoding="utf-8") as file:
        file.write(f"vocab_intervals: {json.dumps(kept)}\n")


def test_the_recorded_ids_outrank_keys_and_option(tmp_path, caplog):
    folder = copy_of("bagpiper", tmp_path, "qwen3-s8-cb64")
    layout = golden_layout(folder)
    record(folder, layout)
    convert(folder, tmp_path / "as_recorded")
    assert open_checkpoint(tmp_path / "as_recorded").layout == layout
    swap_keys(folder)
    refused(
        folder,
        r"vocab_intervals records the ids in the order special_token, text, discrete_audio, but by --vocab-order yaml they are in "
        r"the order special_token, discrete_audio, text \(text: \[\[256, 712\]\] recorded, \[\[776, 1232\]\] here",
    )
    convert(folder, tmp_path / "by_name", vocab_order="name")
    assert open_checkpoint(tmp_path / "by_name").layout == layout
    swapped = copy_of("bagpiper", tmp_path / "swapped", "qwen3-s8-cb64")
    swap_keys(swapped)
    convert(swapped, tmp_path / "first")
    caplog.clear()
    record(swapped, open_checkpoint(tmp_path / "first").layout)
    convert(swapped, tmp_path / "second")
    assert open_checkpoint(tmp_path / "second").layout.streams[0].start == 256
    assert "no vocab_intervals" not in caplog.text
    with pytest.raises(CheckpointError, match="order special_token, discrete_audio, text, but by --vocab-order name"):
        convert(swapped, tmp_path / "third", vocab_order="name")


@pytest.mark.parametrize("wrong", ["text", "{text: 3}", "{text: [[a, b]]}", "{text: []}", "[[0, 256]]"])
def test_a_record_of_another_kind_is_named(wrong, tmp_path):
    folder = copy_of("bagpiper", tmp_path, "qwen3-s8-cb64")
    with open(folder / "train.yaml", "a", encoding="utf-8") as file:
        file.write(f"vocab_intervals: {wrong}\n")
    refused(folder, r"train.yaml: vocab_intervals is .*, expected \[\[first id, id behind the last\]")


@pytest.mark.parametrize(
    ("pair", "words"),
    [
        (("model_choice: parallel", "model_choice: serial"), "model.model_choice is 'serial'; supported are parallel"),
        (("ssl_choice: null", "ssl_choice: ESPnet"), "ssl_choice is 'ESPnet'"),
        (("delay_interleave: true", "delay_interleave: false"), "delay_interleave is False"),
        (("codec_choice: Xcodec", "codec_choice: EnCodec"), "codec_choice 'EnCodec'"),
        (
            ("codec_hf_model_tag: codec", "codec_hf_model_tag: gone/codec"),
            "Xcodec model 'gone/codec' not found: looked for .*",
        ),
        (
            ("  model_hf_tag: backbone", "  model_hf_tag: Qwen/Qwen9-8B"),
            "model_hf_tag .*'Qwen/Qwen9-8B' not found.*hf download",
        ),
        (("    tokenizer_name: backbone", "    tokenizer_name: codec"), "tokenizer_name 'codec' holds no tokenizer"),
        (("  discrete_audio:\n", "  image: {}\n  discrete_audio:\n"), "multimodal_io.image is not supported"),
        (("audio_output: discrete_audio", "audio_output: text"), "audio_output is 'text'"),
        (("audio_input: discrete_audio", "audio_input: continuous_audio"), "audio_input is 'continuous_audio', which"),
        (("job_type: speechlm", "job_type: asr"), "job_type is 'asr'"),
        (("    dtype: float32", "    dtype: int8"), "model_conf.dtype is 'int8'"),
        (("  model_conf:\n", "  model_conf: x\n  other:\n"), "model.model_conf is 'x', expected a mapping"),
    ],
)
def test_bagpiper_yaml(pair, words, tmp_path):
    folder = copy_of("bagpiper", tmp_path, "qwen3-s8-cb64")
    change_text(folder / "train.yaml", pair)
    target = tmp_path / "converted"
    with pytest.raises((CheckpointError, ConfigError), match=words) as caught:
        convert(folder, target)
    assert "train.yaml" in str(caught.value) or "not found" in str(caught.value)
    assert not target.exists()


@pytest.mark.parametrize(
    ("pair", "words"),
    [
        (("corelm: ar_delay", "corelm: ar_parallel"), "corelm is 'ar_parallel'; only 'ar_delay'"),
        (("transformer: huggingface", "transformer: builtin"), "transformer is 'builtin'"),
        (("subword_choice: huggingface", "subword_choice: sentencepiece"), "subword_choice is 'sentencepiece'"),
        (("audio_modality: codec_ssl", "audio_modality: codec"), "audio_modality is 'codec'"),
        (("    hf_model_tag: hf_backbone", "    hf_model_tag: codec"), "codec has no config.json"),
        (("codec_token_in_use: 9", "codec_token_in_use: 8"), "256 codec ids cannot be shared evenly by 7 codebooks"),
        (("    hf_model_tag: hf_backbone\n", ""), "key transformer_conf.hf_model_tag is missing"),
        (("- <system_prompt>\n", "- [a, b]\n"), r"token_list has \['a', 'b'\] as entry 8, expected the name"),
        (("    ssl:\n", "    ssl: 3\n    other:\n"), r"token_bias.ssl is 3, expected \[first id"),
        (("codec_token_in_use: 9", "codec_token_in_use: nine"), "codec_token_in_use is 'nine', expected int"),
        (("codec_token_in_use: 9", "codec_token_in_use: !!bool nine"), "cannot read .*config.yaml"),
        (("codec_token_in_use: 9", "codec_token_in_use: 2001-99-99"), "cannot read .*config.yaml: month must be"),
        (("- <system_prompt>\n", "- <system>\n"), "lacks the special tokens <system_prompt>"),
    ],
)
def test_opuslm_yaml(pair, words, tmp_path):
    folder = copy_of("opuslm", tmp_path)
    change_text(folder / "config.yaml", pair)
    refused(folder, words)


def test_unsupported_backbone(tmp_path):
    folder = copy_of("opuslm", tmp_path, "tiny-llama")
    config = {"model_type": "gpt_neox", "architectures": ["GPTNeoXForCausalLM"], "vocab_size": 460}
    (folder / "hf_backbone/config.json").write_text(json.dumps(config), encoding="utf-8")
    refused(folder, "'gpt_neox'; supported are qwen3, llama, olmo2")


def test_second_head_that_differs(tmp_path):
    folder = copy_of("opuslm", tmp_path)

    def change(tensors):
        tensors["criterion.lm_head.weight"] = tensors["corelm.lm_head.weight"].clone()
        tensors["criterion.lm_head.weight"][3, 5] += 1

    change_tensors(folder, change)
    refused(folder, "corelm.lm_head.weight and criterion.lm_head.weight differ")


def test_foreign_tokenizer(tmp_path):
    """Of the right size, but with two tokens swapped."""
    folder = copy_of("opuslm", tmp_path, "tiny-llama")
    path = folder / "hf_backbone/tokenizer.json"
    tokenizer = json.loads(path.read_text(encoding="utf-8"))
    vocabulary = tokenizer["model"]["vocab"]
    a, b = [token for token in vocabulary if len(token) == 1][10:12]
    vocabulary[a], vocabulary[b] = vocabulary[b], vocabulary[a]
    path.write_text(json.dumps(tokenizer), encoding="utf-8")
    refused(folder, "not the one of token_list: 2 tokens differ")


def test_tokenizer_larger_than_the_text(tmp_path):
    folder = copy_of("bagpiper", tmp_path, "qwen3-s8-cb64")
    change_text(folder / "backbone/config.json", ('"vocab_size": 456', '"vocab_size": 436'))

    def shorten(tensors):
        for name in ("model.embed_tokens.weight", "lm_head.weight"):
            tensors[name] = tensors[name][:-20].clone()

    change_tensors(folder, shorten)
    refused(folder, "has 440 tokens, but text has 436 ids")


def test_codec_of_opuslm_may_be_elsewhere(tmp_path):
    """It is no part of the checkpoint: the report says that it was not found, and what was looked for."""
    folder = copy_of("opuslm", tmp_path)
    shutil.rmtree(folder / "codec")
    report = convert(folder, tmp_path / "converted")
    assert open_checkpoint(tmp_path / "converted").codec is None
    assert any("not at hand" in line and "codec/config.yaml" in line for line in report.lines)
    (folder / "decode_default.yaml").unlink()
    report = convert(folder, tmp_path / "converted")
    assert any("does not exist" in line and "codec_ssl.tokenizer" in line for line in report.lines)


def test_codec_by_hub_tag(tmp_path):
    folder = copy_of("opuslm", tmp_path)
    change_text(
        folder / "decode_default.yaml",
        (
            "      config_path: codec/config.yaml\n      checkpoint_path: codec/360epoch.pth\n",
            "      hf_model_tag: some/codec\n",
        ),
    )
    convert(folder, tmp_path / "converted")
    codec = open_checkpoint(tmp_path / "converted").codec
    assert (codec.kind, codec.path, codec.sample_rate) == ("espnet", "some/codec", 16000)


def test_arguments(tmp_path):
    folder = copy_of("opuslm", tmp_path)
    with pytest.raises(ConfigError, match="dtype 'int4': expected one of keep, bfloat16"):
        convert(folder, tmp_path / "converted", dtype="int4")
    for family in ("opuslm", "bagpiper"):
        with pytest.raises(ConfigError, match="vocab_order 'nme': expected one of yaml, name"):
            convert(copy_of(family, tmp_path / family), tmp_path / "converted", vocab_order="nme")
    with pytest.raises(ConfigError, match="shard size 0"):
        convert(folder, tmp_path / "converted", shard_size=0)
    assert state_dict(model_file(folder))
