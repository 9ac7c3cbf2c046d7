"""Jobs of the recipe: every number of them, cluster launchers, launch.sh, and shellcheck."""

import json
import re
import shutil
import subprocess

import pytest
from recipe_shell import FAKE_PYTHON, MINI_AN4, REPO, TEMPLATE, shell
from test_recipe import BAGPIPER, OPUSLM, checkpoint, load, recipe, run  # noqa: F401

FAKE_QUEUE = REPO / "tests" / "recipe" / "fake_queue.pl"


@pytest.fixture
def prepared(recipe, checkpoint):  # noqa: F811
    """A recipe whose data stages have run."""
    assert run(recipe, *OPUSLM, "--stop_stage", "prepare").returncode == 0
    return recipe


@pytest.mark.parametrize("jobs", [1, 6, 7, 8, 70])
def test_any_number_of_jobs_gives_the_same_results(prepared, jobs):
    """1, n - 1, n, n + 1 and 10 n jobs of n = 7 utterances."""
    words = ["--stage", "inference", "--stop_stage", "inference", "--inference_nj", str(jobs), "--inference_dir", "out"]
    done = run(prepared, *OPUSLM, *words)
    assert done.returncode == 0, done.stdout + done.stderr
    results = prepared / "out" / "codec_ssl_plain_tts_all"
    keys = [line.split()[0] for line in (results / "wav.scp").read_text(encoding="utf-8").splitlines()]
    assert len(keys) == 7 and keys == sorted(keys)
    assert len(list((results / "log").glob("speechlm_inference.*.log"))) == min(jobs, 7)
    assert ("7 utterances to share: 7 jobs" in done.stderr) == (jobs > 7)


def test_fewer_jobs_than_before_leave_nothing_stale(prepared):
    words = [*OPUSLM, "--stage", "inference", "--stop_stage", "inference", "--inference_dir", "out"]
    assert run(prepared, *words, "--inference_nj", "5").returncode == 0
    assert run(prepared, *words, "--inference_nj", "2").returncode == 0
    results = prepared / "out" / "codec_ssl_plain_tts_all"
    assert len((results / "wav.scp").read_text(encoding="utf-8").splitlines()) == 7
    assert len(list((results / "log").glob("speechlm_inference.*.log"))) == 2


@pytest.mark.parametrize("script", ["./speechlm_vllm.sh", "./run.sh"])
@pytest.mark.parametrize("jobs", ["0", "-1", "two", "1.5"])
def test_a_number_of_jobs_that_is_none_is_refused_at_once(recipe, script, jobs):  # noqa: F811
    done = shell(script, "--inference_nj", jobs, cwd=recipe)
    assert done.returncode == 2 and f"--inference_nj '{jobs}': expected a number of at least 1" in done.stderr
    assert "Stage" not in done.stdout and not (recipe / "exp").exists()


def test_a_hint_says_that_one_engine_batches(prepared):
    words = [*OPUSLM, "--stage", "inference", "--stop_stage", "inference"]
    assert "One engine batches all utterances by itself" in run(prepared, *words, "--inference_nj", "1").stdout
    many = run(prepared, *words, "--inference_nj", "3").stdout
    assert "Hint: 3 jobs are 3 engines on this machine" in many and "--inference_nj 1" in many
    assert "Hint:" not in run(prepared, *words, "--inference_nj", "3", "--backend", "pytorch").stdout


