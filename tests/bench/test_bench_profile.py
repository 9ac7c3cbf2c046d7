"""Where a step goes: the sums over kernels, and what cannot be profiled."""

import pytest

from espnet2_vllm.bench.profile import DEVICE_PARTS, kernel_part, profile_steps, summarize
from espnet2_vllm.errors import ConfigError


@pytest.mark.parametrize(
    "name, part",
    [
        ("nvjet_tst_192x192_64x4_2x1_v_bz_coopB_TNT", "matmul"),
        ("void cutlass::device_kernel<flash::enable_sm90_or_later<flash::FlashAttnFwdSm90<...>>>", "attention"),
        ("reshape_and_cache_flash_kernel", "attention"),
        ("auxiliary_kernel", "streams"),
        ("_topk_log_softmax_kernel", "sampling"),
        ("triton_poi_fused_mul_silu_slice_0", "other"),
    ],
)
def test_kernels_count_to_one_part(name, part):
    assert kernel_part(name) == part and part in DEVICE_PARTS


def test_busy_time_counts_overlapping_kernels_once():
    kernels = [("gemm", 0.0, 100.0), ("flash", 50.0, 150.0), ("gemm", 60.0, 80.0), ("embed_kernel", 400.0, 500.0)]
    found = summarize(kernels[::-1], steps=2)
    assert found["busy_ms"] == pytest.approx(0.125)
    assert found["device_ms"] == pytest.approx(
        {"streams": 0.05, "attention": 0.05, "sampling": 0.0, "matmul": 0.06, "other": 0.0}
    )
    assert [(k["name"], k["launches"]) for k in found["kernels"]] == [
        ("gemm", 1.0),
        ("flash", 0.5),
        ("embed_kernel", 0.5),
    ]
    assert found["kernels"][0]["ms"] == pytest.approx(0.06)


def test_short_outputs_are_refused():
    with pytest.raises(ConfigError, match="at least 64 rows, not 63"):
        profile_steps(None, [], 63)
