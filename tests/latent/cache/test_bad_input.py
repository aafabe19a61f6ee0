"""Bad arguments of the caches' operations: an error that names the argument, and nothing written."""

import pytest
import torch
from helpers.cache_cases import POISON, Compressor, Run

from warpspec.common.errors import UnsupportedProblem
from warpspec.latent.cache import IndexPool, LatentPool, Tail, compress, insert_window, rope_table, store_rows

TABLE = rope_table(1e4 ** (-torch.arange(32) / 32), 16)


def insert_arguments() -> dict:
    pool = LatentPool.empty(2, 4, "v4-fp8")
    pool.data.fill_(POISON)
    return {
        "q": torch.randn(3, 2, 512).bfloat16(),
        "kv": torch.randn(3, 512).bfloat16(),
        "cos_sin": TABLE,
        "positions": torch.arange(3, dtype=torch.int32),
        "weight": torch.ones(512),
        "pool": pool,
        "slots": torch.arange(3, dtype=torch.int32),
        "backend": "reference",
    }


def wide(shape):
    return torch.zeros(shape, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"q": wide((3, 512))}, ValueError, r"q: shape must be \[3, any, 512\]"),
        ({"q": wide((3, 2, 512)).half()}, TypeError, "q: dtype"),
        ({"q": wide((3, 2, 1024))[..., ::2]}, ValueError, "q: last dimension must be contiguous"),
        ({"kv": wide((3, 516))[:, :512]}, ValueError, "kv: rows must be aligned to 16 bytes"),
        ({"kv": None}, TypeError, "kv: must be a torch.Tensor"),
        ({"cos_sin": TABLE[:, :32].contiguous()}, ValueError, r"cos_sin: shape must be \[any, 64\]"),
        (
            {"positions": torch.tensor([0, 16, 1], dtype=torch.int32)},
            ValueError,
            "positions: .* got 16 at index 1",
        ),
        ({"positions": torch.arange(3)}, TypeError, "positions: dtype"),
        ({"weight": torch.ones(448)}, ValueError, r"weight: shape must be \[512\]"),
        ({"slots": torch.arange(4, dtype=torch.int32)}, ValueError, r"slots: shape must be \[3\]"),
        ({"slots": torch.tensor([5, -1, 5], dtype=torch.int32)}, ValueError, "slots: .* got 5 twice"),
        ({"pool": IndexPool.empty(2, 4, "mxfp4")}, TypeError, "pool: must be a LatentPool, got IndexPool"),
        ({"pool": LatentPool.empty(2, 4, "v3.2-fp8")}, ValueError, "pool: insert_window stores rows of 512"),
        ({"out": wide((3, 1, 512))}, ValueError, "out: shape"),
        ({"q": None, "out": wide((3, 2, 512))}, ValueError, "out: there are no queries"),
        ({"eps": -1.0}, ValueError, "eps: must be"),
        ({"backend": "fast"}, ValueError, "backend: must be one of"),
        ({"weight": torch.ones(512, requires_grad=True)}, NotImplementedError, "weight: gradients"),
        ({"cos_sin": torch.zeros(16, 64, requires_grad=True)}, NotImplementedError, "cos_sin: gradients"),
    ],
)
def test_insert(change, error, message):
    arguments = insert_arguments() | change
    with pytest.raises(error, match=message):
        insert_window(**arguments)
    if arguments["pool"].format == "v4-fp8":
        assert (arguments["pool"].data == POISON).all()


def test_kernels_do_not_store_all_formats():
    rows, slots = wide((1, 576)), torch.zeros(1, dtype=torch.int32)
    with pytest.raises(UnsupportedProblem, match=r"pool: kernels store rows of .*'v3.2-fp8'"):
        store_rows(rows, LatentPool.empty(1, 4, "v3.2-fp8"), slots, backend="sim")


