"""Slices and sections of gradients with lists of blocks, judged by simulated list scheduling."""

import random
import statistics

from helpers.attention_configs import made_problem

from warpspec.common.hardware import gpu_model
from warpspec.common.launch import Target
from warpspec.fmha.backward import launch, lists, rounds, schedule, sections
from warpspec.fmha.backward.features import BackwardKernel
from warpspec.fmha.backward.problem import BackwardProblem
from warpspec.fmha.backward.schedule import Order
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


def time_of(problem: BackwardProblem, config: BackwardKernel, tiles: list[int], order: Order) -> float:
    """Microseconds of an order. tiles: steps of a row's key tiles and one head, the most first."""
    forward, (_, section, slices, _, most) = problem.forward, order
    group, rows = forward.group, forward.heads_kv * forward.batch
    rest, start = 0.0, schedule.CTA_US
    if slices > 1:
        sums = 4 * len(tiles) * rows * config.tile_n * forward.head_dim * 4
        rest, start = schedule.JOIN_US + sums / schedule.JOIN_BYTES_US, start + schedule.SLICED_US
    step = schedule.listed_step_us(
        problem, config, statistics.mean(tiles), H200, (len(tiles), section, slices)
    )
    free, ctas = rounds.idle(132), [n * group / slices * step + start for n in tiles]
    if most or group % slices:
        ctas = list(lists.times_of(tiles, (group, slices, most), step, lists.Starts(start, start, 0.0)))
        section = section // slices
    else:
        rows *= slices
    rounds.deal(free, ctas, rows, section)
    return max(free)[0] + rest


def test_orders_take_little_more_than_the_best():
    draw, ratios, whole, uneven = random.Random(8), [], [], 0
    for _ in range(60):
        heads, group, batch = draw.choice((1, 2, 4, 8)), draw.choice((1, 4, 7, 8, 16)), draw.choice((1, 2))
        blocks, dim = draw.randint(8, 100), draw.choice((64, 128, 256))
        visitors = visitors_of(draw, blocks)
        most = sorted(visitors)[-2]  # about as many as a block of queries visits
        forward = made_problem(
            batch, blocks * BLOCK, blocks * BLOCK, heads * group, heads, dim, block_size=(BLOCK, BLOCK),
            visited=Visits(coarse(sum(visitors) / blocks), 0.0, coarse(most), coarse(max(visitors))),
        )  # fmt: skip
        problem = BackwardProblem.check(forward, ("q", "k", "v"))
        config = launch.supported(problem, H200)
        order = schedule.choose_order(problem, config, H200)
        assert launch.plan(problem, H200).slices == (order.slices > 1)
        uneven += order.most > 0

        tiles = [n * BLOCK // config.tile_m for n in visitors for _ in range(BLOCK // config.tile_n)]
        tiles.sort(reverse=True)
        tried, rows = [order], heads * batch
        for slices in {-(-group // n) for n in range(1, group + 1)}:
            own = sections.section_of(problem, config, H200, len(tiles), slices)
            for section in (own, rows * slices):
                whole_tiles = -(-section // slices) * slices
                tried.append(Order(1, whole_tiles if group % slices else section, slices))
                if slices > 1:
                    tried.append(Order(1, whole_tiles, slices, most=tiles[0] * -(-group // slices)))
        times = {each: time_of(problem, config, tiles, each) for each in tried}
        ratios.append(times[order] / min(times.values()))
        own = sections.section_of(problem, config, H200, len(tiles), 1)
        whole.append(times[Order(1, own)] / min(times.values()))
    assert statistics.geometric_mean(ratios) < 1.03 and max(ratios) < 1.25
    assert statistics.geometric_mean(whole) > 1.3  # or the draws say nothing
    assert uneven > 0  # CTAs of the longest tiles have fewer heads
