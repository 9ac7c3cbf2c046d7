"""A server of ESPnet's wire that keeps what it is asked and answers as it is told."""

import base64
import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np

from espnet2_vllm.answer import wav_bytes

WAV = wav_bytes(np.sin(np.arange(1600) / 5).astype(np.float32) * 0.5, 16000)
SPOKEN = {"content": "<think>so</think>A bell.", "audio": {"data": base64.b64encode(WAV).decode()}}
WRITTEN = {"content": "Two bells."}


class Recorder:
    """``requests``: (path, content type, body) of each; ``answer``: (status, message or body); ``delay``: seconds before it."""

    def __init__(self):
        recorder = self
        self.requests, self.answer, self.delay = [], (200, WRITTEN), 0.0

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                body = self.rfile.read(int(self.headers["Content-Length"]))
                recorder.requests.append((self.path, self.headers["Content-Type"], body))
                time.sleep(recorder.delay)
                status, content = recorder.answer
                if isinstance(content, dict):
                    content = {"choices": [{"message": content}]}
                data = content if isinstance(content, bytes) else json.dumps(content).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/v1"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def close(self):
        self.server.shutdown()
        self.server.server_close()
