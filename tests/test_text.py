"""Texts and ids against what ESPnet's tokenizers gave."""

import json

import numpy as np
import pytest
import tokenizers
import torch
from conftest import golden_files, golden_models
from golden_layouts import opuslm_config
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from espnet2_vllm.errors import CheckpointError, DataError
from espnet2_vllm.text import TextTokenizer


def recorded(family: str, pattern: str) -> list:
    models = {model.name: model for model in golden_models(family)}
    found = []
    for path in golden_files(f"{family}/functions/{pattern}"):
        name = path.stem.split("_", 1)[1]
        if name in models:
            found.append(pytest.param(path, models[name], id=name))
    return found


@pytest.mark.parametrize(("path", "model"), recorded("bagpiper", "preprocess_*.json"))
def test_bagpiper_texts_are_espnets(path, model):
    tokenizer = TextTokenizer(model / "backbone", clean_up=True)
    data = json.loads(path.read_text(encoding="utf-8"))
    assert data["tokenize"] and data["detokenize"]
    for case in data["tokenize"]:
        assert tokenizer.encode_bagpiper(case["text"]) == case["ids"], case
    for case in data["detokenize"]:
        assert tokenizer.decode_bagpiper(case["ids"]) == case["text"], case


PUNCTUATED = ["Hello , world .", "I do n't think so ?", "it 's a dog ! , isn ' t it", " a  b\n\n c ."]


@pytest.mark.parametrize("model", golden_models("bagpiper"), ids=lambda p: p.name)
def test_generated_text_is_that_of_todays_espnet(model):
    """Blanks before punctuation stay, as transformers 5 has it for BPE; and go where they went with transformers 4."""
    io = pytest.importorskip("espnet2.speechlm.model.speechlm.multimodal_io.text").HuggingFaceTextIO(model / "backbone")
    today, older = TextTokenizer(model / "backbone"), TextTokenizer(model / "backbone", clean_up=True)
    rng = np.random.default_rng(1)
    texts = [io.preprocess(text)[0] for text in PUNCTUATED]
    for ids in [*texts, *(rng.integers(0, io.vocab_size, (30, 1)) for _ in range(5))]:
        (text,) = io.decode_batch(torch.from_numpy(ids)[None], [len(ids)])
        assert today.decode_bagpiper(ids[:, 0]) == text
        assert older.decode_bagpiper(ids[:, 0]) == PreTrainedTokenizerBase.clean_up_tokenization(None, text)
    assert today.decode_bagpiper(texts[0][:, 0]).endswith("Hello , world .")
    assert older.decode_bagpiper(texts[0][:, 0]).endswith("Hello, world.")


def test_text_of_a_tokenizer_that_is_no_bpe_is_cleaned_up_as_ever(tmp_path):
    """transformers 5 keeps doing so for all kinds but BPE, and so ESPnet asks for it."""
    vocabulary = [("<unk>", 0.0), ("\u2581hello", -1.0), ("\u2581,", -1.5), ("\u2581world", -2.0)]
    plain = tokenizers.Tokenizer(tokenizers.models.Unigram(vocabulary, unk_id=0))
    plain.pre_tokenizer, plain.decoder = tokenizers.pre_tokenizers.Metaspace(), tokenizers.decoders.Metaspace()
    PreTrainedTokenizerFast(tokenizer_object=plain).save_pretrained(tmp_path)
    tokenizer = TextTokenizer(tmp_path)
    ids = tokenizer.encode_bagpiper("hello , world")
    assert len(ids) == 3
    assert tokenizer.decode_bagpiper(ids) == "hello, world"


@pytest.mark.parametrize("model", golden_models("bagpiper"), ids=lambda p: p.name)
def test_bagpiper_vocabulary_names_the_tokenizers_tokens(model):
    (path,) = golden_files(f"bagpiper/functions/vocab_{model.name}.json")
    data = json.loads(path.read_text(encoding="utf-8"))
    assert data["model"] == model.name
    tokenizer = TextTokenizer(model / "backbone")
    start, stop = data["vocab_intervals"]["text"][0]
    assert tokenizer.differences(data["vocab"][start : start + len(tokenizer)]) == []
    assert len(tokenizer) <= stop - start


@pytest.mark.parametrize("model", golden_models("bagpiper"), ids=lambda p: p.name)
def test_bagpiper_ids_without_a_token_vanish(model):
    tokenizer = TextTokenizer(model / "backbone")
    ids = tokenizer.encode_opuslm("hello there")
    assert tokenizer.decode_bagpiper([ids[0], len(tokenizer), -5, *ids[1:], 10**6]) == tokenizer.decode_bagpiper(ids)


@pytest.mark.parametrize(("path", "model"), recorded("opuslm", "tokenizer_*.json"))
def test_opuslm_texts_are_espnets(path, model):
    tokenizer = TextTokenizer(model / "hf_backbone")
    config = opuslm_config(model)
    start = config["token_bias"]["text_bpe"][0]
    cases = json.loads(path.read_text(encoding="utf-8"))
    assert cases
    for case in cases:
        if "text" in case:
            assert [start + i for i in tokenizer.encode_opuslm(case["text"])] == case["ids"], case
        assert [config["token_list"][i] for i in case["ids"]] == case["tokens"], case
        assert tokenizer.decode_opuslm([i - start for i in case["ids"]]) == case["text_back"], case


@pytest.mark.parametrize("model", golden_models("opuslm"), ids=lambda p: p.name)
def test_token_list_is_the_tokenizers_vocabulary(model):
    tokenizer = TextTokenizer(model / "hf_backbone")
    config = opuslm_config(model)
    names = config["token_list"][slice(*config["token_bias"]["text_bpe"])]
    assert tokenizer.differences(names) == []
    swapped = [*names[:3], names[4], names[3], *names[5:]]
    assert [d.index for d in tokenizer.differences(swapped)] == [3, 4]
    assert [d.index for d in tokenizer.differences([*names, names[7]])] == [len(names)]


@pytest.mark.parametrize("model", golden_models("opuslm"), ids=lambda p: p.name)
def test_opuslm_texts_of_the_cases(model):
    """What ESPnet's writer wrote for the recorded token arks of generated text."""
    tokenizer = TextTokenizer(model / "hf_backbone")
    checked = 0
    for path in sorted((model / "cases").glob("*.json")):
        case = json.loads(path.read_text(encoding="utf-8"))
        with np.load(path.with_suffix(".npz")) as arrays:
            for line in case.get("writer", {}).get("text", []):
                key, _, text = line.partition(" ")
                name = f"writer.text.tokens.{key}"
                assert tokenizer.decode_opuslm(arrays[name]) == text, (path.name, key)
                checked += 1
    assert checked


def test_missing_folder_is_said(tmp_path):
    with pytest.raises(CheckpointError, match="no such tokenizer folder"):
        TextTokenizer(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match="no tokenizer can be loaded"):
        TextTokenizer(tmp_path)


def test_half_of_a_surrogate_pair_is_refused():
    """JSON can hold one, as where a text was cut in the middle of an emoji; the tokenizer raises a TypeError."""
    text = TextTokenizer(golden_models("opuslm")[0] / "hf_backbone")
    for encode in (text.encode_bagpiper, text.encode_opuslm):
        with pytest.raises(DataError, match=r"has '\\ud83d' at character 2, half of a surrogate pair"):
            encode("a\ud83d b")
