"""The console script espnet2-vllm."""

import subprocess
import sys
import time
import types

import pytest

from espnet2_vllm import __version__
from espnet2_vllm.bin import main as command
from espnet2_vllm.errors import ConfigError, DataError


@pytest.fixture
def stand_in(monkeypatch):
    """Puts a function in the place of the command ``check``."""

    def put(function):
        module = types.ModuleType("espnet2_vllm.bin.check")
        module.main = function
        monkeypatch.setitem(sys.modules, "espnet2_vllm.bin.check", module)
        monkeypatch.setattr(sys, "argv", list(sys.argv))

    return put


def raising(error):
    def function(argv):
        raise error

    return function


def test_arguments_reach_the_command_and_its_exit_code_comes_back(stand_in):
    seen = []
    stand_in(lambda argv: seen.append((sys.argv[0], argv)) or 7)
    assert command.main(["check", "DIR", "--help"]) == 7
    assert seen == [("espnet2-vllm check", ["DIR", "--help"])]


@pytest.mark.parametrize("error, code", [(ConfigError("no such key"), 2), (DataError("no such key"), 1)])
def test_errors_are_one_message_and_an_exit_code(stand_in, capsys, error, code):
    stand_in(raising(error))
    assert command.main(["check"]) == code
    assert capsys.readouterr().err == "espnet2-vllm check: no such key\n"


def test_a_missing_package_is_named_with_its_remedy(stand_in, capsys):
    stand_in(raising(ModuleNotFoundError("No module named 'torch'", name="torch.nn")))
    assert command.main(["check"]) == 1
    assert "'torch.nn' is not installed" in capsys.readouterr().err
    stand_in(raising(ModuleNotFoundError("No module named 'espnet2_vllm.x'", name="espnet2_vllm.x")))
    with pytest.raises(ModuleNotFoundError):
        command.main(["check"])


@pytest.mark.parametrize(
    "name, hint", [("covert", "did you mean 'convert'?"), ("zzz", "known commands: convert, check")]
)
def test_an_unknown_command_gets_the_nearest_one(capsys, name, hint):
    assert command.main([name]) == 2
    assert hint in capsys.readouterr().err


def test_version_and_help(capsys):
    assert command.main(["--version"]) == 0
    assert capsys.readouterr().out == f"espnet2-vllm {__version__}\n"
    assert command.main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in command.COMMANDS)
    assert command.main([]) == 2


def test_help_loads_nothing_heavy_and_is_fast():
    code = (
        "import sys; from espnet2_vllm.bin.main import main; main(['--help']); "
        "print([name for name in ('torch', 'vllm', 'transformers', 'numpy') if name in sys.modules])"
    )
    began = time.monotonic()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, encoding="utf-8", check=True)
    assert done.stdout.splitlines()[-1] == "[]"
    assert time.monotonic() - began < 0.5


@pytest.mark.parametrize("name", sorted(command.COMMANDS))
def test_every_command_explains_itself_without_loading_an_engine(name):
    code = (
        "import sys; from espnet2_vllm.bin.main import main\n"
        f"try: main([{name!r}, '--help'])\n"
        "except SystemExit as exit: assert exit.code == 0\n"
        "print([name for name in ('torch', 'vllm', 'transformers') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, encoding="utf-8")
    assert done.returncode == 0, done.stderr
    assert f"usage: espnet2-vllm {name}" in done.stdout or "usage: " in done.stdout
    assert done.stdout.splitlines()[-1] == "[]"
