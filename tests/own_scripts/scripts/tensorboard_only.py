"""Nothing printed: scalars in TensorBoard's event files, written without its library."""

import struct
from pathlib import Path

from descent import options, train


def varint(number: int) -> bytes:
    return bytes([number]) if number < 128 else bytes([number & 127 | 128]) + varint(number >> 7)


def scalar(tag: str, value: float, step: int) -> bytes:
    inner = b"\x0a" + varint(len(tag)) + tag.encode() + b"\x15" + struct.pack("<f", value)
    summary = b"\x0a" + varint(len(inner)) + inner
    event = b"\x09" + struct.pack("<d", 0.0) + b"\x10" + varint(step) + b"\x2a" + varint(len(summary)) + summary
    return struct.pack("<Q", len(event)) + bytes(4) + event + bytes(4)


arguments = options(logdir="runs").parse_args()
Path(arguments.logdir).mkdir(parents=True, exist_ok=True)
with (Path(arguments.logdir) / "events.out.tfevents.1700000000.host").open("wb") as file:
    for step, loss, held_out in train(arguments):
        file.write(scalar("train/loss", loss, step))
        if step % 10 == 0:
            file.write(scalar("eval/loss", held_out, step))
        file.flush()
