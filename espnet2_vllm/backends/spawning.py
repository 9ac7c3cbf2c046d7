"""How vLLM starts processes of its own: anew, without forking this one, and without running the user's script in them."""

from __future__ import annotations

import atexit
import os
import shutil
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import spawn
from typing import Any

_PATCHED = threading.Lock()
METHOD = "VLLM_WORKER_MULTIPROC_METHOD"
SOCKETS = "VLLM_RPC_BASE_PATH"
_MOST_FOLDER_BYTES = 107 - 45  # Linux takes 107 for a socket's name, of which vLLM's own part has up to 45
_MAIN = ("init_main_from_name", "init_main_from_path")


def choose_spawn() -> None:
    """Where the user has chosen nothing.

    vLLM forks unless CUDA is initialised, but a process that has only asked for the number of GPUs cannot be forked either. An
    actor of Ray is left to vLLM, which spawns there and says where Ray is.
    """
    if not in_ray_actor():
        os.environ.setdefault(METHOD, "spawn")


def keep_socket_names_short() -> None:
    """Sockets between vLLM's processes lie in the folder for temporary files, whose name may leave no room for theirs.

    Batch systems set long ones; the engine would end in a ZMQError. A folder of this process's own below /tmp then takes them.
    """
    if SOCKETS in os.environ or len(os.fsencode(tempfile.gettempdir())) <= _MOST_FOLDER_BYTES:
        return
    folder = tempfile.mkdtemp(prefix="espnet2_vllm.", dir="/tmp")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    os.environ[SOCKETS] = folder


def in_ray_actor() -> bool:
    ray = sys.modules.get("ray")
    return ray is not None and ray.is_initialized() and ray.get_runtime_context().get_actor_id() is not None


@contextmanager
def main_left_out(*values: Any) -> Iterator[None]:
    """Processes that this thread spawns meanwhile do not import ``__main__``, unless one of ``values`` for them is from there.

    Else a script without ``if __name__ == "__main__"`` would run once more in each, and start an engine there.
    """
    if any("__main__" in (getattr(value, "__module__", None), type(value).__module__) for value in values):
        yield
        return
    thread = threading.get_ident()

    def without_main(name: str) -> dict[str, Any]:
        data = prepare(name)
        if threading.get_ident() == thread:
            for key in _MAIN:
                data.pop(key, None)
        return data

    with _PATCHED:
        prepare = spawn.get_preparation_data
        spawn.get_preparation_data = without_main
        try:
            yield
        finally:
            spawn.get_preparation_data = prepare
