"""``espnet2-vllm bench --codec``: starts codecs and engine, measures, reports after every part."""

from __future__ import annotations

import functools
import itertools
import logging
import os
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..codec.budget import make_room
from ..codec.service import CodecService
from ..codec.share import TIME, Share
from ..errors import ConfigError, SpeechLMError
from .codecs import make_codec
from .report import write_report
from .speech import SpeechBench, SpeechSettings

if TYPE_CHECKING:
    from ..codec.torch_codec import TorchCodec
    from .geometry import Geometry

log = logging.getLogger(__name__)


def run_speech(
    geometry: Geometry,
    names: Sequence[str],
    settings: SpeechSettings,
    *,
    dtype: str,
    device: str,
    tf32: Sequence[bool],
    tune: Sequence[bool],
    shares: Sequence[Share],
    options: Mapping[str, Any],
    report: dict[str, Any],
    json: Path | None,
) -> bool:
    """Measures each codec of ``names`` beside one engine of ``geometry``; whether all could be measured.

    A codec that cannot be made, or fails, does not keep the others from being measured.

    Args:
        tf32, tune: measured without and with, as listed.
        shares: of the device. Those by time are tried on one codec, those by space on one each.
    """
    import torch

    from ..backends.vllm import VllmEngine

    entries = report.setdefault("speech", [])
    with tempfile.TemporaryDirectory(prefix="espnet2_vllm.bench.") as folder:
        scratch = Path(folder)
        checkpoint = geometry.open(scratch)
        codecs = functools.cache(lambda name: make_codec(name, checkpoint, device))
        started = []
        for name, *how in itertools.product(names, tf32, tune, _kinds(shares)):
            entries.append({"codec": name, "model": geometry.name, "dtype": dtype})
            started.append(_start(entries[-1], lambda name=name: codecs(name), settings, *how))
        started = [one for one in started if one is not None]
        if not started:
            raise ConfigError(f"none of the codecs {', '.join(names)} could be started")
        taken = max(entry.get("device_bytes", 0) for entry in entries)
        total = torch.cuda.get_device_properties(device).total_memory if device != "cpu" else 0
        random = {"load_format": "dummy"} if geometry.path is None else {}
        begun = time.monotonic()
        engine = VllmEngine(checkpoint, dtype=dtype, **{**random, **make_room(options, taken, total)})
        report["engine_start_s"] = time.monotonic() - begun
        log.info("engine started in %.0f s", report["engine_start_s"])
        try:
            for entry, service, its in started:
                _measure(SpeechBench(engine, service.codec, service, its, scratch), entry, report, json)
                service.close()
        finally:
            engine.close()
    return not any("error" in entry for entry in entries)


def _start(
    entry: dict[str, Any],
    make: Callable[[], TorchCodec],
    settings: SpeechSettings,
    tf32: bool,
    tune: bool,
    shares: tuple[Share, tuple[Share, ...]],
) -> tuple[dict[str, Any], CodecService, SpeechSettings] | None:
    """``entry`` of the report, a codec at work, and what is measured of it; None if it cannot be made, as the entry says then."""
    own, tried = shares
    # The device goes from one process to the other as a whole.
    elsewhere = os.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING") != "0"
    entry |= {"tf32": tf32, "tuned": tune, "share": str(own), "engine_process": elsewhere}
    try:
        begun = time.monotonic()
        service = CodecService(make(), waiting=1024, tf32=tf32, tune=tune, share=own)
        taken = service.prepare(settings.sizes)
        entry["start_s"] = time.monotonic() - begun
    except (SpeechLMError, RuntimeError) as error:
        log.error("%s: %s", entry["codec"], error, exc_info=True)
        entry["error"] = str(error)
        return None
    entry |= _described(service, taken)
    return entry, service, replace(settings, shares=tried)


def _kinds(shares: Sequence[Share]) -> list[tuple[Share, tuple[Share, ...]]]:
    """The share that a codec is made with, and those that are tried on it."""
    by_time = tuple(share for share in shares if share.by == TIME)
    return [*([(Share(), by_time)] if by_time else []), *((share, (share,)) for share in shares if share.by != TIME)]


def _described(service: CodecService, taken: int) -> dict[str, Any]:
    reach = service.reach
    return {
        "sample_rate": service.codec.sample_rate,
        "hop": service.codec.hop,
        "reach": {"left": reach.left, "right": reach.right, "features_right": service.features_right},
        "graphs": 0 if service.decoder is None else service.decoder.graphs,
        "device_bytes": taken,
        "figures": {},
    }


def _measure(bench: SpeechBench, entry: dict[str, Any], report: dict[str, Any], json: Path | None) -> None:
    begun = time.monotonic()
    try:
        for name, figures in bench.figures():
            entry["figures"][name] = figures
            log.info("%s: %s after %.0f s: %s", entry["codec"], name, time.monotonic() - begun, figures)
            if json is not None:
                write_report(json, report)
    except (SpeechLMError, RuntimeError, AssertionError) as error:
        log.error("%s: %s", entry["codec"], error, exc_info=True)
        entry["error"] = f"{type(error).__name__}: {error}"
