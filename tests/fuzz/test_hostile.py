"""Damaged files of every kind that is read: some draws of the same for everybody, and some of the day."""

import datetime
import random
import subprocess
import sys

import pytest
from conftest import REPO

from fuzz.hostile import damage
from fuzz.hostile_kinds import KINDS

DRAWS = 120
TODAY = 1_000_000 + datetime.date.today().toordinal() * 1000


@pytest.mark.parametrize("first", [0, pytest.param(TODAY, id="of the day")])
def test_damaged_files_are_messages(first):
    command = [sys.executable, "-m", "tests.fuzz", "--hostile", str(DRAWS), "--first", str(first)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, cwd=REPO)
    assert ended.returncode == 0, f"{' '.join(command[1:])}\n{ended.stdout[-6000:]}{ended.stderr[-2000:]}"
    assert f'"draws": {DRAWS}' in ended.stdout


def test_damage_is_drawn_by_its_seed_and_changes_something():
    data = bytes(range(256)) * 4
    for seed in range(200):
        assert damage(data, random.Random(seed)) == damage(data, random.Random(seed))
    assert sum(damage(data, random.Random(seed)) != data for seed in range(200)) > 190


def test_entries_that_were_not_damaged_are_known():
    assert KINDS["text"].untouched(b"a one\nb two\nc three\n", b"a one\nb t\x00o\nc three\n") == {"a", "c"}
    assert KINDS["text"].untouched(b"a one\nb two\n", b"a one\na one\nb two\n") == {"b"}
