"""What is measured: this engine, plain-text vLLM on the same backbone (as it is, or with this engine's attention), and the
sequential ``pytorch`` backend."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ..engine.attention import set_attention
from ..engine.memory import memory_by_owner
from ..engine.quantized import vllm_options
from ..errors import EngineError
from ..plan import RowRequest, RowResult
from .geometry import Geometry
from .memory import free_device, runner_of, steps_seen

ENGINE, PLAIN, SAME, PYTORCH = "engine", "plain", "plain-same", "pytorch"
TITLES = {
    ENGINE: "this engine",
    PLAIN: "plain-text vLLM",
    SAME: "plain text, this engine's attention",
    PYTORCH: "sequential pytorch",
}


class FirstRows:
    """Watches what reaches the front end of a vLLM engine, and tells which requests got their first row.

    Seen here, because nothing leaves the engine before a request's end.
    """

    def __init__(self, llm_engine: Any) -> None:
        self._processor = llm_engine.output_processor
        self._process = self._processor.process_outputs
        self._seen: set[str] = set()
        self._new: list[str] = []
        self._processor.process_outputs = self._watch

    def _watch(self, outputs: list[Any], *args: Any, **kwargs: Any) -> Any:
        states = self._processor.request_states
        for output in outputs:
            name = output.request_id
            if name not in self._seen and output.new_token_ids and name in states:
                self._seen.add(name)
                self._new.append(states[name].external_req_id)
        return self._process(outputs, *args, **kwargs)

    def take(self) -> list[str]:
        """Those since the last call, as the caller of the engine named them."""
        new, self._new = self._new, []
        return new


class System:
    """Something that takes requests of rows. ``submit``, ``step`` and ``abort`` are those of ``backends.base.Engine``.

    Attributes:
        steps_seen: whether a ``step`` is one step of the model.
        llm_engine: vLLM's own engine, where there is one in this process.
        runner: its model runner, where that is in this process too.
        engines, devices: how many share the requests, and what they take together.
    """

    name: str
    steps_seen = True
    llm_engine: Any = None
    runner: Any = None
    engines = 1
    devices = 1

    def submit(self, request: RowRequest) -> None:
        raise NotImplementedError

    def step(self) -> list[tuple[str, Any]]:
        raise NotImplementedError

    def abort(self, ids: Iterable[str]) -> None:
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError

    first_rows: Any = None

    def settle(self) -> None:
        """Lets what is still under way after ``abort`` come back."""
        if self.llm_engine is None:
            return
        core = self.llm_engine.engine_core.engine_core
        while core.scheduler.has_requests() or core.batch_queue:
            self.llm_engine.step()

    def memory(self) -> dict[str, int | None] | None:
        return None


class SpeechSystem(System):
    """This engine, or as many as there are in ``data_parallel_size``, whose single steps cannot be seen."""

    name = ENGINE

    def __init__(self, geometry: Geometry, scratch: Path, dtype: str, options: Mapping[str, Any]) -> None:
        from ..backends import make_engine
        from ..backends.vllm import VllmEngine

        random = {"load_format": "dummy"} if geometry.path is None else {}
        self._engine = make_engine("vllm", geometry.open(scratch), dtype, **{**random, **options})
        self.engines = options.get("data_parallel_size", 1)
        self.devices = _devices(options)
        self.steps_seen = False
        if isinstance(self._engine, VllmEngine):
            self.llm_engine = self._engine._engine
            self.runner, self.steps_seen = runner_of(self.llm_engine), steps_seen(self.llm_engine)
            self._watch = FirstRows(self.llm_engine)
            self.first_rows = self._first_rows
        self._submitted: list[str] = []

    def submit(self, request: RowRequest) -> None:
        self._engine.submit(request)
        self._submitted.append(request.request_id)  # the engine counts its requests from 0

    def step(self) -> list[tuple[str, Any]]:
        return self._engine.step()

    def abort(self, ids: Iterable[str]) -> None:
        self._engine.abort(ids)

    def _first_rows(self) -> list[str]:
        return [self._submitted[int(name)] for name in self._watch.take()]

    def memory(self) -> dict[str, int | None] | None:
        return None if self.runner is None else memory_by_owner(self.runner)

    def close(self) -> None:
        self._engine.close()
        # What they hold of the device is freed only once nothing refers to them.
        self._engine = self._watch = self.first_rows = self.runner = self.llm_engine = None


class PlainSystem(System):
    """vLLM as it is, on the same backbone and vocabulary, with random weights: speed does not depend on their values."""

    name = PLAIN
    same_attention = False

    def __init__(self, geometry: Geometry, scratch: Path, dtype: str, options: Mapping[str, Any]) -> None:
        from vllm.engine.arg_utils import EngineArgs
        from vllm.platforms import current_platform
        from vllm.v1.engine.llm_engine import LLMEngine

        if options.get("data_parallel_size", 1) != 1:
            raise EngineError(
                "vLLM's own LLMEngine is one engine; leave data_parallel_size away, or take --only engine"
            )
        self.devices = _devices(options)
        fixed = {"model": str(geometry.write_plain(scratch / "plain")), "dtype": dtype, "skip_tokenizer_init": True}
        fixed |= {"load_format": "dummy", "disable_log_stats": True, "enable_prefix_caching": True}
        if current_platform.is_cpu():
            os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
            fixed["enforce_eager"] = True  # as this engine does on a CPU
        try:
            own = vllm_options(options, Path(fixed["model"]), cpu=current_platform.is_cpu())
            config = EngineArgs(**{**fixed, **own}).create_engine_config()
            if self.same_attention and set_attention(config).backend is None:
                raise EngineError("vLLM's own choice of attention is what this engine has too: see the system plain")
            self.llm_engine = LLMEngine.from_vllm_config(config, disable_log_stats=True)
        except (TypeError, ValueError) as error:
            raise EngineError(f"vLLM refused the engine options {dict(options)}: {error}") from error
        self.runner, self.steps_seen = runner_of(self.llm_engine), steps_seen(self.llm_engine)
        self._watch = FirstRows(self.llm_engine)

    def submit(self, request: RowRequest) -> None:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        sampling = request.rules.sampling
        params = SamplingParams(
            temperature=0.0 if sampling.greedy else sampling.temperature,
            top_k=0 if sampling.greedy else sampling.topk,
            max_tokens=request.rules.max_rows,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        self.llm_engine.add_request(request.request_id, {"prompt_token_ids": request.prompt[:, 0].tolist()}, params)

    def step(self) -> list[tuple[str, Any]]:
        return [(output.request_id, _plain_result(output)) for output in self.llm_engine.step() if output.finished]

    def abort(self, ids: Iterable[str]) -> None:
        self.llm_engine.abort_request(list(ids))

    def first_rows(self) -> list[str]:
        return self._watch.take()

    def memory(self) -> dict[str, int | None] | None:
        return None if self.runner is None else memory_by_owner(self.runner)

    def close(self) -> None:
        self.llm_engine.engine_core.shutdown()
        self.llm_engine = self._watch = self.runner = None


class SameAttentionSystem(PlainSystem):
    """Plain text with the attention that this engine chooses: what is left is what the streams cost."""

    name = SAME
    same_attention = True


def _devices(options: Mapping[str, Any]) -> int:
    """On a CPU all engines and ranks share the one."""
    import torch

    gpus = options.get("data_parallel_size", 1) * options.get("tensor_parallel_size", 1)
    return gpus if torch.cuda.is_available() else 1


def _plain_result(output: Any) -> RowResult:
    ids = np.array(output.outputs[0].token_ids, dtype=np.int32).reshape(-1, 1)
    return RowResult(ids, np.zeros(ids.shape, np.float32), np.zeros(ids.shape, bool), output.outputs[0].finish_reason)


class PyTorchSystem(System):
    """The plain backend. It runs a whole request at each step, so its rows cannot be seen one by one."""

    name = PYTORCH
    steps_seen = False

    def __init__(self, geometry: Geometry, scratch: Path, dtype: str, device: str | None) -> None:
        from ..backends.pytorch import PyTorchEngine

        weights = "auto" if geometry.path is not None else "dummy"
        self._engine = PyTorchEngine(geometry.open(scratch), dtype=dtype, device=device, load_format=weights)

    def submit(self, request: RowRequest) -> None:
        self._engine.submit(request)

    def step(self) -> list[tuple[str, Any]]:
        return self._engine.step()

    def abort(self, ids: Iterable[str]) -> None:
        self._engine.abort(ids)

    def close(self) -> None:
        self._engine.close()
        del self._engine


def start(
    name: str, geometry: Geometry, scratch: Path, dtype: str, options: Mapping[str, Any], device: str | None = None
) -> tuple[System, float]:
    """The system called ``name``, and the seconds that it took to start.

    Args:
        scratch: folder for configurations that it is started with.
        options: of vLLM; the ``pytorch`` system takes ``device`` instead.
    """
    began = time.perf_counter()
    system: System
    if name == PYTORCH:
        system = PyTorchSystem(geometry, scratch, dtype, device)
    else:
        kind = {ENGINE: SpeechSystem, PLAIN: PlainSystem, SAME: SameAttentionSystem}[name]
        system = kind(geometry, scratch, dtype, options)
        # As vLLM does once an engine of a process of its own has started.
        gc.collect()
        gc.freeze()
    return system, time.perf_counter() - began


def stop(system: System) -> int:
    """Closes ``system`` and frees the device; bytes that torch still holds on the GPU afterwards."""
    system.close()
    gc.unfreeze()
    return free_device()
