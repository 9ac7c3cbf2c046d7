#!/usr/bin/env python3
"""ESPnet's own Bagpiper command line, several times in one process, with what it chose written down.

    espnet_judge.py FILE

FILE holds, in JSON, a list of {"words": its command line, "cwd": where it runs, "choices": an npz to write}. Of each segment of
each sample the npz has the rows that ``inference_segment`` gave back (``<sample>.<segment>.rows``, [N, S], the row that ends it
included), and by how much each choice beat the next best one (``.margins``, [N, S]).
"""

import contextlib
import functools
import json
import os
import pathlib
import sys
import traceback
from types import SimpleNamespace

import numpy as np

from espnet2_vllm.backends import espnet_process


class Choices:
    """What the models of one command line chose."""

    def __init__(self):
        self.found = []  # of each sample, of each segment (rows, margins)
        self.margins = []

    def watch(self, model):
        inference, segment, token = model.inference, model.inference_segment, model._logits_to_token

        @functools.wraps(inference)
        def new_sample(*args, **kwargs):
            self.found.append([])
            return inference(*args, **kwargs)

        @functools.wraps(segment)
        def new_segment(*args, **kwargs):
            self.margins = []
            hypotheses, cache, logits = segment(*args, **kwargs)
            rows = hypotheses[0].numpy()
            self.found[-1].append((rows, np.stack(self.margins)[: len(rows)]))
            return hypotheses, cache, logits

        @functools.wraps(token)
        def choice(logits, *args, **kwargs):
            best, next_best = logits[0, 0].topk(2).values.unbind(-1)
            self.margins.append((best - next_best).numpy())
            return token(logits, *args, **kwargs)

        model.inference, model.inference_segment, model._logits_to_token = new_sample, new_segment, choice
        return model

    def write(self, path):
        arrays = {}
        for sample, segments in enumerate(self.found):
            for number, (rows, margins) in enumerate(segments):
                arrays |= {f"{sample}.{number}.rows": rows, f"{sample}.{number}.margins": margins}
        np.savez(path, **arrays)


class InThisProcess:
    """Has the interface of multiprocessing.Process."""

    def __init__(self, target, args):
        self.target, self.args, self.exitcode = target, args, 0

    def start(self):
        try:
            self.target(*self.args)
        except Exception:  # noqa: BLE001 - as a process would end; the judge looks at what is there
            traceback.print_exc()
            self.exitcode = 1

    def join(self):
        pass


def watched(job, choices):
    class Watched(job):
        def build_model(self, *args, **kwargs):
            return choices.watch(super().build_model(*args, **kwargs))

    return Watched


def main():
    from espnet2.speechlm.bin import inference

    jobs, worker = inference._all_job_types, inference.inference_worker
    for run in json.loads(pathlib.Path(sys.argv[1]).read_text(encoding="utf-8")):
        choices = Choices()
        inference._all_job_types = {name: watched(job, choices) for name, job in jobs.items()}
        inference.inference_worker = worker
        sys.argv[1:] = run["words"]
        try:
            with contextlib.chdir(run["cwd"]):
                espnet_process.main(SimpleNamespace(Process=InThisProcess))
        except RuntimeError as error:  # of workers that failed
            print(error, *run["words"], flush=True)
        choices.write(run["choices"])


if __name__ == "__main__":
    assert os.environ.get("HF_HUB_OFFLINE") == "1"
    main()
