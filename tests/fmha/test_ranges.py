"""Ranges of keys that queries see besides: the rule against the contract's words, the kernels in the simulator."""

import pytest
import torch
from helpers.gradient_cases import KERNEL_TOLERANCE, REFERENCE_TOLERANCE
from helpers.gradient_cases import Case as Gradients
from helpers.judged_calls import check, run
from helpers.range_cases import CASES, inputs_of, ranges_of, seen_by
from helpers.suites import long_but

from warpspec import sim
from warpspec.fmha import attention, attention_varlen
from warpspec.fmha.backward import call as backward_call
from warpspec.fmha.mask import visible
from warpspec.fmha.operands import Operands, Options
from warpspec.fmha.problem import AttentionProblem

SPILLED = 16  # bytes that ptxas keeps on the stack, once a tile: 8 at D 256 without ranges, too
EVERY = [(case, arch) for case in CASES for arch in ("sm_90a", "sm_100a")]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_visible_keys(case):
    for queries, keys in zip(case.queries, case.keys, strict=True):
        ranges = ranges_of(case, queries, keys)
        q, k = torch.zeros(1, queries, 1, 64).half(), torch.zeros(1, keys, 1, 64).half()
        window = dict(case.options).get("window")
        problem = AttentionProblem.of(q, k, causal=True, window=window, ranges=ranges[None])
        assert torch.equal(visible(problem, ranges=ranges[None])[0], seen_by(case, ranges, queries, keys))


@pytest.mark.parametrize(("case", "arch"), long_but([EVERY[0]], EVERY), ids=lambda v: getattr(v, "id", v))
def test_case(case, arch, simulate_as, check_order):
    simulate_as(arch, small=True, sm_count=2)
    inputs = inputs_of(case)
    check(case, run(case, inputs, backend="sim"), inputs)
    assert all(found.local_bytes <= SPILLED for found in sim.last_report().launches)


IMAGES = ((3, 40), (41, 60), (75, 130))
GRADIENTS = {
    "packed": Gradients("packed", lengths_q=(100, 0, 33), lengths_k=(150, 9, 33), heads_q=2, causal=True, sink=True,
                        through="o+lse", window=(20, 0), images=IMAGES),
    "deterministic": Gradients("deterministic", batch=2, seq_q=100, seq_k=150, heads_q=2, head_dim=128, causal=True,
                               window=(30, 0), kv_lengths=(150, 101), deterministic=True, images=IMAGES),
    "causal": Gradients("causal", seq_q=140, seq_k=140, heads_q=1, head_dim=256, causal=True, images=IMAGES,
                        dtype=torch.float16),
    "q-start": Gradients("q-start", batch=2, seq_q=70, seq_k=150, heads_q=2, causal=True, q_start=(5, 80),
                         softcap=4.0, images=IMAGES),
}  # fmt: skip


@pytest.mark.parametrize("name", GRADIENTS)
def test_gradients_by_definition(name):
    GRADIENTS[name].judge(REFERENCE_TOLERANCE, backend="reference")


@pytest.mark.parametrize(
    ("name", "arch"), long_but([], [(name, arch) for name in GRADIENTS for arch in ("sm_90a", "sm_100a")])
)
def test_gradients(name, arch, simulate_gradients_as, check_order):
    simulate_gradients_as(arch)
    GRADIENTS[name].judge(KERNEL_TOLERANCE, backend="reference")


def test_rows_of_no_request():
    q, none = torch.zeros(3, 1, 64).half(), torch.zeros(1, dtype=torch.int32)
    ranges = torch.full((3, 2), -1, dtype=torch.int32)
    options = {"max_seqlen_q": 1, "cu_seqlens_k": none, "causal": True, "ranges": ranges}
    assert attention_varlen(q, q, None, none, **options, backend="reference").shape == q.shape


