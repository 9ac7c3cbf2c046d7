"""Names, shapes and dtypes of tensors in safetensors files, and what a model wants of them."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import CheckpointError, shown
from ..layout import Layout
from .expected import Shapes, backbone_shapes
from .names import HEAD
from .opening import check_inside
from .tensors import TensorSpec
from .writing import INDEX

# safetensors' names of dtypes -> torch's.
_DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "BOOL": "bool", "U8": "uint8"} | {
    f"I{bits}": f"int{bits}" for bits in (8, 16, 32, 64)
}
_MOST_NAMES = 8


def read_index(directory: Path) -> dict[str, str]:
    """Tensor -> file of a converted directory. CheckpointError if it cannot be read, or names a file elsewhere."""
    path = directory / INDEX
    try:
        weight_map = dict(json.loads(path.read_text(encoding="utf-8"))["weight_map"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(f"cannot read {path}: {error!r}; convert the checkpoint again") from error
    for name, file in weight_map.items():
        check_inside(file, f"{path}: the file of {shown(name)}")
    return weight_map


def read_header(path: Path) -> dict[str, TensorSpec]:
    """Names, shapes and dtypes of a safetensors file. A file that is cut short does not pass."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
            return {
                name: TensorSpec(tuple(part.get_shape()), _DTYPES.get(part.get_dtype(), part.get_dtype()))
                for name, part in slices.items()
            }
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"cannot read {path}: {error}; convert the checkpoint again") from error


def compare_shapes(where: str, shapes: Shapes, given: Mapping[str, TensorSpec]) -> None:
    wanted = {name: str(list(shape)) for name, shape in shapes.items()}
    compare(where, wanted, {name: str(list(spec.shape)) for name, spec in given.items()})


def compare(where: str, wanted: Mapping[str, str], given: Mapping[str, str]) -> None:
    problems = {
        "missing": [f"{name} {wanted[name]}".rstrip() for name in wanted if name not in given],
        "unknown": [f"{name} {given[name]}".rstrip() for name in given if name not in wanted],
        "different": [
            f"{n} is {given[n]}, expected {wanted[n]}" for n in wanted if n in given and given[n] != wanted[n]
        ],
    }
    for what, names in problems.items():
        if names:
            more = f", and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
            raise CheckpointError(f"{where}: {len(names)} tensors {what}: {', '.join(names[:_MOST_NAMES])}{more}")


def check_names(directory: Path, config: Any, layout: Layout, given: Mapping[str, Sequence[int]]) -> None:
    """Are the tensors of the language model, name -> shape, all that an engine needs for ``config``, and no others?

    Args:
        config: transformers' configuration of the converted directory. A tied head is not looked for.

    Raises:
        CheckpointError: naming what is missing, unknown or of another shape.
    """
    wanted = _wanted_shapes(config.to_json_string(), config, layout.vocab_size, layout.num_streams)
    shapes = {name: str(list(shape)) for name, shape in given.items()}
    try:
        compare(str(directory), {name: str(list(shape)) for name, shape in wanted.items()}, shapes)
    except CheckpointError as error:
        raise CheckpointError(f"{error}; convert the checkpoint again") from None


def check_weights(directory: Path, config: Any, layout: Layout) -> None:
    """``check_names`` of what the files hold that an engine will read. Headers are read, no weights."""
    indexed = (directory / INDEX).is_file()
    names = set(read_index(directory).values()) if indexed else {path.name for path in directory.glob("*.safetensors")}
    given: dict[str, Sequence[int]] = {}
    for name in sorted(names):
        given |= {tensor: spec.shape for tensor, spec in read_header(directory / name).items()}
    check_names(directory, config, layout, given)


_KNOWN: dict[tuple[str, int, int], Shapes] = {}


def _wanted_shapes(key: str, config: Any, vocab_size: int, num_streams: int) -> Shapes:
    """Built once a process: the engine's worker asks again, for what has really reached it."""
    place = key, vocab_size, num_streams
    if place not in _KNOWN:
        _KNOWN[place] = backbone_shapes(config, vocab_size, num_streams)
    shapes = dict(_KNOWN[place])
    if getattr(config, "tie_word_embeddings", False):
        del shapes[HEAD]
    return shapes
