"""The machine's own config is trial 0 as it stands, and what every other trial changes."""

from __future__ import annotations

import contextlib
import math
import os
import re
import shlex
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lora_tune.base.errors import InputError, SetupError, StudyError
from lora_tune.base.paths import SweepPaths
from lora_tune.config.holding import with_extended_space
from lora_tune.config.space import Space
from lora_tune.config.study import Study
from lora_tune.controller.changed_study import with_base
from lora_tune.search.recorded import fitting, in_memory
from lora_tune.search.session import Session
from lora_tune.store.metrics import TrialMetrics
from lora_tune.store.records import StudyRecords, Trial, Verdict
from lora_tune.workloads import load
from lora_tune.workloads.base import Proposal, Start, Value
from lora_tune.workloads.base_config import computed_from, equal, read_base, starting_point
from lora_tune.workloads.implementation import read_implementation, sourced_file, warmup_ratio
from lora_tune.workloads.mlperf import MlperfWorkload, about_base
from lora_tune.workloads.record import record_of
from lora_tune.workloads.script_needs import source_files
from lora_tune.workloads.walltime import minutes_of

STANDIN = Path(__file__).resolve().parents[1] / "standin"
CONFIG = "config_DGXH100_1x8x4xtp4pp1cp1.sh"
SPACE: dict[str, Any] = {
    "LR": {"type": "float", "low": 1e-4, "high": 1e-3, "log": True},
    "MAX_STEPS": {"type": "int", "low": 600, "high": 1000, "step": 50},
    "layout": {"type": "layout", "tp": [2, 4, 8], "cp": [1, 2], "sp": [0, 1], "gbs": [8]},
}


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A copy of the stand-in whose config also sets what public configs of H100 set."""
    folder = Path(shutil.copytree(STANDIN, tmp_path / "tree"))
    with (folder / CONFIG).open("a") as file:
        file.write("export VBOOST_VALUE=1\nexport FP8_DPA=1\nexport NCCL_NVLS_ENABLE=0\n")
    return folder


def made(tree: Path, space: dict[str, Any] | None = None, base: str = CONFIG, **site: Any) -> MlperfWorkload:
    study = Study.model_validate(
        {
            "name": "h100",
            "workload": {"kind": "mlperf", "implementation": str(tree), "base": base},
            "site": {"launcher": "slurm", "system": "DGXH100", "gpus_per_node": 8, "container": "c", **site},
            "space": SPACE if space is None else space,
            "budget": {"trials": 1, "trial_minutes": 50},
        }
    )
    found = load(study, "h100.toml")
    assert isinstance(found, MlperfWorkload)
    return found


def start_of(workload: MlperfWorkload) -> Start:
    found = workload.start()
    assert found is not None
    return found


def as_it_stands(workload: MlperfWorkload) -> Proposal:
    return Proposal(number=0, attempt=0, seed=11, parameters=start_of(workload).parameters)


def changed(workload: MlperfWorkload, **values: Value) -> Proposal:
    space, start = workload.study.search_space, start_of(workload)
    assert start.tuned is not None
    parameters = {**start.inherited, **space.resolve({**start.tuned, **values})}
    return Proposal(number=3, attempt=0, seed=14, parameters=parameters)


def exported(workload: MlperfWorkload, proposal: Proposal) -> tuple[str, str]:
    ((name, text),) = workload.export(proposal, ("provenance",)).files.items()
    return name, text


class TestTrialZero:
    def test_it_runs_with_what_the_config_exports_to_its_user(self, tree: Path, tmp_path: Path) -> None:
        workload = made(tree)
        environment = workload.job(as_it_stands(workload), tmp_path / "a").environment
        by_hand = source_files([tree / CONFIG]).values
        swept = {"WALLTIME", "WALLTIME_RUNANDTIME"}
        assert {n: environment[n] for n in by_hand.keys() - swept} == {n: by_hand[n] for n in by_hand.keys() - swept}
        assert environment["VBOOST_VALUE"] == environment["FP8_DPA"] == "1"

    def test_it_is_a_point_of_the_space_where_that_holds_it(self, tree: Path) -> None:
        start = start_of(made(tree))
        assert start.tuned == {"LR": 4e-4, "MAX_STEPS": 800, "layout": "tp4 pp1 cp1 minibs4 mbs1 sp1"}
        assert start.parameters["GBS"] == 8

    @pytest.mark.parametrize(
        ("change", "why"),
        [
            ({"MINIBS": {"type": "int", "low": 5, "high": 8}}, "MINIBS=4 is not in 5 to 8"),
            ({"FP8_DPA": 0}, "FP8_DPA is 1 there and 0 in every other trial"),
            ({"NCCL_BUFFSIZE": {"type": "int", "low": 1, "high": 9}}, "states NCCL_BUFFSIZE"),
        ],
    )
    def test_a_config_outside_the_space_is_measured_all_the_same(
        self, tree: Path, tmp_path: Path, change: dict[str, Any], why: str
    ) -> None:
        workload = made(tree, {**SPACE, **change})
        start = start_of(workload)
        assert start.tuned is None
        assert why in start.outside
        assert workload.job(as_it_stands(workload), tmp_path / "a").environment["LR"] == "0.0004"

    @pytest.mark.parametrize(
        ("name", "spread", "numbers", "sentence"),
        [
            ("LR", {"type": "float", "low": 5e-4, "high": 1e-3}, (4e-4, 1e-3), "outside 0.0005 to 0.001"),
            ("MAX_STEPS", {"type": "int", "low": 610, "high": 900, "step": 50}, (610, 900, 10), "the step is now 10"),
            ("MAX_STEPS", {"type": "int", "low": 100, "high": 500, "step": 50}, (100, 800, 50), "is now 100 to 800"),
            ("MAX_STEPS", {"type": "int", "low": 810, "high": 900, "step": 50}, (800, 900, 10), "is now 800 to 900"),
        ],
    )
    def test_the_space_grows_until_it_is_a_point_of_it(
        self, tree: Path, name: str, spread: dict[str, Any], numbers: tuple[float, ...], sentence: str
    ) -> None:
        workload = made(tree, {**SPACE, name: spread})
        start, study = start_of(workload), workload.study
        assert start.tuned is not None, start.outside
        assert any(
            sentence in told and "so that the search learns from trial 0" in told for told in about_base(workload)
        )
        wider = with_extended_space(study, start.tuned)
        parameter = wider.search_space.parameters[name]
        assert tuple(getattr(parameter, end) for end in ("low", "high", "step")[: len(numbers)]) == numbers
        assert wider.digest == study.digest
        assert wider.with_options({"budget": {"trials": 9}}).search_space == wider.search_space
        session = Session(wider, start=start)
        first = session.ask()
        assert not isinstance(first, str)
        record = Trial(
            number=0, seed=1, tuned=first.tuned, parameters=start.parameters, verdict=Verdict.REACHED, finished_at=1.0,
            metrics=TrialMetrics(base=start.name, objective=10.0),
        )  # fmt: skip
        records = StudyRecords(name=study.name, digest="", study_toml="", began_at=0.0, trials={0: record})
        assert with_base(study, records) == wider
        again = in_memory(with_base(study, records), records)
        assert again.best_trial.params[name] == start.tuned[name]
        assert not isinstance(Session(wider, records, start=start).ask(), str)

    @pytest.mark.parametrize(
        ("exports", "change", "name", "value"),
        [
            ("MINIBS=8", {}, "layout", "tp4 pp1 cp1 minibs8 mbs1 sp1"),
            ("TP=8 MINIBS=1", {}, "layout", "tp8 pp1 cp1 minibs1 mbs1 sp1"),
            ("", {"layout": {"type": "layout", "tp": [2], "gbs": [8]}}, "layout", "tp4 pp1 cp1 minibs4 mbs1"),
            ("", {"NCCL_NVLS_ENABLE": {"type": "categorical", "choices": [1]}}, "NCCL_NVLS_ENABLE", 0),
        ],
        ids=["GBS 16", "GBS 1, as the guide's", "another TP", "another choice"],
    )
    def test_a_layout_or_choice_that_the_study_lacks_is_one_more_of_it(
        self, tree: Path, tmp_path: Path, exports: str, change: dict[str, Any], name: str, value: Value
    ) -> None:
        with (tree / CONFIG).open("a") as file:
            file.write(f"export {exports}\n")
        workload = made(tree, {**SPACE, **change})
        start, study = start_of(workload), workload.study
        assert start.tuned is not None, start.outside
        assert start.tuned[name] == value
        assert any(
            f"{value}, which space.{name} does not offer: it is one choice more" in s for s in about_base(workload)
        )
        wider = with_extended_space(study, start.tuned)
        offered, before = (s.search_space.distributions()[name].choices for s in (wider, study))
        assert {*offered} - {*before} == {value}
        assert wider.digest == study.digest
        assert wider.search_space.resolve(start.tuned)["GBS"] == start.parameters["GBS"]
        trial = Trial(number=0, seed=1, tuned=start.tuned, parameters=start.parameters)
        assert fitting(wider)(trial)
        assert not isinstance(Session(wider, start=start).ask(), str)
        later = workload.job(changed(workload, LR=5e-4), tmp_path / "a").environment
        assert {n: later[n] for n in ("TP", "MINIBS", "SP")} == {
            n: str(start.parameters[n]) for n in ("TP", "MINIBS", "SP")
        }

    def test_a_layout_that_does_not_make_its_own_batch_is_none_of_the_space(self, tree: Path) -> None:
        with (tree / "run_and_time.sh").open("a") as file:
            file.write('echo "$GLOBAL_BATCH_SIZE"\n')
        with (tree / CONFIG).open("a") as file:
            file.write("export GLOBAL_BATCH_SIZE=13\n")
        assert "does not offer its layout TP=4" in start_of(made(tree)).outside

    @pytest.mark.parametrize("in_container", [False, True])
    def test_a_warm_up_that_nothing_reads_is_named_and_not_swept(
        self, tree: Path, tmp_path: Path, *, in_container: bool
    ) -> None:
        """B200's trees read none; of Lenovo's, whose code lies in the container, no config states one."""
        for conf in (tree / "conf").iterdir():
            conf.write_text("".join(line for line in conf.read_text().splitlines(True) if "WARMUP_" not in line))
        if in_container:
            for name in ("conf", "train.py", "run_and_time.sh"):
                shutil.rmtree(tree / name) if (tree / name).is_dir() else (tree / name).unlink()
        space = {**SPACE, "WARMUP_STEPS": {"type": "int", "low": 0, "high": 40, "step": 10}}
        workload = made(tree, space, data=str(tmp_path), model=str(tmp_path))
        assert workload.unread_switches() == ("WARMUP_STEPS",)
        assert any("reads WARMUP_STEPS: these are not swept" in s for s in workload.check())
        start = start_of(workload)
        assert start.tuned is not None, start.outside
        wider = with_extended_space(workload.study, start.tuned, workload.unread_switches())
        assert wider.search_space.distributions()["WARMUP_STEPS"].single()
        assert {"WARMUP_STEPS", "WARMUP_RATIO"}.isdisjoint(workload.exports(changed(workload, LR=5e-4)))

    @pytest.mark.parametrize("division", ["closed", "open"])
    def test_one_that_cannot_win_or_converge_is_told_so_before_it_runs(self, tree: Path, division: str) -> None:
        """The DGX H100 guide's own example: TP 8 and MINIBS 1 on eight GPUs, evaluated every 50 steps."""
        guide = "export TP=8\nexport MINIBS=1\nexport VAL_CHECK_INTERVAL=50\nexport MAX_STEPS=1024\n"
        (tree / CONFIG).write_text((tree / CONFIG).read_text() + guide)
        study = made(tree).study.model_copy(update={"division": division})
        told = about_base(load(study, "h100.toml"))
        assert any("GBS 1 cannot win: it is below 8" in doubt for doubt in told)
        assert any("MAX_STEPS = 1024 at GBS 1 ends training after 1024 samples" in doubt for doubt in told)
        assert any("it must be 384 samples at GBS 1" in doubt for doubt in told) == (division == "closed")

    def test_one_that_keeps_the_rules_is_told_nothing_of_them(self, tree: Path) -> None:
        assert not [doubt for doubt in about_base(made(tree)) if "division" in doubt or "GBS" in doubt]

    def test_its_own_eval_schedule_stays_and_is_told(self, tree: Path, tmp_path: Path) -> None:
        config = (tree / CONFIG).read_text().replace("SKIP_EVALS=3", "SKIP_EVALS=0")
        (tree / CONFIG).write_text(config)
        workload = made(tree, data=str(tmp_path), model=str(tmp_path), container="c.sqsh")
        assert workload.job(as_it_stands(workload), tmp_path / "a").environment["SKIP_EVALS"] == "0"
        assert workload.job(changed(workload, LR=5e-4), tmp_path / "b").environment["SKIP_EVALS"] == "3"
        assert any("SKIP_EVALS=0 there and 3 in every other trial" in doubt for doubt in workload.check())


