"""Parameters that exist only under a choice of another: what a study may say, and what each point then holds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lora_tune.base.errors import StudyError
from lora_tune.config.layout import parse_layout
from lora_tune.config.parameters import CategoricalParameter, FloatParameter, IntParameter, Parameter
from lora_tune.config.space import Space
from lora_tune.config.study import Study, parse_study
from lora_tune.controller.steering import refusal_of_values

STUDY = """
[workload]
kind = "command"
argv = ["bash", "train.sh"]
[site]
launcher = "local"
gpus_per_node = 8
[space]
MOMENTUM = { type = "float", low = 0.5, high = 0.99, when = { OPTIMIZER = "sgd" } }
OPTIMIZER = { type = "categorical", choices = ["adam", "sgd", "lion"] }
BETA2 = { type = "float", low = 0.9, high = 0.9999, when = { OPTIMIZER = ["adam", "lion"] } }
AMSGRAD = { type = "categorical", choices = [true, false], when = { OPTIMIZER = "adam" } }
DECAY = { type = "derived", formula = "1 - BETA2", when = { OPTIMIZER = "adam" } }
OVERLAP = { type = "categorical", choices = [0, 1], when = { TP = [2, 4] } }
EAGER = { type = "fixed", value = 1, when = { TP = 1 } }
layout = { type = "layout", tp = [1, 2, 4], gbs = [8] }
[objective]
target = 0.5
[budget]
trials = 60
"""


def study_of(text: str = STUDY) -> Study:
    return parse_study(text, Path("toy.toml"))


def layout_of(study: Study, tp: int) -> str:
    return next(str(x) for x in study.search_space.layouts("layout").layouts if x.tp == tp)


def point(study: Study, tp: int = 1, **values: Any) -> dict[str, Any]:
    return {"OPTIMIZER": "sgd", "MOMENTUM": 0.9, "layout": layout_of(study, tp), **values}


def test_a_trial_is_given_what_exists_for_it() -> None:
    study = study_of()
    sgd = study.search_space.resolve(point(study))
    assert (sgd["MOMENTUM"], sgd["EAGER"]) == (0.9, 1)
    assert not sgd.keys() & {"BETA2", "AMSGRAD", "DECAY", "OVERLAP"}
    adam = study.search_space.resolve(point(study, 2, OPTIMIZER="adam", BETA2=0.95, AMSGRAD=True, OVERLAP=1))
    assert (adam["BETA2"], adam["AMSGRAD"], adam["OVERLAP"]) == (0.95, True, 1)
    assert adam["DECAY"] == pytest.approx(0.05)
    assert not adam.keys() & {"MOMENTUM", "EAGER"}


def test_optunas_space_is_flat_and_an_absent_value_stands_in_its_middle() -> None:
    study = study_of()
    space = study.search_space
    whole = space.conditions.complete(point(study))
    assert whole.keys() == space.distributions().keys()
    assert (whole["BETA2"], whole["AMSGRAD"], whole["OVERLAP"]) == (0.95, True, 0)
    assert space.conditions.complete({}) == {}, "the machine's own config, which is no point, stays none"


@pytest.mark.parametrize(
    ("was", "now", "words"),
    [
        ('"sgd" } }', '"sdg" } }', "MOMENTUM: when needs OPTIMIZER = 'sdg', which never occurs: it is one of 'adam'"),
        ("TP = [2, 4]", "TP = [2, 8]", "OVERLAP: when needs TP = 8, which never occurs: it is one of 1, 2, 4"),
        ("TP = 1 }", "TP = true }", "EAGER: when needs TP = True, which never occurs"),
        ("TP = [2, 4]", "BETA2 = 0.9", "OVERLAP: when names BETA2, which is float; it may name categorical, int"),
        ("TP = [2, 4]", "NOPE = 1", "OVERLAP: when names NOPE, which is not a parameter of this space"),
        ("TP = [2, 4]", "OVERLAP = 1", "OVERLAP: the conditions of OVERLAP need each other"),
        ("TP = [2, 4]", "AMSGRAD = true, OPTIMIZER = 'sgd'", "OVERLAP: never exists: it and what it needs want"),
        ('"1 - BETA2", when = { OPTIMIZER = "adam" }', '"1 - BETA2"', "DECAY: its formula needs BETA2, which exists"),
        ("when = { TP = 1 }", 'when = "TP"', "EAGER.when: 'TP' is not a table of values"),
        ("when = { TP = 1 }", "when = { TP = [] }", "EAGER.when: TP has no values"),
        ("when = { TP = 1 }", "when = { TP = { a = 1 } }", "EAGER.when: {'a': 1} cannot be a parameter's value"),
    ],
)  # fmt: skip
def test_a_condition_that_cannot_be_is_refused_with_what_can(was: str, now: str, words: str) -> None:
    assert STUDY.count(was) == 1
    with pytest.raises(StudyError) as refused:
        study_of(STUDY.replace(was, now))
    assert words in str(refused.value)


def test_every_trial_has_a_node_count() -> None:
    without = "\n".join(line for line in STUDY.splitlines() if not line.startswith(("OVERLAP", "EAGER", "layout")))
    nodes = 'NODES = { type = "int", low = 1, high = 2, when = { OPTIMIZER = "sgd" } }'
    with pytest.raises(StudyError, match="NODES: every trial has a node count; remove when"):
        study_of(without.replace("[objective]", f"{nodes}\n[objective]"))


def test_a_circle_of_conditions_is_found_wherever_it_begins() -> None:
    text = STUDY.replace(
        "TP = [2, 4] }", "A = 1 } }\nA = { type = 'int', low = 0, high = 1, when = { B = 1 } }\n"
        "B = { type = 'int', low = 0, high = 1, when = { A = 1 }"
    )  # fmt: skip
    with pytest.raises(StudyError, match="the conditions of A, B need each other"):
        study_of(text)


def test_a_point_that_names_what_does_not_exist_there_is_refused() -> None:
    study = study_of()
    assert refusal_of_values(study, {"OPTIMIZER": "adam", "BETA2": 0.95}) == ""
    words = "BETA2 exists only where OPTIMIZER = 'adam' or 'lion'"
    assert words in refusal_of_values(study, {"OPTIMIZER": "sgd", "BETA2": 0.95})
    with pytest.raises(StudyError) as refused:
        study_of(STUDY + '[search]\nenqueue = [{ OPTIMIZER = "sgd", BETA2 = 0.95 }]\n')
    assert "search.enqueue.0.BETA2: exists only where OPTIMIZER" in str(refused.value)


def test_a_study_without_conditions_keeps_its_hash() -> None:
    """The key is not written where it is empty, so that sweeps of before go on."""
    space = study_of(STUDY).model_dump(mode="json")["space"]
    assert "when" not in space["OPTIMIZER"]
    assert space["MOMENTUM"]["when"] == {"OPTIMIZER": ["sgd"]}


@st.composite
def spaces(draw: st.DrawFn) -> Space:
    """Up to seven parameters, each of which may exist only under values of some before it."""
    parameters: dict[str, Parameter] = {}
    for at in range(draw(st.integers(2, 7))):
        when: dict[str, Any] = {}
        for parent in (
            draw(st.lists(st.sampled_from(sorted(parameters)), max_size=2, unique=True)) if parameters else ()
        ):
            found = parameters[parent]
            if isinstance(found, CategoricalParameter):
                when[parent] = draw(st.lists(st.sampled_from(found.choices), min_size=1, unique=True))
            elif isinstance(found, IntParameter):
                when[parent] = draw(st.lists(st.integers(found.low, found.high), min_size=1, unique=True))
        kind = draw(st.sampled_from(("float", "int", "categorical")))
        if kind == "float":
            parameters[f"P{at}"] = FloatParameter(type="float", low=0.1, high=8.0, log=draw(st.booleans()), when=when)
        elif kind == "int":
            parameters[f"P{at}"] = IntParameter(type="int", low=1, high=5, when=when)
        else:
            parameters[f"P{at}"] = CategoricalParameter(type="categorical", choices=("a", "b", "c"), when=when)
    order = draw(st.permutations(sorted(parameters)))
    return Space({name: parameters[name] for name in order}, nodes=1, gpus_per_node=0)


def drawn(data: st.DataObject, space: Space) -> dict[str, Any]:
    """A point of the flat space, as Optuna draws it."""
    values: dict[str, Any] = {}
    for name, parameter in space.parameters.items():
        if isinstance(parameter, CategoricalParameter):
            values[name] = data.draw(st.sampled_from(parameter.choices))
        elif isinstance(parameter, IntParameter):
            values[name] = data.draw(st.integers(parameter.low, parameter.high))
        else:
            assert isinstance(parameter, FloatParameter)
            values[name] = parameter.written(data.draw(st.floats(parameter.low, parameter.high)))
    return values


def exists(space: Space, name: str, values: dict[str, Any]) -> bool:
    """By the words of the documentation: each parent exists and has one of the values."""
    when = getattr(space.parameters[name], "when", {})
    return all(exists(space, parent, values) and values[parent] in allowed for parent, allowed in when.items())


@given(spaces(), st.data())
def test_what_exists_follows_from_the_parents_in_any_order_and_back(space: Space, data: st.DataObject) -> None:
    values = drawn(data, space)
    conditions = space.conditions
    present = {name: value for name, value in values.items() if exists(space, name, values)}
    assert conditions.present(values) == present == space.resolve(values)
    assert space.resolve(present) == present, "an absent value is not asked for"
    assert space.tuned(space.resolve(values)) == present, "what ran says which point it was"
    whole = conditions.complete(present)
    assert whole.keys() == values.keys()
    assert conditions.complete(whole) == whole == conditions.complete(values)
    assert conditions.present(whole) == present
    distributions = space.distributions()
    assert all(distributions[n]._contains(distributions[n].to_internal_repr(v)) for n, v in whole.items())


def test_a_layouts_degrees_are_read_from_its_text() -> None:
    study = study_of()
    for text in study.search_space.distributions()["layout"].choices:  # type: ignore[attr-defined]
        absent = study.search_space.conditions.absent({"layout": text})
        assert ("OVERLAP" in absent, "EAGER" in absent) == (parse_layout(text).tp == 1, parse_layout(text).tp > 1)
