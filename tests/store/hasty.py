"""The sweep command with less patience, so that a test need not wait for it: ``python -m tests.store.hasty ARGUMENTS``.

A server may be silent for one second instead of ten, and connecting may take two, the least that psycopg knows.
"""

from __future__ import annotations

import sys

from lora_tune.store import engine, silence

if __name__ == "__main__":
    silence.SILENCE_SECONDS = 1.0
    engine._PATIENCE["connect_timeout"] = "2"
    from lora_tune.sweep import main

    main(sys.argv[1:])
