"""The recipe from one end to the other, with stand-ins for the two decoders."""

import json
import os
import pathlib
import shutil

import pytest
from conftest import REPO
from recipe_shell import FAKE_PYTHON, MINI_AN4, TEMPLATE, shell


@pytest.fixture
def recipe(tmp_path) -> pathlib.Path:
    """A copy of the mini_an4 recipe without results, whose links lead into the template."""
    target = tmp_path / "egs" / "mini_an4" / "speechlm1"
    ignored = shutil.ignore_patterns("exp", "data", "dump", "downloads")
    shutil.copytree(MINI_AN4, target, symlinks=False, ignore=ignored)
    for name in ("cmd.sh", "path.sh", "utils", "speechlm_vllm.sh"):
        link = target / name
        shutil.rmtree(link) if link.is_dir() else link.unlink()
        link.symlink_to(TEMPLATE / name)
    return target


@pytest.fixture
def checkpoint(recipe):
    folder = recipe / "model"
    folder.mkdir()
    for name in ("config.yaml", "model.pth", "valid.acc.ave.pth", "train.yaml", "mp_rank_00_model_states.pt"):
        (folder / name).write_text("", encoding="utf-8")
    return folder


def run(recipe, *words, **variables):
    fixed = ("--data_name", "mini_an4", "--speechlm_exp", "model", "--python", FAKE_PYTHON, "--gpu_inference", "false")
    return shell("./speechlm_vllm.sh", *fixed, *words, cwd=recipe, **variables)


OPUSLM = ("--task", "codec_ssl_plain_tts", "--test_sets", "all", "--inference_config", "conf/decode_opuslm.yaml")
BAGPIPER = (
    *("--family", "bagpiper", "--task", "dialogue", "--test_sets", "all"),
    *("--inference_config", "conf/inference_text.yaml"),
)


def load(path):
    return json.loads(path.read_text(encoding="utf-8"))


def test_opuslm_from_recordings_to_merged_results(recipe, checkpoint):
    done = run(recipe, *OPUSLM, "--inference_nj", "3", "--nbest", "2")
    assert done.returncode == 0, done.stdout + done.stderr
    results = checkpoint / "decode_opuslm_valid.acc.ave" / "codec_ssl_plain_tts_all"
    lines = (results / "wav.scp").read_text(encoding="utf-8").splitlines()
    assert len(lines) == 14 and lines == sorted(lines)
    assert lines[0].startswith("codec_ssl_plain_tts_fash-an251-b_sample0 ")
    assert sorted(path.name for path in (results / "log").glob("split*/*")) == ["1", "2", "3"]
    log = (results / "log" / "speechlm_inference.2.log").read_text(encoding="utf-8")
    assert "--ngpu 0 --nbest 2 --model_file model/valid.acc.ave.pth --train_config model/config.yaml" in log
    assert "--backend vllm" in log and "# Ended (code 0)" in log
    assert "Successfully finished" in done.stdout


def test_bagpiper_from_transcripts_to_merged_results(recipe, checkpoint):
    done = run(recipe, *BAGPIPER, "--inference_nj", "2", "--backend", "pytorch")
    assert done.returncode == 0, done.stdout + done.stderr
    results = checkpoint / "inference_text_mp_rank_00_model_states" / "dialogue_all"
    assert sorted(path.name for path in results.glob("inference_rank*")) == ["inference_rank0", "inference_rank1"]
    assert len(load(results / "results.json")) == 7
    assert "over 7 utterances, 0 of them without a result" in done.stdout


@pytest.mark.parametrize("option", ["--num-workers 2", "--num-workers 1 --num-workers 2"])
def test_ranks_of_workers_are_merged_too(recipe, checkpoint, option):
    done = run(recipe, *BAGPIPER, "--inference_nj", "2", "--inference_args", option, "--inference_dir", "out")
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(load(recipe / "out" / "dialogue_all" / "results.json")) == 7
    assert len(list((recipe / "out" / "dialogue_all").glob("inference_rank*"))) == 4


def test_result_directories_are_named_by_espnets_rules(recipe, checkpoint):
    done = run(recipe, *OPUSLM, "--inference_args", "--seed 3 --dtype float32", "--inference_model", "model.pth")
    assert done.returncode == 0, done.stdout + done.stderr
    assert (checkpoint / "decode_opuslm_seed3_dtypefloat32_model" / "codec_ssl_plain_tts_all" / "wav.scp").is_file()


@pytest.mark.parametrize("first, last", [("inference", "inference"), ("9", "9"), ("decode", "09")])
def test_stages_by_name_and_by_number(recipe, checkpoint, first, last):
    assert run(recipe, *OPUSLM, "--stop_stage", "prepare").returncode == 0
    assert not list(checkpoint.glob("decode*"))
    done = run(recipe, *OPUSLM, "--stage", first, "--stop_stage", last)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Stage 5" not in done.stdout and "Stage 9 (inference)" in done.stdout and "Stage 10" not in done.stdout


