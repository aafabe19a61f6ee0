"""What tables of attention's speed share: inputs, the check against a peer, a row's columns."""

from __future__ import annotations

import torch

BF16 = torch.bfloat16
WRONG = 5e-3  # relative difference from a peer's result that no bf16 rounding explains


def random(*shape) -> torch.Tensor:
    return torch.randn(shape, device="cuda", dtype=BF16)


def agree(name: str, ours: torch.Tensor, theirs: torch.Tensor, limit: float = WRONG) -> None:
    """Stop where a result is not the peer's: a wrong kernel has no speed."""
    difference = ((ours.float() - theirs.float()).norm() / theirs.float().norm()).item()
    if not difference < limit:
        raise SystemExit(f"{name}: differs from the peer by {difference:.1e}")


def without_failing(calls: dict) -> dict:
    """Calls but those of peers that have no kernel for them."""
    found = {}
    for name, call in calls.items():
        try:
            call()
        except Exception as error:
            if name == "warpspec":
                raise
            print(f"{name}: {type(error).__name__}: {str(error).splitlines()[0][:100]}", flush=True)
        else:
            found[name] = call
    return found


def columns(times: dict[str, float], work: float, peers: tuple[str, ...]) -> list:
    """Our time and rate, then of each peer its rate and the ratio. work: so that work / us is the rate."""
    ours = times["warpspec"]
    cells = [ours, work / ours]
    for peer in peers:
        cells += [work / times[peer], times[peer] / ours] if peer in times else [None, None]
    return cells
