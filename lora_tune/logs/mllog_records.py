"""What a ``:::MLLOG`` record looks like: patterns that find it in bytes, and its metadata in either form."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from lora_tune.logs.announced import MAX_TEXT

MAX_RECORD = 1 << 20
"""A record that does not end within this many bytes is dropped; nothing longer is ever held."""

MARKER = b":::MLLOG"
LEAD = len(MARKER) + 16  # the marker, and the most blanks between it and the brace
START = re.compile(rb":::MLLOG[ \t]{0,16}\{")

# Either a record in the form in which mlperf_logging.mllog prints it, whose fields come out undecoded (time, key,
# value, samples, what else is in metadata); or the rest of a line that starts with a record in any other form, for
# the JSON decoder, at a tenth of the speed. No text within a usual record has a brace, so that no record starts
# within a record, and lengths are bounded, so that none is longer than MAX_RECORD.
_TEXT = rb'"[^"\\\n{]{0,4096}+"'
_NUMBER = rb"-?\d[\d.eE+-]{0,64}+"
RECORD = re.compile(
    rb':::MLLOG(?: \{"namespace": "", "time_ms": (\d{1,14}+), "event_type": "[A-Z_]{0,64}+", '
    rb'"key": "([^"\\\n{]{0,256}+)", "value": (null|%b|true|false|%b|\{[^{}\n]{0,4096}+\}), '
    rb'"metadata": \{"file": %b, "lineno": \d{1,9}+(?:, "samples_count": (\d{1,18}+))?([^{}\n]{0,4096}+)\}\}'
    rb"|([ \t]{0,16}+\{[^\n]*+))" % (_NUMBER, _TEXT, _TEXT)
)
SPEEDS, _LOSSES = ("throughput", "train_step_time"), ("train_loss", "reduced_train_loss")
PEAK = "max_memory_usage"
STATED = re.compile(rb'"(%b)": (%b|NaN|-?Infinity)[,}]' % ("|".join((*SPEEDS, *_LOSSES, PEAK)).encode(), _NUMBER))
STATUS = re.compile(rb'"status": "([^"]*)"')
decode = json.JSONDecoder(strict=False).raw_decode
Metadata = bytes | Mapping[str, Any]


def metric_name(metadata: Metadata) -> str:
    """The name of an eval's metric, where a log has several."""
    if isinstance(metadata, bytes) and b'"metric"' not in metadata:
        return ""
    return str(fields(metadata).get("metric", ""))[:MAX_TEXT]


def fields(metadata: Metadata) -> Mapping[str, Any]:
    """The metadata of either form; nothing where a number is malformed."""
    if not isinstance(metadata, bytes):
        return metadata
    try:
        parsed: dict[str, Any] = json.loads(b"{%b}" % metadata[2:])
    except ValueError:
        return {}
    return parsed
