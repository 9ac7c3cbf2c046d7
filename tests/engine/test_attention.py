"""Which attention is chosen, what may overrule it, and which kernel a step goes to."""

import logging
import types

import pytest
import torch

pytest.importorskip("vllm")

from vllm.v1.attention.backends import registry  # noqa: E402

from espnet2_vllm.engine import attention, attention_backend  # noqa: E402
from espnet2_vllm.engine.attention import OWN, OWN_CLASS, Heads, choose_attention, register_own, set_attention  # noqa: E402

BAGPIPER, OPUSLM, DIALOGUE = Heads(32, 8, 128), Heads(32, 32, 128), Heads(32, 32, 64)
CUSTOM = registry.AttentionBackendEnum.CUSTOM
HOPPER = {"capability": (9, 0)}


@pytest.fixture(autouse=True)
def measured_version(monkeypatch):
    monkeypatch.setattr(attention, "engine_version", lambda: "0.26.0")
    monkeypatch.setattr(registry, "_ATTN_OVERRIDES", {})
    monkeypatch.delenv("VLLM_BATCH_INVARIANT", raising=False)


@pytest.mark.parametrize("heads", [BAGPIPER, OPUSLM, DIALOGUE, Heads(14, 2, 64), Heads(16, 1, 128)], ids=str)
def test_single_rows_have_a_kernel_of_their_own_on_hopper(heads):
    choice = choose_attention(heads, **HOPPER)
    assert choice.backend == OWN and str(heads) in choice.reason


@pytest.mark.parametrize(
    ("heads", "circumstances", "reason"),
    [
        (BAGPIPER, {"capability": None}, "no CUDA device"),
        (BAGPIPER, {"capability": (8, 0)}, "compute capability 8.0"),
        (DIALOGUE, {"capability": (10, 0)}, "compute capability 10.0"),
        (OPUSLM, {**HOPPER, "kv_cache_dtype": "fp8"}, "a cache in fp8"),
        (OPUSLM, {**HOPPER, "plain": False}, "sliding window"),
        (Heads(32, 8, 80), HOPPER, "32 query heads on 8 KV heads of 80"),
        (Heads(32, 1, 128), HOPPER, "no shape of the decode kernel"),
        (Heads(8, 4, 256), HOPPER, "no shape of the decode kernel"),
        (Heads(9, 2, 128), HOPPER, "no shape of the decode kernel"),
    ],
)
def test_vllm_chooses_where_nothing_was_measured(heads, circumstances, reason):
    choice = choose_attention(heads, **circumstances)
    assert choice.backend is None and reason in choice.reason


def test_vllm_chooses_under_another_version_and_where_batches_must_not_matter(monkeypatch):
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    assert "VLLM_BATCH_INVARIANT" in choose_attention(BAGPIPER, **HOPPER).reason
    monkeypatch.delenv("VLLM_BATCH_INVARIANT")
    monkeypatch.setattr(attention, "engine_version", lambda: "0.32.0")
    assert choose_attention(BAGPIPER, **HOPPER) == (None, "nothing was measured under vLLM 0.32.0")


def config(heads, backend=None, **per_kind):
    model = types.SimpleNamespace(
        get_num_attention_heads=lambda parallel: heads.query_heads // parallel.tensor_parallel_size,
        get_num_kv_heads=lambda parallel: heads.kv_heads // parallel.tensor_parallel_size,
        get_head_size=lambda: heads.head_size,
        hf_text_config=types.SimpleNamespace(layer_types=["full_attention"] * 2, use_sliding_window=False),
    )
    return types.SimpleNamespace(
        model_config=model,
        parallel_config=types.SimpleNamespace(tensor_parallel_size=1),
        cache_config=types.SimpleNamespace(cache_dtype="auto"),
        attention_config=types.SimpleNamespace(backend=backend, backend_per_kind=per_kind),
    )


@pytest.fixture
def hopper(monkeypatch):
    import vllm.platforms

    capability = types.SimpleNamespace(major=9, minor=0)
    device = types.SimpleNamespace(is_cuda=lambda: True, get_device_capability=lambda: capability)
    monkeypatch.setattr(vllm.platforms, "current_platform", device)


