"""Metrics in files of a script's own: what TensorBoard's writer wrote, tables and JSON lines, as they grow."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lora_tune.base.files import MetricFiles, TableFile, TensorBoardFile
from lora_tune.logs import relay


def events(folder: Path, scalars: list[tuple[str, float, int]]) -> bytes:
    """The bytes that TensorBoard's own library writes."""
    writer_module = pytest.importorskip("tensorboard.summary.writer.event_file_writer")
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary

    writer = writer_module.EventFileWriter(str(folder))
    for tag, value, step in scalars:
        writer.add_event(Event(step=step, summary=Summary(value=[Summary.Value(tag=tag, simple_value=value)])))
    writer.close()
    (file,) = folder.glob("*.tfevents.*")
    return file.read_bytes()


SCALARS = [("train/loss", 2.5, 10), ("eval/loss", 2.25, 10), ("eval/loss", 1.5, 300)]
ROWS = [{"step": step, tag: value} for tag, value, step in SCALARS]


@pytest.mark.parametrize("piece", [1, 7, 1 << 20])
def test_events_are_read_in_pieces_of_any_size(piece: int, tmp_path: Path) -> None:
    data, reader = events(tmp_path, SCALARS), TensorBoardFile()
    assert [row for at in range(0, len(data), piece) for row in reader.take(data[at : at + piece])] == ROWS


def test_a_tensor_with_one_number_is_a_scalar(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.util.tensor_util import make_tensor_proto

    value = Summary.Value(tag="epoch_loss", tensor=make_tensor_proto(0.75, dtype=float))
    message = Event(step=3, summary=Summary(value=[value])).SerializeToString()
    frame = len(message).to_bytes(8, "little") + b"0000" + message + b"0000"
    assert list(TensorBoardFile().take(frame)) == [{"step": 3, "epoch_loss": 0.75}]


@given(st.binary(max_size=300))
def test_bytes_that_are_no_events_give_no_error(data: bytes) -> None:
    list(TensorBoardFile().take(data))
    frame = len(data).to_bytes(8, "little") + b"0000" + data + b"0000"
    list(TensorBoardFile().take(frame))


def test_a_table_that_grows(tmp_path: Path) -> None:
    table = TableFile()
    assert list(table.take(b"epoch,step,val_loss,name\r\n0,19,,x\r\n0,1")) == [{"epoch": 0, "step": 19}]
    assert list(table.take(b"9,0.5,x\r\n")) == [{"epoch": 0, "step": 19, "val_loss": 0.5}]


def test_files_that_appear_later_and_are_written_anew(tmp_path: Path) -> None:
    files = MetricFiles([tmp_path])
    assert list(files.rows()) == []
    (tmp_path / "version_0").mkdir()
    file = tmp_path / "version_0" / "metrics.jsonl"
    file.write_text('{"step": 1, "loss": 2.0}\nno object\n')
    (tmp_path / "notes.txt").write_text("step 1 loss 9\n")
    assert list(files.rows()) == [{"step": 1, "loss": 2.0}]
    assert list(files.rows()) == []
    file.write_text('{"step": 2}\n')
    assert list(files.rows()) == [{"step": 2}]


def relayed(tmp_path: Path, script: str) -> subprocess.CompletedProcess[str]:
    (tmp_path / "train.py").write_text(script)
    command = [sys.executable, relay.__file__, str(tmp_path / "logs"), "--", "python", "train.py"]
    return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)


def test_the_relay_prints_what_the_script_writes_and_ends_as_it_does(tmp_path: Path) -> None:
    done = relayed(
        tmp_path,
        "import os, sys\nos.mkdir('logs')\nprint('training')\n"
        "open('logs/metrics.csv', 'w').write('step,val_loss\\n10,0.5\\n20,0.25\\n')\nsys.exit(3)\n",
    )
    first, *printed = done.stdout.splitlines()
    assert first == f"relay: {tmp_path / 'logs'}", "a run begins with its first line, not with its first eval"
    assert printed.pop(printed.index("training")) == "training"
    assert [json.loads(line) for line in printed] == [{"step": 10, "val_loss": 0.5}, {"step": 20, "val_loss": 0.25}]
    assert done.returncode == 3


def test_the_relay_hands_a_signal_on_to_the_script(tmp_path: Path) -> None:
    done = relayed(
        tmp_path,
        "import os, signal, sys, time\nsignal.signal(signal.SIGTERM, lambda *_: sys.exit(5))\n"
        "os.kill(os.getppid(), signal.SIGTERM)\ntime.sleep(60)\n",
    )
    assert done.returncode == 5, done.stderr


def test_the_relay_wants_a_folder_and_a_command(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, relay.__file__, "logs"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "usage:" in done.stderr
