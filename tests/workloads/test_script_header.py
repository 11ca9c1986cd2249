"""The options in a batch script's header and in a site's: read as sbatch reads them, refused where they end a sweep."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from lora_tune.base.errors import SetupError
from lora_tune.base.paths import SweepPaths
from lora_tune.base.sbatch_options import sbatch_options
from lora_tune.config.study import load_study
from lora_tune.controller.runtime import preflight_warnings
from lora_tune.sweep import main
from lora_tune.workloads import load
from lora_tune.workloads.script_needs import environment_options, header_options, refusals


@pytest.mark.parametrize(
    ("words", "read"),
    [
        ("--export=NONE", [("export", "NONE")]),
        ("--export NONE", [("export", "NONE")]),
        ("--arr=0-2", [("array", "0-2")]),
        ("--comm x", [("comment", "x")]),
        ("-a 0-2", [("array", "0-2")]),
        ("-a0-2", [("array", "0-2")]),
        ("-HWn4", [("hold", ""), ("wait", ""), ("ntasks", "4")]),
        ("--ho --requ --re --h --no-requeue", [("hold", ""), ("requeue", "")]),
        ("-N 2 -n 8 --mem 0", [("ntasks", "8")]),
        ("-pW", [("partition", "W")]),
        ("--wait-all-nodes=1 --export-file=x --expor=NONE --n=3", []),
        ("--time=5 --wait --ntasks=2", [("time", "5"), ("wait", ""), ("ntasks", "2")]),
        ("--ntasks-per-node=8 train.sub", [("ntasks-per-node", "8")]),
        ("--export", [("export", "")]),
        (
            "--err=a -e b --outp c -ob --over --open-mode=append",
            [("error", "a"), ("error", "b"), ("output", "c"), ("output", "b")],
        ),
    ],
)
def test_words_as_sbatch_reads_them(words: str, read: list[tuple[str, str]]) -> None:
    assert [(option.name, option.value) for option in sbatch_options(words.split())] == read


def test_a_header_ends_at_the_first_command() -> None:
    script = (
        "#!/bin/bash\n\n # words\n#SBATCH --job-name 'a b' -W # and a remark --array=1\n##SBATCH --array=1\n"
        "#SBATCH --comment=\"it's\nset -u\n#SBATCH --array=0-2\n"
    )
    assert [(o.name, o.value) for o in header_options(script)] == [
        ("job-name", "a b"),
        ("wait", ""),
        ("comment", "\"it's"),
    ]


@pytest.mark.parametrize(
    ("header", "site", "words"),
    [
        ("--export=NONE", "", "run.sub: #SBATCH --export=NONE keeps LR, TOKEN from the job"),
        ("--export=nil", "", "keeps LR, TOKEN from the job"),
        ("--export=PATH,LR", "", "keeps TOKEN from the job"),
        ("--export=ALL,LR=3e-4", "", "sets LR for every trial"),
        ("--export=NONE", "--export=ALL", ""),
        ("--export=ALL", "--export=NONE", "site.sbatch_args: --export=NONE keeps LR"),
        ("--export=ALL,OMP_NUM_THREADS=4", "", ""),
        ("--export=LR,TOKEN", "", ""),
        ("--array=0-2", "", "run.sub: #SBATCH --array=0-2 makes an array"),
        ("", "-a 0-2", "site.sbatch_args: -a 0-2 makes an array"),
        ("--wait", "", "--wait keeps sbatch"),
        ("-M other", "", "-M other sends trials to a cluster"),
        ("-M other", "--clusters=b", ""),
        ("", "-M a,b", "-M a,b leaves the choice of a cluster to sbatch"),
        ("", "--clusters=all", "--clusters=all leaves the choice of a cluster to sbatch"),
        ("--time-min=00:10:00", "", "--time-min=00:10:00 lets Slurm end a trial after 10 minutes, and budget.trial"),
        ("--time=5 --time-min=2:00:00", "--time=1-0", ""),
        ("", "-t 30", "site.sbatch_args: -t 30 lets Slurm end a trial after 30 minutes, and budget.trial_minutes"),
        ("--wait\n#PBS -N a -J 0-2", "--ignore-pbs", "--wait keeps sbatch"),
        ("--nodes=1\n#PBS -N a -J 0-2", "", "run.sub: #PBS -J 0-2 makes an array"),
        ("--nodes=1\necho begin\n#PBS -t1-4%2", "", "run.sub: #PBS -t 1-4%2 makes an array"),
        ("--ignore-pbs\n#PBS -J 0-2", "", ""),
        ("--nodes=1\n#PBS -e x.err\n#PBS -l nodes=1\n# PBS -J 1", "", ""),
        ("--nodes=1\n#PBS -v FOO=1", "", "run.sub: #PBS -v FOO=1 keeps LR, TOKEN from the job"),
        ("--nodes=1\n#PBS -v FOO=1", "--export=ALL", ""),
        ("--nodes=1\n#PBS\t-hj oe -N -v", "", "run.sub: #PBS -h holds every trial in the queue"),
        ("--nodes=1\n#BSUB -e x.err -q short -J x[1-3] -W 5 -x\n #PBS -h", "", ""),
        ("--comment=x --job-name=y --quiet --ntasks=8 --ntasks-per-node=8", "", ""),
        ("--ntasks=1\n#SBATCH hetjob\n#SBATCH --ntasks=2", "", "run.sub: #SBATCH hetjob makes several jobs of each"),
        ("packjob", "", "run.sub: #SBATCH packjob makes several jobs of each trial"),
        ("", "-N 1 : -N 2", "site.sbatch_args: : makes several jobs of each trial"),
        ("", "--job-name=y --comment=team-7", ""),
        ("--error=x.err --output=x.out -e y", "", ""),
        ("", "--error=x.err", "keeps what a trial says of its failure out of its log"),
        ("", "-o x.out", "-o x.out sends a trial's log where nobody reads it"),
        ("", "--ntasks=8", ""),
        ("--hold", "", "run.sub: #SBATCH --hold holds every trial in the queue"),
        ("", "-H", "site.sbatch_args: -H holds every trial"),
        ("--requeue --chdir=/x --open-mode=truncate --signal=B:USR1@60", "", ""),
        ("", "--requeue", "lets Slurm run a trial a second time into one log"),
        ("--begin=20:00 --dependency=singleton --deadline=now+2days", "", ""),
    ],
)
def test_what_takes_effect_is_refused_with_what_to_do(header: str, site: str, words: str) -> None:
    options = header_options(f"#SBATCH {header}\n"), sbatch_options(site.split())
    sentences = refusals(*options, script="run.sub", needed={"LR", "TOKEN"}, nodes=1, minutes=60)
    assert [words in sentence and "; take it out of " in sentence for sentence in sentences] == [True] * bool(words)


@pytest.mark.parametrize(
    ("variable", "site", "words"),
    [
        ("SBATCH_EXPORT=NONE", "", "[site.environment] SBATCH_EXPORT=NONE keeps LR from the job"),
        ("SBATCH_EXPORT=NONE", "--export=ALL", ""),
        ("SBATCH_ARRAY_INX=0-2", "", "makes an array"),
        ("SLURM_CLUSTERS=other", "", "sends trials to a cluster"),
        ("SBATCH_WAIT=1", "", "keeps sbatch"),
        ("SBATCH_ERROR=x.err", "", "[site.environment] SBATCH_ERROR=x.err keeps what a trial says of its failure"),
        ("SBATCH_DEBUG=1", "", ""),
    ],
)
def test_what_sbatch_reads_from_the_environment_is_refused_as_what_it_reads_from_a_header(
    variable: str, site: str, words: str
) -> None:
    name, _, value = variable.partition("=")
    known = environment_options({name: value})
    options = sbatch_options(site.split())
    sentences = refusals((), options, script="run.sub", needed={"LR"}, nodes=1, environment=known)
    assert [words in sentence and "take it out of [site.environment]" in sentence for sentence in sentences] == (
        [True] * bool(words)
    )


@pytest.mark.parametrize(
    ("site", "nodes", "allowed"),
    [("-n 4", 1, "1"), ("--ntasks=4", 2, "2"), ("--ntasks=4", 4, ""), ("--ntasks-per-node=2", 4, "1"), ("-nx", 1, "")],
)
def test_a_command_is_started_once_on_each_node(site: str, nodes: int, allowed: str) -> None:
    sentences = refusals((), sbatch_options(site.split()), script="", needed=(), nodes=nodes)
    assert [f"{allowed} is allowed" in sentence for sentence in sentences] == [True] * bool(allowed)


def study_of_script(folder: Path, header: str, *, argv: str = "", launcher: str = "slurm") -> Path:
    """A study whose trials are a batch script with this line in its header."""
    (folder / "train.sub").write_text(f"#!/bin/bash\n#SBATCH {header}\necho step 1 val_loss 0.5 $LR\n")
    (folder / "study.toml").write_text(
        f"""
        [workload]
        kind = "command"
        script = true
        argv = ["{folder}/train.sub"{argv}]
        log = {{ kind = "regex", eval = 'step (?P<step>\\d+) val_loss (?P<loss>\\S+)' }}
        [site]
        launcher = "{launcher}"
        [space]
        LR = {{ type = "float", low = 1e-5, high = 1e-2, log = true }}
        [objective]
        target = 0.7
        [budget]
        trials = 2
        """
    )
    return folder / "study.toml"


@pytest.mark.parametrize("header", ["--export=NONE", "--array=0-2", "-W"])
def test_a_sweep_refuses_it_before_its_first_job(tmp_path: Path, header: str) -> None:
    file = study_of_script(tmp_path, header)
    with pytest.raises(SetupError, match=f"train.sub: #SBATCH {header} "):
        refuse(file, tmp_path)
    done = CliRunner().invoke(main, ["--study", str(file), "--output", str(tmp_path / "sweep"), "--dry-run"])
    assert f"# no trial would run: study study: train.sub: #SBATCH {header} " in done.output


@pytest.mark.parametrize(
    ("header", "changes"),
    [("--array=0-2", {"launcher": "local"}), ("--export=NONE", {"argv": ', "--lr", "{LR}"'}), ("--mem=0", {})],
)
def test_what_has_no_effect_is_not_refused(tmp_path: Path, header: str, changes: dict[str, str]) -> None:
    refuse(study_of_script(tmp_path, header, **changes), tmp_path)


def refuse(file: Path, folder: Path) -> None:
    """Raise what a sweep of the study would say before its first job."""
    study = load_study(file)
    preflight_warnings(load(study, file), study, SweepPaths(folder / "sweep"))
