"""The ``vllm`` backend: requests of rows on a stock vLLM engine."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import numpy as np

from ..checkpoint.headers import check_weights
from ..engine import channel
from ..engine.attention import set_attention
from ..engine.compat import check_options, engine_version, let_modules_be_scanned, watch_engine_process
from ..engine.continuous import to_parts
from ..engine.core import EXTRA_ARGS
from ..engine.options import check_given
from ..engine.plugin import register_classes
from ..engine.quantized import MEANINGS, vllm_options
from ..engine.rendezvous import stay_on_this_machine
from ..engine.symbols import check_symbols
from ..engine.tap import TAP
from ..errors import AbortError, ConfigError, EngineError, SpeechLMError
from ..plan import RowRequest, RowResult
from ..protocol import BagpiperRules
from ..protocol.bagpiper import MAX_ENFORCED
from .base import Outcome, check_fits
from .spawning import choose_spawn, keep_socket_names_short, main_left_out

if TYPE_CHECKING:
    from ..checkpoint import Checkpoint

log = logging.getLogger(__name__)

SCHEDULERS = {
    "bagpiper": "espnet2_vllm.engine.guidance.GuidanceScheduler",
    "opuslm": "espnet2_vllm.engine.scheduler.SpeechScheduler",
}
WORKERS = {
    True: "espnet2_vllm.engine.worker_cpu.SpeechCPUWorker",
    False: "espnet2_vllm.engine.worker_gpu.SpeechGPUWorker",
}
UNCHECKED = ("dummy", "sharded_state")  # load formats that do not read the directory's tensors by name
_FIXED = (
    "model",
    "dtype",
    "skip_tokenizer_init",
    "scheduler_cls",
    "worker_cls",
)  # fields of EngineArgs that are not the user's


def settable_options() -> set[str]:
    """Options that ``VllmEngine`` passes on: the fields of the installed vLLM's ``EngineArgs`` but for those it sets itself, and
    words of its own that stand for some."""
    engine_version()
    from vllm.engine.arg_utils import EngineArgs

    return {part.name for part in fields(EngineArgs)} - {*_FIXED} | {*MEANINGS}


def _said(error: Exception) -> str:
    """vLLM's own words; with the class, where there are few of them or they are no message."""
    text = str(error).strip()
    plain = isinstance(error, (RuntimeError, ValueError)) or type(error) is Exception
    return text if plain and text else f"{type(error).__name__}: {text or 'without a word'}"


@dataclass
class PrefixCache:
    """How much of the finished requests' prompts was found in the prefix cache. Companions of guidance are not counted.

    Attributes:
        requests: how many have finished.
        rows: of their prompts (teacher forcing: with the reference).
        hits: of these, rows that were not computed when the request was first admitted.
    """

    requests: int = 0
    rows: int = 0
    hits: int = 0

    def add(self, rows: int, hits: int) -> None:
        self.requests, self.rows, self.hits = self.requests + 1, self.rows + rows, self.hits + hits

    def __str__(self) -> str:
        return f"prefix cache: {self.hits} of {self.rows} prompt rows ({self.hits / max(self.rows, 1):.1%})"