@pytest.mark.parametrize(
    ("arguments", "gpus"),
    [
        ("--minlen 3", 1),
        ("--device cuda:0", 1),
        ("--data_parallel_size 2", 2),
        ("--tensor-parallel-size 4 --tensor-parallel-size 2", 2),
    ],
)
def test_gpus_of_a_job(prepared, arguments, gpus):
    """``--ngpu`` of ESPnet's recipes is of the training; a job takes as many where its options have a use for them."""
    words = ["--stage", "inference", "--stop_stage", "inference", "--inference_nj", "1", "--inference_dir", "out"]
    fixed = ["--data_name", "mini_an4", "--speechlm_exp", "model", "--python", FAKE_PYTHON, "--gpu_inference", "true"]
    more = ["--ngpu", "2", "--inference_args", arguments]
    done = shell("./speechlm_vllm.sh", *fixed, *OPUSLM, *words, *more, cwd=prepared, CUDA_VISIBLE_DEVICES="4,5")
    assert done.returncode == 0, done.stdout + done.stderr
    log = (prepared / "out/codec_ssl_plain_tts_all/log/speechlm_inference.1.log").read_text(encoding="utf-8")
    assert f"--ngpu {gpus} " in log and arguments in log
    assert ("--ngpu 2 is of the training" in done.stdout) == (gpus == 1)


@pytest.mark.parametrize(
    ("arguments", "gpus"),
    [
        ("--data_parallel_size 4", 4),
        ("--engine_option tensor_parallel_size=2 --data-parallel-size=2", 4),
        ("--tensor-parallel-size 4 --engine_option distributed_executor_backend=ray", 1),
        ("--device cuda:1", 2),
        ("--device=cuda:1 --tensor_parallel_size 2", 2),
    ],
)
def test_a_job_has_the_gpus_that_its_options_take(prepared, arguments, gpus):
    """Without ``--ngpu``. Those of Ray are its own."""
    words = ["--stage", "inference", "--stop_stage", "inference", "--gpu_inference", "true", "--inference_nj", "1"]
    fixed = ["--data_name", "mini_an4", "--speechlm_exp", "model", "--python", FAKE_PYTHON, "--inference_dir", "out"]
    more = ["--inference_args", arguments]
    done = shell("./speechlm_vllm.sh", *fixed, *OPUSLM, *words, *more, cwd=prepared, CUDA_VISIBLE_DEVICES="0,1,2,3")
    assert done.returncode == 0, done.stdout + done.stderr
    log = (prepared / "out/codec_ssl_plain_tts_all/log/speechlm_inference.1.log").read_text(encoding="utf-8")
    assert f"--ngpu {gpus} " in log and arguments in log


@pytest.mark.parametrize(
    ("visible", "arguments", "jobs"), [("4,5,7", "--minlen 3", 3), ("4,5", "--device cuda:1", 1), ("", "", 1)]
)
def test_a_job_for_each_gpu_that_is_left(prepared, visible, arguments, jobs):
    """Those of the machine that ``CUDA_VISIBLE_DEVICES`` names."""
    words = [
        "--stage",
        "inference",
        "--stop_stage",
        "inference",
        "--inference_dir",
        "out",
        "--inference_args",
        arguments,
    ]
    fixed = ["--data_name", "mini_an4", "--speechlm_exp", "model", "--python", FAKE_PYTHON]
    done = shell("./speechlm_vllm.sh", *fixed, *OPUSLM, *words, cwd=prepared, CUDA_VISIBLE_DEVICES=visible)
    assert done.returncode == 0, done.stdout + done.stderr
    logs = list((prepared / "out/codec_ssl_plain_tts_all/log").glob("speechlm_inference.*.log"))
    assert len(logs) == jobs and "Hint:" not in done.stdout
    gpus = 0 if not visible else len(visible.split(",")) // jobs
    assert all(f"--ngpu {gpus} " in log.read_text(encoding="utf-8") for log in logs)


