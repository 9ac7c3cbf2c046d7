"""Sets of requests for ESPnet itself and for us: recorded ones, and random ones of a seed; and what the two made of them."""

import json
import pathlib
import random
import shutil
from dataclasses import dataclass

import numpy as np
import soundfile
import torch
import yaml
from trees import same_wav

from espnet2_vllm.backends.espnet_files import no_weights
from espnet2_vllm.layout import NUM_SPECIALS

OF_TRAINING = ("compile_transformer_body", "freeze_text_embeddings")
TIE = 1e-3  # logits that differ by less may come in the other order: what the recordings' logits are held to
KINDS = {"audio_to_text": ["FLOAT"], "dialogue": ["PCM_16", "FLOAT"]}
TEXT = "the river old lighthouse sang, count from 1 to 20! 'quoted' Ünï → 漢字 (a) two don't e.g. MIXED-case 3.14 ?"


@dataclass(frozen=True)
class JudgedSet:
    """Requests of one model under one decoding configuration, as files. ``keys`` in the order of the set."""

    name: str
    model: pathlib.Path
    task: str
    folder: pathlib.Path
    keys: tuple[str, ...]

    def words(self, out: pathlib.Path) -> list[str]:
        """Of either command line. Run them in the model's folder, from which its yaml counts."""
        return [
            *("--train-config", "train.yaml", "--model-checkpoint", "mp_rank_00_model_states.pt"),
            *("--inference-config", str(self.folder / "inference.yaml"), "--output-dir", str(out)),
            *("--test-unregistered-specifier", f"{self.task}:{self.name}:{self.folder / 'dataset.json'}"),
        ]

    def results(self, out: pathlib.Path) -> pathlib.Path:
        return out / f"{self.task}_{self.name}" / "inference_rank0"

    @property
    def label(self) -> str:
        return f"{self.model.name}-{self.name}"


def as_of_today(model: pathlib.Path, place: pathlib.Path) -> pathlib.Path:
    """A recorded model as today's ESPnet would write it: the settings and the buffer that have changed, weights that are named."""
    shutil.copytree(model, place, ignore=shutil.ignore_patterns("cases", "trees"), copy_function=shutil.copyfile)
    config = yaml.safe_load((place / "train.yaml").read_text(encoding="utf-8"))
    for name in OF_TRAINING:
        config["model"]["model_conf"].pop(name, None)
    (place / "train.yaml").write_text(yaml.safe_dump(config, sort_keys=False), encoding="utf-8")
    file = place / "mp_rank_00_model_states.pt"
    content = torch.load(file, weights_only=True)
    weights = content["module"]["lm_head.weight"].new_ones(len(content["module"]["lm_head.weight"]))
    weights[_text_end(place) :] = 1 / content["module"]["stream_emb.weight"].shape[0]
    content["module"]["vocab_weight"] = weights
    torch.save(content, file)
    for folder in (place / "backbone", *place.glob("Qwen/*")):
        if not any(folder.glob("*.safetensors")):
            no_weights(folder)
    return place


def _text_end(model: pathlib.Path) -> int:
    return NUM_SPECIALS + json.loads((model / "backbone/config.json").read_text(encoding="utf-8"))["vocab_size"]


