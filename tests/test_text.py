"""Texts and ids against what ESPnet's tokenizers gave."""

import json

import numpy as np
import pytest
from conftest import golden_files, golden_models
from golden_layouts import opuslm_config

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
    tokenizer = TextTokenizer(model / "backbone")
    data = json.loads(path.read_text(encoding="utf-8"))
    assert data["tokenize"] and data["detokenize"]
    for case in data["tokenize"]:
        assert tokenizer.encode_bagpiper(case["text"]) == case["ids"], case
    for case in data["detokenize"]:
        assert tokenizer.decode_bagpiper(case["ids"]) == case["text"], case


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
    ids = tokenizer._tokenizer.encode("hello there", add_special_tokens=False)
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
