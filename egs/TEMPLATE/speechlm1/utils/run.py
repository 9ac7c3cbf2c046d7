#!/usr/bin/env python3
"""Run a command, or an array of them, on this machine, by the conventions of Kaldi's job scripts.

usage: run.py [OPTIONS] [JOB=FIRST:LAST] LOG COMMAND [ARGUMENT...]

JOB in LOG, COMMAND and the arguments is replaced by the number of the job. Each log begins with the command and the
time, and ends with the time spent and the exit code. A lone |, ||, &&, ;, <, > or >> among the arguments is the
shell's; everything else reaches the command as it stands. Exit code: 0 if every job ended with 0, otherwise 1.

  --gpu N            GPUs a job needs. With N > 0 every job sees N devices of its own, and as many jobs run at a time
                     as this machine (or CUDA_VISIBLE_DEVICES) has devices for
  --max-jobs-run N   how many jobs run at a time (default: all)
  --show-devices     only print the devices that jobs are given, one a line
  --mem, --num-threads, --time, --config, --allow: taken, as cluster scripts need them; without effect here
"""

import os
import queue
import re
import shlex
import signal
import subprocess
import sys
import threading
import time

WITHOUT_EFFECT = {"--mem", "--num-threads", "--time", "--config", "--allow"}
SHELL_OPERATORS = {"|", "||", "&&", ";", "<", ">", ">>"}
JOB_RANGE = re.compile(r"([A-Za-z_]\w*)=(\d+)(?::(\d+))?")


class UsageError(Exception):
    """The command line cannot be used."""


def parse(argv):
    """argv -> (options {gpu, max_jobs}, name of the job variable or None, job numbers, log, command)."""
    options = {"gpu": 0, "max_jobs": None}
    rest = list(argv)
    while rest and rest[0].startswith("-"):
        option = rest.pop(0)
        if option not in WITHOUT_EFFECT | {"--gpu", "--max-jobs-run"}:
            raise UsageError(f"unknown option {option}")
        if not rest:
            raise UsageError(f"option {option} needs a value")
        value = rest.pop(0)
        if option in ("--gpu", "--max-jobs-run"):
            if not value.isdecimal() or (option == "--max-jobs-run" and value == "0"):
                raise UsageError(f"{option} takes a number, not '{value}'")
            options["gpu" if option == "--gpu" else "max_jobs"] = int(value)
    name, jobs = None, [1]
    matched = JOB_RANGE.fullmatch(rest[0]) if rest else None
    if matched:
        rest.pop(0)
        name, first, last = matched[1], int(matched[2]), int(matched[3] or matched[2])
        if first > last or first < 1:
            raise UsageError(f"{matched[0]}: expected 1 <= FIRST <= LAST")
        jobs = list(range(first, last + 1))
    if len(rest) < 2:
        raise UsageError("expected a log file and a command")
    log, command = rest[0], rest[1:]
    if len(jobs) > 1 and name not in log:
        raise UsageError(f"the log file '{log}' must contain {name}: {len(jobs)} jobs would write into one file")
    return options, name, jobs, log, command