class VllmEngine:
    """Continuous batching of all requests in flight.

    Args:
        checkpoint: a converted directory.
        dtype: of weights and KV cache.
        keep_logits: return raw logits with each result (slow; the engine then runs in this process).
        asynchronous: schedule a step ahead of the device; None takes vLLM's own choice (yes on CUDA, no on a CPU).
        options: fields of ``vllm.EngineArgs`` (``max_num_seqs``, ``max_model_len``, ``gpu_memory_utilization``, ...), and
            ``precision`` and ``kv_cache_precision``, which may be "fp8" on a GPU.

    Attributes:
        prefix_cache: hits so far; logged when the engine closes.
        version: of vLLM.

    Raises:
        ConfigError: for an option that vLLM does not take, or that is not the user's to set.
        EngineError: if vLLM is missing, outside the supported range, or refuses to start.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        *,
        dtype: str = "float32",
        keep_logits: bool = False,
        asynchronous: bool | None = None,
        **options: Any,
    ) -> None:
        self.version = engine_version()
        self.layout = checkpoint.layout
        self.keep_logits = keep_logits
        config = self._configure(checkpoint, dtype, options)
        if asynchronous is not None:
            # Set behind vLLM's own checks, which refuse it on a CPU.
            config.scheduler_config.async_scheduling = asynchronous
        from vllm.v1.engine.llm_engine import LLMEngine

        # Not part of the configuration, so it is said a second time.
        quiet = options.get("disable_log_stats", True)
        let_modules_be_scanned()
        try:
            with main_left_out(*options.values()):
                self._engine = LLMEngine.from_vllm_config(config, disable_log_stats=quiet)
        except Exception as error:
            # Out of memory, a cache too small for one sequence, ...: vLLM's own words say which, and it says some by assertions.
            if isinstance(error, SpeechLMError):
                raise
            what = _said(error)
            raise EngineError(f"vLLM did not start with the engine options {options}: {what}") from error
        watch_engine_process(self._engine.engine_core)
        self.max_rows = config.model_config.max_model_len
        self._seats = config.scheduler_config.max_num_seqs
        self._dtype = config.model_config.dtype
        self._requests: dict[str, RowRequest] = {}
        self._fresh: list[tuple[str, np.ndarray]] = []
        self._count = 0
        self.prefix_cache = PrefixCache()
        self._dead = False
        log.info("vLLM %s, %s, up to %d rows a sequence", self.version, dtype, self.max_rows)

    def _configure(self, checkpoint: Checkpoint, dtype: str, options: dict[str, Any]) -> Any:
        from vllm.engine.arg_utils import EngineArgs
        from vllm.platforms import current_platform

        check_given(options)
        cpu = current_platform.is_cpu()
        options = vllm_options(options, checkpoint.path, cpu=cpu)
        ranks = options.get("tensor_parallel_size", 1)
        if self.keep_logits and ranks != 1:
            raise ConfigError(
                f"logits are kept in this process only; with tensor_parallel_size {ranks} they are in others"
            )
        self._prepare_environment(cpu, dtype, ranks)
        stay_on_this_machine(ranks, options.get("distributed_executor_backend"))
        # Nothing about this machine and its models is sent anywhere.
        os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
        fixed = {"model": str(checkpoint.path), "dtype": dtype, "skip_tokenizer_init": True}
        fixed |= {"scheduler_cls": SCHEDULERS[checkpoint.layout.family], "worker_cls": WORKERS[cpu]}
        assert set(fixed) == set(_FIXED)
        for name in set(fixed) & set(options):
            raise ConfigError(f"engine option {name} is set by the backend itself")
        defaults = {"disable_log_stats": True, "enable_prefix_caching": True, "max_num_seqs": 16 if cpu else 512}
        defaults["use_tqdm_on_load"] = False
        if cpu:
            defaults["enforce_eager"] = True  # compiling takes longer than most runs on a CPU
            register_classes()
        elif options.get("max_num_seqs", 0) > 512 and not {"compilation_config", "cudagraph_capture_sizes"} & set(
            options
        ):
            defaults["max_cudagraph_capture_size"] = options["max_num_seqs"]  # where vLLM stops at 512
        try:
            config = EngineArgs(**fixed, **{**defaults, **options}).create_engine_config()
        except SpeechLMError:
            raise
        except Exception as error:  # noqa: BLE001 - it refuses by assertions and by whatever a wrong value runs into
            raise ConfigError(f"vLLM refused the engine options {options}: {_said(error)}") from error
        check_options(config, cpu=cpu)
        check_symbols(self.version, cpu=cpu, v2=config.use_v2_model_runner)
        if not cpu:
            set_attention(config)
        if config.load_config.load_format not in UNCHECKED:
            check_weights(checkpoint.path, config.model_config.hf_config, checkpoint.layout)
        return config

    def _prepare_environment(self, cpu: bool, dtype: str, ranks: int) -> None:
        if cpu or self.keep_logits:
            # A second process costs a start of its own and gains nothing on a CPU; logits do not travel.
            os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        keep_socket_names_short()
        if cpu:
            os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
            if ranks != 1:
                # vLLM would give each rank a NUMA node for itself, and refuses where there are fewer.
                os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
            return
        choose_spawn()
        if dtype == "float32":
            # Triton's attention would multiply float32 in TF32, whose ten bits of mantissa change greedy decisions.
            os.environ.setdefault("TRITON_F32_DEFAULT", "ieee")
            # On Ray's other machines too, where vLLM takes along its own variables only.
            taken = os.environ.get("VLLM_RAY_EXTRA_ENV_VARS_TO_COPY", "")
            names = dict.fromkeys([*filter(None, taken.split(",")), "TRITON_F32_DEFAULT"])
            os.environ["VLLM_RAY_EXTRA_ENV_VARS_TO_COPY"] = ",".join(names)

    # -- requests -----------------------------------------------------------------------------------------------------
    @property
    def unfinished(self) -> int:
        return len(self._requests)

    def submit(self, request: RowRequest) -> None:
        check_fits(request, self.max_rows)
        self._check_servable(request)
        name = str(self._count)
        self._count += 1
        rows = request.prompt if request.reference is None else np.concatenate([request.prompt, request.reference])
        prompt = {"prompt_token_ids": [int(token) for token in rows[:, 0]]}
        params = self._params(name, request, rows)
        self._ask(self._engine.add_request, name, prompt, params, refusals=(ValueError,))
        self._requests[name] = request

    def _check_servable(self, request: RowRequest) -> None:
        """Refuses here what would fail in the middle of a step.

        Raises:
            EngineError: for more enforced segments than a slot holds, or guidance without a seat for the companion.
        """
        rules = request.rules
        if not isinstance(rules, BagpiperRules):
            return
        if len(rules.enforce) > MAX_ENFORCED:
            raise EngineError(
                f"{request.request_id}: enforce_modality has {len(rules.enforce)} entries, the vllm backend takes at most "
                f"{MAX_ENFORCED}; shorten the list, or use --backend pytorch"
            )
        guided = any(block is not None and block.guidance > 1 for block in (rules.text, rules.audio))
        if guided and self._seats < 2:
            raise EngineError(f"{request.request_id}: guidance needs max_num_seqs of at least 2, it is {self._seats}")

    def _params(self, name: str, request: RowRequest, rows: np.ndarray) -> Any:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        args: dict[str, Any] = {"rules": request.rules.to_dict(), "seed": int(request.seed)}
        auxiliary = np.ascontiguousarray(rows[:, 1:], dtype="<i4")
        if auxiliary.any():
            args["auxiliary"] = auxiliary.tobytes()
        if request.continuous:
            args["continuous"] = to_parts(request.continuous, self._dtype)
        if self.keep_logits:
            args["tap"] = name
        if request.stream is not None:
            args["stream"] = list(request.stream)
        streams = self.layout.num_streams
        forced = request.reference is not None
        return SamplingParams(
            temperature=0.0,  # ids are chosen by our own sampler; this keeps vLLM from preparing another
            max_tokens=1 if forced else self.max_rows - len(rows),
            stop_token_ids=[self.layout.stop_token],
            ignore_eos=True,
            detokenize=False,
            prompt_logprobs=streams if forced else None,
            flat_logprobs=True,
            output_kind=RequestOutputKind.FINAL_ONLY if request.stream is None else RequestOutputKind.DELTA,
            extra_args={EXTRA_ARGS: args},
        )

    def step(self) -> list[tuple[str, Outcome]]:
        if not self._requests:
            return []
        finished = []
        for output in self._ask(self._engine.step):
            if output.finished:
                request = self._requests.pop(output.request_id)
                finished.append((request.request_id, self._result(output, request)))
                self.prefix_cache.add(len(output.prompt_token_ids), output.num_cached_tokens or 0)
            elif output.kv_transfer_params is not None:
                self._keep_rows(output)
        return finished

    def _keep_rows(self, output: Any) -> None:
        codes, _ = output.kv_transfer_params[EXTRA_ARGS]
        codes = np.frombuffer(codes, dtype="<i4").reshape(-1, self.layout.num_streams)
        if not (codes[:, 0] & channel.SPLIT).any():  # else the request is about to end with an error
            request_id = self._requests[output.request_id].request_id
            self._fresh.append((request_id, channel.decode(codes).ids))

    def take_rows(self) -> list[tuple[str, np.ndarray]]:
        fresh, self._fresh = self._fresh, []
        return fresh

    def _ask(self, call: Callable[..., Any], *args: Any, refusals: tuple[type[Exception], ...] = ()) -> Any:
        """Calls a method of vLLM's engine.

        Args:
            refusals: errors by which it refuses what it is given, and goes on.

        Raises:
            EngineError: for a refusal; or if the engine is dead: its process is gone, or a step failed (out of memory, a lost
                device, ...).
        """
        if self._dead:
            raise EngineError("the engine is dead; make another one")
        try:
            return call(*args)
        except refusals as error:
            raise EngineError(f"vLLM refused: {error}") from error
        except Exception as error:  # noqa: BLE001 - EngineDeadError, RuntimeError; in this process whatever its loop raises
            self._dead = True
            raise EngineError(
                f"the engine died with {len(self._requests)} requests under way, which have no result: "
                f"{type(error).__name__}: {error}"
            ) from error

    def _result(self, output: Any, request: RowRequest) -> Outcome:
        logits = tuple(TAP.take(output.request_id)) if self.keep_logits else None
        if request.reference is not None:
            return self._predicted(output, request, logits)
        finish = {"stop": "stop", "length": "length"}.get(output.outputs[0].finish_reason, "abort")
        if output.kv_transfer_params is None:
            return AbortError(
                f"{request.request_id}: the engine gave the request up ({output.outputs[0].finish_reason})"
            )
        codes, logprobs = output.kv_transfer_params[EXTRA_ARGS]
        codes = np.frombuffer(codes, dtype="<i4").reshape(-1, self.layout.num_streams)
        if (codes[:, 0] & channel.SPLIT).any():
            return AbortError(
                f"{request.request_id}: a row was sampled without its companion; the engine's log says which"
            )
        rows = channel.decode(codes)
        values = np.frombuffer(logprobs, dtype="<f4").reshape(rows.ids.shape)
        # A step that was under way when the request ended has left its logits too.
        logits = None if logits is None else logits[: len(rows.ids)]
        return RowResult(rows.ids, values, rows.forced, finish, logits)

    def _predicted(self, output: Any, request: RowRequest, logits: tuple[Any, ...] | None) -> RowResult:
        """Teacher forcing: the rows predicted over the reference."""
        first = len(request.prompt) - 1  # entry i predicts row i + 1
        ids, values = (part[first:] for part in matrix(output.prompt_logprobs, skip=1))
        rows = channel.decode(ids[:, 1:])
        if logits is not None:
            logits = logits[first:][: len(rows.ids)]
        return RowResult(rows.ids, values[:, 1:], rows.forced, "stop", logits)

    def abort(self, ids: Iterable[str]) -> None:
        wanted = set(ids)
        names = [name for name, request in self._requests.items() if request.request_id in wanted]
        if not self._dead:
            self._ask(self._engine.abort_request, names)
        self._fresh = [(request_id, rows) for request_id, rows in self._fresh if request_id not in wanted]
        for name in names:
            del self._requests[name]
            TAP.take(name)

    def close(self) -> None:
        if self.prefix_cache.requests:
            log.info("%s", self.prefix_cache)
        self._requests.clear()
        self._engine.engine_core.shutdown()


def matrix(logprobs: Any, skip: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """[N, S + 1] ids and log-probabilities of a ``FlatLogprobs``, without its first ``skip`` positions.

    Never through its own iteration or indexing, which go by dictionaries and merge equal ids.
    """
    starts = np.asarray(logprobs.start_indices[skip:], dtype=np.int64)
    ends = np.asarray(logprobs.end_indices[skip:], dtype=np.int64)
    widths = np.unique(ends - starts)
    assert len(widths) <= 1, f"rows of {widths.tolist()} columns in one result"
    first = int(starts[0]) if len(starts) else 0
    width = int(widths[0]) if len(widths) else 1
    ids = np.asarray(logprobs.token_ids[first:], dtype=np.int64).reshape(-1, width)
    values = np.asarray(logprobs.logprobs[first:], dtype=np.float32).reshape(-1, width)
    return ids, values
