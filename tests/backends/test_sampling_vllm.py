"""Draws through the whole vllm backend, many in flight, against a recorded distribution of each family."""

import pytest
import sampling_cases
from conftest import golden_files
from golden_cases import Model

DRAWS = 2000


@pytest.mark.slow
@pytest.mark.parametrize(
    ("pattern", "make"),
    [
        ("bagpiper/*/cases/sampling_0_audio_cfg1_top20.json", sampling_cases.bagpiper_requests),
        ("bagpiper/*/cases/sampling_0_audio_cfg3_top5.json", sampling_cases.bagpiper_requests),
        ("opuslm/*/cases/tts_nbest3_topk.json", sampling_cases.opuslm_requests),
    ],
    ids=["bagpiper", "bagpiper guided", "opuslm"],
)
def test_draws_through_the_whole_engine_follow_a_recorded_distribution(pattern, make):
    pytest.importorskip("vllm")
    paths = golden_files(pattern)
    if not paths:
        pytest.skip(f"{pattern} was not recorded here")
    # OLMo-2 would change transformers' classes for the rest of the process.
    path = next(path for path in paths if "olmo2" not in str(path))
    model = Model(path.parent.parent, "vllm", max_num_seqs=64, max_model_len=1024)
    try:
        values = sampling_cases.engine_p_values(model.engine, *make(model.layout, path, DRAWS))
    finally:
        model.engine.close()
    sampling_cases.check(values, tests=3 * model.layout.num_streams)
