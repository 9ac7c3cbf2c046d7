"""Which files a checkpoint is made of: the training yaml and the file (or folder) that holds its tensors.

Nothing here imports torch.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .. import safe_yaml
from ..errors import CheckpointError, shown

DESCRIPTION_FILE = "speechlm.json"  # what makes a directory a converted one
DCP_METADATA = ".metadata"  # torch.distributed.checkpoint writes it last, so a save without it is incomplete
_PP_FOLDER = re.compile(r"pp_(\d+)_(\d+)")  # of one stage of a pipeline: its number and how many there are

# A top-level key that only the training yaml of that family has.
# (token_list alone would be any ESPnet task's.)
_MARKER_KEYS = {"multimodal_io": "bagpiper", "token_bias": "opuslm"}
_CONFIG_NAMES = {"bagpiper": "train.yaml", "opuslm": "config.yaml"}
_DEEPSPEED_FILE = "mp_rank_00_model_states.pt"
# Release names first; then the average that ESPnet's recipes decode with (``inference_model``).
_MODEL_NAMES = {
    "opuslm": ("model.pth", "valid.acc.ave.pth"),
    "bagpiper": (_DEEPSPEED_FILE, "model.pt", "base.pt"),
}
_MODEL_SUFFIXES = (".pt", ".pth")
_TRAINER_STATE = "checkpoint.pth"  # ESPnet's resume file: optimiser and all, never meant for decoding
_STEP_FOLDER = re.compile(r"(?:step_|global_step|universal_step)(\d+)")


@dataclass(frozen=True)
class Source:
    """A checkpoint in ESPnet's own format.

    Attributes:
        family: ``bagpiper`` or ``opuslm``.
        train_config: the training yaml; relative paths in it count from its folder first.
        model_file: a torch file, or the folder of a torch.distributed checkpoint (Titan).
        arguments: the parsed yaml.
        notes: choices made in finding the files, for the report.
    """

    family: str
    train_config: Path
    model_file: Path
    arguments: Mapping[str, Any]
    notes: tuple[str, ...] = ()

    @property
    def base_dir(self) -> Path:
        return self.train_config.parent


def find_source(
    src: str | Path, *, model_file: str | Path | None = None, train_config: str | Path | None = None
) -> Source:
    """The files of the checkpoint ``src``: a folder, its training yaml, or its model file.

    Folders understood: an OpusLM release or experiment (``config.yaml`` and ``*.pth``), a Bagpiper experiment
    (``train.yaml`` and ``checkpoints/step_N/...``), a Bagpiper release (yaml and ``model.pt`` or ``base.pt``), and any
    ``step_N``, ``global_stepN`` or ``universal_stepN`` folder inside an experiment. ``model_file`` and
    ``train_config`` override the search.

    Raises CheckpointError: nothing there, nothing recognised, or several candidates of equal rank; the message lists
    what was looked for.
    """
    src = Path(src)
    if not src.exists():
        raise CheckpointError(f"no such checkpoint: {src}")
    if (src / DESCRIPTION_FILE).is_file():
        raise CheckpointError(f"{src} is a converted directory already; use it as it is")
    if src.is_file() and src.suffix in _MODEL_SUFFIXES and model_file is None:
        src, model_file = src.parent, src
    folder = src if src.is_dir() else src.parent
    config = _existing_file(train_config, "training yaml") if train_config is not None else None
    if config is None:
        config = src if src.is_file() else _search_config(folder)
    family = _family_of(config)
    if family is None:
        raise CheckpointError(
            f"{config} is not the training yaml of a SpeechLM: expected the top-level key multimodal_io (Bagpiper) or "
            "token_bias (OpusLM)"
        )
    arguments = read_yaml(config)
    if model_file is None:
        path, notes = _search_model(folder, family)
    else:
        path, notes = _given_model(Path(model_file), config.parent)
    _refuse_split(path)
    return Source(family, config.absolute(), path.absolute(), arguments, notes)


def read_yaml(path: Path) -> Mapping[str, Any]:
    """Parse a yaml whose top level is a mapping. CheckpointError with file and line otherwise."""
    content = safe_yaml.read_yaml(path, CheckpointError)
    if not isinstance(content, Mapping):
        raise CheckpointError(f"{path}: expected a mapping at the top level, got {type(content).__name__}")
    return content


def require(arguments: Mapping[str, Any], key: str, kind: type | tuple[type, ...], where: Path | str) -> Any:
    """``arguments`` at the dotted ``key``. CheckpointError if it is missing or not of type ``kind``."""
    value: Any = arguments
    for part in key.split("."):
        if not isinstance(value, Mapping) or part not in value:
            raise CheckpointError(f"{where}: key {key} is missing")
        value = value[part]
    if not isinstance(value, kind):
        names = " or ".join(k.__name__ for k in (kind if isinstance(kind, tuple) else (kind,)))
        raise CheckpointError(f"{where}: {key} is {shown(value)}, expected {names}")
    return value


def _existing_file(path: str | Path, what: str) -> Path:
    path = Path(path)
    if not path.is_file():
        raise CheckpointError(f"no such {what}: {path}")
    return path


# -- the yaml ---------------------------------------------------------------------------------------------------------
def _search_config(folder: Path) -> Path:
    places = list(_upwards(folder))
    for place in places:
        found = {path: _family_of(path) for path in sorted([*place.glob("*.yaml"), *place.glob("*.yml")])}
        found = {path: family for path, family in found.items() if family}
        canonical = [path for path, family in found.items() if path.name == _CONFIG_NAMES[family]]
        candidates = canonical if len(canonical) == 1 and len(set(found.values())) == 1 else list(found)
        if len(candidates) == 1:
            return candidates[0]
        if candidates:
            listed = ", ".join(f"{path.name} ({found[path]})" for path in candidates)
            raise CheckpointError(f"{place} holds several training yamls: {listed}; say which with --train-config")
    listed = " and ".join(str(place) for place in places)
    raise CheckpointError(
        f"no SpeechLM checkpoint in {listed}: looked for a training yaml with the top-level key multimodal_io "
        f"(Bagpiper, usually train.yaml) or token_bias (OpusLM, usually config.yaml); {_contents(folder)}. "
        "Name it with --train-config if it lies elsewhere"
    )


def _upwards(folder: Path) -> Iterator[Path]:
    """The folder, and from inside ``checkpoints/step_N/global_stepN`` the experiment above it."""
    yield folder
    here = folder.absolute()
    while _STEP_FOLDER.fullmatch(here.name) or here.name == "checkpoints":
        here = here.parent
        yield here


def _family_of(path: Path) -> str | None:
    """By top-level keys, read as text: parsing every yaml of a folder in full would take seconds."""
    try:
        with open(path, encoding="utf-8") as stream:
            for line in stream:
                key = line.split(":", 1)[0].strip("'\"")
                if ":" in line and key in _MARKER_KEYS:
                    return _MARKER_KEYS[key]
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"cannot read {path}: {error}") from error
    return None


# -- the tensors ------------------------------------------------------------------------------------------------------
def _given_model(path: Path, base_dir: Path) -> tuple[Path, tuple[str, ...]]:
    places = list(dict.fromkeys([path, base_dir / path]))
    for place in places:
        if place.is_file() or (place / DCP_METADATA).is_file() or pipeline_stages(place):
            return place, ()
        if place.is_dir():
            found = _in_step_folder(place) or _sole_file(place)
            if found is None:
                raise CheckpointError(f"{place} holds no model: looked for {_LOOKED_FOR_STEP}; {_contents(place)}")
            return found, ()
    raise CheckpointError(f"no such model file: looked at {' and '.join(str(place) for place in places)}")


def _search_model(folder: Path, family: str) -> tuple[Path, tuple[str, ...]]:
    named = [folder / name for name in _MODEL_NAMES[family] if (folder / name).is_file()]
    if family == "bagpiper" and len(named) > 1:
        raise CheckpointError(f"{folder} holds several models: {_names(named)}; say which with --model-file")
    if named:
        return named[0], ()
    if family == "bagpiper":
        found = _in_step_folder(folder)
        if found is not None:
            return found, ()
        steps = _steps(folder / "checkpoints") or _steps(folder)
        if steps:
            step, path = steps[-1]
            chosen = f"step {step} is the last complete one of {len(steps)} under {path.parent}"
            return _in_step_folder(path), (chosen,) if len(steps) > 1 else ()
    found = _sole_file(folder)
    if found is not None:
        return found, ()
    looked_for = ", ".join(_MODEL_NAMES[family]) + (f", {_LOOKED_FOR_STEP}" if family == "bagpiper" else "")
    raise CheckpointError(
        f"no model in {folder}: looked for {looked_for}, or a single *.pt or *.pth; {_contents(folder)}. "
        "Name it with --model-file if it lies elsewhere"
    )


_LOOKED_FOR_STEP = (
    f"{_DEEPSPEED_FILE}, [checkpoints/]step_N/{{global_step,universal_step}}N/{_DEEPSPEED_FILE}, "
    f"[checkpoints/]step_N/{DCP_METADATA}, [checkpoints/]step_N/pp_*_*/{DCP_METADATA} of every stage"
)


def _steps(folder: Path) -> list[tuple[int, Path]]:
    """Complete saves below ``folder``, in the order of their steps."""
    found = []
    for path in folder.iterdir() if folder.is_dir() else ():
        match = _STEP_FOLDER.fullmatch(path.name)
        if match and path.is_dir() and _in_step_folder(path) is not None:
            found.append((int(match.group(1)), path))
    return sorted(found)


def _in_step_folder(folder: Path) -> Path | None:
    """The model of one saved step: DeepSpeed's file, directly or one folder down, or torch.distributed folders."""
    if (folder / DCP_METADATA).is_file() or pipeline_stages(folder):
        return folder
    places = [folder]
    if folder.name != "checkpoints":
        places += [path for kind in ("global", "universal") for path in sorted(folder.glob(f"{kind}_step*"))]
    for place in places:
        if (place / _DEEPSPEED_FILE).is_file():
            return place / _DEEPSPEED_FILE
    return None


