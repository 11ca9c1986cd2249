"""Runs recorded by other programs: Optuna studies, MLflow, Weights & Biases, TensorBoard, tables.

Each kind is an entry of ``TRACKERS``. :mod:`lora_tune.search.priors` maps names of parameters and metrics to those of
the study.
"""

from __future__ import annotations

import contextlib
import csv
import json
import math
import sqlite3
import struct
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from dataclasses import field as default
from pathlib import Path
from typing import Any

from lora_tune.base.errors import InputError, SetupError
from lora_tune.base.files import TensorBoardFile, fields

Scalar = str | int | float | bool
Points = tuple[tuple[float, float], ...]

RUN_COLUMNS = ("run", "run_id", "run_uuid", "run_name", "name", "id", "trial", "trial_id", "number", "experiment")
STEP_COLUMNS = ("samples", "step", "global_step", "iteration", "iter", "epoch")
"""Columns of a row's run and progress, without prefixes; the first one that a table has is used."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackedRun:
    """One run of another program.

    source: where it was read. name: in the program. values: columns by name, numbers as numbers. series: metrics by
    name, each a row of (step, value); a single final value has the step NaN. maximised: metrics that the program
    maximised.
    """

    source: str
    name: str
    values: Mapping[str, Scalar] = default(default_factory=dict)
    series: Mapping[str, Points] = default(default_factory=dict)
    maximised: frozenset[str] = frozenset()


def tracked_runs(source: str) -> list[TrackedRun] | None:
    """The runs of a path or database address; None if no tracker recognises it.

    Raises InputError for a damaged one, SetupError if a required package is not installed.
    """
    for knows, read in TRACKERS.values():
        if knows(source):
            try:
                return list(read(source))
            except (OSError, ValueError, sqlite3.Error, csv.Error) as error:
                raise InputError(f"{source}: cannot be read: {error}") from error
    return None


def scalar(value: object) -> Scalar | None:
    """A cell or parameter as a number if possible, else as text; None if empty or NaN."""
    if isinstance(value, bool | int):
        return value
    if isinstance(value, float):
        return None if math.isnan(value) else value
    text = str(value).strip() if isinstance(value, str) else ""
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            number = kind(text)
            return None if number != number else number
    return text or None


def plain(column: str) -> str:
    """A column's name without the prefixes of trackers, only letters and digits: ``params_lr`` becomes ``lr``."""
    name = column.strip().lower()
    for prefix in ("params_", "params.", "config.", "config/", "config:", "metrics.", "user_attrs_", "hparams/"):
        name = name.removeprefix(prefix)
    return "_".join("".join(c if c.isalnum() else " " for c in name).split())


def _table_knows(source: str) -> bool:
    return Path(source).suffix in (".csv", ".tsv", ".parquet") and Path(source).is_file()


def _table(source: str) -> Iterator[TrackedRun]:
    """Runs of a table with a header: one per row, or one row per eval if a column names the run of several rows."""
    rows = list(_rows(Path(source)))
    columns = list(dict.fromkeys(name for row in rows for name in row))
    run = next((c for want in RUN_COLUMNS for c in columns if plain(c) == want), None)
    names = [str(row.get(run, "")) if run else "" for row in rows]
    if run is None or len({*names}) == len(rows):
        for at, row in enumerate(rows):
            yield _of_rows(source, names[at] or f"row {at + 1}", [row])
        return
    for name in dict.fromkeys(names):
        yield _of_rows(source, name, [row for of_run, row in zip(names, rows, strict=True) if of_run == name])


def _rows(path: Path) -> Iterator[dict[str, Scalar]]:
    if path.suffix == ".parquet":
        try:
            import pandas  # the lightest commonly installed reader

            cells: Iterable[Mapping[Any, Any]] = pandas.read_parquet(path).to_dict("records")
        except ImportError as error:
            raise SetupError(f"{path}: Parquet needs pandas and pyarrow: pip install pandas pyarrow") from error
    else:
        with path.open(encoding="utf-8-sig", newline="") as file:
            cells = list(csv.DictReader(file, delimiter="\t" if path.suffix == ".tsv" else ","))
    for row in cells:
        plain_values = {
            str(name): scalar(getattr(cell, "item", lambda cell=cell: cell)()) for name, cell in row.items()
        }
        yield {name: value for name, value in plain_values.items() if value is not None}


