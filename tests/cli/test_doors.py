"""A user of the same machine without any right to the sweep: what they try, and that it changes and tells nothing."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lora_tune.base.errors import InputError, SetupError
from lora_tune.cli.doors import own_token, visitor
from lora_tune.cli.metrics import Metrics
from lora_tune.cli.web_server import listen
from tests.cli.test_dashboard import reviewed
from tests.reachable import reachable
from tests.waiting import wait_for

NOBODY = 65534
PYTHON = Path("/usr/bin/python3")
needs_root = pytest.mark.skipif(
    os.geteuid() != 0 or not PYTHON.exists(), reason="another user is taken on by root alone, with Debian's Python"
)


def as_nobody(program: str, *arguments: str) -> Any:
    """What a program of another user prints, as JSON."""
    user = ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups", "--no-new-privs"]
    done = subprocess.run(
        [*user, str(PYTHON), "-c", program, *arguments], cwd="/", env={"PATH": "/usr/bin:/bin"}, capture_output=True,
        text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


class TestToken:
    """The dashboard's token lies in a file that its owner alone reads."""

    def test_it_is_made_once_for_its_owner_alone(self, tmp_path: Path) -> None:
        before = os.umask(0)
        try:
            token = own_token(tmp_path / "t")
        finally:
            os.umask(before)
        assert (tmp_path / "t").stat().st_mode & 0o777 == 0o600
        assert own_token(tmp_path / "t") == token, "the printed address stays valid"
        assert len(token) >= 32

    @pytest.mark.parametrize("make", ["open to others", "short", "a link", "a FIFO", "another's"])
    def test_one_that_others_may_know_is_not_taken(self, tmp_path: Path, make: str) -> None:
        path = tmp_path / "t"
        if make == "a FIFO":
            os.mkfifo(path, 0o600)
        elif make == "a link":
            (tmp_path / "other").write_text("x" * 32)
            path.symlink_to(tmp_path / "other")
        else:
            path.write_text("x" if make == "short" else "x" * 32)
            path.chmod(0o644 if make == "open to others" else 0o600)
        if make == "another's":
            if os.geteuid():
                pytest.skip("files are given away by root alone")
            os.chown(path, NOBODY, NOBODY)
        with pytest.raises(SetupError, match="t"):
            own_token(path)


