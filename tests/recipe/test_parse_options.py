"""utils/parse_options.sh: Kaldi's rules."""

import pytest
from recipe_shell import TEMPLATE, shell

SCRIPT = """
set -euo pipefail
help_message="what this does"
stage=1; some_name=before; flag=false; empty=
. {parse_options}
echo "stage=${{stage}} some_name=${{some_name}} flag=${{flag}} empty=${{empty}} rest=$*"
"""


@pytest.fixture
def run(tmp_path):
    script = tmp_path / "script.sh"
    script.write_text(SCRIPT.format(parse_options=TEMPLATE / "utils" / "parse_options.sh"), encoding="utf-8")
    return lambda *words: shell("bash", script, *words, cwd=tmp_path)


@pytest.mark.parametrize(
    "words, expected",
    [
        ([], "stage=1 some_name=before flag=false empty= rest="),
        (["--stage", "3", "--some-name", "a b"], "stage=3 some_name=a b flag=false empty= rest="),
        (["--some_name", "--nbest 3 $x `y`"], "stage=1 some_name=--nbest 3 $x `y` flag=false empty= rest="),
        (["--flag", "true", "x", "--stage", "2"], "stage=1 some_name=before flag=true empty= rest=x --stage 2"),
        (["--empty", "e", "--", "--stage"], "stage=1 some_name=before flag=false empty=e rest=--stage"),
        (["--some-name", ""], "stage=1 some_name= flag=false empty= rest="),
    ],
)
def test_options_set_variables(run, words, expected):
    done = run(*words)
    assert (done.returncode, done.stdout.strip()) == (0, expected), done.stderr


@pytest.mark.parametrize(
    "words, message",
    [
        (["--nope", "1"], "unknown option --nope"),
        (["--stage"], "--stage needs a value"),
        (["--stage=2"], "write '--stage 2'"),
        (["--flag", "yes"], "--flag takes true or false, not 'yes'"),
        (["--config", "missing.sh"], "cannot read 'missing.sh'"),
        (["--config"], "--config needs a value"),
        (["--a;b", "1"], "unknown option --a;b"),
    ],
)
def test_what_cannot_be_used_is_refused_with_exit_code_2(run, words, message):
    done = run(*words)
    assert done.returncode == 2
    assert message in done.stderr


def test_help_shows_the_message(run):
    done = run("--help")
    assert (done.returncode, done.stdout) == (0, "what this does\n")


def test_options_win_over_a_config_file_wherever_it_stands(run, tmp_path):
    (tmp_path / "c.sh").write_text("stage=7 some_name=from_file\n", encoding="utf-8")
    done = run("--stage", "3", "--config", str(tmp_path / "c.sh"))
    assert done.stdout.startswith("stage=3 some_name=from_file"), done.stderr
