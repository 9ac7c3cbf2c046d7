"""CUDA worker."""

from __future__ import annotations

from vllm.v1.worker.gpu_worker import Worker

from .compat import check_options
from .worker import SpeechWorker


class SpeechGPUWorker(SpeechWorker, Worker):
    """CUDA: the V2 runner only."""

    def init_device(self) -> None:
        # Before the wrong runner is made, wherever vLLM was started.
        check_options(self.vllm_config, cpu=False)
        super().init_device()
