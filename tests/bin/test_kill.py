"""SIGKILL at random moments; tools/kill_test.sh does it 20 times to a model."""

import random
import sys

import killing
import pytest
from conftest import REPO


@pytest.mark.slow
def test_killed_at_random_moments_and_started_again_the_results_are_the_undisturbed_ones(tmp_path):
    seed = 3
    print(f"seed {seed}")
    script = str(REPO / "tests" / "bin" / "scripted_job.py")
    went_on = killing.check(
        lambda out: [sys.executable, script, str(out), "120"], tmp_path, kills=5, rng=random.Random(seed)
    )
    assert went_on > 0, "no kill fell into the work"
