"""What ``swap_ffn_decode`` refuses, before anything is written."""

import pytest
import torch
from helpers.swap_cases import make_plan, run, simulated, small

from warpspec.common.errors import UnsupportedProblem
from warpspec.swap import SwapFFNWeights, SwapState, launch, swap_ffn_decode

CALL = dict(events=1, k_ffn=1, backend="reference")


def bad_state(state, **changes):
    return SwapState(changes.get("ram", state.ram), changes.get("map", state.map))


@pytest.mark.parametrize(
    ("change", "kind", "name"),
    [
        (lambda x, s: (x.float(), s), TypeError, "x"),
        (lambda x, s: (x[0], s), ValueError, "x"),
        (lambda x, s: (x[:, :-1], s), ValueError, "x"),
        (lambda x, s: (x, None), TypeError, "state"),
        (lambda x, s: (x, bad_state(s, ram=s.ram.float())), TypeError, r"state\.ram"),
        (lambda x, s: (x, bad_state(s, ram=s.ram[:1])), ValueError, r"state\.ram"),
        (lambda x, s: (x, bad_state(s, ram=s.ram.mT.contiguous().mT)), ValueError, r"state\.ram"),
        (lambda x, s: (x, bad_state(s, map=s.map.int())), TypeError, r"state\.map"),
        (lambda x, s: (x, bad_state(s, map=s.map[:, 1:])), ValueError, r"state\.map"),
        (lambda x, s: (x, bad_state(s, map=torch.zeros_like(s.map))), ValueError, r"state\.map"),
    ],
)  # fmt: skip
def test_tensors(change, kind, name):
    x, state, w = small(2, cores=4, d_model=32, d_ff=16)
    kept = state.clone()
    with pytest.raises(kind, match=rf"^{name}: "):
        swap_ffn_decode(*change(x, state), w, in_place=True, **CALL)
    assert torch.equal(state.ram, kept.ram) and torch.equal(state.map, kept.map)


@pytest.mark.parametrize(
    ("options", "kind", "name"),
    [
        (dict(events=0), ValueError, "events"),
        (dict(events=1.0), TypeError, "events"),
        (dict(k_ffn=0), ValueError, "k_ffn"),
        (dict(k_ffn=True), TypeError, "k_ffn"),
        (dict(residual=1), TypeError, "residual"),
        (dict(in_place=1), TypeError, "in_place"),
        (dict(backend="gpu"), ValueError, "backend"),
    ],
)
def test_options(options, kind, name):
    x, state, w = small(1, cores=4, d_model=32, d_ff=16)
    with pytest.raises(kind, match=rf"^{name}: "):
        swap_ffn_decode(x, state, w, **CALL | options)


@pytest.mark.parametrize(
    ("sizes", "name"),
    [(dict(d_model=32), "d_model"), (dict(d_router=32), "d_router"), (dict(collapse_k=4), "collapse_k")],
)  # fmt: skip
def test_sizes_that_no_kernel_takes(sizes, name):
    x, state, w = small(1, cores=4, **sizes)
    kept = state.clone()
    with pytest.raises(UnsupportedProblem, match=rf"^{name}: "):
        swap_ffn_decode(x, state, w, events=1, k_ffn=1, in_place=True, backend="sim")
    assert torch.equal(state.ram, kept.ram)


def test_gradients_and_weights_of_another_kind():
    x, state, w = small(1, cores=4, d_model=32, d_ff=16)
    with pytest.raises(NotImplementedError, match=r"^x: gradients"):
        swap_ffn_decode(x.clone().requires_grad_(), state, w, **CALL)
    trained = SwapFFNWeights({**w.tensors, "w2": w["w2"].clone().requires_grad_()}, w.eps)
    with pytest.raises(NotImplementedError, match=r"^weights\.w2: gradients"):
        swap_ffn_decode(x, state, trained, **CALL)
    with pytest.raises(TypeError, match=r"^weights: "):
        swap_ffn_decode(x, state, dict(w.tensors), **CALL)


@pytest.mark.parametrize("backend", ["reference", "sim"])
def test_no_request(backend):
    x, state, w = small(0, cores=4)
    delta, new = swap_ffn_decode(x, state, w, backend=backend)
    assert delta.shape == (0, 256) and new.ram.shape == (0, 4, 4, 256) and new.map.shape == (0, 4)


@pytest.mark.parametrize(
    "words", ["- Error name: cudaErrorCooperativeLaunchTooLarge\n- Error Code: 720", "(error code: 720) \n"]
)
def test_a_refused_cooperative_launch_says_so(monkeypatch, words):
    """In either spelling of the compiled host functions; any other error comes as it is."""

    def launcher(config, target, *, seed):
        def launch(*arguments):
            raise RuntimeError(words)

        return launch

    monkeypatch.setattr(launch.SWAP, "launcher", launcher)
    x, state, w = small(1, cores=4)
    plan = make_plan("sm_90a", fused=True)
    call = dict(events=1, k_ffn=1, residual=False)
    with pytest.raises(RuntimeError, match="no room for all 8 CTAs"):
        run(x, state, w, call, plan, simulated("sm_90a"))
    words = "error code: 719"
    with pytest.raises(RuntimeError, match=r"^error code: 719$"):
        run(x, state, w, call, plan, simulated("sm_90a"))


def test_weights_and_states():
    _, _, w = small(1, cores=4, d_model=32, d_ff=16)
    for call, kind, message in (
        (lambda: SwapState.initial(-1, w), ValueError, r"batch: must be within 0\.\.262144, got -1"),
        (lambda: SwapState.initial(True, w), TypeError, r"batch: must be an int, got True \(bool\)"),
        (lambda: SwapState.initial(2, w.tensors), TypeError, "weights: must be a SwapFFNWeights"),
        (lambda: SwapFFNWeights.from_tensors(None), TypeError, r"tensors: must be a Mapping, got None"),
        (lambda: SwapFFNWeights.from_tensors(w.tensors, eps="0"), TypeError, "eps: must be a float, got '0'"),
        (
            lambda: SwapFFNWeights.from_tensors(w.tensors, eps=torch.nan),
            ValueError,
            "eps: must be a finite number",
        ),
        (
            lambda: SwapFFNWeights.from_tensors({**w.tensors, "w1": w["w1"].int()}),
            TypeError,
            r"w1: must be a floating tensor, got torch\.int32",
        ),
    ):
        with pytest.raises(kind, match=f"^{message}"):
            call()
