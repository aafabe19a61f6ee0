"""Gathered attention: the reference against torch's attention, key sets against their union, bad arguments."""

import pytest
import torch
from helpers.gathered_cases import pool_of_rows, random_case

from warpspec.fmha import merge
from warpspec.latent.cache import LatentPool, rope_table
from warpspec.latent.gathered import KeySet, gathered_attention, problem


def test_is_torch_attention():
    """Over the rows that count, by scaled_dot_product_attention in fp64; the sink as one more key of value 0."""
    case = random_case(4, 3, (20, 33), rotate=False)
    o, lse = gathered_attention(case.q, case.key_sets, backend="reference", **case.options)
    for token in range(4):
        rows = []
        for each in case.key_sets:
            slots = each.slots[token, : each.lengths[token]]
            rows.append(each.pool.read(slots[(slots >= 0) & (slots < each.pool.capacity)]))
        keys = torch.cat(rows).double()
        if not len(keys):
            assert not o[token].any() and lse[:, token].eq(-torch.inf).all()
            continue
        logits = case.q[token].double() @ keys.T * 512**-0.5
        with_sink = torch.cat((logits, case.options["sink"][:, None].double()), 1).softmax(1)[:, :-1]
        assert ((o[token].double() - with_sink @ keys).abs() < 0.01 * keys.abs().max()).all()
        assert torch.allclose(lse[:, token].double(), logits.logsumexp(1), atol=1e-4)


def test_key_sets_are_one_set_of_keys():
    """Two sets, their states merged, and both in one list of slots: the same."""
    case = random_case(3, 2, (17, 9), sink=False, rotate=False, lse=False)
    whole = gathered_attention(case.q, case.key_sets, backend="reference")
    states = [gathered_attention(case.q, [k], normalize=False, backend="reference") for k in case.key_sets]
    assert torch.allclose(merge(states)[0], whole.float(), atol=0.02)
    pool = case.key_sets[0].pool
    slots = torch.randint(-1, 90, (3, 16)).to(torch.int32)
    halves = [KeySet(pool, part.contiguous()) for part in slots.split(8, dim=1)]
    together = KeySet(pool, slots)
    assert torch.equal(
        gathered_attention(case.q, halves, backend="reference"),
        gathered_attention(case.q, [together], backend="reference"),
    )


def test_rotating_back_undoes_a_rotation():
    """One key, rotated by the query's own angles, comes out as it was."""
    table = rope_table(1e4 ** (-torch.arange(32) / 32), 100)
    row, at = torch.randn(1, 512), torch.tensor([37], dtype=torch.int32)
    pairs = torch.view_as_complex(row[:, 448:].reshape(1, 32, 2)) * torch.complex(
        table[at, :32], table[at, 32:]
    )
    turned = torch.cat((row[:, :448], torch.view_as_real(pairs).flatten(1)), dim=1)
    pool = LatentPool.empty(1, 1, "bf16")
    pool.write(torch.tensor([0]), turned.bfloat16())
    key_set = KeySet(pool, torch.zeros(1, 1, dtype=torch.int32))
    q = torch.randn(1, 2, 512).bfloat16()
    o = gathered_attention(q, [key_set], rotate_back=(table, at), backend="reference")
    assert torch.allclose(o[0, 1].float(), row[0], atol=0.02)


def test_tables_of_pages(monkeypatch):
    generator = torch.Generator().manual_seed(0)
    pool = pool_of_rows(40, 8, "v4-fp8", generator)
    table = torch.tensor([[4, 0], [2, -1]], dtype=torch.int32)
    lengths = torch.tensor([3, 16, 8], dtype=torch.int32)
    got = KeySet.from_table(pool, table, torch.tensor([1, 0, 1]), lengths)
    assert got.slots[0].tolist() == [*range(16, 24), *[-1] * 8] and got.slots[1].tolist() == [
        *range(32, 40),
        *range(8),
    ]
    assert torch.equal(got.lengths, lengths)
    for change, error, message in [
        ({"requests": torch.tensor([1, 2, 0])}, ValueError, "requests: .* got 2 at index 1"),
        ({"requests": torch.tensor([1.0, 0.0, 0.0])}, TypeError, "requests: dtype"),
        ({"page_table": table.long()}, TypeError, "page_table: dtype"),
        ({"lengths": lengths[:2]}, ValueError, r"lengths: shape must be \[3\]"),
        ({"lengths": lengths + 1}, ValueError, "lengths: .* got 17 at index 1"),
    ]:
        arguments = {"page_table": table, "requests": torch.tensor([1, 0, 1]), "lengths": lengths} | change
        with pytest.raises(error, match=message):
            KeySet.from_table(pool, **arguments)
    monkeypatch.setattr(problem, "check_range", lambda *arguments: None)  # as on a GPU
    got = KeySet.from_table(pool, table, torch.tensor([-1, 1, 5]), lengths)
    assert got.lengths.tolist() == [0, 16, 0]