def pipeline_stages(folder: Path) -> list[Path]:
    """The torch.distributed folders of a pipeline-parallel step (``pp_<stage>_<stages>``), if all of them are complete."""
    stages = {match.groups(): path for path in folder.glob("pp_*_*") if (match := _PP_FOLDER.fullmatch(path.name))}
    counts = {int(of) for _, of in stages}
    complete = sorted(int(stage) for (stage, _), path in stages.items() if (path / DCP_METADATA).is_file())
    if len(counts) != 1 or complete != list(range(*counts)):
        return []
    return [path for _, path in sorted(stages.items(), key=lambda item: int(item[0][0]))]


def _refuse_split(path: Path) -> None:
    parts = sorted(part.name for part in path.parent.glob("mp_rank_*_model_states.pt"))
    if path.name == _DEEPSPEED_FILE and len(parts) > 1:
        raise CheckpointError(
            f"{path.parent} holds a model split over {len(parts)} tensor-parallel ranks ({', '.join(parts)}), which is not "
            "supported; merge it with DeepSpeed's own tools first"
        )


def _sole_file(folder: Path) -> Path | None:
    files = sorted(path for path in folder.iterdir() if path.suffix in _MODEL_SUFFIXES and path.is_file())
    models = [path for path in files if path.name != _TRAINER_STATE] or files
    if len(models) > 1:
        raise CheckpointError(f"{folder} holds several models: {_names(models)}; say which with --model-file")
    return models[0] if models else None


def _names(paths: Sequence[Path], most: int = 12) -> str:
    names = [path.name for path in paths]
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def _contents(folder: Path) -> str:
    entries = sorted(folder.iterdir())
    return f"it holds {_names(entries)}" if entries else "it is empty"
