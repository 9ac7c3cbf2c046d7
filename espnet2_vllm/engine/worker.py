"""What our workers (``worker_cls``) add to vLLM's own: what no smaller hook reaches."""

from __future__ import annotations

import logging
from typing import Any

from .memory import described, memory_by_owner
from .rendezvous import without_port

log = logging.getLogger(__name__)


class SpeechWorker:
    """Hands the V2 runner's model state what vLLM's own hooks do not bring it.

    Our predictions over prompts take the place of the runner's prompt log-probabilities.
    """

    def init_device(self) -> None:
        self.distributed_init_method = without_port(self.distributed_init_method, self.vllm_config.parallel_config)
        super().init_device()

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        super().load_model(*args, **kwargs)
        # Asked once: the property of the configuration looks through all installed packages each time.
        self._v2 = self.vllm_config.use_v2_model_runner
        if self._v2:
            from .v2 import SpeechPromptWorker

            self.model_runner.prompt_logprobs_worker = SpeechPromptWorker(self.model_runner.model_state)

    def compile_or_warm_up_model(self, *args: Any, **kwargs: Any) -> Any:
        result = super().compile_or_warm_up_model(*args, **kwargs)
        if self._v2:
            self.model_runner.model_state.warm_up()
        log.info("device memory: %s", described(memory_by_owner(self.model_runner)))
        return result

    def execute_model(self, scheduler_output: Any) -> Any:
        if self._v2:
            # vLLM's own warm-up steps come without the scheduler's word.
            self.model_runner.model_state.text_rows = getattr(scheduler_output, "speechlm_text_rows", None)
        return super().execute_model(scheduler_output)
