"""``init``: a study from a command, its help text and its output; and what a dry run says of a log."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from unittest.mock import patch

import pytest
from click.testing import CliRunner, Result
from hypothesis import given
from hypothesis import strategies as st

from lora_tune import Sweep
from lora_tune.base.errors import StudyError
from lora_tune.cli import init as module
from lora_tune.cli.init import ScriptFacts, reachable, script_options, study_text
from lora_tune.config.study import Study, load_study, parse_study
from lora_tune.init import main as init
from lora_tune.sweep import main as sweep
from lora_tune.workloads.proposed_space import Option, from_command, from_help, merged_options, place_of, propose
from tests.waiting import wait_for

SCRIPT = """
import argparse
parser = argparse.ArgumentParser()
parser.add_argument("--learning_rate", "--learning-rate", type=float, default=3e-4, help="(default: %(default)s)")
parser.add_argument("-b", "--per_device_train_batch_size", type=int, default=4, help="(default: %(default)s)")
parser.add_argument("--lora-r", type=int)
parser.add_argument("--warmup_ratio", type=float, default=0.03, help="(default: %(default)s)")
parser.add_argument("--weight_decay", type=float, default=0.01, help="(default: %(default)s)")
parser.add_argument("--rank", type=int, help="rank of this process (torch.distributed)")
parser.add_argument("--seed", type=int)
parser.add_argument("--output-dir")
parser.add_argument("--fp16", action="store_true")
parser.parse_args()
open("trained", "w")
"""


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(SCRIPT)
    return tmp_path


def begun(*words: str) -> tuple[Result, Study | None]:
    done = CliRunner().invoke(init, list(words))
    return done, load_study(Path("mine.toml")) if done.exit_code == 0 else None


def test_the_help_text_of_argparse_gives_parameters_seed_and_folder(place: Path) -> None:
    done, study = begun("python", "train.py")
    assert study is not None, done.output
    assert study.workload.model_dump()["argv"] == [
        "python", "train.py", "--learning_rate={LR}", "--per_device_train_batch_size={BATCH_SIZE}",
        "--warmup_ratio={WARMUP_RATIO}", "--weight_decay={WEIGHT_DECAY}", "--output-dir={folder}/out",
    ]  # fmt: skip
    space = {name: parameter.model_dump() for name, parameter in study.space.items()}
    assert (space["LR"]["low"], space["LR"]["high"], space["LR"]["log"]) == (3e-5, 3e-3, True)
    assert space["BATCH_SIZE"]["choices"] == (2, 4, 8)
    assert space["WEIGHT_DECAY"] == {"type": "fixed", "value": 0.01}, "proposed, not searched yet"
    assert study.search.enqueue == ({"LR": 3e-4, "BATCH_SIZE": 4, "WARMUP_RATIO": 0.03},)
    assert not (place / "trained").exists(), "only its help text was asked for"


def test_what_the_command_says_counts_for_more_than_its_defaults() -> None:
    done, study = begun("python", "train.py", "--learning_rate", "1e-2", "-b", "32", "--fp16")
    assert study is not None, done.output
    argv = study.workload.model_dump()["argv"]
    assert argv[2:7] == ["--learning_rate", "{LR}", "-b", "{BATCH_SIZE}", "--fp16"]
    assert study.space["BATCH_SIZE"].model_dump()["choices"] == (16, 32, 64)


def test_a_log_alone_gives_a_study_that_says_what_to_edit(place: Path) -> None:
    (place / "run.log").write_text("step 10 val_loss 0.81234\nstep 20 val_loss 0.71234\n")
    done, study = begun("--log", "run.log")
    assert study is not None, done.output
    assert (study.objective.metric, study.objective.target) == ("val_loss", None), "the lowest eval counts"
    text = (place / "mine.toml").read_text()
    assert text.count("EDIT") == 2, "the command and the parameters"
    assert "# made from: step 10 val_loss 0.81234" in text
    assert "progress is counted in steps" in text
    assert "# target = 0.713   #" in text, "rounded to the side that is easier to reach"
    assert "2 evals read in it: 0.81234 at 10 steps, 0.71234 at 20 steps" in text


@pytest.mark.parametrize(("data_sets", "told"), [(2, "1 other value for"), (3, "2 other values for")])
def test_a_log_that_says_two_things_in_the_same_words_is_to_be_edited(place: Path, data_sets: int, told: str) -> None:
    """Two data sets, evaluated at the same steps: the first counts, and which that is stands nowhere."""
    lines = [f"step 10 val_loss {0.8 + number / 10}\n" for number in range(data_sets)]
    (place / "run.log").write_text("".join([*lines, "step 20 val_loss 0.7\n"]))
    done, _ = begun("--log", "run.log")
    assert done.exit_code == 0, done.output
    assert f"EDIT: {told} the same progress passed over, let the pattern say" in (place / "mine.toml").read_text()


def test_a_log_in_which_nothing_is_read_is_named(place: Path) -> None:
    (place / "run.log").write_text("hello\n")
    done, study = begun("--log", "run.log")
    assert study is not None, done.output
    assert "# EDIT: nothing in run.log looks like an eval; write the names of yours" in done.output


def test_a_mark_that_init_left_stops_the_sweep_with_its_line(place: Path) -> None:
    (place / "run.log").write_text("step 10 loss 0.8\nstep 20 loss 0.7\n")
    begun("--log", "run.log", "python", "train.py", "--lr=0.1")
    text = (place / "mine.toml").read_text()
    line = next(n for n, words in enumerate(text.splitlines(), start=1) if "EDIT" in words)
    stopped = CliRunner().invoke(sweep, ["--study", "mine.toml"])
    assert stopped.exit_code == 2
    mark = f"line {line} still says EDIT: this looks like a training loss; an eval's would be the better judge"
    assert mark in stopped.output
    assert "decide it, then delete the word EDIT" in stopped.output
    with pytest.raises(StudyError, match="still says EDIT"):
        Sweep("mine.toml").run()
    assert not (place / "sweeps").exists()
    dry = CliRunner().invoke(sweep, ["--study", "mine.toml", "--dry-run"])
    assert dry.exit_code == 0
    assert f"# no trial would run: {mark}" in dry.output
    (place / "mine.toml").write_text(text.replace("EDIT: ", ""))
    decided = CliRunner().invoke(sweep, ["--study", "mine.toml", "--dry-run"])
    assert decided.exit_code == 0, decided.output


DICTS = "{'loss': 1.2, 'epoch': 1.0}\n{'eval_loss': 1.4, 'eval_runtime': 0.1, 'epoch': 1.0}\n"
OBJECTS = '{"step": 10, "loss": 1.2}\n{"step": 10, "valid/loss": 1.4}\n'


@pytest.mark.parametrize(("log", "metric"), [(DICTS, "eval_loss"), (OBJECTS, "valid/loss")])
def test_the_objective_that_init_offers_is_the_evals_loss(log: str, metric: str, place: Path) -> None:
    (place / "run.log").write_text(log)
    begun("--log", "run.log", "python", "train.py")
    text = (place / "mine.toml").read_text()
    assert f'metric = "{metric}"   # the lowest eval of a trial counts' in text
    offered = text
    read = CliRunner().invoke(sweep, ["--study", "mine.toml", "--dry-run", "--log", "run.log"])
    assert "eval: loss 1.4" in read.output
    (place / "mine.toml").write_text(offered.replace(f'metric = "{metric}"', 'metric = "loss"'))
    training = CliRunner().invoke(sweep, ["--study", "mine.toml", "--dry-run"])
    assert training.exit_code == 2, "a training loss"


def test_the_time_to_the_best_is_one_line_away(place: Path) -> None:
    (place / "run.log").write_text("epoch 1 val_acc 0.71\nepoch 2 val_acc 0.82\n")
    _, study = begun("--log", "run.log", "python", "train.py")
    assert study is not None
    settings = study.objective
    assert (settings.metric, settings.direction, settings.score) == ("val_acc", "maximize", "best_value")
    text = (place / "mine.toml").read_text()
    assert "progress is counted in epochs" in text
    timed = parse_study(text.replace("# target = ", "target = "), place / "mine.toml").objective
    assert (timed.target, timed.score) == (0.82, "time_to_target")


def test_a_script_that_is_not_there_gets_no_study(place: Path) -> None:
    done, study = begun("python", "trian.py", "--lr", "1e-3")
    assert (done.exit_code, study) == (2, None)
    assert "trian.py: there is no such file here; give the command as you type it" in done.output


def test_the_dry_run_shows_how_the_log_is_read(place: Path) -> None:
    (place / "run.log").write_text("step 10 val_loss 0.8\nstep 20 val_loss 0.7\n")
    begun("--log", "run.log", "python", "train.py")
    dry = CliRunner().invoke(sweep, ["--study", "mine.toml", "--dry-run", "--log", "run.log"])
    assert dry.exit_code == 0, dry.output
    assert "# trial 0: LR=0.0003" in dry.output
    assert "1  eval: loss 0.8 at 20 samples" in dry.output, "steps of two samples, the batch size at its lower end"
    (place / "other.log").write_text("epoch 3 nothing here\n")
    dry = CliRunner().invoke(sweep, ["--study", "mine.toml", "--dry-run", "--log", "other.log"])
    assert (dry.exit_code, "none matched workload.log" in dry.output) == (4, True)
    begun_anyway = CliRunner().invoke(sweep, ["--study", "mine.toml", "--log", "run.log"])
    assert begun_anyway.exit_code == 2
    assert "--log goes with --dry-run" in begun_anyway.output


def test_a_script_that_trains_whatever_it_is_asked_is_ended(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "HELP_SECONDS", 1.0)
    (place / "deaf.py").write_text(
        "import os, subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "open('pid', 'w').write(str(child.pid)); time.sleep(600)\n"
    )
    done, study = begun("python", "deaf.py", "--lr", "0.1")
    assert "did not end within 1 s" in done.output
    assert study is not None, "the options of the command line are known all the same"
    child = int((place / "pid").read_text())
    stat = Path(f"/proc/{child}/stat")
    ended = lambda: not stat.exists() or stat.read_text().split()[2] == "Z"  # noqa: E731
    wait_for(ended, 30, "what it started is ended with it")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "nothing to look at; give the command that runs your script, --log FILE, or both"),
        (("--log", "no.log"), "--log no.log: there is no such file or folder"),
        (("no-such-program", "x"), "no-such-program: cannot be run (No such file or directory)"),
        (("--output", "mine.txt", "python", "train.py"), "a study file ends in .toml"),
        (("--output", "taken.toml", "python", "train.py"), "taken.toml exists and is not replaced"),
    ],
)
def test_what_cannot_be_done_is_said_with_a_remedy(words: tuple[str, ...], said: str, place: Path) -> None:
    (place / "taken.toml").touch()
    done, _ = begun(*words)
    assert done.exit_code == 2
    assert said in done.output


USAGE_C = "Usage: ./train\n  -l <float>  learning rate (default = 1e-3f)\n  -b <int>    batch size B (default = 32)\n"


def test_the_usage_text_of_a_program_in_c() -> None:
    assert {p.place: p.today for p in propose(from_help(USAGE_C))} == {"LR": "0.001", "BATCH_SIZE": "32"}


USAGES = [
    "  -r <eta>: set learning rate (default 0.1)\n-k <dimensions>: set number of dimensions (default 8)\n",
    "\t-eta <float>\n\t\tInitial learning rate; default 0.1\n\t-iter <int>\n\t\tNumber of iterations; default 25\n",
    "  --eta0 E   the initial learning rate (default: 0.1)\n",
]


@pytest.mark.parametrize("usage", USAGES)
def test_a_learning_rate_is_known_by_what_it_is_called_in_usage_texts(usage: str) -> None:
    assert {p.place: p.today for p in propose(from_help(usage))} == {"LR": "0.1"}


def test_a_compiled_program_that_knows_no_help_lists_its_options_where_it_is_called_without_any() -> None:
    calls = []

    def answer(command: tuple[str, ...]) -> tuple[str, str]:
        calls.append(command)
        return (USAGES[0] if len(command) == 1 else "iter 1 loss 0.5\n"), ""

    with patch("lora_tune.cli.init.ask_parser", answer):
        options, _ = script_options(("cat", "-r", "0.2", "data"), ask=True)
        assert {p.place: p.today for p in propose(options)} == {"LR": "0.2"}
        script_options(("python", "train.py"), ask=True)
    assert calls == [("cat", "-r", "0.2", "data", "--help"), ("cat",), ("python", "train.py", "--help")]


def test_a_batch_size_may_be_a_device_s() -> None:
    assert [p.place for p in propose([Option(flag="--batch-size-per-gpu", value="8")])] == ["BATCH_SIZE"]


def test_a_file_that_a_program_saves_is_the_trial_s_own() -> None:
    assert place_of(Option(flag="-save-file", value="vectors")) == "vectors"
    assert place_of(Option(flag="-input-file", value="data")) == ""


@pytest.mark.parametrize("words", [("--gin_bindings=train.lr=2e-3",), ("--gin_bindings", "train.lr=2e-3")])
def test_a_binding_within_an_option_is_filled_where_it_stands(words: tuple[str, ...]) -> None:
    _, study = begun("--no-help", "python", "train.py", *words, "--plain=a,b=c")
    assert study is not None
    filled = [word.replace("2e-3", "{LR}") for word in words]
    assert study.workload.model_dump()["argv"] == ["python", "train.py", *filled, "--plain=a,b=c"]
    assert study.search.enqueue == ({"LR": 2e-3},)


@pytest.mark.parametrize(
    ("words", "filled"),
    [
        (("--logging_dir", "logs", "--output_dir", "out"), ["{folder}/out", "{folder}/output_dir"]),
        (("--logging_dir", "out", "--output_dir", "out"), ["{folder}/out", "{folder}/out"]),
        (("--save", "saved/model.pt"), ["{folder}/model.pt"]),
        (("--work-dir", "out", "--save_model_to", "best.bin"), ["{folder}/out", "{folder}/best.bin"]),
        (("--log", "a/run.csv", "--out", "b/run.csv"), ["{folder}/run.csv", "{folder}/out.csv"]),
        (("--save", "best", "--checkpoint", "base.pt", "--log", "info"), ["best", "base.pt", "info"]),
        (("--work-dir", ".", "--ckpt-path", "base.ckpt"), [".", "base.ckpt"]),
    ],
)
def test_each_option_that_names_a_place_names_one_of_the_trials_own(words: tuple[str, ...], filled: list[str]) -> None:
    done, study = begun("--no-help", "python", "train.py", *words)
    assert study is not None, done.output
    assert study.workload.model_dump()["argv"][3::2] == filled


def test_a_default_that_names_a_file_is_a_file_of_each_trial() -> None:
    save = Option(flag="--save", value="model.pt")
    text = study_text(ScriptFacts(command=("python", "main.py"), options=[save]))
    assert '"--save={folder}/model.pt"' in text


def test_commands_are_named_as_init_was_called(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for program, spelling in (("pytest", "-m lora_tune.sweep"), ("/opt/bin/lora-tune", "/opt/bin/lora-tune sweep")):
        monkeypatch.setattr(sys, "argv", [program, "init"])
        done, _ = begun("--no-help", "python", "train.py")
        (place / "mine.toml").unlink()
        assert spelling in done.output
        assert not re.search(r"(?<!/)\blora-tune sweep", done.output)


def test_the_relay_watches_every_folder_that_a_trial_writes(place: Path) -> None:
    (place / "metrics.csv").write_text("step,val_loss\n10,0.8\n20,0.7\n")
    done, study = begun(
        "--no-help", "--log", "metrics.csv", "python", "train.py", "--log_dir", "logs", "--output_dir", "out"
    )
    assert study is not None, done.output
    assert study.workload.model_dump()["argv"][3:5] == ["{folder}", "--"]


@pytest.mark.parametrize("flag", ["--learn_rate", "--learn-rate", "--lrate", "--lr_init", "--learning_rate"])
def test_a_learning_rate_is_known_by_the_names_that_scripts_give_it(flag: str) -> None:
    assert {p.place: p.today for p in propose(from_command((flag, "1e-3")))} == {"LR": "0.001"}


@pytest.mark.parametrize(
    ("text", "words", "today"),
    [
        ("", ("-r", "saved/ckpt.pth"), None),
        ("", ("--dim", "512"), None),
        ("", ("--rank", "0"), None),
        ("  --dim INT  width of the model (default: 512)", (), None),
        ("  --r PATH  resume a LoRA from here", ("--r=saved/ckpt.pth",), None),
        ("", ("--lora_r", "16"), "16"),
        ("", ("peft.r=8",), "8"),
        ("  --rank INT  rank of the LoRA matrices (default: 4)", (), "4"),
    ],
)
def test_a_rank_is_a_whole_number_of_an_option_that_speaks_of_lora(
    text: str, words: tuple[str, ...], today: str | None
) -> None:
    proposed = {p.place: p.today for p in propose(merged_options(from_command(words), from_help(text)))}
    assert proposed.get("LORA_RANK") == today


@pytest.mark.parametrize(
    ("words", "high"),
    [
        (("--warmup_steps=20",), 80),
        (("--warmup_steps=20", "--max_steps=60"), 30),
        (("--warmup_steps=40", "--max_steps=60"), 40),
        (("--warmup_iters=200", "--max_iters=5000", "--lr_decay_iters=500"), 250),
        (("--warmup_steps=20", "--max_steps=-1"), 80),
        (("--warmup_steps=20", "--eval_steps=10"), 80),
        (("--warmup_steps=1", "--steps=1"), None),
    ],
)
def test_warm_up_ends_within_the_steps_that_the_command_states(words: tuple[str, ...], high: int | None) -> None:
    ranges = {p.place: p.toml for p in propose(from_command(words))}
    assert re.findall(r"high = (\d+)", ranges.get("WARMUP_STEPS", "")) == ([] if high is None else [str(high)])


@given(st.text(max_size=400), st.lists(st.text(max_size=12), max_size=6))
def test_any_help_text_and_any_command_line_give_proposals_or_none(text: str, words: list[str]) -> None:
    propose(merged_options(from_command(words), from_help(text)))


@given(st.floats(1e-6, 1e6), st.booleans())
def test_the_target_is_reached_by_the_run_that_it_was_taken_from(best: float, rising: bool) -> None:
    target = reachable(best, rising=rising)
    slack = abs(best) * 1e-6
    assert target <= best + slack if rising else target >= best - slack
    assert abs(target - best) <= 0.011 * best


def test_it_is_a_command_of_its_own(place: Path) -> None:
    import subprocess

    environment = {**os.environ, "PYTHONPATH": str(Path(module.__file__).parents[2])}
    done = subprocess.run(
        [sys.executable, "-m", "lora_tune.init", "--no-help", "python", "train.py", "--lr=0.1"],
        env=environment, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert 'argv = ["python", "train.py", "--lr={LR}"]' in (place / "mine.toml").read_text()
