"""A slice of ``benchmarks.fuzz_records``: small files, damaged at random, through everything that reads them."""

from __future__ import annotations

import pytest

from benchmarks import fuzz_records


def test_no_damaged_small_file_is_a_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["fuzz_records", "--inputs", "4000", "--seed", "7"])
    code = fuzz_records.main()
    assert code == 0, capsys.readouterr().out
