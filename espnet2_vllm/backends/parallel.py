"""The ``vllm`` backend several times: requests shared among engines, each in a process of its own on its share of the GPUs.

vLLM balances requests among engines only behind its asynchronous front end; its synchronous ``LLMEngine`` refuses to. The models
of this package are dense, so engines need not know of each other, and this is all that vLLM's data parallelism would be.
"""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import queue
import site
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ..engine.compat import engine_version
from ..errors import ConfigError, EngineError, SpeechLMError
from ..plan import RowRequest
from .base import Outcome, check_fits

if TYPE_CHECKING:
    from ..checkpoint import Checkpoint

log = logging.getLogger(__name__)

_WAIT = 0.01  # seconds that a step waits for results, so that new requests do not wait for it
_GRACE = 30.0  # seconds that an engine gets to end by itself
DEVICES = "CUDA_VISIBLE_DEVICES"


class Start(NamedTuple):
    """What an engine process is told first. ``options``: keyword arguments of ``VllmEngine``."""

    directory: Path
    options: dict[str, Any]
    log_level: int


class Results(NamedTuple):
    """What came out of a step, by the numbers of the requests: ``Engine.step`` and ``Engine.take_rows``."""

    finished: list[tuple[int, Outcome]]
    rows: list[tuple[int, np.ndarray]]


def send(connection: Connection, message: Any) -> None:
    """Not ``Connection.send``, whose way with tensors is shared memory between relatives."""
    connection.send_bytes(pickle.dumps(message, pickle.HIGHEST_PROTOCOL))


def receive(connection: Connection) -> Any:
    """Raises EOFError where the other end is gone."""
    return pickle.loads(connection.recv_bytes())


def device_shares(engines: int, each: int) -> list[str | None]:
    """``CUDA_VISIBLE_DEVICES`` of each of ``engines`` that take ``each`` GPUs; None each on a machine without.

    Raises:
        ConfigError: if this process sees fewer.
    """
    import torch

    if not torch.cuda.is_available():
        return [None] * engines
    named = [name for name in os.environ.get(DEVICES, "").split(",") if name]
    names = named or [str(index) for index in range(torch.cuda.device_count())]
    if len(names) < engines * each:
        raise ConfigError(
            f"data_parallel_size {engines} with {each} GPUs an engine needs {engines * each} GPUs, {len(names)} are visible"
        )
    return [",".join(names[index * each : (index + 1) * each]) for index in range(engines)]


@dataclass(eq=False)
class EngineProcess:
    """The other end of ``engine_process``. Orders are handed over by a thread, so that neither side ever waits for the other.

    Attributes:
        name: for messages.
        requests: numbers of those under way here.
    """

    name: str
    process: subprocess.Popen
    connection: Connection
    requests: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._orders: queue.SimpleQueue = queue.SimpleQueue()
        threading.Thread(target=self._hand_over, name=f"orders of {self.name}", daemon=True).start()

    def _hand_over(self) -> None:
        while (order := self._orders.get()) is not None:
            try:
                send(self.connection, order)
            except OSError:
                return  # it is gone, which whoever receives from it is told

    def order(self, *order: Any) -> None:
        self._orders.put(order)

    def receive(self) -> Any:
        """What it says next.

        Raises:
            SpeechLMError: what it ended with, or that it ended without a word.
        """
        try:
            message = receive(self.connection)
        except (EOFError, OSError):
            self.end()
            raise EngineError(
                f"{self.name} ended with exit code {self.process.returncode} and {len(self.requests)} requests under way, which "
                "have no result; its last lines in the log say why"
            ) from None
        if isinstance(message, SpeechLMError):
            raise type(message)(f"{self.name}: {message}")
        return message

    def end(self, grace: float = _GRACE) -> None:
        """Waits ``grace`` seconds for the process to end, and kills it otherwise. What it still says is dropped."""
        until = time.monotonic() + grace
        # It cannot read an order while it waits to be heard. Once it has closed its end, it is about to go.
        with contextlib.suppress(EOFError, OSError):
            while not self.connection.closed and self.connection.poll(max(until - time.monotonic(), 0)):
                self.connection.recv_bytes()
        try:
            self.process.wait(max(until - time.monotonic(), 0))
        except subprocess.TimeoutExpired:
            log.log(logging.WARNING if grace else logging.INFO, "%s: killed after %g s", self.name, grace)
            self.process.kill()
            self.process.wait()
        self._orders.put(None)
        self.connection.close()


def module_path() -> str:
    """``PYTHONPATH`` of a process that is to find this package: where it lies too, unless Python looks there by itself.

    What that variable names comes before the standard library, where the packages of an environment must not be.
    """
    root = str(Path(__file__).resolve().parents[2])
    own = {str(Path(folder).resolve()) for folder in (*site.getsitepackages(), site.getusersitepackages())}
    return os.pathsep.join(filter(None, [None if root in own else root, os.environ.get("PYTHONPATH")]))


