"""Makes tests/golden: ``python tests/select_golden.py RECORDINGS TARGET``.

RECORDINGS is a full set of recordings, far larger than a repository should be. Of it are kept: four models, of their
recordings some of each kind, and of the arrays what the tests compare. README.md in tests/golden tells what that is.
"""

import argparse
import json
import pathlib
import re
import shutil

import numpy as np
import torch

# Per model: cases, result trees, data sets.
OPUSLM = {
    "tiny-llama": (
        "asr_code0 asr_eos asr_force asr_nbest3_topk asr_one_frame asr_teacher_force audio_dialogue_1turn "
        "audio_dialogue_last audio_dialogue_mixed_force audiolm_continue plain_tts_eos plain_tts_force se_eos "
        "text_dialogue_nosys_force text_dialogue_sys textlm_continue tse_force tts_eos tts_force tts_nbest3_topk "
        "tts_short_silent tts_teacher_force",
        "codec_ssl_tts codec_ssl_asr_nproc2 text_dialogue",
        "audio_dialogue codec_ssl_asr codec_ssl_audiolm codec_ssl_plain_tts codec_ssl_se codec_ssl_tse codec_ssl_tts "
        "codec_ssl_tts_arkspk text_dialogue textlm",
    ),
    "tiny-olmo2": (
        "aac_eos asr_eos asr_teacher_force audio_dialogue_1turn tts_eos tts_force text_dialogue_nosys_force",
        "text_dialogue",
        "aac_codecssl audio_dialogue codec_ssl_asr codec_ssl_tts text_dialogue",
    ),
}
BAGPIPER = {
    "qwen3-s8-cb64": (
        "audio_cfg1_cut_by_max_step audio_cfg1_eos audio_cfg3_eos audio_eot_then_text enforce_audio_cut_then_text "
        "enforce_text_audio_text_cut multi_turn_text num_hypo2_greedy_audio sys_two_audio_in_text_out text_cfg2_eos "
        "text_cut_by_max_step text_eos text_eot_then_text text_min_step0_empty token_id_zero_in_text unicode_text "
        "sampling_0_audio_cfg1_top20 sampling_0_audio_cfg3_top20 sampling_0_audio_cfg3_top5 sampling_0_text_cfg1_top20",
        "tts dialogue",
        "",
    ),
    "qwen3-s4-cb32-contaudio": (
        "cont_audio_text_then_audio multi_turn_both_audio_kinds sampling_0_text_cfg1_top20 two_cont_audio_to_text",
        "asr_kaldi",
        "",
    ),
}
# OLMo-2's weights are what its recordings are here for: its waveforms are left out, and with them its own codec's weights.
CODEC_OF = {"tiny-olmo2": "tiny-llama"}
WAVEFORMS = {"tiny-llama/plain_tts_eos": "writer.wav_", "tiny-llama/audio_dialogue_1turn": "writer.wav_pcm16."}
LOGIT_STEPS = {"tts_eos": 4, "enforce_text_audio_text_cut": 3}  # of other cases as few as tell whether all went well
# What no test compares: ESPnet's scores, margins, and what follows from other arrays.
UNUSED = re.compile(
    r"cont_encoder_out_.*|.*[._](scores_delay|segment_scores(\.hyp\d)?|logprob_delay|margin_delay|tokens_undelayed|margins)"
)
DISTRIBUTIONS = (0, 4, 7, 8, 9)  # cases of logits_to_tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recordings", type=pathlib.Path)
    parser.add_argument("target", type=pathlib.Path)
    args = parser.parse_args()
    for family, models, select in (("opuslm", OPUSLM, opuslm_model), ("bagpiper", BAGPIPER, bagpiper_model)):
        source, target = args.recordings / family, args.target / family
        if target.exists():
            shutil.rmtree(target)
        for name, (cases, trees, data) in models.items():
            select(source / name, target / name)
            for case in cases.split():
                copy(source, target, f"{name}/cases/{case}.json")
                arrays(source, target, f"{name}/cases/{case}.npz")
            for folder in [f"trees/{tree}" for tree in trees.split()] + [f"data/{one}" for one in data.split()]:
                copy(source / name, target / name, folder)
    opuslm_functions(args.recordings / "opuslm/functions", args.target / "opuslm/functions")
    bagpiper_functions(args.recordings / "bagpiper/functions", args.target / "bagpiper/functions")


def copy(source: pathlib.Path, target: pathlib.Path, *names: str) -> None:
    """Files or folders by relative name, writable whatever the original is."""
    for name in names:
        if (source / name).is_dir():
            copy(source, target, *(f"{name}/{path.name}" for path in sorted((source / name).iterdir())))
            continue
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source / name, target / name)


def read_json(path: pathlib.Path):
    return json.loads(path.read_text(encoding="utf-8"))


def write_json(path: pathlib.Path, data) -> None:
    path.write_text(json.dumps(data) + "\n", encoding="utf-8")


