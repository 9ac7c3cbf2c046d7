"""What goes wrong in the middle of a run, through real command lines: whose outcome it is, what stays, and that a restart goes on.

Every run is compared with an undisturbed one, file by file.
"""

import contextlib
import functools
import json
import resource
import signal
import subprocess
import sys
import time

import kaldiio
import numpy as np
import psutil
import pytest
from commands import bagpiper_arguments, chat, chat_arguments, edited_yaml, environment, writable
from conftest import REPO, golden_models
from trees import result_files

from espnet2_vllm.bin import inference

pytest.importorskip("vllm")
pytestmark = pytest.mark.slow

BAGPIPER = next(model for model in golden_models("bagpiper") if not (model / "Qwen").exists())
OPUSLM = next(model for model in golden_models("opuslm") if "olmo2" not in model.name)
MODULE = "espnet2_vllm.bin.inference"
FOLDER = "text_to_audio_set/inference_rank0"
KEYS = [f"k{i:02}" for i in range(32)]
WORDS = ["hello", "there", "one", "two", "three", "good", "morning", "read", "this", "aloud"]


class Job:
    """A Bagpiper set that takes a few seconds, and its undisturbed results."""

    def __init__(self, folder, backend):
        self.folder, self.backend = folder, backend
        folder.mkdir()
        text = "".join(f"{key} {' '.join(WORDS[: 1 + i % 9])}\n" for i, key in enumerate(KEYS))
        (folder / "text").write_text(text, encoding="utf-8")
        entry = {"name": "text1", "path": str(folder / "text"), "reader": "text"}
        data = {"data_entry": [entry], "samples": KEYS}
        (folder / "dataset.json").write_text(json.dumps(data), encoding="utf-8")
        block = {"temperature": 0.9, "topk": 20, "cfg": 1, "min_step": 0, "max_step": 80}
        config = {"dtype": "float32", "enforce_modality": ["text", "audio"], "text": block, "audio": block}
        (folder / "inference.yaml").write_text(json.dumps(config), encoding="utf-8")
        self.reference = folder / "reference"
        assert self.again(self.reference) == 0

    def arguments(self, out):
        specifier = f"text_to_audio:set:{self.folder / 'dataset.json'}"
        more = ["--max-num-seqs", 4, "--in-flight", 4] if self.backend == "vllm" else []
        return bagpiper_arguments(BAGPIPER, self.folder / "inference.yaml", specifier, out, *more, backend=self.backend)

    def again(self, out):
        """The same command in this process, which has loaded everything already."""
        return inference.main(self.arguments(out))

    def start(self, out, fault="none", **variables):
        """A process of its own."""
        script = str(REPO / "tests" / "bin" / "faulty.py")
        command = [sys.executable, script, fault, MODULE, *self.arguments(out)]
        return subprocess.Popen(command, env=environment() | variables, stderr=subprocess.PIPE, text=True)

    def run(self, out, fault="none"):
        """Exit code and log of a process of its own."""
        process = self.start(out, fault)
        _, log = process.communicate(timeout=600)
        return process.returncode, log

    def check_restart(self, out, caplog):
        """The same command ends the work: the undisturbed files, and one line a key."""
        before = {record["key"] for record in journal(out)}
        assert 0 < len(before) < len(KEYS), "not in mid-run"
        assert not (out / FOLDER / "results.json").exists(), "an unfinished run looks like a finished one"
        caplog.set_level("INFO")
        assert self.again(out) == 0
        assert f"{len(before)} of them taken over" in caplog.text
        assert sorted(record["key"] for record in journal(out)) == KEYS, "every key exactly once"
        self.assert_undisturbed(out)

    def assert_undisturbed(self, out):
        assert contents(out) == contents(self.reference)


def contents(out):
    return {path: (out / path).read_bytes().replace(str(out).encode(), b"OUT") for path in result_files(out)}


def journal(out):
    """Whole lines; a process that is killed may leave half of one."""
    path = out / FOLDER / ".journal" / "journal.jsonl"
    lines = path.read_bytes().split(b"\n")[1:-1] if path.exists() else []
    return [json.loads(line) for line in lines]


def wait_for(condition, process, seconds=600):
    end = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, f"ended with {process.returncode}: {process.stderr.read()[-3000:]}"
        assert time.monotonic() < end, "nothing happens"
        time.sleep(0.005)


@pytest.fixture(scope="module")
def jobs(tmp_path_factory):
    """By backend, made when first asked for."""
    folder = tmp_path_factory.mktemp("jobs")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ESPNET2_VLLM_CACHE", str(tmp_path_factory.getbasetemp() / "converted"))
        yield functools.cache(lambda backend: Job(folder / backend, backend))


@pytest.fixture
def job(jobs):
    return jobs("pytorch")


