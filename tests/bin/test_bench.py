"""espnet2-vllm bench, on tiny models."""

import json
import os
import pathlib
import pickle
import re
import subprocess
import sys

import pytest
from bench_models import converted_model, tiny_bagpiper, tiny_opuslm

from espnet2_vllm.bench import geometry, plot, systems
from espnet2_vllm.bench import measure as measure_module
from espnet2_vllm.bench.alone import alone
from espnet2_vllm.bin import bench
from espnet2_vllm.errors import ConfigError, EngineError


@pytest.fixture(autouse=True)
def nothing_is_freed(monkeypatch):
    """Other tests of this process keep engines of their own, whose device must not be freed."""
    monkeypatch.setattr(systems, "free_device", lambda: 0)


@pytest.fixture
def tiny(monkeypatch):
    """Makes the tiny geometries known by name."""
    for make in (tiny_bagpiper, tiny_opuslm):
        model = make()
        monkeypatch.setitem(geometry._RELEASED, model.name, (model.backbone, lambda model=model: model.layout))


def measure(tmp_path, *arguments) -> tuple[int, dict]:
    path = tmp_path / "bench.json"
    code = bench.main([*map(str, arguments), "--json", str(path)])
    return code, json.loads(path.read_text(encoding="utf-8"))


SMALL = ("--lengths", "8:12", "--in-flight", "1,3", "--dtype", "float32", "--pytorch-rows", "12", "--device", "cpu")


def test_the_sequential_backend_is_timed_on_one_request_of_a_random_model(tiny, tmp_path, capsys):
    arguments = ("tiny-bagpiper", "tiny-opuslm", "--only", "pytorch", "--workload", "audio,text-audio:0.5", *SMALL)
    code, report = measure(tmp_path, *arguments, "--guidance", "1,3", "--peak-tflops", "1", "--peak-bandwidth", "100")
    assert code == 0 and [model["weights"] for model in report["models"]] == ["random"] * 2
    for model in report["models"]:
        loads = [(c["workload"], c["guidance"], c["in_flight"], c["prompt"], c["output"]) for c in model["cells"]]
        assert loads == [(w, g, 1, 8, 12) for w in ("audio", "text-audio:0.5") for g in (1.0, 3.0)]
        for cell in model["cells"]:
            if model["family"] == "opuslm" and cell["guidance"] != 1:
                assert cell["refused"] == "the opuslm family has no guidance" and "rows" not in cell
                continue
            assert cell["rows"] == 12 and cell["rows_per_s"] == pytest.approx(12 / cell["seconds"])
            assert cell["flops_share"] == pytest.approx(cell["flops"] / 1e12)
            assert cell["bandwidth_share"] == pytest.approx(cell["bandwidth"] / 100e9)
    shown = capsys.readouterr().out
    assert "### tiny-opuslm (float32, random weights)" in shown
    assert "- sequential pytorch: the opuslm family has no guidance" in shown
    assert len(re.findall(r"\| sequential pytorch \|.* refused \|", shown)) == 2


def test_the_report_says_what_made_it(tiny, tmp_path):
    arguments = ("tiny-bagpiper", "--only", "pytorch", *SMALL)
    _, report = measure(tmp_path, *arguments)
    assert report["command"].startswith("espnet2-vllm bench tiny-bagpiper --only pytorch --lengths 8:12")
    assert report["device"]["name"].startswith("CPU")
    assert {"espnet2_vllm", "python", "torch", "transformers"} <= set(report["versions"])
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00", report["date"])


def test_the_median_of_several_runs_counts_and_no_prompt_comes_twice(tiny, tmp_path, monkeypatch):
    prompts, random_prompt = [], measure_module.random_prompt

    def recorded(*arguments):
        prompts.append(random_prompt(*arguments))
        return prompts[-1]

    monkeypatch.setattr(measure_module, "random_prompt", recorded)
    _, report = measure(tmp_path, "tiny-bagpiper", "--only", "pytorch", "--repeat", "3", *SMALL)
    (cell,) = report["models"][0]["cells"]
    assert cell["rows_per_s"] == sorted(cell["rows_per_s_all"])[1]
    assert len(prompts) == 4 and len({prompt.tobytes() for prompt in prompts}) == 4  # a warm-up and three runs


