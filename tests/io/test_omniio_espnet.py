"""Tables of omniio, read by ESPnet's own classes (in a process of their own) and by ours; from files and from a web server."""

import importlib.util
import json
import pathlib
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest
import soundfile
from test_omniio import RATE, archive, audio, reader, zstd

from espnet2_vllm.errors import DataError
from espnet2_vllm.io.fetching import fetch_range
from espnet2_vllm.io.omniio import open_table

ESPNETS = pathlib.Path(__file__).with_name("espnet_readers.py")
needs_omniio = pytest.mark.skipif(
    importlib.util.find_spec("omniio") is None, reason="this ESPnet is older than 202609, whose readers these are"
)


def espnets(table, kind, folder):
    """``{id: (samples, rate)}`` or ``{id: content}``."""
    out = folder / "theirs.npz"
    command = [sys.executable, str(ESPNETS), str(table), kind, str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    with np.load(out) as found:
        if kind == "omniio_audio":
            names = [name.removesuffix("/wav") for name in found if name.endswith("/wav")]
            return {name: (found[f"{name}/wav"], int(found[f"{name}/rate"])) for name in names}
        return {name: json.loads(str(found[name])) for name in found}


def recordings(folder):
    """A table of recordings of every kind and of parts of them."""
    seed = np.random.SeedSequence().entropy
    print("seed", seed)
    rng = np.random.default_rng(seed)
    mono, stereo = (rng.uniform(-0.9, 0.9, shape).astype(np.float32) for shape in (RATE, (RATE, 2)))
    blobs, times = {}, {}
    for kind in ("FLAC", "WAV", "OGG"):
        for uid, samples in (("mono", mono), ("stereo", stereo)):
            path = folder / "one"
            soundfile.write(path, samples, RATE, format=kind)
            blobs[f"{uid}-{kind}"] = blobs[f"{uid}-{kind}-part"] = path.read_bytes()
            begin, end = sorted(rng.uniform(0.0, 1.0, 2))
            times[f"{uid}-{kind}-part"] = {"start_time": float(begin), "end_time": float(end) + 0.01}
    times["mono-FLAC-part"] = {"start_time": 0.5, "end_time": None}
    return archive(folder / "sound", blobs, times)


def assert_same_recordings(ours, theirs):
    assert len(theirs) == 12
    for uid, (samples, rate) in theirs.items():
        mine, my_rate = ours.load(uid)
        assert my_rate == rate and mine.dtype == samples.dtype == np.float32
        np.testing.assert_array_equal(mine, samples, err_msg=uid)


@needs_omniio
def test_recordings_are_those_of_espnets_reader(tmp_path):
    table = recordings(tmp_path)
    assert_same_recordings(reader("omniio_audio", table, tmp_path), espnets(table, "omniio_audio", tmp_path))


@needs_omniio
def test_texts_and_dialogues_are_those_of_espnets_readers(tmp_path):
    soundfile.write(tmp_path / "a.wav", np.zeros(RATE, np.float32), RATE)
    texts = {"t": zstd("h\u00e9llo\nyou  "), "u": zstd(" \u97f3 \U0001f600")}
    table = archive(tmp_path / "texts", texts)
    ours = reader("omniio_text", table, tmp_path)
    assert {uid: ours.load(uid) for uid in texts} == espnets(table, "omniio_text", tmp_path)
    messages = [["system", "text", "be brief"], ["user", "text", "a\nb"], ["assistant", "text", "yes"]]
    table = archive(tmp_path / "dialogues", {"d": zstd(json.dumps(messages))})
    ours = reader("omniio_dialogue", table, tmp_path).load("d")
    assert [list(message) for message in ours] == espnets(table, "omniio_dialogue", tmp_path)["d"] == messages


# -- a web server ------------------------------------------------------------------------------------------------------
class Server(ThreadingHTTPServer):
    """Serves ``files`` by name, on this machine alone. ``asked``: path and range of each request."""

    def __init__(self, files):
        self.files, self.asked = files, []
        super().__init__(("127.0.0.1", 0), Handler)

    def __enter__(self):
        threading.Thread(target=self.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *error):
        self.shutdown()
        self.server_close()

    def address(self, name):
        return f"http://127.0.0.1:{self.server_port}/{name}"


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        wanted = self.headers.get("Range")
        name = self.path[1:]
        self.server.asked.append((name, wanted))
        if name.startswith("to-"):
            self.send_response(302)
            self.send_header("Location", name.removeprefix("to-").replace("__", "/"))
            self.end_headers()
            return
        data = self.server.files.get(name.removeprefix("plain-").removeprefix("other-").removeprefix("cut-"))
        if data is None:
            self.send_error(404)
            return
        first, last = (int(number) for number in wanted.removeprefix("bytes=").split("-"))
        part = data if name.startswith("plain-") else data[first : last + 1]
        self.send_response(200 if name.startswith("plain-") else 206)
        if not name.startswith("plain-"):
            shown = first + 1 if name.startswith("other-") else first
            self.send_header("Content-Range", f"bytes {shown}-{last}/{len(data)}")
        self.send_header("Content-Length", str(len(part)))
        self.end_headers()
        self.wfile.write(part[: len(part) // 2] if name.startswith("cut-") else part)

    def log_message(self, *words):
        pass


def moved(table, server):
    """The table with the address of its file in place of the path; the file itself is gone."""
    import pyarrow
    from pyarrow import parquet

    rows = parquet.read_table(table).to_pylist()
    (place,) = {row["path"] for row in rows}
    server.files["data.bin"] = pathlib.Path(place).read_bytes()
    pathlib.Path(place).unlink()
    there = pyarrow.Table.from_pylist([{**row, "path": server.address("data.bin")} for row in rows])
    parquet.write_table(there, table)
    return table


@needs_omniio
def test_recordings_of_a_web_server_are_those_of_espnets_reader(tmp_path):
    table = recordings(tmp_path)
    with Server({}) as server:
        moved(table, server)
        theirs = espnets(table, "omniio_audio", tmp_path)
        asked = list(server.asked)
        server.asked.clear()
        ours = reader("omniio_audio", table, tmp_path, allow_url=True)
        assert_same_recordings(ours, theirs)
        assert server.asked == asked and all(wanted.startswith("bytes=") for _, wanted in asked)


@pytest.mark.parametrize("kind", ["omniio_audio", "omniio_text", "arkive_dialogue"])
def test_no_address_is_asked_unless_that_is_allowed(tmp_path, kind):
    with Server({}) as server:
        table = moved(archive(tmp_path / "set", {"a": zstd('[["user", "text", "x"]]')}), server)
        with pytest.raises(DataError, match="a of .*data.bin' is an address, which is fetched only with --allow-url"):
            reader(kind, table, tmp_path).load("a")
        assert not server.asked
        assert open_table(table, allow_url=True).read("a", tmp_path)[0].startswith(b"\x28\xb5\x2f\xfd")


@pytest.mark.parametrize(
    ("name", "start", "message"),
    [
        ("none", 1, "cannot be fetched: HTTP Error 404"),
        ("plain-x", 1, "does not answer range requests .status 200."),
        ("other-x", 1, "answers with others, Content-Range 'bytes 2-4/6'"),
        ("cut-x", 1, "the server sent 2 of 4 bytes"),
        ("x", 4, "the server sent 2 of 4 bytes"),
        ("to-file:____etc__passwd", 0, "cannot be fetched"),
        ("to-ftp:____127.0.0.1__x", 0, "cannot be fetched"),
    ],
)
def test_what_a_server_does_not_give(name, start, message):
    with Server({"x": b"abcdef"}) as server:
        with pytest.raises(DataError, match=message) as caught:
            fetch_range(server.address(name), start, 4)
        assert server.address(name) in str(caught.value)


def test_ranges_redirections_and_servers_without_ranges():
    with Server({"x": b"abcdef"}) as server:
        assert fetch_range(server.address("x"), 2, 3) == b"cde"
        assert fetch_range(server.address("x"), 2, 0) == b""
        assert fetch_range(server.address("to-__x"), 2, 3) == b"cde"
        assert fetch_range(server.address("plain-x"), 0, 3) == b"abc"
    with pytest.raises(DataError, match="cannot be fetched"):
        fetch_range(server.address("x"), 2, 3)


def test_the_command_line_asks_for_it(tmp_path):
    """A row that cannot be fetched costs its utterance alone."""
    from espnet2_vllm.io.dataset_json import open_datasets
    from espnet2_vllm.io.specifiers import Specifier

    with Server({}) as server:
        table = archive(tmp_path / "set", {"a": zstd("one"), "b": audio(np.zeros(9, np.float32), tmp_path)})
        moved(table, server)
        data = {
            "data_entry": [{"name": "text1", "path": str(table), "reader": "omniio_text"}],
            "samples": ["a", "b"],
        }
        path = tmp_path / "dataset.json"
        path.write_text(json.dumps(data), encoding="utf-8")
        specifier = Specifier("text_to_audio", "set", path, f"text_to_audio:set:{path}")
        (dataset,) = open_datasets([specifier], allow_url=True)
        assert dataset.messages("a")[0] == ["user", "text", "one"]
        with pytest.raises(DataError, match="b of .*no text compressed"):
            dataset.messages("b")
