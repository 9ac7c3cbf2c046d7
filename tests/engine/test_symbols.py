"""The start-up check: every name of vLLM that the package uses is looked for, and what would lose streams is refused."""

import ast
import os
import pathlib
import types

import pytest
from conftest import REPO, golden_models
from wheel_sources import WheelSources

pytest.importorskip("vllm")

from espnet2_vllm.backends.vllm import VllmEngine  # noqa: E402
from espnet2_vllm.checkpoint import ensure_converted  # noqa: E402
from espnet2_vllm.engine import compat, symbols  # noqa: E402
from espnet2_vllm.errors import EngineError  # noqa: E402

PACKAGE = REPO / "espnet2_vllm"
TABLES = {**symbols.COMMON, **symbols.V1_RUNNER, **symbols.V2_RUNNER, **symbols.GPU_WORKER, **symbols.ATTENTION}
# Used only where they are known to be there: the one version that ``compat.steady_rows_known`` names.
OWN_VERSION = {"enable_return_routed_experts"}
ENGINE_FILES = [path for folder in ("engine", "backends", "codec") for path in sorted((PACKAGE / folder).glob("*.py"))]


def names_of(place):
    attributes, _, parameters = TABLES[place].partition("|")
    return {*attributes.split(), *parameters.split()}


def test_the_installed_vllm_has_every_name():
    from vllm.platforms import current_platform

    # vLLM's modules for CPUs replace parts of torch.cuda as they load.
    here = symbols.V1_RUNNER if current_platform.is_cpu() else symbols.GPU_WORKER
    for table in (symbols.COMMON, symbols.V2_RUNNER, here):
        assert symbols.missing_symbols(table) == []


def sources_to_read():
    """The installed vLLM, and the wheels, unpacked, that VLLM_WHEELS names: ones that cannot run here."""
    import vllm

    named = os.environ.get("VLLM_WHEELS", "")
    return [pathlib.Path(vllm.__file__).parents[1], *map(pathlib.Path, filter(None, named.split(os.pathsep)))]


@pytest.mark.parametrize("root", sources_to_read(), ids=lambda root: root.name)
def test_sources_of_a_wheel_have_every_name(root):
    sources = WheelSources(root)
    assert sources.missing({**TABLES, **symbols.ATTENTION}) == []
    places = {
        "vllm.v1.request:Request": "num_tokens thing | block_hasher thing",
        "vllm.v1.gone:A": "",
        "vllm.v1.request:B": "",
    }
    assert sources.missing(places) == [
        *("vllm.v1.request:Request.thing", "vllm.v1.request:Request(thing)"),
        *("vllm.v1.gone:A", "vllm.v1.request:B"),
    ], "what is not there is noticed"


def imported(tree):
    """Names that a file takes from vLLM: as they are called there, and where they come from."""
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and not node.level and (node.module or "").split(".")[0] == "vllm":
            found.update({one.asname or one.name: f"{node.module}:{one.name}" for one in node.names})
        if isinstance(node, ast.Import):
            found.update({one.asname: one.name for one in node.names if one.name.split(".")[0] == "vllm"})
    return found


@pytest.mark.parametrize("path", ENGINE_FILES, ids=lambda path: path.stem)
def test_what_a_file_imports_of_vllm_is_looked_for(path):
    tree = ast.parse(path.read_text(encoding="utf-8"))
    names = imported(tree)
    for name, place in names.items():
        attributes = {
            node.attr
            for node in ast.walk(tree)
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == name
        }
        if ":" not in place:  # a module: its functions are entries of their own
            assert {f"{place}:{one}" for one in attributes} <= TABLES.keys()
            continue
        assert place in TABLES, f"{path.name}: {place}"
        assert attributes <= names_of(place), f"{path.name}: {place}"


def test_what_stands_in_for_vllms_prompt_worker_has_all_its_methods():
    from vllm.v1.worker.gpu.sample.prompt_logprob import PromptLogprobsWorker

    from espnet2_vllm.engine.v2 import SpeechPromptWorker

    wanted = {
        name for name, value in vars(PromptLogprobsWorker).items() if callable(value) and not name.startswith("_")
    }
    assert wanted and wanted <= vars(SpeechPromptWorker).keys()


BASES = {
    "PairedRequest": "vllm.v1.request:Request",
    "SpeechScheduler": "vllm.v1.core.sched.async_scheduler:AsyncScheduler",
    "GuidanceScheduler": "vllm.v1.core.sched.async_scheduler:AsyncScheduler",
    "SpeechCPURunner": "vllm.v1.worker.cpu_model_runner:CPUModelRunner",
    "SpeechModelState": "vllm.v1.worker.gpu.model_states.default:DefaultModelState",
    "SpeechCPUWorker": "vllm.v1.worker.cpu_worker:CPUWorker",
    "SpeechGPUWorker": "vllm.v1.worker.gpu_worker:Worker",
    "SpeechAttentionBackend": "vllm.v1.attention.backends.flash_attn:FlashAttentionBackend",
    "SpeechAttentionImpl": "vllm.v1.attention.backends.flash_attn:FlashAttentionImpl",
    "SpeechAttentionMetadataBuilder": "vllm.v1.attention.backends.flash_attn:FlashAttentionMetadataBuilder",
}


