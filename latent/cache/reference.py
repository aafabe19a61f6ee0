"""Insert and compress by their definitions, in FP32 torch: what the kernels are compared with.

Values are rounded to bf16 where the kernels round them: after the norm and after the rotation. Tokens and entries are
done one at a time; states are read and written as the kernels do.
"""

from __future__ import annotations

import torch

from warpspec.common.checks import ANY, check_floating, check_int
from warpspec.latent.cache.models import POSITION_LIMIT
from warpspec.latent.cache.state import SETTLED, WRITTEN, Tail


def rms_norm(rows: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    """bf16 [..., D]: rows / sqrt(mean square + eps), times weight [D]; computed in fp32 and rounded once at the end."""
    x = rows.float()
    x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    return (x if weight is None else x * weight.float()).bfloat16()


def rope_table(inv_freq: torch.Tensor, length: int) -> torch.Tensor:
    """fp32 [length, 2 F]: for positions 0, 1, ... the cosines, then the sines.

    inv_freq: floating [F], radians a token. length: positions, 0 to 2**30. Raises TypeError or ValueError naming the
    argument.
    """
    check_floating("inv_freq", inv_freq, (ANY,))
    check_int("length", length, 0, POSITION_LIMIT)
    angles = torch.arange(length, device=inv_freq.device)[:, None].float() * inv_freq.float()
    return torch.cat((angles.cos(), angles.sin()), dim=-1)


def rotate(rows: torch.Tensor, cos_sin: torch.Tensor, *, back: bool = False) -> torch.Tensor:
    """fp32 [..., D]: rows whose last R numbers, in neighbouring pairs, are rotated by cos_sin [..., R]; back: by
    minus."""
    half = cos_sin.shape[-1] // 2
    cos, sin = cos_sin[..., :half], cos_sin[..., half:]
    if back:
        sin = -sin
    x = rows.float()
    still, turned = x[..., : -2 * half], x[..., -2 * half :].unflatten(-1, (half, 2))
    first, second = turned[..., 0], turned[..., 1]
    pairs = torch.stack((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return torch.cat((still, pairs.flatten(-2)), dim=-1)


def angles_at(cos_sin: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """[..., R]: rows of the table; NaN for positions beyond it."""
    inside = (positions >= 0) & (positions < len(cos_sin))
    if len(cos_sin) == 0:
        return torch.full(
            (*positions.shape, cos_sin.shape[1]), torch.nan, dtype=torch.float32, device=cos_sin.device
        )
    rows = cos_sin[torch.where(inside, positions, 0).long()]
    return torch.where(inside[..., None], rows, torch.nan)


def hadamard_transform(rows: torch.Tensor) -> torch.Tensor:
    """fp32 [..., D]: rows times Sylvester's Hadamard matrix / sqrt(D), by butterflies; D is a power of two."""
    dim = rows.shape[-1]
    x, apart = rows.float(), 1
    while apart < dim:
        pairs = x.unflatten(-1, (-1, 2, apart))
        low, high = pairs[..., 0, :], pairs[..., 1, :]
        x = torch.stack((low + high, low - high), dim=-2).flatten(-3)
        apart *= 2
    return x * dim**-0.5


def insert_window(q, kv, cos_sin, positions, *, kv_weight, eps, pool, slots) -> torch.Tensor | None:
    """K1 on checked arguments: return the rotated queries, store kv's rows."""
    angles = angles_at(cos_sin, positions)
    rows = rotate(rms_norm(kv, kv_weight, eps), angles).bfloat16()
    pool.write(slots, rows)
    return None if q is None else rotate(rms_norm(q, None, eps), angles[:, None]).bfloat16()


def finish_entry(
    pooled: torch.Tensor, position: int, cos_sin, weight, eps: float, hadamard: bool
) -> torch.Tensor:
    """bf16 [D]: the row of an entry, from its pooled channels [D] fp32. hadamard: apply ``hadamard_transform``."""
    row = rms_norm(pooled.bfloat16(), weight, eps)
    at = torch.tensor(position, device=pooled.device)
    row = rotate(row, angles_at(cos_sin, at)).bfloat16()
    return hadamard_transform(row).bfloat16() if hadamard else row


def compress(
    content_gate,
    ape,
    weight,
    cos_sin,
    *,
    tail: Tail,
    requests,
    starts,
    cu_seqlens,
    pool,
    slots,
    eps,
    hadamard,
) -> None:
    """K2 on checked arguments: store complete entries, update the tail."""
    for i, request in enumerate(requests.tolist()):
        begin, end = cu_seqlens[i].item(), cu_seqlens[i + 1].item()
        count, start = end - begin, starts[i].item()
        if count == 0 or not 0 <= request < tail.requests:
            continue
        new = content_gate[begin:end].clone()
        at = torch.arange(start, start + count, device=new.device)
        new[:, 1] += ape.float()[at % tail.stride]
        progress = tail.progress[request]
        whole = start == 0 or progress[SETTLED].item() <= start <= progress[WRITTEN].item()
        before = progress[SETTLED].item() if start > 0 and whole else start
        settled = max(before, start + count - tail.max_draft)
        make = csa_entries if tail.kind == "csa" else hca_entries
        for position, pooled in make(tail, request, new, start, whole, (before, settled)):
            row = finish_entry(pooled, position - tail.stride + 1, cos_sin, weight, eps, hadamard)
            pool.write(slots[begin + position - start][None], row[None])
        progress[WRITTEN], progress[SETTLED] = start + count, settled


def csa_entries(tail: Tail, request: int, new: torch.Tensor, start: int, whole: bool, _settled):
    """Yield (position of the entry's last token, pooled [dim]); then write new [T, 2, 2 dim] to the ring.

    whole: whether the tail holds the tokens before start; if not, those tokens are NaN.
    """
    ring = tail.rows[request]
    size, end = len(ring), start + len(new)
    first = start // tail.stride * tail.stride + tail.stride - 1
    for last in range(first, end, tail.stride):
        contents, gates = [], []
        for p in range(last - 2 * tail.stride + 1, last + 1):
            own = p > last - tail.stride  # the entry's own window gives the second half of channels
            if p < 0:
                continue
            row = (
                new[p - start]
                if p >= start
                else ring[p % size]
                if whole
                else torch.full_like(new[0], torch.nan)
            )
            half = row[:, tail.dim :] if own else row[:, : tail.dim]
            contents.append(half[0]), gates.append(half[1])
        weights = torch.stack(gates).softmax(dim=0)
        yield last, (weights * torch.stack(contents)).sum(0)
    if not whole:
        ring.fill_(torch.nan)
    for p in range(max(start, end - size), end):
        ring[p % size] = new[p - start]


def hca_entries(
    tail: Tail, request: int, new: torch.Tensor, start: int, whole: bool, settled: tuple[int, int]
):
    """``csa_entries`` for HCA, new [T, 2, dim].

    settled: how many tokens the fold holds, and is to hold after the call; all others, max_draft at most, are rows of
    the ring.
    """
    ring, end = tail.rows[request], start + len(new)
    folded, settled = settled
    state = tail.online[request].clone() if folded % tail.stride else empty_fold(tail)
    if not whole and start % tail.stride:
        state = torch.full_like(state, torch.nan)
    kept = state
    for p in range(folded, end):
        state = fold(state, new[p - start] if p >= start else ring[p % len(ring)])
        if (p + 1) % tail.stride == 0:
            if p >= start:
                yield p, state[2] / state[1]
            state = empty_fold(tail)
        if p + 1 == settled:
            kept = state
    tail.online[request] = kept
    for p in range(max(start, settled), end):
        ring[p % len(ring)] = new[p - start]


def empty_fold(tail: Tail) -> torch.Tensor:
    """[3, dim]: an empty fold."""
    state = torch.zeros(3, tail.dim, dtype=torch.float32, device=tail.rows.device)
    state[0] = -torch.inf
    return state


def fold(state: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
    """Add one token, row [2, dim], to the fold [3, dim]; returns the new fold.

    One exponential is enough, because the larger of the largest gate so far and the token's gate has weight 1.
    """
    largest, total, weighted = state
    content, gate = row
    above = gate > largest
    factor = torch.where(gate == -torch.inf, 0.0, torch.exp(-(gate - largest).abs()))
    return torch.stack(
        (
            torch.where(above, gate, largest),
            torch.where(above, total * factor + 1.0, total + factor),
            torch.where(above, weighted * factor + content, weighted + factor * content),
        )
    )
