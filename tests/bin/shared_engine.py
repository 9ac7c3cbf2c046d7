"""One engine for several command lines in a row: starting vLLM takes longer than decoding a tree.

As a program it runs them in a process of its own, because vLLM changes transformers' OLMo-2 classes for good, after which
nothing else in the process can use them.
"""

import contextlib
import importlib
import json
import os
import subprocess
import sys

from espnet2_vllm import backends


@contextlib.contextmanager
def shared_engine():
    """Within the block ``make_engine`` gives the same engine for the same request; it is closed at the end or for another one."""
    make_engine = backends.make_engine
    kept = {}

    def close():
        for _, close_engine in kept.values():
            close_engine()
        kept.clear()

    def make(name, checkpoint, dtype, **options):
        wanted = (name, checkpoint.path, dtype, *sorted(options.items()))
        if wanted not in kept:
            close()
            engine = make_engine(name, checkpoint, dtype, **options)
            kept[wanted] = engine, engine.close
            engine.close = lambda: None
        engine, _ = kept[wanted]
        assert engine.unfinished == 0
        return engine

    backends.make_engine = make
    try:
        yield
    finally:
        backends.make_engine = make_engine
        close()


def run_apart(commands: list[list[str]], cwd: os.PathLike) -> None:
    """Runs command lines of ``speechlm_inference_chat`` in one new process, which all must exit with 0."""
    _run("speechlm_inference_chat", [(str(cwd), command) for command in commands])


def run_bagpiper_apart(runs: list[tuple[str, list[str]]]) -> None:
    """Runs command lines of ``inference``, each in its folder, in one new process, which all must exit with 0."""
    _run("inference", runs)


def _run(module: str, runs: list[tuple[str, list[str]]]) -> None:
    from commands import environment

    command = [sys.executable, __file__, module, json.dumps(runs)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment())
    assert done.returncode == 0, done.stderr[-4000:]


def main(module: str, runs: list[tuple[str, list[str]]]) -> int:
    run, codes = importlib.import_module(f"espnet2_vllm.bin.{module}").main, []
    with shared_engine():
        for cwd, words in runs:
            with contextlib.chdir(cwd):
                codes.append(run(words))
    return max(codes)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], json.loads(sys.argv[2])))
