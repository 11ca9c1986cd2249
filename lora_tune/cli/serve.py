"""``python -m lora_tune.serve --storage URL``: all active studies of a database, as one process that runs for weeks."""

from __future__ import annotations

import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import click

from lora_tune import store as stores
from lora_tune.base import errors
from lora_tune.cli.metrics import Metrics
from lora_tune.cli.options import guarded, metrics_option, signing_key_option, storage_option
from lora_tune.cli.serving import Server
from lora_tune.controller.quota import NodeQuota
from lora_tune.controller.signatures import read_key
from lora_tune.store.leases import wait_for_lease

SERVER = "/serve"
"""Name of the server's own lease; no study can be called so."""


@click.command()
@storage_option
@click.option("--nodes", type=click.IntRange(1), help="nodes of all studies together [no cap]")
@click.option("--until-done", is_flag=True, help="end when no study is active any more")
@metrics_option
@signing_key_option
@guarded
def main(
    storage: str | None, nodes: int | None, until_done: bool, metrics: str | None, signing_key: Path | None
) -> None:
    """Drive all active studies of a database until SIGTERM or Ctrl-C; their jobs go on after that.

    Studies come from lora_tune.sweep: started there and left, or written down with --register. A second server on the
    same database, on any host, is a standby: it takes over within half a minute after the first one is gone.

    Exit codes: 0 ended in order; 2 your input; 3 the machine.
    """
    if not storage:
        raise errors.InputError("which database? give --storage URL, or set LORA_TUNE_STORAGE")
    key = read_key(signing_key) if signing_key else None
    measures = Metrics()
    if metrics:
        measures.serve(metrics, click.echo)
    store = _open(storage)

    def interrupted(_signal: int, _frame: Any) -> None:
        raise KeyboardInterrupt

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, interrupted)
    try:
        lease, before = wait_for_lease(store, SERVER, time.time, _say)
        server = Server(store, NodeQuota(nodes), measures, _say, before=before, key=key)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda _signal, _frame: server.stop())
        _say("serving" + (f", {nodes} nodes at most" if nodes else ""))
        server.run(lease, until_done=until_done)
        with suppress(errors.StoreError):  # a lease that cannot be given back runs out
            store.release(lease)
    except KeyboardInterrupt:
        _say("ended")
        return
    _say("stopped; the jobs keep running, rerun the same command to resume")


def _open(storage: str) -> stores.Store:
    """The database, also when it is away now."""
    printed = ""
    while True:
        try:
            return stores.Store(storage)
        except errors.StoreError as error:
            if str(error) != printed:
                _say(str(error))
            printed = str(error)
        time.sleep(1.0)


def _say(text: str) -> None:
    """One line with its time: a service's log is read by others, later."""
    click.echo(f"{time.strftime('%Y-%m-%dT%H:%M:%S%z')} {' '.join(text.split())}")