class TestStrangeConfigs:
    def test_a_folder_whose_name_has_spaces(self, tree: Path, tmp_path: Path) -> None:
        """``source $(dirname ${BASH_SOURCE[0]})/config_common.sh`` works for who types ``source config_X.sh`` there."""
        spaced = tree.rename(tmp_path / "my tree (v5)")
        text = (spaced / CONFIG).read_text()
        assert "$(dirname ${BASH_SOURCE[0]})/config_common.sh" in text, "without quotes, as the public ones"
        (spaced / CONFIG).write_text(f"set -eu\n{text}")
        workload = made(spaced, data=str(tmp_path), model=str(tmp_path))
        workload.check()
        assert workload.base is not None
        typed = f"cd {shlex.quote(str(spaced))} && source {CONFIG} 2>/dev/null; env -0"
        shown = subprocess.run(["bash", "-c", typed], capture_output=True, text=True, env={"PATH": os.environ["PATH"]})
        theirs = dict(line.split("=", 1) for line in shown.stdout.split("\0") if line)
        ours = workload.base.values
        assert "MODEL" not in ours
        assert {name: theirs[name] for name in ours} == dict(ours)
        assert {"TP", "LR", "VAL_CHECK_INTERVAL"} <= ours.keys(), "of the common file, too"

    @pytest.mark.parametrize("head", ["", "set -e\n"])
    @pytest.mark.parametrize("where", ["", "mine/"])
    def test_what_it_sources_by_a_plain_name_reaches_trial_and_export(
        self, tree: Path, tmp_path: Path, head: str, where: str
    ) -> None:
        spaced = tree.rename(tmp_path / "my tree")
        base = spaced / where / CONFIG
        base.parent.mkdir(exist_ok=True)
        text = (spaced / CONFIG).read_text().replace("$(dirname ${BASH_SOURCE[0]})/", "")
        (spaced / CONFIG).unlink()
        (spaced / "config_common.sh").rename(base.parent / "config_common.sh")
        base.write_text(head + text)
        workload = made(spaced, base=f"{where}{CONFIG}", data="/tmp", model="/tmp")
        assert workload.check() == []
        proposal = changed(workload, LR=5e-4)
        shown = f"source {where}$0; echo $LR $TP $VAL_CHECK_INTERVAL $PWD"
        (job,) = workload.job(proposal, tmp_path / "a").files.items()
        for (name, config), folder in ((job, tmp_path / "a"), (exported(workload, proposal), spaced)):
            (folder / where).mkdir(parents=True, exist_ok=True)
            (folder / where / name).write_text(config)
            (tmp_path / "elsewhere" / "mine").mkdir(parents=True, exist_ok=True)
            shell = {"PATH": os.environ["PATH"], "CDPATH": str(tmp_path / "elsewhere")}
            done = subprocess.run(["bash", "-c", shown, name], cwd=folder, capture_output=True, text=True, env=shell)
            assert (done.stdout, done.stderr) == (f"0.0005 4 384 {folder}\n", "")

    @pytest.mark.parametrize("head", ["", "set -e\n", "set -o posix\n"])
    @pytest.mark.parametrize("line", ["readonly LR", "declare -rx LR=0.0003"])
    def test_a_variable_that_no_trial_can_change_is_told_before_the_first(
        self, tree: Path, head: str, line: str
    ) -> None:
        (tree / CONFIG).write_text(f"{head}{(tree / CONFIG).read_text()}{line}\n")
        with pytest.raises(SetupError, match=r"keeps LR=0\.000[34] whatever .* remove its readonly"):
            made(tree, data="/tmp", model="/tmp").check()

    @pytest.mark.parametrize("packaged", [True, False])
    def test_defaults_of_other_peoples_scripts_are_not_the_configs(self, tree: Path, *, packaged: bool) -> None:
        """A folder that holds NeMo: a script in it takes another batch, which a config with MINIBS does not."""
        scripts = tree / "NeMo" / "scripts"
        scripts.mkdir(parents=True)
        (scripts / "pretrain.sh").write_text("train --gbs ${GLOBAL_BATCH_SIZE:-128} --lr ${ADAM_LR:-1}\n")
        if packaged:
            (tree / "NeMo" / "setup.py").touch()
        assert ("ADAM_LR" in read_implementation(tree, "run.sub").literals) is not packaged
        parameters = start_of(made(tree)).parameters
        assert (parameters["GBS"], parameters["MINIBS"]) == (8, 4)

    def test_names_that_a_shell_would_take_for_patterns(self, tree: Path) -> None:
        (tree / "mine").mkdir()
        (tree / CONFIG).rename(tree / "mine" / "config_[b]_1x8x4.sh")
        assert read_base(tree, "config_[b]_1x8x4.sh").file == "mine/config_[b]_1x8x4.sh"
        with pytest.raises(SetupError, match=r"holds no config_\*\.sh; it holds config_\[b\]_1x8x4\.sh"):
            read_base(tree, "config_*.sh")

    def test_a_config_outside_of_the_folder_is_told_where_it_belongs(self, tree: Path, tmp_path: Path) -> None:
        own = tmp_path / "config_MINE.sh"
        (tree / CONFIG).rename(own)
        with pytest.raises(SetupError, match=r"holds no .*config_MINE\.sh \(that file lies elsewhere: copy it there"):
            read_base(tree, str(own))

    @pytest.mark.parametrize("spoiled", [CONFIG, "config_common.sh", "env.sh"])
    def test_windows_line_ends_are_told_of_the_file_that_has_them(self, tree: Path, spoiled: str) -> None:
        (tree / "env.sh").write_text("export NCCL_IB_HCA=mlx5\n")
        (tree / spoiled).write_bytes((tree / spoiled).read_bytes().replace(b"\n", b"\r\n"))
        with pytest.raises(
            SetupError, match=f"{re.escape(str(tree / spoiled))} has Windows line ends.*sed -i"
        ) as raised:
            read_base(tree, CONFIG, ["env.sh"])
        assert str(raised.value).endswith(f" {tree / spoiled}")

    @pytest.mark.parametrize("head", ["", "set -euo pipefail\n"])
    def test_what_it_computes_from_a_variable_that_trials_change_is_told(self, tree: Path, head: str) -> None:
        """It keeps the base's value in every trial, since their changes come behind it."""
        computed = (
            'steps=("$MAX_STEPS")\nhalf() { echo $(( $1 / 2 )); }\nexport DECAY_STEPS="${steps[0]}"\n'
            'export HALF_OF_IT=$(half "$DECAY_STEPS")\nexport SEGMENT=$((CP / DGXNGPU))\n'
            "export NCCL_MIN_CTAS=$((TP * 8))\n"
        )
        (tree / CONFIG).write_text(f"{head}{(tree / CONFIG).read_text()}{computed}")
        space = {**SPACE, "NCCL_MIN_CTAS": {"type": "derived", "formula": "TP * 8"}}
        (told,) = (doubt for doubt in about_base(made(tree, space)) if "computes" in doubt)
        assert "DECAY_STEPS=800, HALF_OF_IT=400 from MAX_STEPS" in told
        assert "SEGMENT=0 from CP" in told
        assert "NCCL_MIN_CTAS" not in told, "the study computes it for each trial"
        assert told.endswith('state it in [space]: DECAY_STEPS = { type = "derived", formula = "..." }')

    @pytest.mark.parametrize("apart", ["\n", "; "])
    def test_what_only_stands_beside_such_a_variable_is_not_told(self, tree: Path, apart: str) -> None:
        lines = ["MINIBS=4", "export FUSED_ADAM=1", "export LAYERNORM_SM=1", "export SEGMENT=$((CP / DGXNGPU))"]
        branch = apart.join(['if [ "${DGXNNODES:-1}" = 1 ]; then :', *lines, "fi"])
        (tree / CONFIG).write_text(f"{(tree / CONFIG).read_text()}{branch}\nexport NCCL_MIN_CTAS=$((MINIBS * 8))\n")
        base = read_base(tree, CONFIG)
        assert computed_from(tree, base, [], {"MINIBS": "2"}) == {"NCCL_MIN_CTAS": "32"}

    def test_a_value_that_such_a_branch_sets_again_is_not_told(self, tree: Path) -> None:
        """Without the branch it has the value from before: that is bash's doing, and follows from nothing."""
        lines = "export FUSED_ADAM=0\nif true; then\nMINIBS=4\nexport FUSED_ADAM=1\nfi\n"
        (tree / CONFIG).write_text(f"{(tree / CONFIG).read_text()}{lines}[ $MINIBS = 4 ] && export SEGMENT=1\n")
        base = read_base(tree, CONFIG)
        assert computed_from(tree, base, [], {"MINIBS": "2"}) == {"SEGMENT": "1"}

    @pytest.mark.parametrize(
        ("line", "expected"),
        [
            ("export PATH=/opt/tools:$PATH", "/opt/tools:/home/me/bin:/bin"),
            ("PATH+=:/opt/tools", "/home/me/bin:/bin:/opt/tools"),
            ("export PATH=/opt/tools", "/opt/tools"),
            (":", None),
        ],
    )
    def test_a_path_that_it_extends_is_that_of_every_trial(
        self, tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str, expected: str | None
    ) -> None:
        (tree / CONFIG).write_text(f"{(tree / CONFIG).read_text()}{line}\n")
        workload = made(tree)
        monkeypatch.setenv("PATH", "/home/me/bin:/bin")
        for proposal in (as_it_stands(workload), changed(workload, LR=5e-4)):
            assert workload.job(proposal, tmp_path / "a").environment.get("PATH") == expected
        assert "PATH" not in start_of(workload).values

    @pytest.mark.parametrize("line", ["TP=auto", "MINIBS='  x  '", "CP=0.5", "PP=-1", "SP=maybe", "DGXNNODES=1e999"])
    def test_a_count_that_is_none_is_told(self, tree: Path, line: str) -> None:
        with (tree / CONFIG).open("a") as file:
            file.write(f"export {line}\n")
        name = line.partition("=")[0]
        with pytest.raises(SetupError, match=rf"{CONFIG}: {name} is .*, which is no whole number.*; correct it there"):
            made(tree).start()

    @given(
        st.sampled_from(["TP", "PP", "CP", "SP", "MBS", "MINIBS", "GBS", "VP", "DGXNNODES", "WARMUP_RATIO", "LR"]),
        st.text(max_size=6) | st.sampled_from(["nan", "-inf", "1e9", "0", "-0", "1_0", "٣", "4.0", "null"]),
    )
    def test_whatever_a_variable_holds_there_is_a_start_or_a_sentence(self, name: str, text: str) -> None:
        space = Space(parameters={}, nodes=1, gpus_per_node=8)
        with contextlib.suppress(SetupError):
            starting_point(CONFIG, record_of({}, {"MAX_STEPS": "800", "MINIBS": "4", name: text}, {}), space)

    @pytest.mark.parametrize("use", ["set -u; export WALLTIME=$((NEXP * 50))", ": ${NEXP:?}; exit 1"])
    def test_what_its_user_sets_in_the_shell_can_be_sourced_before(self, tree: Path, use: str) -> None:
        with (tree / CONFIG).open("a") as file:
            file.write(f"{use}\n")
        with pytest.raises(SetupError, match=r"exports NEXP and that workload\.before names"):
            read_base(tree, CONFIG)
        (tree / "mine.sh").write_text("export NEXP=2\n")
        if "exit" not in use:
            assert read_base(tree, CONFIG, ["mine.sh"]).values["WALLTIME"] == "100"


