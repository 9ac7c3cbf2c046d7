"""What becomes of every tensor, decided from names, shapes and dtypes alone; no weight is read here."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ..errors import CheckpointError
from .describe import Description
from .expected import Shapes, backbone_shapes
from .names import CODEC, CONTINUOUS_AUDIO, EMBEDDING, HEAD, MODEL, STREAM_EMBEDDING, Mapped, map_names, source_name
from .tensors import TensorSource, TensorSpec

KEEP = "keep"
DTYPES = (KEEP, "bfloat16", "float16", "float32")
_MOST_NAMES = 20  # of each kind in an error message


@dataclass(frozen=True)
class Entry:
    """One tensor of the converted directory.

    source: its name in the checkpoint. stored: shape and dtype there. rows: only the first so many are kept.
    casts: dtypes that it passes through, in order; each step rounds.
    """

    source: str
    part: str
    name: str
    stored: TensorSpec
    casts: tuple[str, ...] = ()
    rows: int | None = None

    @property
    def spec(self) -> TensorSpec:
        """As it will stand in the converted directory."""
        shape = self.stored.shape if self.rows is None else (self.rows, *self.stored.shape[1:])
        return TensorSpec(shape, self.casts[-1] if self.casts else self.stored.dtype)

    def load(self, source: TensorSource) -> Any:
        """The tensor as it will stand, in memory of its own."""
        import torch

        tensor = source.load(self.source)[: self.rows]
        for dtype in self.casts:
            tensor = tensor.to(getattr(torch, dtype))
        return tensor.clone(memory_format=torch.contiguous_format)


@dataclass(frozen=True)
class Plan:
    """entries: every tensor that is written. dropped: name in the checkpoint -> why."""

    entries: tuple[Entry, ...]
    dropped: Mapping[str, str]

    def part(self, name: str) -> list[Entry]:
        return [entry for entry in self.entries if entry.part == name]

    @property
    def nbytes(self) -> int:
        return sum(entry.spec.nbytes for entry in self.entries)

    @property
    def rounded(self) -> list[Entry]:
        """Those that lose precision or change dtype."""
        return [entry for entry in self.entries if entry.casts]


def make_plan(description: Description, source: TensorSource, *, dtype: str = KEEP) -> Plan:
    """Hold the tensors of ``source`` against ``description`` and say what becomes of each.

    ``dtype``: of the language model in the converted directory; ``keep`` leaves it as ESPnet would load it.

    Raises CheckpointError: another family's tensors, a vocabulary that does not close, a codec that does not fit,
    tensors that are missing, unknown or of another shape (by name, with shapes).
    """
    family, where = description.source.family, str(source.path)
    mapped, dropped, unknown = map_names(family, source.specs, where)
    if description.tied and HEAD not in {entry.name for entry in mapped if entry.part == MODEL}:
        mapped += [replace(entry, name=HEAD) for entry in mapped if (entry.part, entry.name) == (MODEL, EMBEDDING)]
    by_place = {(entry.part, entry.name): source.specs[entry.source] for entry in mapped}
    _check_vocabulary(description, by_place, where)
    _check_streams(description, by_place, where)
    streams = description.layout.num_streams
    expected: dict[str, Shapes | None] = {
        MODEL: backbone_shapes(description.backbone, description.layout.vocab_size, streams),
        CODEC: description.codec.shapes if description.codec else {},
        CONTINUOUS_AUDIO: description.continuous_audio.shapes if description.continuous_audio else {},
    }
    if description.codec is not None and not description.codec.in_checkpoint:
        expected[CODEC] = {}
    _compare(family, mapped, unknown, expected, source, where, spare_rows=description.stream_rows_spare)
    entries = [_entry(entry, source.specs[entry.source], description, dtype) for entry in mapped]
    return Plan(tuple(entries), dropped)


def _check_vocabulary(description: Description, specs: Mapping[tuple[str, str], TensorSpec], where: str) -> None:
    for name in (EMBEDDING, HEAD):
        spec = specs.get((MODEL, name))
        if spec is not None and spec.shape[:1] != (description.layout.vocab_size,):
            raise CheckpointError(
                f"the vocabulary does not close: {source_name(description.source.family, MODEL, name)} in {where} is "
                f"{list(spec.shape)}, but {description.source.train_config} gives {description.vocabulary}"
            )


def _check_streams(description: Description, specs: Mapping[tuple[str, str], TensorSpec], where: str) -> None:
    spec = specs.get((MODEL, STREAM_EMBEDDING))
    streams = description.layout.num_streams
    if spec is None or spec.shape[0] == streams or (description.stream_rows_spare and spec.shape[0] > streams):
        return
    raise CheckpointError(
        f"the codec does not fit the checkpoint: {description.source.train_config} and the codec that it names give "
        f"{streams} streams, but {source_name(description.source.family, MODEL, STREAM_EMBEDDING)} in {where} has "
        f"{spec.shape[0]} rows"
    )


def _compare(
    family: str,
    mapped: list[Mapped],
    unknown: list[str],
    expected: Mapping[str, Shapes | None],
    source: TensorSource,
    where: str,
    *,
    spare_rows: bool,
) -> None:
    """Raise CheckpointError, with every name, unless exactly the expected tensors are there."""
    given = {(entry.part, entry.name): entry for entry in mapped}
    strange = [f"{name} {source.specs[name]}" for name in unknown]
    missing, other_shape, no_floats = [], [], []
    for part, shapes in expected.items():
        if shapes is None:
            continue
        for name, shape in shapes.items():
            entry = given.get((part, name))
            if entry is None:
                missing.append(f"{source_name(family, part, name)} {list(shape)}")
                continue
            found = source.specs[entry.source].shape
            if part == MODEL and not _is_float(source.specs[entry.source].dtype):
                no_floats.append(f"{entry.source} {source.specs[entry.source]}")
            if spare_rows and name == STREAM_EMBEDDING:
                found = (min(found[0], shape[0]), *found[1:])
            if found != shape:
                other_shape.append(f"{entry.source} is {list(found)}, expected {list(shape)}")
        strange += [f"{e.source} {source.specs[e.source]}" for e in mapped if e.part == part and e.name not in shapes]
    problems = [
        _listed(f"{len(names)} {what}", names)
        for what, names in (
            ("missing", missing),
            ("unknown", strange),
            ("of another shape", other_shape),
            ("of no floating type", no_floats),
        )
        if names
    ]
    if problems:
        raise CheckpointError(
            f"{where} does not hold the model that the training yaml and the configurations it names describe. Tensors "
            + "; ".join(problems)
        )


def _listed(what: str, names: list[str]) -> str:
    more = f", and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    return f"{what}: {', '.join(names[:_MOST_NAMES])}{more}"


def _entry(mapped: Mapped, stored: TensorSpec, description: Description, dtype: str) -> Entry:
    casts: list[str] = []
    if mapped.in_body and _is_float(stored.dtype):
        created = description.body_dtype
        if mapped.part == CONTINUOUS_AUDIO:
            created = description.continuous_audio.dtype
        if created not in (None, stored.dtype):
            casts.append(created)
    if mapped.part == MODEL and dtype != KEEP and (casts or [stored.dtype])[-1] != dtype and _is_float(stored.dtype):
        casts.append(dtype)
    spare = (mapped.part, mapped.name) == (MODEL, STREAM_EMBEDDING) and stored.shape[0] > description.layout.num_streams
    return Entry(
        mapped.source, mapped.part, mapped.name, stored, tuple(casts), description.layout.num_streams if spare else None
    )


def _is_float(dtype: str) -> bool:
    import torch

    return getattr(torch, dtype).is_floating_point