# -- models ------------------------------------------------------------------------------------------------------------
def opuslm_model(source: pathlib.Path, target: pathlib.Path) -> None:
    """Without initial weights of the backbone, which the checkpoint overwrites, and without the codec's discriminator."""
    copy(source, target, "config.yaml", "model.pth", "decode_default.yaml", "codec/config.yaml")
    names = [path.name for path in (source / "hf_backbone").iterdir() if path.name != "model.safetensors"]
    copy(source / "hf_backbone", target / "hf_backbone", *names)
    codec = "codec/360epoch.pth"
    if source.name in CODEC_OF:
        (target / codec).symlink_to(f"../../{CODEC_OF[source.name]}/{codec}")
        return
    weights = torch.load(source / codec, map_location="cpu", weights_only=True)
    torch.save({k: v for k, v in weights.items() if ".discriminator." not in k}, target / codec)


def bagpiper_model(source: pathlib.Path, target: pathlib.Path) -> None:
    copy(source, target, "train.yaml", "mp_rank_00_model_states.pt", "backbone", "codec")
    for path in source.glob("Qwen/*/*config.json"):  # of the audio encoder, whose weights are in the checkpoint
        copy(source, target, str(path.relative_to(source)))


# -- arrays ------------------------------------------------------------------------------------------------------------
def arrays(source: pathlib.Path, target: pathlib.Path, name: str) -> None:
    """A case's arrays, with logits of fewer steps."""
    model, _, case = name.removesuffix(".npz").split("/")
    waveforms = WAVEFORMS.get(f"{model}/{case}", "no waveforms")
    with np.load(source / name) as recorded:
        kept = {
            key: fewer_steps(
                key, recorded[key], LOGIT_STEPS.get(case, 1 + any("uncond" in other for other in recorded))
            )
            for key in recorded
            if not UNUSED.fullmatch(key) and (not key.startswith("writer.wav_") or key.startswith(waveforms))
        }
    save(target / name, kept)


def fewer_steps(key: str, array: np.ndarray, steps: int) -> np.ndarray:
    """Logits of a generated segment. OpusLM: the first ``steps``; Bagpiper: ``steps``, the last among them, and of guidance 1."""
    if ".logits_stream" in key:
        per_hypothesis = array.ndim > (2 if key.endswith("0") else 3)
        return array[:, :steps] if per_hypothesis else array[:steps]
    if re.fullmatch(r"seg\d+_(cfg|uncond)_logits_(s0|rest)", key):
        return array[:1]
    if re.fullmatch(r"seg\d+_(logits_(s0|rest)|logit_steps)", key):
        return array[sorted({*range(min(steps - 1, len(array))), len(array) - 1})]
    return array


def save(path: pathlib.Path, kept: dict[str, np.ndarray]) -> None:
    assert kept, f"{path}: nothing is kept"
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(path, **kept)


def filtered(source: pathlib.Path, target: pathlib.Path, name: str, pattern: str) -> None:
    """Arrays whose whole name matches ``pattern``."""
    with np.load(source / name) as recorded:
        save(target / name, {key: recorded[key] for key in recorded if re.fullmatch(pattern, key)})


def opuslm_functions(source: pathlib.Path, target: pathlib.Path) -> None:
    copy(source, target, "delay.npz", "build_mask.json", "build_mask.npz")
    parsed = read_json(source / "parse_sequence.json")
    for model, (_, _, data) in OPUSLM.items():
        copy(source, target, f"tokenizer_{model}.json")
        sets = "|".join(data.split())
        filtered(source, target, f"preprocess_{model}.npz", rf"((?!loss_region).*:)?({sets})/.*\.dec_seq")
        parsed[model] = {key: value for key, value in parsed[model].items() if re.match(rf"({sets})/", key)}
    write_json(target / "parse_sequence.json", parsed)
    waveforms = r"T(1|10|11|12)\.(codes|wav_codec_tokenizer|wav_audio_coding)|batch2\..*|encode.*"
    filtered(source, target, "codec_tiny-llama.npz", waveforms)
    cases = [case for case in read_json(source / "logits_to_tokens.json") if case["case"] in DISTRIBUTIONS]
    write_json(target / "logits_to_tokens.json", cases)
    filtered(source, target, "logits_to_tokens.npz", rf"case({'|'.join(map(str, DISTRIBUTIONS))})\..*")


def bagpiper_functions(source: pathlib.Path, target: pathlib.Path) -> None:
    """Vocabularies and masks of all recorded models, which need nothing else; the rest of the selected ones."""
    copy(source, target, "delay.npz", "delay.json")
    copy(source, target, *(path.name for kind in ("vocab", "masks") for path in sorted(source.glob(f"{kind}_*"))))
    for model in BAGPIPER:
        copy(source, target, f"preprocess_{model}.json", f"forward_{model}.npz")
        filtered(source, target, f"preprocess_{model}.npz", r"wav_.*|.*_ids")
        filtered(source, target, f"codec_{model}.npz", r"[a-z_]+[01]")


if __name__ == "__main__":
    main()
