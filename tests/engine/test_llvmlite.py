"""An engine starts whatever was imported before: vLLM looks through all loaded modules, which llvmlite does not bear by itself."""

import os
import subprocess
import sys

import pytest
from conftest import REPO, golden_models

pytest.importorskip("vllm")

from espnet2_vllm.engine.compat import let_modules_be_scanned  # noqa: E402
from espnet2_vllm.errors import EngineError  # noqa: E402

USER = """
import sys
import librosa
import numba
from llvmlite.binding import ffi

from espnet2_vllm import SpeechLM

for _ in range(2):  # vLLM looks each time an engine starts
    with SpeechLM.from_pretrained(sys.argv[1]) as model:
        settings = {"text": {"temperature": 0, "topk": 1, "max_step": 4}, "enforce_modality": ["text"]}
        print("answered", len(model.generate([["user", "text", "hello"]], settings).text))

assert numba.njit(lambda x: x + 1)(41) == 42  # what llvmlite is there for
"""


def run(code, *words):
    environment = {**os.environ, "PYTHONPATH": str(REPO)}
    return subprocess.run([sys.executable, "-c", code, *words], env=environment, capture_output=True, text=True)


def test_an_engine_starts_after_librosa():
    (directory,) = (path for path in golden_models("bagpiper") if path.name == "qwen3-s8-cb64")
    done = run(USER, str(directory))
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("answered ") == 2


def test_vllms_look_through_all_modules_ends_after_the_plugin_ran():
    """As it does in a process that vLLM starts: plugins first, then the look."""
    dispatcher = pytest.importorskip("vllm.triton_utils.dispatcher", reason="vLLM before 0.28 does not look")
    assert dispatcher
    look = (
        "import numba, sys; from vllm.triton_utils.dispatcher import _rebind_kernels\n"
        "if sys.argv[1:]:\n    from espnet2_vllm.engine.plugin import register; register()\n"
        "_rebind_kernels([])"
    )
    assert run(look, "with").returncode == 0
    without = run(look)
    assert "AttributeError" in without.stderr, "vLLM or llvmlite has changed: the remedy can go"


def test_another_llvmlite_is_refused_with_the_way_out(monkeypatch):
    class Functions:
        __slots__ = ()

        def __getattr__(self, name):
            if name == "_fntab":
                raise AttributeError(name)
            return print

    ffi = type(sys)("llvmlite.binding.ffi")
    ffi.lib = Functions()
    llvmlite = type(sys)("llvmlite")
    llvmlite.__version__ = "9.9"
    monkeypatch.setitem(sys.modules, "llvmlite.binding.ffi", ffi)
    monkeypatch.setitem(sys.modules, "llvmlite", llvmlite)
    with pytest.raises(EngineError, match="llvmlite 9.9 was loaded before the engine.*tools/setup.sh"):
        let_modules_be_scanned()


def test_nothing_is_imported_for_it():
    code = "import sys; from espnet2_vllm.engine import compat; compat.let_modules_be_scanned()"
    assert run(f"{code}; assert 'llvmlite' not in sys.modules").returncode == 0
