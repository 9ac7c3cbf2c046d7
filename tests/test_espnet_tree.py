"""ESPnet's own parts are found in whichever ESPnet is first on the path; where that fails the message says what is missing."""

import json
import pathlib
import sys

import pytest
from blocked_packages import run_without
from recipe.espnet_tree import espnet_tree

pytest.importorskip("espnet2")

IMPORT = """
import json, sys
from espnet2_vllm.errors import SpeechLMError
from espnet2_vllm.espnet_tree import espnet_trees, import_espnet

try:
    print(import_espnet(sys.argv[1], "the test needs ESPnet's").__file__)
except SpeechLMError as error:
    print(f"{type(error).__name__}: {error}")
print(json.dumps([str(tree) for tree in espnet_trees()]))
"""
CODECS = """
import pathlib, sys
import espnet2
import numpy as np
sys.path[:0] = sys.argv[1:3]
from codec.tiny_codecs import tiny_codec

codec = tiny_codec("dac")
codes = codec.encode(np.linspace(-1, 1, 8000, dtype=np.float32))
print(codec.decode(codes).shape, espnet2.__file__)
"""


def imported(tmp_path, name, *, missing="", before=()):
    done = run_without(tmp_path / "site", missing, "-c", IMPORT, name, before=before)
    assert done.returncode == 0, done.stderr[-2000:]
    said, trees = done.stdout.strip().splitlines()[-2:]
    return said, json.loads(trees)


def tree(folder, source, version="202401"):
    """A tree of another time: its ``espnet2.bin.gan_codec_inference`` is ``source``."""
    for name in ("espnet", "espnet2", "espnet2/bin"):
        (folder / name).mkdir(parents=True)
        (folder / name / "__init__.py").touch()
    (folder / "espnet" / "version.txt").write_text(f"{version}\n", encoding="utf-8")
    (folder / "espnet2" / "bin" / "gan_codec_inference.py").write_text(source, encoding="utf-8")
    return folder


def test_the_first_on_the_path_is_imported_and_the_other_is_named(tmp_path):
    other = tree(tmp_path / "tree", "AudioCoding = 1\n")
    said, trees = imported(tmp_path, "espnet2.bin.gan_codec_inference", before=[other])
    assert said == str(other / "espnet2" / "bin" / "gan_codec_inference.py")
    assert trees[0] == f"ESPnet 202401 of {other}"
    assert len(trees) == 2 and "site-packages" in trees[1], "the installed one is shadowed"


@pytest.mark.parametrize(
    ("source", "name", "expected"),
    [
        (
            "import liger_kernel_of_old.loss\n",
            "espnet2.bin.gan_codec_inference",
            "imports the Python package 'liger_kernel_of_old', which is not installed in {prefix}; "
            "{python} -m pip install liger-kernel-of-old, or take {tree} out of PYTHONPATH",
        ),
        (
            "",
            "espnet2.speechlm.model",
            "needs ESPnet's espnet2.speechlm.model, which ESPnet 202401 of {tree} (it shadows ESPnet",
        ),
        (
            "raise OSError('libcudart.so.13: cannot open shared object file')\n",
            "espnet2.bin.gan_codec_inference",
            "cannot be imported: OSError: libcudart.so.13: cannot open shared object file; run tools/setup.sh, or take {tree} out",
        ),
    ],
)
def test_what_a_tree_lacks_is_said_with_the_remedy(tmp_path, source, name, expected):
    other = tree(tmp_path / "tree", source)
    said, _ = imported(tmp_path, name, before=[other])
    assert said.startswith(f"ConfigError: the test needs ESPnet's {name}, ")
    assert expected.format(prefix=sys.prefix, python=sys.executable, tree=other) in said


def test_without_any_espnet_that_is_what_is_said(tmp_path):
    said, trees = imported(tmp_path, "espnet2.bin.gan_codec_inference", missing="espnet2 espnet")
    assert trees == []
    assert said.endswith(f"and ESPnet is not installed in {sys.prefix}; run tools/setup.sh")


@pytest.mark.parametrize(("version", "package"), [(None, "omniio"), ("202511", "h5py")])
def test_a_real_tree_before_the_installed_one(tmp_path, version, package):
    """Recipes put their root first. What today's tree needs an environment of 202511 lacks, and the other way round."""
    real = espnet_tree(version)
    said, trees = imported(tmp_path, "espnet2.bin.gan_codec_inference", missing=package, before=[real])
    assert f"imports the Python package '{package}', which is not installed in {sys.prefix}" in said
    assert f"pip install {package}, or take {real.resolve()} out of PYTHONPATH" in said
    assert trees[0].endswith(f" of {real.resolve()}") and len(trees) == 2


def test_codecs_work_with_a_tree_before_the_installed_one(tmp_path):
    real = espnet_tree()
    tests = pathlib.Path(__file__).parent
    words = ("-c", CODECS, str(tests), str(tests / "codec"))
    done = run_without(tmp_path / "site", "", *words, before=[real])
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.splitlines()[-1] == f"(8000,) {real.resolve()}/espnet2/__init__.py"
