"""``espnet2-vllm describe`` and ``render``: what ``espnet describe`` and ``espnet render`` print, write and return."""

import io
import os
import signal
import subprocess
import sys
import time

import pytest
import soundfile
from commands import environment
from conftest import REPO
from recorder import SPOKEN, WAV, WRITTEN, Recorder

from espnet2_vllm.bin import main as command

DIGITS = REPO / "egs/digits/speechlm1"
FAULT = (500, b"out of memory")


@pytest.fixture
def server():
    made = Recorder()
    yield made
    made.close()


@pytest.fixture
def sound(tmp_path):
    (tmp_path / "in.wav").write_bytes(WAV)
    return str(tmp_path / "in.wav")


@pytest.fixture
def here(tmp_path, monkeypatch):
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    return tmp_path / "work"


def exit_code(main, argv):
    try:
        return main(argv)
    except SystemExit as ended:  # argparse
        return ended.code


# (arguments, standard input, answer of the server)
CASES = {
    "describe": (["describe", "{sound}"], "", (200, {"content": "<think>hm</think> Rain.\n"})),
    "brief": (["describe", "{sound}", "--brief"], "", (200, {"content": "<think>hm</think> Rain.\n"})),
    "brief without a thought": (["describe", "{sound}", "--brief"], "", (200, {"content": " Rain. "})),
    "prompt": (["describe", "{sound}", "--prompt", "Who?", "--device", "cpu"], "", (200, WRITTEN)),
    "no recording": (["describe", "none.wav"], "", (200, WRITTEN)),
    "no argument": (["describe"], "", (200, WRITTEN)),
    "no such option": (["describe", "{sound}", "--breif"], "", (200, WRITTEN)),
    "a fault of the server": (["describe", "{sound}"], "", FAULT),
    "render": (["render", "A bell."], "", (200, SPOKEN)),
    "output and cfg": (["render", "A bell.", "-o", "b.wav", "--cfg", "1.5"], "", (200, SPOKEN)),
    "standard input": (["render", "-", "--output", "b.wav"], " Two bells.\nOne dog. \n", (200, SPOKEN)),
    "nothing on standard input": (["render", "-"], " \n", (200, SPOKEN)),
    "no sound": (["render", "A bell."], "", (200, WRITTEN)),
    "cfg is no number": (["render", "A bell.", "--cfg", "much"], "", (200, SPOKEN)),
    "no such device": (["render", "A bell.", "--device", "tpu"], "", (200, SPOKEN)),
    "output is a folder": (["render", "A bell.", "-o", "."], "", (200, SPOKEN)),
}


@pytest.mark.parametrize("case", CASES)
def test_they_print_write_and_return_what_espnets_do(case, server, sound, here, monkeypatch, capsys):
    cli = pytest.importorskip("espnet2.bin.cli")
    arguments, standard_input, server.answer = CASES[case]
    arguments = [argument.format(sound=sound) for argument in arguments] + ["--server", server.url]
    found = []
    for main in (cli.main, command.main):
        monkeypatch.setattr(sys, "stdin", io.StringIO(standard_input))
        try:
            code = exit_code(main, arguments)
        except RuntimeError:  # ESPnet's command line does not catch what its client raises: a traceback, exit code 1
            code = 1
        files = {path.name: path.read_bytes() for path in here.iterdir()}
        asked = [body for _, _, body in server.requests]
        found.append((code, capsys.readouterr().out, files, asked))
        for path in here.iterdir():
            path.unlink()
        server.requests.clear()
    theirs, ours = found
    assert ours == theirs
    assert ours[0] in (0, 1, 2)


def test_a_hint_where_no_sound_came_and_the_reason_where_nothing_did(server, sound, here, capsys):
    assert command.main(["render", "Read this aloud: x", "--server", server.url]) == 1
    shown = capsys.readouterr()
    assert shown.out == "Two bells.\n" and "describe what is to be heard, with spoken words in quotes" in shown.err
    server.answer = FAULT
    assert command.main(["describe", sound, "--server", server.url]) == 1
    assert f"espnet2-vllm describe: {server.url}: HTTP 500: out of memory" in capsys.readouterr().err
    server.requests.clear()
    assert command.main(["render", "A bell.", "-o", "/no/such/b.wav", "--server", server.url]) == 1
    assert "there is no folder /no/such" in capsys.readouterr().err and not server.requests  # before the model is asked
    assert command.main(["describe", sound, "--model", "/no/such/dir"]) == 1
    assert "/no/such/dir: there is no such folder" in capsys.readouterr().err
    assert command.main(["describe", sound, "--model", "espnet/bagpiper"]) == 1
    assert "never tuned to answer" in capsys.readouterr().err


def test_an_interrupt_is_130(server, sound):
    server.delay = 60
    program = [sys.executable, "-m", "espnet2_vllm.bin.main", "describe", sound, "--server", server.url]
    # Tests that a shell put into the background do not hear SIGINT, and neither would this.
    heard = {"preexec_fn": lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    running = subprocess.Popen(program, env=environment(), text=True, **pipes, **heard)
    while not server.requests and running.poll() is None:
        time.sleep(0.02)
    running.send_signal(signal.SIGINT)
    out, err = running.communicate(timeout=30)
    assert (running.returncode, out) == (130, "") and "Traceback" not in err


def test_what_was_heard_is_rendered_again_through_a_pipe(tmp_path):
    """Standard output holds the answer alone, whatever libraries print."""
    environment_ = environment() | {"ESPNET2_VLLM_CACHE": os.environ["ESPNET2_VLLM_CACHE"]}
    options = f"--model {DIGITS / 'models/bagpiper'} --backend pytorch --device cpu --seed 1"
    program = f"{sys.executable} -m espnet2_vllm.bin.main"
    shell = (
        f"{program} describe {DIGITS / 'recordings/digits4.flac'} --brief {options} | tee heard | "
        f"{program} render - -o again.wav {options} > said"
    )
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", shell], cwd=tmp_path, env=environment_, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "heard").read_text() == "eight eight nine three\n" and done.stdout == ""
    assert (tmp_path / "said").read_text() == "\n" and "wrote again.wav" in done.stderr
    assert 1 < soundfile.info(tmp_path / "again.wav").duration < 4