@pytest.mark.parametrize("launcher", ["queue", "slurm", "run"])
def test_a_cluster_launcher_of_the_users_tree(prepared, launcher, tmp_path):
    """``cmd.sh`` chooses it; the whole recipe runs under ``bash -euo pipefail``."""
    tree = tmp_path / "espnet" / "egs2" / "TEMPLATE" / "asr1" / "utils"
    tree.mkdir(parents=True)
    shutil.copy(FAKE_QUEUE, tree / f"{launcher}.pl")
    (prepared / "conf" / f"{launcher}.conf").write_text("command qsub -V\n", encoding="utf-8")
    words = ["--stage", "inference", "--stop_stage", "inference", "--inference_nj", "3", "--inference_dir", "out"]
    fixed = ["--data_name", "mini_an4", "--speechlm_exp", "model", "--python", FAKE_PYTHON, "--gpu_inference", "false"]
    variables = {
        "cmd_backend": launcher,
        "ESPNET_ROOT": str(tmp_path / "espnet"),
        "FAKE_QUEUE_LOG": str(tmp_path / "log"),
    }
    arguments = ["bash", "-euo", "pipefail", "speechlm_vllm.sh", *fixed, *OPUSLM, *words]
    done = shell(*arguments, cwd=prepared, **variables)
    assert done.returncode == 0, done.stdout + done.stderr
    called = (tmp_path / "log").read_text(encoding="utf-8")
    assert called.startswith(f"{launcher}.pl --config conf/{launcher}.conf --gpu 0 JOB=1:3 out/")
    log = (prepared / "out/codec_ssl_plain_tts_all/log/speechlm_inference.3.log").read_text(encoding="utf-8")
    assert "--output_dir out/codec_ssl_plain_tts_all/log/output.3" in log and "split3/3/data.json" in log
    lost = shell(*arguments, cwd=prepared, FAKE_LOSE="mwhw-an152-b", **variables)
    assert lost.returncode == 1 and f"{launcher}.pl: 1 / 3 failed" in lost.stderr
    assert "6 of 7 utterances have results" in lost.stdout


# -- launch.sh ---------------------------------------------------------------------------------------------------------
@pytest.fixture
def launch(recipe):  # noqa: F811
    """An experiment directory as ESPnet's trainer leaves it, and a registered data set."""
    (recipe / "launch.sh").symlink_to(TEMPLATE / "launch.sh")
    model = recipe / "exp" / "x" / "checkpoints" / "step_50" / "global_step50" / "mp_rank_00_model_states.pt"
    model.parent.mkdir(parents=True)
    model.write_text("", encoding="utf-8")
    (recipe / "exp" / "x" / "train.yaml").write_text("", encoding="utf-8")
    (recipe / "set").mkdir()
    dataset = recipe / "set" / "dataset.json"
    dataset.write_text(json.dumps({"data_entry": [], "samples": ["a", "b", "c"]}), encoding="utf-8")
    (recipe / "registry.yaml").write_text(f"mine: {{path: {dataset}}}\n", encoding="utf-8")

    def run_launch(*words, **variables):
        fixed = ["--inference-config", "conf/inference_text.yaml", "--python", FAKE_PYTHON, "--backend", "pytorch"]
        return shell("./launch.sh", *fixed, *words, cwd=recipe, ESPNET_DATASET_REGISTRY="registry.yaml", **variables)

    return run_launch


@pytest.mark.parametrize("stage", ["3", "infer", "inference"])
def test_launch_by_number_and_by_name(recipe, launch, stage):  # noqa: F811
    words = ["--stage", stage, "--exp-dir", "exp/x", "--inference-step", "50", "--inference-nj", "2"]
    done = launch(*words, "--test-unregistered-specifier", "text_to_audio:mine:set/dataset.json:0.5")
    assert done.returncode == 0, done.stdout + done.stderr
    out = recipe / "exp" / "x" / "inference" / "inference_text_step_50"
    assert sorted(load(out / "text_to_audio_mine" / "results.json")) == ["a", "b", "c"]
    assert "global_step50/mp_rank_00_model_states.pt" in (out / "logs" / "inference.2.log").read_text(encoding="utf-8")


