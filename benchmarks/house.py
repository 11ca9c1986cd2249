"""Measures of the package's structure, and a drawing of it.

``python -m benchmarks.house`` prints rooms, import edges, modules at the root, the largest module, long functions,
modules that use two of the big libraries, class names with two meanings, parameters without a meaningful name, import
cycles, dataclasses and protocols, the share of everyday words in identifiers by room, and lines. ``--svg
docs/images/rooms.svg`` draws the rooms and the imports between them. ``--root FOLDER`` measures another checkout, such
as one from before the rooms.
"""

from __future__ import annotations

import ast
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import click

ORDER = (
    "base", "logs", "curves", "mlperf", "config", "store", "workloads", "launchers", "search", "controller", "review",
    "cli",
)  # fmt: skip
"""Rooms in the order of import: a room imports only those before it."""

TRAINERS = "lora_tune_recipes"
OF_TRAINERS = ("base", "mlperf", "launchers")
"""What programs inside a trial may import: errors, MLPerf's log keys, a pack's folder. Nothing imports the trainers."""
SIMULATION = "lora_tune_simulation"
"""Simulated trials, a separate package for tests and benchmarks. It may import the rooms up to the launchers."""
BESIDE = (TRAINERS, SIMULATION)
KINDS_OF_TRAINERS = ("workloads.py", "pack_gain.py", "peft_refusals.py")
"""Modules in which the trainers are workloads of the tuner, by entry points: they may import up to the workloads."""

LIBRARIES = ("optuna", "sqlalchemy", "submitit", "torch")
LONG_FUNCTION = 45
FITS = 58
"""Characters of a room's description in a box of the drawing, next to the longest name."""

NOT_NAMES = (
    "found", "words", "look", "book", "voice", "ports", "around", "desk", "given", "seen", "asked", "said", "told",
    "wanted", "made", "here",
)  # fmt: skip
"""Forbidden parameter names: "found" or "given" does not say what a parameter is."""

_WORD = re.compile("[A-Z]?[a-z]+|[A-Z]+(?![a-z])")

EVERYDAY_WORDS = frozenset(
    _WORD.findall(
        "told heard hears said says say given gives asked asks made makes finds found wanted wants seen here "
        "there company worth wish wishes people person standing again doubt doubts doubted own ours mine nobody "
        "somebody anybody anything everybody looks word words course around quiet news stand stands knew knows "
        "believe believed believes belief desk voice book together trouble wrong lasting passing lost gone went "
        "come comes came already quite still yet perhaps far near alone heed heeded unheeded dear lies lie "
    )
)
"""Words that identifiers of this field rarely need: 0.12% of the words in Optuna's identifiers, 0.31% in Rich's."""


@dataclass(frozen=True, slots=True)
class Module:
    """One source file.

    room: its folder below the package, "" at the root. imports: imported rooms and root modules. parameters: names of
    all its functions' parameters. name: dotted. words: of its identifiers, anywhere. knows: dotted imports at load time
    or for types: modules, and names of modules. kinds: its dataclasses and protocols.
    """

    path: Path
    room: str
    lines: int
    imports: Counter[str]
    libraries: frozenset[str]
    functions: tuple[tuple[str, int], ...]
    classes: tuple[str, ...]
    parameters: frozenset[str]
    name: str
    words: Counter[str]
    knows: frozenset[str]
    kinds: Counter[str]


def modules(root: Path) -> list[Module]:
    """Every module of the tuner below ``root``, and of the other packages, whose room is their name."""
    return [
        _module(path, root / package)
        for package in ("lora_tune", *BESIDE)
        for path in sorted((root / package).rglob("*.py"))
    ]


def _module(path: Path, package: Path) -> Module:
    text = path.read_text(encoding="utf-8")
    tree = ast.parse(text)
    nodes = list(ast.walk(tree))
    parts = path.relative_to(package).with_suffix("").parts
    imported = list(_imported(nodes))
    loaded = frozenset(_imported(_statements(tree.body)))
    name = ".".join((package.name, *parts)).removesuffix(".__init__")
    return Module(
        path=path,
        name=name,
        room=package.name if package.name in BESIDE else parts[0] if len(parts) > 1 else "",
        lines=text.count("\n"),
        imports=Counter(n.split(".")[1] for n in imported if n.startswith("lora_tune.") and "__" not in n),
        knows=loaded - {name},
        libraries=frozenset(n.split(".")[0] for n in imported) & frozenset(LIBRARIES),
        functions=tuple(
            (n.name, (n.end_lineno or n.lineno) - n.lineno + 1) for n in nodes if isinstance(n, ast.FunctionDef)
        ),
        classes=tuple(n.name for n in tree.body if isinstance(n, ast.ClassDef)),
        parameters=frozenset(n.arg for n in nodes if isinstance(n, ast.arg)),
        words=Counter(word.lower() for identifier in _identifiers(nodes) for word in _WORD.findall(identifier)),
        kinds=_kinds(nodes),
    )


