"""``lora-tune mcp``: a client that speaks only the protocol tunes a study from init to export, and one that lies is
refused with what to do."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import anyio
import httpx2
import pytest
from click.testing import CliRunner
from mcp.client.client import Client
from mcp.client.streamable_http import streamable_http_client

from lora_tune import Sweep
from lora_tune.base.errors import InputError
from lora_tune.base.paths import AttemptPaths
from lora_tune.cli import mcp
from lora_tune.cli.mcp import TOKEN_VARIABLE, TOOLS, AgentTools, server_of
from lora_tune.mcp import main
from lora_tune.store import Store, sqlite_url
from lora_tune.store.records import TrialState, Verdict
from tests.cli import mcp_client
from tests.cli.test_ask_tell import STUDY
from tests.conftest import REPOSITORY
from tests.own_scripts.rows import SCRIPTS
from tests.waiting import wait_for, wait_until_hung_up

SHORT = 8000
"""Characters of one answer: some two thousand tokens."""

Call = Callable[..., Awaitable[Any]]


def answering(client: Client) -> Call:
    """Calls a tool; its answer as data, or the sentence of its refusal."""

    async def call(name: str, **arguments: object) -> Any:
        done = await client.call_tool(name, arguments)
        text = done.content[0].text  # type: ignore[union-attr]
        assert len(text) < SHORT
        return text if done.is_error else json.loads(text)

    return call


def in_process(place: Callable[[Call], Awaitable[None]], tools: AgentTools) -> None:
    """A client and the server in one process."""

    async def session() -> None:
        async with Client(server_of(tools)) as client:
            await place(answering(client))

    anyio.run(session)


@pytest.fixture
def outside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AgentTools:
    """The tools of a folder with one study, whose trials the client runs."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.toml").write_text(STUDY)
    return AgentTools()


def test_there_are_at_most_twelve_tools_and_each_says_what_it_does(outside: AgentTools) -> None:
    async def listed() -> list[Any]:
        async with Client(server_of(outside)) as client:
            assert "A seed is no" in (client.instructions or "")
            return list((await client.list_tools()).tools)

    tools = anyio.run(listed)
    assert [tool.name for tool in tools] == list(TOOLS)
    assert len(tools) <= 12
    assert all(40 < len(tool.description) < 700 for tool in tools)


def test_a_client_runs_the_trials_itself_and_hears_which_is_better(outside: AgentTools) -> None:
    async def session(call: Call) -> None:
        assert (await call("study"))["parameters"] == {"LR": "within 0.01 to 0.05"}
        for number in range(16):
            base, noise = number % 2 == 0, 0.01 * (number * 7 % 5)
            offer = await call("propose", values={"LR": 0.01 if base else 0.03})
            told = await call("tell", token=offer["token"], evals=[[100, (1.0 if base else 0.8) + noise]])
            assert told["verdict"] == "reached"
        verdict = await call("verdict", trial=1)
        assert verdict["state"] == "better"
        assert "better than the baseline by 0.2" in verdict["sentence"]
        assert "2 configurations, 1 run again, 1 better" in (await call("verdict"))["ledger"]
        assert (await call("export"))["verdict"] == verdict["sentence"]
        assert [row["trial"] for row in (await call("history", rows=3))["trials"]] == [15, 14, 13]

    in_process(session, outside)
    assert len(Sweep("mine.toml").trials) == 16


def test_a_client_that_lies_is_refused_with_what_to_do_and_nothing_of_it_is_on_record(outside: AgentTools) -> None:
    async def session(call: Call) -> None:
        offer = await call("propose")
        refusals = [
            await call("tell", token="0" * 32, evals=[[100, 0.1]]),
            await call("tell", token=offer["token"], evals=[[100, 0.1, 86400.0]]),
            await call("tell", token=offer["token"], evals=[[100, "low"]]),
            await call("tell", token=offer["token"]),
            await call("propose", values={"LR": 9.0}),
            await call("propose", again=77),
            await call("verdict", trial=77),
            await call("log", trial=77),
            await call("study", study="../../etc/passwd"),
            await call("start"),
        ]
        assert all(isinstance(refusal, str) for refusal in refusals)
        assert "use the one that ask gave" in refusals[0]
        assert "cannot be" in refusals[1]
        assert "history lists them" in refusals[5]
        assert "and no path" in refusals[8]
        assert "propose gives one to run" in refusals[9]
        first = await call("tell", token=offer["token"], evals=[[100, 0.5]])
        assert await call("tell", token=offer["token"], evals=[[100, 0.5]]) == first
        assert "the first one stays" in await call("tell", token=offer["token"], evals=[[100, 0.1]])

    in_process(session, outside)
    (trial,) = Sweep("mine.toml").trials
    assert (trial.verdict, trial.metrics.objective) == (Verdict.REACHED, 0.5)


