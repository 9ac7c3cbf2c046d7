"""The recipes of the ESPnet that is installed: its wheel has none, so they come out of its source distribution.

``ESPNET_TREE`` may name an unpacked one; otherwise pip fetches it, once an environment.
"""

import fcntl
import importlib.metadata
import os
import pathlib
import shutil
import subprocess
import sys
import tarfile

import pytest

# What is wanted of some 100 MB.
PARTS = (
    "espnet/",
    "espnet2/",
    "test_utils/speechlm/",
    "egs2/TEMPLATE/",
    "egs2/bagpiper/",
    "egs2/bagpiper_tts/",
    "tools/extra_path.sh",
)


def espnet_tree(version: str | None = None) -> pathlib.Path:
    """Root of the source tree of the installed ESPnet, or of ``version`` (in ``ESPNET_TREE_VERSION``, if it is there).

    The test is skipped if there is neither such a tree nor a registry to ask for it.
    """
    variable = f"ESPNET_TREE_{version}" if version else "ESPNET_TREE"
    if named := os.environ.get(variable):
        assert (pathlib.Path(named) / "espnet2").is_dir(), f"{variable}={named} holds no espnet2"
        return pathlib.Path(named)
    asked = version is not None
    version = version or importlib.metadata.version("espnet")
    if not asked and int(version[:6]) < 202609:
        pytest.skip(f"ESPnet {version} has no Bagpiper recipes")
    root = pathlib.Path(sys.prefix) / "share" / f"espnet-{version}"
    root.parent.mkdir(exist_ok=True)
    with open(f"{root}.lock", "w", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not root.is_dir():
            _fetch(version, root)
    return root


def _fetch(version: str, root: pathlib.Path) -> None:
    new = root.with_name(f"{root.name}.new")
    shutil.rmtree(new, ignore_errors=True)
    words = ["download", "--quiet", "--no-deps", "--no-binary", ":all:", "--no-build-isolation", "--dest", str(new)]
    command = [sys.executable, "-m", "pip", *words, f"espnet=={version}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    if done.returncode:
        pytest.skip(f"the source distribution of ESPnet {version} cannot be had: {done.stderr.strip()[-300:]}")
    (archive,) = new.glob("*.tar.gz")
    with tarfile.open(archive) as tar:
        top = f"espnet-{version}/"
        wanted = [member for member in tar if member.name.removeprefix(top).startswith(PARTS)]
        tar.extractall(new, wanted, filter="data")
    (new / top.rstrip("/")).rename(root)
    shutil.rmtree(new)


def changed(root: pathlib.Path, place: pathlib.Path, script: str, old: str, new: str) -> pathlib.Path:
    """Path of ``script`` in a tree at ``place`` where it says ``new`` for ``old``; everything else is that of ``root``."""
    for name in ("espnet", "espnet2", "test_utils", "tools"):
        (place / name).symlink_to(root / name)
    shutil.copytree(root / "egs2", place / "egs2", symlinks=True)
    text = (place / script).read_text(encoding="utf-8")
    assert text.count(old) == 1, f"{script} says {old} {text.count(old)} times"
    (place / script).write_text(text.replace(old, new), encoding="utf-8")
    return place / script
