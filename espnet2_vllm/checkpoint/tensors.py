"""Tensors of a checkpoint by name, one at a time: DeepSpeed and plain torch files, torch.distributed folders.

Only the seam ``TensorSource`` is known to the rest of the package, so that a layout can be checked without weights.
"""

import importlib
import pickle
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple, Protocol

from ..errors import CheckpointError
from .sources import DCP_METADATA, pipeline_stages

# Wrappers that a state dict comes in, outermost first: DeepSpeed and export_checkpoint.py, ESPnet's trainer.
_WRAPPERS = ("module", "model")
_READ_ERRORS = (OSError, RuntimeError, EOFError, ValueError, KeyError, AttributeError, ImportError, pickle.PickleError)


class TensorSpec(NamedTuple):
    """Shape and dtype (torch's name without the prefix) of a tensor."""

    shape: tuple[int, ...]
    dtype: str

    @property
    def nbytes(self) -> int:
        import torch

        count = 1
        for size in self.shape:
            count *= size
        return count * getattr(torch, self.dtype).itemsize

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)}"


class TensorSource(Protocol):
    """Named tensors that are read one at a time.

    path: where they come from, for messages. specs: all of them. notes: what is worth saying about how they are read.
    """

    path: Path
    specs: Mapping[str, TensorSpec]
    notes: Sequence[str]

    def load(self, name: str) -> Any:
        """The tensor, on the CPU. Its memory may belong to the source: copy it before changing it."""


def open_tensors(path: Path) -> TensorSource:
    """A torch file or a torch.distributed folder. Raises CheckpointError if it cannot be read."""
    if path.is_dir():
        stages = pipeline_stages(path)
        if stages:
            return PipelineSource(path, stages)
        if not (path / DCP_METADATA).is_file():
            raise CheckpointError(
                f"{path} is not a complete torch.distributed checkpoint: {DCP_METADATA} is missing (it is written last). "
                "Choose another step, or export one with ESPnet's export_checkpoint.py"
            )
        return DistributedSource(path)
    return FileSource(path)


def spec_of(tensor: Any) -> TensorSpec:
    return TensorSpec(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))


class FileSource:
    """A file written by ``torch.save``: ``{"module": {...}}``, ``{"model": {...}}`` or flat.

    The file is memory-mapped, so that only what ``load`` hands out is read.
    Raises CheckpointError: unreadable, cut short, holding other objects than tensors, or no tensors.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        content, self.notes = _read_torch_file(path)
        self._tensors = _unwrap(content, path)
        self.specs = {name: spec_of(tensor) for name, tensor in self._tensors.items()}

    def load(self, name: str) -> Any:
        return self._tensors[name].detach()


def _read_torch_file(path: Path) -> tuple[Any, tuple[str, ...]]:
    import zipfile

    import torch

    try:
        with open(path, "rb") as stream:
            is_archive = stream.read(4) == b"PK\x03\x04"
        if is_archive and not zipfile.is_zipfile(path):
            raise CheckpointError(f"{path} is cut short ({path.stat().st_size} bytes): its end, the index, is missing")
        # Files from before torch 1.6 are no archives and cannot be mapped.
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=is_archive or None)
    except _READ_ERRORS as error:
        raise CheckpointError(
            f"cannot read {path} as a torch checkpoint, a file that torch.save wrote: {type(error).__name__}: {error}"
        ) from error
    return content, () if is_archive else (
        f"{path.name} has torch's old file format: it was read into memory as a whole",
    )


def _unwrap(content: Any, path: Path) -> Mapping[str, Any]:

    for wrapper in _WRAPPERS:
        if isinstance(content, Mapping) and isinstance(content.get(wrapper), Mapping):
            content = content[wrapper]
            break
    if not isinstance(content, Mapping):
        raise CheckpointError(f"{path}: expected a mapping of tensors, got {type(content).__name__}")
    others = [str(name) for name, value in content.items() if not (isinstance(name, str) and _is_plain(value))]
    if others or not content:
        found = f"{len(others)} entries that are no plain tensors: {', '.join(others[:8])}" if others else "nothing"
        raise CheckpointError(
            f"{path}: expected tensors, directly or under one of {', '.join(map(repr, _WRAPPERS))}, but found {found}"
        )
    return content


def _is_plain(value: Any) -> bool:
    """Whether it is a tensor whose numbers are there, one by one: not sparse, quantised or without data."""
    import torch

    return (
        isinstance(value, torch.Tensor) and value.layout == torch.strided and not (value.is_quantized or value.is_meta)
    )


class DistributedSource:
    """A torch.distributed checkpoint folder as ESPnet's Titan trainer writes it: ``.metadata`` and ``*.distcp``.

    Tensors of the model stand under ``model.``; the optimiser's are not looked at. Same content as the file that ESPnet's
    ``export_checkpoint.py`` makes of it. Raises CheckpointError if the folder or a tensor cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.notes = (f"read from the torch.distributed checkpoint {path.name}",)
        try:
            self._reader = _open_reader(path)
            entries = self._reader.read_metadata().state_dict_metadata
        except _READ_ERRORS as error:
            raise CheckpointError(f"cannot read {path / DCP_METADATA}: {error}") from error
        self.specs = {
            name.removeprefix("model."): TensorSpec(
                tuple(entry.size), str(entry.properties.dtype).removeprefix("torch.")
            )
            for name, entry in entries.items()
            if name.startswith("model.") and hasattr(entry, "chunks")
        }
        if not self.specs:
            raise CheckpointError(f"{path}: no tensor stands under 'model.' among {len(entries)} entries")

    def load(self, name: str) -> Any:
        import torch
        import torch.distributed.checkpoint as dcp

        spec = self.specs[name]
        tensor = torch.empty(spec.shape, dtype=getattr(torch, spec.dtype))
        try:
            with warnings.catch_warnings():
                # one process is what is meant
                warnings.filterwarnings("ignore", message="torch.distributed is disabled")
                dcp.load({"model": {name: tensor}}, storage_reader=self._reader, no_dist=True)
        except (*_READ_ERRORS, dcp.CheckpointException) as error:
            raise CheckpointError(f"{self.path}: tensor {name} ({spec}) cannot be read: {error}") from error
        return tensor