def test_stage_9_takes_json_files_of_espnets_own_recipe(recipe, checkpoint):
    assert run(recipe, *OPUSLM, "--stop_stage", "5").returncode == 0
    shutil.move(recipe / "dump" / "raw_codec_ssl_plain_tts_mini_an4", recipe / "dump" / "elsewhere")
    data = recipe / "dump" / "elsewhere" / "all" / "data.json"
    data.write_text(
        data.read_text(encoding="utf-8").replace("raw_codec_ssl_plain_tts_mini_an4", "elsewhere"), encoding="utf-8"
    )
    words = [
        "--stage",
        "9",
        "--stop_stage",
        "9",
        "--test_jsons",
        "dump/elsewhere/all/data.json",
        "--inference_dir",
        "out",
    ]
    espnet = [
        "--num_nodes",
        "1",
        "--codec_choice",
        "ESPnet",
        "--fs",
        "16000",
        "--train_jsons",
        "x",
        "--skip_train",
        "true",
    ]
    done = run(recipe, *words, *espnet, "--inference_config", "conf/decode_opuslm.yaml")
    assert done.returncode == 0, done.stdout + done.stderr
    assert (recipe / "out" / "codec_ssl_plain_tts_all" / "wav.scp").is_file()


def test_more_jobs_than_utterances(recipe, checkpoint):
    done = run(recipe, *OPUSLM, "--inference_nj", "32")
    assert done.returncode == 0
    assert "32 jobs asked for, 7 utterances to share: 7 jobs" in done.stderr
    done = run(recipe, *BAGPIPER, "--inference_nj", "32")
    assert done.returncode == 0
    assert "32 jobs asked for, 7 utterances to share: 7 jobs" in done.stdout


@pytest.mark.parametrize("words", [OPUSLM, BAGPIPER])
def test_a_lost_utterance_fails_the_stage_and_loses_no_other(recipe, checkpoint, words):
    done = run(recipe, *words, "--inference_nj", "2", "--inference_dir", "out", FAKE_LOSE="mwhw-an152-b")
    assert done.returncode == 1
    assert "6 of 7 utterances have results" in done.stdout
    assert "merge_outputs: mwhw-an152-b: no job has written an outcome of it" in done.stderr
    assert "run.py: 1 / 2 failed" in done.stderr and "# Ended (code 1)" in done.stderr
    (summary,) = (recipe / "out").glob("*/summary.json")
    assert load(summary)["missing"] == ["mwhw-an152-b"]


def test_a_set_that_cannot_be_read_keeps_no_other_from_being_decoded(recipe, checkpoint):
    assert run(recipe, *OPUSLM, "--stop_stage", "5").returncode == 0
    (recipe / "empty").mkdir()
    (recipe / "empty" / "data.json").write_text(
        '{"task": "x", "data_files": ["a,b,c"], "examples": []}', encoding="utf-8"
    )
    jsons = "empty/data.json none/data.json dump/raw_codec_ssl_plain_tts_mini_an4/all/data.json"
    done = run(recipe, *OPUSLM, "--stage", "9", "--stop_stage", "9", "--inference_dir", "out", "--test_jsons", jsons)
    assert done.returncode == 1
    assert "empty/data.json: 0 utterances" in done.stderr
    assert "none/data.json" in done.stderr
    assert (recipe / "out" / "codec_ssl_plain_tts_all" / "wav.scp").is_file()


@pytest.mark.parametrize(
    "words, code, message",
    [
        (["--stage", "infer_all"], 2, "--stage 'infer_all': expected a number or one of data, format, prepare"),
        (["--stage", "9", "--stop_stage", "1"], 2, "nothing would run"),
        (["--backend", "tensorrt"], 2, "--backend 'tensorrt': expected one of vllm pytorch"),
        (["--family", "x"], 2, "--family 'x': expected one of opuslm bagpiper"),
        (["--nbest", "0"], 2, "--nbest '0': expected a number of at least 1"),
        (["--inference_nj", "none", "--stage", "9"], 2, "--inference_nj 'none'"),
        (["--gpu_inference", "maybe"], 2, "--gpu_inference takes true or false"),
        (["--nbset", "2"], 2, "unknown option --nbset"),
        (["positional"], 2, "no positional arguments are taken, got 'positional'"),
        (["--test_sets", "dev"], 1, "no directory data/dev"),
        (["--dumpdir", "my dump"], 2, "--dumpdir 'my dump': sets are listed with blanks between them"),
        (["--test_sets", ""], 2, "--test_sets is needed"),
        (["--speechlm_exp", "nowhere", "--stage", "9"], 1, "no such file: nowhere/valid.acc.ave.pth"),
        (["--inference_config", "nowhere.yaml", "--stage", "9"], 1, "no such file: nowhere.yaml"),
        (["--task", "audio_dialogue", "--stop_stage", "5"], 2, "expected one of codec_ssl_plain_tts"),
        (["--task", "codec_ssl_tts", "--stop_stage", "5"], 2, "--ssl_checkpoint_path is needed"),
    ],
)
def test_what_cannot_be_used_is_said_at_once(recipe, checkpoint, words, code, message):
    done = run(recipe, *OPUSLM, *words)
    assert (done.returncode, message in done.stderr) == (code, True), done.stdout + done.stderr


