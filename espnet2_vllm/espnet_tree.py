"""Which ESPnet is imported: the installed one, or a tree that ``PYTHONPATH`` puts before it, as ESPnet's recipes do."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import sys
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType

from .errors import ConfigError
from .unfetched import nothing_fetched

# What pip is asked for, where that is not the module's own name.
_PACKAGES = {
    "duckdb": "'duckdb<2'",
    "hydra": "hydra-core",
    "liger_kernel": "--no-deps liger-kernel",
    "sklearn": "scikit-learn",
    "tacotron_cleaner": "espnet_tts_frontend",
    "yaml": "PyYAML",
}


@dataclass(frozen=True)
class EspnetTree:
    """A folder that holds ``espnet2``, and the version that it says it is."""

    folder: Path
    version: str

    def __str__(self) -> str:
        return f"ESPnet {self.version} of {self.folder}"


def espnet_trees() -> list[EspnetTree]:
    """Every ESPnet that Python sees, the one that is imported first; those behind it are shadowed."""
    found: dict[Path, EspnetTree] = {}
    specs = [importlib.util.find_spec("espnet2") if "espnet2" not in sys.modules else sys.modules["espnet2"].__spec__]
    specs += [PathFinder.find_spec("espnet2", [entry]) for entry in sys.path]
    for spec in specs:
        if spec is not None and spec.origin is not None:  # a folder without code has none
            folder = Path(spec.origin).resolve().parent.parent
            found.setdefault(folder, EspnetTree(folder, _version(folder)))
    return list(found.values())


def _version(folder: Path) -> str:
    for distribution in importlib.metadata.distributions(name="espnet", path=[str(folder)]):
        return distribution.version
    for name in ("espnet/version.txt", "version.txt", "espnet2/version.txt"):
        if (folder / name).is_file():
            return (folder / name).read_text(encoding="utf-8").strip()
    return "of unknown version"


def import_espnet(name: str, needed_by: str) -> ModuleType:
    """Module ``name`` of whichever ESPnet is imported.

    Raises:
        ConfigError: naming that ESPnet's folder and version, what it lacks, and what to do.
    """
    try:
        with nothing_fetched():
            return importlib.import_module(name)
    # OSError: torchaudio's library, beside a torch that it was not built for. The others: a package of another time.
    except (ImportError, OSError, AttributeError, TypeError, RuntimeError) as error:
        raise ConfigError(f"{needed_by} {name}, {_reason(error)}") from error


def _reason(error: Exception) -> str:
    trees = espnet_trees()
    if not trees:
        return f"and ESPnet is not installed in {sys.prefix}; run tools/setup.sh"
    first, *shadowed = trees
    others = f" (it shadows {' and '.join(map(str, shadowed))})" if shadowed else ""
    without = f", or take {first.folder} out of PYTHONPATH" if shadowed else ""
    missing = (error.name or "") if isinstance(error, ModuleNotFoundError) else ""
    if missing.split(".")[0] in ("espnet", "espnet2"):
        return f"which {first}{others} does not have; run tools/setup.sh for one that has{without}"
    if missing:
        return (
            f"and {first}{others} imports the Python package '{missing}', which is not installed in {sys.prefix}; "
            f"{install_command(missing)}{without}"
        )
    return f"and {first}{others} cannot be imported: {type(error).__name__}: {error}; run tools/setup.sh{without}"


def install_command(module: str) -> str:
    """How to add the package that has ``module`` to this Python."""
    top = module.split(".")[0]
    return f"{sys.executable} -m pip install {_PACKAGES.get(top, top.replace('_', '-'))}"
