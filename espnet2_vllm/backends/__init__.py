"""Backends: one interface (``base.Engine``), swapped by a word; ``run.decode`` drives any of them."""

from __future__ import annotations

import difflib
import importlib
import inspect
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ..errors import ConfigError, EngineError
from ..logs import say
from .base import Engine
from .run import decode

if TYPE_CHECKING:
    from ..checkpoint import Checkpoint

__all__ = ["BACKENDS", "DTYPES", "Engine", "check_engine", "check_options", "decode", "make_engine"]

_ENGINES = {"vllm": ("vllm", "VllmEngine"), "pytorch": ("pytorch", "PyTorchEngine")}
_SEVERAL = ("parallel", "DataParallelEngine")
BACKENDS = tuple(_ENGINES)
_MOST_LISTED = 20  # names in a message, where one of them is near
DTYPES = ("float32", "bfloat16", "float16", "float64")


def make_engine(name: str, checkpoint: Checkpoint, dtype: str, **options: Any) -> Engine:
    """The engine called ``name`` on a converted checkpoint.

    Args:
        name: ``vllm`` or ``pytorch``.
        checkpoint: an opened converted directory.
        dtype: of weights and activations; logits and sampling are float32 always.
        options: the engine's own keyword arguments. With a ``data_parallel_size`` it is so many engines.

    Raises:
        ConfigError: for an unknown backend, dtype or option, naming the nearest valid one.
        EngineError: if the backend is not installed or cannot run here.
    """
    check_engine(name, dtype)
    engine_class = _engine_class(name, options)
    check_options(name, options)
    begun = time.monotonic()
    say(f"starting the engine ({name}); this can take a minute")
    engine = engine_class(checkpoint, dtype=dtype, **options)
    say(f"the engine is ready after {time.monotonic() - begun:.0f} s")
    return engine


def check_options(name: str, options: Mapping[str, Any]) -> None:
    """Refuses options that the engine called ``name`` does not have, before it is started.

    Raises:
        ConfigError: naming the nearest option that there is.
        EngineError: if the backend is not installed.
    """
    if not options:
        return  # nothing heavy is imported for it
    engine_class = _engine_class(name, options)
    known = {p.name for p in inspect.signature(engine_class).parameters.values() if p.kind is p.KEYWORD_ONLY}
    if name == "vllm":
        from ..engine.options import check_given
        from .vllm import settable_options

        check_given(options)
        known |= settable_options()
    for option in options:
        _check_choice(f"option of the {name} backend", option, tuple(sorted(known - {"dtype"})))


def _engine_class(name: str, options: Mapping[str, Any]) -> Any:
    several = name == "vllm" and options.get("data_parallel_size", 1) != 1
    module, class_name = _SEVERAL if several else _ENGINES[name]
    try:
        return getattr(importlib.import_module(f".{module}", __package__), class_name)
    except ModuleNotFoundError as error:
        if (error.name or "").startswith(__package__.partition(".")[0]):
            raise
        raise EngineError(
            f"the {name} backend needs the Python package {error.name!r}, which is not installed; run tools/setup.sh, or choose "
            "another --backend"
        ) from error


def check_engine(name: str, dtype: str) -> None:
    """ConfigError for an unknown backend or dtype, naming the nearest valid one."""
    _check_choice("backend", name, BACKENDS)
    _check_choice("dtype", dtype, DTYPES)


def _check_choice(what: str, value: str, valid: tuple[str, ...]) -> None:
    if value in valid:
        return
    near = difflib.get_close_matches(str(value), valid, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    listed = f"; expected one of {', '.join(valid)}" if len(valid) <= _MOST_LISTED or not near else ""
    raise ConfigError(f"{what} {value!r} is unknown{listed}{hint}")
