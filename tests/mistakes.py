"""Mistakes that people make, and what is printed: ``python -m tests.mistakes`` writes tests/golden/mistakes.txt.

Each was read and judged: the answer says what came, where it stands, and what to do.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from click.testing import CliRunner

from lora_tune.__main__ import main
from tests.builders import ACTIVE_ENVIRONMENT

GOLDEN = Path(__file__).parent / "golden" / "mistakes.txt"

STUDY = """\
[workload]
kind = "command"
argv = ["python", "train.py", "--lr={LR}"]
log = { kind = "regex", eval = 'step (?P<step>\\d+) loss (?P<loss>\\S+)' }
[space]
LR = { type = "float", low = 1e-5, high = 1e-3, log = true }
[objective]
target = 0.5
[budget]
trials = 4
"""


@dataclass(frozen=True, slots=True)
class Mistake:
    """What somebody did. old, new: the edit of a good study that makes it wrong; words: the command."""

    what: str
    old: str = ""
    new: str = ""
    words: str = "sweep --study mine.toml --dry-run"


MISTAKES = (
    Mistake("no file of that name", words="sweep --study mien.toml"),
    Mistake("a shipped study misspelt", words="sweep --study tinny"),
    Mistake("no study given", words="sweep"),
    Mistake("an option misspelt", words="sweep --study mine.toml --trails 3"),
    Mistake("a command misspelt", words="swep --study mine.toml"),
    Mistake("a number that is none", words="sweep --study mine.toml --trials many"),
    Mistake("no trials at all", words="sweep --study mine.toml --trials 0 --dry-run"),
    Mistake("a status before any sweep", words="status --study mine.toml"),
    Mistake("a report before any sweep", words="report --study mine.toml"),
    Mistake("an export before any sweep", words="export --study mine.toml"),
    Mistake("a launcher that is not there", words="sweep --study mine.toml --launcher slrum --dry-run"),
    Mistake("a password on the command line", words="status --study mine.toml --storage postgresql://u:secret@db/x"),
    Mistake("a storage that is no URL", words="status --study mine.toml --storage sweep.db"),
    Mistake("no TOML", "trials = 4", "trials = "),
    Mistake("a text without quotes", 'kind = "command"', "kind = command"),
    Mistake("a table twice", "[budget]", "[space]\n[budget]"),
    Mistake("a section misspelt", "[budget]", "[budgets]"),
    Mistake("a key misspelt", "trials = 4", "trails = 4"),
    Mistake("half a trial", "trials = 4", "trials = 4.5"),
    Mistake("no end", "trials = 4", "parallel = 2"),
    Mistake("no goal", "[objective]\ntarget = 0.5\n", ""),
    Mistake("a target that is a text", "target = 0.5", 'target = "low"'),
    Mistake("a workload misspelt", 'kind = "command"', 'kind = "comand"'),
    Mistake("no workload", '[workload]\nkind = "command"', "[workload]"),
    Mistake("no command", 'argv = ["python", "train.py", "--lr={LR}"]\n', ""),
    Mistake("the command as one text", '["python", "train.py", "--lr={LR}"]', '"python train.py --lr={LR}"'),
    Mistake("a place without a parameter", "--lr={LR}", "--lr={RATE}"),
    Mistake("no space", "[space]\nLR = { type = \"float\", low = 1e-5, high = 1e-3, log = true }\n", ""),
    Mistake("a type misspelt", 'type = "float"', 'type = "flaot"'),
    Mistake("low above high", "low = 1e-5, high = 1e-3", "low = 1e-3, high = 1e-5"),
    Mistake("a log scale from zero", "low = 1e-5", "low = 0.0"),
    Mistake("a parameter with a dash", "LR = {", "learning-rate = {"),
    Mistake("a list without choices", 'LR = { type = "float", low = 1e-5, high = 1e-3, log = true }',
            'LR = { type = "categorical", choices = [] }'),
    Mistake("a choice twice", 'LR = { type = "float", low = 1e-5, high = 1e-3, log = true }',
            'LR = { type = "categorical", choices = [0.1, 0.1] }'),
    Mistake("a log format misspelt", 'kind = "regex"', 'kind = "regexp"'),
    Mistake("a pattern without its groups", "step (?P<step>\\d+) loss (?P<loss>\\S+)", "step \\d+ loss \\S+"),
    Mistake("a pattern that is none", "(?P<loss>\\S+)", "(?P<loss>\\S+"),
    Mistake("a setting of another format", "kind = \"regex\",", "kind = \"regex\", samples_per_epochs = 5,"),
    Mistake("a point outside of its range", "[budget]", "[search]\nenqueue = [{ LR = 1.0 }]\n[budget]"),
    Mistake("a point of a name that is not tuned", "[budget]", "[search]\nenqueue = [{ RATE = 1e-4 }]\n[budget]"),
    Mistake("a sampler misspelt", "[budget]", '[search]\nsampler = "tep"\n[budget]'),
    Mistake("a site profile that is not there", "[budget]", '[site]\nprofile = "sites/mine.toml"\n[budget]'),
    Mistake("a benchmark that is none", "target = 0.5", 'benchmark = "llama3_70b_lora"'),
    Mistake("a number that begins with its point", "low = 1e-5", "low = .00001"),
    Mistake("Python's spelling of truth", "log = true", "log = True"),
    Mistake("a colon in place of =", "trials = 4", "trials: 4"),
    Mistake("a pattern in double quotes", "'step (?P<step>\\d+) loss (?P<loss>\\S+)'",
            '"step (?P<step>\\d+) loss (?P<loss>\\S+)"'),
    Mistake("a named group as other languages write it", "(?P<loss>\\S+)", "(?<loss>\\S+)"),
    Mistake("a group called as the script calls it", "(?P<loss>\\S+)", "(?P<val_loss>\\S+)"),
    Mistake("the same parameter twice", "[objective]", "LR = 1e-4\n[objective]"),
    Mistake("a list as a parameter", 'LR = { type = "float", low = 1e-5, high = 1e-3, log = true }',
            "LR = [1e-4, 1e-3]"),
    Mistake("min and max", "low = 1e-5, high = 1e-3", "min = 1e-5, max = 1e-3"),
    Mistake("a range as others call it", 'type = "float"', 'type = "loguniform"'),
    Mistake("half an integer", 'type = "float", low = 1e-5, high = 1e-3', 'type = "int", low = 1.5, high = 4'),
    Mistake("a text for a number", "high = 1e-3", 'high = "1e-3"'),
    Mistake("a direction misspelt", "target = 0.5", 'target = 0.5\ndirection = "max"'),
    Mistake("a target that is no number", "target = 0.5", "target = nan"),
    Mistake("a key of another section", "trials = 4", "trials = 4\ntarget = 0.3"),
    Mistake("a time with its unit", "trials = 4", 'trials = 4\ntrial_minutes = "30m"'),
    Mistake("a negative budget", "trials = 4", "trials = 4\nnode_hours = -3"),
    Mistake("a number without end", "trials = 4", "trials = 99999999999999999999"),
    Mistake("a variable of the shell", "{LR}", "$LR"),
    Mistake("a place in small letters", "{LR}", "{lr}"),
    Mistake("a number among the words", '"--lr={LR}"', '"--lr", 3'),
    Mistake("a name with a space", "[workload]", 'name = "my study"\n[workload]'),
    Mistake("a log that is a text", 'log = { kind = "regex", eval = \'step (?P<step>\\d+) loss (?P<loss>\\S+)\' }',
            'log = "regex"'),
    Mistake("a pattern for JSON", 'kind = "regex", eval', 'kind = "jsonl", eval'),
    Mistake("a point that is no list", "[budget]", "[search]\nenqueue = { LR = 1e-4 }\n[budget]"),
    Mistake("nothing in the file", STUDY, ""),
    Mistake("a file of another format", words="sweep --study mine.yaml"),
    Mistake("the script in place of the study", words="sweep --study train.py"),
    Mistake("an option that is a key", words="sweep --study mine.toml --target 0.3"),
    Mistake("a log that is not there, for init", words="init --output new.toml --log nothing.log python train.py"),
    Mistake("a program that is not there, for init", words="init --output new.toml pyhton train.py"),
    Mistake("a log that is not there", words="logs --study mine.toml train.log"),
    Mistake("a log for a run that starts", words="sweep --study mine.toml --log train.log"),
    Mistake("nothing to begin with", words="init"),
    Mistake("a study that would be replaced", words="init --output mine.toml python train.py"),
    Mistake("a trial that is not there", words="steer --study mine.toml --stop 3"),
)  # fmt: skip


@contextlib.contextmanager
def _inside(folder: Path) -> Iterator[None]:
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


def answer(mistake: Mistake) -> tuple[int, str]:
    """The exit code, and what is printed, in a folder of its own."""
    folder = Path(tempfile.mkdtemp(prefix="mistake-"))
    assert mistake.old in STUDY, mistake
    (folder / "mine.toml").write_text(STUDY.replace(mistake.old, mistake.new, 1) if mistake.old else STUDY)
    (folder / "train.py").write_text("print('step 1 loss 0.4')\n")
    try:
        with _inside(folder):
            done = CliRunner(env=ACTIVE_ENVIRONMENT).invoke(
                main, mistake.words.split(), prog_name="lora-tune", terminal_width=120
            )
    finally:
        shutil.rmtree(folder)
    return done.exit_code, re.sub(rf"(?:/private)?{re.escape(str(folder))}", "HERE", done.output)


def text() -> str:
    """All mistakes with their answers."""
    parts = []
    for mistake in MISTAKES:
        code, said = answer(mistake)
        edit = f"# {mistake.old!r} -> {mistake.new!r}\n" if mistake.old else ""
        parts.append(f"== {mistake.what}\n{edit}$ lora-tune {mistake.words}\n{said.rstrip()}\nexit {code}\n")
    return "\n".join(parts)


if __name__ == "__main__":
    GOLDEN.write_text(text(), encoding="utf-8")
