"""ESPnet's own Python interface, asked: ``espnet_asked.py QUESTIONS ANSWERS`` (pickles), with what reached its model."""

import pickle
import sys

import numpy as np
from espnet2.bin import speechlm_inference as espnet


def asked(model, method, args, options, decoding):
    """One call: its messages, the rows of the prompt, its settings, and the answer where it is greedy."""
    seen = {}
    collate, inference = model.preprocessor.collate_fn, model.model.inference

    def spy_collate(samples):
        ((_, content),) = samples
        seen["messages"] = content["dialogue"]
        batch = collate(samples)
        seen["rows"] = np.asarray(batch["seqs"][0])
        return batch

    def spy_inference(config, **batch):
        seen["config"] = config
        greedy = config["text"]["temperature"] == config["audio"]["temperature"] == 0
        return inference(config, **batch) if greedy else ([("assistant", "text", ["not asked"])], None)

    model.preprocessor.collate_fn, model.model.inference = spy_collate, spy_inference
    if decoding is not None:
        options = {**options, "decoding": espnet.Decoding(**decoding)}
    try:
        seen["answer"] = getattr(model, method)(*args, **options)
    finally:
        model.preprocessor.collate_fn, model.model.inference = collate, inference
    return seen


def main(questions, answers):
    with open(questions, "rb") as stream:
        releases, calls = pickle.load(stream)
    found = {}
    for name, options in releases:
        model = espnet.from_pretrained(name, device="cpu", **options)
        found[name] = str(model.dtype).removeprefix("torch."), [asked(model, *call) for call in calls]
    with open(answers, "wb") as stream:
        pickle.dump(found, stream)


if __name__ == "__main__":
    main(*sys.argv[1:])
