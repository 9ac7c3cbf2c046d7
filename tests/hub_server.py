"""A hub on this machine: the repositories of a folder in the cache's layout, over what of the hub's API downloads use."""

import hashlib
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Hub:
    """``url`` for HF_ENDPOINT. ``fetched``: (repository, file) -> bytes that were sent."""

    def __init__(self, folder):
        hub = self
        self.fetched = {}
        places = {
            place.name.removeprefix("models--").replace("--", "/", 1): place for place in folder.glob("models--*")
        }

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def answer(self, status, data=b"", headers=(), length=None):
                self.send_response(status)
                for name, value in headers:
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(data) if length is None else length))
                self.end_headers()
                if self.command == "GET":
                    self.wfile.write(data)

            def do_GET(self):
                path = self.path.partition("?")[0]
                api = re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/(revision|tree)/([^/]+))?(/.*)?", path)
                file = re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path)
                repo = (api or file)[1] if api or file else None
                if repo not in places:
                    return self.answer(404, headers=[("X-Error-Code", "RepoNotFound")])
                commit = (places[repo] / "refs" / "main").read_text()
                root = places[repo] / "snapshots" / commit
                if file:
                    return self.file(repo, commit, root / file[3])
                files = sorted(path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file())
                if api[2] == "tree":
                    tree = (
                        []
                        if api[4]
                        else [
                            {"type": "file", "path": name, "size": (root / name).stat().st_size, "oid": "0" * 40}
                            for name in files
                        ]
                    )
                    return self.answer(200, json.dumps(tree).encode())
                info = {"id": repo, "sha": commit, "siblings": [{"rfilename": name} for name in files]}
                return self.answer(200, json.dumps(info).encode())

            def do_HEAD(self):
                self.do_GET()

            def file(self, repo, commit, path):
                if not path.is_file():
                    return self.answer(404, headers=[("X-Error-Code", "EntryNotFound"), ("X-Repo-Commit", commit)])
                data = path.read_bytes()
                headers = [("X-Repo-Commit", commit), ("ETag", f'"{hashlib.sha256(data).hexdigest()}"')]
                if self.command == "GET":
                    hub.fetched[repo, path.name] = len(data)
                return self.answer(200, data, headers)

            def log_message(self, *_):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def close(self):
        self.server.shutdown()
        self.server.server_close()
