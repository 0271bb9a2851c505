"""Whatever a request says in any header or parameter is answered, refused or not found: nothing breaks the server."""

import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from dash.planted_run import Plan, plant
from esper.dash.app import PAGES, Access, dashboard
from esper.dash.run_view import RunFinder

pytestmark = pytest.mark.landing

TOKEN = "a-secret-of-many-letters"
VIEWS = [f"/api/{view}" for view in ("runs", "compare", "stream", *PAGES, "none")]
PARAMETERS = ["run", "episode", "environment", "step", "type", "text", "before", "after", "token", "unknown"]
HEADERS = ["last-event-id", "host", "cookie", "range", "if-range", "if-none-match", "if-modified-since"]
HEADERS += ["accept", "content-type", "content-length", "origin", "x-forwarded-for", "user-agent"]
VALUES = ["", "0", "-1", "1e3", "9" * 17, "9" * 5000, "²", "٣", "nan", "é", "\x01", "x" * 20_000, "../../etc/passwd"]
VALUES += ["[", "]", "localhost:http", "localhost:99999999", f"localhost:{'9' * 5000}", "[::1", "[::1]:x", "run\t"]
VALUES += ["=;=;", f"esper-dash-80={'é' * 9}", "bytes=5-1", f"bytes=0-{'9' * 5000}", "bytes=-", "bytes=0-0,2-3", "W/"]
VALUES += ["%00", "%ff%fe", "'; DROP TABLE events; --", "Fri, 99 Xyz 99999 99:99:99 GMT"]
GOOD = {"run": "run", "episode": "1", "environment": "1", "step": "1"}


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    plant(folder / "run", Plan(networks=2, slots=1, steps=2))
    return folder


def client(folder: Path, token: str | None = None) -> TestClient:
    app = dashboard(RunFinder((folder,)), Access("127.0.0.1", token), stopping=lambda: True)
    return TestClient(app, "http://127.0.0.1", raise_server_exceptions=False, follow_redirects=False)


@pytest.mark.parametrize("path", ["/", *VIEWS])
def test_no_parameter_breaks_the_server(planted: Path, path: str):
    asking = client(planted)
    for name in PARAMETERS:
        for value in VALUES:
            answer = asking.get(path, params={**GOOD, name: value})
            assert answer.status_code < 500, (name, value[:40], answer.text)
        assert asking.get(path, params=[*GOOD.items(), *[(name, "x")] * 3000]).status_code < 500, name


@pytest.mark.parametrize(
    ("path", "token"),
    [("/", None), ("/", TOKEN), ("/static/js/main.js", None), ("/api/runs", None), ("/api/stream", None)],
)
def test_no_header_breaks_the_server(planted: Path, path: str, token: str | None):
    asking = client(planted, token)
    for name in HEADERS:
        for value in VALUES:
            answer = asking.get(path, params=GOOD, headers={name: value.encode()})
            assert answer.status_code < 500, (name, value[:40], answer.text)


def test_whoever_does_not_read_is_cut_off_at_the_end_without_complaint(planted: Path):
    script = (
        "import sys; from pathlib import Path; from esper.dash import app; "
        "from esper.dash.run_view import RunFinder; from starlette.responses import StreamingResponse; "
        "app.FileResponse = lambda _: StreamingResponse(iter(lambda: b'x' * 2**20, None)); "
        "say = lambda line: print(line, flush=True); "
        "app.serve(RunFinder((Path(sys.argv[1]),)), app.create_access('127.0.0.1', None), 0, False, say)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script, str(planted)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout
        port = int(process.stdout.readline().rstrip().rstrip("/").rpartition(":")[2])
        with socket.create_connection(("127.0.0.1", port)) as slow:
            slow.sendall(b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
            assert slow.recv(10)
            time.sleep(0.5)  # buffers are full now
            process.send_signal(signal.SIGINT)
            _, error = process.communicate(timeout=60)
    assert (process.returncode, error) == (0, "")