def test_before_a_sweep_began_every_question_says_how_it_begins(outside: AgentTools) -> None:
    for ask in (outside.status, outside.verdict, outside.history, outside.why, outside.export):
        with pytest.raises(InputError, match="its sweep has not begun: start lets the search propose"):
            ask()


def test_a_server_of_one_study_speaks_of_no_other(outside: AgentTools, tmp_path: Path) -> None:
    (tmp_path / "other.toml").write_text(STUDY)
    fixed = AgentTools("mine.toml")
    assert fixed.study()["study"] == "mine"
    for ask in (lambda: fixed.study("other"), lambda: fixed.init("new", text=STUDY)):
        with pytest.raises(InputError, match=r"this server speaks of the study mine\.toml alone"):
            ask()
    with pytest.raises(InputError, match="say which study: mine, other"):
        outside.study()


def test_a_study_that_cannot_be_is_not_written_and_one_whose_sweep_began_stays(
    outside: AgentTools, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match="launcher"):
        outside.init("new", text=STUDY.replace('"outside"', '"nosuch"'))
    assert not (tmp_path / "new.toml").exists()
    with pytest.raises(InputError, match=r"mine\.toml exists; give the whole text to replace it"):
        outside.init("mine", command=["python", "train.py"])
    assert (tmp_path / "mine.toml").read_text() == STUDY
    outside.propose()
    with pytest.raises(InputError, match="the sweep of mine has begun; its study stays"):
        outside.init("mine", text=STUDY)


def test_a_log_is_shown_without_what_a_terminal_acts_on(outside: AgentTools) -> None:
    offer = outside.propose()
    Sweep("mine.toml").tell(offer["token"], log="\x1b[31mloss\n" * 90 + ":::MLLOG {}\n" + "x" * 900 + "\n")
    lines = outside.log(0, lines=1000)["lines"]
    assert len(lines) == 40
    assert all(len(line) <= 200 and line.isprintable() for line in lines)
    assert outside.log(0, containing="nothing like it")["lines"] == []


def test_the_command_says_what_to_install_where_the_sdk_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mcp.server.mcpserver", None)
    done = CliRunner().invoke(main, [])
    assert (done.exit_code, 'pip install "lora-tune[mcp]"' in done.stderr) == (3, True)


