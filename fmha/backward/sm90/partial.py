"""S and dP when two CTAs share a head: each has half of the columns of K, V, Q and dO, makes partial sums over these,
and adds the other CTA's, which arrive through distributed shared memory.

The warpgroup that needs a sum has the same rows and columns in both CTAs, so a thread adds what the thread with the
same number has sent. Both CTAs add the same two numbers: P and dS have the same bits in both.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from warpspec.common.device import handover
from warpspec.common.device.wgmma import flat
from warpspec.fmha.backward.device.tile import own_group


def buffer(work, name: str) -> cute.Pointer:
    """The buffer in which the other CTA's partial sums arrive. name: "s" or "dp"."""
    return work.shared.partial + ("s", "dp").index(name) * work.config.partial_bytes


@cute.jit
def send(work, name: cutlass.Constexpr, sums: cute.Tensor, step):
    """Send partial sums of a step to the other CTA. name: "s" or "dp". Produces the other CTA's ``{name}_there``,
    consumes ``{name}_taken``."""
    config, channels = work.config, work.channels
    if cutlass.const_expr(config.clustered):
        there = channels[name + "_there"].barrier(step)
        if work.thread == 0:
            cute.arch.mbarrier_arrive_and_expect_tx(there, config.partial_bytes)
        channels[name + "_taken"].wait_previous(step)
        words, base = cute.recast_tensor(flat(sums), Int32), buffer(work, name)
        handover.send_words(words, base, work.thread, there, 1 - own_group(config))


@cute.jit
def receive(work, name: cutlass.Constexpr, sums: cute.Tensor, step):
    """Add the other CTA's partial sums of a step. Consumes ``{name}_there``; ``let_go`` hands the buffer back."""
    config = work.config
    if cutlass.const_expr(config.clustered):
        work.channels[name + "_there"].wait(step)
        values, base = flat(sums), buffer(work, name)
        words = handover.received_words(base, work.thread, cute.size(values))
        values.store(values.load() + cute.recast_tensor(words, Float32).load())


@cute.jit
def let_go(work, name: cutlass.Constexpr, step):
    """Release the buffer once the warp has used what it received. Place this after something that depends on the loads,
    because an arrival does not wait for loads. Produces the other CTA's ``{name}_taken``."""
    if cutlass.const_expr(work.config.clustered):
        cute.arch.sync_warp()
        other = 1 - own_group(work.config)
        with cute.arch.elect_one():
            work.channels[name + "_taken"].arrive_in(other, step, has_read=True)
