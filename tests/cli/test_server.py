"""The server in this process, on SQLite: what one study does to the others."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from lora_tune.cli import serving
from lora_tune.cli.metrics import Metrics
from lora_tune.cli.serve import SERVER
from lora_tune.cli.serving import Server
from lora_tune.config.study import parse_study
from lora_tune.controller.quota import NodeQuota
from lora_tune.store import Registered, Store, sqlite_url
from lora_tune.store.port import Request
from lora_tune.store.requests import Requests
from tests.contracts.store import where
from tests.fakes import command_study
from tests.waiting import wait_for

PRINTS = """
import json, time
for key, value in (("run_start", None), ("eval_accuracy", -1.0), ("run_stop", None)):
    fields = {"namespace": "", "time_ms": int(time.time() * 1000), "event_type": "POINT_IN_TIME", "key": key}
    where = {"file": "x", "lineno": 1, "samples_count": 8}
    print(":::MLLOG " + json.dumps({**fields, "value": value, "metadata": where}), flush=True)
"""


def registered(folder: Path, store: Store, name: str) -> None:
    """A study of one trial that reaches its target at once, as ``sweep --register`` leaves it."""
    (folder / "trial.py").write_text(PRINTS)
    text = command_study(trials=1, parallel=1).replace('argv = ["true"]', f'argv = ["python3", "{folder}/trial.py"]')
    (folder / name).mkdir()
    file = folder / f"{name}.toml"
    store.begin(name, parse_study(text, file).digest, text, 0.0)
    lease = store.take_lease(name, "test", 0.0)
    store.place(lease, where(file, folder / name, name=name))
    store.release(lease)


@pytest.mark.parametrize("where", ["plan_of", "make_launcher"])
def test_a_mistake_in_one_study_ends_neither_the_server_nor_the_others(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    store = Store(sqlite_url(tmp_path / "team.db"))
    for name in ("broken", "sound"):
        registered(tmp_path, store, name)
    real: Callable[..., object] = getattr(serving, where)

    def mistaken(of: object, *more: object) -> object:
        if of.name == "broken":  # type: ignore[attr-defined]  # a Registered or a Study
            raise ZeroDivisionError("a mistake of ours")
        return real(of, *more)

    monkeypatch.setattr(serving, where, mistaken)
    said: list[str] = []
    server = Server(store, NodeQuota(None), Metrics(), said.append)
    lease = store.take_lease(SERVER, "test", 0.0)
    running = threading.Thread(target=lambda: server.run(lease, until_done=False))
    running.start()

    def row(name: str) -> Registered:
        return next(found for found in store.registered() if found.name == name)

    try:
        wait_for(lambda: row("sound").ended, 40, "the sound study's end")
        wait_for(lambda: any("ZeroDivisionError" in text for text in said), 10, "the mistake is said")
        assert running.is_alive()
        assert row("broken").ended == ""
        assert sum("broken: Traceback" in text for text in said) == 1
    finally:
        server.stop()
        running.join(30)
        store.close()
    assert not running.is_alive()


OWN_SAMPLER = """
def mine(study, old_runs):
    return study.search.seeed
"""


def test_a_mistake_in_a_kind_of_ones_own_is_told_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text(OWN_SAMPLER)
    text = command_study(trials=1, parallel=1).replace('"random"', '"own.py:mine"')
    store = Store(sqlite_url(tmp_path / "team.db"))
    (tmp_path / "own").mkdir()
    file = tmp_path / "own.toml"
    store.begin("own", parse_study(text, file).digest, text, 0.0)
    lease = store.take_lease("own", "test", 0.0)
    store.place(lease, where(file, tmp_path / "own", name="own"))
    store.release(lease)
    said: list[str] = []
    server = Server(store, NodeQuota(None), Metrics(), said.append)
    serving_lease = store.take_lease(SERVER, "test", 0.0)
    running = threading.Thread(target=lambda: server.run(serving_lease, until_done=False))
    running.start()
    try:
        wait_for(lambda: any("fails" in text for text in said), 40, "the mistake is said")
    finally:
        server.stop()
        running.join(30)
        store.close()
    (line,) = (text for text in said if "fails" in text)
    assert "\n" not in line
    assert re.search(r"own: sampler 'own\.py:mine' fails: \S*own\.py, line 3, in mine: AttributeError", line)


def test_what_people_ask_of_a_study_that_is_served_is_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    store = Store(sqlite_url(tmp_path / "team.db"))
    registered(tmp_path, store, "served")
    wish = {"values": {"LR": 0.002}, "clone_of": None}
    Requests(store, "served").ask(Request(kind="enqueue", what=wish, who="ada@login1", asked_at=0.0))
    server = Server(store, NodeQuota(None), Metrics(), lambda _: None)
    lease = store.take_lease(SERVER, "test", 0.0)
    running = threading.Thread(target=lambda: server.run(lease, until_done=True))
    running.start()
    try:
        wait_for(lambda: not running.is_alive(), 60, "the study's end")
        assert [(r.accepted, r.answer) for r in Requests(store, "served").all()] == [
            (True, "the next free slot runs it")
        ]
        sweep = store.load("served")
        assert sweep is not None
        assert [trial.tuned["LR"] for trial in sweep.trials.values()] == [0.002]
    finally:
        server.stop()
        running.join(30)
        store.close()
