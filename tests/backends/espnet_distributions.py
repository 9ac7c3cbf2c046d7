#!/usr/bin/env python3
"""What ESPnet's ``_logits_to_token`` draws from, by its own doing: ``espnet_distributions.py BACKBONE CASES.npz OUT.npz``.

CASES has ``<case>.logits`` [S, V], masked, and ``<case>.settings`` (temperature, topk). OUT gets ``<case>.ids`` and ``.probs``
[S, k], and ``<case>.drawn`` [DRAWS, S].
"""

import sys

import numpy as np
import torch

DRAWS = 5000


def main(backbone, cases, out):
    from espnet2.speechlm.model.speechlm.lm.parallel import build_parallel_hf_class

    torch.manual_seed(9)
    draw, given, arrays = build_parallel_hf_class(backbone)._logits_to_token, {}, {}
    real = {name: getattr(torch, name) for name in ("topk", "multinomial")}

    def topk(*args, **kwargs):
        result = real["topk"](*args, **kwargs)
        given["ids"] = result.indices
        return result

    def multinomial(probs, *args, **kwargs):
        given["probs"] = probs
        return real["multinomial"](probs, *args, **kwargs)

    torch.topk, torch.multinomial = topk, multinomial
    with np.load(cases) as file:
        for case in sorted({name.partition(".")[0] for name in file.files}):
            logits = torch.from_numpy(file[f"{case}.logits"])
            temperature, k = file[f"{case}.settings"].tolist()
            many = logits[None, None].expand(DRAWS, 1, -1, -1)
            drawn = draw(None, many, temperature, int(k))
            arrays[f"{case}.drawn"] = drawn[:, 0].numpy()
            arrays[f"{case}.ids"] = given["ids"][0, 0].numpy()
            arrays[f"{case}.probs"] = given["probs"][: len(logits)].numpy()
    np.savez(out, **arrays)


if __name__ == "__main__":
    main(*sys.argv[1:])
