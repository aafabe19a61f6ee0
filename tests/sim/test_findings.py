"""Findings are shown by pair of lines, worst first, and none is left out."""

import pickle

from warpspec.sim.order.findings import NO_FENCE_AFTER, NOTHING_ORDERS, Finding, OrderError
from warpspec.sim.views import sarif


def finding(kind: str, first: int, second: int, ptx: int) -> Finding:
    def text(line: int) -> str:
        return f"CTA (0, 0, 0) warp 0 writes: PTX line {ptx} `st.shared` from dir/k.py:{line} in kernel"

    return Finding(kind, f"offset {ptx}", text(first), text(second), "a barrier", (ptx, ptx + 1))


def test_groups():
    fences = [finding(NO_FENCE_AFTER, 30 + i % 3, 40, 300 + i) for i in range(40)]
    races = [finding(NOTHING_ORDERS, 1, 2, 10), finding(NOTHING_ORDERS, 2, 1, 20)]
    other = finding("no proxy fence", 5, 6, 30)
    error = OrderError([*fences, other, *races], "kernel")
    rows = str(error).splitlines()
    assert rows[0] == "memory order of kernel kernel: 43 findings, 5 pairs of lines"
    assert rows[1].strip().startswith(NOTHING_ORDERS) and "dir/k.py:1" in rows[2]
    assert "alike   1 more of these lines of source (PTX lines 20 and 21)" in rows[5]
    assert rows[6].strip().startswith("no proxy fence")
    assert rows[-1].strip() == (
        f"by the ISA's text alone, {NO_FENCE_AFTER}: dir/k.py:30 to dir/k.py:40 (14 places); "
        "dir/k.py:31 to dir/k.py:40 (13 places); dir/k.py:32 to dir/k.py:40 (13 places)"
    )
    assert len(rows) == 11
    again = pickle.loads(pickle.dumps(error))
    assert str(again) == str(error) and again.findings == error.findings


def test_sarif_has_each_pair_of_lines_once():
    error = OrderError([finding(NOTHING_ORDERS, 1, 2, 10), finding(NOTHING_ORDERS, 2, 1, 20)], "kernel")
    log = sarif.document(sarif.of_error(error))
    (result,) = log["runs"][0]["results"]
    places = [
        (p["artifactLocation"]["uri"], p["region"]["startLine"])
        for p in (at["physicalLocation"] for at in result["locations"] + result["relatedLocations"])
    ]
    assert sorted(places) == [("dir/k.py", 1), ("dir/k.py", 2)]
    assert (
        log["version"] == "2.1.0" and result["ruleId"] == log["runs"][0]["tool"]["driver"]["rules"][0]["id"]
    )
