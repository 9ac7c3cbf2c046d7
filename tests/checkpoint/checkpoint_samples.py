"""Golden models as conversions and as copies that a test may damage."""

import atexit
import functools
import pathlib
import shutil
import tempfile
from collections.abc import Callable

import pytest
import torch
from conftest import golden_models
from golden_layouts import bagpiper_model_layout, opuslm_layout

from espnet2_vllm.checkpoint import convert
from espnet2_vllm.layout import Layout

MODELS = [path for family in ("bagpiper", "opuslm") for path in golden_models(family)]
_LARGE = shutil.ignore_patterns("cases", "trees", "data")


def of_family(family: str) -> list[pathlib.Path]:
    return [path for path in MODELS if path.parent.name == family]


def golden_layout(model: pathlib.Path) -> Layout:
    return opuslm_layout(model) if model.parent.name == "opuslm" else bagpiper_model_layout(model)


def state_dict(path: pathlib.Path) -> dict[str, torch.Tensor]:
    """The tensors of a model file, whatever they are wrapped in, read without the package."""
    content = torch.load(path, map_location="cpu", weights_only=True)
    return dict(content.get("module", content))


def model_file(folder: pathlib.Path) -> pathlib.Path:
    """The model file of a golden model directory."""
    (found,) = [path for path in folder.iterdir() if path.suffix in (".pt", ".pth")]
    return found


@functools.cache
def converted(model: pathlib.Path) -> pathlib.Path:
    """The conversion of a golden model directory, made once. Do not change it."""
    folder = pathlib.Path(tempfile.mkdtemp(prefix="converted."))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    convert(model, folder / model.name)
    return folder / model.name


def copy_of(family: str, folder: pathlib.Path, name: str | None = None) -> pathlib.Path:
    """A copy of a golden model of ``family`` below ``folder``, writable whatever the original is."""
    models = [path for path in of_family(family) if name in (None, path.name)]
    if not models:
        pytest.skip(f"no golden model {name or ''} of family {family}")
    target = folder / models[0].name
    shutil.copytree(models[0], target, ignore=_LARGE, copy_function=shutil.copyfile)
    for place in [target, *(path for path in target.rglob("*") if path.is_dir())]:
        place.chmod(0o755)
    return target


def change_tensors(folder: pathlib.Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    """Rewrite the model file of ``folder`` after ``change(tensors)``, wrapped as it was."""
    path = model_file(folder)
    content = torch.load(path, map_location="cpu", weights_only=True)
    change(content.get("module", content))
    torch.save(content, path)


def change_text(path: pathlib.Path, *pairs: tuple[str, str]) -> None:
    """Replace each ``old`` of ``pairs``, which must occur once, by its ``new``."""
    text = path.read_text(encoding="utf-8")
    for old, new in pairs:
        assert text.count(old) == 1, f"{old!r} occurs {text.count(old)} times in {path}"
        text = text.replace(old, new)
    path.write_text(text, encoding="utf-8")
