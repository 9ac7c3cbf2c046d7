"""Kills a decode with SIGKILL at random moments and starts it again until it is done: python tests/bin/killing.py --help.

What stands there in the end has to be what an undisturbed run writes, byte for byte, and no utterance is decoded twice.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import random
import signal
import subprocess
import sys
import tempfile
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

from trees import result_files  # noqa: E402

PATIENCE = 300.0  # seconds in which something has to happen


def journal_lines(out: pathlib.Path) -> list[bytes]:
    """Whole lines of every journal below ``out``, without the settings."""
    journals = sorted(out.rglob(".journal/journal.jsonl"))
    return [line for path in journals for line in path.read_bytes().split(b"\n")[1:-1]]


def contents(out: pathlib.Path) -> dict[pathlib.Path, bytes]:
    """Every file but the journals, with ``out`` itself taken out of what they say."""
    return {path: (out / path).read_bytes().replace(str(out).encode(), b"OUT") for path in result_files(out)}


def kill_once(command: list[str], out: pathlib.Path, rng: random.Random, start_seconds: float) -> bool:
    """Starts ``command`` and kills it at a random moment; False if it ended by itself before.

    A third of the moments lie anywhere since the start; the others some lines of the journal later, and a moment more.
    """
    before = len(journal_lines(out))
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
    begun = time.monotonic()
    if rng.random() < 1 / 3:
        wait = rng.uniform(0, start_seconds)
        while process.poll() is None and time.monotonic() - begun < wait:
            time.sleep(0.002)
    else:
        more = rng.randint(0, 3)
        while process.poll() is None and len(journal_lines(out)) < before + more:
            assert time.monotonic() - begun < PATIENCE, "nothing is decoded"
            time.sleep(0.001)
        time.sleep(rng.expovariate(200))
    if process.poll() is not None:
        assert process.returncode == 0, f"ended with {process.returncode}: {' '.join(command)}"
        return False
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    return True


def run(command: list[str]) -> float:
    """Runs ``command`` to its end; seconds that it took."""
    begun = time.monotonic()
    done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    assert done.returncode == 0, f"ended with {done.returncode}: {done.stderr.decode(errors='replace')[-3000:]}"
    return time.monotonic() - begun


def check(command_of, folder: pathlib.Path, kills: int, rng: random.Random) -> int:
    """Kills ``kills`` times, in as many runs as that takes; the number of restarts that found something to go on with.

    Args:
        command_of: the command line for an output directory.
    """
    reference = folder / "undisturbed"
    seconds = run(command_of(reference))
    expected, keys = contents(reference), sorted(json.loads(line)["key"] for line in journal_lines(reference))
    assert expected and keys
    killed, attempt, went_on = 0, 0, 0
    while killed < kills:
        attempt += 1
        out = folder / f"killed{attempt}"
        alive = True
        while alive and killed < kills:
            went_on += bool(journal_lines(out))
            alive = kill_once(command_of(out), out, rng, seconds)
            killed += alive
            print(
                f"run {attempt}: {killed} of {kills} kills, {len(journal_lines(out))} of {len(keys)} outcomes",
                flush=True,
            )
        if alive:
            run(command_of(out))
        found = contents(out)
        assert found.keys() == expected.keys(), sorted(map(str, found.keys() ^ expected.keys()))
        different = [str(path) for path in found if found[path] != expected[path]]
        assert not different, f"other contents: {different}"
        assert sorted(json.loads(line)["key"] for line in journal_lines(out)) == keys, "every key exactly once"
    return went_on


def golden_command(out: pathlib.Path, backend: str) -> list[str]:
    """A recorded OpusLM set through the real command line."""
    from conftest import golden_models

    model = golden_models("opuslm")[0]
    os.chdir(model)  # paths in its data.json count from there
    tree = model / "trees" / "codec_ssl_tts"
    options = {
        "train_config": model / "config.yaml",
        "model_file": model / "model.pth",
        "inference_config_file": tree / "decode.yaml",
        "output_dir": out,
        "data_path_and_name_and_type": f"{tree / 'data.json'},_,dataset_json",
        "backend": backend,
    }
    words = [str(word) for name, value in options.items() for word in (f"--{name}", value)]
    return [sys.executable, "-m", "espnet2_vllm.bin.speechlm_inference_chat", *words]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20, help="how often to kill (default 20)")
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    parser.add_argument("--backend", choices=("pytorch", "vllm"), default="pytorch", help="what decodes a recorded set")
    parser.add_argument(
        "command", nargs=argparse.REMAINDER, help="-- COMMAND...: any other decode; OUT in it is its output directory"
    )
    args = parser.parse_args()
    own = [word for word in args.command if word != "--"]

    def command_of(out: pathlib.Path) -> list[str]:
        return [word.replace("OUT", str(out)) for word in own] if own else golden_command(out, args.backend)

    with tempfile.TemporaryDirectory(prefix="espnet2_vllm.kill.") as folder:
        os.environ.setdefault("ESPNET2_VLLM_CACHE", f"{folder}/converted")
        went_on = check(command_of, pathlib.Path(folder), args.kills, random.Random(args.seed))
    print(
        f"killed {args.kills} times (seed {args.seed}), {went_on} restarts went on: the results are the undisturbed ones"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
