"""From a checkpoint in ESPnet's format to the directory that vLLM and transformers load."""

import logging
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .. import __version__
from ..errors import CheckpointError, ConfigError
from ..releases import RELEASE_FILES
from ..text import TextTokenizer
from .backbones import kept_keys, rope_settings
from .describe import Description, describe, tokenizer_files
from .expected import ARCHITECTURES
from .identity import write_digests
from .names import CODEC, CONTINUOUS_AUDIO, EMBEDDING, HEAD, LOSS_WEIGHTS, MODEL
from .plan import DTYPES, KEEP, Plan, make_plan
from .sources import DESCRIPTION_FILE, Source, find_source
from .tensors import TensorSource, open_tensors
from .texts import check_texts
from .writing import FORMAT, appearing, check_replaceable, copy_files, write_json, write_shards, write_tensors

FORMAT_VERSION = 1  # of converted directories; a cached one of another version is not used
SHARD_SIZE = 4 * 10**9

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Report:
    """What a conversion did. lines: for people. path: the converted directory. dropped: name -> why."""

    path: Path
    lines: tuple[str, ...]
    dropped: Mapping[str, str]


def convert(
    src: str | Path,
    dst: str | Path,
    *,
    model_file: str | Path | None = None,
    train_config: str | Path | None = None,
    vocab_order: str = "yaml",
    shard_size: int = SHARD_SIZE,
    dtype: str = KEEP,
    family: str | None = None,
) -> Report:
    """Convert the ESPnet checkpoint ``src`` (folder, training yaml or model file) to the directory ``dst``.

    Args:
        model_file, train_config: where ``src`` holds several, or they lie elsewhere.
        vocab_order: of the ids of a Bagpiper model: ``yaml``, that of the yaml's keys; ``name``, text first and the others by name.
            A yaml's own record of it (``vocab_intervals``) must agree.
        shard_size: bytes of a weight file at most.
        dtype: ``keep``, or the dtype to round the language model to. The codec is kept as it is.
        family: refuse a checkpoint of another family.

    Raises:
        CheckpointError: nothing found, another family, tensors missing, unknown or of another shape, a vocabulary that
            does not close, a codec that does not fit, a file cut short, ``dst`` taken by something else, disk full.
        ConfigError: an argument out of range.
    """
    if dtype not in DTYPES:
        raise ConfigError(f"dtype {dtype!r}: expected one of {', '.join(DTYPES)}")
    if shard_size < 1:
        raise ConfigError(f"shard size {shard_size}: expected a positive number of bytes")
    dst = Path(dst)
    check_replaceable(dst)
    source = find_source(src, model_file=model_file, train_config=train_config)
    check_family(source.family, family, source.train_config)
    return convert_source(source, dst, vocab_order=vocab_order, shard_size=shard_size, dtype=dtype)


def convert_source(
    source: Source, dst: Path, *, vocab_order: str = "yaml", shard_size: int = SHARD_SIZE, dtype: str = KEEP
) -> Report:
    """``convert`` for files that have been found already."""
    description = describe(source, vocab_order=vocab_order)
    tensors = open_tensors(source.model_file)
    plan = make_plan(description, tensors, dtype=dtype)
    _check_second_head(tensors, plan)
    _check_tied(description, tensors, plan)
    _check_loss_weights(description, tensors, plan)
    with appearing(dst, plan.nbytes) as folder:
        _write_small_files(description, plan, folder)
        _check_tokenizer(description, folder / "tokenizer")
        texts = check_texts(description.tokenizer_dir, folder / "tokenizer")
        write_shards(plan.part(MODEL), tensors, folder, shard_size)
        for part, file in _other_files(description).items():
            write_tensors(plan.part(part), tensors, folder / file)
        write_digests(folder)
        write_json(folder / DESCRIPTION_FILE, _speechlm_json(description, plan, vocab_order))
    return Report(dst, _report(description, tensors, plan, dst, texts), plan.dropped)


def check_family(found: str, wanted: str | None, where: Path) -> None:
    if wanted is not None and found != wanted:
        raise CheckpointError(f"{where} is a checkpoint of the {found} family, expected one of the {wanted} family")


