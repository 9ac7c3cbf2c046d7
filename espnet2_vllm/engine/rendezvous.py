"""Where the processes of one engine find each other: a file, not a port, as long as they are on one machine.

The store of a torch process group listens on all interfaces of the machine (``*:port``), whatever address it is given, and knows
no password. vLLM takes a file itself from 0.32 on, and a port before.
"""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from typing import Any

FOLDER = "ESPNET2_VLLM_RENDEZVOUS"  # variable: the folder of an engine whose ranks are processes of their own
_TCP = "tcp://"


def stay_on_this_machine(ranks: int, executor: Any) -> None:
    """Settles, before an engine starts, that nothing of it listens to other machines; with Ray it may have to, and is left alone.

    Args:
        ranks: processes that share the model.
        executor: vLLM's ``distributed_executor_backend``, or None.
    """
    if executor == "ray":
        return
    # vLLM would ask the routing table for the way to an address outside, which looks like a connection attempt.
    os.environ.setdefault("VLLM_HOST_IP", "127.0.0.1")
    if ranks != 1:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        os.environ[FOLDER] = _own_folder()


def without_port(method: str, parallel: Any) -> str:
    """``init_method`` of a rank's process group: a file in place of a port of this machine.

    Args:
        method: what vLLM chose.
        parallel: its ``ParallelConfig``.
    """
    if not method.startswith(_TCP) or getattr(parallel, "nnodes", 1) != 1:
        return method
    if parallel.world_size == 1:
        folder = _own_folder()
    elif not (folder := os.environ.get(FOLDER)):
        return method  # started by others than this package: its ranks have no folder in common
    # vLLM 0.26 names shared memory by what stands behind the last colon.
    return f"file://{folder}/store:{method.rpartition(':')[2]}"


def _own_folder() -> str:
    """A new folder that nobody else may look into, gone with the process."""
    folder = tempfile.mkdtemp(prefix="espnet2_vllm.")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder
