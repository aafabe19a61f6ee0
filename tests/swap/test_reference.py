"""The FP32 definition against loops over cores in float64, the unfused peer, weights and maps."""

import itertools
import math

import numpy as np
import pytest
import torch
from helpers.swap_cases import error, reference_of, small, unfused

from warpspec.swap import SwapFFNWeights, SwapState, swap_ffn_decode
from warpspec.swap.reference import lanes, pack_lanes, swap
from warpspec.swap.weights import IDENTITY_MAP, SHAPES

SIZES = dict(cores=5, d_model=16, d_ff=24, collapse_r=6, d_router=8, collapse_k=3)


def by_hand(x, state, w, events, k_ffn, residual):
    """One request, float64, a core at a time, from the words of the specification."""
    t = {name: w[name].double().numpy() for name in SHAPES}
    ram, map_ = state.ram[0].double().numpy().copy(), state.map[0].tolist()
    token, vectors, slots = x[0].double().numpy(), [], []
    for core in range(w.cores):
        e = t["core_embed"][core]
        scale = 1 + t["core_scale.weight"] @ e + t["core_scale.bias"]
        shift = t["core_shift.weight"] @ e + t["core_shift.bias"]
        logits = t["core_alpha.weight"] @ e + t["core_alpha.bias"]
        slots.append(np.exp(logits) / np.exp(logits).sum())
        v = token * scale + shift
        for _ in range(events):
            n = v / math.sqrt((v**2).mean() + w.eps) * t["router_norm"]
            z = t["router_w"] @ n
            gate = 1 / (1 + math.exp(-(z @ t["swap_w"] + t["swap_b"][0]))) > 0.5
            logical = int(np.argmax(z @ t["bank_w"] + t["bank_b"]))
            if gate:
                places = [map_[core] >> 2 * i & 3 for i in range(4)]
                physical = places[logical]
                v, ram[core, physical] = ram[core, physical].copy(), v.copy()
                places[0], places[logical] = physical, places[0]
                map_[core] = sum(p << 2 * i for i, p in enumerate(places))
            for _ in range(k_ffn):
                n = v / math.sqrt((v**2).mean() + w.eps) * t["ffn_norm"]
                gate_, up = t["w1"] @ n, t["w3"] @ n
                v = t["w2"] @ (gate_ / (1 + np.exp(-gate_)) * up) + (v if residual else 0)
        vectors.append(v)
    pooled = np.einsum("ck,cd->kd", slots, vectors)
    s = np.einsum("krd,kd->r", t["basis"], pooled)
    return t["decoder"] @ (s / (1 + np.exp(-s))), ram, map_


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_reference_is_the_specification(seed, residual):
    x, state, w = small(2, seed=seed, **SIZES)
    call = dict(events=3, k_ffn=2, residual=residual)
    delta, new, made = reference_of(x, state, w, call)
    assert made.gate.any() and not made.gate.all()
    for b in range(2):
        one = SwapState(state.ram[b : b + 1], state.map[b : b + 1])
        by_loop, ram, map_ = by_hand(x[b : b + 1], one, w, **call)
        np.testing.assert_allclose(delta[b].numpy(), by_loop, rtol=2e-4, atol=2e-5)
        np.testing.assert_allclose(new.ram[b].numpy(), ram, rtol=2e-4, atol=2e-5)
        assert new.map[b].tolist() == map_


def test_maps_stay_permutations_and_lane_0_takes_the_bank_just_read():
    orders = list(itertools.permutations(range(4)))
    maps = pack_lanes(torch.tensor(orders)).repeat_interleave(4)[None]  # each with every logical bank
    logical = torch.arange(4).repeat(len(orders))[None]
    assert torch.equal(lanes(maps)[0, ::4], torch.tensor(orders))
    x, ram = torch.randn(1, 96, 8), torch.randn(1, 96, 4, 8)
    gate = torch.ones(1, 96, dtype=torch.bool)
    new_x, new_ram, new_map = swap(x, ram, maps, gate, logical)
    new = lanes(new_map)[0]
    assert torch.equal(new.sort(-1).values, torch.arange(4).expand(96, 4))
    for core in range(96):
        physical = lanes(maps)[0, core, logical[0, core]]
        assert new[core, 0] == physical and torch.equal(new_ram[0, core, physical], x[0, core])
        assert torch.equal(new_x[0, core], ram[0, core, physical])
    closed = swap(x, ram, maps, ~gate, logical)
    assert all(torch.equal(a, b) for a, b in zip(closed, (x, ram, maps), strict=True))


