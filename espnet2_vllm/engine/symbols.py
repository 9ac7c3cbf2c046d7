"""Every name of vLLM that this package relies on, looked for at start-up: an engine that lacks one is refused before it serves.

A table entry is ``module:Object`` and the names that must be there: attributes of the object, attributes of its instances, and
after a bar the parameters of its constructor (of a function, its own) that are given by name.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import pathlib
import re
from typing import Any

from ..errors import EngineError

TESTED = ("0.26.0", "0.32.0")
# Of these the sources of the GPU wheel have every name; they did not run here.
READ = ("0.33.0",)

_REQUEST = (
    "request_id status sampling_params client_index arrival_time lora_request priority block_hashes _block_hasher _all_token_ids "
    "spec_token_ids num_prompt_tokens num_computed_tokens num_output_placeholders num_preemptions max_tokens prefill_stats "
    "is_prefill_chunk num_tokens num_tokens_with_spec num_output_tokens output_token_ids all_token_ids is_finished "
    "get_finished_reason update_block_hashes"
)
COMMON = {
    "vllm:ModelRegistry": "get_supported_archs register_model",
    "vllm:SamplingParams": "num_logprobs extra_args | temperature max_tokens stop_token_ids ignore_eos detokenize "
    "prompt_logprobs flat_logprobs output_kind extra_args",
    "vllm.config:VllmConfig": "use_v2_model_runner model_config parallel_config scheduler_config speculative_config "
    "kv_transfer_config lora_config",
    "vllm.config:get_current_vllm_config_or_none": "",
    "vllm.distributed:get_tensor_model_parallel_world_size": "",
    "vllm.distributed:get_tp_group": "",
    "vllm.distributed:tensor_model_parallel_all_gather": "",
    "vllm.engine.arg_utils:EngineArgs": "create_engine_config gpu_memory_utilization | model dtype skip_tokenizer_init "
    "scheduler_cls worker_cls disable_log_stats enable_prefix_caching max_num_seqs enforce_eager",
    "vllm.model_executor.models.llama:LlamaForCausalLM": "compute_logits load_weights | vllm_config prefix",
    "vllm.model_executor.models.qwen3:Qwen3ForCausalLM": "compute_logits load_weights | vllm_config prefix",
    "vllm.model_executor.models.transformers:TransformersForCausalLM": "compute_logits load_weights model recursive_replace "
    "| vllm_config prefix",
    "vllm.platforms:current_platform": "is_cpu is_cuda get_device_capability",
    "vllm.sampling_params:RequestOutputKind": "DELTA FINAL_ONLY",
    "vllm.utils.hashing:get_hash_fn_by_name": "",
    "vllm.v1.core.kv_cache_utils:generate_block_hash_extra_keys": "",
    "vllm.v1.core.kv_cache_utils:hash_block_tokens": "",
    "vllm.v1.core.kv_cache_manager:KVCacheManager": "allocate_slots cache_blocks get_block_ids empty_kv_cache_blocks block_pool",
    "vllm.v1.core.block_pool:BlockPool": "get_num_free_blocks num_gpu_blocks",
    "vllm.v1.core.sched.async_scheduler:AsyncScheduler": "schedule update_from_output _update_after_schedule add_request "
    "finish_requests _preempt_request _make_cached_request_data waiting running requests policy block_size hash_block_size "
    "cache_config kv_cache_config kv_cache_manager max_model_len max_num_running_reqs vllm_config use_v2_model_runner",
    "vllm.v1.core.sched.output:CachedRequestData": "",
    "vllm.v1.core.sched.output:SchedulerOutput": "scheduled_new_reqs scheduled_cached_reqs num_scheduled_tokens finished_req_ids "
    "preempted_req_ids",
    "vllm.v1.core.sched.request_queue:FCFSRequestQueue": "prepend_request peek_request remove_requests",
    "vllm.v1.engine:EngineCoreOutput": "finished kv_transfer_params new_token_ids prefill_stats request_id "
    "| request_id new_token_ids finish_reason",
    "vllm.v1.engine:EngineCoreOutputs": "outputs scheduler_stats",
    "vllm.v1.engine.exceptions:EngineDeadError": "",
    "vllm.v1.engine.llm_engine:LLMEngine": "from_vllm_config add_request abort_request step engine_core",
    "vllm.v1.outputs:LogprobsTensors": "empty_cpu",
    "vllm.v1.outputs:ModelRunnerOutput": "logprobs sampled_token_ids req_id_to_index",
    "vllm.v1.outputs:SamplerOutput": "| sampled_token_ids logprobs_tensors",
    "vllm.v1.request:Request": f"{_REQUEST} | request_id prompt_token_ids sampling_params pooling_params client_index "
    "arrival_time lora_request priority block_hasher",
    "vllm.v1.request:RequestStatus": "RUNNING FINISHED_ABORTED FINISHED_ERROR FINISHED_LENGTH_CAPPED",
}
V1_RUNNER = {
    "vllm.v1.worker.cpu_worker:CPUWorker": "init_device load_model execute_model vllm_config model_runner",
    "vllm.v1.worker.cpu_model_runner:CPUModelRunner": "load_model _update_states _preprocess _sample _get_prompt_logprobs_dict "
    "device input_batch input_ids discard_request_mask max_model_len max_num_reqs model num_prompt_logprobs requests",
}
V2_RUNNER = {
    "vllm.v1.worker.gpu.model_states.default:DefaultModelState": "add_request remove_request apply_staged_writes prepare_inputs "
    "prepare_dummy_inputs custom_sampler device dtype max_num_reqs max_num_tokens model model_config",
    "vllm.v1.worker.gpu.sample.output:SamplerOutput": "| sampled_token_ids logprobs_tensors num_sampled",
    "vllm.v1.worker.gpu.sample.prompt_logprob:PromptLogprobsWorker": "add_request remove_request compute_prompt_logprobs",
    "vllm.v1.worker.gpu.input_batch:InputBatch": "req_ids num_reqs num_tokens num_tokens_after_padding input_ids positions "
    "idx_mapping idx_mapping_np query_start_loc query_start_loc_np seq_lens num_computed_tokens_np num_scheduled_tokens",
}
# Needed only where this package's attention is chosen.
ATTENTION = {
    "vllm.v1.attention.backend:AttentionCGSupport": "UNIFORM_SINGLE_TOKEN_DECODE",
    "vllm.v1.attention.backend:AttentionType": "DECODER",
    "vllm.v1.attention.backends.flash_attn:FlashAttentionBackend": "supports_dtype",
    "vllm.v1.attention.backends.flash_attn:FlashAttentionImpl": "alibi_slopes logits_soft_cap sinks head_size scale forward",
    "vllm.v1.attention.backends.flash_attn:FlashAttentionMetadataBuilder": "num_heads_q num_heads_kv headdim kv_cache_dtype "
    "max_cudagraph_size build | kv_cache_spec layer_names vllm_config device",
    "vllm.v1.attention.backends.registry:AttentionBackendEnum": "CUSTOM get_path is_overridden",
    "vllm.v1.attention.backends.registry:register_backend": "",
    "vllm.v1.attention.ops.triton_unified_attention:unified_attention": "| q k v out cu_seqlens_q max_seqlen_q seqused_k "
    "max_seqlen_k softmax_scale causal window_size block_table softcap q_descale k_descale v_descale",
}
GPU_WORKER = {"vllm.v1.worker.gpu_worker:Worker": "init_device load_model execute_model vllm_config model_runner"}


def missing_symbols(table: dict[str, str]) -> list[str]:
    """Names of ``table`` that the installed vLLM does not have."""
    missing: list[str] = []
    for place, names in table.items():
        module, _, name = place.partition(":")
        try:
            found = getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError):
            missing.append(place)
            continue
        attributes, _, parameters = names.partition("|")
        missing += [f"{place}.{one}" for one in attributes.split() if not _has(found, one)]
        missing += [f"{place}({one})" for one in parameters.split() if not _takes(found, one)]
    return missing


def check_symbols(version: str, *, cpu: bool, v2: bool) -> None:
    """Refuses an engine that lacks a name which its runner's adapter uses.

    Raises:
        EngineError: naming what is missing, the version, and versions that have it.
    """
    runner = V2_RUNNER if v2 else V1_RUNNER
    worker = {name: value for name, value in V1_RUNNER.items() if "worker:" in name} if cpu else GPU_WORKER
    missing = missing_symbols({**COMMON, **runner, **worker})
    if missing:
        raise EngineError(
            f"vLLM {version} lacks what this package uses of it: {', '.join(missing)}; versions {' and '.join(TESTED)} have it: "
            "run tools/setup.sh for one that works, or use --backend pytorch"
        )


def _has(found: Any, name: str) -> bool:
    """Whether an object, or the instances of a class, have an attribute: declared, or assigned in the source of the class."""
    if hasattr(found, name):
        return True
    if not inspect.isclass(found):
        return False
    if any(name in getattr(one, "__annotations__", {}) for one in found.__mro__):
        return True
    assigned = re.compile(rf"\bself\.{name}\b\s*(?::[^=\n]+)?=|\bself\.{name}\b\s*:|[(,]\s*self\.{name}\b")
    sources = {_source(one.__module__) for one in found.__mro__ if one.__module__.startswith("vllm.")}
    return any(assigned.search(source) for source in sources)


@functools.cache
def _source(module: str) -> str:
    path = getattr(importlib.import_module(module), "__file__", None)
    return "" if path is None else pathlib.Path(path).read_text(encoding="utf-8")


def _takes(found: Any, name: str) -> bool:
    """Whether a callable has a parameter of this name, or takes any."""
    fields = getattr(found, "__struct_fields__", ())  # of msgspec, whose signature may not be had
    if name in fields:
        return True
    parameters = inspect.signature(found).parameters
    return name in parameters or any(one.kind is one.VAR_KEYWORD for one in parameters.values())