def parse_size(text: str) -> int:
    """``4GB``, ``500MB``, ``2GiB`` or a number of bytes. Raises ConfigError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(?:([KMGT])(i?)B?|B)?", text.strip(), re.IGNORECASE)
    if match is None or not float(match.group(1)):
        raise ConfigError(f"size {text!r}: expected a number of bytes, or one with a unit such as 4GB, 500MB, 2GiB")
    number, unit, binary = match.groups()
    power = " KMGT".index(unit.upper()) if unit else 0
    return int(float(number) * (1024 if binary else 1000) ** power)


# -- checks that need more than names ---------------------------------------------------------------------------------
def _check_second_head(tensors: TensorSource, plan: Plan) -> None:
    """OpusLM files hold the head twice; ESPnet loads both into one parameter, so they must not differ."""
    import torch

    first, second = "corelm.lm_head.weight", "criterion.lm_head.weight"
    if second in plan.dropped and not torch.equal(tensors.load(first), tensors.load(second)):
        raise CheckpointError(
            f"{tensors.path}: {first} and {second} differ, though they are one parameter in ESPnet; which one decodes "
            "depends on the order of loading. Save the model again from ESPnet"
        )


def _check_tied(description: Description, tensors: TensorSource, plan: Plan) -> None:
    """A tied head is one parameter with the embedding, which a file may hold under both names."""
    import torch

    names = [entry.source for entry in plan.part(MODEL) if entry.name in (EMBEDDING, HEAD)]
    if description.tied and not torch.equal(*map(tensors.load, names)):
        raise CheckpointError(
            f"{tensors.path}: {' and '.join(names)} differ, though model.model_conf.tie_word_embeddings of "
            f"{description.source.train_config} makes them one. ESPnet before 202609 took that key and did not tie: if the model "
            "is of its time, take the key out"
        )


def _check_loss_weights(description: Description, tensors: TensorSource, plan: Plan) -> None:
    """The loss has one weight for all ids of text and of each stream: where it changes in between, the ids are others."""
    name = next((name for name in plan.dropped if name.endswith(LOSS_WEIGHTS)), None)
    layout = description.layout
    if name is None or tensors.specs[name].shape != (layout.vocab_size,):
        return
    weights = tensors.load(name)
    for what, (start, stop) in (
        ("text", layout.text),
        *((f"audio stream {s}", span) for s, span in enumerate(layout.streams)),
    ):
        low, high = map(float, weights[start:stop].aminmax())
        if low != high:
            raise CheckpointError(
                f"{tensors.path}: ids {start} to {stop - 1} are {what} by {description.source.train_config}, but {name}, the "
                f"weight of each id in training, goes from {low:g} to {high:g} there: the ids are in another order (--vocab-order)"
            )


def _check_tokenizer(description: Description, folder: Path) -> None:
    """The copied tokenizer opens, has no id beyond the text ids and, for OpusLM, the names that token_list states."""
    tokenizer = TextTokenizer(folder)
    size = description.layout.text.size
    where = description.source.train_config
    if len(tokenizer) > size:
        raise CheckpointError(
            f"{where}: the tokenizer in {description.tokenizer_dir} has {len(tokenizer)} tokens, but text has {size} ids"
        )
    if description.source.family == "opuslm":
        from .opuslm import token_names

        wrong = tokenizer.differences(token_names(description.source, description.layout))
        if wrong:
            shown = ", ".join(f"{d.index} is {d.token!r}, listed as {d.listed!r}" for d in wrong[:5])
            raise CheckpointError(
                f"{where}: the tokenizer in {description.tokenizer_dir} is not the one of token_list: {len(wrong)} tokens "
                f"differ ({shown}); is subword_model the one that the model was trained with?"
            )


# -- small files ------------------------------------------------------------------------------------------------------
def _write_small_files(description: Description, plan: Plan, folder: Path) -> None:
    write_json(folder / "config.json", backbone_config(description, plan))
    copies = {f"tokenizer/{path.name}": path for path in tokenizer_files(description.tokenizer_dir)}
    for part in (description.codec, description.continuous_audio):
        copies |= part.copies if part else {}
    if description.layout.family == "bagpiper":  # what the release says of itself holds for its conversion too
        beside = {name: description.source.base_dir / name for name in RELEASE_FILES}
        copies |= {name: path for name, path in beside.items() if path.is_file()}
    copy_files(copies, folder)


def _other_files(description: Description) -> dict[str, str]:
    """Part -> file of the tensors that are not the language model's."""
    files = {}
    if description.codec is not None and description.codec.in_checkpoint:
        weights = description.codec.description.checkpoint_path
        files[CODEC] = weights or f"{description.codec.description.path}/model.safetensors"
    if description.continuous_audio is not None:
        files[CONTINUOUS_AUDIO] = description.continuous_audio.facts["weights"]
    return files