def test_unfused_peer_is_the_same_step_in_bf16():
    x, state, w = small(2, cores=24)
    call = dict(events=3, k_ffn=2, residual=False)
    delta, new, made = reference_of(x, state, w, call)
    own, peer, _ = unfused(x, state, w, call, made)
    assert 1e-3 < error(own, delta) < 5e-2 and error(peer.ram, new.ram) < 1e-2
    assert torch.equal(peer.map, new.map)


def test_prepared_weights():
    """gate and up alternate by eight rows, the norm is folded in, features beyond d_ff are zero."""
    *_, w = small(d_ff=20)
    blocks = w.w13.view(-1, 2, 8, w.d_model)
    assert w.d_ff_padded == 256 and w.w13.shape == (512, 256) and w.w2.shape == (256, 256)
    for i, name in enumerate(("w1", "w3")):
        folded = (w[name].float() * w["ffn_norm"].float()).bfloat16()
        rows = blocks[:, i].reshape(-1, w.d_model)
        assert torch.equal(rows[:20], folded) and not rows[20:].any()
    assert torch.equal(w.w2[:, :20], w["w2"]) and not w.w2[:, 20:].any()
    assert torch.allclose(w.core_alpha.sum(-1), torch.ones(w.cores))


def test_public_function_on_the_reference_backend():
    x, state, w = small(2)
    kept = state.clone()
    delta, new = swap_ffn_decode(x, state, w, events=2, backend="reference")
    wanted, wanted_state, _ = reference_of(x, state, w, dict(events=2, k_ffn=2, residual=False))
    assert torch.equal(delta, wanted.bfloat16()) and torch.equal(new.ram, wanted_state.ram.bfloat16())
    assert torch.equal(new.map, wanted_state.map)
    assert torch.equal(state.ram, kept.ram) and torch.equal(state.map, kept.map)
    again, same = swap_ffn_decode(x, state, w, events=2, in_place=True, backend="reference")
    assert same is state and torch.equal(state.ram, new.ram) and torch.equal(again, delta)


def test_a_hundred_steps_of_state():
    """Maps stay permutations; every bank holds what was there, or a vector that was swapped out."""
    x, state, w = small(2, cores=6, d_model=32, d_ff=40)
    fresh = SwapState.initial(2, w)
    assert (fresh.map == IDENTITY_MAP).all() and not fresh.ram.any()
    seen = set()
    for _ in range(100):
        x, state = swap_ffn_decode(x, state, w, events=2, k_ffn=1, backend="reference")
        x = torch.nn.functional.normalize(x.float(), dim=-1).mul(8).bfloat16()
        assert torch.equal(lanes(state.map).sort(-1).values, torch.arange(4).expand(2, 6, 4))
        seen.update(state.map.flatten().tolist())
    assert len(seen) > 8 and state.ram.isfinite().all()


def test_torch_compile_traces_the_operator():
    x, state, w = small(1, cores=4, d_model=32, d_ff=40)
    w.prepare()

    @torch.compile(fullgraph=True, backend="aot_eager")
    def step(x, ram, map_):
        delta, new = swap_ffn_decode(x * 2, SwapState(ram, map_), w, events=1, backend="reference")
        return delta + 1, new.ram, new.map

    delta, ram, map_ = step(x, state.ram, state.map)
    wanted, new = swap_ffn_decode(x * 2, state, w, events=1, backend="reference")
    assert torch.equal(delta, wanted + 1) and torch.equal(ram, new.ram) and torch.equal(map_, new.map)


def test_weights_are_checked():
    *_, w = small(cores=3, d_model=32, d_ff=40)
    good = dict(w.tensors)
    for name, change, kind in (
        ("w1", lambda t: t[:, 1:], ValueError),
        ("w2", lambda t: t.int(), TypeError),
        ("bank_w", lambda t: t.T, ValueError),
        ("swap_b", lambda t: t[:0], ValueError),
        ("basis", lambda t: t[0], ValueError),
        ("decoder", lambda t: None, TypeError),
    ):
        with pytest.raises(kind, match=rf"^{name}: "):
            SwapFFNWeights.from_tensors(good | {name: change(good[name])})
    with pytest.raises(KeyError, match=r"missing.*'w3'"):
        SwapFFNWeights.from_tensors({name: t for name, t in good.items() if name != "w3"})
    with pytest.raises(KeyError, match=r"unknown.*'w4'"):
        SwapFFNWeights.from_tensors(good | {"w4": good["w1"]})
    with pytest.raises(ValueError, match=r"^eps: "):
        SwapFFNWeights.from_tensors(good, eps=0.0)
