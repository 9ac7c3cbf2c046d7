"""A tiny SSL model of ESPnet's (XEUS in small) with random weights, and k-means centres: ``make_tiny_ssl.py DIRECTORY [CLUSTERS]``.

In place of the released model's files, so that recordings can go the whole way into a tiny OpusLM checkpoint.
"""

import argparse
import sys
from pathlib import Path

import numpy as np
import torch
import yaml

CHANNELS, SIZE = 8, 16
SHAPES = [(CHANNELS, 10, 5), *[(CHANNELS, 3, 2)] * 4, *[(CHANNELS, 2, 2)] * 2]


def config() -> dict:
    return {
        "token_list": [str(i) for i in range(4)],
        "input_size": None,
        "init": None,
        "frontend": "wav2vec_cnn",
        "frontend_conf": {"norm_mode": "layer_norm", "conv_mode": "standard", "bias": True, "shapes": SHAPES},
        "specaug": None,
        "normalize": None,
        "preencoder": "linear",
        "preencoder_conf": {"output_size": SIZE, "dropout": 0.0},
        "encoder": "e_branchformer",
        "encoder_conf": {
            "output_size": SIZE, "attention_heads": 2, "linear_units": 24, "cgmlp_linear_units": 24, "cgmlp_conv_kernel": 5,
            "num_blocks": 3, "input_layer": None, "dropout_rate": 0.0, "positional_dropout_rate": 0.0, "use_ffn": True,
            "macaron_ffn": True, "use_flash_attn": False,
        },
        "loss": [{"name": "hubert", "conf": {"num_classes": 4, "final_dim": 8}}],
        "util": [{"name": "mask", "conf": {}}],
        "model": "espnet",
        "model_conf": {},
    }  # fmt: skip


def main() -> None:
    from espnet2.tasks.ssl import SSLTask

    folder, clusters = Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 50
    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    model = SSLTask.build_model(argparse.Namespace(**config())).eval()
    text = yaml.safe_dump(yaml.safe_load(yaml.dump(config(), Dumper=_Plain)))
    (folder / "config.yaml").write_text(text, encoding="utf-8")
    torch.save(model.state_dict(), folder / "model.pth")
    noise = torch.randn(1, 16000 * 4, generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        _, hidden, _ = model.inference_encode(noise, torch.tensor([noise.shape[1]]), use_final_output=False)
    # Frames of noise, one of each of so many stretches, stand for centres.
    frames = hidden[-1][0].numpy()
    np.save(folder / "kmeans.npy", frames[np.linspace(0, len(frames) - 1, clusters).round().astype(int)])


class _Plain(yaml.SafeDumper):
    def represent_data(self, data):
        return super().represent_data(list(data) if isinstance(data, tuple) else data)


if __name__ == "__main__":
    main()
