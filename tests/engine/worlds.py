"""Random layouts and rules for property tests; everything comes from the generator that is passed in."""

import random

from espnet2_vllm.layout import Layout
from espnet2_vllm.protocol import BagpiperRules, ModalityRules, OpusLMRules, Sampling


def bagpiper_layout(rng: random.Random) -> Layout:
    return Layout.bagpiper(rng.randint(20, 60), [rng.randint(4, 9)] * rng.randint(2, 9))


def opuslm_layout(rng: random.Random) -> Layout:
    books, size, ssl, text = rng.randint(1, 8), rng.randint(3, 8), rng.randint(5, 12), rng.randint(20, 40)
    names = [f"<unused_token_{i}>" for i in range(256)]
    fixed = {0: "<pad>", 1: "<unk>", 5: "<sos/eos>", 8: "<system_prompt>", 9: "<user_input>", 10: "<assistant_output>"}
    fixed |= {32: "<codec_start/end>", 34: "<codec_ssl_start/end>", 35: "<text_bpe_start/end>", 37: "<spk_start/end>"}
    for i, name in fixed.items():
        names[i] = name
    bounds = [256, 256 + ssl, 256 + ssl + books * size, 256 + ssl + books * size + text]
    bias = {"special_token": [0, 256], "ssl": bounds[0:2], "codec": bounds[1:3], "text_bpe": bounds[2:4]}
    return Layout.opuslm(names, bias, books + 1)


def sampling(rng: random.Random) -> Sampling:
    return Sampling(rng.choice([0.5, 0.8, 1.0, 1.3]), rng.choice([1, 1, 2, 5, 20]))


def bagpiper_rules(layout: Layout, rng: random.Random) -> BagpiperRules:
    def block() -> ModalityRules | None:
        if rng.random() < 0.1:
            return None
        high = rng.randint(1, 14)
        return ModalityRules(sampling(rng), rng.randint(0, high), high, rng.choice([1.0, 3.0]), rng.random() < 0.15)

    enforce = [rng.choice(["text", "audio", "audio", "image"]) for _ in range(rng.randint(0, 3))]
    return BagpiperRules(layout, tuple(enforce), block(), block())


def opuslm_rules(layout: Layout, rng: random.Random) -> OpusLMRules:
    high = rng.randint(layout.num_streams, layout.num_streams + 20)
    return OpusLMRules(layout, rng.choice(["text", "audio"]), sampling(rng), rng.randint(0, high), high)


def world(rng: random.Random):
    """A layout and a maker of rules for it."""
    if rng.random() < 0.5:
        layout = bagpiper_layout(rng)
        return layout, lambda: bagpiper_rules(layout, rng)
    layout = opuslm_layout(rng)
    return layout, lambda: opuslm_rules(layout, rng)
