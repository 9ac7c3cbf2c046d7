"""How a command line names data sets: ``task:name:path[:factor]``, or ``task:name[:factor]`` of a registry."""

from __future__ import annotations

import difflib
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import yaml

from ..errors import ConfigError

log = logging.getLogger(__name__)

REGISTRY = "ESPNET_DATASET_REGISTRY"
DIALOGUE_TASK = "dialogue"
# Messages that make the prompt, as (role, modality, entry). The answer, which ESPnet also asks for, is never read.
PROMPTS: Mapping[str, tuple[tuple[str, str, str], ...]] = {
    "text_to_audio": (("user", "text", "text1"),),
    "audio_to_text": (("user", "audio", "audio1"),),
    "text_only": (),
    DIALOGUE_TASK: (),
}


@dataclass(frozen=True)
class Specifier:
    """One data set of a command line. ``text``: as it stands there."""

    task: str
    name: str
    path: Path
    text: str


def parse_specifiers(text: str, *, registered: bool, registry: Mapping[str, Path] | None = None) -> list[Specifier]:
    """Data sets of ``--test-registered-specifier`` or ``--test-unregistered-specifier``, separated by blanks.

    A factor (how often a set is trained on) is read and means nothing.

    Args:
        registry: paths by name; None reads the files that ``ESPNET_DATASET_REGISTRY`` names.

    Raises:
        ConfigError: for a specifier that is malformed, an unknown task or name, and a name that comes twice.
    """
    option = f"--test-{'' if registered else 'un'}registered-specifier"
    if not text.split():
        raise ConfigError(f"{option} is empty; expected {_form(registered)}")
    if registered and registry is None:
        registry = read_registry(os.environ.get(REGISTRY, ""))
    found: dict[str, Specifier] = {}
    for item in text.split():
        specifier = _specifier(item, option, registry if registered else None)
        if specifier.name in found:
            raise ConfigError(
                f"{option}: data set {specifier.name} is named twice: {found[specifier.name].text} and {item}"
            )
        found[specifier.name] = specifier
    return list(found.values())


def _form(registered: bool) -> str:
    return "task:name[:factor]" if registered else "task:name:path/dataset.json[:factor]"


def _specifier(item: str, option: str, registry: Mapping[str, Path] | None) -> Specifier:
    parts = item.split(":", 1 if registry is not None else 2)
    expected = 2 if registry is not None else 3
    if len(parts) != expected or not all(parts):
        raise ConfigError(f"{option}: {item!r} is no {_form(registry is not None)}")
    task, *rest = parts
    rest[-1] = _without_factor(rest[-1])
    if task not in PROMPTS:
        near = difflib.get_close_matches(task, PROMPTS, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ConfigError(f"{option}: unknown task {task!r} in {item!r}{hint}; known are {', '.join(PROMPTS)}")
    if registry is None:
        return Specifier(task, rest[0], Path(rest[1]), item)
    if rest[0] not in registry:
        known = ", ".join(sorted(registry)) or f"none ({REGISTRY} is {os.environ.get(REGISTRY, '')!r})"
        raise ConfigError(f"{option}: data set {rest[0]!r} is not registered; registered are {known}")
    return Specifier(task, rest[0], registry[rest[0]], item)


def _without_factor(value: str) -> str:
    head, colon, tail = value.rpartition(":")
    if not colon:
        return value
    try:
        float(tail)
    except ValueError:
        return value
    return head


def read_registry(value: str) -> dict[str, Path]:
    """Paths of ``dataset.json`` by name, from colon-separated yaml files of ``name: {path: ...}``.

    A relative path is looked up from the working directory, then from the folder of its yaml. A later file wins over an
    earlier one, which is logged, as is a file that is missing (ESPnet ``CombinedDataset``).

    Raises:
        ConfigError: for a file that is no such yaml.
    """
    found: dict[str, Path] = {}
    for name in filter(None, (part.strip() for part in value.split(":"))):
        path = Path(name)
        if not path.is_file():
            log.warning("%s: no such file, named by %s", path, REGISTRY)
            continue
        try:
            content = yaml.safe_load(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
            raise ConfigError(f"{path}: no yaml that can be read: {error}") from error
        if not isinstance(content, dict):
            raise ConfigError(
                f"{path}: expected a mapping of names to {{path: dataset.json}}, got {type(content).__name__}"
            )
        for dataset, entry in content.items():
            if not (isinstance(entry, dict) and isinstance(entry.get("path"), str)):
                raise ConfigError(f"{path}: data set {dataset} is {entry!r}, expected {{path: dataset.json}}")
            if dataset in found:
                log.warning("data set %s: %s wins over an earlier registry", dataset, path)
            here = Path(entry["path"])
            found[str(dataset)] = here if here.exists() else path.parent / here
    return found
