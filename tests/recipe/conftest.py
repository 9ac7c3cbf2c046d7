"""A recipe to run in."""

import pathlib
import shutil

import pytest
from recipe_shell import MINI_AN4, TEMPLATE


@pytest.fixture
def recipe(tmp_path) -> pathlib.Path:
    """A copy of the mini_an4 recipe without results, whose links lead into the template."""
    target = tmp_path / "egs" / "mini_an4" / "speechlm1"
    ignored = shutil.ignore_patterns("exp", "data", "dump", "downloads")
    shutil.copytree(MINI_AN4, target, symlinks=False, ignore=ignored)
    for name in ("cmd.sh", "path.sh", "utils", "speechlm_vllm.sh"):
        link = target / name
        shutil.rmtree(link) if link.is_dir() else link.unlink()
        link.symlink_to(TEMPLATE / name)
    return target
