"""A decode without a model, for tests that kill it: the real job, writers and files; what they write is made up from the keys.

python scripted_job.py OUT COUNT
"""

import pathlib
import sys

import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

from conftest import golden_models  # noqa: E402
from golden_layouts import opuslm_layout  # noqa: E402

from espnet2_vllm import backends  # noqa: E402
from espnet2_vllm.bin.job import run_job  # noqa: E402
from espnet2_vllm.io.journal import Journal  # noqa: E402
from espnet2_vllm.io.results import Speech  # noqa: E402
from espnet2_vllm.io.results_opuslm import TaskWriter  # noqa: E402
from espnet2_vllm.plan import Given, Hypothesis, Result, Segment, Utterance, Wanted  # noqa: E402


class Codec:
    sample_rate, hop = 16000, 320

    def decode_batch(self, clips):
        return [np.repeat(np.sin(codes.sum(1) / 7.0), self.hop).astype(np.float32) / 2 for codes in clips]


def utterance_of(layout, number):
    text = np.full((4, layout.num_streams), layout.pad, np.int32)
    text[:, 0] = [layout.specials["modality/text_bpe"], *(layout.text.start + np.arange(3) + number % 5)]
    head = np.full((1, layout.num_streams), layout.pad, np.int32)
    return Utterance(f"tts_u{number}", (Given(text, "text_bpe"), Wanted(head, "codec_ssl")))


def result_of(layout, utterance):
    rng = np.random.default_rng(int(utterance.key.rpartition("_u")[2]))
    frames = rng.integers(100, 300)
    rows = np.stack([rng.integers(span.start, span.stop, frames) for span in layout.streams], 1).astype(np.int32)
    given, wanted = utterance.parts
    segments = (
        Segment("text", "text_bpe", False, given.rows, given.rows[:0], "given"),
        Segment("audio", "codec_ssl", True, rows, wanted.header, "eos"),
    )
    return Result(utterance.key, (Hypothesis(segments),), utterance=utterance)


def main(out, count):
    layout = opuslm_layout(golden_models("opuslm")[0])
    backends.decode = lambda engine, items, config, **options: (result_of(layout, item) for item in items)
    journal, speech = Journal(out, {"seed": 0}), Speech(Codec())
    text = lambda ids: " ".join(map(str, ids))  # noqa: E731
    writer = TaskWriter(out, layout, journal, speech, text, 2, task="tts", entries=["text", "wav.scp"])
    items = ((writer, utterance_of(layout, number)) for number in range(count))
    tally = run_job(None, None, [writer], items, speech=speech, seed=0, total=count)
    journal.close()
    return int(bool(tally.failed))


if __name__ == "__main__":
    sys.exit(main(pathlib.Path(sys.argv[1]), int(sys.argv[2])))