@pytest.mark.parametrize("token", ["", "short"])
def test_by_http_it_is_not_served_without_a_token_that_nobody_guesses(
    token: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = CliRunner(env={TOKEN_VARIABLE: token}).invoke(main, ["--http", "0"])
    assert (done.exit_code, f"set {TOKEN_VARIABLE} to a secret of 16 characters" in done.stderr) == (2, True)
    assert CliRunner().invoke(main, ["--http", "port"]).exit_code == 2


@pytest.mark.long
@pytest.mark.parametrize(
    "begun",
    [b"", b"POST /mcp HTTP/1.1\r\nHost: x\r\n", b"POST /mcp HTTP/1.1\r\nHost: x\r\nContent-Length: 9999\r\n\r\nx"],
)
def test_by_http_who_drips_a_request_is_hung_up_on(begun: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Any user of the machine held as many connections as they liked, without a token."""
    monkeypatch.setattr(mcp, "REQUEST_SECONDS", 0.3)
    server = mcp.web_server(mcp.Guarded(None, "a secret of the team"), "127.0.0.1", 0)  # type: ignore[arg-type]
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    wait_for(lambda: server.started, what="it listens")
    with socket.create_connection(server.servers[0].sockets[0].getsockname(), timeout=20) as client:
        client.sendall(begun)
        wait_until_hung_up(client, b"x")
    server.should_exit = True
    thread.join(20)


def test_by_http_who_has_the_token_is_answered_and_nobody_else(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text(STUDY)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port, token = free.getsockname()[1], "0123456789abcdef"
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), TOKEN_VARIABLE: token}
    line = [sys.executable, "-m", "lora_tune.mcp", "--http", str(port)]
    server = subprocess.Popen(line, cwd=tmp_path, env=environment)
    where = f"http://127.0.0.1:{port}/mcp"

    async def asked(words: str) -> str:
        async with httpx2.AsyncClient(headers={"Authorization": words}) as http:
            if words != f"Bearer {token}":
                answer = await http.post(where, json={})
                assert answer.status_code == 401
                return answer.text
            async with Client(streamable_http_client(where, http_client=http)) as client:
                return str((await answering(client)("study"))["study"])

    def listens() -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", port)) == 0

    try:
        wait_for(listens, 60, "the server")
        assert anyio.run(asked, f"Bearer {token}") == "mine"
        for wrong in ("", "Bearer 0123456789abcdeg", token, "Basic eDp5"):
            assert "send Authorization: Bearer" in anyio.run(asked, wrong)
    finally:
        server.terminate()
        server.wait(30)


@pytest.mark.long
def test_a_client_completes_a_study_from_init_to_export_though_client_server_and_driver_are_killed(
    tmp_path: Path,
) -> None:
    """Each time at a random call, while it is on its way: one of the three, or all. Nothing is lost or done twice."""
    for name in ("descent.py", "plain_step_loss.py"):
        shutil.copy(SCRIPTS / name, tmp_path)
    earlier = subprocess.run([sys.executable, "plain_step_loss.py"], cwd=tmp_path, capture_output=True, check=True)
    (tmp_path / "earlier.log").write_bytes(earlier.stdout)
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    rng, printed, killed = random.Random(38), "", 0
    for victims in ("client", "server", "driver", "all", "client", "driver", "nobody"):
        command = [sys.executable, mcp_client.__file__, str(tmp_path)]
        client = subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True)
        assert client.stdout is not None
        if victims == "nobody":
            printed, _ = client.communicate(timeout=300)
            assert client.returncode == 0, printed
            break
        for _ in range(rng.randint(1, 5)):
            assert client.stdout.readline(), "the client ended by itself"
        time.sleep(rng.uniform(0, 1.5))  # the call is on its way
        pids = {
            "client": [client.pid],
            "server": _children_of(client.pid, "lora_tune.mcp"),
            "driver": _driver(tmp_path),
        }
        for pid in (pid for who, found in pids.items() for pid in found if victims in (who, "all")):
            os.kill(pid, signal.SIGKILL)
            killed += 1
        client.kill()
        client.communicate()
    assert killed >= 5
    assert re.search(r"done .*LR", printed)
    store = Store(sqlite_url(tmp_path / "sweeps" / "mine" / "sweep.db"), read_only=True)
    records = store.load("mine")
    store.close()
    assert records is not None
    assert all(trial.state is TrialState.FINISHED for trial in records.trials.values())
    run = Counter(trial.tuned["LR"] for trial in records.trials.values())
    assert run == dict(mcp_client.WANTED)
    requests = [trial.request for trial in records.trials.values() if trial.request is not None]
    assert len(requests) == len(set(requests))
    logs = Counter(a.trial for a in records.attempts.values() if "step 60 loss" in _log_of(tmp_path, a.folder))
    assert logs == dict.fromkeys(records.trials, 1), "each was run to its end once"
    assert (tmp_path / "sweeps" / "mine" / "best").is_dir()


def _log_of(place: Path, folder: str) -> str:
    log = AttemptPaths(place / "sweeps" / "mine" / folder).log
    return log.read_text() if log.exists() else ""


def _driver(place: Path) -> list[int]:
    """The process that drives the sweep, if one does."""
    database = place / "sweeps" / "mine" / "sweep.db"
    if not database.exists():
        return []
    with contextlib.closing(Store(sqlite_url(database), read_only=True)) as store:
        owner = store.held("mine").owner
    found = re.search(r" pid (\d+) ", owner)
    return [int(found[1])] if found and Path(f"/proc/{found[1]}").exists() else []


def _children_of(parent: int, command: str) -> list[int]:
    """The processes that a process started with a command."""
    children = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    return [int(pid) for pid in children if command in Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")]
