"""Tokenizers are what their files state, as transformers 4.57, with which models were trained, took them."""

import json

import pytest
from tokenizer_kinds import KINDS, RECORDING, build

from espnet2_vllm.errors import CheckpointError
from espnet2_vllm.text import TextTokenizer

RECORDED = json.loads(RECORDING.read_text(encoding="utf-8"))


@pytest.mark.parametrize("kind", KINDS)
def test_ids_and_texts_are_those_of_the_file(kind, tmp_path):
    """Digits apart before bytes (SmolLM2), patterns (OLMo-2), NFC (Qwen3), SentencePiece (Llama); both families, there and back."""
    assert RECORDED["transformers"].startswith("4.57.")
    recorded = RECORDED["records"][RECORDED["kinds"][kind]]
    text = TextTokenizer(build(kind, tmp_path / kind))
    cleaning, bpe = TextTokenizer(text.directory, clean_up=True), kind != "llama-unigram"
    assert len(text) == recorded["size"]
    for probe, (bagpiper, opuslm) in zip(RECORDED["probes"], recorded["encoded"], strict=True):
        assert text.encode_bagpiper(probe) == bagpiper, probe
        assert text.encode_opuslm(probe) == opuslm, probe
    for ids, kept, cleaned, opuslm in recorded["decoded"]:
        assert text.decode_bagpiper(ids) == (kept if bpe else cleaned)
        assert cleaning.decode_bagpiper(ids) == cleaned
        assert text.decode_opuslm(ids) == opuslm


@pytest.mark.parametrize("kind", ["qwen3", "olmo2", "llama3"])
def test_todays_transformers_agrees_on_models_that_have_a_config(kind, tmp_path):
    """ESPnet decodes Bagpiper with transformers 5: there is no other id with Qwen3's tokenizer."""
    from transformers import AutoTokenizer

    folder = build(kind, tmp_path / kind)
    theirs, ours = AutoTokenizer.from_pretrained(folder), TextTokenizer(folder)
    for probe in RECORDED["probes"]:
        assert list(theirs.encode(probe)) == ours.encode_bagpiper(probe)


def test_a_class_that_is_not_known_is_refused_by_name(tmp_path):
    folder = build("smollm2", tmp_path / "folder")
    settings = folder / "tokenizer_config.json"
    settings.write_text(json.dumps({"tokenizer_class": "BloomTokenizer"}))
    with pytest.raises(CheckpointError, match="'BloomTokenizer' is not known; known are PreTrainedTokenizer"):
        TextTokenizer(folder)
    settings.write_text("[" * 100_000)
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json cannot be read as JSON"):
        TextTokenizer(folder)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"fix_mistral_regex": True}, "fix_mistral_regex"),
        (
            {"bos_token": None, "tokenizer_class": "GPTNeoXTokenizer", "add_bos_token": True},
            "add_bos_token is true, but there is no bos_token",
        ),
        ({"add_prefix_space": True, "tokenizer_class": "LlamaTokenizer"}, r"missing: tokenizer\.model"),
        ({"added_tokens_decoder": {"x": {"content": "y"}}}, "no tokenizer can be loaded from here"),
    ],
)
def test_settings_that_cannot_be_honoured_are_refused(settings, said, tmp_path):
    folder = build("olmo2", tmp_path / "folder")
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))
    with pytest.raises(CheckpointError, match=said):
        TextTokenizer(folder)


def test_dropout_in_the_file_is_refused(tmp_path):
    folder = build("olmo2", tmp_path / "folder")
    content = json.loads((folder / "tokenizer.json").read_text())
    content["model"]["dropout"] = 0.1
    (folder / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=r"dropout 0\.1 draws other ids each time"):
        TextTokenizer(folder)


def test_padding_and_truncation_in_the_file_do_not_count(tmp_path):
    folder = build("olmo2", tmp_path / "folder")
    wanted = TextTokenizer(folder).encode_opuslm("a text that is longer")
    from tokenizers import Tokenizer

    file = Tokenizer.from_file(str(folder / "tokenizer.json"))
    file.enable_truncation(3)
    file.enable_padding(length=40)
    file.save(str(folder / "tokenizer.json"))
    assert TextTokenizer(folder).encode_opuslm("a text that is longer") == wanted
