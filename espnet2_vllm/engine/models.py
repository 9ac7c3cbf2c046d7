"""Backbones: vLLM's own model classes plus a stream embedding, the sum of streams as input, and the last hidden states kept."""

from __future__ import annotations

import pathlib
from collections.abc import Iterable

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.distributed import get_tensor_model_parallel_world_size
from vllm.model_executor.models.llama import LlamaForCausalLM
from vllm.model_executor.models.qwen3 import Qwen3ForCausalLM
from vllm.model_executor.models.transformers import TransformersForCausalLM

from ..checkpoint.headers import check_names
from ..errors import CheckpointError, EngineError
from .compat import check_wiring, layout_of, let_plain_models_be_built
from .core import SpeechWeights
from .ranks import all_rows

STREAM_EMB = "stream_emb.weight"


class SpeechModel:
    """Mixed into a causal language model of vLLM.

    Attributes:
        layout: the checkpoint's layout.
        last_hidden: [B, H] input of the last ``compute_logits``, which every runner calls right before its sampler on exactly the
            rows that are sampled.
        skip_primary: set for steps in which no row needs the whole vocabulary; ``compute_logits`` then gives no columns.
    """

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        layout = layout_of(vllm_config.model_config)
        check_wiring(vllm_config, layout)
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        self.layout = layout
        hidden = vllm_config.model_config.get_hidden_size()
        self.stream_emb = nn.Embedding(self.layout.num_streams, hidden, dtype=vllm_config.model_config.dtype)
        self.stream_emb.weight.requires_grad_(False)
        self.last_hidden: torch.Tensor | None = None
        self.skip_primary = False
        self._model_config = vllm_config.model_config

    @staticmethod
    def get_model_state_cls() -> type:
        """Asked for by the V2 runner."""
        from .v2 import SpeechModelState

        return SpeechModelState

    def compute_logits(self, hidden_states: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor | None:
        self.last_hidden = hidden_states
        if self.skip_primary:
            return hidden_states[:, :0]
        if self.layout.primary_stream_embedded:
            hidden_states = hidden_states + self.stream_emb.weight[0]
        return super().compute_logits(hidden_states, *args, **kwargs)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Raises CheckpointError where tensors are missing: vLLM itself counts most layers as loaded, whatever was read."""
        loaded, shapes = set(), {}

        def others() -> Iterable[tuple[str, torch.Tensor]]:
            for name, tensor in weights:
                shapes[name] = tuple(tensor.shape)
                if name == STREAM_EMB:
                    _copy_exact(self.stream_emb.weight, tensor, name)
                    loaded.add(name)
                else:
                    yield name, tensor

        names = super().load_weights(others())
        config = self._model_config
        check_names(pathlib.Path(config.model), config.hf_config, self.layout, shapes)
        return names | loaded

    def speech_weights(self) -> SpeechWeights:
        """Embedding and head, whole on every rank, without the rows that vLLM pads the vocabulary with.

        To be called on all ranks or on none.
        """
        rows = self.layout.vocab_size
        embedding, head = self.input_embedding().weight, self.lm_head.weight
        whole = all_rows(embedding)[:rows]
        return SpeechWeights(whole, whole if head is embedding else all_rows(head)[:rows], self.stream_emb.weight)

    def input_embedding(self) -> nn.Module:
        return self.model.embed_tokens


def _copy_exact(target: torch.Tensor, source: torch.Tensor, name: str) -> None:
    if target.shape != source.shape:
        raise CheckpointError(f"{name} is {tuple(source.shape)}, expected {tuple(target.shape)}")
    target.data.copy_(source)


class SpeechLMQwen3ForCausalLM(SpeechModel, Qwen3ForCausalLM):
    """Bagpiper."""


class SpeechLMLlamaForCausalLM(SpeechModel, LlamaForCausalLM):
    """OpusLM dialogue (SmolLM2)."""


class SpeechLMOlmo2ForCausalLM(SpeechModel, TransformersForCausalLM):
    """OpusLM; vLLM serves OLMo-2 through its transformers modelling backend."""

    def input_embedding(self) -> nn.Module:
        return self.model.get_input_embeddings()

    def _decorate_cls_for_torch_compile(self, cls: type, **options: object) -> None:
        """Called while the model is built: vLLM changes transformers' class itself, for the whole process."""
        plain = cls.__init__
        super()._decorate_cls_for_torch_compile(cls=cls, **options)
        let_plain_models_be_built(cls, plain)

    def recursive_replace(self) -> None:
        """Called while the model is built. Attention is sharded by heads, as vLLM's attention expects under tensor parallelism.

        The plan of transformers gathers q and k, because they are normed as a whole; vLLM's norm does that by itself.
        """
        ranks, heads = get_tensor_model_parallel_world_size(), self.text_config.num_key_value_heads
        if heads % ranks:
            raise EngineError(f"tensor_parallel_size {ranks} does not divide the {heads} key-value heads of OLMo-2")
        shards = {"q_proj": "colwise", "k_proj": "colwise", "v_proj": "colwise", "o_proj": "rowwise"}
        plan = {f"layers.*.self_attn.{name}": style for name, style in shards.items()}
        self.model.tp_plan = {**self.model.tp_plan, **plan}
        super().recursive_replace()