# -- the process ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("number", "code", "said"),
    [(signal.SIGKILL, -signal.SIGKILL, ""), (signal.SIGTERM, 143, "SIGTERM; what was finished is in the journal")],
    ids=["SIGKILL", "SIGTERM"],
)
def test_a_run_that_is_ended_in_the_middle_goes_on_where_it_stopped(job, tmp_path, caplog, number, code, said):
    out = tmp_path / "out"
    process = job.start(out)
    wait_for(lambda: len(journal(out)) >= 5, process)
    process.send_signal(number)
    _, log = process.communicate(timeout=600)
    assert process.returncode == code and said in log and "Traceback" not in log, log[-3000:]
    job.check_restart(out, caplog)


def test_an_engine_that_dies_ends_the_run_and_loses_nothing_that_was_finished(jobs, tmp_path, caplog):
    """As on a GPU the engine is a process of its own; it is killed."""
    job, out = jobs("vllm"), tmp_path / "out"
    process = job.start(out, VLLM_ENABLE_V1_MULTIPROCESSING="1")
    wait_for(lambda: len(journal(out)) >= 5, process)
    process.send_signal(signal.SIGSTOP)  # so that the run does not end meanwhile
    engines = [
        child for child in psutil.Process(process.pid).children() if "EngineCore" in child.name() + str(child.cmdline())
    ]
    assert engines, psutil.Process(process.pid).children()
    for engine in engines:
        engine.kill()
    process.send_signal(signal.SIGCONT)
    _, log = process.communicate(timeout=600)
    assert process.returncode == 1, log[-3000:]
    (line,) = [line for line in log.splitlines() if "ERROR: the engine died" in line]
    assert "requests under way" in line
    assert "what was finished is in the journal, the same command goes on from there" in log
    job.check_restart(out, caplog)


# -- the disk ----------------------------------------------------------------------------------------------------------
@contextlib.contextmanager
def small_disk(folder, size):
    """A file system of ``size`` bytes at ``folder``; skips where none may be mounted."""
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "none", str(folder)]
    if subprocess.run(command, capture_output=True).returncode:
        pytest.skip("no file system may be mounted here")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_full_disk_ends_the_run_and_a_restart_with_room_goes_on(job, tmp_path, caplog):
    disk = tmp_path / "disk"
    used = sum(path.stat().st_size for path in job.reference.rglob("*") if path.is_file())
    with small_disk(disk, used // 2):
        out = disk / "out"
        code, log = job.run(out)
        assert code == 1, log[-3000:]
        (line,) = [line for line in log.splitlines() if " ERROR: " in line]
        assert "No space left on device" in line and str(out) in line
        subprocess.run(["mount", "-o", f"remount,size={used * 4}", str(disk)], check=True)
        job.check_restart(out, caplog)


def test_a_file_that_may_not_grow_is_an_error_not_a_short_file(tmp_path):
    """A limit on the size of files, as a quota sets it: the wav is not written, and nothing of it stays."""
    script = (
        "import numpy as np, sys; from espnet2_vllm.audio.writing import write_wav\n"
        "try: write_wav(sys.argv[1], np.full(100_000, 0.1, np.float32), 16000)\n"
        "except OSError as error: print(error.errno)"
    )

    def limit():
        resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))

    command = [sys.executable, "-O", "-c", script, str(tmp_path / "a.wav")]
    done = subprocess.run(command, env=environment(), preexec_fn=limit, capture_output=True, text=True)
    assert done.stdout.strip() == "27", done.stderr
    assert not list(tmp_path.iterdir())


