"""Where the recorded reference data lies: a selection in the repository, all of it where the checkout has it beside."""

import logging
import os
import pathlib

import pytest

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Models so small are slower with more threads, and many times slower where a core has something else to do.
os.environ.setdefault("OMP_NUM_THREADS", "1")

REPO = pathlib.Path(__file__).resolve().parent.parent
GOLDEN_ROOTS = [p for p in (REPO.parent / "shared" / "golden", REPO / "tests" / "golden") if p.is_dir()]


def golden_files(pattern: str) -> list[pathlib.Path]:
    """Recorded files that match ``pattern`` (relative to a golden root), the fullest root first, each relative path once.

    There always are some: tests/golden is part of the repository.
    """
    found = {}
    for root in GOLDEN_ROOTS:
        for path in sorted(root.glob(pattern)):
            found.setdefault(path.relative_to(root), path)
    assert found, f"no recording matches {pattern}; looked in {[str(p) for p in GOLDEN_ROOTS] or REPO / 'tests/golden'}"
    return list(found.values())


def golden_models(family: str) -> list[pathlib.Path]:
    """Model directories of ``family`` ('bagpiper' or 'opuslm')."""
    marker = {"bagpiper": "train.yaml", "opuslm": "config.yaml"}[family]
    return [path.parent for path in golden_files(f"{family}/*/{marker}")]


@pytest.fixture(scope="session", autouse=True)
def converted_here(tmp_path_factory):
    """Recorded models are converted into a folder of this session, so that nothing is kept beside or in place of them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ESPNET2_VLLM_CACHE", str(tmp_path_factory.mktemp("conversions")))
        yield


@pytest.fixture(autouse=True)
def loggers_as_they_begin():
    """A test that listens hears this package, whatever the tests before it in this process have set."""
    logging.disable(logging.NOTSET)
    for name in list(logging.root.manager.loggerDict):
        if name.partition(".")[0] == "espnet2_vllm":
            logger = logging.getLogger(name)
            logger.disabled, logger.propagate = False, True
            logger.setLevel(logging.NOTSET)


@pytest.fixture(scope="session")
def repo() -> pathlib.Path:
    return REPO


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """What a test says may hold half of a surrogate pair, which cannot be sent from one process of the tests to another."""
    report = yield
    report.sections = [(name, _encodable(text)) for name, text in report.sections]
    if report.longrepr is not None and _encodable(str(report.longrepr)) != str(report.longrepr):
        report.longrepr = _encodable(str(report.longrepr))
    return report


def _encodable(text: str) -> str:
    return text.encode("utf-8", "backslashreplace").decode("utf-8")
