"""MLA's decode: which calls are refused, and calls that have no rows."""

import pytest
import torch

from warpspec.common.errors import UnsupportedProblem
from warpspec.fmha import attention
from warpspec.latent import mla_decode


def decode_call(**changes) -> dict:
    """Arguments of ``mla_decode`` on tensors of zeros."""
    call = dict(
        q=torch.zeros(2, 1, 4, 576).bfloat16(), kv=torch.zeros(3, 64, 576).bfloat16(),
        page_table=torch.zeros(2, 1, dtype=torch.int32), kv_lengths=torch.zeros(2, dtype=torch.int32), scale=0.1,
        backend="reference",
    )  # fmt: skip
    return {**call, **changes}


def test_a_default_device_is_no_trace_of_e4m3_rows():
    """torch.set_default_device is a mode, and many scripts set it."""
    codes = torch.zeros(3, 64, 576).to(torch.float8_e4m3fn)
    call = decode_call(kv=codes, page_table=torch.zeros(2, 0, dtype=torch.int32), backend="sim")
    with torch.device("cpu"):
        assert not mla_decode(**call).any()


CODES = torch.zeros(3, 64, 576).to(torch.float8_e4m3fn)
BAD = {
    "q-size": ({"q": torch.zeros(2, 1, 4, 512).bfloat16()}, ValueError, "q: shape must be"),
    "heads": (
        {"q": torch.zeros(2, 1, 129, 576).bfloat16()},
        ValueError,
        "q: must have 1 to 128 heads, got 129",
    ),
    "kv-dtype": ({"kv": torch.zeros(3, 64, 576)}, TypeError, "kv: dtype must be one of torch.bfloat16"),
    "kv-page": (
        {"kv": torch.zeros(3, 0, 576).bfloat16()},
        ValueError,
        "kv: pages must hold at least one row",
    ),
    "kv-size": ({"kv": torch.zeros(3, 64, 512).bfloat16()}, ValueError, "kv: shape must be"),
    "table": ({"page_table": torch.zeros(3, 1, dtype=torch.int32)}, ValueError, "page_table: shape must be"),
    "no-lengths": ({"kv_lengths": None}, TypeError, "kv_lengths: must be a torch.Tensor"),
    "long": ({"kv_lengths": torch.tensor([1, 65], dtype=torch.int32)}, ValueError, "kv_lengths: "),
    "kv-scale": (
        {"kv_scale": torch.ones(1)},
        ValueError,
        "kv_scale: must be None with rows of torch.bfloat16",
    ),
    "q-codes": (
        {"q": torch.zeros(2, 1, 4, 576).to(torch.float8_e4m3fn), "q_scale": torch.ones(1)},
        TypeError,
        "kv: dtype must be one of torch.float8_e4m3fn, got torch.bfloat16",
    ),
    "no-q-scale": (
        {"q": torch.zeros(2, 1, 4, 576).to(torch.float8_e4m3fn), "kv": CODES},
        ValueError,
        "q_scale: must be a scale with q in e4m3, got None",
    ),
    "q-scale": ({"q_scale": torch.ones(1)}, ValueError, "q_scale: must be None with rows of torch.bfloat16"),
    "q-scale-16-bits": (
        {"q_scale": torch.ones(1), "kv": CODES},
        ValueError,
        "q_scale: must be None with q of torch.bfloat16",
    ),
    "q-scales": (
        {"q": torch.zeros(2, 1, 4, 576).to(torch.float8_e4m3fn), "kv": CODES, "q_scale": torch.ones(2)},
        ValueError,
        "q_scale: must be one number",
    ),
    "scale": ({"scale": None}, TypeError, "scale: must be a float"),
    "out": ({"out": torch.zeros(2, 1, 4, 576).bfloat16()}, ValueError, "out: shape must be"),
    "gradient": (
        {"q": torch.zeros(2, 1, 4, 576).bfloat16().requires_grad_()},
        NotImplementedError,
        "q: gradients",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input(name):
    changes, kind, message = BAD[name]
    with pytest.raises(kind, match="^" + message):
        mla_decode(**decode_call(**changes))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_memory_of_splits(dtype):
    """As many splits as 16 GiB hold are allowed, as in ``attention``."""
    requests = 2**15
    call = decode_call(
        q=torch.zeros(1, 1, 1, 576).bfloat16().expand(requests, 1, 128, 576),
        kv=torch.zeros(3, 64, 576).to(dtype),
        page_table=torch.zeros(1, 1, dtype=torch.int32).expand(requests, 1),
        kv_lengths=torch.zeros(requests, dtype=torch.int32),
        backend="sim",
    )
    with pytest.raises(ValueError, match=r"^num_splits: 3 splits .* need 25.8 GB .* at most 2 splits"):
        mla_decode(**call, num_splits=3)


def test_what_kernels_do_not_do_with_codes():
    codes = torch.zeros(3, 64, 576).to(torch.float8_e4m3fn)
    half = torch.zeros(2, 1, 4, 576).half()
    for changes, message in (
        ({"kv": codes[:, :32]}, "kv: kernels read pages of 64 e4m3 rows, got 32"),
        ({"kv": codes, "q": half}, "q: must be torch.bfloat16 or e4m3 with e4m3 rows"),
    ):
        with pytest.raises(UnsupportedProblem, match="^" + message):
            mla_decode(**decode_call(**changes, backend="sim"))
    apart = torch.zeros(3, 64, 592).to(torch.float8_e4m3fn)[..., :576]
    with pytest.raises(ValueError, match=r"^kv: e4m3 rows of a page must be contiguous"):
        mla_decode(**decode_call(kv=apart, backend="sim"))
    with pytest.raises(ValueError, match=r"^kv_scale: must be one number"):
        mla_decode(**decode_call(kv=codes, kv_scale=torch.ones(1, 1)))


def test_no_requests_with_codes():
    none = torch.zeros(0, 3, dtype=torch.int32)
    call = decode_call(
        kv=torch.zeros(3, 64, 576).to(torch.float8_e4m3fn), q=torch.zeros(0, 2, 4, 576).bfloat16(), page_table=none,
        kv_lengths=none[:, 0], backend="sim",
    )  # fmt: skip
    o, lse = mla_decode(**call, return_lse=True)
    assert o.shape == (0, 2, 4, 512) and lse.shape == (0, 4, 2)


def test_bad_values_with_codes():
    codes, table = (
        torch.zeros(3, 64, 576).to(torch.float8_e4m3fn),
        torch.tensor([[0], [3]], dtype=torch.int32),
    )
    one, out = torch.ones(2, dtype=torch.int32), torch.zeros(2, 1, 4, 512).bfloat16()
    for changes, message in (
        ({"page_table": table, "kv_lengths": one}, r"page_table: values must be 0\.\.2 .*, got 3"),
        ({"kv_lengths": one * 65}, r"kv_lengths: values must be 0\.\.64 .*, got 65"),
        ({"kv_scale": torch.tensor(-1.0)}, r"kv_scale: values must be finite and at least 0, got -1\.0"),
        (
            {"kv_scale": out.view(torch.float32).view(-1)[:1], "out": out},
            "out: must not overlap .* with kv_scale",
        ),
    ):
        for backend in ("sim", "reference"):
            with pytest.raises(ValueError, match="^" + message):
                mla_decode(**decode_call(kv=codes, **changes) | {"backend": backend})
    with pytest.raises(
        UnsupportedProblem, match=r"^scale: kernels take one of at least 0 with e4m3 rows, got -0\.1"
    ):
        mla_decode(**decode_call(kv=codes, backend="sim", scale=-0.1))
    with pytest.raises(NotImplementedError, match=r"^out: gradients"):
        mla_decode(**decode_call(kv=codes, out=out.requires_grad_()))


def test_sizes_of_v():
    """Attention takes as V the first 512 numbers of 576, and no other part of K's rows."""
    q, k = torch.ones(1, 2, 2, 576).bfloat16(), torch.ones(1, 9, 1, 576).bfloat16()
    assert attention(q, k, v_dim=512, backend="reference").shape == (1, 2, 2, 512)
    for wrong, message in (
        (dict(), "q: head size must be"),
        (dict(v_dim=576), "q: head size must be"),
        (dict(v_dim=512, v=k[..., :512]), "v_dim: must be None where v is given"),
    ):
        with pytest.raises(ValueError, match="^" + message):
            attention(q, k, **wrong)
    with pytest.raises(
        ValueError, match=r"^v_dim: must be q's head size, 128, or 512 with one of 576, got 64"
    ):
        attention(q[..., :128], k[..., :128], v_dim=64)
    with pytest.raises(NotImplementedError, match=r"^v_dim: gradients"):
        attention(q.requires_grad_(), k, v_dim=512, backend="reference").sum().backward()
