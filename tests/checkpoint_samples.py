"""Golden models as conversions and as copies that a test may damage."""

import atexit
import functools
import pathlib
import shutil
import tempfile
from collections.abc import Callable

import torch
from conftest import golden_models
from golden_layouts import bagpiper_model_layout, opuslm_layout

from espnet2_vllm.checkpoint import convert
from espnet2_vllm.layout import Layout

MODELS = [path for family in ("bagpiper", "opuslm") for path in golden_models(family)]
_LARGE = shutil.ignore_patterns("cases", "trees", "data")


def of_family(family: str) -> list[pathlib.Path]:
    return [path for path in MODELS if path.parent.name == family]


def golden_layout(model: pathlib.Path) -> Layout:
    return opuslm_layout(model) if model.parent.name == "opuslm" else bagpiper_model_layout(model)


def state_dict(path: pathlib.Path) -> dict[str, torch.Tensor]:
    """The tensors of a model file, whatever they are wrapped in, read without the package."""
    content = torch.load(path, map_location="cpu", weights_only=True)
    return dict(content.get("module", content))


def model_file(folder: pathlib.Path) -> pathlib.Path:
    """The model file of a golden model directory."""
    (found,) = [path for path in folder.iterdir() if path.suffix in (".pt", ".pth")]
    return found


@functools.cache
def converted(model: pathlib.Path) -> pathlib.Path:
    """The conversion of a golden model directory, made once. Do not change it."""
    folder = pathlib.Path(tempfile.mkdtemp(prefix="converted."))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    convert(model, folder / model.name)
    return folder / model.name


def copy_of(family: str, folder: pathlib.Path, name: str | None = None) -> pathlib.Path:
    """A copy of a golden model of ``family`` below ``folder``, writable whatever the original is."""
    model = next(path for path in of_family(family) if name in (None, path.name))
    target = folder / model.name
    shutil.copytree(model, target, ignore=_LARGE, copy_function=shutil.copyfile)
    for place in [target, *(path for path in target.rglob("*") if path.is_dir())]:
        place.chmod(0o755)
    return target


def add_encoder(folder: pathlib.Path) -> None:
    """Give a copied Bagpiper model a tiny audio encoder of random weights, and an adaptor, for the audio of its users."""
    from transformers import Qwen3OmniMoeConfig
    from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import Qwen3OmniMoeAudioEncoder

    sizes = {"d_model": 32, "encoder_layers": 2, "encoder_attention_heads": 2, "encoder_ffn_dim": 64, "output_dim": 48}
    config = Qwen3OmniMoeConfig(thinker_config={"audio_config": {**sizes, "downsample_hidden_size": 4}})
    config.save_pretrained(folder / "Qwen/Qwen3-Omni-30B-A3B-Instruct")
    change_text(
        folder / "train.yaml",
        ("audio_input: discrete_audio", "audio_input: continuous_audio"),
        (
            "model:\n  model_choice",
            "  continuous_audio:\n    encoder_choice: huggingface\n    dtype: float32\n"
            "    encoder_hf_model_tag: Qwen/Qwen3-Omni-30B-A3B-Instruct\nmodel:\n  model_choice",
        ),
    )
    tower = Qwen3OmniMoeAudioEncoder._from_config(config.thinker_config.audio_config).state_dict()

    def change(tensors):
        prefix = "multimodal_io_dict.continuous_audio.model.audio_tower."
        tensors.update({prefix + name: tensor for name, tensor in tower.items()})
        hidden = len(tensors["model.norm.weight"])
        tensors["adaptor.continuous_audio.weight"] = torch.randn(hidden, sizes["output_dim"])
        tensors["adaptor.continuous_audio.bias"] = torch.randn(hidden)

    change_tensors(folder, change)


def take_other_encoder(folder: pathlib.Path) -> None:
    """Give a copy of the model that hears a tiny encoder of the other kind, Qwen2.5-Omni's, and no name of it in the yaml."""
    from transformers import Qwen2_5OmniConfig
    from transformers.models.qwen2_5_omni.modeling_qwen2_5_omni import Qwen2_5OmniAudioEncoder

    sizes = {"d_model": 32, "encoder_layers": 2, "encoder_attention_heads": 2, "encoder_ffn_dim": 64, "output_dim": 48}
    text = {
        "hidden_size": 48,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
    }
    text |= {
        "vocab_size": 64,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 4, 4]},
    }
    eyes = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 48}
    thinker = {"audio_config": sizes, "text_config": text, "vision_config": eyes, "pad_token_id": 0}
    config = Qwen2_5OmniConfig(thinker_config=thinker, enable_audio_output=False)
    config.save_pretrained(folder / "Qwen/Qwen2.5-Omni-7B")
    torch.save({}, folder / "Qwen/Qwen2.5-Omni-7B/spk_dict.pt")
    (folder / "Qwen/Qwen3-Omni-30B-A3B-Instruct/preprocessor_config.json").rename(
        folder / "Qwen/Qwen2.5-Omni-7B/preprocessor_config.json"
    )
    change_text(folder / "train.yaml", ("    encoder_hf_model_tag: Qwen/Qwen3-Omni-30B-A3B-Instruct\n", ""))
    torch.manual_seed(11)
    tower = Qwen2_5OmniAudioEncoder._from_config(config.thinker_config.audio_config).state_dict()
    tower = {name: torch.randn_like(tensor) * 0.1 + (name.endswith("norm.weight")) for name, tensor in tower.items()}

    def change(tensors):
        prefix = "multimodal_io_dict.continuous_audio.model.audio_tower."
        for name in [name for name in tensors if name.startswith(prefix)]:
            del tensors[name]
        tensors.update({prefix + name: tensor for name, tensor in tower.items()})

    change_tensors(folder, change)


def change_tensors(folder: pathlib.Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    """Rewrite the model file of ``folder`` after ``change(tensors)``, wrapped as it was."""
    path = model_file(folder)
    content = torch.load(path, map_location="cpu", weights_only=True)
    change(content.get("module", content))
    torch.save(content, path)


def change_text(path: pathlib.Path, *pairs: tuple[str, str]) -> None:
    """Replace each ``old`` of ``pairs``, which must occur once, by its ``new``."""
    text = path.read_text(encoding="utf-8")
    for old, new in pairs:
        assert text.count(old) == 1, f"{old!r} occurs {text.count(old)} times in {path}"
        text = text.replace(old, new)
    path.write_text(text, encoding="utf-8")
