"""Options of vLLM that cannot act here: they are refused by name, instead of being taken and having no effect."""

from __future__ import annotations

from collections.abc import Iterable

from ..errors import ConfigError

_SAMPLER = "ids are chosen by this package's own sampler, by the decoding settings"
_TEXT = "the engine takes and gives ids; text is made beside it, by the checkpoint's tokenizer"
_MEDIA = "sound is encoded beside the engine, which gets rows"
_MODEL = "what is served is the language model of a converted directory"
_GONE = {
    _SAMPLER: "logits_processors override_generation_config generation_config logprobs_mode max_logprobs use_fp64_gumbel "
    "return_sampling_mask structured_outputs_config watermark_config",
    _TEXT: "tokenizer tokenizer_mode tokenizer_revision reasoning_parser reasoning_parser_plugin reasoning_config tokens_only",
    _MEDIA: "allowed_local_media_path allowed_media_domains enable_mm_embeds interleave_mm_strings language_model_only "
    "limit_mm_per_prompt media_io_kwargs skip_mm_profiling video_pruning_rate video_pruning_method io_processor_plugin",
    _MODEL: "runner convert pooler_config diffusion_config hf_config_path config_format revision code_revision hf_token model_impl "
    "model_class_overrides model_weights enable_prompt_embeds",
    "code of a checkpoint is never run": "trust_remote_code",
}
_REASONS = {name: reason for reason, names in _GONE.items() for name in names.split()}


def check_given(names: Iterable[str]) -> None:
    """Raises ConfigError for the first of the engine options ``names`` that could not act, with the reason."""
    for name in names:
        reason = _MEDIA if name.startswith("mm_") else _REASONS.get(name)
        if reason is not None:
            raise ConfigError(f"engine option {name} has no effect here: {reason}; leave it out")
