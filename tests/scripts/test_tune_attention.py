"""The candidates of tune_attention.py: they cover the tables, and what does not fit is named, not timed."""

from dataclasses import replace

import pytest
import tune_attention as tune

from warpspec.fmha.sm90 import shapes
from warpspec.fmha.sm90.shapes import Shape


def test_every_shape_of_the_tables_is_tuned():
    tuned = {(row.table, row.dim) for row in tune.ROWS}
    seen = []
    for table in ("PREFILL", "LONG", "NARROW", "BIASED", "DECODE", "SPLIT", "SHARED"):
        for dim, shape in getattr(shapes, table).items():
            again = any(shape is other for other in seen)  # an entry of a table before
            assert (table, dim) in tuned or again, f"{table} {dim}"
            seen.append(shape)


def test_a_workload_takes_its_table(monkeypatch):
    """What is timed with a shape in the table is what reads that table."""
    for row in tune.ROWS:
        other = replace(row.present, kv_stages=row.present.kv_stages - 1)
        if row.table == "SHARED":  # nothing else is allowed
            other = replace(row.present, consumer_registers=232)
        monkeypatch.setitem(getattr(shapes, row.table), row.dim, other)
        config, splits, *_ = tune.launch.plan(row.workload.problem(), tune.TARGET)
        assert config.shape is other, f"{row.table} {row.dim}"
        assert (splits > 1) == (row.table == "SPLIT"), f"{row.table} {row.dim}"


def test_what_does_not_fit_is_not_compiled(monkeypatch):
    monkeypatch.setattr(tune.sm90, "ATTENTION", None)  # a call would raise
    problem = tune.prefill(1, 1, 256, 128).problem()
    assert tune.refusal(problem, Shape(2, 128, 4, 1, 240, 24), False) == "over budget"
    assert tune.refusal(problem, Shape(3, 128, 2, 1, 160, 32), False) == "over the registers"


@pytest.mark.long
def test_a_shape_that_fits_compiles_without_spills():
    assert tune.refusal(tune.prefill(1, 1, 256, 64).problem(), Shape(2, 64, 2, 1, 240, 24), False) == ""


def test_work_and_rates():
    assert tune.prefill(2, 3, 100, 64).work == 4 * 2 * 3 * 100 * 50 * 64
    assert tune.prefill(2, 3, 100, 64, window=10).work == 4 * 2 * 3 * 100 * 10 * 64
    assert tune.decode(1, 1000, 128).rate(1.0) == pytest.approx(2 * 1000 * 8 * 128 * 2 * 1e-6)  # TB/s
    assert tune.shared(1, 8192).work == 4 * 128 * 8192 * 512


def test_only_picks_tables_and_head_dimensions():
    def titles(*only):
        return [task.title for task in tune.tasks(list(only))]

    assert titles("NARROW", "256") == ["NARROW 256"]
    assert all(title.startswith("splits") for title in titles("splits")) and titles("splits")
    assert titles("nothing") == [] and len(titles()) > len(titles("64"))


def test_the_table_is_sorted_and_names_what_was_refused():
    (task,) = tune.tasks(["NARROW", "256"])
    measured = [("slow *", 200.0, ""), ("fast", 100.0, ""), ("big", None, "over budget")]
    text = tune.section_of(task, measured)
    assert text.index("| fast | 100 |") < text.index("| slow * | 200 |") and "Over budget: big." in text
    assert "Traceback" in tune.section_of(task, "Traceback")
