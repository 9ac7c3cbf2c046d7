"""``python -m espnet2_vllm.bin.speechlm_inference``: ESPnet's older OpusLM decoder, with its options and its result trees.

Takes what ``espnet2.bin.speechlm_inference`` takes (branch ``speechlm3``): one flat set of options, which a yaml (``--config``)
may hold under the same names. What stands on the command line wins.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import ConfigError
from .options import (
    ESPNET,
    SEED_HELP,
    Repeated,
    add,
    add_decoding_options,
    at_least,
    flag,
    run_command,
    seed,
)
from .speechlm_inference_chat import DTYPES, KEY_FILE_HELP, open_and_decode, open_set, run_espnet_on, take_over
from .utf8 import insist_on_utf8

if TYPE_CHECKING:
    from ..decoding import DecodingConfig

_SEARCHES = ("topk_sampling", "topp_sampling", "teacher_force", "greedy_search", "beam_search")
# Cascaded evaluation of dialogues, on ESPnet's master only.
_OFF = (
    "run_asr", "run_mt", "codec_ssl_corrupt_prob", "inference_tts", "inference_tts_spk_path", "inference_tts_speaker_id",
)  # fmt: skip
# Settings of decoding, which are checked together with those of the yaml.
_DECODING = (
    "search_algo", "sampling_temperature", "top_k", "top_p", "beam_size", "minlenratio", "maxlenratio", "inference_nq",
    "fixed_length", "codec_conf", "image_conf", *_OFF,
)  # fmt: skip


class _Nested(argparse.Action):
    """``--codec_conf key=value``, ``key.inner=value``, or a whole yaml mapping, once or several times."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        from ..safe_yaml import parse_yaml

        earlier = getattr(namespace, self.dest, None)
        made = dict(earlier) if isinstance(earlier, dict) else {}
        path, equals, text = values.partition("=")
        try:
            value = parse_yaml(text if equals else values, f"{option_string} {values!r}: the value", ConfigError)
        except ConfigError as error:
            parser.error(str(error))
        if not equals:
            if not isinstance(value, dict):
                parser.error(f"{option_string} {values!r}: expected KEY=VALUE or a yaml mapping")
            made.update(value)
        else:
            *outer, last = path.strip().split(".")
            block = made
            for name in outer:
                block = block.setdefault(name, {})
                if not isinstance(block, dict):
                    parser.error(f"{option_string} {values!r}: {name} is {block!r}, given before, and holds no {last}")
            block[last] = value
        setattr(namespace, self.dest, made)


def _plain(text: str) -> Any:
    """A value as yaml has it."""
    from ..safe_yaml import parse_yaml

    try:
        return parse_yaml(text, "the value", ConfigError)
    except ConfigError:
        return text


