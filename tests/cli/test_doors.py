"""A user of the same machine without any right to the sweep: what they try, and that it changes and tells nothing."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from lora_tune.base.errors import InputError, SetupError
from lora_tune.cli.metrics import Metrics
from lora_tune.cli.web_server import dashboard_token
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
            token = dashboard_token(tmp_path / "t")
        finally:
            os.umask(before)
        assert (tmp_path / "t").stat().st_mode & 0o777 == 0o600
        assert dashboard_token(tmp_path / "t") == token, "the printed address stays valid"
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
            dashboard_token(path)


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


WALK = """
import json, os, socket, stat, sys, urllib.error, urllib.request
tried = json.loads(sys.argv[1])
folder, since, secret = tried["folder"], tried["since"], tried["secret"].encode()
told = {"answers": {}, "read": [], "written": [], "secret": [], "connected": [], "signalled": []}
def attempt(act):
    try:
        act()
        return True
    except OSError:
        return False
for method, address, headers in tried["requests"]:
    try:
        data = None if method == "GET" else b"pause=on"
        request = urllib.request.Request(address, data, headers, method=method)
        code = urllib.request.urlopen(request, timeout=10).status
    except urllib.error.HTTPError as error:
        code = error.code
    told["answers"][method + " " + address + " " + json.dumps(headers)] = code
for pid in tried["pids"]:
    place = f"/proc/{pid}/"
    for name in ("environ", "mem", "maps"):
        if attempt(lambda: open(place + name, "rb").read(1)):
            told["read"].append(place + name)
    for name in ("fd", "cwd/"):
        if attempt(lambda: os.listdir(place + name)):
            told["read"].append(place + name)
    if attempt(lambda: os.kill(pid, 0)):
        told["signalled"].append(pid)
    if secret in open(place + "cmdline", "rb").read():
        told["secret"].append(place + "cmdline")
def new(path):
    return path.startswith(folder) or os.lstat(path).st_mtime >= since
for top in (folder, "/tmp", "/dev/shm"):
    for place, folders, files in os.walk(top):
        if place.startswith(folder) and attempt(lambda: open(os.path.join(place, "mine"), "w")):
            told["written"].append(place)
        for path in (os.path.join(place, name) for name in files):
            try:
                if not new(path):
                    continue
                if stat.S_ISSOCK(os.lstat(path).st_mode):
                    if attempt(lambda: socket.socket(socket.AF_UNIX).connect(path)):
                        told["connected"].append(path)
                    continue
                if not stat.S_ISREG(os.lstat(path).st_mode):
                    continue
                if attempt(lambda: open(path, "ab")) and os.stat(path).st_uid != os.getuid():
                    told["written"].append(path)
                text = open(path, "rb").read()
                if secret in text or path.endswith(".token"):
                    told["secret"].append(path)
            except OSError:
                pass
print(json.dumps(told))
"""


def walked(folder: Path, requests: list[tuple[str, str, dict[str, str]]], pids: list[int], secret: str) -> Any:
    """What ``nobody`` gets of a sweep's folder, servers and processes; its answers alone where all is well."""
    since = max(path.stat().st_mtime for path in folder.rglob("*"))
    tried = {"folder": str(folder), "since": since, "secret": secret, "requests": requests, "pids": pids}
    told = as_nobody(WALK, json.dumps(tried))
    answers = told.pop("answers")
    assert told == {"read": [], "written": [], "secret": [], "connected": [], "signalled": []}
    return answers