def backbone_config(description: Description, plan: Plan) -> dict[str, Any]:
    """config.json: the backbone's own, over the unified vocabulary, readable by transformers 4 and 5.

    The ids of special tokens are taken out: they are the text tokenizer's and mean other things here. The dtype is the
    widest of the weights, so that loading by it loses nothing.
    """
    config = {
        key: value for key, value in description.backbone.to_dict().items() if key in kept_keys(description.backbone)
    }
    config |= {
        "architectures": [ARCHITECTURES[config["model_type"]]],
        "vocab_size": description.layout.vocab_size,
        "tie_word_embeddings": False,
        "dtype": widest(plan),
        **{f"{name}_token_id": None for name in ("bos", "eos", "pad")},
        **rope_settings(description.backbone),
    }
    return config


def widest(plan: Plan) -> str:
    """The dtype that holds every weight of the language model without loss."""
    import functools

    import torch

    dtypes = [getattr(torch, entry.spec.dtype) for entry in plan.part(MODEL)]
    return str(functools.reduce(torch.promote_types, dtypes)).removeprefix("torch.")


def _speechlm_json(description: Description, plan: Plan, vocab_order: str) -> dict[str, Any]:
    source = description.source
    tensors: dict[str, dict[str, str]] = {}
    for entry in plan.entries:
        tensors.setdefault(entry.part, {})[entry.name] = str(entry.spec)
    return {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "layout": description.layout.to_dict(),
        "vocabulary": description.vocabulary,
        "preprocessor": dict(description.preprocessor),
        "codec": description.codec.description.to_dict() if description.codec else None,
        "continuous_audio": dict(description.continuous_audio.facts) if description.continuous_audio else None,
        "max_rows": description.backbone.max_position_embeddings,
        "source": {
            "train_config": str(source.train_config),
            "model_file": str(source.model_file),
            "vocab_order": vocab_order,
            "converter": f"espnet2_vllm {__version__}",
        },
        "dropped": dict(plan.dropped),
        "files": {MODEL: None, **_other_files(description)},
        "tensors": tensors,
    }


# -- the report -------------------------------------------------------------------------------------------------------
def _report(
    description: Description, tensors: TensorSource, plan: Plan, dst: Path, texts: Sequence[str]
) -> tuple[str, ...]:
    source, layout = description.source, description.layout
    lines = [
        f"{source.family} checkpoint: {source.model_file}",
        f"  described by {source.train_config}; backbone {description.backbone.model_type} as in {description.backbone_dir}",
        f"  vocabulary: {description.vocabulary} = rows of the embedding and of the head; {layout.num_streams} streams",
    ]
    lines += [f"  {note}" for note in (*source.notes, *tensors.notes, *description.notes, *texts)]
    for part in (MODEL, CODEC, CONTINUOUS_AUDIO):
        entries = plan.part(part)
        if entries:
            kinds = Counter(entry.spec.dtype for entry in entries)
            listed = ", ".join(f"{count} {dtype}" for dtype, count in kinds.items())
            lines.append(f"  {part}: {len(entries)} tensors, {_size(sum(e.spec.nbytes for e in entries))} ({listed})")
    lines += _rounding(description, plan)
    cut = [f"{e.source}: first {e.rows} of {e.stored.shape[0]} rows, one a stream" for e in plan.entries if e.rows]
    lines += [f"  kept of {line}" for line in cut]
    reasons = Counter(plan.dropped.values())
    for reason, count in reasons.items():
        names = [name for name, why in plan.dropped.items() if why == reason]
        shown = ", ".join(names[:4]) + (f" and {count - 4} more" if count > 4 else "")
        lines.append(f"  dropped {count} ({reason}): {shown}")
    return (*lines, f"written to {dst}")


def _size(nbytes: int) -> str:
    return f"{nbytes / 1e9:.2f} GB" if nbytes >= 10**8 else f"{nbytes / 1e6:.2f} MB"


def _rounding(description: Description, plan: Plan) -> list[str]:
    """ESPnet creates the body in the dtype of the yaml and copies the weights into it, whatever dtype decodes."""
    lines = []
    for (part, stored, casts), count in Counter((e.part, e.stored.dtype, e.casts) for e in plan.rounded).items():
        reason = ""
        if part == CONTINUOUS_AUDIO:
            reason = ", as ESPnet does on loading (multimodal_io.continuous_audio.dtype)"
        elif casts[0] == description.body_dtype and stored != casts[0]:
            reason = f", as ESPnet does on loading ({description.body_dtype_key}); embedding and heads are not"
        lines.append(f"  rounded {count} tensors of {part} from {stored} to {' then '.join(casts)}{reason}")
    return lines
