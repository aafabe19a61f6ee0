"""``mla_decode`` over e4m3 rows where torch.compile or a mode watches: through one operator, with the same results."""

import pytest
import torch
from helpers.recorder import Recorder
from helpers.suites import long

from warpspec.common.errors import UnsupportedProblem
from warpspec.latent import mla_decode, mla_schedule

generator = torch.Generator().manual_seed(0)
Q = torch.randn(2, 2, 8, 576, generator=generator).bfloat16()
KV = torch.randn(4, 64, 576, generator=generator).to(torch.float8_e4m3fn)
TABLE = torch.tensor([[3, 1], [2, 0]], dtype=torch.int32)
LENGTHS = torch.tensor([70, 9], dtype=torch.int32)
SCALE = torch.tensor([0.5])
OPTIONS = {"scale": 0.05, "kv_scale": SCALE}


@pytest.mark.parametrize("results", ["o", "lse", "state", "out"])
def test_a_compiled_call_gives_what_an_eager_one_does(results):
    options = {"o": {}, "lse": {"return_lse": True}, "state": {"normalize": False}, "out": {}}[results]

    def call(q, out):
        found = mla_decode(q, KV, TABLE, LENGTHS, **OPTIONS, **options, out=out, backend="reference")
        return found if isinstance(found, tuple) else (found,)

    outs = [torch.full((2, 2, 8, 512), torch.nan).bfloat16() if results == "out" else None for _ in range(2)]
    found = torch.compile(call, fullgraph=True, backend="aot_eager")(Q, outs[0])
    wanted = call(Q, outs[1])
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
    assert wanted[0].isfinite().all() and wanted[0].any()
    if results == "out":
        assert torch.equal(outs[0], outs[1])


def test_a_watched_call_is_one_operator_and_simulated():
    with Recorder() as seen:
        found = mla_decode(Q, KV, TABLE, LENGTHS, **OPTIONS, return_lse=True, backend="sim")
    assert seen.names == ["mla_decode_float8"]
    wanted = mla_decode(Q, KV, TABLE, LENGTHS, **OPTIONS, return_lse=True, backend="sim")
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
    assert found[0].any()


@pytest.mark.parametrize("kv", [KV, long(KV.bfloat16())], ids=["e4m3", "bf16"])
def test_lengths_and_tables_of_any_strides(kv):
    """The lengths are a column of a tensor, the table is transposed."""
    apart = (TABLE.T.contiguous().T, torch.stack([LENGTHS, LENGTHS + 1], dim=1)[:, 0])
    assert apart[0].stride() == (1, 2) and apart[1].stride() == (2,)
    schedule = mla_schedule(apart[1], heads=8, queries=2, max_pages=2, dtype=kv.dtype, backend="sim")
    options = {"scale": 0.05, "return_lse": True, "schedule": schedule, "backend": "sim"}
    found, wanted = (mla_decode(Q, kv, *tensors, **options) for tensors in (apart, (TABLE, LENGTHS)))
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def test_a_compiled_call_that_kernels_cannot_run_says_so():
    call = torch.compile(mla_decode, backend="eager")
    with pytest.raises(UnsupportedProblem, match=r"kv: kernels read pages of 64 e4m3 rows, got 32"):
        call(Q, KV[:, :32], TABLE, LENGTHS, **OPTIONS, backend="sim")