def test_a_recording_that_cannot_be_read_costs_itself_and_the_exit_code(recipe, checkpoint):
    """Through all stages: the others are formatted, prepared, decoded and scored."""
    words = ("--family", "bagpiper", "--task", "audio_to_text", "--test_sets", "all", "--inference_config")
    words = (*words, "conf/inference_text.yaml", "--inference_dir", "out")
    assert run(recipe, *words, "--stop_stage", "data").returncode == 0
    path = recipe / "data" / "all" / "wav.scp"
    key, *_ = path.read_text(encoding="utf-8").split(maxsplit=1)
    path.write_text(path.read_text(encoding="utf-8").replace(f"{key} ", f"{key} gone/"), encoding="utf-8")
    done = run(recipe, *words, "--stage", "format")
    assert done.returncode == 1, done.stdout + done.stderr
    assert f"format_audio: {key}: " in done.stderr and "6 of 6 utterances have results" in done.stdout
    assert "not every recording could be read: dump/audio_raw_audio_to_text_mini_an4/all" in done.stderr
    # Nothing can be read: what the last run left is not taken for this one's.
    path.write_text(f"{key} gone.wav\n", encoding="utf-8")
    done = run(recipe, *words, "--stage", "format")
    assert done.returncode == 1 and "Stage 5" not in done.stdout


def test_sets_of_one_name_do_not_replace_one_another(recipe, checkpoint):
    assert run(recipe, *OPUSLM, "--stop_stage", "5").returncode == 0
    shutil.copytree(recipe / "dump" / "raw_codec_ssl_plain_tts_mini_an4", recipe / "dump" / "other")
    jsons = "dump/raw_codec_ssl_plain_tts_mini_an4/all/data.json dump/other/all/data.json"
    done = run(recipe, *OPUSLM, "--stage", "9", "--stop_stage", "9", "--inference_dir", "out", "--test_jsons", jsons)
    assert done.returncode == 1 and done.stdout.count("7 of 7 utterances have results") == 1
    assert "dump/other/all/data.json is not decoded: its results would replace those of dump/raw_" in done.stdout


def test_paths_with_blanks_and_a_set_in_the_working_directory(recipe, checkpoint):
    assert run(recipe, *OPUSLM, "--stop_stage", "5").returncode == 0
    checkpoint.rename(recipe / "my model")
    shutil.copy(recipe / "conf" / "decode_opuslm.yaml", recipe / "my decode.yaml")
    shutil.copy(recipe / "dump" / "raw_codec_ssl_plain_tts_mini_an4" / "all" / "data.json", recipe)
    words = ["--speechlm_exp", "my model", "--inference_config", "my decode.yaml", "--test_jsons", "data.json"]
    done = run(recipe, *OPUSLM, "--stage", "9", *words, "--inference_nj", "2")
    assert done.returncode == 0, done.stdout + done.stderr
    results = recipe / "my model" / "my decode_valid.acc.ave" / "codec_ssl_plain_tts_speechlm1"
    assert len((results / "wav.scp").read_text(encoding="utf-8").splitlines()) == 7


def test_help_lists_the_stages(recipe):
    done = shell("./speechlm_vllm.sh", "--help", cwd=recipe)
    assert done.returncode == 0
    for name in ("data", "format", "prepare", "inference", "score", "--inference_nj", "--test_jsons"):
        assert name in done.stdout


