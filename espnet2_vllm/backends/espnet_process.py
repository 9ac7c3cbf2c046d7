"""ESPnet's Bagpiper decoder on a machine without a GPU: its own command line, in a process of its own.

``espnet2.speechlm.bin.inference`` ends at once where there is no CUDA, although all that it runs does run on a CPU. This program is
that command line, its parser, worker and writer, with the one device put in place of the other. It is run as a file, by the Python
that has ESPnet, which may be another one than ours: it imports nothing of this package.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any

if __name__ == "__main__":
    # A program's folder comes first on the path, and beside this one lie modules called espnet and vllm.
    sys.path[0] = os.getcwd()

import torch
from torch.overrides import TorchFunctionMode

WEIGHT = "vocab_weight"


class OnCPU(TorchFunctionMode):
    """Within the block every tensor that is asked for on a GPU is made on the CPU, or stays there."""

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        named = {name: _on_cpu(value) for name, value in (kwargs or {}).items()}
        return function(*map(_on_cpu, args), **named)


def _on_cpu(value: Any) -> Any:
    named = isinstance(value, str) and value.partition(":")[0] == "cuda"
    return torch.device("cpu") if named or isinstance(value, torch.device) and value.type == "cuda" else value


def on_cpu(inference: ModuleType) -> Callable[..., None]:
    """The ``inference_worker`` of ESPnet's module, without a GPU."""
    worker, set_device = inference.inference_worker, torch.cuda.set_device
    inference._all_job_types = {name: _taking_older_checkpoints(job) for name, job in inference._all_job_types.items()}

    def work(*arguments: Any) -> None:
        torch.cuda.set_device = lambda device: None
        try:
            with OnCPU():
                worker(*arguments)
        finally:
            torch.cuda.set_device = set_device

    return work


def _taking_older_checkpoints(job: type) -> type:
    """Checkpoints of before 2026-06 lack the weights of the loss, which a strict load asks for and decoding has no use for."""

    def fill(model: torch.nn.Module, state: dict[str, torch.Tensor], *_: Any) -> None:
        if WEIGHT not in state and WEIGHT in dict(model.named_buffers()):
            print(
                f"The checkpoint has no {WEIGHT} (ESPnet before 2026-06): those that the training configuration gives are taken"
            )
            state[WEIGHT] = model.get_buffer(WEIGHT)

    class Job(job):
        def build_model(self, *arguments: Any, **named: Any) -> torch.nn.Module:
            model = super().build_model(*arguments, **named)
            model.register_load_state_dict_pre_hook(fill)
            return model

    return Job


def main(processes: Any = None) -> None:
    """ESPnet's ``main`` with that worker. Its processes are forked: where nothing holds a GPU they need not import all again.

    Args:
        processes: in place of ``torch.multiprocessing``.
    """
    from espnet2.speechlm.bin import inference

    work, is_available = on_cpu(inference), torch.cuda.is_available

    def start(*arguments: Any) -> None:
        torch.cuda.is_available = is_available
        work(*arguments)

    inference.inference_worker = start
    inference.mp = processes or torch.multiprocessing.get_context("fork")
    inference.mp.set_start_method = lambda method, force: None
    torch.cuda.is_available = lambda: True  # what ESPnet refuses to start without
    inference.main()


if __name__ == "__main__":
    main()
