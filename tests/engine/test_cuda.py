"""On GPUs only: the host never waits for the device in a step, what is printed of its memory is true, two GPUs are as one."""

import logging
import os
import re
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from conftest import golden_files, golden_models
from golden_cases import EXACT, Model, replay

from espnet2_vllm.backends.vllm import VllmEngine
from espnet2_vllm.checkpoint import ensure_converted, open_checkpoint
from espnet2_vllm.plan import RowRequest
from espnet2_vllm.protocol import BagpiperRules, ModalityRules, OpusLMRules, Sampling

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
MODELS = {"bagpiper": "qwen3-s8-cb64", "opuslm": "tiny-llama"}
# As users write it, without a guard. CUDA has been asked for, and where ``device`` is cuda the codec uses it.
SCRIPT = """
import torch
from espnet2_vllm import Decoding, SpeechLM
print("script", torch.cuda.is_available(), torch._C._cuda_getDeviceCount(), flush=True)
model = SpeechLM.from_pretrained({model!r}, device={device!r}, gpu_memory_utilization=0.1, kv_cache_memory_bytes=2**28,
                                 max_num_seqs=8, max_model_len=512, tensor_parallel_size={ranks})
answer = model.generate([["user", "text", "hello"]], Decoding(max_step=12), seed=1)
print("answer", answer.outcome)
model.close()
"""


def requests(layout, number):
    """Text and audio rows, guided and not, some with codes in the prompt."""
    rows = np.zeros((20 + number, layout.num_streams), dtype=np.int32)
    rows[:, 0] = layout.text.start + 1
    if number % 2:
        rows[3:9] = [layout.streams[0].start, *(ids[0] for ids in layout.auxiliary_candidates())]
    sampling = Sampling(0.8, (1, 5, 20, 40)[number % 4])
    if layout.family == "opuslm":
        modality = ("text", "audio")[number % 2]
        rows[-1, 0] = layout.modality_token(modality)
        return RowRequest(f"r{number}", rows, OpusLMRules(layout, modality, sampling, 30, 60), number)
    rows[-1, 0] = layout.specials["assistant"]
    audio = ModalityRules(sampling, 20, 60, (1.0, 3.0)[number // 2 % 2])
    return RowRequest(
        f"r{number}", rows, BagpiperRules(layout, ("text", "audio"), replace(audio, guidance=1.0), audio), number
    )


@pytest.mark.parametrize("family", MODELS)
def test_no_step_waits_for_the_device(family, caplog):
    caplog.set_level(logging.INFO)
    (directory,) = (path for path in golden_models(family) if path.name == MODELS[family])
    checkpoint = open_checkpoint(ensure_converted(directory).path)
    options = {"gpu_memory_utilization": 0.05, "kv_cache_memory_bytes": 2**30, "max_model_len": 256, "max_num_seqs": 16}
    before = torch.cuda.memory_allocated()  # engines that this process had keep theirs
    engine = VllmEngine(checkpoint, dtype="bfloat16", **options)
    line = next(record.getMessage() for record in caplog.records if record.getMessage().startswith("device memory"))
    sizes = {name: int(size.replace(",", "")) for name, size in re.findall(r"([a-z ]+) ([\d,]+) MiB", line)}
    named = sum(size for name, size in sizes.items() if name.strip() != "other" and "in all" not in name)
    taken = torch.cuda.memory_allocated() - before
    assert named == pytest.approx(taken / 2**20, rel=0.1), line  # the model is tiny, so that buffers count
    steps = 0
    try:
        for number in range(4):
            engine.submit(requests(checkpoint.layout, number))
        while engine.unfinished:
            torch.cuda.set_sync_debug_mode("error")
            try:
                finished = engine.step()
            finally:
                torch.cuda.set_sync_debug_mode("default")
            steps += 1
            if steps % 10 == 0 and steps < 120:
                engine.submit(requests(checkpoint.layout, 4 + steps // 10))
            for name, outcome in finished:
                assert len(outcome.rows) >= 20, name
    finally:
        engine.close()
    assert steps > 100


@pytest.mark.parametrize("attention", ["chosen", "TRITON_ATTN"])
@pytest.mark.parametrize("family", MODELS)
def test_recorded_cases_with_each_attention(family, attention, caplog):
    """In float32, in which what is chosen takes prompts to vLLM's kernel and single rows to this package's."""
    caplog.set_level(logging.INFO)
    paths = golden_files(f"{family}/{MODELS[family]}/cases/*.json")
    options = {"gpu_memory_utilization": 0.1, "kv_cache_memory_bytes": 2**28, "max_num_seqs": 16}
    if attention != "chosen":
        options["attention_backend"] = attention
    model = Model(paths[0].parent.parent, "vllm", **options)
    try:
        wrong = [str(verdict) for verdict in (replay(model, path) for path in paths) if verdict.verdict != EXACT]
    finally:
        model.engine.close()
    assert not wrong
    (line,) = (record.getMessage() for record in caplog.records if record.getMessage().startswith("attention: "))
    ours = attention == "chosen" and torch.cuda.get_device_capability() == (9, 0)
    assert line.startswith("attention: this package's") == ours, line


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("way", ["tensor_parallel_size", "data_parallel_size"])
@pytest.mark.parametrize("family", MODELS)
def test_recorded_cases_on_two_gpus(family, way):
    paths = golden_files(f"{family}/{MODELS[family]}/cases/*.json")
    # Memory that other programs take meanwhile would be counted as the engine's, if it had to find out what is left.
    options = {"gpu_memory_utilization": 0.1, "kv_cache_memory_bytes": 2**28, "max_num_seqs": 16, way: 2}
    model = Model(paths[0].parent.parent, "vllm", **options)
    try:
        wrong = [str(verdict) for verdict in (replay(model, path) for path in paths) if verdict.verdict != EXACT]
    finally:
        model.engine.close()
    assert not wrong


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_a_script_without_a_guard(device, ranks, tmp_path):
    """The engine in a process of its own, which is what users get."""
    if torch.cuda.device_count() < ranks:
        pytest.skip(f"needs {ranks} GPUs")
    (model,) = (path for path in golden_models("bagpiper") if path.name == MODELS["bagpiper"])
    path = tmp_path / "script.py"
    path.write_text(SCRIPT.format(model=str(model), device=device, ranks=ranks), encoding="utf-8")
    env = {name: value for name, value in os.environ.items() if name != "VLLM_ENABLE_V1_MULTIPROCESSING"}
    done = subprocess.run([sys.executable, str(path)], env=env, capture_output=True, encoding="utf-8", timeout=300)
    assert done.returncode == 0, done.stderr[-6000:]
    assert done.stdout.count("script") == 1 and "answer" in done.stdout
