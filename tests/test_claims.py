"""Every test that CLAIMS.md names exists, and every claim and known fault names one."""

import ast
import re

import pytest
from conftest import REPO

CLAIMS = REPO / "tests" / "CLAIMS.md"
DESIGN = REPO.parent / "shared" / "design.md"
KNOWN_FAULTS = {*range(1, 8), *range(10, 15), 16, 19, 20, *range(26, 30)}
ROWS = [line for line in CLAIMS.read_text(encoding="utf-8").splitlines() if re.match(r"\| (?!claim|no\.|fault)", line)]


def named(row: str) -> list[str]:
    return re.findall(r"`(tests/[\w/]+\.py::test_\w+)`", row)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.split("|")[1].strip().replace(" ", "_")[:40])
def test_every_line_names_tests_that_exist(row):
    assert named(row), f"names no test: {row}"
    for test in named(row):
        path, _, name = test.partition("::")
        assert (REPO / path).is_file(), test
        tree = ast.parse((REPO / path).read_text(encoding="utf-8"))
        functions = {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
        assert name in functions, f"{test} does not exist"


def test_every_known_fault_has_a_line():
    numbers = [int(found[1]) for row in ROWS if (found := re.match(r"\| (\d+) \|", row))]
    assert sorted(numbers) == sorted(KNOWN_FAULTS)


def test_every_sentence_of_the_design_has_a_line():
    """The pieces of its last section, in the words that they have there."""
    if not DESIGN.is_file():
        pytest.skip("the design page is not beside this checkout")
    section = re.sub(r"\s+", " ", DESIGN.read_text(encoding="utf-8").rpartition("## What must hold")[2]).lower()
    claims = [row.split("|")[1].strip().lower() for row in ROWS if not re.match(r"\| \d+ \|", row)]
    here = [claim for claim in claims if claim in section]
    left = section.partition("are the same:")[2]
    for claim in here:
        left = left.replace(claim, "", 1)
    rest = re.sub(r"\W+|\b(and|or|these|sentences|are|the|test|plan|with)\b", " ", left).split()
    assert not rest, f"no line of CLAIMS.md has: {' '.join(rest)}"


def test_the_check_finds_what_is_not_there():
    with pytest.raises(AssertionError, match="does not exist"):
        test_every_line_names_tests_that_exist("| x | `tests/test_claims.py::test_no_such_thing` |")
    with pytest.raises(AssertionError, match="names no test"):
        test_every_line_names_tests_that_exist("| x | everything is fine |")
