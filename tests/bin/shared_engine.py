"""One engine for several command lines in a row: starting vLLM takes longer than decoding a tree.

As a program it runs them in a process of its own, because vLLM changes transformers' OLMo-2 classes for good, after which
nothing else in the process can use them.
"""

import contextlib
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
    from commands import environment

    command = [sys.executable, __file__, json.dumps(commands)]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, env=environment())
    assert done.returncode == 0, done.stderr[-4000:]


if __name__ == "__main__":
    from espnet2_vllm.bin.speechlm_inference_chat import main

    with shared_engine():
        sys.exit(max(main(command) for command in json.loads(sys.argv[1])))
