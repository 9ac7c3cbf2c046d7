"""Scripts run as a user types them."""

import os
import pathlib
import subprocess
import sys

REPO = pathlib.Path(__file__).resolve().parents[2]
TEMPLATE = REPO / "egs" / "TEMPLATE" / "speechlm1"
MINI_AN4 = REPO / "egs" / "mini_an4" / "speechlm1"
FAKE_PYTHON = REPO / "tests" / "recipe" / "fake_python.py"


def environment(**variables: str) -> dict[str, str]:
    """The environment of a user who has this Python active."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("CUDA_", "FAKE_", "PYTHON"))}
    path = f"{pathlib.Path(sys.executable).parent}:{kept['PATH']}"
    return {**kept, "PATH": path, "VIRTUAL_ENV": sys.prefix, "PYTHONPATH": str(REPO), **variables}


def shell(*words: str | pathlib.Path, cwd: pathlib.Path, **variables: str) -> subprocess.CompletedProcess:
    """Run a command line; standard output and error are text."""
    return subprocess.run(
        [str(word) for word in words],
        cwd=cwd,
        env=environment(**variables),
        capture_output=True,
        encoding="utf-8",
        timeout=120,
    )