def _of_rows(source: str, name: str, rows: Sequence[Mapping[str, Scalar]]) -> TrackedRun:
    """A run from its rows. Numbers that change within it are metrics; in a single row every number may be one."""
    step = next((c for want in STEP_COLUMNS for row in rows for c in row if plain(c) == want), None)
    cells: dict[str, list[tuple[float, Scalar]]] = defaultdict(list)
    for at, row in enumerate(rows):
        progress = row.get(step, at + 1) if step else (at + 1 if len(rows) > 1 else math.nan)
        for column, value in row.items():
            cells[column].append((float(progress) if isinstance(progress, int | float) else float(at + 1), value))
    series = {
        column: tuple((at, float(value)) for at, value in points if isinstance(value, int | float))
        for column, points in cells.items()
        if column != step
    }
    values = {column: points[0][1] for column, points in cells.items() if len({v for _, v in points}) == 1}
    return TrackedRun(source=source, name=name, values=values, series={c: s for c, s in series.items() if s})


def _tables_of(source: str) -> set[str]:
    """The tables of a SQLite file; none for any other file."""
    path = Path(source.removeprefix("sqlite:///"))
    try:
        if not path.is_file() or path.open("rb").read(15) != b"SQLite format 3":
            return set()
        with contextlib.closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)) as database:
            return {name for (name,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    except (OSError, sqlite3.Error):
        return set()


def _optuna_knows(source: str) -> bool:
    if "://" in source and not source.startswith("sqlite:"):
        return True
    return {"studies", "trial_params"} <= _tables_of(source) or _is_journal(Path(source))


def _is_journal(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            first = json.loads(file.readline(1 << 16))
    except (OSError, ValueError):
        return False
    return isinstance(first, dict) and {"op_code", "worker_id"} <= set(first)


def _optuna(source: str) -> Iterator[TrackedRun]:
    """Every finished trial of every study in a storage; each study is a separate source."""
    import optuna
    from optuna.storages import JournalStorage, RDBStorage
    from optuna.storages.journal import JournalFileBackend

    try:
        if "://" in source or not _is_journal(Path(source)):
            storage: Any = RDBStorage(source if "://" in source else f"sqlite:///{source}")
        else:
            storage = JournalStorage(JournalFileBackend(source))
        summaries = optuna.get_all_study_summaries(storage, include_best_trial=False)
        for summary in summaries:
            rising = [d is optuna.study.StudyDirection.MAXIMIZE for d in summary.directions]
            for trial in optuna.load_study(study_name=summary.study_name, storage=storage).get_trials(deepcopy=False):
                if trial.state.is_finished():
                    yield _of_trial(f"Optuna study {summary.study_name}", trial, rising)
    except Exception as error:  # a database driver's, of any library that an address names
        if type(error).__module__.split(".")[0] not in ("optuna", "sqlalchemy", "psycopg"):
            raise
        raise InputError(f"{source}: Optuna cannot read it: {str(error).splitlines()[0]}") from error


def _of_trial(source: str, trial: Any, rising: Sequence[bool]) -> TrackedRun:
    values = {name: known for name, value in trial.params.items() if (known := scalar(value)) is not None}
    noted = {name: known for name, value in trial.user_attrs.items() if (known := scalar(value)) is not None}
    names = ["value"] if len(rising) == 1 else [f"value_{at}" for at in range(len(rising))]
    finite = [v for v in trial.values or () if math.isfinite(v)]
    series: dict[str, Points] = {n: ((math.nan, value),) for n, value in zip(names, finite, strict=False)}
    if trial.intermediate_values:
        series["intermediate_values"] = tuple((float(s), v) for s, v in sorted(trial.intermediate_values.items()))
    for name, value in noted.items():
        if isinstance(value, int | float):
            series.setdefault(name, ((math.nan, float(value)),))
    maximised = frozenset(n for n, up in zip([*names, "intermediate_values"], [*rising, rising[0]], strict=True) if up)
    return TrackedRun(
        source=source, name=f"trial {trial.number}", values={**noted, **values}, series=series, maximised=maximised
    )


def _mlflow_knows(source: str) -> bool:
    if {"runs", "params", "metrics"} <= _tables_of(source):
        return True
    return Path(source).is_dir() and next(_mlflow_folders(Path(source)), None) is not None


def _mlflow_folders(root: Path) -> Iterator[Path]:
    for depth in ("", "*", "*/*", "*/*/*"):
        for folder in sorted(root.glob(depth)) if depth else [root]:
            if (folder / "meta.yaml").is_file() and (folder / "metrics").is_dir() and (folder / "params").is_dir():
                yield folder


def _mlflow(source: str) -> Iterator[TrackedRun]:
    """Runs of MLflow's files (``mlruns/``: a file per parameter, "time value step" lines per metric) or SQLite
    database."""
    if Path(source).is_dir():
        for folder in _mlflow_folders(Path(source)):
            params = {p.name: scalar(p.read_text(encoding="utf-8")) for p in sorted((folder / "params").iterdir())}
            metrics = {
                str(file.relative_to(folder / "metrics")): [line.split() for line in file.read_text().splitlines()]
                for file in sorted((folder / "metrics").rglob("*"))
                if file.is_file()
            }
            series = {n: tuple((float(w[2]), float(w[1])) for w in rows if len(w) > 2) for n, rows in metrics.items()}
            yield TrackedRun(source=source, name=folder.name, values=_present(params), series=series)
        return
    path = Path(source.removeprefix("sqlite:///")).resolve()
    with contextlib.closing(sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True)) as database:
        for run, name in database.execute("SELECT run_uuid, name FROM runs ORDER BY start_time").fetchall():
            params = dict(database.execute("SELECT key, value FROM params WHERE run_uuid = ?", (run,)))
            points: dict[str, list[tuple[float, float]]] = defaultdict(list)
            query = "SELECT key, step, value FROM metrics WHERE run_uuid = ? AND NOT is_nan ORDER BY step, timestamp"
            for key, step, value in database.execute(query, (run,)):
                points[key].append((float(step), float(value)))
            values = _present({key: scalar(text) for key, text in params.items()})
            yield TrackedRun(
                source=source, name=name or run, values=values, series={k: tuple(p) for k, p in points.items()}
            )


def _present(values: Mapping[str, Scalar | None]) -> dict[str, Scalar]:
    return {name: value for name, value in values.items() if value is not None}


def _wandb_knows(source: str) -> bool:
    path = Path(source)
    return path.suffix == ".wandb" or (path.is_dir() and next(path.rglob("*.wandb"), None) is not None)


def _wandb(source: str) -> Iterator[TrackedRun]:
    """Runs of W&B's files, ``wandb/run-*/run-*.wandb``, as wandb 0.31 writes them: a log in LevelDB's format."""
    path = Path(source)
    for file in [path] if path.is_file() else sorted(path.rglob("*.wandb")):
        yield _wandb_run(source, file)


def _wandb_run(source: str, file: Path) -> TrackedRun:
    values, series, name = dict[str, Scalar | None](), defaultdict[str, list[tuple[float, float]]](list), file.stem
    parts = ((kind, body) for record in _leveldb_records(file.read_bytes()) for kind, body in fields(record))
    for kind, body in parts:
        if not isinstance(body, bytes):
            continue
        if kind == _WANDB_HISTORY:
            row = _wandb_items(body)
            for key, value in row.items():
                if isinstance(value, int | float) and not key.startswith("_"):
                    series[key].append((float(row.get("_step", math.nan)), float(value)))
        elif kind == _WANDB_CONFIG:
            values |= {key: scalar(value) for key, value in _wandb_items(body).items()}
        elif kind == _WANDB_RUN:
            for number, inner in fields(body):
                if number == 8 and isinstance(inner, bytes):
                    name = inner.decode("utf-8", "replace")
                elif number == 4 and isinstance(inner, bytes):
                    values |= {key: scalar(value) for key, value in _wandb_items(inner).items()}
    series_points = {key: tuple(sorted(points)) for key, points in series.items()}
    return TrackedRun(source=source, name=name, values=_present(values), series=series_points)


_WANDB_HISTORY, _WANDB_CONFIG, _WANDB_RUN = 2, 5, 17
"""Fields of wandb_internal.Record (wandb_internal.proto): HistoryRecord, ConfigRecord, RunRecord."""


def _wandb_items(message: bytes) -> dict[str, Any]:
    """Keys and values of the HistoryItems or ConfigItems in a message; nested values under "outer/inner"."""
    items: dict[str, Any] = {}
    for field_number, item in fields(message):
        if field_number != 1 or not isinstance(item, bytes):
            continue
        parts = dict[int, Any]()
        nested = []
        for at, value in fields(item):
            if at == 2 and isinstance(value, bytes):
                nested.append(value.decode("utf-8", "replace"))
            parts[at] = value
        name = parts[1].decode("utf-8", "replace") if parts.get(1) else "/".join(nested)
        value = json.loads(parts[16]) if 16 in parts else _wandb_value(parts)
        items |= {f"{name}/{k}": v for k, v in value.items()} if isinstance(value, dict) else {name: value}
    return items


def _wandb_value(parts: Mapping[int, Any]) -> Any:
    """The value of a non-JSON item: an integer, double or text."""
    if 6 in parts:
        return struct.unpack("<d", parts[6])[0]
    return parts[5] if 5 in parts else parts[7].decode("utf-8", "replace") if 7 in parts else None


LEVELDB_BLOCK, LEVELDB_HEAD = 1 << 15, 7
"""Bytes of a block of LevelDB's log format, and of a record's head: checksum, length, and FULL, FIRST, MIDDLE, LAST."""


def _leveldb_records(data: bytes) -> Iterator[bytes]:
    """The records of a log that begins with W&B's seven-byte header, up to the first truncated one."""
    at, parts = LEVELDB_HEAD, b""
    while at + LEVELDB_HEAD <= len(data):
        if LEVELDB_BLOCK - at % LEVELDB_BLOCK < LEVELDB_HEAD:  # padding of a block
            at += LEVELDB_BLOCK - at % LEVELDB_BLOCK
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        piece = data[at + LEVELDB_HEAD : at + LEVELDB_HEAD + length]
        at += LEVELDB_HEAD + length
        parts = piece if kind in (1, 2) else parts + piece
        if kind in (1, 4) and len(piece) == length:
            yield parts


def _tensorboard_knows(source: str) -> bool:
    path = Path(source)
    return ".tfevents." in path.name or (path.is_dir() and next(path.rglob("*.tfevents.*"), None) is not None)


def _tensorboard(source: str) -> Iterator[TrackedRun]:
    """One run per folder of event files; its values from Lightning's ``hparams.yaml`` there, if it exists."""
    path = Path(source)
    files = [path] if path.is_file() else sorted(path.rglob("*.tfevents.*"))
    for folder in dict.fromkeys(file.parent for file in files):
        series: dict[str, list[tuple[float, float]]] = defaultdict(list)
        for file in (f for f in files if f.parent == folder):
            for row in TensorBoardFile().take(file.read_bytes()):
                for tag, value in row.items():
                    if tag != "step":
                        series[tag].append((float(row["step"]), float(value)))
        values = _hparams(folder / "hparams.yaml")
        name = str(folder.relative_to(path)) if path.is_dir() and folder != path else folder.name
        yield TrackedRun(
            source=source, name=name, values=values, series={k: tuple(sorted(p)) for k, p in series.items()}
        )


def _hparams(file: Path) -> dict[str, Scalar]:
    """The plain ``name: value`` lines of a YAML file."""
    if not file.is_file():
        return {}
    pairs = (line.partition(":") for line in file.read_text(encoding="utf-8").splitlines() if line[:1].strip())
    return _present({name: scalar(value) for name, _, value in pairs})


TRACKERS: Mapping[str, tuple[Callable[[str], bool], Callable[[str], Iterator[TrackedRun]]]] = {
    "optuna": (_optuna_knows, _optuna),
    "mlflow": (_mlflow_knows, _mlflow),
    "wandb": (_wandb_knows, _wandb),
    "tensorboard": (_tensorboard_knows, _tensorboard),
    "table": (_table_knows, _table),
}
"""Kinds by name: whether it recognises a source, without reading it whole, and its runs. The first match is used."""
