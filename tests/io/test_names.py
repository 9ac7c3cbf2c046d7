"""File names and lines that no id can break."""

import random
from urllib.parse import unquote

import pytest

from espnet2_vllm.io.names import MOST_NAME_BYTES, one_line, safe_file_name


@pytest.mark.parametrize("name", ["61-70968-0000", "spk.a_b+c", "utt one", "\u97f3", "100%", "..a", "-x", "a%zz"])
def test_ordinary_ids_stay(name):
    assert safe_file_name(name, ".wav") == f"{name}.wav"


@pytest.mark.parametrize(
    ("name", "safe"),
    [
        ("a/b", "a%2Fb"),
        ("../x", "..%2Fx"),
        ("a%2Fb", "a%252Fb"),
        ("a\x00b\n", "a%00b%0A"),
        ("..", "%2E%2E"),
        (".", "%2E"),
        ("", "%"),
        ("\ud800", "%ED%A0%80"),
    ],
)
def test_what_would_leave_the_directory_is_encoded(name, safe):
    assert safe_file_name(name) == safe
    safe.encode()


def test_ids_come_back_and_never_collide():
    seed = 7
    print(f"seed {seed}")
    rng = random.Random(seed)
    alphabet = "ab%/25F.\n\u00e9"
    names = {"".join(rng.choices(alphabet, k=rng.randint(1, 8))) for _ in range(5000)} - {"%"}
    assert all(unquote(safe_file_name(name)) == name for name in names)
    assert len({safe_file_name(name) for name in names}) == len(names)


@pytest.mark.parametrize("letter", ["x", "\u00e9", "\u97f3", "\U0001f600", "/"])
def test_long_ids_are_cut_and_stay_apart(letter):
    names = [letter * 300 + end for end in ("1", "2")]
    safe = [safe_file_name(name, "_segment12.wav") for name in names]
    assert safe[0] != safe[1]
    assert all(len(s.encode()) <= MOST_NAME_BYTES and s.endswith("_segment12.wav") and "/" not in s for s in safe)
    fits = "x" * (MOST_NAME_BYTES - 4)
    assert safe_file_name(fits, ".wav") == fits + ".wav"


@pytest.mark.parametrize("letter", ["L", "\u00e9", "\u97f3", "\U0001f600", "/"])
@pytest.mark.parametrize("suffix", ["", ".wav", "_segment12.wav", ".flac"])
def test_an_id_that_is_anothers_cut_name_has_a_name_of_its_own(letter, suffix):
    names = [letter * 300]
    for _ in range(4):
        safe = safe_file_name(names[-1], suffix)
        names.append(safe.removesuffix(suffix))
    assert len({safe_file_name(name, suffix) for name in names}) == len(names)
    assert all(len(safe_file_name(name, suffix).encode()) <= MOST_NAME_BYTES for name in names)
    short = "a~0123456789abcdef"
    assert safe_file_name(short, suffix) == short + suffix


def test_only_line_breaks_are_escaped():
    assert one_line("a\r\nb\u2028c\x85d\u2029") == ("a\\r\\nb\\u2028c\\x85d\\u2029", 5)
    assert one_line("a\tb\x00\x0b\x0c\x1c\x1d\x1e") == ("a\tb\x00\x0b\x0c\x1c\x1d\x1e", 0)
