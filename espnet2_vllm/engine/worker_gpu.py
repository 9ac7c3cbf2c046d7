"""CUDA worker."""

from __future__ import annotations

from vllm.v1.worker.gpu_worker import Worker

from ..errors import EngineError
from .worker import SpeechWorker


class SpeechGPUWorker(SpeechWorker, Worker):
    """CUDA: the V2 runner only."""

    def init_device(self) -> None:
        if not self.vllm_config.use_v2_model_runner:
            raise EngineError(
                "vLLM chose its V1 model runner, which this package does not support on CUDA; unset VLLM_USE_V2_MODEL_RUNNER "
                "and remove options that need V1"
            )
        super().init_device()