def visible_devices():
    """Names of this machine's NVIDIA GPUs as CUDA_VISIBLE_DEVICES takes them; an empty list without any."""
    listed = os.environ.get("CUDA_VISIBLE_DEVICES")
    if listed is not None:
        return [name.strip() for name in listed.split(",") if name.strip()]
    try:
        lines = subprocess.run(
            ["nvidia-smi", "-L"], capture_output=True, encoding="utf-8", check=True, timeout=20
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    return [str(index) for index, _ in enumerate(re.findall(r"^GPU \d+", lines, re.MULTILINE))]


def device_groups(gpus_a_job):
    """Device lists for jobs that run at the same time, or None where jobs need no device of their own."""
    if gpus_a_job == 0:
        return None
    devices = visible_devices()
    if len(devices) < gpus_a_job:
        raise UsageError(f"--gpu {gpus_a_job}: this machine shows {len(devices)} NVIDIA GPUs (nvidia-smi -L)")
    starts = range(0, len(devices) - gpus_a_job + 1, gpus_a_job)
    return [",".join(devices[start : start + gpus_a_job]) for start in starts]


def words_of(command):
    """What to execute: the command itself, or a shell around it if it uses the shell."""
    if not SHELL_OPERATORS.intersection(command):
        return command
    line = " ".join(word if word in SHELL_OPERATORS else shlex.quote(word) for word in command)
    return ["bash", "-c", f"set -o pipefail; {line}"]


class Launcher:
    """Runs the jobs; `stop` ends those that run and starts no more, called again it kills them."""

    def __init__(self, log, command, name, groups):
        self.log, self.command, self.name = log, command, name
        self.free_groups = queue.SimpleQueue()
        for group in groups or ():
            self.free_groups.put(group)
        self.has_groups = groups is not None
        self.running, self.lock, self.stopped = set(), threading.Lock(), False
        self.failed = []

    def run_job(self, job):
        fill = (lambda text: text.replace(self.name, str(job))) if self.name else (lambda text: text)
        log, command = fill(self.log), [fill(word) for word in self.command]
        group = self.free_groups.get() if self.has_groups else None
        try:
            code = self.run_logged(log, command, group)
        except OSError as error:
            print(f"run.py: job {job}: {error}", file=sys.stderr)
            code = 1
        finally:
            if group is not None:
                self.free_groups.put(group)
        if code != 0:
            with self.lock:
                self.failed.append(job)

    def run_logged(self, log, command, group):
        os.makedirs(os.path.dirname(log) or ".", exist_ok=True)
        env = dict(os.environ) if group is None else {**os.environ, "CUDA_VISIBLE_DEVICES": group}
        began = time.time()
        with open(log, "w", encoding="utf-8", errors="surrogateescape") as file:
            file.write(f"# {shlex.join(command)}\n# Started at {time.ctime(began)}\n#\n")
            file.flush()
            code = self.execute(words_of(command), file, env)
            spent = int(time.time() - began)
            file.write(f"# Accounting: time={spent} threads=1\n")
            file.write(f"# Ended (code {code}) at {time.ctime()}, elapsed time {spent} seconds\n")
        return code

    def execute(self, words, file, env):
        with self.lock:
            if self.stopped:
                file.write("# Not started: the launcher was stopped\n")
                return 1
            try:
                # a session of its own, so that `stop` reaches what the command starts in turn
                process = subprocess.Popen(
                    words, stdin=subprocess.DEVNULL, stdout=file, stderr=file, env=env, start_new_session=True
                )
            except OSError as error:
                file.write(f"run.py: cannot start the command: {error}\n")
                return 127
            self.running.add(process)
        code = process.wait()
        with self.lock:
            self.running.discard(process)
        return code if code >= 0 else 128 - code

    def stop(self, number):
        """Ends the jobs: by SIGTERM, after SIGINT where that came, so that logs say what ended them; the second time by SIGKILL.

        What a shell put into the background ignores SIGINT.
        """
        with self.lock:
            first = [signal.SIGINT] if number == signal.SIGINT else []
            numbers = [signal.SIGKILL] if self.stopped else [*first, signal.SIGTERM]
            self.stopped = True
            for process in self.running:
                try:
                    for number in numbers:
                        os.killpg(process.pid, number)
                except ProcessLookupError:
                    continue


def run_all(launcher, jobs, at_a_time):
    """Run ``jobs``, ``at_a_time`` of them in parallel."""
    pending = queue.SimpleQueue()
    for job in jobs:
        pending.put(job)

    def work():
        while not launcher.stopped:
            try:
                job = pending.get_nowait()
            except queue.Empty:
                return
            launcher.run_job(job)

    threads = [threading.Thread(target=work) for _ in range(min(at_a_time, len(jobs)))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def main(argv):
    if not argv or argv[0] in ("-h", "--help"):
        print(__doc__)
        return 0 if argv else 2
    if argv == ["--show-devices"]:
        print("".join(f"{name}\n" for name in visible_devices()), end="")
        return 0
    try:
        options, name, jobs, log, command = parse(argv)
        groups = device_groups(options["gpu"])
    except UsageError as error:
        print(f"run.py: {error}; run.py --help", file=sys.stderr)
        return 2
    launcher = Launcher(log, command, name, groups)
    received = []

    def on_signal(number, _frame):
        received.append(number)
        launcher.stop(number)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, on_signal)
    run_all(launcher, jobs, min(options["max_jobs"] or len(jobs), len(groups) if groups else len(jobs)))
    if received:
        print(f"run.py: stopped by signal {received[0]}, log is in {log}", file=sys.stderr)
        return 128 + received[0]
    if launcher.failed:
        numbers = " ".join(map(str, sorted(launcher.failed)))
        where = log.replace(name, "*") if name else log
        what = "job failed" if len(jobs) == 1 else f"{len(launcher.failed)} / {len(jobs)} failed (jobs {numbers})"
        print(f"run.py: {what}, log is in {where}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
