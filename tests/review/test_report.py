"""The report: one file that loads nothing, says the result first, and survives whatever a study calls itself."""

from __future__ import annotations

import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from lora_tune.cli import commands, report
from lora_tune.cli.options import Feedback
from lora_tune.config.study import Study
from lora_tune.review.page import searched_names, trial_rows, value_text
from lora_tune.review.summary import overview, saved_node_hours
from lora_tune.store.port import Remark, Request
from lora_tune.store.records import StudyRecords, Verdict
from tests.browser import Browser
from tests.builders import BEGAN, HOSTILE, STUDY, hostile, stored, study_of, sweep_of
from tests.confirmed_sweep import after_confirm

NOW = BEGAN + 30 * 3600


@pytest.fixture(scope="module")
def study() -> Study:
    return study_of()


@pytest.fixture(scope="module")
def sweep(study: Study) -> StudyRecords:
    return sweep_of(study, trials=40, running=2)


class _Elements(HTMLParser):
    """Every element of a page with its attributes, and all its text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data


MANY = STUDY.replace(
    "layout =",
    "".join(f"dropout_of_block_{i} = {{ type = 'float', low = 0.0, high = 1.0 }}\n" for i in range(9)) + "layout =",
)
"""A study of twelve tuned parameters."""


def test_nothing_is_loaded_from_anywhere(study: Study, sweep: StudyRecords) -> None:
    page = _Elements(report.report_html(study, sweep, NOW))
    assert not [e for e in page.elements if e[0] in ("link", "img", "iframe", "object", "embed")]
    assert not [a for _, a in page.elements if a.keys() & {"src", "href", "srcset", "action", "data"}]
    policy = next(a["content"] or "" for t, a in page.elements if a.get("http-equiv") == "Content-Security-Policy")
    assert policy.startswith("default-src 'none'")
    assert "unsafe-inline'; script-src 'sha256-" in policy


def test_the_summary_stands_first_and_agrees_with_the_records(study: Study, sweep: StudyRecords) -> None:
    page = report.report_html(study, sweep, NOW)
    seen = overview(study, sweep, NOW)
    assert seen.best is not None
    order = [page.index(f'id="{name}"') for name in ("best", "figures", "trials", "failures", "provenance")]
    assert order == sorted(order)
    head = _Elements(page[: order[1]]).text
    assert report.duration(seen.best.objective) in head
    assert f"trial {seen.best.number}; one run, picked for being the best" in head
    for value in seen.recommended.trial.parameters.values():
        assert value_text(value) in head
    assert sweep.digest in page


def test_every_trial_has_its_row(study: Study, sweep: StudyRecords) -> None:
    rows = re.findall(r'<tr data-t="(\d+)" data-state="([^"]+)">', report.report_html(study, sweep, NOW))
    expected = [(str(n), t.verdict.value if t.verdict else "running") for n, t in sweep.trials.items()]
    assert rows == expected


def test_a_throughput_study_has_one_column_of_samples_per_second(study: Study, sweep: StudyRecords) -> None:
    speed = study_of(STUDY.replace("target = 0.925", 'score = "throughput"'))
    page = report.report_html(speed, sweep_of(speed), NOW)
    assert page.count("<button>Samples/s</button>") == 1
    assert "<button>Samples</button>" not in page
    for text in (page, report.report_html(study, sweep, NOW)):
        table = text[text.index("<thead>", text.index('id="trials"')) :]
        rows = re.findall(r"<tr.*?</tr>", table[: table.index("</table>")], re.DOTALL)
        assert len({len(re.findall("<t[hd][ >]", row)) for row in rows}) == 1, "every row has a cell for every head"


def test_the_table_names_layouts_short_and_the_machine_as_it_is(study: Study, sweep: StudyRecords) -> None:
    page = report.report_html(study, sweep, NOW)
    table = page[page.index('id="trials"') : page.index('id="provenance"')]
    assert "tp4 pp1" not in table
    assert "tp4 minibs" in table
    assert "H100: 1 node x 8 GPUs, launcher slurm" in page
    alone = study_of(STUDY.replace("gpus_per_node = 8", "gpus_per_node = 1"))
    assert "1 node x 1 GPU, launcher" in report.report_html(alone, sweep_of(alone), NOW)


def test_what_the_search_varies_is_bold_and_what_is_fixed_is_not() -> None:
    text = STUDY.replace("tp = [1, 2, 4, 8]", "tp = [4]").replace("LR =", 'WEIGHT = 0.1\nHALF = "MAX_STEPS / 2"\nLR =')
    text = text.replace('HALF = "MAX_STEPS / 2"', 'HALF = { type = "derived", formula = "MAX_STEPS / 2" }')
    study = study_of(text)
    assert searched_names(study) == {"LR", "MAX_STEPS", "layout", "MINIBS"}
    page = report.report_html(study, sweep_of(study), NOW)
    bold = set(re.findall("<div class=tuned><dt>([^<]+)</dt>", page))
    plain = set(re.findall("<div><dt>([^<]+)</dt>", page))
    assert bold == {"LR", "MAX_STEPS", "MINIBS"}
    assert {"WEIGHT", "HALF", "TP", "GBS"} <= plain


def test_what_people_wrote_stands_in_the_report_with_its_tags_as_text(study: Study, sweep: StudyRecords) -> None:
    text = "the layout that Ben wanted #rerun\n<script>document.title='owned'</script>"
    notes = [
        Remark(trial=-1, version=1, text="ask Ann before you export", who="ben@login1", written_at=BEGAN),
        Remark(trial=3, version=2, text=text, who="ann@login1", written_at=BEGAN + 60),
    ]
    page = report.report_html(study, sweep, NOW, Feedback(remarks=notes))
    shown = _Elements(page).text
    for words in (
        "the sweep",
        "ask Ann before you export",
        "trial 3",
        "that Ben wanted #rerun",
        "ann@login1, 2025-10-09",
    ):
        assert words in shown
    assert "<td>rerun</td>" in page
    assert "<script>document.title" not in page
    assert 'id="notes"' not in report.report_html(study, sweep, NOW)


def test_who_asked_what_of_the_sweep_and_when_stands_in_the_report(study: Study, sweep: StudyRecords) -> None:
    asked = Request(
        number=0, kind="stop", what={"trial": 3}, who="ann@login1", asked_at=BEGAN, answered_at=BEGAN + 3,
        accepted=True, answer="trial 3 is asked to end",
    )  # fmt: skip
    said = _Elements(report.report_html(study, sweep, NOW, Feedback(requests=[asked]))).text
    for words in ("2025-10-09 08:53 UTC", "ann@login1", "stop trial 3", "trial 3 is asked to end"):
        assert words in said
    assert 'id="requests"' not in report.report_html(study, sweep, NOW)


def test_a_thousand_trials_with_long_curves_are_a_page_of_less_than_a_megabyte_and_a_half(study: Study) -> None:
    """2,000 trials stay under 3 MB: python -m benchmarks.report."""
    many = sweep_of(study, trials=1000, evals=60)
    assert len(report.report_html(study, many, NOW).encode()) < 1.5e6


def test_a_cell_is_sorted_by_its_value_and_not_by_its_words(study: Study, sweep: StudyRecords) -> None:
    columns = {c.head: c for c in trial_rows(study, sweep, NOW).columns}
    times = columns["Time to target"].cells
    for cell, trial in zip(times, sweep.trials.values(), strict=True):
        known = trial.metrics.objective
        assert cell.sort == (None if known is None else pytest.approx(known))
    assert columns["MAX_STEPS"].numeric
    assert not columns["layout"].numeric


def test_what_is_said_below_a_figure_is_in_it(study: Study) -> None:
    few = report.report_html(study, sweep_of(study, trials=4), NOW)
    many = report.report_html(study, sweep_of(study, trials=40), NOW)
    assert "a curve is fitted from 5 trials of one batch size on" in few
    assert "parabola" not in few
    assert "the curve is a parabola" in many


def test_a_sweep_without_a_trial_still_gives_a_page(study: Study) -> None:
    empty = StudyRecords(name="built", digest=study.digest, study_toml="", began_at=BEGAN)
    page = report.report_html(study, empty, NOW)
    assert "none yet" in page
    assert "<svg" not in page


def test_savings_are_the_rest_of_what_stopped_trials_would_have_run(study: Study, sweep: StudyRecords) -> None:
    stopped = next(t for t in sweep.trials.values() if t.verdict is Verdict.PRUNED)
    one = replace(sweep, trials={stopped.number: stopped})
    last = one.last_evals(stopped.number)[-1]
    steps, batch = stopped.parameters["MAX_STEPS"], stopped.parameters["GBS"]
    assert isinstance(steps, int)
    assert isinstance(batch, int)
    used = sum((a.ended_at or 0) - (a.started_at or 0) for a in one.attempts_of(stopped.number)[-1:])
    left = (steps * batch - last.samples) * last.seconds / last.samples
    allowed = study.budget.trial_minutes * 60 - used
    assert saved_node_hours(study, one) == pytest.approx(max(0.0, min(left, allowed)) / 3600)


def test_the_file_is_replaced_in_one_step(study: Study, sweep: StudyRecords, tmp_path: Path) -> None:
    file = tmp_path / "report.html"
    file.write_text("old")
    report.write_report(study, sweep, file)
    assert file.read_text(encoding="utf-8").rstrip().endswith("</html>")
    assert [p.name for p in tmp_path.iterdir()] == ["report.html"]


def test_hostile_texts_are_only_texts() -> None:
    study, sweep = hostile()
    page = report.report_html(study, sweep, NOW)
    parsed = _Elements(page)
    assert [t for t, _ in parsed.elements].count("script") == 1
    assert not [a for _, a in parsed.elements if any(name.startswith("on") for name in a)]
    assert "document.title='owned'" in parsed.text
    assert "{{ 7*7 }}" in parsed.text
    assert "\x1b" not in page


def test_secrets_of_the_study_file_stay_out_of_a_file_that_is_sent_around(study: Study, sweep: StudyRecords) -> None:
    secret = "hf_abcdefghijklmnopqrstuvwxyz012345"
    told = replace(sweep, study_toml=f'[site.environment]\nHF_TOKEN = "{secret}"\nWANDB_API_KEY = "0123456789abcdef"\n')
    page = report.report_html(study, told, NOW)
    assert "HF_TOKEN" in page
    assert secret not in page
    assert "0123456789abcdef" not in page


@pytest.mark.browser
def test_rows_sort_by_a_click_on_a_head_unknown_values_last(
    browser: Browser, study: Study, sweep: StudyRecords, tmp_path: Path
) -> None:
    report.write_report(study, sweep, tmp_path / "report.html")
    browser.open((tmp_path / "report.html").as_uri())
    times = "return [...document.querySelectorAll('#table tbody tr')].map(r => r.cells[2].dataset.v)"
    browser.click("#table th button", "Time to target")
    shown = browser.run(times)
    known = [float(t) for t in shown if t]
    assert known == sorted(known)
    assert shown[len(known) :] == [""] * (len(shown) - len(known))
    browser.click("#table th button", "Time to target")
    falling = [float(t) for t in browser.run(times) if t]
    assert falling == sorted(known, reverse=True)
    browser.run("const s = document.getElementById('filter'); s.value = 'pruned'; s.dispatchEvent(new Event('change'))")
    left = browser.run("return [...document.querySelectorAll('#table tbody tr')].filter(r => !r.hidden).length")
    assert left == sum(t.verdict is Verdict.PRUNED for t in sweep.trials.values())
    assert browser.complaints() == []


@pytest.mark.browser
@pytest.mark.parametrize(("width", "dark"), [(1280, False), (1280, True), (390, False)])
def test_nothing_sticks_out_on_a_desk_in_the_dark_or_on_a_phone(
    browser: Browser, study: Study, sweep: StudyRecords, tmp_path: Path, width: int, dark: bool
) -> None:
    report.write_report(study, sweep, tmp_path / "report.html")
    browser.look(width=width, dark=dark)
    browser.open((tmp_path / "report.html").as_uri())
    assert browser.run("return document.documentElement.scrollWidth") <= width
    paper = browser.run("return getComputedStyle(document.body).backgroundColor")
    assert (paper == "rgb(255, 255, 255)") is not dark
    for box in browser.run(
        "return [...document.querySelectorAll('svg.chart')].map(s => s.getBoundingClientRect().width)"
    ):
        assert 250 < box <= width


@pytest.mark.browser
@pytest.mark.parametrize("text", [STUDY, MANY], ids=["three parameters", "twelve parameters"])
@pytest.mark.parametrize("width", [1600, 1280, 1000, 600, 390])
def test_no_column_of_the_table_is_cut(browser: Browser, tmp_path: Path, text: str, width: int) -> None:
    study = study_of(text)
    report.write_report(study, sweep_of(study, trials=12), tmp_path / "report.html")
    browser.look(width=width)
    browser.open((tmp_path / "report.html").as_uri() + "#compare=0,1,2,3,4,5")
    if width > 600:
        assert browser.run("return [...document.querySelectorAll('.wide')].every(w => w.scrollWidth <= w.clientWidth)")
    frame = browser.run("return document.querySelector('.trials .wide').getBoundingClientRect().right")
    ends = "return [...document.querySelectorAll('#table td')].map(c => c.getBoundingClientRect().right)"
    assert max(browser.run(ends)) <= frame
    heads = "[...document.querySelectorAll('#table th')].map(h => h.checkVisibility() ? h.textContent : '')"
    labels = (
        "[...document.querySelectorAll('#table tr:nth-child(2) td')].map(c => getComputedStyle(c, '::before').content)"
    )
    said = " ".join(browser.run(f"return [...{heads}, ...{labels}]"))
    assert all(name in said for name in ("MAX_STEPS", "layout"))


@pytest.mark.browser
def test_on_a_phone_a_confirmed_configuration_is_a_block_of_named_values(
    browser: Browser, study: Study, sweep: StudyRecords, tmp_path: Path
) -> None:
    confirmed, chosen, passed = after_confirm(study, sweep)
    report.write_report(study, confirmed, tmp_path / "report.html")
    browser.look(width=390)
    browser.open((tmp_path / "report.html").as_uri())
    table = browser.find("#confirmed ~ .wide")
    assert browser.run("const w = document.querySelector('#confirmed ~ .wide'); return w.scrollWidth <= w.clientWidth")
    for trial, word in ((chosen, "chosen"), (passed, "passed over")):
        assert str(trial.number) in table.text
        assert word in table.text
    label = "return getComputedStyle(document.querySelector('#confirmed ~ .wide td:last-child'), '::before').content"
    assert browser.run(label) == '"Node-hours "'
    browser.look(width=1280)
    assert browser.run(label) == "none"


def test_the_report_says_of_a_trial_what_more_seeds_have_shown_of_it(study: Study, sweep: StudyRecords) -> None:
    confirmed, chosen, passed = after_confirm(study, sweep)
    column = trial_rows(study, confirmed, NOW).columns[1]
    said = {number: cell.text for number, cell in zip(confirmed.trials, column.cells, strict=True)}
    assert (said[chosen.number], said[passed.number]) == ("confirmed", "passed over")
    page = report.report_html(study, confirmed, NOW)
    assert '<b class="state reached">confirmed</b>' in page
    assert '<b class="state reached">passed over</b>' in page


def _marked(browser: Browser, name: str) -> set[tuple[str, str]]:
    """(tag, trial) of what carries a class now."""
    found = browser.run(f"return [...document.querySelectorAll('.{name}')].map(e => [e.tagName, e.dataset.t])")
    return {(tag, trial) for tag, trial in found}


@pytest.mark.browser
def test_pointing_at_a_row_shows_its_trial_in_every_figure(
    browser: Browser, study: Study, sweep: StudyRecords, tmp_path: Path
) -> None:
    from selenium.webdriver.common.action_chains import ActionChains

    report.write_report(study, sweep, tmp_path / "report.html")
    browser.open((tmp_path / "report.html").as_uri())
    best = sweep.best()
    assert best is not None
    row = browser.find(f"#table tr[data-t='{best.number}']")
    browser.run(f"document.querySelector(\"#table tr[data-t='{best.number}']\").scrollIntoView({{block: 'center'}})")
    ActionChains(browser.driver).move_to_element(row).perform()
    shown = {(tag, str(best.number)) for tag in ("TR", "path", "circle", "rect")}
    browser.until(lambda: _marked(browser, "hot") == shown, "row, curve, point and bar are marked")


@pytest.mark.browser
def test_selecting_marks_in_figures_and_rows_compares_their_trials(
    browser: Browser, study: Study, sweep: StudyRecords, tmp_path: Path
) -> None:
    from selenium.webdriver.common.action_chains import ActionChains

    report.write_report(study, sweep, tmp_path / "report.html")
    browser.open((tmp_path / "report.html").as_uri())
    one, two = (t.number for t in sorted(sweep.reached(), key=lambda t: t.objective)[:2])
    mark = browser.find(f"#spending circle[data-t='{one}']")
    browser.run(f"document.querySelector(\"#spending circle[data-t='{one}']\").scrollIntoView({{block: 'center'}})")
    ActionChains(browser.driver).move_to_element(mark).click().perform()
    browser.until(lambda: ("TR", str(one)) in _marked(browser, "picked"), "the row is marked")
    assert not browser.run("return document.getElementById('compare').checkVisibility()")
    browser.click(f"#table tr[data-t='{two}'] input")
    compared = browser.find("#compared", f"Trial {two}").text
    for trial in (sweep.trials[one], sweep.trials[two]):
        assert value_text(trial.tuned["LR"]) in compared
    assert browser.run("return location.hash") == f"#compare={one},{two}"
    assert f"--clone {two} " in browser.find("#compare code").text
    differs = browser.run("return [...document.querySelectorAll('tr.differs th')].map(t => t.textContent)")
    assert "LR" in differs
    assert "State" not in differs
    browser.click("#clear")
    browser.until(lambda: _marked(browser, "picked") == set(), "nothing is compared")
    assert browser.complaints() == []


@pytest.mark.browser
def test_a_hostile_report_runs_nothing(browser: Browser, tmp_path: Path) -> None:
    study, sweep = hostile()
    report.write_report(study, sweep, tmp_path / "report.html")
    browser.open((tmp_path / "report.html").as_uri())
    browser.click("summary", "The study file")
    assert browser.run("return document.title") == "hostile: sweep report"
    assert "document.title='owned'" in browser.find("details pre").text
    assert browser.complaints() == []


@pytest.mark.browser
def test_a_print_of_it_is_light_and_complete(
    browser: Browser, study: Study, sweep: StudyRecords, tmp_path: Path
) -> None:
    report.write_report(study, sweep, tmp_path / "report.html")
    browser.look(dark=True)
    browser.open((tmp_path / "report.html").as_uri())
    browser.run("window.seen = null; window.onbeforeprint = () => {}")
    browser.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print", "features": []})
    assert browser.run("return getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert browser.run("return getComputedStyle(document.querySelector('.trials .wide')).maxHeight") == "none"
    browser.pdf(tmp_path / "report.pdf")
    assert (tmp_path / "report.pdf").read_bytes().startswith(b"%PDF")


def test_the_command_writes_into_the_sweep_folder(tmp_path: Path, study: Study, sweep: StudyRecords) -> None:
    from click.testing import CliRunner

    stored(tmp_path / "built", sweep)
    result = CliRunner().invoke(commands.report, ["--study", "built", "--output", str(tmp_path / "built")])
    assert result.exit_code == 0, result.output
    assert Path(result.output.strip()) == tmp_path / "built" / "report.html"
    assert HOSTILE not in result.output
