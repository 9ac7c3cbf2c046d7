"""Runs the decoding command lines in this process, on recorded models."""

import pathlib
import shutil

import yaml

from espnet2_vllm.bin import speechlm_inference_chat


def chat_arguments(model: pathlib.Path, decode, data, output_dir, *more, backend="pytorch") -> list[str]:
    """As stage 9 of ESPnet's recipe gives them."""
    return [
        *("--train_config", str(model / "config.yaml"), "--model_file", str(model / "model.pth")),
        *("--inference_config_file", str(decode), "--output_dir", str(output_dir)),
        *("--data_path_and_name_and_type", f"{data},_,dataset_json", "--backend", backend, *map(str, more)),
    ]


def chat(*arguments, **options) -> int:
    return speechlm_inference_chat.main(chat_arguments(*arguments, **options))


def writable(model: pathlib.Path, place: pathlib.Path) -> pathlib.Path:
    """A copy of a recorded model without its recordings, to be changed."""
    shutil.copytree(model, place, ignore=shutil.ignore_patterns("cases", "trees"))
    for path in [place, *place.rglob("*")]:
        path.chmod(0o755 if path.is_dir() else 0o644)
    return place


def edited_yaml(source: pathlib.Path, target: pathlib.Path, change) -> pathlib.Path:
    """``source`` with ``change`` applied to its data, written to ``target``."""
    data = yaml.safe_load(source.read_text(encoding="utf-8"))
    change(data)
    target.write_text(yaml.safe_dump(data, sort_keys=False), encoding="utf-8")
    return target
