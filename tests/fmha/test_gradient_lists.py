"""Slices and sections of gradients with lists of blocks, judged by simulated list scheduling."""

import random
import statistics

from helpers.attention_configs import made_problem

from warpspec.common.hardware import gpu_model
from warpspec.common.launch import Target
from warpspec.fmha.backward import launch, rounds, schedule
from warpspec.fmha.backward.problem import BackwardProblem
from warpspec.fmha.block_mask import Visits, coarse

H200 = Target.of_model(gpu_model("H200"))
BLOCK = 128


def visitors_of(draw: random.Random, blocks: int) -> list[int]:
    """How many of as many blocks of queries visit each block of keys: causal, within documents, in a window after a
    first block that all see, or drawn."""
    length = draw.randint(1, blocks)
    return draw.choice(
        [
            [blocks - block for block in range(blocks)],
            [min(length - block % length, blocks - block) for block in range(blocks)],
            [blocks] + [min(length, blocks - block) for block in range(1, blocks)],
            [sum(draw.random() < 0.3 for _ in range(blocks)) for _ in range(blocks)],
        ]
    )


def test_orders_take_little_more_than_the_best():
    draw, ratios, whole = random.Random(8), [], []
    for _ in range(60):
        heads, group, batch = draw.choice((1, 2, 4, 8)), draw.choice((1, 4, 7, 8, 16)), draw.choice((1, 2))
        blocks, dim = draw.randint(8, 100), draw.choice((64, 128, 256))
        visitors = visitors_of(draw, blocks)
        mean = coarse(sum(visitors) / blocks)
        forward = made_problem(
            batch, blocks * BLOCK, blocks * BLOCK, heads * group, heads, dim, block_size=(BLOCK, BLOCK),
            visited=Visits(mean, 0.0, 2 * mean, coarse(max(visitors))),
        )  # fmt: skip
        problem = BackwardProblem.check(forward, ("q", "k", "v"))
        config = launch.supported(problem, H200)
        order = schedule.choose_order(problem, config, H200)
        assert launch.plan(problem, H200).slices == (order.slices > 1)

        tiles = [n * BLOCK // config.tile_m for n in visitors for _ in range(BLOCK // config.tile_n)]
        tiles.sort(reverse=True)
        sums = 4 * len(tiles) * heads * batch * config.tile_n * dim * 4 / schedule.JOIN_BYTES_US
        times = {}
        for slices in (n for n in range(1, group + 1) if group % n == 0):
            start, join = schedule.CTA_US, 0.0
            if slices > 1:
                start, join = start + schedule.SLICED_US, schedule.JOIN_US + sums
            own = schedule.section_of(problem, config, H200, len(tiles), slices)
            for section in (heads * batch * slices, own):
                part = min(max(132 / section, 1.0) * statistics.mean(visitors) / blocks, 1.0)
                rows = (len(tiles), section, slices)
                step = schedule.step_us(problem, config, tiles, H200, rows, part)
                ctas, free = [n * group // slices * step + start for n in tiles], rounds.idle(132)
                rounds.deal(free, ctas, heads * batch * slices, section)
                times[slices, section] = max(free)[0] + join
            if slices == 1:
                whole.append(times[1, own])
        ratios.append(times[order.slices, order.section] / min(times.values()))
        whole[-1] /= min(times.values())
    assert statistics.geometric_mean(ratios) < 1.03 and max(ratios) < 1.2
    assert statistics.geometric_mean(whole) > 1.3  # or the draws say nothing