def start_process(name: str, start: Start, devices: str | None, cores: int) -> EngineProcess:
    """An engine that begins to load; its first message says that it is ready. ``cores``: of a CPU, for it alone."""
    mine, its = Pipe()
    # The process is there for the engine alone.
    environment = os.environ | {"PYTHONPATH": module_path(), "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    if devices is None:
        environment.setdefault("OMP_NUM_THREADS", str(cores))
    else:
        environment[DEVICES] = devices
        log.info("%s: GPUs %s", name, devices)
    command = [sys.executable, "-m", "espnet2_vllm.backends.engine_process", str(its.fileno()), name]
    process = subprocess.Popen(command, env=environment, pass_fds=[its.fileno()], stdin=subprocess.DEVNULL)
    its.close()
    engine = EngineProcess(name, process, mine)
    engine.order(*start)
    return engine


class DataParallelEngine:
    """Hands each request to the engine that has the fewest.

    Args:
        checkpoint: a converted directory.
        data_parallel_size: engines; each takes ``tensor_parallel_size`` GPUs.
        options: of each ``VllmEngine``.

    Attributes:
        version: of vLLM.

    Raises:
        ConfigError: for options that cannot be used, or if there are too few GPUs.
        EngineError: if an engine does not start.
    """

    def __init__(
        self, checkpoint: Checkpoint, *, data_parallel_size: int, keep_logits: bool = False, **options: Any
    ) -> None:
        if not isinstance(data_parallel_size, int) or data_parallel_size < 1:
            raise ConfigError(f"data_parallel_size {data_parallel_size!r}: expected a whole number of at least 1")
        if keep_logits:
            raise ConfigError("logits are kept by an engine in this process only; leave data_parallel_size at 1")
        if options.get("distributed_executor_backend") == "ray":
            raise ConfigError("with Ray leave data_parallel_size at 1, and start a job for each part of the utterances")
        self.version = engine_version()
        self.layout = checkpoint.layout
        self._places: dict[str, tuple[int, EngineProcess]] = {}
        self._names: dict[int, str] = {}
        self._fresh: list[tuple[str, np.ndarray]] = []
        self._count = 0
        self._engines: list[EngineProcess] = []
        self._failure: SpeechLMError | None = None
        shares = device_shares(data_parallel_size, options.get("tensor_parallel_size", 1))
        try:
            self._start(Start(checkpoint.path, options, logging.getLogger().getEffectiveLevel()), shares)
        except BaseException:
            for engine in self._engines:
                engine.end(grace=0)  # they may load for a long time yet
            raise

    def _start(self, start: Start, shares: Sequence[str | None]) -> None:
        cores = max(len(os.sched_getaffinity(0)) // len(shares), 1)
        for index, devices in enumerate(shares):
            name = f"engine {index + 1} of {len(shares)}"
            self._engines.append(start_process(name, start, devices, cores))
        self.max_rows = min(engine.receive() for engine in self._engines)

    # -- requests -----------------------------------------------------------------------------------------------------
    @property
    def unfinished(self) -> int:
        return len(self._places)

    def submit(self, request: RowRequest) -> None:
        check_fits(request, self.max_rows)
        engine = min(self._engines, key=lambda one: len(one.requests))
        number = self._count
        self._count += 1
        engine.requests.add(number)
        self._places[request.request_id] = number, engine
        self._names[number] = request.request_id
        # Rules hold the layout, which the other side has.
        engine.order("submit", number, replace(request, rules=None), request.rules.to_dict())

    def step(self) -> list[tuple[str, Outcome]]:
        """Raises what an engine ended with, once all that others had finished by then is given out."""
        serving = self._engines if self._failure is None else ()
        waiting = {engine.connection: engine for engine in serving if engine.requests}
        finished = []
        for connection in wait(list(waiting), _WAIT) if waiting else ():
            engine = waiting[connection]
            try:
                results = engine.receive()
            except SpeechLMError as error:
                self._failure = error
                continue
            for number, rows in results.rows:
                if number in self._names:
                    self._fresh.append((self._names[number], rows))
            for number, outcome in results.finished:
                engine.requests.discard(number)
                if number in self._names:  # else it was aborted meanwhile
                    name = self._names.pop(number)
                    del self._places[name]
                    finished.append((name, outcome))
        if self._failure is not None and not finished:
            raise self._failure
        return finished

    def take_rows(self) -> list[tuple[str, np.ndarray]]:
        fresh, self._fresh = self._fresh, []
        return fresh

    def abort(self, ids: Iterable[str]) -> None:
        wanted = {name for name in ids if name in self._places}
        self._fresh = [(name, rows) for name, rows in self._fresh if name not in wanted]
        for name in wanted:
            number, engine = self._places.pop(name)
            del self._names[number]
            engine.requests.discard(number)
            engine.order("abort", number)

    def close(self) -> None:
        for engine in self._engines:
            engine.order("close")
        for engine in self._engines:
            engine.end()
        self._engines.clear()
        self._places.clear()
        self._names.clear()