def test_inside_an_espnet_tree_its_own_scripts_are_used(recipe, checkpoint, tmp_path):
    assert run(recipe, *OPUSLM, "--stop_stage", "5").returncode == 0
    for name in ("cmd.sh", "path.sh", "utils"):
        (recipe / name).unlink()
    (recipe / "utils").mkdir()
    shutil.copy(TEMPLATE / "utils" / "parse_options.sh", recipe / "utils")
    launcher = recipe / "utils" / "queue.pl"
    launcher.write_text(
        f'#!/usr/bin/env bash\necho "queue.pl $*" >> queue.txt\nexec {TEMPLATE}/utils/run.py "$@"\n', encoding="utf-8"
    )
    launcher.chmod(0o755)
    (recipe / "cmd.sh").write_text(
        'export decode_cmd="utils/queue.pl --mem 8G" cuda_cmd=utils/queue.pl\n', encoding="utf-8"
    )
    (recipe / "path.sh").write_text("export LC_ALL=C OF_ESPNET=1 PATH=$PATH:$UNSET_THERE\n", encoding="utf-8")
    done = run(recipe, *OPUSLM, "--stage", "9", "--stop_stage", "9", "--inference_nj", "2")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "queue.pl --mem 8G --gpu 0 JOB=1:2" in (recipe / "queue.txt").read_text(encoding="utf-8")


def test_a_cluster_launcher_that_is_not_there_is_named(recipe, checkpoint):
    done = run(recipe, *OPUSLM, "--stage", "9", cmd_backend="slurm", MAIN_ROOT=str(recipe))
    assert done.returncode != 0
    assert "no slurm.pl in utils/ or in an ESPnet tree" in done.stderr


def test_the_demonstration_ends_with_its_figures(recipe, tmp_path):
    golden = tmp_path / "golden"
    for model, names in (
        ("opuslm/tiny-llama", ("config.yaml", "model.pth", "hf_backbone", "codec")),
        ("bagpiper/qwen3-s8-cb64", ("train.yaml", "mp_rank_00_model_states.pt", "backbone", "codec")),
        ("bagpiper/qwen3-s4-cb32-contaudio", ("train.yaml", "mp_rank_00_model_states.pt", "backbone", "codec", "Qwen")),
    ):
        (golden / model).mkdir(parents=True)
        for name in names:
            (golden / model / name).write_text("", encoding="utf-8")
    words = ["--golden_root", golden, "--python", FAKE_PYTHON, "--expdir", "exp/demo"]
    done = shell("./run.sh", *words, cwd=recipe)
    assert done.returncode == 0, done.stdout + done.stderr
    last = done.stdout.splitlines()[-7:]
    assert last[0].startswith(f"7 of 7 utterances: {recipe}/exp/demo/opuslm_tiny/results/codec_ssl_plain_tts_all")
    assert last[-1].startswith("42 of 42 utterances in ")
    lost = shell("./run.sh", *words, "--runs", "bagpiper_tts", cwd=recipe, FAKE_LOSE="fcaw-cen8-b")
    assert lost.returncode == 1
    wrong = shell("./run.sh", *words, "--runs", "whisper", cwd=recipe)
    assert wrong.returncode == 2 and "no run named 'whisper'" in wrong.stderr
    os.remove(golden / "opuslm" / "tiny-llama" / "model.pth")
    gone = shell("./run.sh", *words, "--expdir", "exp/other", cwd=recipe)
    assert gone.returncode == 1 and "no model.pth in" in gone.stderr


@pytest.mark.slow
def test_a_speaker_is_extracted_from_recordings_of_two(recipe):
    """Real recordings, mixed; tokenised by ESPnet's classes; decoded, with the speaker's other utterance as the prompt."""
    words = ["--golden_root", REPO / "tests" / "golden", "--runs", "opuslm_tse", "--backend", "pytorch"]
    done = shell("./run.sh", *words, cwd=recipe)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1].startswith("7 of 7 utterances in ")
    (made,) = recipe.glob("dump/raw_codec_ssl_tse_mini_an4/mixed/data.json")
    assert [line.rsplit("/", 1)[1] for line in load(made)["data_files"]] == [
        *("mix.scp,codec_ssl,kaldi_ark", "utt2spk,spk,text", "wav.scp,codec_ssl,kaldi_ark")
    ]
    wavs = list((recipe / "exp/opuslm_tiny/results/codec_ssl_tse_mixed").glob("log/output.1/wav.scp/*.wav"))
    assert len(wavs) == 7


def test_a_run_that_fails_keeps_no_other_from_running(recipe, tmp_path):
    for name in ("config.yaml", "model.pth", "hf_backbone", "codec"):
        path = tmp_path / "golden" / "opuslm" / "tiny-llama" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("", encoding="utf-8")
    words = ["--golden_root", tmp_path / "golden", "--python", FAKE_PYTHON, "--runs", "opuslm_tts opuslm_dialogue"]
    done = shell("./run.sh", *words, cwd=recipe, FAKE_LOSE="fcaw-cen8-b")
    assert done.returncode == 1
    assert [line[:17] for line in done.stdout.splitlines()[-3:]] == [
        "6 of 7 utterances",
        "6 of 7 utterances",
        "12 of 14 utteranc",
    ]
