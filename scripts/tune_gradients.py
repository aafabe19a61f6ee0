"""Times orders and pieces of attention's gradients (fmha/backward/schedule.py) on this machine's GPU.

    python scripts/tune_gradients.py [--seed N] [--shapes N] [--seconds S] [--only-fixed] [--json FILE] [--list]

Each shape of a table, then random ones: the order that is chosen, others, heads inside or outside of query tiles, a
fixed order of dQ, and flash-attn-4 on the shapes of the table, in turn. --only-fixed: the chosen order and the fixed
one, without flash-attn-4. Every variant's gradients are compared with the chosen one's, and the fixed order's bits with
each other's. --list prints shapes and choices for an H200; that needs no GPU. Kernels are compiled in processes of
their own first.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import time
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from shared import attention_peers, driver, gpu_bench

from warpspec.aot.workers import compile_all
from warpspec.common.hardware import gpu_model
from warpspec.common.launch import Target, target_of
from warpspec.fmha import attention, attention_varlen
from warpspec.fmha.backward import call as backward_call
from warpspec.fmha.backward import launch
from warpspec.fmha.backward.schedule import Order, choose_order
from warpspec.fmha.operands import Operands, Options

CHOSEN, FIXED = "chosen", "deterministic"
REPEATS = 3  # pairs of calls in a fixed order whose bits are compared
ROUNDS = {"rounds": 6, "round_ms": 3.0}


@dataclass(frozen=True)
class Shape:
    """lengths: of each sequence. window: keys that a query sees; None: all."""

    lengths: tuple[int, ...]
    heads_q: int
    heads_kv: int
    dim: int
    causal: bool = True
    window: int | None = None
    packed: bool = False

    @property
    def name(self) -> str:
        sizes = f"[{min(self.lengths)}..{max(self.lengths)}]" if self.packed else f"S{self.lengths[0]}"
        mask = f"window {self.window}" if self.window else "causal" if self.causal else "full"
        return f"B{len(self.lengths)} {self.heads_q}/{self.heads_kv} {sizes} D{self.dim} {mask}"

    def operands(self, device) -> tuple[Operands, Options]:
        """Random q, k and v."""
        rows = (sum(self.lengths),) if self.packed else (len(self.lengths), self.lengths[0])
        heads = (self.heads_q, self.heads_kv, self.heads_kv)
        make = torch.empty if device == "meta" else torch.randn
        q, k, v = (make(*rows, h, self.dim, device=device, dtype=torch.bfloat16) for h in heads)
        window = (self.window - 1, 0) if self.window else None
        options = Options(causal=self.causal, window=window, return_lse=True)
        if not self.packed:
            return Operands(q, k, v), options
        starts = [0, *itertools.accumulate(self.lengths)]
        starts = torch.tensor(starts, dtype=torch.int32, device=device)
        longest = max(self.lengths)
        options = options._replace(max_seqlen_q=longest, max_seqlen_k=longest)
        return Operands(q, k, v, cu_seqlens_q=starts, cu_seqlens_k=starts), options


TABLE = (
    Shape((4096,), 32, 8, 128),
    Shape((4096,) * 4, 64, 8, 128),
    Shape((6000,) * 2, 28, 4, 128),
    Shape((1024,) * 4, 16, 16, 64, causal=False),
    Shape((100, 3000, 517, 2048, 64, 1500), 32, 8, 128, packed=True),
    Shape((512,) * 16, 16, 4, 64, packed=True),
    Shape((512,) * 16, 12, 12, 64, causal=False),
    Shape((8192,), 64, 8, 64, window=1024),
    Shape((4096,), 16, 8, 256),
    Shape((8192,) * 2, 32, 32, 128),
    Shape((8192,) * 2, 32, 32, 128, causal=False),
    Shape((2048,) * 8, 32, 32, 128),
    Shape((2048,), 32, 8, 128),
)


def draw(count: int, seed: int) -> list[Shape]:
    """Random shapes, the same for the same seed."""
    chance, found = random.Random(seed), {}
    while len(found) < count:
        group, dim = chance.choice((1, 1, 2, 4, 7, 8, 16)), chance.choice((64, 128, 128, 256))
        heads_kv, batch = chance.choice((1, 2, 4, 8, 16)), chance.choice((1, 1, 2, 4, 8))
        most = round(256 * 64 ** chance.random())
        packed = chance.random() < 0.3
        lengths = tuple(chance.randint(1, most) for _ in range(batch)) if packed else (most,) * batch
        window = chance.choice((None, None, None, 512, 2048))
        causal = window is not None or chance.random() < 0.7
        shape = Shape(lengths, heads_kv * group, heads_kv, dim, causal, window, packed)
        if sum(n * n for n in lengths) * shape.heads_q * dim <= 4e11:
            found[shape] = None
    return list(found)


def problem_of(shape: Shape, deterministic: bool):
    operands, options = shape.operands("meta")
    return backward_call.backward_problem(
        operands, options, (True, True, True, False, False), memory=False, deterministic=deterministic
    )


def variants(shape: Shape, target: Target, orders=True) -> dict[str, tuple]:
    """Name -> (deterministic, order, configuration), equal ones once. orders: others than the chosen one, too."""
    problem, ordered = (problem_of(shape, deterministic) for deterministic in (False, True))
    config = launch.plan(problem, target)
    order = choose_order(problem, config, target)
    rows = order.slices * shape.heads_kv * (1 if shape.packed else len(shape.lengths))
    tried = {CHOSEN: order, "by rows": order._replace(section=1), "all rows": order._replace(section=rows)}
    tried |= {f"{n} pieces": Order(n, order.section) for n in {1, 2, 4, shape.heads_q // shape.heads_kv}}
    found = {}
    for name, each in tried.items() if orders else [(CHOSEN, order)]:
        item = (False, each, launch.ordered(config, each, problem.forward, target))
        if item not in found.values():
            found[name] = item
    if orders and shape.heads_q > shape.heads_kv:
        other = replace(
            launch.ordered(config, Order(1, 1), problem.forward, target),
            heads_inside=not config.heads_inside,
            keeps_requests=False,
        )
        each = choose_order(problem, other, target)
        name = "heads inside" if other.heads_inside else "heads outside"
        found[name] = (False, each, launch.ordered(other, each, problem.forward, target))
    fixed = launch.plan(ordered, target)
    each = choose_order(ordered, fixed, target)
    found[FIXED] = (True, each, fixed)
    return found


def kernels(shape: Shape, target: Target, orders: bool) -> list[tuple]:
    """(kernel, configuration) of all variants."""
    found = []
    for deterministic, _, config in variants(shape, target, orders).values():
        found += filter(None, launch.kernels(problem_of(shape, deterministic), target, config))
    return found


def calls(shape: Shape, target: Target, peer: bool, orders: bool) -> dict:
    """Name -> function without arguments to (dq, dk, dv)."""
    operands, options = shape.operands("cuda")
    names = {"causal": shape.causal, "window": options.window, "return_lse": True}
    with torch.no_grad():
        if shape.packed:
            starts = {"cu_seqlens_q": operands.cu_seqlens_q, "cu_seqlens_k": operands.cu_seqlens_k}
            starts["max_seqlen_q"] = starts["max_seqlen_k"] = max(shape.lengths)
            o, lse = attention_varlen(operands.q, operands.k, operands.v, **starts, **names)
        else:
            o, lse = attention(operands.q, operands.k, operands.v, **names)
    full, do, found = operands._replace(o=o, lse=lse), torch.randn_like(o), {}
    for name, (deterministic, order, config) in variants(shape, target, orders).items():
        wanted = (True, True, True, False, False)
        own = options._replace(deterministic=deterministic)
        checked = backward_call.check(full, own, "auto", wanted, do, None)
        prepared = launch.prepare(checked.problem, target, order, config)
        checked = checked._replace(prepared=prepared, workspace=None, direct=None)
        found[name] = lambda checked=checked: backward_call.run(checked, full, do, None)
    flash = attention_peers.flash_attention() if peer else None
    if flash is not None:
        leaves = [t.detach().requires_grad_() for t in (operands.q, operands.k, operands.v)]
        common = {"causal": shape.causal, "window_size": options.window or (None, None)}
        result = attention_peers.result_of(
            flash.varlen(*leaves, **starts, **common) if shape.packed else flash.dense(*leaves, **common)
        )
        found["flash-attn-4"] = lambda: torch.autograd.grad(result, leaves, do, retain_graph=True)
    return found


def measure(shape: Shape, target: Target, peer: bool, orders: bool) -> dict:
    """Microseconds and largest relative differences from the chosen variant, by name; whether the fixed order's bits
    are the same each time."""
    own = calls(shape, target, peer, orders)
    expected, errors = own[CHOSEN](), {}
    for name, call in list(own.items()):
        try:
            pairs = zip(call(), expected, strict=True)
            errors[name] = max(float((a.float() - b.float()).norm() / b.float().norm()) for a, b in pairs)
        except Exception as error:
            errors[name] = f"{type(error).__name__}: {error}"[:200]
            del own[name]
    same = FIXED in own and all(
        torch.equal(*pair) for _ in range(REPEATS) for pair in zip(own[FIXED](), own[FIXED](), strict=True)
    )
    times = gpu_bench.gpu_times(own, [()], **ROUNDS)
    order = variants(shape, target)[CHOSEN][1]
    return {"shape": shape.name, "order": order, "us": times, "errors": errors, "same bits": same}


def main() -> None:
    parser = driver.parser(__doc__)
    parser.add_argument("--seed", type=int, default=20261124)
    parser.add_argument("--shapes", type=int, default=47, help="random ones")
    parser.add_argument("--seconds", type=float, default=220.0, help="begin no shape after this many")
    parser.add_argument(
        "--only-fixed", action="store_true", help="no other orders than the chosen and a fixed one"
    )
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--list", action="store_true")
    options = parser.parse_args()
    shapes = [*TABLE, *draw(options.shapes, options.seed)]
    if options.list:
        target = Target.of_model(gpu_model("H200"))
        for shape in shapes:
            print(
                shape.name, *(f"{name}: {tuple(item[1])}" for name, item in variants(shape, target).items())
            )
        return
    driver.need_gpu("--list needs none")
    start, target, results = time.monotonic(), target_of(torch.device("cuda", 0)), []
    driver.begin("flash-attn-4")
    orders = not options.only_fixed
    wanted = dict.fromkeys(item for shape in shapes for item in kernels(shape, target, orders))
    compile_all(list(wanted), target.arch, max(1, (os.cpu_count() or 2) - 1))
    for number, shape in enumerate(shapes):
        if time.monotonic() - start > options.seconds:
            print(f"{len(shapes) - number} shapes left out")
            break
        result = measure(shape, target, orders and number < len(TABLE), orders)
        results.append(result)
        print(json.dumps(result), flush=True)
        torch.cuda.empty_cache()
        if options.json:
            options.json.write_text(json.dumps(results, indent=1))
    for name in sorted({name for result in results for name in result["us"]} - {CHOSEN}):
        ratios = [r["us"][name] / r["us"][CHOSEN] for r in results if name in r["us"]]
        mean = torch.tensor(ratios).log().mean().exp()
        print(f"{name}: {len(ratios)} shapes, time over chosen's: mean {mean:.3f}, least {min(ratios):.3f}")


if __name__ == "__main__":
    main()
