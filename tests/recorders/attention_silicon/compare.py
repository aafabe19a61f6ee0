"""How a simulated result of attention is judged against a recorded one.

Not bit for bit: the tensor core adds products in an order and with low bits dropped that the ISA leaves open (the
simulator rounds once an instruction), and ex2.approx may be 2 ulp off. Both change a score's last fp32 bits only.
Where that flips the rounding of a weight to 16 bits, that key's part of o changes by one unit of 16 bits: a small part
of a rounding error of o itself. So nearly all elements of o are the same 16 bits and the others neighbours; statistics
differ in fp32's last bits. The bounds are about twice what the recordings of 2026-11-22 show.
"""

from __future__ import annotations

import numpy as np
import torch

EQUAL_PART = 0.98  # of o's 16-bit elements are the same bits, at least (seen: 0.9886 in fp16, 0.9956 in bf16)
# ||got - want|| / ||want|| of o (seen: 1.9e-4, 3.8e-5, 3.5e-5). In fp32 (a state) only flipped weights show.
DIFFERENCE = {torch.bfloat16: 4e-4, torch.float16: 8e-5, torch.float32: 8e-5}
OF_A_HEAD = 3  # times that, of one head, which may have few elements (seen: 7.7e-4 in bf16)
STATISTIC = 3e-6  # (seen: 1.4e-6) of lse and row_max absolute, of row_sum relative


def problems(got: dict, want: dict, dtypes: dict[str, torch.dtype]) -> list[str]:
    """What is wrong with simulated results, a line each. got, want: bits by name of the result; dtypes: of which."""
    if got.keys() != want.keys():
        return [f"results {sorted(got)}, recorded {sorted(want)}"]
    found = []
    for name, dtype in dtypes.items():
        if got[name].shape != want[name].shape:
            found.append(f"{name}: shape {got[name].shape}, recorded {want[name].shape}")
            continue
        ours, theirs = (torch.from_numpy(bits[name]).view(dtype).double() for bits in (got, want))
        judge = output if name == "o" else statistic
        found += [
            f"{name}: {problem}" for problem in judge(name, dtype, ours, theirs, got[name] == want[name])
        ]
    return found


def output(name, dtype, ours, theirs, same: np.ndarray) -> list[str]:
    found = []
    if not torch.equal(ours.isfinite(), theirs.isfinite()):
        found.append("other elements are finite")
    if not torch.equal(ours == 0, theirs == 0) and bool(((ours == 0) != (theirs == 0)).all(dim=-1).any()):
        found.append("other rows are zero")
    if dtype != torch.float32 and same.mean() < EQUAL_PART:
        found.append(
            f"{same.mean():.1%} of the elements are the same bits, at least {EQUAL_PART:.0%} should be"
        )
    ours, theirs = (torch.nan_to_num(t, 0.0, 0.0, 0.0) for t in (ours, theirs))
    bound = DIFFERENCE[dtype]
    parts = [("all of it", ours, theirs, bound)]
    parts += [(f"head {h}", ours[:, :, h], theirs[:, :, h], OF_A_HEAD * bound) for h in range(ours.shape[2])]
    for part, a, b, allowed in parts:
        difference = float((a - b).norm() / torch.where(b.norm() == 0, 1.0, b.norm()))
        if not difference <= allowed:
            found.append(f"{part} differs by {difference:.1e}, at most {allowed:.0e} should be")
    return found


def statistic(name, dtype, ours, theirs, same) -> list[str]:
    hidden = theirs == -torch.inf  # rows that see no key
    if not torch.equal(ours == -torch.inf, hidden):
        return ["other rows see no key"]
    difference = torch.where(hidden, 0.0, (ours - theirs).abs())
    if name == "row_sum":
        difference = difference / torch.where(theirs == 0, 1.0, theirs)
    worst = float(difference.max())
    return [] if worst <= STATISTIC else [f"off by {worst:.1e}, at most {STATISTIC:.0e} should be"]
