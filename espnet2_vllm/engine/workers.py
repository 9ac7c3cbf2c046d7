"""Workers (``worker_cls``): vLLM's own, with what no smaller hook reaches."""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.worker.cpu_worker import CPUWorker
from vllm.v1.worker.gpu_worker import Worker

from ..errors import EngineError


class _SpeechWorker:
    """Hands the V2 runner's model state what vLLM's own hooks do not bring it.

    Our predictions over prompts take the place of the runner's prompt log-probabilities.
    """

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        super().load_model(*args, **kwargs)
        if self.vllm_config.use_v2_model_runner:
            from .v2 import SpeechPromptWorker

            self.model_runner.prompt_logprobs_worker = SpeechPromptWorker(self.model_runner.model_state)

    def execute_model(self, scheduler_output: Any) -> Any:
        if self.vllm_config.use_v2_model_runner:
            self.model_runner.model_state.text_rows = scheduler_output.speechlm_text_rows
        return super().execute_model(scheduler_output)


class SpeechCPUWorker(_SpeechWorker, CPUWorker):
    """CPU: the V1 runner is replaced by ours; the V2 runner (under Triton's interpreter) is asked by its own hooks."""

    def init_device(self) -> None:
        super().init_device()
        if not self.vllm_config.use_v2_model_runner:
            from .v1 import SpeechCPURunner

            self.model_runner = SpeechCPURunner(self.vllm_config, torch.device("cpu"))


class SpeechGPUWorker(_SpeechWorker, Worker):
    """CUDA: the V2 runner only."""

    def init_device(self) -> None:
        if not self.vllm_config.use_v2_model_runner:
            raise EngineError(
                "vLLM chose its V1 model runner, which this package does not support on CUDA; unset VLLM_USE_V2_MODEL_RUNNER "
                "and remove options that need V1"
            )
        super().init_device()