def test_longer_rows():
    """ "v3.2-fp8": 576 numbers make logits, the first 512 of them are the value."""
    generator = torch.Generator().manual_seed(0)
    pool = pool_of_rows(5, 4, "v3.2-fp8", generator)
    q = torch.randn(1, 2, 576, generator=generator).bfloat16()
    slots = torch.tensor([[3, 1, 4]], dtype=torch.int32)
    keys = pool.read(slots[0])
    wanted = (q[0].float() @ keys.T * 512**-0.5).softmax(1) @ keys[:, :512]
    got = gathered_attention(q, [KeySet(pool, slots)], backend="reference")
    assert torch.allclose(got[0].float(), wanted, atol=0.02)


def good() -> dict:
    case = random_case(3, 2, (8,), rotate=False, lse=False)
    return {"q": case.q, "key_sets": case.key_sets, "backend": "reference", **case.options}


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"q": torch.zeros(3, 2, 512)}, TypeError, "q: dtype"),
        (
            {"q": torch.zeros(3, 2, 576, dtype=torch.bfloat16)},
            ValueError,
            r"q: shape must be \[any, any, 512\]",
        ),
        (
            {"q": torch.zeros(3, 129, 512, dtype=torch.bfloat16)},
            ValueError,
            "q: must have 1 to 128 heads, got 129",
        ),
        ({"q": torch.zeros(2, 2, 512, dtype=torch.bfloat16)}, ValueError, "key_sets: slots of set 0"),
        ({"key_sets": []}, ValueError, "key_sets: must be 1 to 3"),
        ({"key_sets": [1]}, TypeError, "key_sets: must hold KeySet"),
        ({"key_sets": None}, TypeError, "key_sets: must be a list"),
        ({"scale": 0.0}, ValueError, "scale: must be"),
        ({"scale": 2.0**101}, ValueError, "scale: must be at most .* got 2.5"),
        ({"sink": torch.zeros(3)}, ValueError, r"sink: shape must be \[2\]"),
        ({"normalize": False}, ValueError, "normalize: an un-normalised state has no sink"),
        ({"num_splits": 0}, ValueError, "num_splits: must be within 1..1024, got 0"),
        ({"rotate_back": torch.zeros(3)}, TypeError, "rotate_back: must be"),
        (
            {"rotate_back": (torch.zeros(2, 64), torch.tensor([0, 2, 0]).int())},
            ValueError,
            "positions: .* got 2",
        ),
        ({"out": torch.zeros(3, 2, 512)}, TypeError, "out: dtype"),
        ({"out": torch.zeros(3, 2, 512).bfloat16().requires_grad_()}, NotImplementedError, "out: gradients"),
        ({"out_format": "fp16"}, ValueError, "out_format: must be one of bf16, fp8, got 'fp16'"),
        ({"out_format": "fp8", "normalize": False, "sink": None}, ValueError, "out_format: an un-norm"),
        (
            {"out_format": "fp8", "out": torch.zeros(3, 2, 512).bfloat16()},
            TypeError,
            "out: must be a Float8Tensor",
        ),
    ],
)
def test_bad_arguments(change, error, message):
    with pytest.raises(error, match=message):
        gathered_attention(**(good() | change))


def test_memory_of_splits():
    """Splits are as many as 16 GiB hold, as in ``attention``."""
    pool, slots = LatentPool.empty(1, 4, "v4-fp8"), torch.zeros(1, 2, dtype=torch.int32).expand(2**15, 2)
    q = torch.zeros(1, 1, 512, dtype=torch.bfloat16).expand(2**15, 128, 512)
    with pytest.raises(ValueError, match=r"^num_splits: 1024 splits .* at most 2 splits"):
        gathered_attention(q, [KeySet(pool, slots)], num_splits=1024, backend="reference")


def test_bad_key_sets():
    pool, slots = LatentPool.empty(1, 4, "v4-fp8"), torch.zeros(3, 2, dtype=torch.int32)
    for arguments, error, message in [
        ((pool.data, slots), TypeError, "pool: must be a LatentPool"),
        ((pool, slots.long()), TypeError, "slots: dtype"),
        ((pool, slots[0]), ValueError, "slots: shape"),
        ((pool, slots, torch.tensor([0, 1, 3]).int()), ValueError, "lengths: .* got 3 at index 2"),
        ((pool, slots, torch.tensor([0, 1]).int()), ValueError, r"lengths: shape must be \[3\]"),
    ]:
        with pytest.raises(error, match=message):
            KeySet(*arguments)
    q = torch.zeros(3, 2, 512, dtype=torch.bfloat16)
    with pytest.raises(
        ValueError, match="rows must be of one format, got 'v4-fp8' in set 0 and 'bf16' in set 1"
    ):
        gathered_attention(q, [KeySet(pool, slots), KeySet(LatentPool.empty(1, 4, "bf16"), slots)])


@pytest.mark.long
def test_operator_is_traced():
    case = random_case(3, 2, (8, 9))

    def call(q):
        return gathered_attention(q, case.key_sets, backend="reference", **case.options)

    traced = torch.compile(call, backend="eager", fullgraph=True)
    assert all(torch.equal(a, b) for a, b in zip(traced(case.q), call(case.q), strict=True))
