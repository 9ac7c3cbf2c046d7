"""Commands that write recordings: where they run, and what they may cost."""

import gzip
import json
import os
import pathlib
import time

import numpy as np
import pytest
import soundfile
from conftest import golden_files

from espnet2_vllm import SpeechLM
from espnet2_vllm.audio import Reading, read_audio
from espnet2_vllm.audio.reading import reading_of
from espnet2_vllm.bin import format_audio
from espnet2_vllm.errors import ConfigError, DataError
from espnet2_vllm.io.lhotse import LhotseReader
from espnet2_vllm.plan import Utterance
from espnet2_vllm.prompt.bagpiper import read_recording
from espnet2_vllm.prompt.conversation import checked_messages

RATE = 16000


@pytest.fixture
def recording(tmp_path):
    soundfile.write(tmp_path / "a.wav", np.full(1600, 0.25, np.float32), RATE)
    return tmp_path / "a.wav"


def is_alive(pid: int) -> bool:
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_commands_can_be_refused_and_then_nothing_runs(recording, tmp_path):
    spec = f"touch {tmp_path}/ran; cat {recording} |"
    for reading in (Reading("refuse"), Reading("scp").of_conversations()):
        with pytest.raises(DataError, match="is a command, which is not run here"):
            read_audio(spec, reading=reading)
    assert not (tmp_path / "ran").exists()
    for reading in (None, Reading("scp"), Reading("allow").of_conversations()):
        assert read_audio(spec, reading=reading)[0].shape == (1, 1600)
    with pytest.raises(ConfigError, match="commands 'maybe' is unknown; expected one of scp, allow, refuse"):
        reading_of("maybe")


def test_a_command_that_hangs_is_killed_with_all_that_it_started(recording, tmp_path):
    spec = f"echo $$ > {tmp_path}/pids; (sleep 600 & echo $! >> {tmp_path}/pids; wait) |"
    with pytest.raises(
        DataError, match="did not end within 0.5 s, the most that command_seconds allows, and was killed"
    ):
        read_audio(spec, reading=Reading(command_seconds=0.5))
    pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
    assert len(pids) == 2
    while any(map(is_alive, pids)):  # the kernel takes its time
        time.sleep(0.01)
    assert os.getpgrp() not in pids


def test_a_command_that_closes_its_output_and_goes_on_is_killed(recording):
    with pytest.raises(DataError, match="did not end within"):
        read_audio(f"cat {recording}; exec >&- 2>&-; sleep 600 |", reading=Reading(command_seconds=0.5))


def test_a_command_that_writes_without_end_is_killed():
    with pytest.raises(DataError, match="wrote more than 2 MiB, the most that command_megabytes allows: yes"):
        read_audio("yes |", reading=Reading(command_megabytes=2))


def test_a_command_that_says_much_on_standard_error_does_not_block(recording):
    assert read_audio(f"yes | head -c 1000000 >&2; cat {recording} |")[0].shape == (1, 1600)


def manifest(folder, source):
    recording = {"id": "u", "sources": [source], "sampling_rate": RATE, "num_samples": 1600, "duration": 0.1}
    folder.mkdir(exist_ok=True)
    with gzip.open(folder / "recordings.jsonl.gz", "wt") as file:
        file.write(json.dumps(recording) + "\n")
    return LhotseReader.open(folder, folder)


def test_a_file_of_a_manifest_is_never_a_command(recording, tmp_path):
    for source in (f"touch {tmp_path}/ran; cat {recording} |", f"touch {tmp_path}/ran |  "):
        reader = manifest(tmp_path / "m", {"type": "file", "channels": [0], "source": source})
        with pytest.raises(DataError, match="the manifest calls it a file"):
            reader.load("u", Reading("allow"))
    assert not (tmp_path / "ran").exists()


def test_commands_of_a_manifest_have_limits_and_can_be_refused(recording, tmp_path):
    pytest.importorskip("lhotse")
    source = {"type": "command", "channels": [0], "source": f"touch {tmp_path}/ran; cat {recording}"}
    reader = manifest(tmp_path / "m", source)
    with pytest.raises(DataError, match="is a command, which is not run here"):
        reader.load("u", Reading("refuse"))
    assert not (tmp_path / "ran").exists()
    wav, rate = reader.load("u")
    assert rate == RATE and wav.shape == (1, 1600) and (tmp_path / "ran").exists()
    reader = manifest(tmp_path / "m", {**source, "source": "sleep 600"})
    with pytest.raises(DataError, match="did not end within"):
        reader.load("u", Reading(command_seconds=0.5))


@pytest.mark.parametrize(
    "kind, source, message",
    [
        ("url", "pipe:touch {0}/ran; cat {1}", "is no address"),
        ("url", "-", "is no address"),
        ("url", "http://127.0.0.1:9/x.wav", "only with --allow-url"),
        ("command", ["touch {0}/ran; cat {1}"], "expected a text"),
        ("file", "{0}/pipe", "is no plain file"),
    ],
)
def test_what_lhotse_would_run_fetch_or_wait_for_in_a_manifest_is_refused(recording, tmp_path, kind, source, message):
    pytest.importorskip("lhotse")
    os.mkfifo(tmp_path / "pipe")
    texts = [text.format(tmp_path, recording) for text in ([source] if isinstance(source, str) else source)]
    found = {"type": kind, "channels": [0], "source": texts[0] if isinstance(source, str) else texts}
    reader = manifest(tmp_path / "m", found)
    # With something to be done to it, so that Lhotse itself would read the file too.
    reader.items["u"]["transforms"] = [{"name": "Speed", "kwargs": {"factor": 1.0}}]
    with pytest.raises(DataError, match=message):
        reader.load("u", Reading("refuse"))
    assert not (tmp_path / "ran").exists()


def test_a_path_object_is_never_a_command(recording):
    with pytest.raises(DataError, match="a path that ends in . would be taken for a command"):
        checked_messages([["user", "audio", pathlib.Path("cat x |")]])
    assert read_recording(str(recording), None)[0].shape == (1, 1600)


def test_command_lines_take_the_option(recording, tmp_path, capsys):
    (tmp_path / "wav.scp").write_text(f"a {recording}\nb cat {recording} |\n", encoding="utf-8")
    arguments = ["--data-dir", str(tmp_path), "--output-dir", str(tmp_path / "out")]
    assert format_audio.main(arguments) == 0
    assert format_audio.main([*arguments, "--commands", "refuse"]) == 1
    assert "1 of 2 utterances written" in capsys.readouterr().out
    assert format_audio.main([*arguments, "--max-audio-samples", "1599"]) == 1
    assert "max_audio_samples" in capsys.readouterr().err


@pytest.mark.parametrize("choice", [None, "scp", "allow"])
def test_messages_from_python_run_commands_only_where_the_caller_says_so(recording, tmp_path, choice):
    (config,) = golden_files("bagpiper/qwen3-s4-cb32-contaudio/train.yaml")
    options = {} if choice is None else {"commands": choice}
    model = SpeechLM.from_pretrained(config.parent, backend="pytorch", device="cpu", **options)
    try:
        messages = [["user", "audio", f"touch {tmp_path}/ran; cat {recording} |"], ["user", "text", "what?"]]
        (found,) = model.utterances([messages])
        assert isinstance(found, Utterance) == (choice == "allow") == (tmp_path / "ran").exists()
        assert choice == "allow" or "is a command, which is not run here" in str(found)
    finally:
        model.close()
