"""CPU worker. Never imported beside a GPU: vLLM's CPU modules replace parts of ``torch.cuda`` as they load."""

from __future__ import annotations

import torch
from vllm.v1.worker.cpu_worker import CPUWorker

from .worker import SpeechWorker


class SpeechCPUWorker(SpeechWorker, CPUWorker):
    """CPU: the V1 runner is replaced by ours; the V2 runner (under Triton's interpreter) is asked by its own hooks."""

    def init_device(self) -> None:
        super().init_device()
        if not self.vllm_config.use_v2_model_runner:
            from .v1 import SpeechCPURunner

            self.model_runner = SpeechCPURunner(self.vllm_config, torch.device("cpu"))
