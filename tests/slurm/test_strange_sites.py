"""Sites with habits of their own: what their sbatch prints, what their doctor finds, what their plugins change."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from lora_tune.store.records import Verdict
from tests.cluster import Cluster, Shape, missing
from tests.recorded import recorded
from tests.waiting import wait_for

pytestmark = pytest.mark.slurm

TRAIN = """
import json, os
rate = float(os.environ["LR"])
for step in range(1, 6):
    print(json.dumps({"step": step, "eval_loss": 1 - step / 10 - rate / 1000, "seconds": step / 100}), flush=True)
"""

STUDY = """
[workload]
kind = "command"
argv = ["{python}", "{folder}/train.py"]
log = {{ kind = "jsonl" }}
[site]
launcher = "slurm"
system = "OWN"
gpus_per_node = 1
[space]
LR = {{ type = "float", low = 1e-3, high = 1e-2, log = true }}
[objective]
target = 0.6
[search]
sampler = "random"
[budget]
trials = 2
parallel = 2
trial_minutes = 5
"""

BANNER = """#!/bin/sh
echo "Welcome. Your last job 17 ended well; job 18 is the next one"
echo "sbatch: warning: maintenance begins on Tuesday, job 3 will be held" >&2
exec {sbatch} "$@"
"""


@pytest.fixture
def place(slurm: Cluster, tmp_path: Path) -> Path:
    """A folder with a study of one's own script, ``s.toml``."""
    (tmp_path / "train.py").write_text(TRAIN)
    (tmp_path / "s.toml").write_text(STUDY.format(python=sys.executable, folder=tmp_path))
    return tmp_path


