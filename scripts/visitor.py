"""A visitor of the web page, who also sends what no browser would; for `torture.py`."""

import json
import random
import urllib.error
import urllib.request
from typing import Any

from spoil import image_bytes, spoil, spoil_bytes, spoil_tree

JSON = {"Content-Type": "application/json"}
SECONDS = 60


class Visitor:
    """Requests to the page at `server`, by a session of its own."""

    def __init__(self, server: str, rng: random.Random):
        self.server, self.rng, self.session = server, rng, f"{rng.random()}"
        self.events = json.loads(self.get("/config")[1])["dependencies"]

    def get(self, path: str, body: bytes | None = None, headers: dict[str, str] = {}) -> tuple[int, bytes]:  # noqa: B006
        """Status and content of an answer."""
        request = urllib.request.Request(self.server + path, body, headers)
        try:
            with urllib.request.urlopen(request, timeout=SECONDS) as answer:
                return answer.status, answer.read()
        except urllib.error.HTTPError as error:
            if error.code >= 500:
                raise
            return error.code, error.read()

    def upload(self, content: bytes) -> Any:
        """The server's name of an uploaded file; its status where it is refused."""
        head = b'--x\r\nContent-Disposition: form-data; name="files"; filename="photo.png"\r\n\r\n'
        kind = {"Content-Type": "multipart/form-data; boundary=x"}
        status, answer = self.get("/gradio_api/upload", head + content + b"\r\n--x--\r\n", kind)
        return {"path": json.loads(answer)[0], "meta": {"_type": "gradio.FileData"}} if status == 200 else status

    def send(self, event: str, data: Any) -> bytes:
        """What the page answers to an event of one of its components."""
        number = next(e["id"] for e in self.events if e["backend_fn"] and event in [t[1] for t in e["targets"]])
        body = {"data": data, "fn_index": number, "session_hash": self.session}
        status, answer = self.get("/gradio_api/queue/join", json.dumps(body).encode(), JSON)
        return self.get(f"/gradio_api/queue/data?session_hash={self.session}")[1] if status == 200 else answer

    def visit(self) -> str:
        """Uploads and asks, correctly or not: "answered", "refused", or what is wrong. A correct question must be
        answered, and nothing may be an error of the server."""
        try:
            return self._visit()
        except OSError as error:
            return f"a request failed: {error!r}"

    def _visit(self) -> str:
        way = self.rng.choice(("good", "good", "image", "large", "question", "body", "path"))
        correct = image_bytes("PNG")
        if way == "path":
            path = self.rng.choice(("../../etc/passwd", "/etc/passwd", "http://127.0.0.1/", "%00", "x" * 5000, "."))
            return "refused" if self.get(f"/gradio_api/file={path}")[0] in (403, 404, 400) else f"a file: served {path}"
        if way == "body":
            body = {"data": [None, "the red mug", 0.5], "fn_index": self.rng.randrange(9), "session_hash": "nobody"}
            status, _ = self.get("/gradio_api/queue/join", spoil(self.rng, body), JSON)
            return "answered" if status == 200 else "refused"
        if way == "large":
            status = self.upload(correct + bytes(1_200_000))
            return "refused" if status == 413 else f"a large upload: {status}"
        file = self.upload(spoil_bytes(self.rng, correct) if way == "image" else correct)
        self.send("upload", [file])
        question = [None, "the red mug", 0.5]
        answer = self.send("submit", spoil_tree(self.rng, question) if way == "question" else question)
        answered = b'"success":true' in answer
        return f"a question without an answer: {answer[-300:]}" if way == "good" and not answered else "answered"
