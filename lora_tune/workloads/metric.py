"""How the evals of a study's logs are read."""

from __future__ import annotations

from lora_tune.base.errors import StudyError
from lora_tune.config.study import Study
from lora_tune.logs.lines import LineReader
from lora_tune.logs.mllog import MllogReader
from lora_tune.logs.run import LogReader


def reader_of(study: Study, reader: LogReader) -> LogReader:
    """The reader as the study's metric wants it: evals that rise are read as what they lack of the study's ceiling.

    Raises StudyError for a reader of another package where the metric rises: none is known to turn its evals.
    """
    if study.rising:
        if not isinstance(reader, MllogReader | LineReader):
            kind = type(reader).__name__
            problem = f"maximize, but {kind} reads losses; read the log as mllog, or print a value that falls"
            raise StudyError(f"study {study.name}", "objective.direction", problem)
        reader.read_shortfall(study.ceiling)
    return reader