class TestTimeLimits:
    """An export goes into the hands of who runs the base today; the sweep's own limit is that of its trials."""

    @pytest.fixture
    def limited(self, tree: Path) -> Any:
        def make(*lines: str) -> MlperfWorkload:
            kept = [line for line in (tree / CONFIG).read_text().splitlines() if "WALLTIME" not in line]
            (tree / CONFIG).write_text("\n".join([*kept, *lines, ""]))
            common = tree / "config_common.sh"
            common.write_text("\n".join(line for line in common.read_text().splitlines() if "WALLTIME" not in line))
            return made(tree)

        return make

    @pytest.mark.parametrize("limit", ["120", "2:00:00", "1-0", "UNLIMITED", "$((${NEXP:-1} * 60))"])
    def test_an_export_keeps_a_limit_of_the_whole_job(self, tree: Path, limited: Any, limit: str) -> None:
        workload = limited(f"export WALLTIME={limit}")
        name, text = exported(workload, changed(workload, LR=5e-4))
        assert "WALLTIME" not in text, text
        (tree / f"own_{name}").write_text(text)
        assert sourced_file(tree / f"own_{name}")["WALLTIME"] == source_files([tree / CONFIG]).values["WALLTIME"]

    @pytest.mark.parametrize("limit", ["49", "0:49:59", "$TOMORROW"])
    def test_one_in_which_the_trial_would_not_have_ended_is_raised(self, limited: Any, limit: str) -> None:
        workload = limited(f"export WALLTIME={limit}")
        text = exported(workload, changed(workload, LR=5e-4))[1]
        assert "export WALLTIME_RUNANDTIME=50" in text
        assert "export WALLTIME=$((5 +" in text

    def test_a_trial_has_the_studys_limit(self, limited: Any, tmp_path: Path) -> None:
        workload = limited("export WALLTIME=240")
        assert workload.job(as_it_stands(workload), tmp_path / "a").environment["WALLTIME"] == "60"

    def test_who_states_no_limit_is_told_that_trials_end_before_the_bases_own(self, limited: Any) -> None:
        workload = limited("export WALLTIME=4:00:00")
        assert not [doubt for doubt in about_base(workload) if "trial_minutes" in doubt]
        unstated = workload.study.model_copy(update={"budget": workload.study.budget.model_validate({"trials": 1})})
        open_ended = load(unstated, "h100.toml")
        assert isinstance(open_ended, MlperfWorkload)
        assert any(
            "gives a run WALLTIME=4:00:00, and a trial is ended after 60 minutes" in d for d in about_base(open_ended)
        )

    @given(st.integers(0, 99), st.integers(0, 23), st.integers(0, 59), st.integers(0, 59))
    def test_slurms_forms_of_a_time(self, days: int, hours: int, minutes: int, seconds: int) -> None:
        whole = days * 1440 + hours * 60 + minutes + seconds / 60
        assert minutes_of(f"{days}-{hours}:{minutes}:{seconds}") == pytest.approx(whole or math.inf)
        assert minutes_of(f"{days * 24 + hours}:{minutes}:{seconds}") == pytest.approx(whole or math.inf)

    @given(st.text(max_size=20))
    def test_no_text_is_an_error(self, text: str) -> None:
        assert (found := minutes_of(text)) is None or found > 0


