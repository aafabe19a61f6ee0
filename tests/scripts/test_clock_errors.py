"""docs/clock_errors.md holds the tables of docs/clocks.json, and a wrong prediction shows in them."""

import json
from pathlib import Path

import clock_errors
from shared import generated_tables

MEASURED = {"128x1024": 1000, "2048x1024": 2000, "2048x4096": 3000}
PAGE = Path(__file__).resolve().parents[2] / "docs/clock_errors.md"


def test_the_document_has_the_current_tables(capsys):
    status = generated_tables.main("", "clock_errors.py", clock_errors.sections, ["--check", str(PAGE)])
    assert status == 0, capsys.readouterr().out


def test_errors_of_a_record():
    kernels = {f"softmax {name}": [[clocks, 1.98]] for name, clocks in MEASURED.items()}
    guesses = {
        "softmax 128x1024": [["Rows.kernel", 1100, 1050, 1200, "hbm"]],
        "softmax 2048x1024": [["Rows.kernel", 1400, 1300, 2100, "hbm"]],
    }
    record = {"measured": {"h200": {"gpu": "", "cases": kernels}}, "predicted": {"h200": {"cases": guesses}}}
    first, second = clock_errors.rows(record)
    assert (round(first.error, 3), first.inside) == (0.1, False)
    assert (round(second.error, 3), second.inside) == (-0.3, True)
    text = clock_errors.family_table(record)
    assert (
        "| H200 | softmax | 2 | 20.0% | -10.0% | -30.0% | Rows.kernel of softmax 2048x1024 | 1 of 2 |" in text
    )
    assert text.endswith("Measured on H200 and not predicted: softmax 2048x4096.")


def test_regret_of_a_choice():
    """The model prefers a plan that took a tenth longer than the fastest for one problem, the fastest for the other."""
    plans = [
        {"A": [10.0, 9.0], "B": [11.0, 8.9], "C": [15.0, 20.0]},
        {"A": [20.0, 30.0], "B": [24.0, 31.0]},
    ]
    rows = {str(i): {"chip": "h100", "kind": "decode", "plans": one} for i, one in enumerate(plans)}
    text = clock_errors.plans_table({"measured": {"h100": {}}, "plans": {"rows": rows}})
    assert "| H100 | decode | 2 | 5 | 5.0% | 10.0% | 1 of 2 | 15% |" in text


def test_pairs_of_a_case_need_not_be_neighbours():
    rows = [
        {
            "case": case,
            "variant": variant,
            "tflops": rate,
            "ghz": 1.0,
            "flop": 1e6,
            "clocks": clocks,
            "low": 1,
            "high": 9,
        }
        for case, variant, rate, clocks in (
            ("X", "a", 10, 5),
            ("Y", "a", 10, 5),
            ("X", "b", 9, 4),
            ("Y", "b", 11, 4),
        )
    ]
    text = clock_errors.published_table({"published": {"rows": rows}})
    assert text.startswith("1 of 2 pairs have the right sign")


def test_the_record_is_of_known_cases():
    record = json.loads(clock_errors.RECORD.read_text())
    names = {case.name for case in clock_errors.cases()}
    assert all(set(one["cases"]) <= names for one in record["measured"].values())