def test_what_our_classes_take_from_their_bases_is_looked_for():
    """``self.name`` and ``super().name`` that no class of ours defines."""
    classes = {
        node.name: node
        for path in (PACKAGE / "engine").glob("*.py")
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.ClassDef)
    }
    vllm_bases = {
        name
        for path in (PACKAGE / "engine").glob("*.py")
        for tree in [ast.parse(path.read_text(encoding="utf-8"))]
        for name, node in classes.items()
        if {ast.unparse(base) for base in node.bases} & imported(tree).keys() and node.name in path.read_text("utf-8")
    }
    models = {name for name in vllm_bases if name.endswith("ForCausalLM")}
    assert vllm_bases - models == BASES.keys() - {"GuidanceScheduler"}, "a class with a new base: add it"
    for name, place in BASES.items():
        family = [
            classes[name],
            *(classes[ast.unparse(base)] for base in classes[name].bases if ast.unparse(base) in classes),
        ]
        own, used = set(), set()
        for cls in family:
            own |= {node.name for node in cls.body if isinstance(node, ast.FunctionDef)}
            own |= {ast.unparse(t) for node in cls.body if isinstance(node, ast.Assign) for t in node.targets}
            own |= {ast.unparse(node.target) for node in cls.body if isinstance(node, ast.AnnAssign)}
            for node in ast.walk(cls):
                if not isinstance(node, ast.Attribute):
                    continue
                if isinstance(node.value, ast.Name) and node.value.id == "self":
                    (own if isinstance(node.ctx, ast.Store) else used).add(node.attr)
        inherited = {
            node.attr
            for cls in family
            for node in ast.walk(cls)
            if isinstance(node, ast.Attribute)
            and ast.unparse(node.value) == "super()"
            and not node.attr.startswith("__")
        }
        looked_for = names_of(place) | OWN_VERSION
        ours = {node.name for cls in family[1:] for node in cls.body if isinstance(node, ast.FunctionDef)}
        assert used - own - {"__dict__"} <= looked_for, (name, used - own - looked_for)
        assert inherited - ours <= looked_for, (name, inherited - ours - looked_for)


# -- what is said ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("table", "missing"),
    [
        ({"vllm.v1.gone:Thing": ""}, "vllm.v1.gone:Thing"),
        ({"vllm.v1.request:Thing": ""}, "vllm.v1.request:Thing"),
        ({"vllm.v1.request:Request": "num_tokens thing"}, "vllm.v1.request:Request.thing"),
        ({"vllm.v1.request:Request": "| block_hasher thing"}, "vllm.v1.request:Request(thing)"),
        ({"vllm.v1.engine:EngineCoreOutput": "finished | request_id thing"}, "vllm.v1.engine:EngineCoreOutput(thing)"),
    ],
)
def test_a_name_that_is_gone_is_said_with_version_and_remedy(monkeypatch, table, missing):
    monkeypatch.setattr(symbols, "COMMON", {**symbols.COMMON, **table})
    with pytest.raises(EngineError) as error:
        symbols.check_symbols("0.33.1", cpu=True, v2=False)
    text = str(error.value)
    assert text.startswith(f"vLLM 0.33.1 lacks what this package uses of it: {missing}; ")
    assert "versions 0.26.0 and 0.32.0 have it: run tools/setup.sh" in text


def test_an_engine_that_lacks_a_name_does_not_start(monkeypatch):
    """The check is part of the start."""
    model = next(path for path in golden_models("opuslm") if "olmo2" not in path.name)
    monkeypatch.setattr(symbols, "V1_RUNNER", {**symbols.V1_RUNNER, "vllm.v1.request:Request": "no_such_thing"})
    with pytest.raises(EngineError, match=r"Request\.no_such_thing; versions"):
        VllmEngine(ensure_converted(model), max_model_len=64)


@pytest.mark.parametrize(
    ("installed", "supported"),
    [("0.25.9", False), ("0.26.0", True), ("0.26.0+cpu", True), ("0.33.4", True), ("0.34.0", False), ("1.0.0", False)],
)
def test_versions_outside_the_range_are_refused_with_the_range(monkeypatch, installed, supported):
    monkeypatch.setattr("importlib.metadata.version", lambda name: installed)
    if supported:
        assert compat.engine_version() == installed
        return
    with pytest.raises(
        EngineError, match=rf"vLLM {installed} is installed, .* supports vllm>=0.26,<0.34; run tools/setup.sh"
    ):
        compat.engine_version()


