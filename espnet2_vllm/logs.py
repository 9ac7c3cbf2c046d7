"""What is logged, and where: this package's lines on stderr, one a message; those of libraries in a file that is named once."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from .errors import ConfigError, printable
from .io.files import open_own, own_folder, user_cache

OWN = "espnet2_vllm"
LOG_FORMAT = "%(asctime)s (%(module)s:%(lineno)d) %(levelname)s: %(message)s"
# vLLM's own variables; who has set one knows what he wants to see.
_CONFIG_VARIABLE = "VLLM_LOGGING_CONFIG_PATH"
_USERS_CHOICE = (_CONFIG_VARIABLE, "VLLM_LOGGING_LEVEL", "VLLM_CONFIGURE_LOGGING", "VLLM_LOGGING_STREAM")
_OF_TORCH = ("TORCH_CPP_LOG_LEVEL", "ERROR")  # read when torch is imported
_MOST_BYTES = 4_000_000
LIBRARIES = "libraries.log"
_MARK = "espnet2_vllm.log."  # how the files of configurations that are written here begin

log = logging.getLogger(__name__)


class OneLineFormatter(logging.Formatter):
    """Keeps each message on a line of its own: an id or a text with a line break in it cannot write a line of the log."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - logging's name
        record.message = printable(record.message).replace("\n", "\\n")
        return super().formatMessage(record)


def set_up_logging(level: str = "INFO") -> None:
    """Logs to stderr in ESPnet's format; where the caller has set up logging already, only the level is set."""
    os.environ.setdefault(*_OF_TORCH)
    if not logging.getLogger().handlers:
        logging.getLogger().addHandler(_stderr_handler())
    logging.getLogger().setLevel(level.upper())


def libraries_to_file(path: Path) -> None:
    """From here on what libraries log and warn of goes to ``path``, with the time and the process, and only errors to stderr too.

    vLLM's processes do likewise. Nothing changes where the caller has set up logging, for a variable of vLLM's own that says how
    it logs, with ``--log-level DEBUG``, and where the file cannot be written.
    """
    root = logging.getLogger()
    own = [handler for handler in root.handlers if isinstance(handler.formatter, OneLineFormatter)]
    if len(own) != len(root.handlers) or root.level <= logging.DEBUG:
        return
    if not quiet_engine(path):
        return
    handler = logging.FileHandler(path, encoding="utf-8")
    handler.setFormatter(logging.Formatter(f"[%(process)d] {LOG_FORMAT}"))
    for shown in own:
        shown.addFilter(_is_for_the_reader)
    root.addHandler(handler)
    logging.captureWarnings(True)
    log.info("what libraries have to say goes to %s", path)


def quiet_engine(path: Path | None = None) -> bool:
    """Has vLLM log to ``path``, here and in its own processes, if it is not imported yet. Whether it will.

    Not where a variable of vLLM's says how it logs, or the file cannot be written.

    Args:
        path: by default one in the user's cache folder, which begins anew when it has grown large.
    """
    if any(os.environ.get(name) for name in _USERS_CHOICE):
        return False
    file = path or user_cache() / LIBRARIES
    try:
        if path is None:
            file.parent.mkdir(parents=True, exist_ok=True)
        else:
            own_folder(file.parent)
        with open_own(file, "ab") as stream:
            if path is None and stream.tell() > _MOST_BYTES:
                stream.truncate(0)
        os.environ[_CONFIG_VARIABLE] = _write_config(file)
    except (OSError, ConfigError) as error:
        log.info("libraries log here, as %s cannot be written (%s)", file, error)
        return False
    os.environ.setdefault(*_OF_TORCH)
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
    return True


def say(line: str) -> None:
    """Tells who waits what takes long: in the log, or on stderr where nobody has set up logging, as in a notebook."""
    if log.isEnabledFor(logging.INFO) and log.hasHandlers():
        log.info("%s", line)
    elif not log.hasHandlers():
        print(line, file=sys.stderr)


def in_process_of_vllm() -> None:
    """Sets up this package's own lines in a process that vLLM started, which has set up logging for itself alone."""
    own, theirs = logging.getLogger(OWN), logging.getLogger("vllm")
    if own.hasHandlers() or not theirs.handlers:
        return
    if Path(os.environ.get(_CONFIG_VARIABLE, "")).name.startswith(_MARK):
        own.addHandler(_stderr_handler())
        own.setLevel(logging.INFO)
        return
    for handler in theirs.handlers:
        own.addHandler(handler)
    own.setLevel(theirs.getEffectiveLevel())


@contextlib.contextmanager
def printing_to_log() -> Iterator[None]:
    """What is printed meanwhile (as ESPnet does when it is imported) becomes a message of the log."""
    import io

    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
            yield
    finally:
        for line in filter(None, printed.getvalue().splitlines()):
            logging.getLogger("espnet2").info("%s", line)


def _stderr_handler() -> logging.Handler:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(OneLineFormatter(LOG_FORMAT))
    return handler


def _is_for_the_reader(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.ERROR or record.name.partition(".")[0] in (OWN, "__main__")


def _write_config(path: Path) -> str:
    """A file with logging's configuration of vLLM in each of its processes; gone with this process."""
    import atexit

    handlers = {
        "file": {"class": "logging.FileHandler", "filename": str(path.absolute()), "encoding": "utf-8"},
        "stderr": {"class": "logging.StreamHandler", "stream": "ext://sys.stderr", "level": "ERROR"},
    }
    config = {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {"line": {"format": f"[%(process)d] {LOG_FORMAT}"}},
        "handlers": {name: {**handler, "formatter": "line"} for name, handler in handlers.items()},
        "loggers": {"vllm": {"handlers": list(handlers), "level": "INFO", "propagate": False}},
    }
    descriptor, name = tempfile.mkstemp(prefix=_MARK, suffix=".json")
    with open(descriptor, "w", encoding="utf-8") as file:
        json.dump(config, file)
    atexit.register(Path(name).unlink, missing_ok=True)
    return name
