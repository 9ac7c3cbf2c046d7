"""Prints, as JSON, to whom a run tried to connect and where its processes listen: decodes a line on an engine of this machine.

python closed_check.py CHECKPOINT [NAME=VALUE ...]
"""

import json
import os
import pathlib
import sys

ATTEMPTS = []


def note(event, args):
    if event == "socket.getaddrinfo" and args[0] not in ("localhost", "127.0.0.1", "::1", None):
        ATTEMPTS.append(f"look up {args[0]}")
    elif event in ("socket.connect", "socket.sendto") and not local(args[1]):
        ATTEMPTS.append(f"{event} {args[1]}")


def local(address):
    return isinstance(address, (str, bytes)) or address[0] in ("127.0.0.1", "::1", "localhost")


def listening():
    """Addresses, as the kernel writes them, at which this process and those that it started wait for connections."""
    family, ours = {os.getpid()}, set()
    parents = {}
    for stat in pathlib.Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue  # gone meanwhile
    while new := {pid for pid, parent in parents.items() if parent in family} - family:
        family |= new
    for pid in family:
        for link in pathlib.Path(f"/proc/{pid}/fd").glob("*"):
            try:
                ours.add(os.readlink(link))
            except OSError:
                continue
    found = []
    for table in ("tcp", "tcp6"):
        for line in pathlib.Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in ours:
                found.append(fields[1].rpartition(":")[0])
    return found


def main(checkpoint, *pairs):
    from espnet2_vllm import Decoding, SpeechLM

    options = {name: json.loads(value) for name, _, value in (pair.partition("=") for pair in pairs)}
    with SpeechLM.from_pretrained(checkpoint, dtype="float32", **options) as model:
        wav, _ = model.render("three one four", decoding=Decoding(temperature=0))
        print(json.dumps({"bytes": len(wav), "attempts": ATTEMPTS, "listening": listening()}))


if __name__ == "__main__":
    sys.addaudithook(note)
    main(*sys.argv[1:])