def test_no_vllm_is_said_with_the_remedy(monkeypatch):
    from importlib.metadata import PackageNotFoundError

    def version(name):
        raise PackageNotFoundError(name)

    monkeypatch.setattr("importlib.metadata.version", version)
    with pytest.raises(EngineError, match="vLLM is not installed; run tools/setup.sh, or use --backend pytorch"):
        compat.engine_version()


# -- options, runner, scheduler, worker ----------------------------------------------------------------------------------
def config(
    *, v2=True, policy="fcfs", scheduler=None, worker="espnet2_vllm.engine.worker_cpu.SpeechCPUWorker", **changes
):
    """As much of a ``VllmConfig`` as is looked at."""
    parallel = {name: changes.pop(name) for name in [*changes] if name.endswith("_size") or name.startswith("enable_")}
    whole = {"speculative_config": None, "kv_transfer_config": None, "lora_config": None, **changes}
    return types.SimpleNamespace(
        parallel_config=types.SimpleNamespace(worker_cls=worker, **parallel),
        scheduler_config=types.SimpleNamespace(policy=policy, get_scheduler_cls=lambda: scheduler),
        use_v2_model_runner=v2,
        **whole,
    )


@pytest.mark.parametrize(
    ("changes", "cpu", "message"),
    [
        ({"tensor_parallel_size": 2}, False, None),
        (
            {"pipeline_parallel_size": 2},
            False,
            "engine option pipeline_parallel_size 2 is not supported; its stages would hand on the ids of stream 0 only",
        ),
        ({"data_parallel_size": 4}, False, "data_parallel_size 4 is not supported; this package starts one engine for"),
        ({"enable_batch_sharded_sampling": True}, False, "batch-sharded sampling would part the two rows of a guided"),
        ({"decode_context_parallel_size": 2}, False, "decode_context_parallel_size 2"),
        ({"speculative_config": object()}, True, "speculative decoding is not supported; leave speculative_config out"),
        ({"kv_transfer_config": object()}, True, "KV connectors are not supported"),
        ({"lora_config": object()}, True, "LoRA is not supported; merge the adapter"),
        ({"policy": "priority"}, True, "scheduling policy must be fcfs"),
        ({"v2": False}, False, "V1 model runner, which is not supported on CUDA; unset VLLM_USE_V2_MODEL_RUNNER"),
        ({"v2": False}, True, None),
        ({"v2": True}, False, None),
    ],
)
def test_settings_under_which_streams_would_be_lost_are_refused(changes, cpu, message):
    if message is None:
        compat.check_options(config(**changes), cpu=cpu)
        return
    with pytest.raises(EngineError, match=message):
        compat.check_options(config(**changes), cpu=cpu)


def test_options_are_looked_at_before_the_engine_starts():
    model = next(path for path in golden_models("opuslm") if "olmo2" not in path.name)
    with pytest.raises(EngineError, match="engine option pipeline_parallel_size 2 is not supported"):
        VllmEngine(ensure_converted(model), max_model_len=64, pipeline_parallel_size=2)


@pytest.mark.parametrize("family", ["bagpiper", "opuslm"])
def test_a_scheduler_or_worker_that_is_not_ours_is_refused(family):
    """As in a plain ``vllm serve`` of a converted directory."""
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler

    from espnet2_vllm.engine.guidance import GuidanceScheduler
    from espnet2_vllm.engine.scheduler import SpeechScheduler

    layout = types.SimpleNamespace(family=family)
    compat.check_wiring(config(scheduler=GuidanceScheduler), layout)
    with pytest.raises(
        EngineError, match=r"scheduler .*AsyncScheduler, which would lose .*--scheduler-cls espnet2_vllm"
    ):
        compat.check_wiring(config(scheduler=AsyncScheduler), layout)
    with pytest.raises(EngineError, match=r"worker vllm\.v1\.Worker, which would lose .*--worker-cls espnet2_vllm"):
        compat.check_wiring(config(scheduler=GuidanceScheduler, worker="vllm.v1.Worker"), layout)
    if family == "bagpiper":
        with pytest.raises(EngineError, match="scheduler .*SpeechScheduler"):
            compat.check_wiring(config(scheduler=SpeechScheduler), layout)


def test_a_converted_directory_in_a_plain_engine_is_refused():
    """Through vLLM's own front end, without this package's worker and scheduler."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.engine.llm_engine import LLMEngine

    model = next(path for path in golden_models("opuslm") if "olmo2" not in path.name)
    checkpoint = ensure_converted(model)
    arguments = EngineArgs(
        model=str(checkpoint.path), skip_tokenizer_init=True, enforce_eager=True, max_model_len=64, dtype="float32"
    )
    with pytest.raises(EngineError, match="which would lose all streams but the first"):
        LLMEngine.from_engine_args(arguments)
