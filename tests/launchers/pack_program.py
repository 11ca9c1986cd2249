"""A pack for tests: runs each requested trial's own command as a process, with the files of a real pack.

``python pack_program.py FOLDER [--packs N --slots K [--pack I]]``.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from lora_tune.base.files import create_json, write_json
from lora_tune.launchers.job_records import describe
from lora_tune.launchers.pack_folder import PackFolder, PackRequest
from lora_tune_recipes.packed import job

IDLE_SECONDS = 2.0


def start(request: PackRequest) -> subprocess.Popen[bytes] | None:
    try:
        create_json(request.attempt.claim, describe(os.getpid(), request.token))
    except FileExistsError:
        return None
    with Path(request.log).open("ab") as log:
        environment = {**os.environ, **json.loads(request.knobs["environment"])}
        argv = json.loads(request.knobs["argv"])
        child = subprocess.Popen(argv, env=environment, stdout=log, stderr=log, start_new_session=True)
    write_json(request.attempt.started, describe(child.pid, request.token))
    return child


def serve(folder: PackFolder, idle: float, slots: float) -> None:
    running: dict[str, tuple[PackRequest, subprocess.Popen[bytes]]] = {}
    busy_at = time.monotonic()
    while True:
        requests = folder.take()
        while len(running) < max(slots, folder.slots()) and (request := next(requests, None)) is not None:
            child = start(request)
            if child is not None:
                running[request.name] = request, child
        for name, force in folder.stopped(running).items():
            os.killpg(running[name][1].pid, signal.SIGKILL if force else signal.SIGTERM)
        for name, (request, child) in list(running.items()):
            if child.poll() is not None:
                end = {"token": request.token, "exit_code": child.returncode, "at": time.time(), "node_share": 0.5}
                write_json(request.attempt.ended, end)
                del running[name]
        folder.tell(dict.fromkeys(running, 0.0))
        if running:
            busy_at = time.monotonic()
        elif folder.ends(time.monotonic() - busy_at, idle):
            return
        time.sleep(0.02)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--idle", type=float, default=IDLE_SECONDS)
    for option in ("--packs", "--slots", "--pack"):
        parser.add_argument(option, type=int)
    options = parser.parse_args()
    if options.packs and options.pack is None:
        command = sys.executable, *sys.orig_argv[1:]
        return job.run(command, PackFolder(options.folder), options.packs, options.idle)
    alone = options.pack is None
    folder = PackFolder(options.folder, options.pack or 0)
    serve(folder, options.idle if alone else math.inf, math.inf if alone else options.slots)
    return 0


if __name__ == "__main__":
    sys.exit(main())
