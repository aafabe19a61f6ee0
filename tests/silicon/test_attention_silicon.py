"""The sm_90a attention kernels: what an H200 made of a call (tests/recorders/record_attention.py), what the simulator
makes of the same kernel and inputs, and that the comparison sees what it is to see."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from attention_silicon.cases import CASES
from attention_silicon.compare import problems
from helpers.attention_cases import check
from helpers.suites import long
from record_attention import load

from warpspec import sim
from warpspec.fmha import AttentionState, launch

ABOUT, RESULTS = load()
RECORDED = [case for case in CASES if case.name in ABOUT["cases"]]
BY_NAME = {case.name: case for case in CASES}
# Cases whose features others here have: at another head dimension, or a state, which every split is.
LONG = (
    "causal-64",
    "causal-128",
    "causal-256",
    "negative-scale-64",
    "window-sink-64",
    "splits-128",
    "bias-bf16-64",
    "bias-fp32-128",
    "fp16-128",
    "state-128",
    "pages-of-16-64",
    "pages-of-64-128",
    "shared-kv-64",
    "shared-kv-512",
    "shared-kv-prefill-512",
)
JUDGED = ("splits-64", "state-128")  # cases on which the comparison itself is tried


@pytest.fixture(autouse=True)
def simulate_sm90(simulate_as):
    """Backend "sim" runs the sm90 kernel."""
    simulate_as("sm_90a")


if RECORDED:

    @pytest.mark.parametrize(
        "case", [long(case) if case.name in LONG else case for case in RECORDED], ids=lambda case: case.name
    )
    def test_simulator_agrees_with_the_gpu(case):
        digests = ABOUT["cases"][case.name]
        assert case.inputs_digest() == digests["inputs"], "the inputs are not those of the recording"
        want = recorded(case)
        got = case.run("cpu")
        found = problems(got, want, case.dtypes)
        changed = case.kernel_digest() != digests["kernel"]
        note = (
            f"; the kernel has changed since: python tests/recorders/record_attention.py {case.name}"
            if changed
            else ""
        )
        assert not found, f"recorded on {ABOUT['gpu']}{note}:\n" + "\n".join(found)
        assert all(kernel.local_bytes == 0 for kernel in sim.last_report().launches), "registers spill"
        check_against_reference(case, got)


def recorded(case) -> dict[str, np.ndarray]:
    """The GPU's results."""
    return {name: RESULTS[f"{case.name}/{name}"] for name in case.dtypes}


def check_against_reference(case, got: dict[str, np.ndarray]) -> None:
    """The results lie within the tolerances of DESIGN 7, as those of the kernel's other cases do."""
    inputs = {name: value for name, value in case.inputs.items() if name not in ("num_splits", "return_lse")}
    tensors = [torch.from_numpy(got[name]).view(dtype) for name, dtype in case.dtypes.items()]
    check(
        case.case, tensors if case.case.normalize else AttentionState(*tensors), inputs, against_torch=False
    )


def test_recordings_have_their_cases():
    assert set(ABOUT["cases"]) == set(BY_NAME) and len(BY_NAME) == len(CASES)


@pytest.mark.parametrize("name", JUDGED)
def test_a_result_agrees_with_itself_and_with_nothing_else(name):
    case = BY_NAME[name]
    want = recorded(case)
    assert problems(want, want, case.dtypes) == []

    def changed(result, change):
        values = torch.from_numpy(want[result].copy()).view(case.dtypes[result])
        change(values)
        return {**want, result: values.view(torch.from_numpy(want[result]).dtype).numpy()}

    def swap_heads(o):
        o[:, :, :2] = o[:, :, :2].flip(2).clone()

    for result, change in (
        ("o", lambda o: o.mul_(1.01)),
        ("o", swap_heads),
        ("o", lambda o: o[0, 0, 0].zero_()),
        ("o", lambda o: o[0, 0, 1, 3:4].fill_(torch.nan)),
        ("o", lambda o: o[:, :, 1].add_(1e-2 * o[:, :, 0])),
    ):
        assert problems(changed(result, change), want, case.dtypes), "a wrong o passes"
    for result in case.dtypes.keys() - {"o"}:
        for change in (lambda t: t.mul_(1.001), lambda t: t[0, 1].fill_(-torch.inf)):
            assert problems(changed(result, change), want, case.dtypes), f"a wrong {result} passes"
    missing = {key: value for key, value in want.items() if key == "o"}
    assert problems(missing, want, case.dtypes) and problems(
        {**want, "o": want["o"][:, :, :1]}, want, case.dtypes
    )


def test_neighbouring_values_are_not_told_apart():
    """One unit in the last place of every four-hundredth element of o, and of all statistics."""
    case = BY_NAME["causal-64"]
    want = recorded(case)
    o = want["o"].copy()
    o.reshape(-1)[::401] += np.int16(1)
    assert problems({"o": o, "lse": want["lse"] + np.int32(1)}, want, case.dtypes) == []


def test_the_kernel_digest_covers_both_kernels_of_split_keys(monkeypatch):
    case, combine_config = BY_NAME["splits-64"], launch.combine_config
    digest = case.kernel_digest()
    assert digest == case.kernel_digest()
    monkeypatch.setattr(
        launch, "combine_config", lambda *call: replace(combine_config(*call), dtype="float32")
    )
    assert digest != case.kernel_digest()
