"""The console script espnet2-vllm."""

import json
import pathlib
import subprocess
import sys
import time
import types

import pytest
from commands import environment

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


def test_every_program_sees_to_its_encoding_first():
    """In its own ``main``, ``espnet2-vllm`` does."""
    folder = pathlib.Path(command.__file__).parent
    programs = [path for path in folder.glob("*.py") if "__name__ == " in path.read_text(encoding="utf-8")]
    assert len(programs) > 15
    for path in programs:
        last = path.read_text(encoding="utf-8").split('if __name__ == "__main__":\n')[-1]
        assert path.name == "main.py" or last.startswith("    insist_on_utf8()\n"), path.name


@pytest.mark.parametrize(
    "words", [["-m", "espnet2_vllm.bin.split_data"], ["-m", "espnet2_vllm.bin.main", "split-data"]]
)
def test_programs_name_files_in_utf8_where_python_would_not(tmp_path, words):
    """``PYTHONUTF8=0`` in the locale C, where Python's file names are ASCII: as in a locale of Latin-1, which few machines have."""
    folder = tmp_path / "sét 漢字"
    folder.mkdir()
    path = folder / "data.json"
    (folder / "text").write_text("é one\n", encoding="utf-8")
    data = {"task": "codec_ssl_plain_tts", "data_files": [f"{folder}/text,text_bpe,text"], "examples": ["é"]}
    path.write_text(json.dumps(data), encoding="utf-8")
    variables = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    command = [sys.executable, *words, "--data-json", str(path), "--output-dir", str(folder)]
    done = subprocess.run(command, env=environment() | variables, capture_output=True)
    assert (done.returncode, done.stdout) == (0, b"1\n"), done.stderr
    assert (folder / "split1" / "1" / "text").read_bytes() == "é one\n".encode()
    path.write_text('{"task": "x", "data_files": ["text 漢字"], "examples": ["é"]}', encoding="utf-8")
    done = subprocess.run(command, env=environment() | variables, capture_output=True)
    assert (
        done.returncode == 1
        and "sét 漢字/data.json: data_files: " in done.stderr.decode()
        and b"text \xe6" in done.stderr
    )


@pytest.mark.parametrize("buffered", [True, False])
@pytest.mark.parametrize(
    "words", ["main --help", "inference --help", "speechlm_inference_chat --help", "main doctor --help"]
)
def test_help_whose_reader_has_enough_ends_quietly(words, buffered):
    """As in ``--help | head``, but nobody reads even the first line."""
    script = f'{sys.executable} -m espnet2_vllm.bin.{words} | true; echo "${{PIPESTATUS[0]}}"'
    surroundings = {**environment(), "PYTHONUNBUFFERED": "" if buffered else "1"}
    done = subprocess.run(["bash", "-c", script], env=surroundings, capture_output=True, encoding="utf-8")
    assert done.stderr == ""
    assert done.stdout == "0\n" or not buffered


def test_output_longer_than_a_pipe_ends_quietly_too():
    code = "from espnet2_vllm.bin.utf8 import insist_on_utf8; insist_on_utf8(); print('x' * 10**6)"
    done = subprocess.run(
        ["bash", "-c", f'{sys.executable} -c "{code}" | true'], env=environment(), capture_output=True, encoding="utf-8"
    )
    assert (done.stdout, done.stderr) == ("", "")


def test_another_broken_pipe_is_still_a_traceback():
    code = "from espnet2_vllm.bin.utf8 import insist_on_utf8; insist_on_utf8(); raise BrokenPipeError('of an engine')"
    done = subprocess.run([sys.executable, "-c", code], env=environment(), capture_output=True, encoding="utf-8")
    assert done.returncode == 1 and "BrokenPipeError: of an engine" in done.stderr
