"""The recipes of the ESPnet that is installed, with one word of theirs replaced."""

import json
import shutil
import subprocess
import sys

import pytest
import yaml
from conftest import golden_models
from espnet_tree import changed, espnet_tree
from recipe_shell import REPO, environment

DIGITS = REPO / "egs" / "digits" / "speechlm1"
MODEL = DIGITS / "models" / "bagpiper"
WEIGHTS = MODEL / "mp_rank_00_model_states.pt"


@pytest.fixture(scope="module")
def tree():
    return espnet_tree()


def run(*words, cwd, **variables):
    """A command line; its output goes to the test's."""
    # One engine in one process each, and little memory: what a small model needs.
    small = {"VLLM_CPU_KVCACHE_SPACE": "1", "TORCH_COMPILE_DISABLE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [str(word) for word in words],
        cwd=cwd,
        env=environment(**small, **variables),
        capture_output=True,
        encoding="utf-8",
        timeout=600,
    )
    print(done.stdout[-3000:], done.stderr[-6000:])
    return done


def data(folder):
    """A dataset.json of digits to be said, in a folder whose name has a blank."""
    folder = folder / "my data"
    folder.mkdir()
    texts = {"one": "one two three", "two": "seven", "three": "four four nine zero"}
    (folder / "text").write_text("".join(f"{key} {text}\n" for key, text in texts.items()), encoding="utf-8")
    content = {
        "data_entry": [{"name": "text1", "path": str(folder / "text"), "reader": "text"}],
        "samples": list(texts),
    }
    (folder / "dataset.json").write_text(json.dumps(content), encoding="utf-8")
    return folder / "dataset.json"


def files(root):
    """Everything but the journals, by name; results name the folder that they lie in."""
    found = (path for path in sorted(root.rglob("*")) if path.is_file() and ".journal" not in path.parts)
    return {str(path.relative_to(root)): path.read_bytes().replace(str(root).encode(), b"OUT") for path in found}


def words_of(specifier, config):
    """The options that recipe and command line share."""
    shared = ["--train-config", MODEL / "train.yaml", "--inference-config", DIGITS / "conf" / config]
    return [*shared, "--test-unregistered-specifier", specifier]


def decode(cwd, out, *words):
    """The command line itself, by its own name."""
    module = ["-m", "espnet2_vllm.bin.inference", "--model-checkpoint", WEIGHTS, "--output-dir", out]
    done = run(sys.executable, *module, *words, cwd=cwd)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.fixture(scope="module")
def direct(tmp_path_factory):
    """A set, and what the command line gives for it, in two ranks."""
    folder = tmp_path_factory.mktemp("direct")
    specifier = f"text_to_audio:digits:{data(folder)}"
    shared = [*words_of(specifier, "inference_speak.yaml"), "--num-workers", 2]
    decode(folder, folder / "out", *shared)
    return shared, files(folder / "out")


@pytest.mark.slow
@pytest.mark.parametrize(("recipe", "stage"), [("bagpiper", 5), ("bagpiper_tts", 3)])
def test_run_sh_with_one_word_changed_decodes(tree, direct, recipe, stage, tmp_path):
    """``run.sh`` puts its own tree first on PYTHONPATH; what comes out is what the command line gives by itself."""
    script = changed(
        tree,
        tmp_path,
        f"egs2/{recipe}/speechlm1/run.sh",
        "espnet2.speechlm.bin.inference",
        "espnet2_vllm.bin.inference",
    )
    shared, expected = direct
    stages = ["--stage", stage, "--stop-stage", stage, "--python", sys.executable]
    words = [*stages, "--export-path", WEIGHTS, *shared, "--inference-output-dir", tmp_path / "out"]
    done = run(script, *words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    assert f"Stage {stage}: inference" in done.stderr and f"results: {tmp_path / 'out'}" in done.stderr
    found = files(tmp_path / "out")
    assert found == expected
    ranks = [json.loads(found[f"text_to_audio_digits/inference_rank{rank}/results.json"]) for rank in (0, 1)]
    assert [list(rank) for rank in ranks] == [["one", "three"], ["two"]]
    assert ranks[0]["one"] == [["assistant", "audio", "OUT/text_to_audio_digits/inference_rank0/one_segment1.wav"]]


@pytest.mark.slow
def test_espnets_smoke_scripts_take_what_is_written(tree, tmp_path):
    """Captions of recordings, a set of dialogues made of them, and a look at the sound of its answers."""
    corpus, folder = tmp_path / "LibriSpeech", tmp_path / "data"
    lines = []
    for number, name in enumerate(("digits1", "digits3", "digits5", "voice"), 1):
        (corpus / "7" / "10").mkdir(parents=True, exist_ok=True)
        shutil.copyfile(DIGITS / "recordings" / f"{name}.flac", corpus / "7" / "10" / f"7-10-000{number}.flac")
        lines.append(f"7-10-000{number} ONE TWO THREE\n")
    (corpus / "7" / "10" / "7-10.trans.txt").write_text("".join(lines), encoding="utf-8")
    script = [sys.executable, tree / "test_utils" / "speechlm" / "prepare_bagpiper_smoke.py", "--librispeech", corpus]
    script += ["--output-dir", folder, "--train-count", 3, "--valid-count", 1]
    assert run(*script, cwd=tmp_path).returncode == 0
    fast = ["--backend", "pytorch"]
    heard = words_of(f"audio_to_text:smoke:{folder / 'all.json'}", "inference_listen.yaml")
    decode(tmp_path, tmp_path / "captions", *heard, *fast, "--num-workers", 2)
    done = run(*script, "--captions", tmp_path / "captions", cwd=tmp_path)
    assert done.returncode == 0 and json.loads(done.stdout)["captions"] is True, done.stderr[-3000:]
    said = words_of(f"dialogue:smoke:{folder / 'tts_all.json'}", "inference_speak.yaml")
    decode(tmp_path, tmp_path / "out", *said, *fast, "--num-workers", 2)
    script = [sys.executable, tree / "test_utils" / "speechlm" / "evaluate_bagpiper_smoke.py", "--expected-count", 4]
    script += [
        "--samples",
        folder / "samples.json",
        "--results",
        tmp_path / "out",
        "--output",
        tmp_path / "report.json",
    ]
    done = run(*script, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    report = json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))
    assert report["summary"]["samples"] == 4 and {one["sample_rate"] for one in report["samples"]} == {16000}


