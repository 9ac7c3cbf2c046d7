"""An attention backend of vLLM: prompts as FlashAttention computes them, steps of one row a request by ``decode_attention``.

Both read the same paged cache. In float32, which FlashAttention does not have, prompts go through vLLM's Triton kernel.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from vllm.v1.attention.backend import AttentionCGSupport, AttentionType
from vllm.v1.attention.backends.flash_attn import (
    FlashAttentionBackend,
    FlashAttentionImpl,
    FlashAttentionMetadataBuilder,
)
from vllm.v1.attention.ops.triton_unified_attention import unified_attention

from .attention import OWN
from .decode_attention import Workspace, decode_attention, fits


class SpeechAttentionBackend(FlashAttentionBackend):
    """For decoders whose rows attend to all rows before them."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16, torch.float32]

    @staticmethod
    def get_name() -> str:
        return OWN

    @staticmethod
    def get_impl_cls() -> type[SpeechAttentionImpl]:
        return SpeechAttentionImpl

    @staticmethod
    def get_builder_cls() -> type[SpeechAttentionMetadataBuilder]:
        return SpeechAttentionMetadataBuilder

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        return fits(1, head_size)

    @classmethod
    def supports_kv_cache_dtype(cls, kv_cache_dtype: str | None) -> bool:
        return kv_cache_dtype in (None, "auto", "float16", "bfloat16")

    @classmethod
    def supports_attn_type(cls, attn_type: str) -> bool:
        return attn_type == AttentionType.DECODER

    @classmethod
    def _no(cls) -> bool:
        return False

    supports_sliding_window = supports_batch_invariance = supports_non_causal = supports_sink = supports_mm_prefix = _no
    supports_per_head_quant_scales = _no


class SpeechAttentionMetadataBuilder(FlashAttentionMetadataBuilder):
    """FlashAttention's, and a place for partial results."""

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        sizes = (vllm_config.scheduler_config.max_num_seqs, self.max_cudagraph_size or 0)
        self.workspace = Workspace(max(sizes), self.num_heads_q, self.num_heads_kv, self.headdim, device)

    @classmethod
    def get_cudagraph_support(cls, vllm_config: Any, kv_cache_spec: Any) -> AttentionCGSupport:
        # Which kernel runs is decided on the host, so that a graph may hold steps of single rows only.
        return AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
        # FlashAttention's schedule, a kernel of its own, is for what FlashAttention will compute.
        other = common_attn_metadata.max_query_len == 1 or self.kv_cache_dtype == torch.float32
        metadata = super().build(common_prefix_len, common_attn_metadata, fast_build or other)
        metadata.workspace = self.workspace
        return metadata

    def use_cascade_attention(self, *args: Any, **kwargs: Any) -> bool:
        return False


class SpeechAttentionImpl(FlashAttentionImpl):
    """One layer."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.alibi_slopes is not None or self.logits_soft_cap or self.sinks is not None:
            raise ValueError("this package's attention knows no slopes, caps or sinks; set another attention_backend")

    def forward(
        self,
        layer: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: Any,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """[tokens, heads, head size] into ``output``; the cache holds the new rows already."""
        if attn_metadata is None:
            return output.fill_(0)
        single = attn_metadata.max_query_len == 1
        scaled = output_scale is not None or output_block_scale is not None
        if scaled or not single and query.dtype != torch.float32:
            return super().forward(
                layer, query, key, value, kv_cache, attn_metadata, output, output_scale, output_block_scale
            )
        keys, values = kv_cache.transpose(1, 2).split(self.head_size, dim=-1)
        rows = attn_metadata.num_actual_tokens
        if single:
            decode_attention(
                output[:rows],
                query[:rows],
                keys,
                values,
                attn_metadata.block_table,
                attn_metadata.seq_lens,
                attn_metadata.query_start_loc,
                self.scale,
                attn_metadata.workspace,
            )
            return output
        unified_attention(
            q=query[:rows],
            k=keys,
            v=values,
            out=output[:rows],
            cu_seqlens_q=attn_metadata.query_start_loc,
            max_seqlen_q=attn_metadata.max_query_len,
            seqused_k=attn_metadata.seq_lens,
            max_seqlen_k=attn_metadata.max_seq_len,
            softmax_scale=self.scale,
            causal=True,
            window_size=(-1, -1),
            block_table=attn_metadata.block_table,
            softcap=0,
            q_descale=None,
            k_descale=None,
            v_descale=None,
        )
        return output