def get_parser() -> argparse.ArgumentParser:
    """ESPnet's options, verbatim, and ours."""
    parser = argparse.ArgumentParser(
        prog="python -m espnet2_vllm.bin.speechlm_inference",
        description="Decode a data.json set with an OpusLM checkpoint",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    group = parser.add_argument_group("ESPnet")
    add(group, "config", type=Path, help="A yaml with any of these options")
    levels = ("CRITICAL", "ERROR", "WARNING", "INFO", "DEBUG", "NOTSET")
    add(group, "log_level", type=str.upper, default="INFO", choices=levels, help="The verbose level of logging")
    add(group, "output_dir", type=Path, help="The path of output directory (needed)")
    add(group, "ngpu", type=at_least(0), default=0, help="The number of gpus. 0 indicates CPU mode (pytorch backend)")
    add(group, "nproc", type=at_least(1), default=1, help="Rank files to write; example i goes to rank i %% nproc")
    add(group, "seed", type=seed, default=0, help=SEED_HELP)
    add(group, "dtype", default="float32", choices=DTYPES, help="Data type")
    add(group, "num_workers", type=at_least(0), default=0, help="Accepted; there is no DataLoader")
    add(group, "batch_size", type=at_least(1), default=1, help="Accepted; the engine batches by itself")
    add(group, "data_path_and_name_and_type", action=Repeated, help="PATH/data.json,_,dataset_json; exactly one")
    add(group, "key_file", type=Path, help=KEY_FILE_HELP)
    add(group, "train_config", help="Training configuration file, or a converted directory")
    add(group, "model_file", help="Model parameter file")
    add(group, "model_tag", help="A folder, or a tag of the hub; wins over train_config and model_file")
    _add_search_options(group)
    add_decoding_options(parser)
    return parser


def _add_search_options(group: Any) -> None:
    add(group, "maxlenratio", type=float, default=10.0, help="Maximum length ratio in decoding; 0: the whole context")
    add(group, "minlenratio", type=float, default=0.0, help="Minimum length ratio in decoding")
    search_help = "The search algorithm; beam_search is refused, as ESPnet has it for one stream only"
    add(group, "search_algo", default="topk_sampling", choices=_SEARCHES, help=search_help)
    add(group, "nbest", type=at_least(1), default=1, help="The number of hypotheses to return")
    add(group, "sampling_temperature", type=float, default=1.0, help="The temperature of softmax during sampling")
    add(group, "top_k", type=int, default=30, help="Sample from so many ids with the highest probabilities")
    add(group, "top_p", type=float, default=0.8, help="topp_sampling: sample from the best ids of so much probability")
    add(group, "beam_size", type=int, default=1, help="Accepted; beam_search is refused")
    add(group, "inference_nq", type=at_least(1), help="Streams to decode; only all of them")
    length_help = "As many frames as the task's fixed_length_key has (mix.scp of codec_ssl_se and codec_ssl_tse)"
    add(group, "fixed_length", type=flag, default=False, help=length_help)
    add(group, "codec_conf", action=_Nested, metavar="KEY=VALUE", help="Keyword arguments of ESPnet's CodecTokenizer")
    for name in _OFF:
        add(group, name, type=_plain, help="Only off")
    add(group, "image_conf", action=_Nested, metavar="KEY=VALUE", help="Accepted; images are not decoded")


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code: 0 if every utterance has a result, 1 if one was refused or the data cannot be read, 2 for wrong usage."""
    return run_command(get_parser(), run, argv)


def run(args: argparse.Namespace, given: frozenset[str]) -> int:
    """Decodes one set. Everything that can be wrong with settings and files is looked at before the engine starts."""
    from ..io.results_opuslm import LegacyWriter

    if args.backend == ESPNET:
        return run_espnet_on("espnet2.bin.speechlm_inference", get_parser(), args, given)
    config = _settings(args, given)
    data = open_set(args)
    if data.task.chat:
        raise ConfigError(
            f"{data.path} holds dialogues, which ESPnet's older decoder cannot decode; use espnet2_vllm.bin.speechlm_inference_chat"
        )
    args.inference_last_segment = False
    return open_and_decode(args, config, data, args.nbest, LegacyWriter)


def _settings(args: argparse.Namespace, given: frozenset[str]) -> DecodingConfig:
    """All settings, checked; those of the yaml that are options of the command line are put into ``args``."""
    from ..decoding import load_decoding

    source: Path | dict[str, Any] = args.config or {}
    overrides = {name: getattr(args, name) for name in _DECODING if name in given and getattr(args, name) is not None}
    if args.config is None:
        overrides.setdefault("search_algo", args.search_algo)
    config = load_decoding(source, "opuslm", overrides=overrides, label="command line")
    if config.dialect != "flat":
        raise ConfigError(
            f"{config.source}: has a block a modality, which espnet2_vllm.bin.speechlm_inference_chat takes; here search_algo, "
            "maxlenratio and the other options stand at the top"
        )
    tag = args.model_tag if "model_tag" in given else config.cli.get("model_tag", args.model_tag)
    if tag:
        from ..checkpoint.hub import find_folder

        args.train_config, args.model_file = str(find_folder(tag)), None
        given |= {"train_config", "model_file"}
    config = take_over(args, given, config)
    if args.output_dir is None:
        raise ConfigError("--output_dir is missing")
    return config


if __name__ == "__main__":
    insist_on_utf8()
    sys.exit(main())
