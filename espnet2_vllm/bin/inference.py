"""``python -m espnet2_vllm.bin.inference``: ESPnet's Bagpiper decoder, with its options and its result trees.

Takes what ``espnet2.speechlm.bin.inference`` takes, in the spelling of every revision. One engine serves all utterances;
``--num-workers`` decides only how results are laid out: sample i goes to ``inference_rank<r>`` with r = i modulo workers.
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import ConfigError
from ..plan import LONG_AUDIO
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
    in_flight,
    reading_options,
    run_command,
    seed,
)
from .utf8 import insist_on_utf8

if TYPE_CHECKING:
    from ..audio.tower import AudioTower
    from ..backends import Engine
    from ..checkpoint import Checkpoint
    from ..decoding import DecodingConfig
    from ..io.dataset_json import Dataset
    from ..io.results import Speech
    from ..io.results_bagpiper import BagpiperWriter
    from ..io.specifiers import Specifier
    from ..text import TextTokenizer
    from .job import Item

log = logging.getLogger(__name__)


def get_parser() -> argparse.ArgumentParser:
    """ESPnet's options, verbatim, and ours."""
    parser = argparse.ArgumentParser(
        prog="python -m espnet2_vllm.bin.inference",
        description="Decode dataset.json sets with a Bagpiper checkpoint",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    group = parser.add_argument_group("ESPnet")
    config_help = "Path to training configuration file, or a converted directory"
    add(group, "train-config", type=Path, required=True, help=config_help)
    add(group, "inference-config", type=Path, required=True, help="Path to inference configuration file")
    add(group, "model-checkpoint", type=Path, help="Path to model checkpoint to load; not for a converted directory")
    add(group, "output-dir", type=Path, default=Path("exp/inference_mp"), help="Directory to save inference results")
    unregistered_help = (
        "task:name:path/dataset.json, taken as it stands; again for another set (or several separated by blanks)"
    )
    add(group, "test-unregistered-specifier", action=Repeated, help=unregistered_help)
    registered_help = "task:name of ESPNET_DATASET_REGISTRY; again for another set (or several separated by blanks)"
    add(group, "test-registered-specifier", action=Repeated, help=registered_help)
    add(group, "num-workers", type=at_least(1), default=1, help="inference_rank folders to write")
    add(group, "rank", type=at_least(1), default=1, help="Number of this job among --world-size, from 1")
    add(group, "world-size", type=at_least(1), default=1, help="Jobs that share the samples")
    add(group, "seed", type=seed, default=42, help=SEED_HELP)
    group = parser.add_argument_group("input")
    long_help = "Recordings beyond 30 s: hear them whole, cut them (older ESPnet), or refuse them"
    add(group, "long-audio", choices=LONG_AUDIO, default="whole", help=long_help)
    url_help = "Fetch what omniio tables name by http(s) addresses; otherwise these utterances are refused"
    add(group, "allow-url", type=flag, nargs="?", const=True, default=False, help=url_help)
    group = parser.add_argument_group("output")
    formats = ("string", "list")
    text_help = "A text in results.json: string, or list of one string (ESPnet before 202609)"
    add(group, "text-format", choices=formats, default="string", help=text_help)
    clean_help = "Take blanks before punctuation out of generated texts, as ESPnet did with transformers 4"
    add(group, "clean-up-text", type=flag, nargs="?", const=True, default=False, help=clean_help)
    directories_help = "Folder of a set: <task>_<name>, or its specifier with ':' as '_', as up to 2026-05"
    add(group, "directory-names", choices=("name", "specifier"), default="name", help=directories_help)
    levels = ("CRITICAL", "ERROR", "WARNING", "INFO", "DEBUG", "NOTSET")
    add(group, "log-level", type=str.upper, default="INFO", choices=levels, help="The verbose level of logging")
    add_decoding_options(parser, style="-")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code: 0 if every utterance has a result, 1 if one was refused or the data cannot be read, 2 for wrong usage."""
    return run_command(get_parser(), run, argv)


def run(args: argparse.Namespace, given: frozenset[str]) -> int:
    """Decodes all data sets. Everything that can be wrong with settings and files is looked at before the engine starts."""
    from ..checkpoint import ensure_converted
    from ..decoding import load_decoding
    from ..io.dataset_json import open_datasets
    from ..io.journal import FOLDER
    from ..logs import LIBRARIES, libraries_to_file

    if args.rank > args.world_size:
        raise ConfigError(f"--rank {args.rank}: is counted from 1 and cannot be above --world-size {args.world_size}")
    specifiers = _specifiers(args)
    if args.backend == ESPNET:
        check_commands_of_espnet(args)
        return _run_espnet(args, given, open_datasets(specifiers))
    config = load_decoding(args.inference_config, "bagpiper")
    options = engine_options(args)
    datasets = open_datasets(specifiers, allow_url=args.allow_url)
    checkpoint = ensure_converted(
        args.train_config, args.model_checkpoint, vocab_order=args.vocab_order, family="bagpiper"
    )
    config.check_vocabulary(checkpoint.layout.vocab_size)
    device = choose_device(args.device, gpu=True)
    libraries_to_file(args.output_dir / FOLDER / LIBRARIES)
    speech = load_speech(config, checkpoint, device)
    if args.backend == "pytorch":
        options["device"] = device
    return _decode_all(args, config, checkpoint, datasets, speech, options)


def _specifiers(args: argparse.Namespace) -> list[Specifier]:
    from ..io.specifiers import parse_specifiers

    # Launchers pass both options, one of them empty.
    registered, unregistered = (
        [text for text in given or () if text]
        for given in (args.test_registered_specifier, args.test_unregistered_specifier)
    )
    if bool(registered) == bool(unregistered):
        found = "both are given" if registered else "none is given, or it is empty"
        wanted = "exactly one of --test-registered-specifier and --test-unregistered-specifier"
        raise ConfigError(f"expected {wanted}: {found}")
    return parse_specifiers(registered or unregistered, registered=bool(registered))


def _run_espnet(args: argparse.Namespace, given: frozenset[str], datasets: Sequence[Dataset]) -> int:
    """Has ESPnet decode the sets, one after the other, with the options of this command line that are its own; the exit code."""
    from tempfile import TemporaryDirectory

    from ..backends.espnet import BAGPIPER, espnet_command, run_espnet
    from ..backends.espnet_files import train_config_for_espnet
    from ..io.json_lines import read_json

    def found(dataset: Dataset, expected: list[str]) -> set[str]:
        # Revisions differ in the name of the folder: task and name, or the specifier with its colons replaced.
        names = (dataset.directory_name, dataset.specifier.text.replace(":", "_"))
        folders = [args.output_dir / name.lstrip("/") for name in names]
        paths = [path for folder in folders for path in folder.glob("inference_rank*/results.json")]
        return {f"{dataset.specifier.name}: {uid}" for path in paths for uid in read_json(path)}.intersection(expected)

    option = "test_registered_specifier" if any(args.test_registered_specifier or ()) else "test_unregistered_specifier"
    parts = range((args.rank - 1) * args.num_workers, args.rank * args.num_workers)
    codes = []
    with TemporaryDirectory(prefix="espnet2-vllm-") as folder:
        config = train_config_for_espnet(args.train_config, Path(folder))
        for dataset in datasets:
            # An option of ESPnet is one specifier.
            settings = {**vars(args), option: [dataset.specifier.text], "train_config": config}
            command = espnet_command(BAGPIPER, get_parser(), argparse.Namespace(**settings), given)
            shares = [dataset.share(rank, args.world_size * args.num_workers) for rank in parts]
            expected = sorted(f"{dataset.specifier.name}: {uid}" for share in shares for uid in share)
            codes.append(run_espnet(command, expected, partial(found, dataset, expected)))
    return max(codes)


def load_speech(config: DecodingConfig, checkpoint: Checkpoint, device: str) -> Speech | None:
    """The checkpoint's codec; None if it has none and none is needed.

    Raises:
        ConfigError: if audio may be generated and the checkpoint has no codec.
        CheckpointError: if the codec cannot be loaded or does not fit the checkpoint's streams.
    """
    from ..codec import codec_files
    from ..io.results import Speech
    from .job import load_fitting_codec

    if checkpoint.codec is None:
        if config.audio is not None:
            raise ConfigError(
                f"{config.source} has a block audio, but the checkpoint names no codec that could make waveforms; take the block "
                "out, or convert the checkpoint with its codec"
            )
        return None
    layout = checkpoint.layout
    codec = load_fitting_codec(checkpoint.codec, checkpoint.codec_base, layout, device)
    return Speech(codec, files=codec_files(checkpoint.codec, checkpoint.codec_base))


def _decode_all(
    args: argparse.Namespace,
    config: DecodingConfig,
    checkpoint: Checkpoint,
    datasets: Sequence[Dataset],
    speech: Speech | None,
    options: dict[str, Any],
) -> int:
    from ..backends import make_engine
    from ..checkpoint.identity import identity
    from ..text import TextTokenizer
    from .job import drawn_seed, journal_settings, prepare_speech, report
    from .report import end_of_run

    args.seed = drawn_seed(
        args.seed, args.resume, (path for set_ in datasets for path in _rank_folders(args, set_).values())
    )
    tokenizer = TextTokenizer(checkpoint.tokenizer_dir, clean_up=args.clean_up_text)
    options = prepare_speech(speech, args, options)
    settings = journal_settings(
        config,
        checkpoint=identity(checkpoint, () if speech is None else speech.files),
        checkpoint_path=checkpoint.path,
        backend=args.backend,
        seed=args.seed,
        nbest=1,
        options=options,
        with_scores=args.write_scores,
        form=None if speech is None else speech.form,
    ) | {"clean_up_text": args.clean_up_text}
    codes = []
    with ExitStack() as stack:
        # All at once, so that a directory in use is found before anything is decoded.
        writers = [_open_writers(args, checkpoint, dataset, speech, tokenizer, settings, stack) for dataset in datasets]
        engine = make_engine(args.backend, checkpoint, config.dtype, **options)
        stack.callback(engine.close)
        for dataset, of_ranks in zip(datasets, writers, strict=True):
            begun = time.monotonic()
            tally = _decode(args, config, checkpoint, dataset, speech, tokenizer, engine, of_ranks)
            where, seconds = str(_directory(args, dataset)), time.monotonic() - begun
            folders = [writer.directory for writer in of_ranks.values()]
            end_of_run(folders, tally, seconds, dataset.specifier.text, args.command, dataset.samples)
            _remove_stale_ranks(args, dataset)
            codes.append(report(tally, seconds, where))
    return max(codes)


def _directory(args: argparse.Namespace, dataset: Dataset) -> Path:
    """Where the results of a data set go, below the output directory whatever stands in its specifier."""
    from ..io.names import safe_file_name

    if args.directory_names == "name":
        return args.output_dir / safe_file_name(dataset.directory_name)
    parts = [part for part in dataset.specifier.text.replace(":", "_").split("/") if part]
    return args.output_dir.joinpath(*map(safe_file_name, parts))


def _rank_folders(args: argparse.Namespace, dataset: Dataset) -> dict[int, Path]:
    """Folder of each rank of this job."""
    first = (args.rank - 1) * args.num_workers
    folder = _directory(args, dataset)
    return {rank: folder / f"inference_rank{rank}" for rank in range(first, first + args.num_workers)}


def _remove_stale_ranks(args: argparse.Namespace, dataset: Dataset) -> None:
    """Takes ``results.json`` out of rank folders that this number of ranks does not have.

    They are of an earlier run with more ranks, and whoever reads all of them would find keys twice. Their journals and wavs stay:
    a run with as many ranks as then writes them again without decoding.
    """
    from ..io.journal import FOLDER, in_use

    for folder in _directory(args, dataset).glob("inference_rank*"):
        number, results = folder.name.removeprefix("inference_rank"), folder / "results.json"
        stale = number.isdecimal() and int(number) >= args.world_size * args.num_workers
        if stale and (folder / FOLDER).is_dir() and results.is_file() and not in_use(folder):
            log.info("%s: of an earlier run with more ranks, removed", results)
            results.unlink()


def _open_writers(
    args: argparse.Namespace,
    checkpoint: Checkpoint,
    dataset: Dataset,
    speech: Speech | None,
    tokenizer: TextTokenizer,
    settings: dict[str, Any],
    stack: ExitStack,
) -> dict[int, BagpiperWriter]:
    """The writer of each rank of this job; their journals are closed with ``stack``."""
    from ..io.journal import Journal
    from ..io.results_bagpiper import BagpiperWriter

    writers = {}
    for rank, directory in _rank_folders(args, dataset).items():
        journal = Journal(directory, settings, resume=args.resume)
        stack.callback(journal.close)
        shared = (directory, checkpoint.layout, journal, speech, tokenizer.decode_bagpiper, args.text_format)
        writers[rank] = BagpiperWriter(*shared, with_scores=args.write_scores)
    return writers


def _decode(
    args: argparse.Namespace,
    config: DecodingConfig,
    checkpoint: Checkpoint,
    dataset: Dataset,
    speech: Speech | None,
    tokenizer: TextTokenizer,
    engine: Engine,
    writers: dict[int, BagpiperWriter],
) -> Any:
    from ..io.dataset_json import read_utterances
    from ..prompt.bagpiper import codec_encoder, listening_of
    from .job import run_job

    notes: Counter[str] = Counter()
    reading = reading_options(args, notes)
    listening = listening_of(checkpoint, args.long_audio)
    world = args.world_size * args.num_workers
    writer_of = {uid: writers[i % world] for i, uid in enumerate(dataset.samples) if i % world in writers}
    layout = checkpoint.layout

    def items() -> Iterator[tuple[BagpiperWriter, Item]]:
        utterances = read_utterances(
            dataset,
            layout,
            tokenizer,
            samples=tuple(writer_of),
            encode_audio=None if speech is None else codec_encoder(layout, speech.codec, notes),
            listening=listening,
            reading=reading,
        )
        for item in utterances:
            yield writer_of[item[0] if isinstance(item, tuple) else item.key], item

    def make_tower() -> AudioTower:
        from ..audio.tower import AudioTower

        return AudioTower(checkpoint, dtype=config.dtype, device=choose_device(args.device, gpu=True))

    tally = run_job(
        engine,
        config,
        list(writers.values()),
        items(),
        speech=speech,
        seed=args.seed,
        in_flight=in_flight(args),
        total=len(writer_of),
        make_tower=None if listening is None else make_tower,
    )
    tally.notes.update(notes if listening is None else notes + listening.notes)
    return tally


if __name__ == "__main__":
    insist_on_utf8()
    sys.exit(main())