# -- OpusLM: stage 9 of the template -----------------------------------------------------------------------------------
@pytest.mark.slow
def test_stage_9_of_speechlm_sh_with_one_word_changed_decodes(tree, tmp_path):
    """Its list of keys, split by Kaldi's own tool, shares the set among jobs; upstream's module of the name writes nothing."""
    (source,) = golden_models("opuslm")[:1]
    recipe = changed(
        tree,
        tmp_path,
        "egs2/TEMPLATE/speechlm1/speechlm.sh",
        "espnet2.bin.speechlm_inference",
        "espnet2_vllm.bin.speechlm_inference",
    ).parent
    for name in ("utils", "steps", "scripts", "pyscripts"):  # links, which a source distribution leaves out
        (recipe / name).symlink_to(f"../asr1/{name}")
    model = recipe / "exp" / "mine"
    shutil.copytree(source, model, ignore=shutil.ignore_patterns("cases", "trees"), copy_function=shutil.copyfile)
    for path in (model, *model.rglob("*/")):
        path.chmod(0o755)
    (recipe / "data").symlink_to(model / "data")
    task = "codec_ssl_asr"
    content = json.loads((model / "data" / task / "data.json").read_text(encoding="utf-8"))
    uids = content["examples"][:3]
    folder = recipe / "dump" / f"raw_{task}" / "test"
    folder.mkdir(parents=True)
    (folder / "data.json").write_text(json.dumps({**content, "examples": uids}), encoding="utf-8")
    codec = yaml.safe_load((model / "decode_default.yaml").read_text(encoding="utf-8"))["codec_ssl"]["tokenizer"]
    flat = {"search_algo": "greedy_search", "maxlenratio": 0.4, "codec_conf": codec}
    (recipe / "conf" / "flat.yaml").write_text(json.dumps(flat), encoding="utf-8")
    words = [
        "--stage",
        9,
        "--stop_stage",
        9,
        "--task",
        task,
        "--test_sets",
        "test",
        "--tag",
        "mine",
        "--inference_nj",
        2,
    ]
    words += ["--speechlm_exp", "exp/mine", "--inference_model", "model.pth", "--inference_config", "conf/flat.yaml"]
    words += ["--inference_tag", "out", "--inference_args", "--backend pytorch", "--python", sys.executable]
    done = run("./speechlm.sh", *words, cwd=recipe)
    logs = recipe / "exp" / "mine" / "out" / "test" / "log"
    assert done.returncode == 0, [path.read_text(encoding="utf-8")[-1500:] for path in logs.glob("*.log")]
    written = [(logs / f"output.{job}" / "text" / "text").read_text(encoding="utf-8").splitlines() for job in (1, 2)]
    assert [[line.split()[0] for line in lines] for lines in written] == [
        [f"{task}_{uid}_sample0" for uid in uids[:2]], [f"{task}_{uids[2]}_sample0"]
    ]  # fmt: skip
    merge = ["-m", "espnet2_vllm.bin.merge_outputs", "--family", "opuslm", "--data-json", folder / "data.json"]
    merged = run(sys.executable, *merge, "--output-dir", "merged", logs / "output.1", logs / "output.2", cwd=recipe)
    assert merged.returncode == 0 and "3 of 3 utterances have results" in merged.stdout
    command = (logs / "speechlm_inference.1.log").read_text(encoding="utf-8")
    assert f"espnet2_vllm.bin.speechlm_inference --ngpu 0 --data_path_and_name_and_type dump/raw_{task}/test" in command
