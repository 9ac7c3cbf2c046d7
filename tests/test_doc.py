"""The documentation names what there is, and only that."""

import re

import pytest
from conftest import REPO

from espnet2_vllm import decoding_rules as rules
from espnet2_vllm.bin.main import COMMANDS
from espnet2_vllm.io.omniio import OMNIIO_READERS
from espnet2_vllm.plan import OUTCOMES

DOC = REPO / "doc"
PAGES = sorted(DOC.glob("*.md"))
read = lambda name: (DOC / name).read_text(encoding="utf-8")  # noqa: E731


@pytest.mark.parametrize(
    "name", sorted({*rules.BAGPIPER, *rules.BAGPIPER_SEGMENT, *rules.CHAT, *rules.CHAT_SEGMENT, *rules.FLAT})
)
def test_every_key_of_every_yaml_is_explained(name):
    assert f"`{name}`" in read("yaml.md")


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_links_and_commands_exist(path):
    text = path.read_text(encoding="utf-8")
    for link in re.findall(r"\]\((?!http)([^)#]+)\)", text):
        assert (path.parent / link).exists(), link
    for command in re.findall(r"espnet2-vllm ([a-z][a-z-]+) ", text):
        assert command in COMMANDS, command
    for script in re.findall(r"`((?:tools|egs|tests)/[\w/.]+\.(?:sh|py))`", text):
        assert (REPO / script).is_file(), script


def test_the_replay_that_the_readme_shows_has_as_many_cases():
    text = (REPO / "README.md").read_text(encoding="utf-8")
    for cases, exact, count in re.findall(r"replay_golden\.py \S+ (\S+) .*\n    (\d+) of (\d+) exact", text):
        recorded = len(list((REPO / cases).glob("*.json")))
        assert recorded and (int(exact), int(count)) == (recorded, recorded), cases


def test_readers_and_outcomes_are_listed():
    text = read("formats.md")
    for name in (*OMNIIO_READERS, *OUTCOMES, "lhotse_audio", "kaldi_audio", "dialogue"):
        assert f"`{name}`" in text


def test_messages_of_troubleshooting_are_said_somewhere():
    source = "\n".join(
        path.read_text(encoding="utf-8")
        for folder in ("espnet2_vllm", "egs")
        for path in sorted((REPO / folder).rglob("*"))
        if path.suffix in (".py", ".sh") and path.is_file()
    )
    source = re.sub(r'"\s*\\?\n\s*f?"', "", source)  # strings that go on in the next line
    rows = [line for line in read("troubleshooting.md").splitlines() if line.startswith("| `")]
    assert len(rows) > 25
    for row in rows:
        for message in re.findall(r"`([^`]+)`", row.split(" | ")[0]):
            for part in filter(None, (part.strip() for part in message.split("..."))):
                assert part in source, f"{part!r} is said nowhere"