# -- one utterance -----------------------------------------------------------------------------------------------------
def test_a_codec_that_raises_refuses_its_clip_alone(job, tmp_path, caplog):
    out = tmp_path / "out"
    hop = 320
    sizes = {}
    for path in (job.reference / FOLDER).glob("*.wav"):
        sizes.setdefault((path.stat().st_size - 44) // 2 // hop, set()).add(path.name.split("_segment")[0])
    frames, keys = next((n, keys) for n, keys in sorted(sizes.items()) if n > 3)
    code, log = job.run(out, fault=f"frames={frames}")
    assert code == 1 and "Traceback" not in log, log[-3000:]
    refused = {record["key"]: record["reason"] for record in journal(out) if record["outcome"] == "refused"}
    assert refused.keys() == keys and len(keys) < len(KEYS) / 2
    assert all(f"does not like clips of {frames} frames" in reason for reason in refused.values())
    assert all(f"no result for {key}: " in log for key in keys)
    written, expected = (json.loads((one / FOLDER / "results.json").read_text("utf-8")) for one in (out, job.reference))
    assert list(written) == [key for key in expected if key not in keys]
    mine, theirs = contents(out), contents(job.reference)
    assert all(mine[path] == theirs[path] for path in mine if path.suffix == ".wav")
    # The codec is mended: only what was refused is decoded again.
    caplog.set_level("INFO")
    assert job.again(out) == 0 and f"{len(KEYS) - len(keys)} of them taken over" in caplog.text
    job.assert_undisturbed(out)


def test_bad_prompts_are_refused_and_the_others_come_out_as_alone(tmp_path, monkeypatch):
    """OpusLM, audio in: codes out of range, too few streams, a prompt longer than the context, an ark that is cut short."""
    model = writable(OPUSLM, tmp_path / "model")
    monkeypatch.chdir(model)
    monkeypatch.setenv("ESPNET2_VLLM_CACHE", str(tmp_path / "converted"))

    def shorten(data):
        for name in ("nproc", "nbest"):
            data.pop(name, None)
        for name in ("codec_ssl", "text_bpe"):
            data[name].update(maxlen=20, search_algo="topk_sampling", topk=10)

    decode = edited_yaml(model / "decode_default.yaml", model / "decode.yaml", shorten)
    folder = model / "data" / "codec_ssl_asr"
    description = json.loads((folder / "data.json").read_text("utf-8"))
    codes = dict(kaldiio.load_scp(str(folder / "index_files" / "wav.scp")))
    good = list(codes)[:3]
    streams = 9
    bad = {
        "outside": np.where(np.arange(codes[good[0]].size) == 13, 10**6, codes[good[0]]),
        "ragged": codes[good[0]][: -(streams // 2)],
        "long": np.tile(codes[good[0]], 60),
    }
    kaldiio.save_ark(str(model / "bad.ark"), bad, scp=str(model / "bad.scp"))
    scp = folder / "index_files" / "wav.scp"
    text = folder / "index_files" / "text"
    more = (model / "bad.scp").read_text("utf-8") + f"cut {model}/cut.ark:4\n"
    (model / "cut.ark").write_bytes((model / "bad.ark").read_bytes()[:40])
    scp.write_text(scp.read_text("utf-8") + more, encoding="utf-8")
    text.write_text(text.read_text("utf-8") + "".join(f"{key} x\n" for key in (*bad, "cut")), encoding="utf-8")

    def set_of(name, keys):
        path = model / f"{name}.json"
        path.write_text(json.dumps({**description, "examples": keys}), encoding="utf-8")
        return path

    options = ("--max_model_len", 512, "--max_num_seqs", 8)
    mixed = set_of("mixed", [good[0], "outside", "long", good[1], "ragged", "cut", good[2]])
    arguments = chat_arguments(model, decode, mixed, tmp_path / "out", *options, backend="vllm")
    command = [sys.executable, "-m", "espnet2_vllm.bin.speechlm_inference_chat", *arguments]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True)
    assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr[-3000:]
    lines = (tmp_path / "out" / ".journal" / "journal.jsonl").read_text("utf-8").splitlines()[1:]
    records = {record["key"].removeprefix("codec_ssl_asr_"): record for record in map(json.loads, lines)}
    refused = {key: record["reason"] for key, record in records.items() if record["outcome"] == "refused"}
    assert refused.keys() == {*bad, "cut"} and records.keys() == {*bad, "cut", *good}
    for key, words in {"outside": "1000000", "ragged": "9", "long": "context of 512 rows", "cut": "cut.ark"}.items():
        assert words in refused[key], refused[key]
    assert chat(model, decode, set_of("good", good), tmp_path / "alone", *options, backend="vllm") == 0
    for name in ("text/text", "wav.scp/wav.scp"):
        mine, alone = (
            (tmp_path / out / name).read_text("utf-8").replace(str(tmp_path / out), "") for out in ("out", "alone")
        )
        assert mine == alone and mine, name


# -- the client --------------------------------------------------------------------------------------------------------
def test_a_client_that_goes_away_leaves_nothing_behind(job):
    """Whoever stops listening to ``decode`` takes its requests along; what runs beside it ends as if alone."""
    from fuzz.draws import header as header_of
    from fuzz.draws import prompt, text_rows
    from stage import Stage

    from espnet2_vllm.backends import decode
    from espnet2_vllm.checkpoint import ensure_converted
    from espnet2_vllm.decoding import load_decoding
    from espnet2_vllm.plan import Given, Utterance, Wanted

    checkpoint = ensure_converted(BAGPIPER / "train.yaml", BAGPIPER / "mp_rank_00_model_states.pt")
    # Room for all at once: none waits for another's blocks, so that how long they are decides who ends first.
    settings = {"sync": {"max_num_batched_tokens": 64, "num_gpu_blocks_override": 200}}
    world = Stage(checkpoint, settings, seed=20261130, requests=6)
    served = world.engine("sync")
    layout, config = world.layout, load_decoding(job.folder / "inference.yaml", "bagpiper")
    header = header_of(layout, "audio")
    utterances = [Utterance(f"u{i}", (Given(text_rows(layout, world.rng, 5 + i)), Wanted(header))) for i in range(9)]
    # Longer than any of the utterances (80 rows a segment), so that they are there when the first of these has ended.
    rules = world.fixed("audio", 220)
    beside = [world.add(f"beside {i}", prompt(layout, world.rng, 20 + i), rules) for i in range(3)]
    served.submit(*beside)
    results = decode(served.engine, utterances, config, seed=1)
    next(results)
    assert served.engine.unfinished > len(beside), "nothing was left to leave behind"
    results.close()
    found = served.run()
    assert len(found) == len(beside), "the neighbours had ended before"
    world.check(found)
    served.assert_empty()
    world.close()