class PipelineSource:
    """The folders of a pipeline's stages, of which each holds its layers under their numbers in the whole model.

    A stage saves a list of chunks (``TitanPPTrainer``), so that names begin with the number of one. Raises CheckpointError as
    ``DistributedSource``, and if two stages hold the same tensor.
    """

    def __init__(self, path: Path, stages: Sequence[Path]) -> None:
        self.path = path
        self.notes = (f"read from the torch.distributed checkpoints of the {len(stages)} stages of {path.name}",)
        self._places: dict[str, tuple[DistributedSource, str]] = {}
        self.specs: dict[str, TensorSpec] = {}
        for stage in map(DistributedSource, stages):
            for name, spec in stage.specs.items():
                chunk, _, short = name.partition(".")
                short = short if chunk.isdecimal() else name
                if short in self._places:
                    raise CheckpointError(
                        f"{stage.path}: {name} is also in {self._places[short][0].path}; are these stages of one model?"
                    )
                self._places[short], self.specs[short] = (stage, name), spec

    def load(self, name: str) -> Any:
        source, own = self._places[name]
        return source.load(own)


def _open_reader(path: Path) -> Any:
    """torch's reader, with its metadata unpickled once, and with plain data classes only."""
    import torch.distributed.checkpoint as dcp

    class Reader(dcp.FileSystemReader):
        _known: Any = None

        def read_metadata(self, *args: Any, **kwargs: Any) -> Any:
            if self._known is None:
                with open(path / DCP_METADATA, "rb") as stream:
                    self._known = _MetadataUnpickler(stream).load()
                if getattr(self._known, "storage_meta", None) is None:
                    self._known.storage_meta = dcp.metadata.StorageMeta()
            self._known.storage_meta.load_id = self.load_id
            return self._known

    return Reader(path)


class _MetadataUnpickler(pickle.Unpickler):
    """torch unpickles ``.metadata`` without restrictions: a checkpoint from elsewhere could then run any code."""

    _MODULES = ("torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem")
    _FUNCTIONS = (("torch.serialization", "_get_layout"),)

    def find_class(self, module: str, name: str) -> Any:
        import torch

        if (module, name) in self._FUNCTIONS or module in self._MODULES:
            found = getattr(importlib.import_module(module), name)
            if isinstance(found, type) or (module, name) in self._FUNCTIONS:
                return found
        if module in ("pathlib", "pathlib._local") and name in ("PosixPath", "PurePosixPath"):
            return PurePosixPath  # where the checkpoint was saved; nothing is read from there
        found = getattr(torch, name, None) if module == "torch" else None
        if found is torch.Size or isinstance(found, (torch.dtype, torch.layout, torch.memory_format)):
            return found
        raise pickle.UnpicklingError(f"it names {module}.{name}, which has no place in the metadata of a checkpoint")
