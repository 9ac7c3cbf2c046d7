"""Python processes in which packages are missing that are installed."""

import os
import pathlib
import subprocess
import sys

from conftest import REPO

# Read by Python as it starts, before anything of the process's own.
_SITE = """
import importlib.machinery, os

found = importlib.machinery.PathFinder.find_spec
missing = os.environ["MISSING_PACKAGES"].split()
importlib.machinery.PathFinder.find_spec = staticmethod(
    lambda name, *rest: None if name.split(".")[0] in missing else found(name, *rest)
)
"""


def run_without(folder: pathlib.Path, missing: str, *words: str, before=(), timeout=240) -> subprocess.CompletedProcess:
    """``python words``, without the packages ``missing``, and with the folders ``before`` first in PYTHONPATH."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "sitecustomize.py").write_text(_SITE, encoding="utf-8")
    path = os.pathsep.join(map(str, [*before, folder, REPO]))
    environment = {**os.environ, "PYTHONPATH": path, "MISSING_PACKAGES": missing}
    return subprocess.run(
        [sys.executable, *words], env=environment, cwd=folder, capture_output=True, text=True, timeout=timeout
    )
