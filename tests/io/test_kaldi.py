"""Tables, paths and arks, sound and damaged."""

import os
import random
import struct

import kaldiio
import numpy as np
import pytest

from espnet2_vllm.errors import DataError
from espnet2_vllm.io.data_json import DialogueSource
from espnet2_vllm.io.kaldi import Table, load_codes, locate, read_table
from espnet2_vllm.io.omniio import OmniioTable, Place


def test_tables_say_which_line_is_wrong(tmp_path):
    path = tmp_path / "text"
    path.write_bytes("\ufeffu1 hello  there \r\nu2\tcafé 日本\u2028語\nu3\n\n".encode())
    table = read_table(path)
    assert dict(table) == {"u1": "hello  there", "u2": "café 日本\u2028語", "u3": ""}
    assert table.value("u2") == "café 日本\u2028語" and len(table) == 3
    with pytest.raises(DataError, match=f"{path}: nothing stands behind u3"):
        table.value("u3")
    with pytest.raises(DataError, match=f"{path}: no line begins with u4"):
        table.value("u4")
    path.write_text("u1 a\nu2 b\nu1 c\n", encoding="utf-8")
    table = read_table(path)
    with pytest.raises(DataError, match=f"{path}:3: key 'u1' was already in line 1"):
        table.value("u1")
    assert table.value("u2") == "b"
    path.write_bytes(b"u1 a\nu2 \xff\n")
    table = read_table(path)
    with pytest.raises(DataError, match=f"{path}:2: not UTF-8"):
        table.value("u2")
    assert table.value("u1") == "a"
    with pytest.raises(DataError, match="cannot be read"):
        read_table(tmp_path / "nowhere")


def test_the_working_directory_comes_first(tmp_path, monkeypatch):
    here, there = tmp_path / "here", tmp_path / "there"
    for folder in (here, there):
        folder.mkdir()
        (folder / "both").write_text(folder.name, encoding="utf-8")
    (there / "one").write_text("x", encoding="utf-8")
    monkeypatch.chdir(here)
    assert locate("both", there).read_text(encoding="utf-8") == "here"
    assert locate("one", there) == there / "one"
    assert locate(str(there / "both"), here) == there / "both"
    with pytest.raises(DataError, match="none: no such file; looked at .*here/none and .*there/none"):
        locate("none", there)


@pytest.fixture
def ark(tmp_path):
    arrays = {
        "a": np.arange(18, dtype=np.int32),
        "b": np.arange(100, 127, dtype=np.int32),
        "f": np.arange(9, dtype=np.float32).reshape(1, 9),
        "h": np.array([0.5], dtype=np.float32),
    }
    kaldiio.save_ark(str(tmp_path / "x.ark"), arrays, scp=str(tmp_path / "x.scp"))
    return arrays, read_table(tmp_path / "x.scp")


def test_codes_come_back(ark, tmp_path):
    arrays, scp = ark
    for key in ("a", "b", "f"):
        codes = load_codes(scp[key], tmp_path)
        assert codes.dtype == np.int32
        np.testing.assert_array_equal(codes, arrays[key])
    with pytest.raises(DataError, match=r"x.ark:\d+: codes must be whole numbers, found float32 values such as 0.5"):
        load_codes(scp["h"], tmp_path)
    (tmp_path / "t.ark").write_text("u [ 1 2 3 ]\nv 4 5 6\n", encoding="utf-8")
    assert load_codes("t.ark:2", tmp_path).tolist() == [1, 2, 3]
    assert load_codes("t.ark:14", tmp_path).tolist() == [4, 5, 6]


def test_an_ark_that_is_cut_short_is_said_at_every_length(ark, tmp_path):
    arrays, scp = ark
    whole, offset = (tmp_path / "x.ark").read_bytes(), int(scp["b"].rpartition(":")[2])
    end = offset + 3 + 4 + 5 * len(arrays["b"])
    for length in range(offset, end):
        (tmp_path / "x.ark").write_bytes(whole[:length])
        with pytest.raises(DataError, match=r"x.ark:\d+: .*cut short|no array of codes"):
            load_codes(scp["b"], tmp_path)
        np.testing.assert_array_equal(load_codes(scp["a"], tmp_path), arrays["a"])
    (tmp_path / "x.ark").write_bytes(whole[:end])
    np.testing.assert_array_equal(load_codes(scp["b"], tmp_path), arrays["b"])


