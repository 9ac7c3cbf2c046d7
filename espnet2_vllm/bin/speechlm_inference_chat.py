"""``python -m espnet2_vllm.bin.speechlm_inference_chat``: ESPnet's OpusLM decoder, with its options and its result trees.

Takes what ``espnet2.bin.speechlm_inference_chat`` takes (stage 9 of ``speechlm.sh``). One engine serves all utterances; ``--nproc``
decides only how results are laid out.
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import ConfigError, DataError
from .options import (
    ESPNET,
    SEED_HELP,
    Repeated,
    add,
    add_decoding_options,
    at_least,
    check_commands_of_espnet,
    choose_device,
    engine_options,
    flag,
    gpus_of_run,
    in_flight,
    run_command,
    seed,
)
from .utf8 import insist_on_utf8

if TYPE_CHECKING:
    from ..checkpoint import Checkpoint
    from ..decoding import DecodingConfig
    from ..io.data_json import DataJson
    from ..io.journal import Journal
    from ..io.results import ResultWriter, Speech
    from ..io.results_opuslm import TaskWriter
    from .job import Item

log = logging.getLogger(__name__)

DTYPES = ("float16", "bfloat16", "float32", "float64")
KEY_FILE_HELP = "Decode only the keys of this file, <task>_<id> one a line, in the order of the data.json"
_SHAPES_FILES = (
    "nproc",
    "num_workers",
    "batch_size",
)  # options that ask ESPnet for processes, which one engine replaces
_NOT_FROM_YAML = ("inference_mode", "device")  # ESPnet's own main takes no notice of these keys either


def get_parser() -> argparse.ArgumentParser:
    """ESPnet's options, verbatim, and ours."""
    parser = argparse.ArgumentParser(
        prog="python -m espnet2_vllm.bin.speechlm_inference_chat",
        description="Decode data.json sets with an OpusLM checkpoint",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    group = parser.add_argument_group("ESPnet")
    add(group, "nproc", type=at_least(1), default=1, help="Rank files to write; example i goes to rank i %% nproc")
    add(group, "output_dir", type=Path, required=True, help="The path of output directory")
    add(group, "batch_size", type=at_least(1), default=1, help="Accepted; the engine batches by itself")
    add(group, "ngpu", type=at_least(0), default=0, help="The number of gpus. 0 indicates CPU mode (pytorch backend)")
    add(group, "seed", type=seed, default=0, help=SEED_HELP)
    add(group, "num_workers", type=at_least(0), default=0, help="Accepted; there is no DataLoader")
    levels = ("CRITICAL", "ERROR", "WARNING", "INFO", "DEBUG", "NOTSET")
    add(group, "log_level", type=str.upper, default="INFO", choices=levels, help="The verbose level of logging")
    add(group, "model_file", help="Model parameter file")
    add(group, "train_config", help="Training configuration file, or a converted directory")
    add(group, "dtype", default="float32", choices=DTYPES, help="Data type")
    add(group, "inference_config_file", help="Inference configuration file; decode_default.yaml beside the checkpoint")
    add(
        group, "inference_last_segment", type=flag, default=False, help="Decode the last segment only, given the others"
    )
    add(group, "nbest", type=at_least(1), help="Number of hypotheses to return; 1 if neither this nor the yaml says")
    add(group, "data_path_and_name_and_type", action=Repeated, help="PATH/data.json,_,dataset_json; exactly one")
    add(parser.add_argument_group("input"), "key_file", type=Path, help=KEY_FILE_HELP)
    add_decoding_options(parser)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code: 0 if every utterance has a result, 1 if one was refused or the data cannot be read, 2 for wrong usage."""
    return run_command(get_parser(), run, argv)


def run(args: argparse.Namespace, given: frozenset[str]) -> int:
    """Decodes one set. Everything that can be wrong with settings and files is looked at before the engine starts."""
    if args.backend == ESPNET:
        return run_espnet_on("espnet2.bin.speechlm_inference_chat", get_parser(), args, given)
    config = _settings(args, given)
    data = open_set(args)
    nbest = args.nbest or 1
    if data.task.chat and nbest > 1:
        raise ConfigError(f"nbest {nbest}: a dialogue ({data.path}) is decoded with nbest 1 only")
    return open_and_decode(args, config, data, nbest)


def open_set(args: argparse.Namespace) -> DataJson:
    """The set of ``--data_path_and_name_and_type``, of ``--key_file`` where that is given."""
    from ..io.data_json import open_data_json, restricted

    data = open_data_json(data_path(args.data_path_and_name_and_type))
    return data if args.key_file is None else restricted(data, args.key_file)


def open_and_decode(
    args: argparse.Namespace, config: DecodingConfig, data: DataJson, nbest: int, *writer: type[TaskWriter]
) -> int:
    """Opens the checkpoint, checks it against the settings, and decodes ``data``; ``writer``: of ``decode_set``."""
    from ..checkpoint import ensure_converted
    from ..io.journal import FOLDER
    from ..logs import LIBRARIES, libraries_to_file
    from ..prompt.tasks import check_fixed_length

    if config.fixed_length:
        check_fixed_length(data.task, config.source)
    options = engine_options(args)
    checkpoint = ensure_converted(args.train_config, args.model_file, vocab_order=args.vocab_order, family="opuslm")
    config.check_streams(checkpoint.layout.num_streams)
    config.check_vocabulary(checkpoint.layout.vocab_size)
    device = choose_device(args.device, gpu=args.ngpu > 0 or args.backend == "vllm")
    libraries_to_file(args.output_dir / FOLDER / LIBRARIES)
    speech = load_speech(config, checkpoint, data, args.train_config, device)
    if args.backend == "pytorch":
        options["device"] = device
    return decode_set(args, config, checkpoint, data, speech, options, nbest, *writer)


def run_espnet_on(module: str, parser: argparse.ArgumentParser, args: argparse.Namespace, given: frozenset[str]) -> int:
    """Has ESPnet decode the set, with the options of this command line that are its own; the exit code."""
    from ..backends.espnet import espnet_command, keys_of_entry, run_espnet
    from ..io.results_opuslm import DIALOGUE
    from ..reports.trees import read_turns

    check_commands_of_espnet(args)
    triplet = _only_set(args.data_path_and_name_and_type)
    for name, value in (("output_dir", args.output_dir), ("data_path_and_name_and_type", triplet)):
        if not value:
            raise ConfigError(f"--{name} is missing")
    args.data_path_and_name_and_type = triplet
    data = open_set(args)

    def found() -> set[str]:
        if data.task.chat:
            path = args.output_dir / DIALOGUE / f"{DIALOGUE}.json"
            return {name.rpartition("/")[0] for name, _ in read_turns(path)} if path.is_file() else set()
        names = [entry.name for entry in data.task.targets]
        written = [{key.rpartition("_sample")[0] for key in keys_of_entry(args.output_dir / n / n)} for n in names]
        return set.intersection(*written)

    return run_espnet(espnet_command(module, parser, args, given), data.keys, found)


def _settings(args: argparse.Namespace, given: frozenset[str]) -> DecodingConfig:
    from ..decoding import load_decoding

    config = take_over(args, given, load_decoding(_config_file(args), "opuslm"))
    return config.replace(inference_last_segment=args.inference_last_segment)


def take_over(args: argparse.Namespace, given: frozenset[str], config: DecodingConfig) -> DecodingConfig:
    """Puts the keys of a decoding yaml that are options of the command line into ``args``, as ESPnet's main does.

    Raises:
        ConfigError: for an option that is missing, or cannot be used.
    """
    args.data_path_and_name_and_type = _only_set(args.data_path_and_name_and_type)
    for name, value in config.cli.items():
        if name in _NOT_FROM_YAML or not hasattr(args, name):
            log.warning("%s: %s has no effect on this command line", config.source, name)
            continue
        if config.dialect == "flat" and name in given:
            log.info("--%s %s wins over %s in %s", name, getattr(args, name), value, config.source)
            continue
        if name in given and getattr(args, name) != value:
            log.warning(
                "%s: %s: %s wins over --%s %s, as in ESPnet", config.source, name, value, name, getattr(args, name)
            )
        setattr(args, name, Path(value) if name == "output_dir" else value)
    args.data_path_and_name_and_type = _only_set(args.data_path_and_name_and_type)
    logging.getLogger().setLevel(args.log_level.upper())
    for name in ("train_config", "data_path_and_name_and_type"):
        if not getattr(args, name):
            raise ConfigError(f"--{name} is missing")
    if args.ngpu > 1 and args.ngpu != (wanted := gpus_of_run(args)):
        raise ConfigError(
            f"--ngpu {args.ngpu}: engine and codec would take {wanted}; add --data_parallel_size {args.ngpu} (so many engines "
            f"share the set), --tensor_parallel_size {args.ngpu} (one model over all GPUs) or --device cuda:{args.ngpu - 1} (the "
            "codec on a GPU behind the engines'), or split the set and start a process for each part (espnet2-vllm split-data; "
            "inference_nj in the recipe)"
        )
    for name in _SHAPES_FILES:
        if getattr(args, name) > 1:
            effect = f"results are laid out as by {args.nproc} processes" if name == "nproc" else "no effect"
            log.info("--%s %d: one engine decodes everything; %s", name, getattr(args, name), effect)
    return config.replace(dtype=args.dtype)


def _only_set(triplets: Any) -> Any:
    """The one of a list of ``PATH,_,dataset_json``, or what is no list."""
    if isinstance(triplets, list) and len(triplets) != 1:
        raise ConfigError(f"--data_path_and_name_and_type is given {len(triplets)} times; expected one data.json")
    return triplets[0] if isinstance(triplets, list) else triplets


def _config_file(args: argparse.Namespace) -> Path:
    if args.inference_config_file:
        return Path(args.inference_config_file)
    beside = Path(args.train_config or "").parent / "decode_default.yaml"
    if args.train_config and beside.is_file():
        log.info("no --inference_config_file: using %s", beside)
        return beside
    raise ConfigError("--inference_config_file is missing; expected a decoding yaml with blocks codec_ssl and text_bpe")


def data_path(triplet: str) -> Path:
    """``PATH`` of ``PATH,_,dataset_json``."""
    path, *rest = triplet.strip().rsplit(",", 2)
    if rest and (len(rest) != 2 or rest[1] != "dataset_json"):
        raise ConfigError(f"--data_path_and_name_and_type {triplet!r}: expected PATH/data.json,_,dataset_json")
    return Path(path)


def load_speech(
    config: DecodingConfig, checkpoint: Checkpoint, data: DataJson, train_config: str, device: str
) -> Speech | None:
    """The codec that makes wavs of given and generated audio; None if the task has no audio.

    The decoding yaml's ``codec_ssl.tokenizer`` wins over the checkpoint's, as in ESPnet.

    Raises:
        ConfigError: if there is audio to write and no codec is named.
        CheckpointError: if the codec cannot be loaded or does not fit the checkpoint's streams.
    """
    from ..codec import SILENT_FRAMES, codec_files, codec_from_tokenizer
    from ..io.results import Speech
    from ..prompt.tasks import AUDIO_MODALITIES
    from .job import load_fitting_codec

    task, layout = data.task, checkpoint.layout
    description, base = checkpoint.codec, checkpoint.codec_base
    if config.audio is not None and config.audio.tokenizer is not None:
        block = "codec_conf" if config.dialect == "flat" else "codec_ssl.tokenizer"
        description = codec_from_tokenizer(config.audio.tokenizer, where=f"{config.source}: {block}")
        base = Path(train_config) if Path(train_config).is_dir() else Path(train_config).parent
    written = any(entry.modality in AUDIO_MODALITIES for entry in task.entries) or task.chat
    if not written:
        return None
    if description is None:
        if task.name == "text_dialogue":
            return None
        raise ConfigError(
            f"task {task.name} writes wav files, but neither {config.source} nor the checkpoint names a codec; add the block "
            f"{'codec_conf' if config.dialect == 'flat' else 'codec_ssl.tokenizer'} (codec_choice, codec_fs, hf_model_tag or "
            "config_path and checkpoint_path)"
        )
    codec = load_fitting_codec(description, base, layout, device)
    return Speech(codec, silent_frames=SILENT_FRAMES, files=codec_files(description, base))


def decode_set(
    args: argparse.Namespace,
    config: DecodingConfig,
    checkpoint: Checkpoint,
    data: DataJson,
    speech: Speech | None,
    options: dict[str, Any],
    nbest: int,
    writer_of_tasks: type[TaskWriter] | None = None,
) -> int:
    """Decodes an opened set; the exit code. ``writer_of_tasks``: None is this command line's own."""
    from ..backends import make_engine
    from ..io.vocabularies import check_vocabularies
    from ..text import TextTokenizer
    from .job import drawn_seed, prepare_speech, report, run_job
    from .report import end_of_run

    args.seed = drawn_seed(args.seed, args.resume, [args.output_dir])
    tokenizer = TextTokenizer(checkpoint.tokenizer_dir)
    check_vocabularies(data.vocabularies, checkpoint.layout, tokenizer)
    options = prepare_speech(speech, args, options)
    journal = _journal(args, config, checkpoint, speech, options, nbest)
    shared = (args.output_dir, checkpoint.layout, journal, speech, tokenizer.decode_opuslm, args.nproc)
    writer = _writer(data, shared, args.write_scores, writer_of_tasks)
    items = _utterances(data, checkpoint, tokenizer, args, speech)
    engine = make_engine(args.backend, checkpoint, args.dtype, **options)
    begun = time.monotonic()
    try:
        tally = run_job(
            engine,
            config,
            [writer],
            ((writer, item) for item in items),
            speech=speech,
            seed=args.seed,
            nbest=nbest,
            in_flight=in_flight(args),
            total=len(data.examples),
        )
    finally:
        engine.close()
        journal.close()
    seconds = time.monotonic() - begun
    end_of_run([args.output_dir], tally, seconds, f"{data.task.name} of {data.path}", args.command, data.keys)
    return report(tally, seconds, str(args.output_dir))


def _journal(
    args: argparse.Namespace,
    config: DecodingConfig,
    checkpoint: Checkpoint,
    speech: Speech | None,
    options: dict[str, Any],
    nbest: int,
) -> Journal:
    from ..checkpoint.identity import identity
    from ..io.journal import Journal
    from .job import journal_settings

    settings = journal_settings(
        config,
        checkpoint=identity(checkpoint, () if speech is None else speech.files),
        checkpoint_path=checkpoint.path,
        backend=args.backend,
        seed=args.seed,
        nbest=nbest,
        options=options,
        with_scores=args.write_scores,
        form=None if speech is None else speech.form,
    )
    return Journal(args.output_dir, settings, resume=args.resume)


def _writer(
    data: DataJson, shared: tuple[Any, ...], with_scores: bool, writer_of_tasks: type[TaskWriter] | None
) -> ResultWriter:
    """``shared``: what the writers of dialogues and of tasks take alike."""
    from ..io.results_opuslm import ChatWriter, TaskWriter

    if data.task.chat:
        return ChatWriter(*shared, with_scores=with_scores)
    entries = [entry.name for entry in data.task.entries]
    return (writer_of_tasks or TaskWriter)(*shared, task=data.task.name, entries=entries, with_scores=with_scores)


def _utterances(
    data: DataJson, checkpoint: Checkpoint, tokenizer: Any, args: argparse.Namespace, speech: Speech | None
) -> Iterator[Item]:
    """What the job decodes; audio that could not be written is refused before it is decoded."""
    from ..drive import modality_of_name
    from ..io.data_json import read_utterances
    from ..plan import Utterance
    from ..prompt.opuslm import Facts

    for item in read_utterances(
        data,
        checkpoint.layout,
        tokenizer,
        Facts.from_preprocessor(checkpoint.preprocessor),
        seed=args.seed,
        inference_last_segment=args.inference_last_segment,
    ):
        if speech is None and isinstance(item, Utterance):
            audio = [part for part in item.parts if modality_of_name(part.modality) == "audio"]
            if audio:
                reason = f"{item.key}: has {len(audio)} audio segments, but no codec is named to write them"
                yield item.key, DataError(reason)
                continue
        yield item


if __name__ == "__main__":
    insist_on_utf8()
    sys.exit(main())
