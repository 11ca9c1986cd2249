"""Configs are programs: whatever they do when they are sourced ends soon, and in one sentence."""

from __future__ import annotations

import shutil
import uuid
from pathlib import Path

import pytest

from lora_tune.base.errors import SetupError
from lora_tune.review import config_check
from lora_tune.workloads import script_needs
from lora_tune.workloads.script_needs import source_files
from tests.workloads.test_base_config import CONFIG, STANDIN, changed, made


def config(folder: Path, text: str, name: str = "config_x.sh") -> Path:
    file = folder / name
    file.write_text(text)
    return file


def test_what_a_config_exports_comes_back_as_it_is(tmp_path: Path) -> None:
    found = source_files([config(tmp_path, "export A=1 B=$'two\\nlines'\nunexported=3\necho said >&2\n")])
    assert found.values == {"A": "1", "B": "two\nlines"}
    assert found.printed == ("said",)


def test_nothing_of_this_shell_reaches_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MAX_STEPS", "1")
    monkeypatch.setenv("BASH_ENV", str(config(tmp_path, "export SMUGGLED=1\n", "env.sh")))
    assert source_files([config(tmp_path, "export SEEN=${MAX_STEPS:-none}\n")]).values == {"SEEN": "none"}


def test_a_users_shell_goes_on_after_a_failure_and_a_strict_one_does_not(tmp_path: Path) -> None:
    file = config(tmp_path, "source ./nowhere.sh\nexport A=1\n")
    found = source_files([file])
    assert found.values == {"A": "1"}
    assert "nowhere.sh: No such file or directory" in found.printed[0]
    with pytest.raises(SetupError, match=r"cannot be sourced: .*nowhere\.sh"):
        source_files([file], strict=True)


HARMLESS = {
    "windows line ends": b"export A=1\r\nexport B=2\r\n",
    "a zero byte": b"export A=1\0\0\nexport B=2\n",
    "latin-1": b"export NAME=caf\xe9 A=1\n",
    "a value of several lines": b"export A=1 B=$'a\\nb' C==\n",
    "an exported function": b"f() { :; }\nexport -f f\nexport A=1\n",
    "reads from its user": b"read -p 'name? ' X\nexport X A=1\n",
    "asks with a menu": b"select x in a b; do break; done\nexport A=1\n",
    "swallows standard input": b"cat\nexport A=1\n",
    "a here-document": b"read -r -d '' X <<EOF\na\nEOF\nexport X A=1\n",
    "closes its output": b"exec 1>&- 2>&-\nexport A=1\n",
    "redirects its output": b"exec >/dev/null 2>&1\nexport A=1\n",
    "returns early": b"export A=1\nreturn 5\n",
    "loses PATH": b"unset PATH\nexport A=1\n",
    "goes elsewhere": b"cd /\nexport A=1\n",
    "lifts its limits": b"ulimit -t unlimited -v unlimited\nexport A=1\n",
    "removes itself": b'rm -f "${BASH_SOURCE[0]}"\nexport A=1\n',
    "a function that never ends at exit": b"trap 'sleep 60' EXIT\nexport A=1\n",
    "talks to the terminal": b"stty sane </dev/tty\nexport A=1\n",
}


@pytest.mark.parametrize("text", HARMLESS.values(), ids=HARMLESS)
def test_what_a_user_would_get_comes_back(tmp_path: Path, text: bytes) -> None:
    file = tmp_path / "config_x.sh"
    file.write_bytes(text)
    assert source_files([file]).values["A"].strip() == "1"


HOSTILE = {
    "stops at the first fault": (b"set -e\nfalse\nexport A=1\n", "exit 1"),
    "stops at an unset variable": (b"set -u\nexport A=$NOPE\n", "NOPE: unbound variable"),
    "demands a variable": (b": ${NOPE:?must be set}\n", "NOPE: must be set"),
    "too large": (b"export A=" + b"x" * 3_000_000 + b"\n", "too large for the environment"),
    "sources another that sources it": (b"source ./config_x.sh\n", "does it source itself"),
    "a loop": (b"while :; do :; done\n", "does not end"),
    "waits for its child": (b"sleep 60 & wait\n", "does not end"),
    "floods": (b"yes\n", "bash was ended by signal"),
    "exit 0": (b"exit 0\n", "it ends the shell"),
    "exit 3": (b"echo no data here; exit 3\n", "no data here"),
    "waits for nothing": (b"until false; do sleep 0.1; done\n", "does not end"),
    "ignores signals": (b"trap '' TERM INT HUP\nwhile :; do sleep 1; done\n", "does not end"),
    "becomes another program": (b"exec sleep 100\n", "does not end"),
    "stops itself": (b"kill -STOP $$\n", "does not end"),
    "a fork bomb": (b"f() { f | f & }\nf\nwhile :; do :; done\n", "does not end"),
    "kills itself": (b"kill -9 $$\n", "ended by signal 9"),
    "kills who sourced it": (b"kill -TERM $PPID\nsleep 100\n", "ended by signal 15"),
    "kills its group": (b"kill 0\nsleep 100\n", "ended by signal 15"),
}


@pytest.mark.parametrize(("text", "words"), HOSTILE.values(), ids=HOSTILE)
def test_what_would_take_the_shell_along_is_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: bytes, words: str
) -> None:
    if words == "does not end":
        monkeypatch.setattr(script_needs, "SECONDS", 1.0)
    file = tmp_path / "config_x.sh"
    file.write_bytes(text)
    with pytest.raises(SetupError, match=words):
        source_files([file])


@pytest.mark.parametrize(
    "starts", ["sleep {} &", "setsid sleep {} &", "(nohup sleep {} >/dev/null 2>&1 &)", "coproc sleep {}"]
)
def test_what_it_left_in_the_background_is_ended(tmp_path: Path, starts: str) -> None:
    seconds = str(10**6 + uuid.uuid4().int % 10**9)  # by which it is found
    assert source_files([config(tmp_path, starts.format(seconds) + "\nexport A=1\n")]).values == {"A": "1"}
    assert [words for words in _commands() if seconds in words] == []


def _commands() -> list[str]:
    """The command lines of all processes here."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if "Z" not in (process / "stat").read_text().rpartition(")")[2].split()[0]:
                found.append((process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace"))
        except OSError:  # it has ended meanwhile
            continue
    return found


@pytest.mark.parametrize("text", ["exit 3\n", "set -eu\nexport A=$NOPE\n", "while :; do :; done\n", "kill -9 $$\n"])
def test_an_export_whose_base_does_such_things_is_checked_in_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    workload = made(Path(shutil.copytree(STANDIN, tmp_path / "tree")))
    name, exported = next(iter(workload.export(changed(workload, LR=5e-4), ()).files.items()))
    file = config(tmp_path, exported, name)
    with (tmp_path / "tree" / CONFIG).open("a") as base:
        base.write(text)
    monkeypatch.setattr(script_needs, "SECONDS", 2.0)
    with pytest.raises(SetupError, match="cannot be sourced"):
        config_check.exported_by(file, workload)
