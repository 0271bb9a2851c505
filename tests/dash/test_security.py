"""Who may ask, and what every answer says to browsers."""

import re
from pathlib import Path
from urllib.parse import urljoin

import pytest
from starlette.applications import Starlette
from starlette.routing import Mount
from starlette.testclient import TestClient

from esper.dash.app import HEADERS, STATIC, Access, create_access, dashboard
from esper.dash.run_view import RunFinder
from esper.errors import ConfigError

TOKEN = "a-secret-of-many-letters"
PATHS = ["/", "/static/js/main.js", "/static/none.js", "/api/runs", "/api/none", "/api/events?run=none", "/none"]


def client(tmp_path: Path, host: str = "127.0.0.1", token: str | None = None, base: str = "127.0.0.1:80") -> TestClient:
    app = dashboard(RunFinder((tmp_path,)), Access(host, token))
    return TestClient(app, base_url=f"http://{base}", follow_redirects=False, raise_server_exceptions=False)


@pytest.mark.parametrize("path", PATHS)
def test_every_answer_has_all_headers(tmp_path: Path, path: str):
    answer = client(tmp_path).get(path)
    assert {name: answer.headers[name] for name in HEADERS} == HEADERS
    assert answer.headers["content-security-policy"].startswith("default-src 'self';")


def test_even_a_defect_is_answered_with_all_headers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(RunFinder, "find", lambda _: {}[0])
    answer = client(tmp_path).get("/api/runs")
    assert (answer.status_code, "terminal" in answer.json()["error"]) == (500, True)
    assert {name: answer.headers[name] for name in HEADERS} == HEADERS


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE"])
@pytest.mark.parametrize("path", ["/", "/api/runs", "/static/js/main.js"])
def test_nothing_can_be_changed(tmp_path: Path, method: str, path: str):
    answer = client(tmp_path).request(method, path)
    assert answer.status_code == 405
    assert answer.headers["allow"] == "GET, HEAD"


OWN = ["localhost", "LOCALHOST:8765", "127.0.0.1:1", "[::1]:8765"]
FOREIGN = ["evil.example", "evil.example:8765", "127.0.0.1.evil.example", "10.0.0.1", "", "["]


@pytest.mark.parametrize("host", [*OWN, *FOREIGN])
def test_own_names_are_answered_and_foreign_ones_are_not_at_open_addresses_too(tmp_path: Path, host: str):
    assert client(tmp_path).get("/api/runs", headers={"host": host}).status_code == (200 if host in OWN else 421)
    served = client(tmp_path, "0.0.0.0", TOKEN)
    served.cookies.set("esper-dash-80", TOKEN)
    known = host in OWN or host == "10.0.0.1"
    assert (served.get("/api/runs", headers={"host": host}).status_code != 421) is known


@pytest.mark.parametrize("path", PATHS)
def test_without_the_token_nothing_is_shown(tmp_path: Path, path: str):
    assert client(tmp_path, "0.0.0.0", TOKEN).get(path).status_code == 403
    assert client(tmp_path, "0.0.0.0", TOKEN).get(path, params={"token": TOKEN[:-1]}).status_code == 403


def test_the_token_becomes_a_cookie_that_scripts_cannot_read(tmp_path: Path):
    served = client(tmp_path, "0.0.0.0", TOKEN)
    first = served.get("/", params={"token": TOKEN})
    assert (first.status_code, first.headers["location"]) == (303, "./")
    assert "HttpOnly" in first.headers["set-cookie"]
    assert "SameSite=strict" in first.headers["set-cookie"]
    assert served.get("/api/runs").status_code == 200


def test_open_addresses_always_have_a_token_that_is_a_secret():
    assert create_access("127.0.0.1", None).token is None
    assert create_access("::1", None).token is None
    made = [create_access("0.0.0.0", None).token for _ in range(2)]
    assert None not in made
    assert made[0] != made[1]
    assert create_access("0.0.0.0", TOKEN).token == TOKEN
    for token in ("", "short", "with spaces in it, long", "a&b=c" * 9):
        with pytest.raises(ConfigError, match="token"):
            create_access("0.0.0.0", token)


@pytest.mark.parametrize("path", ["../app.py", "%2e%2e/app.py", "js/../../app.py", "..%2fapp.py", "//etc/passwd", "js"])
def test_static_files_stay_in_their_folder(tmp_path: Path, path: str):
    answer = client(tmp_path).get(f"/static/{path}")
    assert answer.status_code in (404, 405)
    assert "starlette" not in answer.text


def test_all_addresses_of_the_page_are_relative_so_that_it_works_behind_a_prefix(tmp_path: Path):
    prefix = "/user/me/proxy/8765"
    app = Starlette(routes=[Mount(prefix, dashboard(RunFinder((tmp_path,)), Access("127.0.0.1")))])
    behind = TestClient(app, base_url="http://127.0.0.1:80")
    page = behind.get(f"{prefix}/").text
    addresses = re.findall(r'(?:href|src)="([^"#]+)"', page)
    assert len(addresses) > 5
    for address in addresses:
        assert behind.get(urljoin(f"{prefix}/", address)).status_code == 200, address
    scripts = "".join(path.read_text() for path in (STATIC / "js").rglob("*.js"))
    assert not re.findall(r"""[`"'](/(?:api|static)/[^`"']*)""", scripts)
