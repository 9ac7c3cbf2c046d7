"""A process that is forked from one with a loaded model is told so at once; the model goes on in the one that has it."""

import multiprocessing
import queue

import numpy as np
import pytest
from conftest import golden_models

from espnet2_vllm import SpeechLM
from espnet2_vllm.codec.service import CodecService

SETTINGS = {
    "enforce_modality": ["text"],
    "text": {"temperature": 0, "topk": 1, "max_step": 5},
    "audio": {"temperature": 0, "topk": 1, "max_step": 5},
}
SAID = "forked from it, where nothing would ever answer: load the model in the process that uses it"


def in_a_fork(call):
    """What ``call`` gives, or raises, in a forked process."""
    context = multiprocessing.get_context("fork")
    answers = context.Queue()

    def child():
        try:
            answers.put(call())
        except Exception as error:  # noqa: BLE001 - handed over
            answers.put(f"{type(error).__name__}: {error}")

    process = context.Process(target=child, daemon=True)
    process.start()
    try:
        return answers.get(timeout=60)
    except queue.Empty:
        pytest.fail("it hangs")
    finally:
        process.kill()
        process.join()


@pytest.mark.filterwarnings("ignore:.*use of fork")
@pytest.mark.parametrize("backend", ["pytorch", "vllm"])
def test_generate_in_a_fork_says_so_at_once(backend):
    model = golden_models("bagpiper")[0]
    prompt = [["user", "text", "hello"]]
    with SpeechLM.from_pretrained(model, backend=backend, decoding=SETTINGS) as lm:
        expected = lm.generate(prompt, seed=1).text
        assert in_a_fork(lambda: lm.generate(prompt, seed=1).text).startswith(
            "EngineError: the engine was started in process"
        )
        assert SAID in in_a_fork(lambda: lm.generate(prompt, seed=1).text)
        assert in_a_fork(lm.close) is None
        assert lm.generate(prompt, seed=1).text == expected


@pytest.mark.filterwarnings("ignore:.*use of fork")
def test_a_codec_in_a_fork_says_so_at_once():
    class Codec:
        sample_rate, hop = 16000, 2

        def decode_batch(self, clips):
            return [np.zeros(2 * len(codes), np.float32) for codes in clips]

    with CodecService(Codec(), silent_frames=0) as service:
        assert SAID in in_a_fork(lambda: service.submit(np.zeros((3, 2), np.int64)))
        assert len(service.submit(np.zeros((3, 2), np.int64)).result()) == 6
