"""Downloads are whole and right, or leave nothing."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from esper.errors import TaskError
from esper.tasks.practice.download import Remote, fetch, md5_of

CONTENT = b"some data" * 1000
MD5 = hashlib.md5(CONTENT).hexdigest()


class Handler(BaseHTTPRequestHandler):
    """Serves CONTENT at /whole, half of it at /torn, and nothing elsewhere."""

    def do_GET(self) -> None:
        if self.path not in ("/whole", "/torn"):
            self.send_error(404)
            return
        self.send_response(200)
        self.send_header("Content-Length", str(len(CONTENT)))
        self.end_headers()
        self.wfile.write(CONTENT if self.path == "/whole" else CONTENT[: len(CONTENT) // 2])

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        """Not to stderr."""


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    served = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=served.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{served.server_port}"
    served.shutdown()
    served.server_close()
    thread.join()


def test_a_file_arrives_in_a_new_folder(server: str, tmp_path: Path) -> None:
    path = tmp_path / "new" / "folder" / "data"
    fetch(Remote(f"{server}/whole", MD5, len(CONTENT)), path)
    assert path.read_bytes() == CONTENT
    assert md5_of(path) == MD5
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize(
    ("place", "md5", "most", "sentence"),
    [
        ("whole", "0" * 32, len(CONTENT), "gave something else"),
        ("torn", MD5, len(CONTENT), "gave something else|cannot download"),
        ("nowhere", MD5, len(CONTENT), "cannot download .*404"),
        ("whole", MD5, len(CONTENT) - 1, "gave more than"),
    ],
)
def test_what_is_not_right_leaves_nothing(
    server: str, tmp_path: Path, place: str, md5: str, most: int, sentence: str
) -> None:
    path = tmp_path / "data"
    path.write_bytes(b"from before")
    with pytest.raises(TaskError, match=sentence):
        fetch(Remote(f"{server}/{place}", md5, most), path)
    assert path.read_bytes() == b"from before"
    assert list(tmp_path.iterdir()) == [path]


def test_a_server_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match="cannot download"):
        fetch(Remote("http://127.0.0.1:1/data", MD5, len(CONTENT)), tmp_path / "data")
    assert not list(tmp_path.iterdir())