def test_a_system_that_cannot_be_started_does_not_keep_others_from_being_measured(tiny, tmp_path, monkeypatch, capsys):
    def refuse(*arguments):
        raise RuntimeError("Engine core initialization failed: not enough memory")

    monkeypatch.setattr(systems, "SpeechSystem", refuse)
    code, report = measure(tmp_path, "tiny-bagpiper", "--only", "engine,pytorch", *SMALL)
    (model,) = report["models"]
    assert code == 1 and [cell["system"] for cell in model["cells"]] == ["pytorch"]
    assert "not enough memory" in model["systems"]["engine"]["error"]
    assert "- this engine failed: Engine core initialization failed: not enough memory" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["bagpiper-9b"], "did you mean bagpiper-8b"),
        ([], "give models to measure, or --plot-from"),
        (["bagpiper-8b", "--plot-from", "x.json"], "give models to measure, or --plot-from"),
        (["opuslm-7b", "--lengths", "128:8"], "8 output rows are too few for workload audio; at least 9 are needed"),
        (["opuslm-7b", "--lengths", "16000:512"], "need 16514 rows, but the context has 16384"),
        (["opuslm-7b", "--workload", "speech"], "expected audio, text, or text-audio"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_anything_starts(arguments, message, caplog):
    assert bench.main(arguments) == 2
    assert message in caplog.text


@pytest.mark.parametrize(
    "arguments",
    [["--lengths", "128"], ["--in-flight", "0"], ["--guidance", "0.5"], ["--only", "vllm"], ["--topk", "x"]],
)
def test_wrong_values_are_usage_errors(arguments, capsys):
    with pytest.raises(SystemExit) as exit_:
        bench.main(["bagpiper-8b", *arguments])
    assert exit_.value.code == 2 and f"argument {arguments[0]}" in capsys.readouterr().err


def cell(system: str, in_flight: int, rate: float, workload: str = "text", guidance: float = 1.0) -> dict:
    load = {"system": system, "workload": workload, "guidance": guidance, "in_flight": in_flight}
    return load | {"prompt": 128, "output": 256, "rows_per_s": rate, "ms_per_step": 1.0, "seconds": 1.0, "rows": 1}


@pytest.fixture
def earlier(tmp_path) -> pathlib.Path:
    """The json of a run of three systems."""
    from espnet2_vllm.bench.report import add_ratios, new_report, write_report

    cells = [cell("pytorch", 1, 20.0, "audio"), cell("plain", 1, 160.0), cell("plain", 64, 4000.0)]
    cells += [cell("engine", n, rate, "audio") for n, rate in ((1, 200.0), (64, 8000.0), (128, 9600.0))]
    cells += [cell("engine", 64, 6000.0, "audio", 3.0)]
    add_ratios(cells)
    report = new_report("espnet2-vllm bench bagpiper-8b", {"name": "NVIDIA H200", "memory": 1, "cuda": "13.0"})
    model = {"name": "bagpiper-8b", "dtype": "bfloat16", "weights": "random", "systems": {}, "cells": cells}
    report["models"].append(model)
    write_report(tmp_path / "earlier.json", report)
    return tmp_path / "earlier.json"


def test_ratios_are_to_the_same_load(earlier, capsys):
    assert bench.main(["--plot-from", str(earlier)]) == 0
    table = capsys.readouterr().out
    rows = [[value.strip() for value in line.split("|")] for line in table.splitlines() if "|" in line]
    headings = rows[0]
    shown = {(row[1], row[3], row[4]): dict(zip(headings, row, strict=True)) for row in rows[2:9]}
    assert shown["this engine", "1", "1"]["to plain text"] == "1.25"
    assert shown["this engine", "1", "64"]["to plain text"] == "2.00"
    assert shown["this engine", "1", "64"]["to pytorch"] == "400.0"
    assert shown["this engine", "3", "64"]["to cfg 1"] == "0.75"
    assert shown["this engine", "3", "64"]["to two requests"] == "1.25"
    assert shown["this engine", "3", "64"]["to pytorch"] == "-"  # was not measured with guidance
    assert shown["plain-text vLLM", "1", "64"]["to plain text"] == "-"


def test_plain_text_with_the_same_attention_and_what_bounds_a_load_are_shown(earlier, capsys):
    from espnet2_vllm.bench.report import add_ratios, read_report, write_report

    report = read_report(earlier)
    cells = report["models"][0]["cells"]
    cells.append(cell("plain-same", 64, 5000.0))
    host = {"schedule": 1.0, "launch": 3.0, "wait": 5.0, "update": 1.0, "front end": 0.0}
    parts = {"streams": 0.1, "attention": 4.0, "sampling": 0.0, "matmul": 3.0, "other": 0.5}
    for one, busy in ((cells[2], 9.6), (cells[4], 8.0)):
        one["profile"] = {"step_ms": 10.0, "host_ms": host, "device_ms": parts, "busy_ms": busy}
    add_ratios(cells)
    write_report(earlier, report)
    assert bench.main(["--plot-from", str(earlier)]) == 0
    rows = [[part.strip() for part in line.split("|")] for line in capsys.readouterr().out.splitlines() if "|" in line]
    headings = rows[0]
    shown = {(row[1], row[4], row[3]): dict(zip(headings, row, strict=True)) for row in rows[2:10]}
    assert shown["this engine", "64", "1"]["to plain text"] == "2.00"
    assert shown["this engine", "64", "1"]["with the same attention"] == "1.60"
    assert ("plain text, this engine's attention", "64", "1") in shown
    bounds = [
        row[-2]
        for row in rows
        if row[1] in ("this engine", "plain-text vLLM") and row[-2].startswith(("device", "host"))
    ]
    assert bounds == ["device, attention", "host, launch"]


def test_earlier_runs_are_plotted_with_a_line_a_system(earlier, tmp_path, monkeypatch):
    labels = []
    draw = plot._draw

    def recorded(axes, *arguments):
        draw(axes, *arguments)
        labels.extend(line.get_label() for line in axes.get_lines())

    monkeypatch.setattr(plot, "_draw", recorded)
    picture = tmp_path / "plots" / "bench.png"
    assert bench.main(["--plot-from", f"{earlier},{earlier}", "--plot", str(picture)]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    one = ["plain-text vLLM", "this engine, audio", "this engine, audio, cfg 3", "sequential pytorch"]
    assert labels == one * 2


def test_files_that_bench_did_not_write_are_refused(tmp_path, caplog):
    path = tmp_path / "other.json"
    path.write_text("{}", encoding="utf-8")
    assert bench.main(["--plot-from", str(path)]) == 1
    assert "was not written by espnet2-vllm bench" in caplog.text
    assert bench.main(["--plot-from", str(tmp_path / "none.json")]) == 1
    assert "cannot read" in caplog.text


def test_a_plot_without_matplotlib_is_refused_before_anything_is_measured(tiny, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(plot, "find_spec", lambda name: None)
    assert bench.main(["tiny-bagpiper", "--plot", str(tmp_path / "x.png")]) == 2
    assert "pip install 'espnet2_vllm[bench]'" in caplog.text


@pytest.mark.slow
def test_three_systems_in_one_process(tmp_path):
    """As a program of its own, because the device is freed between the systems."""
    model = converted_model("bagpiper", "qwen3-s8-cb64")
    arguments = [str(model), *SMALL, "--guidance", "1,2", "--json", str(tmp_path / "bench.json")]
    arguments += ["--lengths", "8:64", "--max-model-len", "128", "--profile"]
    command = [sys.executable, "-m", "espnet2_vllm.bin.main", "bench", *arguments]
    env = os.environ | {"TORCH_COMPILE_DISABLE": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
    done = subprocess.run(command, env=env, capture_output=True, encoding="utf-8", timeout=600)
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.startswith("CPU"), done.stdout  # nothing but the tables
    (entry,) = json.loads((tmp_path / "bench.json").read_text(encoding="utf-8"))["models"]
    assert entry["weights"] == "its own" and list(entry["systems"]) == ["pytorch", "engine", "plain"]
    cells = {(c["system"], c["in_flight"], c["guidance"]): c for c in entry["cells"]}
    assert set(cells) == {
        *(("pytorch", 1, g) for g in (1, 2)),
        *(("engine", n, g) for n in (1, 3) for g in (1, 2)),
        *(("plain", n, 1) for n in (1, 3)),
    }
    for (system, in_flight, _), c in cells.items():
        assert c["rows"] == (12 if system == "pytorch" else 64 * in_flight)
        if system == "pytorch":
            assert "profile" not in c
            continue
        profile = c["profile"]  # on a CPU the host's parts alone
        assert set(profile) == {"step_ms", "host_ms"} and min(profile["host_ms"].values()) >= 0
        assert 0 < profile["host_ms"]["launch"] <= sum(profile["host_ms"].values()) < profile["step_ms"]
        assert 0 < c["first_row_s"] < c["seconds"] and 0 < c["row_p50_s"] <= c["row_p99_s"] < c["seconds"]
        assert (c["first_codes_s"] is None) == (system == "plain")
        if system == "engine":
            assert c["first_row_s"] < c["first_codes_s"] <= c["seconds"]
            assert c["to_plain"] == pytest.approx(c["rows_per_s"] / cells["plain", in_flight, 1]["rows_per_s"])
            assert c["to_pytorch"] > 0
    memory = entry["systems"]["engine"]["memory"]
    assert memory["history_table"] > 0 and memory["auxiliary_heads"] > 0
    assert entry["systems"]["plain"]["memory"]["history_table"] == 0
    # Without the stream embedding, the plain model has the same weights.
    extra = memory["weights"] - entry["systems"]["plain"]["memory"]["weights"]
    assert extra == 4 * 8 * 64


def _double(number: int) -> int:
    if number < 0:
        raise ConfigError(f"{number} is below 0")
    if number == 0:
        os._exit(3)
    return 2 * number


def _gone(*arguments):
    os._exit(3)


def test_a_process_of_its_own(tiny):
    """What a function does there comes back as if it had been done here."""
    assert alone(_double, 4) == 8
    with pytest.raises(ConfigError, match="-1 is below 0"):
        alone(_double, -1)
    with pytest.raises(EngineError, match="ended with exit code 3"):
        alone(_double, 0)
    known = geometry.find_geometry("tiny-bagpiper")
    assert pickle.loads(pickle.dumps(known)) == known


def test_a_system_is_measured_in_a_process_of_its_own(tmp_path, monkeypatch):
    """As on a GPU."""
    monkeypatch.setattr(bench, "_isolated", alone)
    code, report = measure(tmp_path, converted_model("bagpiper", "qwen3-s8-cb64"), "--only", "pytorch", *SMALL)
    (model,) = report["models"]
    assert code == 0 and [cell["rows"] for cell in model["cells"]] == [12]
    monkeypatch.setattr(bench, "measure_system", _gone)
    code, report = measure(tmp_path, converted_model("bagpiper", "qwen3-s8-cb64"), "--only", "pytorch", *SMALL)
    assert code == 1 and "exit code 3" in report["models"][0]["systems"]["pytorch"]["error"]


@pytest.mark.slow
def test_engines_that_share_the_units(tiny, tmp_path, capsys):
    """Two of them, in processes of their own; plain text, which is one engine, is said to be left out."""
    arguments = (
        "tiny-bagpiper",
        "--only",
        "engine,plain",
        "--data-parallel-size",
        "2",
        *SMALL,
        "--max-model-len",
        "128",
    )
    code, report = measure(tmp_path, *arguments, "--peak-bandwidth", "100")
    (model,) = report["models"]
    assert code == 1 and "take --only engine" in model["systems"]["plain"]["error"]
    assert [(cell["in_flight"], cell["rows"], cell["first_row_s"]) for cell in model["cells"]] == [
        (1, 12, None),
        (3, 36, None),
    ]
    for cell in model["cells"]:
        assert cell["bandwidth_share"] == pytest.approx(cell["bandwidth"] / 100e9)
    assert "- plain-text vLLM failed: " in capsys.readouterr().out