def test_what_is_refused():
    q, k = torch.zeros(1, 3, 1, 64).half(), torch.zeros(1, 9, 1, 64).half()
    ranges = torch.full((1, 3, 2), -1, dtype=torch.int32)

    def refuse(error, match, q=q, **options):
        with pytest.raises(error, match=match):
            attention(q, k, **{"ranges": ranges, "causal": True, "backend": "reference", **options})

    refuse(TypeError, "ranges: dtype must be", ranges=ranges.long())
    refuse(
        ValueError, r"ranges: shape must be \[B, Sq, 2\] = \[1, 3, 2\], got \[1, 3\]", ranges=ranges[..., 0]
    )
    refuse(ValueError, "ranges: needs causal=True and key_stride 1, got causal=False", causal=False)
    refuse(ValueError, "ranges: must be None with a tree", tree=torch.zeros(1, 3, dtype=torch.int64))
    for pair in ((2, 6), (8, 8), (-1, 7), (7, -1), (-2, -2)):
        wrong = ranges.clone()
        wrong[0, 1] = torch.tensor(pair)
        refuse(ValueError, r"ranges: must be .*position, 7, got .* at index \[0, 1\]", ranges=wrong)
    starts = torch.tensor([0, 1, 3], dtype=torch.int32)
    packed = torch.full((4, 2), -1, dtype=torch.int32)
    packed[2], packed[3] = torch.tensor([5, 6]), torch.tensor([90, 95])  # row 3 is no request's
    with pytest.raises(ValueError, match=r"ranges: must be .*position, 2, got \(5, 6\) at index \[2\]"):
        attention_varlen(
            torch.cat([q, q], 1)[0, :4], k[0], None, starts, max_seqlen_q=2, cu_seqlens_k=starts + starts.clamp(max=2),
            causal=True, ranges=packed, backend="reference",
        )  # fmt: skip


@pytest.mark.parametrize("packed", [False, True])
def test_gradients_need_ascending_keys(packed, monkeypatch):
    """Kernels search for the queries that see a key: keys that end or, with a window, begin earlier are refused."""
    monkeypatch.setattr(backward_call.launch, "prepare", lambda problem, target: None)
    monkeypatch.setattr(backward_call.launch, "workspace_of", lambda *_: None)
    q, k = torch.zeros(1, 9, 1, 64).half(), torch.zeros(1, 9, 1, 64).half()
    starts = torch.tensor([0, 4, 8], dtype=torch.int32)  # the ninth row is no request's

    def check(rows: dict, **options):
        ranges = torch.full((1, 9, 2), -1, dtype=torch.int32)
        for row, own in rows.items():
            ranges[0, row] = torch.tensor(own)
        operands = Operands(q, k, k.clone(), q.clone(), ranges=ranges, lse=torch.zeros(1, 1, 9))
        if packed:
            tensors = {name: t[0] for name, t in operands._asdict().items() if t is not None}
            operands = Operands(**tensors, cu_seqlens_q=starts, cu_seqlens_k=starts)
            options |= {"max_seqlen_q": 4, "max_seqlen_k": 4}
        backward_call.check(
            operands, Options.of(causal=True, **options), "sim", (True, True, True, False, False), q, None
        )

    own = {4: (0, 2), 5: (0, 2), 6: (0, 2)} if packed else {4: (4, 6), 5: (4, 6), 6: (4, 6)}
    check(own)
    check(own, window=(1, 0))
    check(own | {8: (0, 0) if packed else (8, 8)})
    place = r"\[5\]" if packed else r"\[0, 5\]"
    del own[5]
    with pytest.raises(ValueError, match=rf"^ranges: gradients need .*got \(-1, -1\) at index {place}"):
        check(own)
    late = {6: (0, 2)} if packed else {6: (2, 6)}
    check(late)
    place = r"\[6\]" if packed else r"\[0, 6\]"
    with pytest.raises(ValueError, match=rf"^ranges: gradients need .* at index {place} after \(-1, -1\)"):
        check(late, window=(0, 0))