class TestOtherTrials:
    def test_they_change_the_config_and_keep_the_rest(self, tree: Path, tmp_path: Path) -> None:
        workload = made(tree)
        job = workload.job(changed(workload, LR=5e-4), tmp_path / "a")
        ((name, text),) = job.files.items()
        assert name == CONFIG
        lines = [line for line in text.splitlines() if line.startswith(("pushd", "export", "source"))]
        assert lines == [
            f"pushd {tree} >/dev/null",
            f"source ./{CONFIG}",
            "export LR=0.0005",
            "export DGXSYSTEM=DGXH100_1x8x4xtp4pp1cp1",
            "export WALLTIME_RUNANDTIME=50",
            "export WALLTIME=$((5 + ${NEXP:-1} * (WALLTIME_RUNANDTIME + 5)))",
        ]
        assert job.environment["VBOOST_VALUE"] == "1"
        (tmp_path / "a").mkdir()
        (tmp_path / "a" / name).write_text(text)
        by_hand = sourced_file(tmp_path / "a" / name)
        assert {n: job.environment[n] for n in by_hand} == by_hand

    def test_the_disclosed_precisions_follow_from_what_runs(self, tree: Path, tmp_path: Path) -> None:
        with (tree / CONFIG).open("a") as file:
            file.write("export MLPERF_LINEAR_PRECISION=fp8\nexport MLPERF_ATTN_PRECISION=fp8\n")
        space = {**SPACE, "FP8_DPA": {"type": "categorical", "choices": [0, 1]}}
        with (tree / "run_and_time.sh").open("a") as file:
            file.write('echo "$FP8_DPA"\n')
        workload = made(tree, space)
        environment = workload.job(changed(workload, FP8_DPA=0), tmp_path / "a").environment
        assert (environment["MLPERF_LINEAR_PRECISION"], environment["MLPERF_ATTN_PRECISION"]) == ("fp8", "bfloat16")

    def test_a_place_that_the_config_names_is_kept_unless_the_site_names_another(
        self, tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("DATADIR", "/of/the/shell")
        with (tree / CONFIG).open("a") as file:
            file.write("export DATADIR=/of/the/config\n")
        for site, place in [({}, "/of/the/config"), ({"data": "/of/the/site"}, "/of/the/site")]:
            workload = made(tree, **site)
            assert workload.job(as_it_stands(workload), tmp_path / "a").environment["DATADIR"] == place


class TestFinding:
    def test_a_config_may_lie_anywhere_and_needs_no_common_file(self, tree: Path) -> None:
        (tree / "own").mkdir()
        (tree / "own" / "config_XD670_H200.sh").write_text("export LR=1e-4 MAX_STEPS=700 TP=4 MINIBS=4\n")
        (tree / "config_common.sh").unlink()
        found = made(tree, base="config_XD670_H200.sh")
        assert found.base is not None
        assert found.base.file == "own/config_XD670_H200.sh"
        assert start_of(found).parameters["LR"] == 1e-4

    def test_a_common_file_in_another_folder_is_taken_from_there(self, tree: Path) -> None:
        """The folder of v4.1's fastest eight H100 is published like this."""
        (tree / "configs").mkdir()
        (tree / "config_common.sh").rename(tree / "configs" / "config_common.sh")
        base = read_base(tree, CONFIG)
        assert base.beside == ("configs/config_common.sh",)
        assert base.values["FP8_AMAX_ALGO"] == "max"
        assert base.values["DGXSYSTEM"] == "DGXH100_1x8x4xtp4pp1cp1"

    def test_what_a_config_leaves_to_its_users_shell_is_given_to_the_script(self, tree: Path, tmp_path: Path) -> None:
        """A public config of a Dell XE8640 has an empty name of its system, and run.sub ends without one."""
        (tree / "config_XE8640.sh").write_text("export LR=1e-4 MAX_STEPS=700 TP=4 MINIBS=4 DGXSYSTEM=\n")
        workload = made(tree, base="config_XE8640.sh", system="LOCAL")
        environment = workload.job(as_it_stands(workload), tmp_path / "a").environment
        machine = {"DGXSYSTEM": "XE8640", "DGXNNODES": "1", "DGXNGPU": "8"}
        assert {name: environment[name] for name in machine} == machine
        usage = workload.export(as_it_stands(workload), ()).usage
        limits = "WALLTIME_RUNANDTIME=50 WALLTIME=60"
        assert f".sh && export DGXSYSTEM=XE8640 DGXNNODES=1 DGXNGPU=8 {limits} && " in usage
        assert "export DGXNNODES=1 DGXNGPU=8 && " in workload.export(changed(workload, LR=5e-4), ()).usage

    def test_a_limit_that_run_sub_asks_for_and_the_config_lacks_is_given_with_the_export(self, tree: Path) -> None:
        """HPE's config of an XD670 (v5.0) states WALLTIME, and its run.sub ends without WALLTIME_RUNANDTIME."""
        (tree / "config_XD670.sh").write_text("export LR=1e-4 MAX_STEPS=700 TP=4 MINIBS=4 DGXNNODES=1 WALLTIME=45\n")
        workload = made(tree, base="config_XD670.sh", system="LOCAL")
        usage = workload.export(as_it_stands(workload), ()).usage
        assert "WALLTIME_RUNANDTIME=50 && " in usage
        assert "WALLTIME=60" not in usage

    def test_a_file_that_is_nowhere_is_told_and_bash_goes_on(self, tree: Path, tmp_path: Path) -> None:
        (tree / "config_common.sh").unlink()
        workload = made(tree, data=str(tmp_path), model=str(tmp_path), container="c.sqsh")
        assert any("sources config_common.sh, which is not beside it" in doubt for doubt in workload.check())

    @pytest.mark.parametrize(
        ("base", "words"),
        [("config_nobody.sh", f"holds no config_nobody.sh; it holds {CONFIG}"), ("../x.sh", "holds no ../x.sh")],
    )
    def test_a_config_that_is_not_there(self, tree: Path, base: str, words: str) -> None:
        with pytest.raises(SetupError) as error:
            start_of(made(tree, base=base))
        assert words in str(error.value)

    def test_a_config_for_another_machine_is_refused(self, tree: Path) -> None:
        with pytest.raises(SetupError, match=r"DGXNGPU=8, and the study for 4; set site\.gpus_per_node = 8"):
            made(tree, gpus_per_node=4).check()

    def test_common_files_are_the_base_configs_own_affair(self, tree: Path) -> None:
        table = {"kind": "mlperf", "implementation": str(tree), "base": CONFIG, "common": ["x.sh"]}
        study = Study.model_validate(
            {"name": "x", "workload": table, "site": {"gpus_per_node": 8}, "space": SPACE, "budget": {"trials": 1}}
        )
        with pytest.raises(StudyError, match=r"workload\.common"):
            load(study, "x.toml")

    def test_without_a_base_the_configs_of_this_machine_are_named(self, tree: Path, tmp_path: Path) -> None:
        workload = made(tree, data=str(tmp_path), model=str(tmp_path))
        settings = workload.settings.model_copy(update={"base": None})
        (doubt, *_) = MlperfWorkload(workload.study, settings).check()
        assert f'workload.base = "{CONFIG}" makes that one trial 0' in doubt


class TestDoctor:
    """``doctor`` says which config trials start from, and which one they pass over."""

    def told(self, workload: MlperfWorkload) -> str:
        return "\n".join(str(finding) for finding in workload.findings(SweepPaths(Path("/tmp/sweep"))))

    def test_with_and_without_a_base(self, tree: Path) -> None:
        workload = made(tree)
        assert f"trial 0 is {CONFIG} as it stands" in self.told(workload)
        without = MlperfWorkload(workload.study, workload.settings.model_copy(update={"base": None}))
        assert f'workload.base = "{CONFIG}"' in self.told(without)


class TestExport:
    def test_of_trial_zero_is_the_config_itself(self, tree: Path) -> None:
        workload = made(tree)
        name, text = exported(workload, as_it_stands(workload))
        assert name != CONFIG
        (tree / name).write_text(text)
        assert source_files([tree / name]).values == source_files([tree / CONFIG]).values

    def test_of_another_trial_says_what_it_changes_under_a_name_of_its_own(self, tree: Path) -> None:
        workload = made(tree)
        name, text = exported(workload, changed(workload, LR=4.05e-4))
        assert name == "config_DGXH100_1x8x4xtp4pp1cp1_h100-3.sh"
        assert "export LR=0.000405\n" in text
        assert str(tree) not in text
        assert "python" not in text
        (tree / name).write_text(text)
        values = source_files([tree / name]).values
        assert values["DGXSYSTEM"] == name.removeprefix("config_").removesuffix(".sh")
        assert values.items() >= {"LR": "0.000405", "VBOOST_VALUE": "1", "WALLTIME_RUNANDTIME": "50"}.items()

    def test_of_a_combination_that_no_trial_ran_the_name_says_so(self, tree: Path) -> None:
        workload = made(tree)
        name, _ = exported(workload, replace(changed(workload, LR=4.05e-4), number=-1))
        assert name == "config_DGXH100_1x8x4xtp4pp1cp1_h100-unrun.sh"

    def test_the_same_export_is_not_copied_again_and_another_file_is_never_replaced(self, tree: Path) -> None:
        workload = made(tree)
        proposal = changed(workload, LR=4.05e-4)
        first = workload.export(proposal, ())
        ((name, text),) = first.files.items()
        assert first.usage.startswith(f"cp -n {name} {tree}")
        (tree / name).write_text(text)
        assert workload.export(proposal, ("of another day",)).usage.startswith(f"cd {tree}")
        (tree / name).write_text("export LR=1\n")
        with pytest.raises(InputError, match="holds something else; move it away"):
            workload.export(proposal, ())

    def test_a_vendors_file_of_the_same_name_is_neither_replaced_nor_sourced_by_itself(self, tree: Path) -> None:
        study = made(tree).study
        settings = made(tree).settings.model_copy(update={"base": None, "common": (CONFIG,)})
        workload = MlperfWorkload(study, settings)
        parameters = study.search_space.resolve(
            {"LR": 4e-4, "MAX_STEPS": 800, "layout": "tp4 pp1 cp1 minibs4 mbs1 sp1"}
        )
        name, text = exported(workload, Proposal(number=5, attempt=0, seed=1, parameters=parameters))
        assert name == "config_DGXH100_1x8x4xtp4pp1cp1_h100-5.sh"
        (tree / name).write_text(text)
        assert source_files([tree / name]).values["LR"] == "0.0004"

    def test_what_the_run_needs_of_the_site_is_in_the_line_and_secrets_are_not(self, tree: Path) -> None:
        environment = {"NCCL_IB_HCA": "mlx5_0", "HF_TOKEN": "hf_abcdefghijklmnopqrstuv"}
        workload = made(tree, environment=environment, mpi="pmi2")
        usage = workload.export(changed(workload, LR=5e-4), ()).usage
        assert 'SLURM_MPI_TYPE=pmi2 NCCL_IB_HCA=mlx5_0 HF_TOKEN="$HF_TOKEN" sbatch' in usage


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("0.0004", 4e-4, True),
        ("True", 1, True),
        ("1", True, True),
        ("0", False, True),
        ("a", "b", False),
        (None, 0, False),
    ],
)
def test_values_are_compared_as_scripts_mean_them(one: object, other: object, same: bool) -> None:
    assert equal(one, other) is same


@given(st.integers(1, 4000).flatmap(lambda steps: st.tuples(st.integers(0, steps), st.just(steps))))
def test_a_warm_up_as_a_share_of_the_steps_gives_those_steps(pair: tuple[int, int]) -> None:
    warmup, steps = pair
    ratio = warmup_ratio(warmup, steps)
    assert int(ratio * steps) == round(ratio * steps) == warmup or ratio == warmup / steps
    assert len(repr(ratio)) <= len(repr(warmup / steps)) + 1
