"""utils/run.py: arrays of jobs by the conventions of Kaldi's job scripts."""

import os
import pathlib
import re
import signal
import subprocess
import sys
import time

import pytest
from conftest import REPO
from recipe_shell import TEMPLATE, environment, shell

RUN = TEMPLATE / "utils" / "run.py"


def test_every_job_gets_its_number_and_its_log(tmp_path):
    done = shell(RUN, "JOB=1:3", "log/x.JOB.log", "echo", "job JOB of a b", cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    for job in (1, 2, 3):
        lines = (tmp_path / "log" / f"x.{job}.log").read_text(encoding="utf-8").splitlines()
        assert lines[0] == f"# echo 'job {job} of a b'"
        assert lines[1].startswith("# Started at ")
        assert lines[3] == f"job {job} of a b"
        assert re.fullmatch(r"# Accounting: time=\d+ threads=1", lines[4])
        assert re.fullmatch(r"# Ended \(code 0\) at .+, elapsed time \d+ seconds", lines[5])


def test_arguments_survive_as_they_stand(tmp_path):
    argument = """a 'b' "c" $HOME `d` * \\ (e)"""
    shell(RUN, "x.log", "printf", "%s\\n", argument, cwd=tmp_path)
    assert argument in (tmp_path / "x.log").read_text(encoding="utf-8").splitlines()


def test_lone_operators_belong_to_the_shell(tmp_path):
    done = shell(RUN, "x.log", "echo", "a b", "|", "tr", "a", "z", ">", "out.txt", cwd=tmp_path)
    assert done.returncode == 0
    assert (tmp_path / "out.txt").read_text(encoding="utf-8") == "z b\n"


def test_a_failing_pipe_fails_the_job(tmp_path):
    assert shell(RUN, "x.log", "false", "|", "cat", cwd=tmp_path).returncode == 1


def test_failed_jobs_are_counted_and_named(tmp_path):
    done = shell(RUN, "JOB=1:4", "x.JOB.log", "bash", "-c", "exit $((JOB % 2 * 3))", cwd=tmp_path)
    assert done.returncode == 1
    assert done.stderr == "run.py: 2 / 4 failed (jobs 1 3), log is in x.*.log\n"
    assert "# Ended (code 3)" in (tmp_path / "x.1.log").read_text(encoding="utf-8")
    assert "# Ended (code 0)" in (tmp_path / "x.2.log").read_text(encoding="utf-8")


def test_a_command_that_does_not_exist(tmp_path):
    done = shell(RUN, "x.log", "no-such-command", cwd=tmp_path)
    assert done.returncode == 1
    assert "job failed, log is in x.log" in done.stderr
    log = (tmp_path / "x.log").read_text(encoding="utf-8")
    assert "cannot start the command" in log and "# Ended (code 127)" in log


@pytest.mark.parametrize(
    "words, message",
    [
        (["JOB=3:1", "x.JOB.log", "true"], "expected 1 <= FIRST <= LAST"),
        (["JOB=0:1", "x.JOB.log", "true"], "expected 1 <= FIRST <= LAST"),
        (["JOB=1:2", "x.log", "true"], "must contain JOB"),
        (["x.log"], "expected a log file and a command"),
        (["--gpu", "x", "x.log", "true"], "--gpu takes a number"),
        (["--nope", "1", "x.log", "true"], "unknown option --nope"),
        (["--gpu", "2", "x.log", "true"], "--gpu 2: this machine shows 1 NVIDIA GPUs"),
    ],
)
def test_what_cannot_be_used_is_refused_with_exit_code_2(tmp_path, words, message):
    done = shell(RUN, *words, cwd=tmp_path, CUDA_VISIBLE_DEVICES="0")
    assert done.returncode == 2
    assert message in done.stderr


def test_gpu_jobs_never_share_a_device(tmp_path):
    script = 'mkdir lock.$CUDA_VISIBLE_DEVICES && sleep 0.2 && rmdir lock.$CUDA_VISIBLE_DEVICES && echo "on $CUDA_VISIBLE_DEVICES"'
    done = shell(
        RUN, "--gpu", "2", "JOB=1:5", "x.JOB.log", "bash", "-c", script, cwd=tmp_path, CUDA_VISIBLE_DEVICES="4,5,6,7,8"
    )
    assert done.returncode == 0, [path.read_text(encoding="utf-8") for path in tmp_path.glob("*.log")]
    used = {re.search(r"^on (.+)$", path.read_text(encoding="utf-8"), re.M)[1] for path in tmp_path.glob("x.*.log")}
    assert used == {"4,5", "6,7"}


@pytest.mark.parametrize(("visible", "shown"), [("4, 5,GPU-x", "4\n5\nGPU-x\n"), ("", ""), (None, "0\n1\n")])
def test_the_devices_that_jobs_are_given_can_be_shown(tmp_path, visible, shown):
    """Those of ``CUDA_VISIBLE_DEVICES``, or of the machine: by these the recipe counts its jobs."""
    tool = tmp_path / "nvidia-smi"
    tool.write_text(
        "#!/bin/sh\necho 'GPU 0: NVIDIA H200 (UUID: x)'\necho 'GPU 1: NVIDIA H200 (UUID: y)'\n", encoding="utf-8"
    )
    tool.chmod(0o755)
    variables = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    if visible is not None:
        variables["CUDA_VISIBLE_DEVICES"] = visible
    done = shell(RUN, "--show-devices", cwd=tmp_path, **variables)
    assert (done.returncode, done.stdout) == (0, shown), done.stderr


def test_max_jobs_run_limits_how_many_run_together(tmp_path):
    done = shell(
        RUN,
        "--max-jobs-run",
        "1",
        "JOB=1:3",
        "x.JOB.log",
        "bash",
        "-c",
        "mkdir d && sleep 0.1 && rmdir d",
        cwd=tmp_path,
    )
    assert done.returncode == 0


@pytest.mark.parametrize("number, code", [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_ends_the_jobs_and_what_they_started(tmp_path, number, code):
    words = [RUN, "JOB=1:2", "x.JOB.log", "bash", "-c", "sleep 60 & echo $! > pid.JOB; wait"]
    launcher = subprocess.Popen(
        [str(word) for word in words], cwd=tmp_path, env=environment(), stderr=subprocess.PIPE, encoding="utf-8"
    )
    deadline = time.monotonic() + 20
    while not all((tmp_path / f"pid.{job}").exists() and (tmp_path / f"pid.{job}").stat().st_size for job in (1, 2)):
        assert time.monotonic() < deadline, "the jobs did not start"
        time.sleep(0.05)
    launcher.send_signal(number)
    _, stderr = launcher.communicate(timeout=20)
    assert launcher.returncode == code
    assert f"stopped by signal {int(number)}" in stderr
    for job in (1, 2):
        pid = (tmp_path / f"pid.{job}").read_text(encoding="utf-8").strip()
        while state := process_state(pid):
            assert time.monotonic() < deadline + 20, f"process {pid} of job {job} is still there ({state})"
            time.sleep(0.05)


def process_state(pid):
    """The state of a process, empty if it has ended."""
    try:
        fields = pathlib.Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return ""
    return "" if fields[0] in "ZX" else fields[0]


def test_what_ended_a_job_is_in_its_log(tmp_path):
    """A launcher that was interrupted says so to its jobs, although a SIGTERM follows for what ignores SIGINT."""
    code = """
import time
from espnet2_vllm.bin.options import _heeding_signals, TerminatedError
with _heeding_signals():
    try:
        print("ready", flush=True)
        time.sleep(60)
    except KeyboardInterrupt as error:
        try:
            time.sleep(0.5)
        finally:
            print(type(error).__name__, flush=True)
"""
    (tmp_path / "job.py").write_text(code, encoding="utf-8")
    log = tmp_path / "log"
    launcher = subprocess.Popen(
        [str(word) for word in (RUN, log, sys.executable, tmp_path / "job.py")],
        cwd=REPO,
        env=environment(PYTHONPATH=str(REPO)),
    )
    while not log.exists() or "ready" not in log.read_text(encoding="utf-8"):
        assert launcher.poll() is None
        time.sleep(0.05)
    launcher.send_signal(signal.SIGINT)
    assert launcher.wait() == 130
    assert "KeyboardInterrupt" in log.read_text(encoding="utf-8").splitlines()


def test_a_job_that_ignores_the_signal_is_killed_by_the_second_one(tmp_path):
    words = [RUN, "x.log", "bash", "-c", "trap '' TERM; echo $$ > pid; while true; do sleep 0.1; done"]
    launcher = subprocess.Popen(
        [str(word) for word in words], cwd=tmp_path, env=environment(), stderr=subprocess.PIPE, encoding="utf-8"
    )
    deadline = time.monotonic() + 20
    while not ((tmp_path / "pid").exists() and (tmp_path / "pid").stat().st_size):
        assert time.monotonic() < deadline, "the job did not start"
        time.sleep(0.05)
    launcher.send_signal(signal.SIGTERM)
    with pytest.raises(subprocess.TimeoutExpired):
        launcher.wait(timeout=0.5)
    launcher.send_signal(signal.SIGTERM)
    launcher.communicate(timeout=20)
    assert launcher.returncode == 143
    assert "# Ended (code 137)" in (tmp_path / "x.log").read_text(encoding="utf-8")
