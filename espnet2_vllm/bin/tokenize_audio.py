"""Tokenise recordings for OpusLM: ``wav.scp`` in, ``wav.scp`` of token arks out, as ESPnet's stage 5 writes them.

One unit of an SSL model (XEUS and its k-means) and the codes of the checkpoint's codec a frame. Other files of the directory are
copied.
"""

from __future__ import annotations

import argparse
import functools
import logging
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ..errors import ConfigError, DataError
from .options import add, add_reading_options, at_least, choose_device, reading_options, run_command
from .utf8 import insist_on_utf8

log = logging.getLogger(__name__)

COPIED = ("text", "utt2spk", "answer")
_TOGETHER = 32  # recordings
_NAMED = 20


def get_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="tokenize_audio", description=__doc__)
    add(parser, "data-dir", type=Path, required=True, help="with wav.scp (or --name)")
    add(parser, "output-dir", type=Path, required=True)
    add(parser, "name", nargs="+", default=["wav.scp"], help="files of recordings, such as mix.scp for enhancement")
    add(
        parser,
        "train-config",
        type=Path,
        required=True,
        help="OpusLM checkpoint: config.yaml, folder or converted directory",
    )
    add(parser, "model-file", type=Path, help="its model.pth")
    add(parser, "inference-config", type=Path, help="decoding yaml whose codec_ssl.tokenizer names the codec")
    add(parser, "ssl-config", type=Path, required=True, help="config.yaml of the SSL model")
    add(parser, "ssl-checkpoint", type=Path, required=True, help="its weights")
    add(
        parser,
        "ssl-kmeans",
        type=Path,
        required=True,
        help="k-means of its hidden states: .npy, or a joblib file, which can run code: only from whom you trust",
    )
    add(parser, "ssl-layer", type=at_least(0), default=18, help="which hidden states, from 0 (OpusLM releases: 18)")
    add(parser, "device", help="by default the GPU where there is one")
    add_reading_options(functools.partial(add, parser))
    add(
        parser,
        "log-level",
        type=str.upper,
        default="INFO",
        choices=("ERROR", "WARNING", "INFO", "DEBUG"),
        help="of logging",
    )
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0 if every recording was tokenised, 1 if not, 2 for options that cannot be used."""
    return run_command(get_parser(), run, argv)


def run(args: argparse.Namespace, given: frozenset[str]) -> int:
    """Tokenises all recordings; what cannot be is counted and named."""
    from ..io.files import check_another_folder
    from ..io.keyed import read_keyed, write_keyed

    check_another_folder(args.output_dir, args.data_dir)
    faults: dict[str, dict[str, DataError]] = {name: {} for name in args.name}
    tables = {name: read_keyed(args.data_dir / name, faults[name]) for name in args.name}
    for name, recordings in tables.items():
        if not recordings:
            raise DataError(f"{args.data_dir / name}: no recordings")
    tokeniser = make_tokeniser(args)
    reading = reading_options(args, tokeniser.notes)
    folder = args.output_dir / "data"
    folder.mkdir(parents=True, exist_ok=True)
    failed = False
    for name, recordings in tables.items():
        places, failures = _write(folder / f"{Path(name).stem}_codec_ssl.ark", tokeniser, recordings, reading)
        failures |= {key: str(fault) for key, fault in faults[name].items()}
        write_keyed(args.output_dir / name, places)
        for key in [*failures][:_NAMED]:
            log.error("%s: %s: %s", name, key, failures[key])
        log.info("%d of %d recordings tokenised: %s", len(places), len(recordings), args.output_dir / name)
        failed = failed or bool(failures)
    for name in COPIED:
        if (args.data_dir / name).is_file():
            shutil.copyfile(args.data_dir / name, args.output_dir / name)
    for note, count in sorted(tokeniser.notes.items()):
        log.warning("%d %s", count, note)
    return 1 if failed else 0


def make_tokeniser(args: argparse.Namespace) -> Any:
    """The checkpoint's codec and the SSL model that the options name."""
    from ..audio.tokenising import SpeechTokeniser
    from ..audio.units import SpeechUnits, UnitsDescription
    from ..checkpoint import ensure_converted
    from ..codec import codec_from_tokenizer
    from ..decoding import load_decoding
    from .job import load_fitting_codec

    checkpoint = ensure_converted(args.train_config, args.model_file, family="opuslm")
    layout, description, base = checkpoint.layout, checkpoint.codec, checkpoint.codec_base
    if args.inference_config is not None:
        config = load_decoding(args.inference_config, "opuslm")
        if config.audio is not None and config.audio.tokenizer is not None:
            description = codec_from_tokenizer(config.audio.tokenizer, where=f"{config.source}: codec_ssl.tokenizer")
            base = args.train_config if args.train_config.is_dir() else args.train_config.parent
    if description is None:
        raise ConfigError(
            "neither --inference-config nor the checkpoint names a codec; give a yaml with codec_ssl.tokenizer"
        )
    device = choose_device(args.device, gpu=True)
    codec = load_fitting_codec(description, base, layout, device)
    units = UnitsDescription(args.ssl_config, args.ssl_checkpoint, args.ssl_kmeans, args.ssl_layer)
    return SpeechTokeniser(layout, codec, SpeechUnits(units, clusters=layout.streams[0].size, device=device))


def _write(
    ark: Path, tokeniser: Any, recordings: dict[str, str], reading: Any
) -> tuple[dict[str, str], dict[str, str]]:
    """Places of the tokens by key, and why others have none."""
    import kaldiio

    from ..io.files import whole_file

    places, failures = {}, {}
    with whole_file(ark, binary=True) as file:
        for batch in _batches(recordings, failures, reading, tokeniser):
            found = tokeniser([clip for _, clip in batch])
            for (key, _), tokens in zip(batch, found, strict=True):
                if isinstance(tokens, DataError):
                    failures[key] = str(tokens)
                    continue
                places[key] = f"{ark}:{file.tell() + len(key.encode()) + 1}"
                kaldiio.save_ark(file, {key: tokens.reshape(-1)})
    return places, failures


def _batches(
    recordings: dict[str, str], failures: dict[str, str], reading: Any, tokeniser: Any
) -> Iterator[list[tuple[str, Any]]]:
    """Recordings at the tokeniser's rate, so many as are encoded together."""
    from ..audio import mono_at, read_audio
    from ..io.items import item

    batch = []
    for key, spec in recordings.items():
        try:
            with item():
                wav = mono_at(*read_audio(spec, reading=reading), tokeniser.rate, tokeniser.notes)
            batch.append((key, (wav, tokeniser.rate)))
        except DataError as error:
            failures[key] = str(error)
        if len(batch) == _TOGETHER:
            yield batch
            batch = []
    if batch:
        yield batch


if __name__ == "__main__":
    insist_on_utf8()
    sys.exit(main())