def _identifiers(nodes: Iterable[ast.AST]) -> Iterator[str]:
    for node in nodes:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.Attribute):
            yield node.attr


def _kinds(nodes: Iterable[ast.AST]) -> Counter[str]:
    """Number of dataclasses and protocols of a module."""
    classes = [node for node in nodes if isinstance(node, ast.ClassDef)]
    decorated = sum("dataclass" in ast.unparse(decorator) for node in classes for decorator in node.decorator_list)
    protocols = sum("Protocol" in ast.unparse(base) for node in classes for base in node.bases)
    return Counter({"dataclasses": decorated, "protocols": protocols})


def _statements(body: Iterable[ast.AST]) -> Iterator[ast.AST]:
    """Statements that run when a module is loaded, or are read for its types: not those within functions."""
    for node in body:
        if isinstance(node, ast.stmt | ast.excepthandler) and not isinstance(node, ast.FunctionDef):
            yield node
            yield from _statements(ast.iter_child_nodes(node))


def _imported(nodes: Iterable[ast.AST]) -> Iterator[str]:
    """Imports, dotted: modules, and names of modules."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def edges(found: list[Module]) -> Counter[tuple[str, str]]:
    """Imports between rooms: (from, to) and the number of modules with it."""
    made: Counter[tuple[str, str]] = Counter()
    for module in found:
        made.update((module.room, other) for other in module.imports if module.room and other != module.room)
    return made


def circles(found: list[Module]) -> list[tuple[str, ...]]:
    """Modules that import each other, at load time or for types, each cycle sorted by name.

    ``from package import module`` imports the module and not the package's code.
    """
    names = {module.name for module in found}
    graph = {m.name: {n if n in names else n.rpartition(".")[0] for n in m.knows} & names - {m.name} for m in found}
    reach = {name: _reachable(graph, name) for name in names}
    whole = {tuple(sorted({name} | {o for o in reach[name] if name in reach[o]})) for name in names}
    return sorted(circle for circle in whole if len(circle) > 1)


def _reachable(graph: Mapping[str, set[str]], start: str) -> set[str]:
    known: set[str] = set()
    ahead = [start]
    while ahead:
        ahead += (fresh := graph[ahead.pop()] - known)
        known |= fresh
    return known


def everyday_share(found: list[Module]) -> dict[str, float]:
    """Percentage of EVERYDAY_WORDS in the words of identifiers, by room."""
    rooms: dict[str, Counter[str]] = {}
    for module in found:
        rooms.setdefault(module.room, Counter()).update(module.words)
    return {
        room: 100 * sum(words[word] for word in EVERYDAY_WORDS) / max(1, words.total())
        for room, words in sorted(rooms.items())
    }


def shared_class_names(found: list[Module]) -> list[str]:
    """Class names that two modules define, which are ambiguous for readers."""
    return sorted(name for name, count in Counter(n for m in found for n in m.classes).items() if count > 1)


def unnamed_parameters(found: list[Module]) -> list[str]:
    """Parameters with a forbidden name, with their modules."""
    return [f"{m.path}: {name}" for m in found for name in sorted(m.parameters.intersection(NOT_NAMES))]


def of_two_libraries(found: list[Module]) -> list[Path]:
    """Modules that use two of the big libraries."""
    return [module.path for module in found if len(module.libraries) > 1]


def against_the_order(found: list[Module]) -> list[str]:
    """Every import that the order forbids, one sentence each."""
    wrong = []
    for module in found:
        for other in module.imports:
            if module.room in ("", other) or module.path.name == "__main__.py":
                continue
            if module.path.name in KINDS_OF_TRAINERS and module.room == TRAINERS:
                allowed = other in ORDER[: ORDER.index("launchers")]
            elif module.room == TRAINERS:
                allowed = other in OF_TRAINERS
            elif module.room == SIMULATION:
                allowed = other in ORDER[: ORDER.index("search")]
            else:
                allowed = other in ORDER and ORDER.index(other) < ORDER.index(module.room)
            if not allowed:
                wrong.append(f"{module.path} imports {other or 'the root'}")
    return wrong


def figures(root: Path) -> dict[str, object]:
    """The measures of the structure."""
    found = modules(root)
    largest = max(found, key=lambda m: m.lines)
    long = [f"{m.path.name}:{name} {lines}" for m in found for name, lines in m.functions if lines > LONG_FUNCTION]
    return {
        "modules of the tuner": sum(m.room not in BESIDE for m in found),
        "modules of the trainers": sum(m.room == TRAINERS for m in found),
        "rooms of the tuner": len({m.room for m in found} - {"", *BESIDE}),
        "modules at the root": sum(not m.room and not m.path.name.startswith("__") for m in found),
        "import edges between rooms": len(edges(found)),
        "largest module": f"{largest.path.name} {largest.lines}",
        "modules over 300 lines": sum(m.lines > 300 for m in found),
        f"functions over {LONG_FUNCTION} lines": len(long),
        "modules that know two of " + ", ".join(LIBRARIES): len(of_two_libraries(found)),
        "class names that stand for two things": len(shared_class_names(found)),
        "parameters called by what happened to them": len(unnamed_parameters(found)),
        "import circles": [" ".join(circle) for circle in circles(found)],
        "dataclasses of the tuner": sum(m.kinds["dataclasses"] for m in found if m.room not in BESIDE),
        "protocols of the tuner": sum(m.kinds["protocols"] for m in found if m.room not in BESIDE),
        "everyday words in identifiers, %": {room: round(share, 2) for room, share in everyday_share(found).items()},
        "lines by room": dict(_lines(found)),
        "lines of the tuner": sum(m.lines for m in found if m.room not in BESIDE),
        "lines of the trainers": sum(m.lines for m in found if m.room == TRAINERS),
    }


def _lines(found: list[Module]) -> Counter[str]:
    total: Counter[str] = Counter()
    for module in found:
        total[module.room] += module.lines
    return total


def drawing(root: Path) -> str:
    """The rooms from top to bottom in order of import, with an arc per import edge, thicker for more modules."""
    made, height, left = edges(modules(root)), 44, 230
    sizes = Counter(m.room for m in modules(root))
    middle = {room: 40 + height * i for i, room in enumerate(ORDER)}
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="900" height="{40 + height * len(ORDER)}" '
        'font-family="sans-serif" font-size="14">',
        "<style>text{fill:#333}rect{fill:#eef3fb;stroke:#7a9cc6}path{fill:none;stroke:#7a9cc6;opacity:.55}"
        "@media(prefers-color-scheme:dark){text{fill:#ddd}rect{fill:#223;stroke:#89b}}</style>",
    ]
    for (here, there), count in sorted(made.items()):
        if here in middle and there in middle:
            bend = left - 20 - 0.36 * abs(middle[here] - middle[there])
            out.append(
                f'<path stroke-width="{min(5, 0.6 + 0.35 * count):.1f}" d="M{left} {middle[here]} '
                f'C{bend:.0f} {middle[here]} {bend:.0f} {middle[there]} {left} {middle[there]}"/>'
            )
    for room in ORDER:
        y = middle[room]
        out.append(f'<rect x="{left}" y="{y - 15}" width="650" height="30" rx="6"/>')
        out.append(f'<text x="{left + 12}" y="{y + 5}"><tspan font-weight="bold">{room}/</tspan>'
                   f' <tspan opacity=".7">{sizes[room]} modules: {_meaning(root, room)}</tspan></text>')  # fmt: skip
    return "\n".join([*out, "</svg>"]) + "\n"


def _meaning(root: Path, room: str) -> str:
    """The first words of the room's docstring."""
    text = ast.get_docstring(ast.parse((root / "lora_tune" / room / "__init__.py").read_text(encoding="utf-8"))) or ""
    first = text.split("\n")[0].split(". ")[0].rstrip(".").replace("``", "")
    return first if len(first) <= FITS else first[: FITS - 1].rsplit(" ", 1)[0].rstrip(",;:") + " …"


@click.command()
@click.option("--root", type=click.Path(path_type=Path, exists=True), default=Path(), help="checkout to measure")
@click.option("--svg", type=click.Path(path_type=Path), help="file for the drawing")
@click.option("--json", "as_json", is_flag=True, help="one JSON object")
def main(root: Path, svg: Path | None, as_json: bool) -> None:
    """Measure and draw the structure."""
    if svg is not None:
        svg.write_text(drawing(root), encoding="utf-8")
    found = figures(root)
    click.echo(json.dumps(found) if as_json else "\n".join(f"{name:55} {value}" for name, value in found.items()))


if __name__ == "__main__":
    main()