@needs_root
@pytest.mark.long
def test_another_user_of_the_machine_reads_and_changes_nothing(tmp_path: Path) -> None:
    """The dashboard, its process, the sweep's folder and what lies in /tmp, tried by ``nobody``."""
    reachable(tmp_path, 0o055)  # nothing but its own modes protects the folder
    review = reviewed(tmp_path, trials=4)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*.db")}
    command = [sys.executable, "-m", "lora_tune.dashboard", "--study", review.study.name, "--port", "0"]
    process = subprocess.Popen([*command, "--output", str(review.paths.root)], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        address = re.search(r"(http://[^/]+)/dashboard\?token=(\S+)", process.stdout.readline())
        assert address is not None
        shown = ("/", "/dashboard", "/steer", "/api/studies", "/artifacts/0/0", "/?token=", "/?token=guess")
        changed = ("/steer", "/api/studies", "/api/trials/1/note", "/api/trials/1/state")
        guess = {"Cookie": "lora_tune_token_00000000=x", "Origin": address[1]}
        requests: list[tuple[str, str, dict[str, str]]] = [("GET", address[1] + path, {}) for path in shown]
        requests += [("POST", address[1] + path, guess) for path in changed]
        requests += [("PUT", address[1] + "/api/studies/1/note", guess)]
        answers = walked(tmp_path, requests, [process.pid], address[2])
        assert set(answers.values()) <= {401, 403}, answers
        jar = urllib.request.build_opener(urllib.request.HTTPCookieProcessor())
        assert jar.open(f"{address[1]}/?token={address[2]}", timeout=30).status == 200, "its owner gets in"
        wait_for(lambda: process.poll() is None, what="it goes on")
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(20)
    assert {path: path.read_bytes() for path in before} == before, "the records are as they were"


SECRET = "a-token-of-the-team-3b1f"

SERVED = """
[workload]
kind = "command"
argv = ["{python}", "-c", "import time; print('begun', flush=True); time.sleep(600)"]
log = {{ kind = "jsonl" }}
[workload.environment]
HF_TOKEN = {{ env = "HF_TOKEN" }}
[site]
kill_seconds = 1
[space]
LR = {{ type = "float", low = 1e-3, high = 1e-2, log = true }}
[objective]
target = 0.6
[budget]
trials = 1
parallel = 1
trial_minutes = 20
"""


def processes_below(pid: int) -> list[int]:
    """A process and all that it started, as far as they live."""
    found = [pid]
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            inherited = f"HF_TOKEN={SECRET}".encode() in (entry / "environ").read_bytes()
            if parent == pid or inherited:
                found.append(int(entry.name))
    return sorted({*found} - {os.getpid()})


def listens(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
        return True
    return False


@needs_root
@pytest.mark.long
def test_another_user_gets_nothing_of_a_server_its_metrics_its_tools_and_its_trials(tmp_path: Path) -> None:
    reachable(tmp_path, 0o055)
    (tmp_path / "studies").mkdir()
    (tmp_path / "studies" / "kept.toml").write_text(SERVED.format(python=sys.executable))
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as free:
        port = free.getsockname()[1]
    tokens = {"LORA_TUNE_METRICS_TOKEN": SECRET, "LORA_TUNE_MCP_TOKEN": SECRET, "HF_TOKEN": SECRET}
    environment = {**os.environ, **tokens, "LORA_TUNE_STORAGE": f"sqlite:///{tmp_path}/all.db"}
    command = [sys.executable, "-m"]
    with (tmp_path / "server.out").open("w") as output:
        ours = [
            subprocess.Popen([*command, *what], cwd=tmp_path, env=environment, stdout=output, stderr=output)
            for what in (
                ("lora_tune.sweep", "--study", "kept", "--metrics", "0"),
                ("lora_tune.mcp", "--http", str(port)),
            )
        ]
    try:
        said = tmp_path / "server.out"
        log = tmp_path / "sweeps" / "kept" / "trials" / "0000" / "attempt-0" / "job.log"
        wait_for(lambda: log.exists() and "begun" in log.read_text(), 60, "a trial runs")
        scrape = wait_for(lambda: re.search(r"http://\S+/metrics", said.read_text()), 60, "metrics are served")
        wait_for(lambda: listens(port), 60, "tools are served")
        pids = [pid for process in ours for pid in processes_below(process.pid)]
        assert len(pids) > 3, "the trial's own processes are among them"
        doors = (scrape[0], f"http://127.0.0.1:{port}/mcp")
        guesses: list[dict[str, str]] = [{}, {"Authorization": "Bearer "}, {"Authorization": f"Bearer {SECRET[:-1]}"}]
        requests = [(method, door, guess) for door in doors for guess in guesses for method in ("GET", "POST")]
        answers = walked(tmp_path, requests, pids, SECRET)
        assert set(answers.values()) == {401, 403}, answers  # 403: metrics take no body, whoever sends it
        assert all(process.poll() is None for process in ours)
    finally:
        for process in ours:
            process.send_signal(signal.SIGTERM)
        for pid in processes_below(ours[0].pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for process in ours:
            process.wait(30)