def test_kernels_do_not_pool_long_csa_entries():
    run = Run.start(Compressor.random("csa", 2, 8, stride=17), "v4-fp8")
    with pytest.raises(
        UnsupportedProblem, match=r"tail: kernels take CSA entries of at most 16 .* stride 17"
    ):
        compress(**run.arguments([2, 3]), backend="sim")
    assert (run.pool.data == POISON).all()


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"tail": None}, TypeError, "tail: must be a Tail"),
        (
            {"tail": Tail.empty("csa", 4, 128, 3, 0)},
            ValueError,
            "pool: rows must have the tail's 128 numbers",
        ),
        ({"hadamard": 1}, TypeError, "hadamard: must be a bool"),
        ({"hadamard": True}, ValueError, "hadamard: only index keys"),
        ({"requests": torch.tensor([1, 3], dtype=torch.int32)}, ValueError, "requests: .* got 3 at index 1"),
        (
            {"requests": torch.tensor([1, 1], dtype=torch.int32)},
            ValueError,
            "requests: each may be given once",
        ),
        ({"starts": torch.tensor([0, -1], dtype=torch.int32)}, ValueError, "starts: .* got -1 at index 1"),
        (
            {"starts": torch.tensor([0, 4], dtype=torch.int32)},
            ValueError,
            "starts: request 1 has written 0 tokens",
        ),
        (
            {"cu_seqlens": torch.tensor([0, 3, 4], dtype=torch.int32)},
            ValueError,
            "cu_seqlens: must rise from 0 to the 5",
        ),
        ({"cu_seqlens": torch.tensor([0, 6, 5], dtype=torch.int32)}, ValueError, "cu_seqlens: must rise"),
        (
            {"cu_seqlens": torch.tensor([0, 5], dtype=torch.int32)},
            ValueError,
            r"cu_seqlens: shape must be \[3\]",
        ),
        ({"slots": torch.zeros(4, dtype=torch.int32)}, ValueError, r"slots: shape must be \[5\]"),
        (
            {"content_gate": torch.zeros(5, 2, 512)},
            ValueError,
            r"content_gate: shape must be \[any, 2, 1024\]",
        ),
        ({"ape": torch.zeros(8, 1024)}, ValueError, r"ape: shape must be \[4, 1024\]"),
        ({"ape": torch.zeros(4, 1024).half()}, TypeError, "ape: dtype"),
    ],
)
def test_compress(change, error, message):
    run = Run.start(Compressor.random("csa", 2, 8), "v4-fp8")
    before = run.tail.progress.clone()
    with pytest.raises(error, match=message):
        compress(**(run.arguments([2, 3]) | change), backend="reference")
    assert (run.pool.data == POISON).all() and torch.equal(run.tail.progress, before)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"cos_sin": TABLE[:4]},
            "cos_sin: .* got 4 rows and an entry from position 4 on of request 2",
        ),
        ({"slots": torch.full((11,), 9, dtype=torch.int32)}, "slots: each may be given once, got 9 twice"),
    ],
)
def test_entries_of_compress(change, message):
    """Request 2 completes two entries; the slots of other tokens than their last are not looked at."""
    run = Run.start(Compressor.random("csa", 2, 8), "v4-fp8")
    arguments = run.arguments([8, 3])
    with pytest.raises(ValueError, match=message):
        compress(**arguments | change, backend="reference")
    assert (run.pool.data == POISON).all() and not run.tail.progress.any()
    arguments["slots"][arguments["slots"] < 0] = 9
    compress(**arguments, backend="reference")
    assert run.tail.progress[:, 0].tolist() == [0, 3, 8]


def test_drafts_that_cannot_be_taken_back():
    run = Run.start(Compressor.random("hca", 1, 8, stride=8), "v4-fp8", max_draft=2)
    run.call([5], [2], backend="reference")  # three are taken back, of two at most
    with pytest.raises(
        ValueError,
        match=r"starts: request 1 has written 5 tokens, .* \(max_draft 2\): must be 0 or within 3..5, got 2",
    ):
        run.call([1], backend="reference")


def test_no_tokens():
    run = Run.start(Compressor.random("csa", 2, 8), "v4-fp8")
    run.call([0, 0], backend="sim")
    assert (run.pool.data == POISON).all()
    arguments = insert_arguments() | {"backend": "sim", "q": wide((0, 2, 512)), "kv": wide((0, 512))}
    arguments |= {name: torch.zeros(0, dtype=torch.int32) for name in ("positions", "slots")}
    assert insert_window(**arguments).shape == (0, 2, 512)


def test_operators_are_traced():
    arguments = insert_arguments()
    eager = insert_window(**arguments)
    data = arguments["pool"].data.clone()
    arguments["pool"].data.fill_(POISON)
    compiled = torch.compile(lambda q: insert_window(q, **rest), backend="eager", fullgraph=True)
    rest = arguments | {}
    rest.pop("q")
    assert torch.equal(compiled(arguments["q"]), eager) and torch.equal(arguments["pool"].data, data)
