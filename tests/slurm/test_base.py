"""The machine's own config as trial 0 on real Slurm, and what is handed over from it."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Callable

import pytest

from lora_tune.store.records import Verdict
from tests.cluster import wait_until
from tests.slurm.house import House

pytestmark = pytest.mark.slurm

CONFIG = "config_DGXH100_1x8x4xtp4pp1cp1.sh"


def test_the_config_of_today_is_trial_0_and_the_best_is_told_against_it(house: Callable[..., House]) -> None:
    home = house(trials=3, parallel=3, target=0.97, environment={"STANDIN_SECONDS": "1"})
    text = home.study.read_text().replace("first_eval = 256\neval_every = 128\n", f'base = "{CONFIG}"\n')
    home.study.write_text(text.replace("low = 60, high = 120, step = 20", "low = 400, high = 800, step = 100"))
    with (home.implementation / CONFIG).open("a") as config:
        config.write("export VBOOST_VALUE=1\n")
    assert home.finish(240) == 0, home.said

    trials = home.sweep().trials
    first = trials[0]
    assert first.verdict is Verdict.REACHED
    assert (first.metrics.base, first.tuned["LR"], first.parameters["SKIP_EVALS"]) == (CONFIG, 4e-4, 3)
    own = (home.paths.attempt(0, 0).folder / CONFIG).read_text()
    assert [line for line in own.splitlines() if line.startswith("export") and "WALLTIME" not in line] == []
    other = next(t for t in trials.values() if t.number and t.verdict is Verdict.REACHED)
    (file,) = home.paths.attempt(other.number, 0).folder.glob("config_*.sh")
    assert f"/{CONFIG}\n" in file.read_text()

    told = command(home, "export", "--trial", str(other.number), "--check", "--diff", str(home.implementation / CONFIG))
    assert f"trial {other.number} against {CONFIG} (trial 0): " in told
    assert "LR: 0.0004 -> " in told
    assert "who reads each:" in told
    assert "VBOOST_VALUE                     no file here; the config that it sources sets it" in told
    assert f"trial 0 {CONFIG}" not in told
    for exported in home.paths.best.glob("config_*.sh"):
        assert not (home.implementation / exported.name).exists()
        assert str(home.implementation) not in exported.read_text()


def test_after_a_fault_of_the_set_up_is_fixed_the_config_and_the_study_s_points_run_first(
    house: Callable[..., House],
) -> None:
    """A SPANK plugin refuses every job. The fix is in the launch script and in the config itself."""
    home = house(trials=4, parallel=2, target=0.97, environment={"STANDIN_SECONDS": "1"})
    text = home.study.read_text().replace("first_eval = 256\neval_every = 128\n", f'base = "{CONFIG}"\n')
    point = 'enqueue = [{ LR = 5e-4, MAX_STEPS = 600, layout = "tp4 pp1 cp1 minibs4 mbs1" }]\n[pruning]'
    text = text.replace("low = 60, high = 120, step = 20", "low = 400, high = 800, step = 100")
    home.study.write_text(text.replace("[pruning]", point))
    script = home.implementation / "run.sub"
    works = script.read_text()
    fault = 'echo "srun: spank.c:1105: _do_option_cb(): Assertion failed." >&2; exit 134\n'
    script.write_text(works.replace("\n", f"\n{fault}", 1) if works.startswith("#!") else fault + works)
    assert home.finish(120) == 3, home.said
    assert "SLURM_GRES" in home.said
    before = home.sweep().trials

    script.write_text(works)
    with (home.implementation / CONFIG).open("a") as config:
        config.write("export VBOOST_VALUE=1\n")
    assert home.finish(240) == 0, home.said
    sweep = home.sweep()
    assert sorted(sweep.trials) == [0, 1, 2, 3]
    assert {t.verdict for t in sweep.trials.values()} <= {Verdict.REACHED, Verdict.CENSORED}, home.said
    assert (sweep.trials[0].metrics.base, sweep.trials[0].base_values["VBOOST_VALUE"]) == (CONFIG, "1")
    assert sweep.trials[1].point == before[1].point
    assert [sweep.trials[n].tuned for n in before] == [trial.tuned for trial in before.values()]


def test_folders_whose_names_have_spaces_from_the_base_config_to_the_line_by_hand(house: Callable[..., House]) -> None:
    """The study, the tree, the base's own folder in it, the sweep's output and that of the export."""
    environment = {"STANDIN_SECONDS": "1"}
    home = house("runs of today", trials=3, parallel=3, target=0.97, environment=environment)
    place = home.implementation / "configs of ours"
    place.mkdir()
    text = (home.implementation / CONFIG).read_text().replace("/config_common.sh", "/../config_common.sh")
    (place / CONFIG).write_text(text)
    study = home.study.read_text().replace(
        "first_eval = 256\neval_every = 128\n", f'base = "configs of ours/{CONFIG}"\n'
    )
    home.study.write_text(study.replace("low = 60, high = 120, step = 20", "low = 400, high = 800, step = 100"))

    assert home.finish(240) == 0, home.said
    trials = home.sweep().trials
    assert {t.verdict for t in trials.values()} <= {Verdict.REACHED, Verdict.CENSORED}
    first = trials[0]
    assert (first.verdict, first.metrics.base, first.tuned["LR"]) == (Verdict.REACHED, CONFIG, 4e-4)

    exported = home.paths.root.parent / "best of today"
    told = command(home, "export", "--to", str(exported), "--check")
    line = next(row for row in told.splitlines() if row.startswith("run it: ")).removeprefix("run it: ")
    results = home.paths.root.parent / "by hand"
    results.mkdir()
    variables = {"LOGDIR": str(results), "DATESTAMP": "hand", "CONT": "standin.sqsh"}
    data = dict.fromkeys(("DATADIR", "MODEL"), str(home.paths.root.parent / "data"))
    shell = f"cd {shlex.quote(str(exported))} && {line.replace('sbatch ', 'sbatch --parsable ')}"
    job = home.cluster.run("bash", "-c", shell, environment={**variables, **data}).strip()
    wait_until(lambda: home.cluster.job_state(job) == "COMPLETED", 90, "the job by hand ends")
    assert '"status": "success"' in (results / "hand_1.log").read_text()


def command(home: House, name: str, *options: str) -> str:
    """What a command of the package prints."""
    words = [sys.executable, "-m", f"lora_tune.{name}", "--study", str(home.study), "--output", str(home.paths.root)]
    environment = {**os.environ, **home.cluster.environment}
    done = subprocess.run([*words, *options], env=environment, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout
