"""How ``pytest -n`` shares the suite among its processes: whole files, the longest first; and what it tells meanwhile.

A file stays in one process, for what its tests share is made once in each; files that share what is dear to make stay
together. The longest begin first, so that the processes end at about the same time: the summary prints how long files
took, and LONGEST follows it.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

TOGETHER = {
    "one real tiny sweep": ("recipes/test_tiny_sweep.py", "cli/test_confirm.py", "docs/test_pictures.py"),
    "NeMo's and Bridge's imports": ("recipes/test_nemo.py", "recipes/test_bridge.py"),
}
LONGEST = (
    "one real tiny sweep",
    "NeMo's and Bridge's imports",
    "slurm/test_faults.py",
    "slurm/test_sweep.py",
    "recipes/test_peft.py",
    "slurm/test_crashes.py",
    "cli/test_sweep.py",
    "cli/test_serve.py",
    "controller/test_sweep_folder.py",
    "cli/test_dashboard.py",
    "slurm/test_base.py",
    "launchers/test_slurm.py",
    "launchers/test_packed_sweep.py",
    "chaos/test_chaos.py",
    "recipes_e2e/test_torchrun_peft.py",
    "launchers/test_simulated_sweep.py",
)
"""Files, and groups of files, that take more than half a minute."""
LISTED = 25
"""Files in the summary."""

_GROUPS = {file: name for name, files in TOGETHER.items() for file in files}


def group_of(nodeid: str) -> str:
    """What stays in one process with this test: its group's name, or its file below ``tests``."""
    file = nodeid.split("::", 1)[0].removeprefix("tests/")
    return _GROUPS.get(file, file)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Where several processes share them: order the tests as they are to begin, each group as it was collected."""
    if not hasattr(config, "workerinput"):
        return
    places: dict[str, int] = {name: place for place, name in enumerate(LONGEST)}
    for item in items:
        places.setdefault(group_of(item.nodeid), len(places))
    items.sort(key=lambda item: places[group_of(item.nodeid)])


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """For ``--dist loadfile``: the groups in the order in which they were collected."""
    if config.getvalue("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class Groups(LoadFileScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            return group_of(nodeid)

    config.option.loadscopereorder = False
    return Groups(config, log)


class Told:
    """Says what failed or is run again as soon as it is known, and at the end how long files took."""

    def __init__(self, terminal: Any) -> None:
        self._terminal = terminal
        self._seconds: Counter[str] = Counter()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._seconds[group_of(report.nodeid)] += report.duration  # type: ignore[assignment]
        if report.failed or report.outcome == "rerun":
            self._terminal.ensure_newline()
            self._terminal.write_line(f"{report.outcome.upper()} {report.nodeid} ({report.when})")

    def pytest_terminal_summary(self) -> None:
        if sum(self._seconds.values()) < 60:
            return
        self._terminal.section("longest files")
        for name, seconds in self._seconds.most_common(LISTED):
            self._terminal.write_line(f"{seconds:7.1f}s {name}")


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    """In the process that prints."""
    if (terminal := config.pluginmanager.getplugin("terminalreporter")) and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Told(terminal), "told")