def write_set(
    folder: pathlib.Path, model: pathlib.Path, task: str, config: dict, requests: dict[str, list]
) -> JudgedSet:
    """Files of a set.

    Args:
        requests: messages by key; of the tasks that are no dialogues the content of the one message of the user.
    """
    folder.mkdir(parents=True)
    (folder / "inference.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    if task == "dialogue":
        lines = [json.dumps({"example_id": key, "messages": messages}) for key, messages in requests.items()]
        (folder / "dialogue.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
        entries = [("dialogue", "dialogue.jsonl", "dialogue")]
    else:
        # ESPnet asks for the answers too, and reads none of them.
        spoken = {key: content[0][2] for key, content in requests.items() if content}
        for name, kind in (("text1", "text_to_audio"), ("audio1", "audio_to_text")):
            values = spoken if task == kind else dict.fromkeys(requests, "x")
            (folder / name).write_text("".join(f"{key} {value}\n" for key, value in values.items()), encoding="utf-8")
        entries = [
            ("text1", "text1", "text"),
            ("audio1", "audio1", "kaldi_audio" if task == "audio_to_text" else "text"),
        ]
    dataset = {
        "data_entry": [{"name": name, "path": str(folder / path), "reader": reader} for name, path, reader in entries],
        "samples": list(requests),
    }
    (folder / "dataset.json").write_text(json.dumps(dataset), encoding="utf-8")
    return JudgedSet(folder.name, model, task, folder, tuple(requests))


# -- recorded ----------------------------------------------------------------------------------------------------------
def recorded_sets(recordings: pathlib.Path, model: pathlib.Path, folder: pathlib.Path) -> list[JudgedSet]:
    """Greedy recorded cases of a model as dialogues, those of one configuration in one set.

    A case whose prompt holds an assistant's turn is none that a command line can be given: both read up to the first of them.
    """
    together: dict[str, dict[str, list]] = {}
    for path in sorted((recordings / "cases").glob("*.json")):
        case = json.loads(path.read_text(encoding="utf-8"))
        if case.get("kind") == "sampling" or any(role == "assistant" for role, *_ in case["messages"]):
            continue
        with np.load(path.with_suffix(".npz")) as arrays:
            messages = [
                [role, kind, _wav(folder / "wav" / f"{path.stem}_{i}.wav", arrays, value) if kind == "audio" else value]
                for i, (role, kind, value) in enumerate(case["messages"])
            ]
        together.setdefault(json.dumps(case["inference_config"]), {})[path.stem] = messages
    return [
        write_set(folder / f"recorded{number}", model, "dialogue", json.loads(config), requests)
        for number, (config, requests) in enumerate(together.items())
    ]


def _wav(path: pathlib.Path, arrays, value: dict) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    soundfile.write(path, arrays[value["npz_key"]].T, value["sample_rate"], subtype="FLOAT")
    return str(path)


# -- random ------------------------------------------------------------------------------------------------------------
def random_set(
    rng: random.Random, name: str, task: str, model: pathlib.Path, streams: int, folder: pathlib.Path, count: int
):
    """``count`` requests of one task under one drawn greedy configuration."""
    folder = folder / name
    (wavs := folder.parent / "wav").mkdir(parents=True, exist_ok=True)
    requests = {f"{name}-{i}": _request(rng, task, wavs / f"{name}-{i}") for i in range(count)}
    return write_set(folder, model, task, _config(rng, task, streams), requests)


def _config(rng: random.Random, task: str, streams: int) -> dict:
    """Audio has at least as many rows as streams, since ESPnet's worker ends at less."""
    order = {"text_to_audio": [["audio"], ["text", "audio"]], "audio_to_text": [["text"], ["text", "audio"]]}
    enforced = rng.choice(order.get(task, [["text"], ["audio"], ["text", "audio"], ["audio", "text"]]))
    text_min, audio_min = rng.choice([0, 1, 1, 5]), streams + rng.randint(0, 6)
    return {
        "dtype": "float32",
        "num_hypo": 1,
        "enforce_modality": enforced,
        "text": _block(rng, text_min, text_min + rng.randint(1, 24), [1, 1, 1, 2]),
        "audio": _block(rng, audio_min, audio_min + rng.randint(1, 24), [1, 1.5, 3]),
    }


def _block(rng: random.Random, least: int, most: int, guidance: list[float]) -> dict:
    return {"temperature": 0.0, "topk": 20, "cfg": rng.choice(guidance), "min_step": least, "max_step": most}


def _request(rng: random.Random, task: str, wav: pathlib.Path) -> list:
    if task == "text_only":
        return []
    if task != "dialogue":
        return [
            ["user", "text", _text(rng)] if task == "text_to_audio" else ["user", "audio", _sound(rng, task, wav, 0)]
        ]
    turns = [["system", "text", _text(rng)]] if rng.random() < 0.5 else []
    for number in range(rng.randint(1, 3)):
        spoken = rng.random() < 0.5
        turns.append(["user", *(("audio", _sound(rng, task, wav, number)) if spoken else ("text", _text(rng)))])
    return [*turns, ["assistant", "text", "is not read"]]


def _text(rng: random.Random) -> str:
    return " ".join(rng.choices(TEXT.split(), k=rng.randint(1, 12)))


def _sound(rng: random.Random, task: str, wav: pathlib.Path, number: int) -> str:
    """A tone in noise that comes and goes, mono, of 0.1 to 1.5 s. Integers, ``kaldi_audio`` of 16 bits, end ESPnet's worker."""
    path = wav.with_name(f"{wav.name}_{number}.wav")
    rate = rng.choice([8000, 16000, 16000, 24000])
    time = np.arange(int(rate * rng.uniform(0.1, 1.5))) / rate
    noise = np.random.default_rng(rng.getrandbits(32)).normal(size=len(time))
    wave = 0.3 * np.sin(2 * np.pi * rng.uniform(80, 2000) * time) * np.abs(np.sin(7 * time)) + 0.03 * noise
    soundfile.write(path, np.clip(wave, -0.99, 0.99), rate, subtype=rng.choice(KINDS[task]))
    return str(path)


# -- of the model that speaks and hears ---------------------------------------------------------------------------------
def digits_sets(model: pathlib.Path, rng: random.Random, folder: pathlib.Path) -> list[JudgedSet]:
    """The digits model as it is shipped says numbers, with guidance and without, hears the recordings and answers them."""
    recordings = model.parents[1] / "recordings"
    names = [path.stem for path in sorted(recordings.glob("*.flac")) if path.stem != "voice"]
    heard = {name: [["user", "audio", _as_float(recordings / f"{name}.flac", folder / "wav")]] for name in names}
    asked = {name: [["system", "text", "answer"], *turns] for name, turns in heard.items() if "question" in name}
    sets = []
    for name, guidance in (("says", 1), ("says-guided", 2)):
        words = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
        requests = {f"{name}-{i}": [["user", "text", " ".join(rng.choices(words, k=3))]] for i in range(2)}
        sets.append(_digits_set(folder / name, model, "text_to_audio", ["audio"], guidance, requests))
    sets.append(_digits_set(folder / "hears", model, "audio_to_text", ["text"], 1, heard))
    return [*sets, _digits_set(folder / "answers", model, "dialogue", [], 1, asked)]


def _as_float(recording: pathlib.Path, folder: pathlib.Path) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{recording.stem}.wav"
    soundfile.write(path, *soundfile.read(recording, dtype="float32"), subtype="FLOAT")
    return str(path)


def _digits_set(folder, model, task, enforced, guidance, requests) -> JudgedSet:
    block = {"temperature": 0.0, "topk": 20, "max_step": 160}
    config = {"text": {**block, "cfg": 1}, "audio": {**block, "cfg": guidance, "min_step": 9}}
    config = {"dtype": "float32", **config, **({"enforce_modality": enforced} if enforced else {})}
    return write_set(folder, model, task, config, requests)


# -- judging -----------------------------------------------------------------------------------------------------------
EQUAL, TIED, LOST = "equal", "equal up to a tie", "lost by ESPnet"


def judge(one: JudgedSet, espnet: pathlib.Path, ours: pathlib.Path, choices: pathlib.Path) -> dict[str, str]:
    """A verdict for each key: ids of all streams equal, texts equal, waveforms within 2 of 16 bits.

    ESPnet's worker ends with the first request that it cannot decode, and the later ones of the set are lost with it. Where two
    logits are nearly equal both orders are right, and nothing behind that row can be compared.

    Raises:
        AssertionError: at the first difference.
    """
    theirs_at, ours_at = one.results(espnet), one.results(ours)
    theirs = (
        json.loads((theirs_at / "results.json").read_text("utf-8")) if (theirs_at / "results.json").is_file() else {}
    )
    mine = json.loads((ours_at / "results.json").read_text("utf-8"))
    verdicts = dict.fromkeys(one.keys, LOST)
    with np.load(choices) as chosen:
        for place, key in enumerate(one.keys):
            if key not in theirs:
                continue
            if not _same_ids(f"{one.name} {key}", place, chosen, ours_at / ".scores" / f"{key}.npz"):
                verdicts[key] = TIED
                continue
            _same_messages(f"{one.name} {key}", theirs[key], mine[key])
            verdicts[key] = EQUAL
    return verdicts


def _same_ids(label: str, place: int, chosen, scores: pathlib.Path) -> bool:
    """Whether all are equal; False where they part at a tie."""
    with np.load(scores) as file:
        first = file["hypothesis"] == 0
        ids, segment = file["ids"][first], file["segment"][first]
    count = sum(name.startswith(f"{place}.") and name.endswith(".rows") for name in chosen.files)
    assert count, f"{label}: ESPnet chose nothing"
    for number in range(count):
        theirs, margins = chosen[f"{place}.{number}.rows"], chosen[f"{place}.{number}.margins"]
        ours = ids[segment == number][1 + (number > 0) :]  # behind <text>, or <assistant> <text>
        rows = min(len(ours), len(theirs))
        differ = np.argwhere(ours[:rows] != theirs[:rows])
        if len(differ):
            row, stream = differ[0]
            margin = margins[row][(ours[row] != theirs[row])].min()
            assert margin < TIE, (
                f"{label}: segment {number}, row {row}, stream {stream}: {ours[row].tolist()}, ESPnet's is "
                f"{theirs[row].tolist()}, by {margin:.2g}"
            )
            return False
        assert len(ours) == len(theirs), f"{label}: segment {number}: {len(ours)} rows, ESPnet's has {len(theirs)}"
    assert segment.max() + 1 == count, f"{label}: {segment.max() + 1} segments, ESPnet's answer has {count}"
    return True


def _same_messages(label: str, theirs: list, ours: list) -> None:
    assert [m[:2] for m in ours] == [m[:2] for m in theirs], label
    for (_, kind, mine), (_, _, espnets) in zip(ours, theirs, strict=True):
        if kind == "text":
            assert mine == espnets, label
        else:
            same_wav(pathlib.Path(mine), pathlib.Path(espnets))