class TestMetrics:
    """``/metrics`` asks for a token where one is set, and waits for nobody."""

    def test_a_scrape_sends_the_token_as_a_bearer(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("LORA_TUNE_METRICS_TOKEN", "a secret of the team")
        lines: list[str] = []
        Metrics().serve("0", lines.append)
        assert "LORA_TUNE_METRICS_TOKEN" not in os.environ, "trials do not inherit it"
        address = lines[0].split()[1]
        for headers in ({}, {"Authorization": "Bearer a secret of the tean"}):
            with pytest.raises(urllib.error.HTTPError, match="401"):
                urllib.request.urlopen(urllib.request.Request(address, headers=headers), timeout=10)
        right = urllib.request.Request(address, headers={"Authorization": "Bearer a secret of the team"})
        with urllib.request.urlopen(right, timeout=10) as answer:
            assert answer.status == 200

    def test_a_token_that_is_guessed_is_refused(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("LORA_TUNE_METRICS_TOKEN", "short")
        with pytest.raises(InputError, match="less than 16"):
            Metrics().serve("0")


@pytest.fixture
def visited() -> Iterator[str]:
    """A page that says who asks for it."""

    def page(environ: dict[str, Any], start_response: Any) -> list[bytes]:
        body = json.dumps(visitor(environ)).encode()
        start_response("200 OK", [("Content-Length", str(len(body)))])
        return [body]

    server = listen(page, "127.0.0.1", 0)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()
    server.server_close()


ASK = "import sys, urllib.request; print(urllib.request.urlopen(sys.argv[1], timeout=10).read().decode())"


@needs_root
def test_who_steers_is_named_by_the_connection_and_not_as_the_owner(visited: str) -> None:
    own = json.loads(urllib.request.urlopen(visited, timeout=10).read())
    assert own == f"root@{os.uname().nodename}"
    assert as_nobody(ASK, visited) == f"nobody@{os.uname().nodename} by the dashboard of {own}"


def test_another_machine_is_named_by_its_address() -> None:
    assert visitor({"REMOTE_ADDR": "192.0.2.7", "REMOTE_PORT": "5"}).startswith("192.0.2.7 by the dashboard of ")


WALK = """
import json, os, sys, urllib.error, urllib.request
address, folder, pid = sys.argv[1:]
told = {}
def ask(path, data=None, **headers):
    try:
        answer = urllib.request.urlopen(urllib.request.Request(address + path, data, headers), timeout=10)
        return answer.status
    except urllib.error.HTTPError as error:
        return error.code
for path in ("/", "/dashboard", "/steer", "/api/studies", "/artifacts/0/0", "/?token=", "/?token=guess"):
    told["GET " + path] = ask(path)
for path in ("/steer", "/api/studies", "/api/trials/1/note", "/api/trials/1/state"):
    told["POST " + path] = ask(path, b"pause=on", Cookie="lora_tune_token_00000000=x", Origin=address)
def attempt(act):
    try:
        act()
        return True
    except OSError:
        return False
for name in ("environ", "mem"):
    told["/proc " + name] = attempt(lambda: open(f"/proc/{pid}/{name}", "rb").read(1))
told["/proc fd"] = attempt(lambda: os.listdir(f"/proc/{pid}/fd"))
told["signal"] = attempt(lambda: os.kill(int(pid), 0))
written, secret = [], []
for place, folders, files in os.walk(folder):
    if attempt(lambda: open(os.path.join(place, "mine"), "w")):
        written.append(place)
    for name in files:
        path = os.path.join(place, name)
        if attempt(lambda: open(path, "ab")):
            written.append(path)
        if name.endswith(".token") and attempt(lambda: open(path)):
            secret.append(path)
told["written"], told["secret"] = written, secret
ours = []
for place, folders, files in os.walk("/tmp"):
    for name in files:
        path = os.path.join(place, name)
        try:
            if os.stat(path).st_mtime >= START and "lora" in path and (os.access(path, os.W_OK)):
                ours.append(path)
        except OSError:
            pass
told["tmp"] = ours
print(json.dumps(told))
"""


@needs_root
@pytest.mark.long
def test_another_user_of_the_machine_reads_and_changes_nothing(tmp_path: Path) -> None:
    """The dashboard, its process, the sweep's folder and what lies in /tmp, tried by ``nobody``."""
    reachable(tmp_path, 0o055)  # nothing but its own modes protects the folder
    review = reviewed(tmp_path, trials=4)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*.db")}
    start = max(path.stat().st_mtime for path in tmp_path.rglob("*"))
    command = [sys.executable, "-m", "lora_tune.dashboard", "--study", review.study.name, "--port", "0"]
    process = subprocess.Popen([*command, "--output", str(review.paths.root)], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        address = re.search(r"(http://[^/]+)/dashboard\?token=(\S+)", process.stdout.readline())
        assert address is not None
        told = as_nobody(WALK.replace("START", repr(start)), address[1], str(tmp_path), str(process.pid))
        refused = {name: code for name, code in told.items() if name.startswith(("GET", "POST"))}
        assert set(refused.values()) <= {401, 403}, refused
        assert not any(told[name] for name in ("/proc environ", "/proc mem", "/proc fd", "signal"))
        assert (told["written"], told["secret"], told["tmp"]) == ([], [], [])
        jar = urllib.request.build_opener(urllib.request.HTTPCookieProcessor())
        assert jar.open(f"{address[1]}/?token={address[2]}", timeout=30).status == 200, "its owner gets in"
        wait_for(lambda: process.poll() is None, what="it goes on")
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(20)
    assert {path: path.read_bytes() for path in before} == before, "the records are as they were"
