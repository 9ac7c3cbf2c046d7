"""One process at a time writes to a directory, and who it is can be said, also where the file system has no locks."""

import errno
import json
import os
import socket
import subprocess
import sys

import pytest

from espnet2_vllm.errors import ConfigError
from espnet2_vllm.io import locks
from espnet2_vllm.io.journal import FOLDER, Journal, in_use

HOLD = """
import sys
from pathlib import Path
from espnet2_vllm.io.journal import Journal
journal = Journal(Path(sys.argv[1]), {})
print("held", flush=True)
sys.stdin.read()
"""
WITHOUT = "import fcntl\ndef flock(*_): raise OSError({}, 'Function not implemented')\nfcntl.flock = flock\n"


@pytest.fixture(params=[None, errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK], ids=["locks", "ENOSYS", "ENOTSUP", "ENOLCK"])
def missing(request, monkeypatch):
    """The error by which the file system refuses locks; None where it has them."""
    if request.param is not None:

        def flock(*_):
            raise OSError(request.param, "Function not implemented")

        monkeypatch.setattr(locks.fcntl, "flock", flock)
    return request.param


@pytest.fixture
def holder(missing, tmp_path):
    """Another process that writes there."""
    before = "" if missing is None else WITHOUT.format(missing)
    program = before + HOLD
    process = subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.wait()


def test_who_writes_there_is_said(holder, tmp_path):
    """Such as the jobs of a recipe whose script was killed: the next start finds them."""
    assert in_use(tmp_path)
    with pytest.raises(ConfigError) as error:
        Journal(tmp_path, {})
    said = f"{tmp_path}: another process is writing results there (process {holder.pid} on {socket.gethostname()}, since 20"
    assert str(error.value).startswith(said) and "whose script was killed; wait for it, end it" in str(error.value)


def test_who_was_killed_is_no_obstacle(holder, tmp_path):
    holder.kill()
    holder.wait()
    assert (tmp_path / FOLDER / locks.HOLDER).is_file() and not in_use(tmp_path)
    journal = Journal(tmp_path, {})
    assert json.loads((tmp_path / FOLDER / locks.HOLDER).read_text())["pid"] == os.getpid()
    journal.close()
    assert not (tmp_path / FOLDER / locks.HOLDER).exists()


def test_a_directory_that_nobody_writes_to_is_not_in_use(missing, tmp_path):
    Journal(tmp_path, {}).close()
    assert not in_use(tmp_path)
    assert not in_use(tmp_path / "nowhere")


@pytest.mark.parametrize("missing", [errno.ENOSYS], indirect=True)
def test_of_another_machine_nothing_is_known_without_locks(missing, tmp_path, caplog):
    Journal(tmp_path, {}).close()
    holder = {"pid": 1, "host": "another.machine", "since": "2026-12-01 10:00:00", "begun": "1"}
    (tmp_path / FOLDER / locks.HOLDER).write_text(json.dumps(holder))
    assert in_use(tmp_path)
    Journal(tmp_path, {}).close()
    assert (
        "has no locks" in caplog.text
        and "process 1 on another.machine, since 2026-12-01 10:00:00 may do so" in caplog.text
    )


@pytest.mark.parametrize("missing", [errno.ENOSYS], indirect=True)
@pytest.mark.parametrize("content", ["", "[]", '{"pid": "x"}', "\xff", '{"pid": 1, "host": 3, "since": ""}'])
def test_a_damaged_note_of_the_holder_is_none(missing, tmp_path, content):
    Journal(tmp_path, {}).close()
    (tmp_path / FOLDER / locks.HOLDER).write_text(content, encoding="latin-1")
    assert not in_use(tmp_path)