def test_launch_of_an_export_and_a_path_with_blanks(recipe, launch):  # noqa: F811
    """As stage 5 of today's run.sh; several sets in one option, as before."""
    (recipe / "exp" / "sft" / "export").mkdir(parents=True)
    for path in (recipe / "exp" / "sft" / "export" / "model.pt", recipe / "exp" / "sft" / "train.yaml"):
        path.write_text("x", encoding="utf-8")
    other = recipe / "my 'data' set" / "dataset.json"
    other.parent.mkdir()
    shutil.copy(recipe / "set" / "dataset.json", other)
    words = ["--stage", "5", "--stop-stage", "5", "--exp-dir", "exp/sft", "--num-workers", "1"]
    done = launch(*words, "--test-specifier", f"text_to_audio:mine:{other}")
    assert done.returncode == 0, done.stdout + done.stderr
    out = recipe / "exp" / "sft" / "inference" / "inference_text"
    assert sorted(load(out / "text_to_audio_mine" / "results.json")) == ["a", "b", "c"]
    both = launch(*words, "--test-specifier", "text_to_audio:one:set/dataset.json  dialogue:two:set/dataset.json:2")
    assert both.returncode == 0, both.stdout + both.stderr
    assert {p.parent.name for p in out.glob("*/results.json")} == {
        "text_to_audio_mine",
        "text_to_audio_one",
        "dialogue_two",
    }


def test_launch_with_a_registered_set(recipe, launch):  # noqa: F811
    words = ["--exp_dir", "exp/x", "--inference_step", "50", "--inference_nj", "9"]
    done = launch(*words, "--test_registered_specifier", "text_to_audio:mine", "--inference_output_dir", "out")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "9 jobs asked for, 3 utterances to share: 3 jobs" in done.stdout
    assert sorted(load(recipe / "out" / "text_to_audio_mine" / "results.json")) == ["a", "b", "c"]
    lost = launch(
        *words, "--test_registered_specifier", "text_to_audio:mine", "--inference_output_dir", "o", FAKE_LOSE="b"
    )
    assert lost.returncode == 1 and "2 of 3 utterances have results" in lost.stdout
    outside = launch(*words, "--test_unregistered_specifier", "text_to_audio:../x:set/dataset.json")
    assert outside.returncode == 2 and "data set '../x': its name is that of a directory" in outside.stderr
    unknown = launch(*words, "--test_registered_specifier", "text_to_audio:other")
    assert unknown.returncode != 0 and "'other' is not registered; registered are mine" in unknown.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--stage", "train"], "stage train belongs to ESPnet's own recipe"),
        (["--stage", "4"], "stage 4 belongs to ESPnet's own recipe"),
        (["--stage", "6"], "--stage '6': expected infer, 3 or 5"),
        ([], "one of --test-unregistered-specifier and --test-registered-specifier is needed"),
        (["--test-registered-specifier", "x"], "--exp-dir is needed"),
        (["--num-workers", "0"], "--num-workers '0'"),
    ],
)
def test_launch_says_what_is_missing(launch, words, message):
    done = launch(*words)
    assert done.returncode == 2 and message in done.stderr


# -- shellcheck --------------------------------------------------------------------------------------------------------
def test_shell_scripts_pass_shellcheck():
    program = shutil.which("shellcheck")
    if program is None:
        pytest.skip("shellcheck is not installed (tools/setup.sh does)")
    places = [TEMPLATE, MINI_AN4, REPO / "tools", REPO / "tests" / "recipe"]
    scripts = sorted(
        {path.resolve() for place in places for path in place.rglob("*.sh")} | {FAKE_QUEUE, REPO / ".ci" / "run"}
    )
    # What is sourced is looked at by itself; which of two files is sourced depends on the tree (SC1090, SC1091).
    command = [program, "--exclude", "SC1090,SC1091", "--shell", "bash", *map(str, scripts)]
    done = subprocess.run(command, capture_output=True, encoding="utf-8")
    assert done.returncode == 0, re.sub(r"\n{2,}", "\n", done.stdout)[:4000]