def test_what_is_chosen_is_set_registered_and_logged(hopper, caplog):
    caplog.set_level(logging.INFO)
    found = config(BAGPIPER)
    assert set_attention(found).backend == OWN
    assert found.attention_config.backend is CUSTOM and CUSTOM.get_path() == OWN_CLASS
    assert CUSTOM.get_class() is attention_backend.SpeechAttentionBackend
    assert "attention: this package's (prompts by FlashAttention, single rows by a kernel for 32 query" in caplog.text


@pytest.mark.parametrize(
    "given", [{"backend": registry.AttentionBackendEnum.TRITON_ATTN}, {"full_attention": "FLASH_ATTN"}]
)
def test_the_users_option_decides(hopper, caplog, given):
    caplog.set_level(logging.INFO)
    found = config(DIALOGUE, **given)
    assert set_attention(found).backend is None
    assert found.attention_config.backend is given.get("backend") and "as the engine options say" in caplog.text


def test_heads_are_those_of_a_rank(hopper):
    found = config(BAGPIPER)
    found.parallel_config.tensor_parallel_size = 2
    assert "16 query heads on 4 KV heads of 128" in set_attention(found).reason


def test_windows_are_left_to_vllm(hopper):
    found = config(BAGPIPER)
    found.model_config.hf_text_config.layer_types = ["sliding_attention", "full_attention"]
    assert set_attention(found).backend is None and found.attention_config.backend is None


def test_another_packages_backend_is_not_replaced(hopper, caplog):
    caplog.set_level(logging.INFO)
    registry.register_backend(CUSTOM, "theirs.Backend")
    found = config(BAGPIPER)
    assert not register_own() and set_attention(found).backend is None
    assert found.attention_config.backend is None and CUSTOM.get_path() == "theirs.Backend"
    assert "vLLM's own choice (another package's backend has the name CUSTOM)" in caplog.text


def test_what_vllm_lacks_is_not_built_on(hopper, monkeypatch):
    monkeypatch.setattr(attention, "ATTENTION", {"vllm.v1.attention.backend:Missing": ""})
    choice = set_attention(config(BAGPIPER))
    assert choice == (None, "vLLM lacks vllm.v1.attention.backend:Missing")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("longest", [1, 2])
def test_prompts_and_single_rows_go_to_kernels_of_their_own(monkeypatch, dtype, longest):
    called = []
    flash = attention_backend.FlashAttentionImpl
    monkeypatch.setattr(flash, "forward", lambda self, *args: called.append("flash"))
    monkeypatch.setattr(attention_backend, "decode_attention", lambda out, *args: called.append("own") or out.fill_(1))
    monkeypatch.setattr(attention_backend, "unified_attention", lambda **args: called.append("triton"))
    layer = attention_backend.SpeechAttentionImpl.__new__(attention_backend.SpeechAttentionImpl)
    layer.head_size, layer.scale = 64, 0.125
    names = ("block_table", "seq_lens", "query_start_loc", "workspace", "max_seq_len")
    metadata = types.SimpleNamespace(max_query_len=longest, num_actual_tokens=3, **dict.fromkeys(names))
    query = torch.zeros(4, 2, 64, dtype=dtype)
    cache = torch.zeros(2, 2, 16, 128, dtype=dtype)
    out = torch.zeros_like(query)
    layer.forward(None, query, query, query, cache, metadata, out)
    assert called == ["own" if longest == 1 else "flash" if dtype == torch.bfloat16 else "triton"]
    assert out[:3].eq(longest == 1).all() and out[3].eq(0).all()  # what fills a batch up is left alone


def test_a_graph_holds_single_rows_only_and_other_layers_are_refused():
    from vllm.v1.attention.backend import AttentionCGSupport

    builder, backend = attention_backend.SpeechAttentionMetadataBuilder, attention_backend.SpeechAttentionBackend
    assert builder.get_cudagraph_support(None, None) is AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
    assert not backend.supports_sliding_window() and not backend.supports_sink()
    assert not backend.supports_kv_cache_dtype("fp8") and not backend.supports_head_size(96)
    assert backend.supports_dtype(torch.float32) and backend.supports_attn_type("decoder")
    assert not backend.supports_attn_type("encoder_only")
