"""--audio_format and --audio_bits of the command lines, against ESPnet's recorded wav files."""

import json

import numpy as np
import pytest
import soundfile
from commands import chat
from conftest import golden_files

from espnet2_vllm.audio import read_audio

TREES = [path.parent for path in golden_files("opuslm/tiny-llama/trees/codec_ssl_tts/data.json")]


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("ESPNET2_VLLM_CACHE", str(tmp_path_factory.getbasetemp() / "converted"))


def entries(folder, name):
    """Names and values of an entry, which begin with the result tree."""
    lines = (folder / name / name).read_text(encoding="utf-8").splitlines()
    return dict(line.split(" ", 1) for line in lines)


@pytest.mark.parametrize(
    ("name", "bits", "subtype"),
    [("flac.ark", "16", None), ("wav.ark", "float", None), ("flac", "24", "PCM_24"), ("wav", "float", "FLOAT")],
)
@pytest.mark.parametrize("tree", TREES, ids=lambda path: path.name)
def test_sound_goes_where_it_is_asked_for(tree, tmp_path, monkeypatch, name, bits, subtype):
    model = tree.parent.parent
    monkeypatch.chdir(model)
    out, options = tmp_path / "out", ("--audio_format", name, "--audio_bits", bits, "--codec_share", "0.5")
    assert chat(model, tree / "decode.yaml", tree / "data.json", out, *options) == 0
    found = 0
    for folder in (path.name for path in (tree / "expected").iterdir() if path.is_dir()):
        expected, mine = entries(tree / "expected", folder), entries(out, folder)
        assert mine.keys() == expected.keys()
        for key, value in expected.items():
            if not value.endswith(".wav"):
                assert mine[key] == value
                continue
            wav, rate = read_audio(mine[key])
            whole, expected_rate = soundfile.read(tree / "expected" / folder / value.rsplit("/", 1)[1], dtype="float32")
            assert (rate, wav.shape) == (expected_rate, (1, len(whole)))
            np.testing.assert_allclose(wav[0], whole, rtol=0, atol=3 / 32768)
            found += 1
            if subtype is None:
                assert mine[key].rsplit(":", 1)[0] == str(out / folder / f"data_{name}")
            else:
                assert soundfile.info(mine[key]).subtype == subtype
    assert found
    # A second run takes everything over, and writes nothing again.
    before = {path: path.stat().st_mtime_ns for path in out.rglob("*.ark") if "data_" in path.name}
    assert chat(model, tree / "decode.yaml", tree / "data.json", out, *options) == 0
    assert {path: path.stat().st_mtime_ns for path in before} == before
    records = [json.loads(line) for line in (out / ".journal" / "journal.jsonl").read_text("utf-8").splitlines()[1:]]
    assert len({record["key"] for record in records}) == len(records)


@pytest.mark.parametrize("tree", TREES, ids=lambda path: path.name)
def test_flac_of_floats_is_refused_before_anything_is_decoded(tree, tmp_path, monkeypatch, caplog):
    model = tree.parent.parent
    monkeypatch.chdir(model)
    options = ("--audio_format", "flac", "--audio_bits", "float")
    assert chat(model, tree / "decode.yaml", tree / "data.json", tmp_path / "out", *options) == 2
    assert "flac holds 16 or 24 bits" in caplog.text


@pytest.mark.parametrize("share", ["0", "2", "half", "0.1:cores"])
def test_a_share_that_is_none_is_wrong_usage(share, tmp_path, capsys):
    with pytest.raises(SystemExit) as end:
        chat(tmp_path, tmp_path / "decode.yaml", tmp_path / "data.json", tmp_path / "out", "--codec_share", share)
    assert end.value.code == 2
    assert "the codec's share" in capsys.readouterr().err