def test_what_is_no_array_of_codes_is_refused(ark, tmp_path):
    _, scp = ark
    with pytest.raises(DataError, match="no array of codes begins here"):
        load_codes("x.ark:0", tmp_path)  # the id stands there
    for start in (b"RIFF0000", b"fLaC0000", b"AUDIO000", b"NPY\x01xxxx", b"PKLxxxxxxx"):
        (tmp_path / "y").write_bytes(start)
        with pytest.raises(DataError, match="no array of codes"):
            load_codes("y", tmp_path)
    with pytest.raises(DataError, match="not from commands"):
        load_codes("cat x.ark |", tmp_path)
    with pytest.raises(DataError, match="behind the end of the ark"):
        load_codes("x.ark:99999", tmp_path)
    with pytest.raises(DataError, match="no such file"):
        load_codes("z.ark:3", tmp_path)


def test_an_array_that_declares_more_than_its_ark_holds_is_refused_before_memory_is_asked_for(ark, tmp_path):
    for header in (
        b"\0B\4" + struct.pack("<i", 2**31 - 1),
        b"\0B\4" + struct.pack("<i", -3),
        b"\0BFM \4" + struct.pack("<i", 2**31 - 1) + b"\4" + struct.pack("<i", 2**31 - 1),
        b"\0BDV \4" + struct.pack("<i", 2**31 - 1),
        b"\0BCM " + struct.pack("<ffii", 0, 1, 2**31 - 1, 9),
        b"\0BCM2 " + struct.pack("<ffii", 0, 1, 9, -1),
    ):
        (tmp_path / "big.ark").write_bytes(b"u " + header + bytes(100))
        with pytest.raises(DataError, match="big.ark:2: the array declares .*damaged or cut short"):
            load_codes("big.ark:2", tmp_path)


def test_places_and_names_that_are_too_long_are_messages(ark, tmp_path):
    for name in ("x.ark:" + "9" * 5000, "x" * 5000, "/y" * 3000 + ".ark:7", "a\0b"):
        with pytest.raises(DataError, match="no such file") as caught:
            load_codes(name, tmp_path)
        assert len(str(caught.value)) < 1000


@pytest.mark.parametrize("spec", ["[0:9]", "[5:19]", "[3:3]", "[0:9,2:4]", "[:,0:2]", "[,7:8]"])
def test_rows_of_an_ark_are_kaldis(tmp_path, spec):
    """Both ends are included; kaldiio, with which ESPnet reads token arks, takes the same rows."""
    codes = np.arange(180, dtype=np.float32).reshape(20, 9)
    kaldiio.save_ark(str(tmp_path / "c.ark"), {"a": codes, "v": np.arange(12, dtype=np.int32)})
    found = load_codes(f"c.ark:2{spec}", tmp_path)
    rows, _, columns = spec.strip("[]").partition(",")

    def bounds(text, length):
        first, _, last = text.partition(":")
        return (int(first), int(last) + 1) if first else (0, length)

    (top, bottom), (left, right) = bounds(rows, 20), bounds(columns, 9)
    np.testing.assert_array_equal(found, codes[top:bottom, left:right])
    if rows not in ("", ":"):
        np.testing.assert_array_equal(found, kaldiio.load_mat(f"{tmp_path}/c.ark:2{spec}"))


@pytest.mark.parametrize("spec", ["[0:20]", "[5:4]", "[a:b]", "[1]", "[0:1,0:1,0:1]", "[-1:3]", "[0:9999999999999]"])
def test_rows_that_an_ark_does_not_have_are_refused(tmp_path, spec):
    kaldiio.save_ark(str(tmp_path / "c.ark"), {"a": np.zeros((20, 9), np.float32)})
    with pytest.raises(DataError, match=r"c\.ark:2\["):
        load_codes(f"c.ark:2{spec}", tmp_path)


def test_a_pipe_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe.ark")
    for name in ("pipe.ark:3", "pipe.ark", "/dev/zero"):
        with pytest.raises(DataError, match="is no plain file"):
            load_codes(name, tmp_path)
    table = OmniioTable(tmp_path / "metadata.parquet", {"a": Place("pipe.ark", 0, 5, None, None)})
    with pytest.raises(DataError, match="a of .*metadata.parquet: pipe.ark: is no plain file"):
        table.read("a", tmp_path)
    pack = DialogueSource(Table(tmp_path / "index", {"a": "pipe.ark"}), tmp_path)
    with pytest.raises(DataError, match="is no plain file"):
        pack.load("a", random.Random(0))
