"""How a command line names data sets: ``task:name:path[:factor]``, or ``task:name[:factor]`` of a registry."""

from __future__ import annotations

import difflib
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..errors import ConfigError, shown
from ..safe_yaml import read_yaml

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


def parse_specifiers(
    texts: str | Sequence[str], *, registered: bool, registry: Mapping[str, Path] | None = None
) -> list[Specifier]:
    """Data sets of ``--test-registered-specifier`` or ``--test-unregistered-specifier``.

    The text of an option is one specifier, taken as it stands: blanks, quotes and backslashes belong to its path (ESPnet
    ``_parse_data_specifier``). Only where the whole is none are several looked for in it, with blanks between them, as older ESPnet
    reads it. A factor (how often a set is trained on) is read and means nothing.

    Args:
        texts: of one option, or of each time that it is given.
        registry: paths by name; None reads the files that ``ESPNET_DATASET_REGISTRY`` names.

    Raises:
        ConfigError: for a specifier that is malformed, an unknown task or name, and a name that comes twice.
    """
    option = f"--test-{'' if registered else 'un'}registered-specifier"
    texts = [texts] if isinstance(texts, str) else texts
    if not any(text.strip() for text in texts):
        raise ConfigError(f"{option} is empty; expected {_form(registered)}")
    if registered and registry is None:
        registry = read_registry(os.environ.get(REGISTRY, ""))
    found: dict[str, Specifier] = {}
    for text in texts:
        for item in _items(text, option, registered):
            specifier = _specifier(item, option, registry if registered else None)
            if specifier.name in found:
                first = found[specifier.name].text
                raise ConfigError(f"{option}: data set {specifier.name} is named twice: {first} and {item}")
            found[specifier.name] = specifier
    return list(found.values())


def _form(registered: bool) -> str:
    return "task:name[:factor]" if registered else "task:name:path/dataset.json[:factor]"


def _items(text: str, option: str, registered: bool) -> list[str]:
    """``text`` as one specifier if it is one, or those in it, with blanks between them, if each of them is one."""
    fault = _fault(text, registered)
    if fault is None:
        return [text]
    items = text.split()
    if items and all(_fault(item, registered) is None for item in items):
        return items
    raise ConfigError(f"{option}: {text!r} is no {_form(registered)}: {fault}")


def _fault(item: str, registered: bool) -> str | None:
    """What keeps ``item`` from being a specifier, whatever its task and name are; None if nothing does."""
    parts = item.split(":")
    expected = 2 if registered else 3
    if len(parts) not in (expected, expected + 1):
        colon = "" if registered else "; a path cannot hold one, as in ESPnet"
        return f"it has {len(parts)} parts with ':' between them, expected {expected} or {expected + 1}{colon}"
    if not all(part.strip() for part in parts):
        return "a part is empty"
    if len(parts) > expected:
        try:
            float(parts[-1])
        except ValueError:
            return f"the factor {parts[-1]!r} is no number"
    return None


def _specifier(item: str, option: str, registry: Mapping[str, Path] | None) -> Specifier:
    task, name, *rest = item.split(":")
    if task not in PROMPTS:
        near = difflib.get_close_matches(task, PROMPTS, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ConfigError(f"{option}: unknown task {task!r} in {item!r}{hint}; known are {', '.join(PROMPTS)}")
    if registry is None:
        return Specifier(task, name, Path(rest[0]), item)
    if name not in registry:
        known = ", ".join(sorted(registry)) or f"none ({REGISTRY} is {os.environ.get(REGISTRY, '')!r})"
        raise ConfigError(f"{option}: data set {name!r} is not registered; registered are {known}")
    return Specifier(task, name, registry[name], item)


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
        content = read_yaml(path, ConfigError)
        if not isinstance(content, dict):
            raise ConfigError(
                f"{path}: expected a mapping of names to {{path: dataset.json}}, got {type(content).__name__}"
            )
        for dataset, entry in content.items():
            if not (isinstance(entry, dict) and isinstance(entry.get("path"), str)):
                raise ConfigError(f"{path}: data set {dataset} is {shown(entry)}, expected {{path: dataset.json}}")
            if dataset in found:
                log.warning("data set %s: %s wins over an earlier registry", dataset, path)
            here = Path(entry["path"])
            found[str(dataset)] = here if here.exists() else path.parent / here
    return found
