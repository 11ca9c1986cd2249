"""A service with a key runs what was registered with that key, and nothing that others put into its database."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import sqlalchemy as sa
from click.testing import CliRunner

from lora_tune.base.errors import SetupError
from lora_tune.cli import sweep
from lora_tune.cli.metrics import Metrics
from lora_tune.cli.serve import SERVER
from lora_tune.cli.serving import Server
from lora_tune.controller.quota import NodeQuota
from lora_tune.controller.signatures import SigningKey, read_key
from lora_tune.store import Registered, Store, sqlite_url
from tests.contracts.store import where
from tests.fakes import command_study
from tests.waiting import wait_for


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    file = tmp_path / "key"
    file.write_bytes(b"k" * 32)
    file.chmod(0o600)
    return file


@pytest.fixture
def database(tmp_path: Path, key_file: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    """A team's database with a study that was registered with the key."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ours.toml").write_text(command_study(trials=1, parallel=1))
    url = sqlite_url(tmp_path / "team.db")
    command = ["--study", "ours.toml", "--storage", url, "--register", "--signing-key", str(key_file)]
    done = CliRunner().invoke(sweep.main, command)
    assert done.exit_code == 0, done.output
    store = Store(url)
    yield store
    store.close()


def served(store: Store, key: SigningKey) -> list[str]:
    """What a service with the key says until it drives the study or refuses it."""
    said: list[str] = []
    server = Server(store, NodeQuota(None), Metrics(), said.append, key=key)
    lease = store.take_lease(SERVER, "test", 0.0, dead=True)
    running = threading.Thread(target=lambda: server.run(lease, until_done=False))
    running.start()
    try:
        wait_for(lambda: any(text.startswith("ours: ") for text in said), 40, "the study is taken up or refused")
    finally:
        server.stop()
        running.join(60)
    return said


def change(store: Store, statement: str) -> None:
    engine = sa.create_engine(store.url)
    with engine.begin() as connection:
        connection.exec_driver_sql(statement)
    engine.dispose()


def test_what_was_signed_is_driven_also_by_the_next_service(database: Store, key_file: Path) -> None:
    for _ in range(2):
        assert "ours: driving" in served(database, read_key(key_file))


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE lora_tune_sweep SET study_toml = replace(study_toml, 'true', 'reboot')",
        "UPDATE lora_tune_sweep SET folder = '/home/somebody'",
        "UPDATE lora_tune_sweep SET file = '/tmp/theirs.toml'",
        """UPDATE lora_tune_sweep SET options = '{"site": {"launcher": "slurm"}}'""",
        "UPDATE lora_tune_sweep SET signature = ''",
    ],
    ids=["its text", "its folder", "its file", "its options", "the signature"],
)
def test_what_somebody_changed_in_the_database_is_refused(database: Store, key_file: Path, statement: str) -> None:
    change(database, statement)
    (said,) = [text for text in served(database, read_key(key_file)) if text.startswith("ours: ")]
    assert "this service drives studies that are signed with its key only" in said
    assert "--register --signing-key FILE" in said


def test_a_driver_without_the_key_takes_the_signature_away(database: Store, tmp_path: Path) -> None:
    done = CliRunner().invoke(sweep.main, ["--study", "ours.toml", "--storage", database.url, "--register"])
    assert done.exit_code == 0, done.output
    assert database.registered()[0].signature == ""


def test_nothing_of_a_registration_may_differ(key_file: Path, tmp_path: Path) -> None:
    key, study = read_key(key_file), where(tmp_path / "s.toml", tmp_path, {"budget": {"trials": 3}})
    signed = replace(study, signature=key.sign(study))
    key.check(signed)
    key.check(replace(signed, ended="all trials are proposed"))
    others: list[Registered] = [
        replace(signed, name="other"),
        replace(signed, study_toml=signed.study_toml + " "),
        replace(signed, cwd=tmp_path / "x"),
        replace(signed, file=tmp_path / "x"),
        replace(signed, folder=tmp_path / "x"),
        replace(signed, options={"budget": {"trials": 4}}),
    ]
    for other in others:
        with pytest.raises(SetupError, match="has another signature"):
            key.check(other)


def test_a_key_is_long_enough_and_nobody_elses(key_file: Path) -> None:
    assert "k" * 8 not in repr(read_key(key_file))
    key_file.chmod(0o640)
    with pytest.raises(SetupError, match="can be read by others; chmod 600"):
        read_key(key_file)
    key_file.chmod(0o600)
    key_file.write_bytes(b"short")
    with pytest.raises(SetupError, match="has 5 bytes, 32 are needed; make one: "):
        read_key(key_file)
    key_file.unlink()
    with pytest.raises(SetupError, match="cannot be read: No such file"):
        read_key(key_file)