def command(place: Path, name: str, *options: str, path: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", f"lora_tune.{name}", "--study", "s.toml", "--output", "out", *options],
        cwd=place,
        env={**os.environ, "PATH": f"{path}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        timeout=240,
    )


def test_what_a_wrapper_of_sbatch_says_before_the_job_id_costs_no_trial(place: Path, slurm: Cluster) -> None:
    """submitit took 17 for the job's id, and each job waited a minute for files under its own, and failed."""
    (place / "bin").mkdir()
    sbatch = slurm.run("sh", "-c", "command -v sbatch").strip()
    (place / "bin" / "sbatch").write_text(BANNER.format(sbatch=sbatch))
    (place / "bin" / "sbatch").chmod(0o755)
    swept = command(place, "sweep", path=str(place / "bin"))
    assert swept.returncode == 0, swept.stdout + swept.stderr
    sweep = recorded(place / "out" / "sweep.db", "s")
    assert [trial.verdict for trial in sweep.trials.values()] == [Verdict.REACHED] * 2
    assert all(attempt.number == 0 for attempt in sweep.attempts.values()), "none was run again"


def test_ctrl_c_while_sbatch_hangs_ends_the_command_and_what_it_started(place: Path, slurm: Cluster) -> None:
    """It waited for sbatch, two minutes at most."""
    (place / "bin").mkdir()
    sbatch = slurm.run("sh", "-c", "command -v sbatch").strip()
    hangs = f'#!/bin/sh\n[ -e {place}/answer ] && exec {sbatch} "$@"\necho $$ > {place}/asked\nexec sleep 600\n'
    (place / "bin" / "sbatch").write_text(hangs)
    (place / "bin" / "sbatch").chmod(0o755)
    path = f"{place / 'bin'}:{os.environ['PATH']}"
    sweep = [sys.executable, "-m", "lora_tune.sweep", "--study", "s.toml", "--output", "out"]
    driver = subprocess.Popen(sweep, cwd=place, env={**os.environ, "PATH": path}, stdin=subprocess.DEVNULL)
    wait_for(lambda: (place / "asked").exists() and (place / "asked").read_text(), what="sbatch is asked")
    driver.send_signal(signal.SIGINT)
    assert driver.wait(30) == 130
    asked = Path("/proc", (place / "asked").read_text().strip(), "cmdline")
    wait_for(lambda: not asked.exists() or not asked.read_bytes(), what="the sbatch is gone")
    (place / "answer").touch()
    swept = command(place, "sweep", path=str(place / "bin"))
    assert swept.returncode == 0, swept.stdout + swept.stderr
    assert len(recorded(place / "out" / "sweep.db", "s").attempts) == 2, "the same attempts, submitted once"


def test_a_reservation_that_ends_before_a_trial_could_is_said_at_the_start(place: Path, slurm: Cluster) -> None:
    """Slurm takes such a job, and lets it wait for ever."""
    slurm.run(
        "scontrol", "create", "reservation", "ReservationName=course", "StartTime=now", "Duration=3", "Nodes=ALL",
        "Users=root",
    )  # fmt: skip
    try:
        text = (place / "s.toml").read_text()
        (place / "s.toml").write_text(text.replace("gpus_per_node", 'reservation = "course"\ngpus_per_node'))
        refused = command(place, "sweep")
        assert refused.returncode == 3, refused.stdout + refused.stderr
        assert "asks for 5 minutes, and the reservation course ends in 3" in refused.stderr
        assert "take site.reservation out" in command(place, "doctor").stdout
        slurm.run("scontrol", "update", "ReservationName=course", "Duration=60")
        swept = command(place, "sweep")
        assert swept.returncode == 0, swept.stdout + swept.stderr
    finally:
        slurm.run("scontrol", "delete", "ReservationName=course")


def test_doctor_asks_sbatch_about_ones_own_script(place: Path) -> None:
    """It asked about a script called FILE, which is not there, and found a problem in every such study."""
    examined = command(place, "doctor")
    assert "sbatch accepts a trial's options" in examined.stdout, examined.stdout + examined.stderr


SCRIPT = """#!/bin/bash
#SBATCH --job-name=mine
#SBATCH {header}
LR=${{LR:-2e-4}}
echo "lr $LR in array task ${{SLURM_ARRAY_TASK_ID:-none}}"
for step in 1 2 3; do
    echo "{{\\"step\\": $step, \\"eval_loss\\": 0.$((8 - step))$RANDOM, \\"seconds\\": 0.0$step}}"
done
"""


@pytest.mark.parametrize(
    ("header", "words", "way_out"),
    [
        ("--export=NONE", "keeps LR from the job", "--export=ALL"),
        ("--array=0-2", "makes an array of jobs of each trial", ""),
        ("--hold", "holds every trial in the queue", ""),
        ("--wait", "keeps sbatch, and with it the sweep", ""),
        ("--comment=x\n#PBS -v FOO=1", "keeps LR from the job", "--ignore-pbs"),
    ],
)
def test_a_header_that_would_spoil_the_trials_is_refused_and_what_the_sentence_says_helps(
    place: Path, slurm: Cluster, header: str, words: str, way_out: str
) -> None:
    """All trials trained with the script's own rate, or three runs wrote into one log, and a best one was exported."""
    script, study = place / "train.sub", place / "s.toml"
    script.write_text(SCRIPT.format(header=header))
    text = study.read_text().replace(
        f'argv = ["{sys.executable}", "{place}/train.py"]', f'script = true\nargv = ["{script}"]'
    )
    study.write_text(text)
    refused = command(place, "sweep")
    assert refused.returncode == 3, refused.stdout + refused.stderr
    assert f"train.sub: {f'#SBATCH {header}'.splitlines()[-1]} {words}" in refused.stderr
    assert words in command(place, "doctor").stdout
    assert str(place) not in slurm.run("squeue", "--noheader", "--states=all", "--format=%o"), "nothing was submitted"

    if way_out:
        assert f'sbatch_args = ["{way_out}"]' in refused.stderr
        study.write_text(text.replace("gpus_per_node", f'sbatch_args = ["{way_out}"]\ngpus_per_node'))
    else:
        script.write_text(SCRIPT.format(header="--comment=mine"))
    swept = command(place, "sweep")
    assert swept.returncode == 0, swept.stdout + swept.stderr
    logs = sorted((place / "out" / "trials").rglob("job.log"))
    rates = {line.split()[1] for log in logs for line in log.read_text().splitlines() if line.startswith("lr ")}
    assert len(logs) == len(rates) == 2, "each trial has its own rate, and its log holds one run"
    assert "2e-4" not in rates


ONCE = """
import os, time
print("loading", flush=True)
try:
    os.mkdir("{folder}/once")
    {before}
    time.sleep(300)
except FileExistsError:
    pass
"""
EVAL = """print('{"step": 1, "eval_loss": 0.9, "seconds": 0.01}', flush=True)"""


@pytest.mark.parametrize(
    ("before", "update", "failure"),
    [
        ("", "NodeName={node} State=DOWN Reason=power", "infrastructure"),
        (EVAL, "JobId={job} TimeLimit=1", "preempted"),
    ],
)
def test_what_an_operator_ends_says_nothing_of_the_trial_and_is_run_again(
    place: Path, slurm: Cluster, before: str, update: str, failure: str
) -> None:
    """Before its first eval it was a log that cannot be read; with a limit of time cut short it was censored there."""
    (place / "train.py").write_text(ONCE.format(folder=place, before=before) + TRAIN)
    sweep = [sys.executable, "-m", "lora_tune.sweep", "--study", "s.toml", "--output", "out"]
    with (place / "said").open("w") as said:
        driver = subprocess.Popen(sweep, cwd=place, stdin=subprocess.DEVNULL, stdout=said, stderr=subprocess.STDOUT)
    logs = place / "out" / "trials"

    def running() -> list[list[str]]:
        ended = [log for log in logs.rglob("job.log") if '"step": 5' in log.read_text()]
        rows = [line.split() for line in slurm.run("squeue", "--noheader", "--format=%A %T %N %o").splitlines()]
        return [row for row in rows if row[1] == "RUNNING"] if len(ended) == 1 else []

    wait_for(lambda: (place / "once").exists() and len(running()) == 1, 60, "one trial waits, the other has ended")
    ((job, _, node, *_),) = running()
    slurm.run("scontrol", "update", *update.format(job=job, node=node).split())
    wait_for(lambda: len(list(logs.rglob("job.log"))) == 3, 150, "it is run again")
    slurm.succeeds("scontrol", "update", f"NodeName={node}", "State=RESUME")
    assert driver.wait(60) == 0, (place / "said").read_text()
    found = recorded(place / "out" / "sweep.db", "s")
    assert [trial.verdict for trial in found.trials.values()] == [Verdict.REACHED] * 2
    assert sorted(attempt.failure for attempt in found.attempts.values()) == ["", "", failure]


RENAMES = """
function slurm_job_submit(d, parts, uid)
  d.name = "job-of-" .. uid
  d.comment = "charged to team-7"
  return slurm.SUCCESS
end
function slurm_job_modify(d, r, parts, uid) return slurm.SUCCESS end
return slurm.SUCCESS
"""

LONGER = TRAIN.replace("for step", "import time\nfor step").replace("    print", "    time.sleep(1)\n    print")


@pytest.mark.long
def test_a_site_that_names_and_comments_every_job_itself_runs_each_trial_once(
    tmp_path_factory: pytest.TempPathFactory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver dies meanwhile; the next one knows its jobs, of which the first answers to no name of ours."""
    if reason := missing(accounting=False):
        pytest.skip(f"no Slurm test cluster: {reason}")
    shape = Shape(nodes=2, lines="JobSubmitPlugins=lua", files={"job_submit.lua": RENAMES})
    with Cluster(tmp_path_factory.mktemp("rn") / "c", shape) as cluster:
        for name, value in cluster.environment.items():
            monkeypatch.setenv(name, value)
        (tmp_path / "train.py").write_text(LONGER)
        text = STUDY.format(python=sys.executable, folder=tmp_path)
        (tmp_path / "s.toml").write_text(text + "[pruning]\ncap = false\n")
        sweep = [sys.executable, "-m", "lora_tune.sweep", "--study", "s.toml", "--output", "out"]
        driver = subprocess.Popen(sweep, cwd=tmp_path, stdin=subprocess.DEVNULL)
        logs = tmp_path / "out" / "trials"
        wait_for(lambda: any("step" in log.read_text() for log in logs.rglob("job.log")), 60, "a trial trains")
        driver.kill()
        driver.wait()
        swept = command(tmp_path, "sweep")
        assert swept.returncode == 0, swept.stdout + swept.stderr
        found = recorded(tmp_path / "out" / "sweep.db", "s")
        assert [trial.verdict for trial in found.trials.values()] == [Verdict.REACHED] * 2
        assert len(found.attempts) == 2, "each was submitted once"
        names = cluster.run("squeue", "--noheader", "--all", "--states=all", "--format=%j").split()
        assert names == [f"job-of-{os.getuid()}"] * 2
