"""Configuration of the grouped GEMM on sm_100a: tile shapes, warp roles, memory budgets, barrier table.

Plain Python, fixed at compile time: one ``GemmConfig`` is one compiled kernel.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from warpspec.common import memory
from warpspec.common.barriers import MBARRIER_BYTES, Barrier, barrier_count
from warpspec.common.hardware import MAX_SMEM_PER_CTA, TMEM_COLUMNS, VECTOR_BYTES, WARP_THREADS, WORD_BYTES
from warpspec.common.nvfp4 import ATOM_BYTES, ATOM_ROWS, NVFP4_BLOCK
from warpspec.moe.activations import EPILOGUES

CODES_PER_BYTE = 2

MMA_ROWS = 128  # M of one CTA, the lanes of tensor memory
MMA_K = 64  # K of one tcgen05.mma of kind mxf4nvf4
MMA_N_UNIT = 8  # N is a multiple of it in each CTA
K_TILE = CODES_PER_BYTE * memory.ROW_BYTES  # values along K of a stage: one span of the 128-byte swizzle
# MMAs of a stage; each takes one scale atom along K: ATOM_COLUMNS * NVFP4_BLOCK = MMA_K.
K_STEPS = K_TILE // MMA_K
SCALE_COLUMNS = ATOM_BYTES // WARP_THREADS // memory.TMEM_COLUMN_BYTES  # columns of TMEM that an atom takes
ACCUMULATORS = 2
RECORDS = 4  # tiles that the scheduler may be ahead
RECORD_FIELDS = 8  # Int32 of a record, two 16-byte vectors
MIN_ACCUMULATOR_COLUMNS = 32

# Accumulator columns (or lanes) of one block of outputs: 8 gate, 8 up, 8 gate, 8 up. If tokens are lanes, an epilogue
# step has this many columns. If tokens are columns, a step has the number of tokens below, or all of a smaller tile.
SWIGLU_COLUMNS = 2 * NVFP4_BLOCK
STEP_TOKENS = 16

OUTPUTS = ("bf16", "nvfp4")


@dataclass(frozen=True)
class Shape:
    """Tiles of one kernel.

    swapped: the weights' rows are M (128) and tokens are N of the MMA; otherwise tokens are M and weights N. tile_n: N.
    ctas: 1, or 2 that share an MMA of 256 rows; each has half of N's rows in its shared memory.
    """

    swapped: bool
    tile_n: int
    ctas: int = 1

    def __str__(self):
        return f"{'swapped' if self.swapped else 'pair' if self.ctas == 2 else 'single'}-{self.tile_n}"

    @property
    def tokens(self) -> int:
        """Tokens of a tile."""
        return self.tile_n if self.swapped else MMA_ROWS * self.ctas

    @property
    def features(self) -> int:
        """Rows of the weights of a tile."""
        return MMA_ROWS if self.swapped else self.tile_n


SINGLE = Shape(swapped=False, tile_n=256)
PAIR = Shape(swapped=False, tile_n=256, ctas=2)
SWAPPED = {n: Shape(swapped=True, tile_n=n) for n in (8, 16, 32, 64)}


@dataclass(frozen=True)
class GemmConfig(memory.TensorMemoryWarps):
    """Compile-time shape of one kernel.

    epilogue: one of EPILOGUES. output: one of OUTPUTS. has_row_scale: every token has its own global scale. has_limit:
    clamp gate and up. has_bias: the weights have a bias.
    """

    shape: Shape
    epilogue: str = "linear"
    output: str = "bf16"
    has_row_scale: bool = True
    has_limit: bool = False
    has_bias: bool = False
    stages: int = field(init=False)

    def __post_init__(self):
        assert self.epilogue in EPILOGUES and self.output in OUTPUTS
        assert self.gated or (self.output == "bf16" and not self.has_limit)
        object.__setattr__(self, "stages", (MAX_SMEM_PER_CTA - self.fixed_bytes) // self.stage_bytes)
        assert self.stages >= 2
        assert self.smem_bytes <= MAX_SMEM_PER_CTA
        assert self.tmem_columns <= TMEM_COLUMNS
        assert barrier_count(self.barriers) <= self.barrier_slots
        assert self.barrier_slots * MBARRIER_BYTES + self.records_bytes + WORD_BYTES <= memory.TILE_ALIGNMENT
        assert self.tile_n % (MMA_N_UNIT * self.ctas) == 0
        assert self.shape.features % ATOM_ROWS == 0
        assert self.overlap <= self.tile_n // 2 and not (self.swapped and self.overlap)

    @property
    def swapped(self) -> bool:
        return self.shape.swapped

    @property
    def tile_n(self) -> int:
        return self.shape.tile_n

    @property
    def ctas(self) -> int:
        return self.shape.ctas

    @property
    def pair(self) -> bool:
        return self.shape.ctas == 2

    @property
    def gated(self) -> bool:
        """Whether the epilogue combines gate and up."""
        return self.epilogue != "linear"

    @property
    def quantizes(self) -> bool:
        return self.output == "nvfp4"

    # Warp roles.

    @property
    def epilogue_warps(self) -> range:
        return range(4)

    @property
    def schedule_warp(self) -> int:
        return 6

    @property
    def threads(self) -> int:
        return 7 * WARP_THREADS

    # Tiles.

    @property
    def mma_tiler(self) -> tuple[int, int, int]:
        """(M, N, K) of a stage's MMAs, both CTAs of a pair together."""
        return (MMA_ROWS * self.ctas, self.tile_n, K_TILE)

    @property
    def out_columns(self) -> int:
        """Outputs of a tile for each token."""
        return self.shape.features // 2 if self.gated else self.shape.features

    @property
    def token_rows(self) -> int:
        """Rows of tokens that one CTA loads."""
        return self.tile_n if self.swapped else MMA_ROWS

    @property
    def weight_rows(self) -> int:
        """Rows of weights that one CTA loads; each CTA of a pair loads half."""
        return MMA_ROWS if self.swapped else self.tile_n // self.ctas

    @property
    def token_box(self) -> tuple[int, int]:
        """(K bytes, ROW) of one load of tokens."""
        return (memory.ROW_BYTES, self.token_rows)

    @property
    def weight_box(self) -> tuple[int, int]:
        """(K bytes, ROW) of one load of weights."""
        return (memory.ROW_BYTES, self.weight_rows)

    @property
    def weight_atoms(self) -> int:
        """Rows of scale atoms of a tile's weights; each CTA of a pair loads those of all of N."""
        return -(-self.shape.features // ATOM_ROWS)

    @property
    def scale_words(self) -> int:
        """Number of Int32 in a scale atom."""
        return ATOM_BYTES // WORD_BYTES

    @property
    def token_scale_box(self) -> tuple[int, int, int]:
        """(Int32, K ATOM, ROW ATOM) of one load of token scales."""
        return (self.scale_words, K_STEPS, 1)

    @property
    def weight_scale_box(self) -> tuple[int, int, int]:
        """(Int32, K ATOM, ROW ATOM) of one load of weight scales."""
        return (self.scale_words, K_STEPS, self.weight_atoms)

    # Tensor memory, in 32-bit columns.

    @property
    def scale_columns(self) -> int:
        """Columns of a stage's scales: SCALE_COLUMNS for each K step and atom of rows."""
        return K_STEPS * SCALE_COLUMNS * (1 + self.weight_atoms)

    @property
    def accumulator_columns(self) -> int:
        """Distance in columns between the two accumulators; if both do not fit beside the scales, they overlap."""
        beside_one = TMEM_COLUMNS - self.scale_columns - self.tile_n
        return min(max(self.tile_n, MIN_ACCUMULATOR_COLUMNS), beside_one)

    @property
    def overlap(self) -> int:
        """Columns that both accumulators share: the end of the first, the start of the second.

        The epilogue reads them first; the MMAs of the next tile may begin after that.
        """
        return max(self.tile_n - self.accumulator_columns, 0)

    @property
    def release_steps(self) -> int:
        """Epilogue steps after which the next MMAs may begin: those of the overlap, or all of them if rows are
        lanes."""
        return -(-(self.overlap or self.tile_n) // SWIGLU_COLUMNS)

    @property
    def tmem_token_scales(self) -> int:
        """First column of the tokens' scales."""
        return self.accumulator_columns + max(self.tile_n, MIN_ACCUMULATOR_COLUMNS)

    @property
    def tmem_weight_scales(self) -> int:
        """First column of the weights' scales; a K step's are adjacent, atom by atom."""
        return self.tmem_token_scales + K_STEPS * SCALE_COLUMNS

    @property
    def tmem_columns(self) -> int:
        return self.tmem_token_scales + self.scale_columns

    @property
    def tmem_allocation(self) -> int:
        return memory.tmem_allocation(self.tmem_columns)

    # Shared memory, in bytes.

    @property
    def token_bytes(self) -> int:
        """Bytes of a stage's tokens; a multiple of the alignment, because rows come in eights."""
        return self.token_rows * memory.ROW_BYTES

    @property
    def weight_bytes(self) -> int:
        return self.weight_rows * memory.ROW_BYTES

    @property
    def token_scale_bytes(self) -> int:
        return K_STEPS * ATOM_BYTES

    @property
    def weight_scale_bytes(self) -> int:
        return self.weight_atoms * K_STEPS * ATOM_BYTES

    @property
    def scale_bytes(self) -> int:
        """Bytes of a stage's scales: the tokens', followed by the weights'.

        Tokens may begin in the middle of an atom. The copy of their scales then reads past the atom, for lanes without
        a token; because the weights' scales follow, it stays within the stage.
        """
        return self.token_scale_bytes + self.weight_scale_bytes

    @property
    def stage_bytes(self) -> int:
        """Bytes of shared memory of a stage, which are also the bytes that one CTA's loads add to its mbarrier."""
        return self.token_bytes + self.weight_bytes + self.scale_bytes

    @property
    def record_bytes(self) -> int:
        return RECORD_FIELDS * WORD_BYTES

    @property
    def records_bytes(self) -> int:
        return RECORDS * self.record_bytes

    @property
    def barrier_slots(self) -> int:
        """Number of mbarriers that there is room for. Together with the records and the TMEM address they take less
        than the alignment of the next region."""
        return 64

    @property
    def output_bits(self) -> int:
        """Bits of an output."""
        return 4 if self.quantizes else 16

    @property
    def segment_columns(self) -> int:
        """Outputs of a token that a warp stages at a time."""
        if self.swapped:
            return self.out_columns // len(self.epilogue_warps)
        return self.tile_n // 2

    @property
    def segments(self) -> int:
        """Segments of a tile; a warp stages one after the other."""
        return self.out_columns // (self.segment_columns * (len(self.epilogue_warps) if self.swapped else 1))

    @property
    def segment_bytes(self) -> int:
        """Bytes of a segment in the result."""
        return self.segment_columns * self.output_bits // 8

    @property
    def step_tokens(self) -> int:
        """Tokens that a thread reads from tensor memory at a time (if weights are lanes)."""
        return min(self.tile_n, STEP_TOKENS)

    @property
    def step_outputs(self) -> int:
        """Outputs of a token that a thread makes of 32 columns (if tokens are lanes)."""
        return NVFP4_BLOCK if self.gated else SWIGLU_COLUMNS

    @property
    def step_words(self) -> int:
        """Int32 words of a step's outputs in the result."""
        return self.step_outputs * self.output_bits // (8 * WORD_BYTES)

    @property
    def vector_words(self) -> int:
        """Int32 words of a vector, which is what one store writes to global memory."""
        return min(VECTOR_BYTES, self.segment_bytes) // WORD_BYTES

    @property
    def segment_vectors(self) -> int:
        """Pieces of a segment."""
        return self.segment_bytes // (self.vector_words * WORD_BYTES)

    @property
    def vector_columns(self) -> int:
        """Outputs of a vector."""
        return self.segment_columns // self.segment_vectors

    @property
    def staging_pitch(self) -> int:
        """Bytes from one staged token to the next. It is an odd number of vectors, so that neither writing one row a
        thread nor reading along rows has bank conflicts."""
        vectors = -(-self.segment_bytes // VECTOR_BYTES)
        return (vectors | 1) * VECTOR_BYTES

    @property
    def staging_tokens(self) -> int:
        """Tokens that a warp stages."""
        return self.tile_n if self.swapped else WARP_THREADS

    @property
    def staging_warp_bytes(self) -> int:
        return self.staging_tokens * self.staging_pitch

    @property
    def staging_bytes(self) -> int:
        total = len(self.epilogue_warps) * self.staging_warp_bytes
        return -(-total // memory.TILE_ALIGNMENT) * memory.TILE_ALIGNMENT

    @property
    def fixed_bytes(self) -> int:
        """Bytes of shared memory besides the stages."""
        return memory.TILE_ALIGNMENT + self.staging_bytes

    @property
    def smem_regions(self) -> tuple[memory.Region, ...]:
        """Shared memory, in order."""
        stages, words = self.stages, self.records_bytes // WORD_BYTES
        scales = f"{stages} x (tokens' 1, weights' {self.weight_atoms}) x {K_STEPS} x 512, as in memory"
        staging = (
            f"{len(self.epilogue_warps)} x {self.staging_tokens} tokens x {self.segment_columns} outputs"
        )
        aligned = ("uint8", memory.TILE_ALIGNMENT)
        return (
            memory.barrier_region(self.barriers, self.barrier_slots),
            memory.Region("records", words, "int32", self.record_bytes, "", f"{RECORDS} tile records"),
            memory.TMEM_ADDRESS,
            memory.tile_region(
                "tokens", stages * self.token_bytes, "", f"{stages} x [{self.token_rows}, {K_TILE}] e2m1"
            ),
            memory.tile_region(
                "weights", stages * self.weight_bytes, "", f"{stages} x [{self.weight_rows}, {K_TILE}] e2m1"
            ),
            memory.Region("scales", stages * self.scale_bytes, *aligned, "", scales),
            memory.Region("staging", self.staging_bytes, *aligned, "", staging),
        )

    @property
    def smem_bytes(self) -> int:
        return memory.smem_bytes(self.smem_regions)

    # Barriers.

    @property
    def barriers(self) -> tuple[Barrier, ...]:
        """Every mbarrier of a CTA. full and empty are used once a K tile, the others once a tile."""
        epilogue_warps = len(self.epilogue_warps)
        load, mma, schedule, epilogue = "load warp", "MMA warp", "scheduler warp", "epilogue warps"
        commit = f"{mma}, tcgen05.commit" + (" to both CTAs" if self.pair else "")
        of_pair = " of both CTAs" if self.pair else ""
        filled = f"{load}, expect_tx + TMA bytes{of_pair}"
        stages = self.stages if hasattr(self, "stages") else 0
        return (
            Barrier("full", stages, 1, filled, mma, f"the K tile is in shared memory{of_pair}"),
            Barrier("empty", stages, 1, commit, load, "the MMAs have read the K tile"),
            Barrier(
                "accumulator_full", ACCUMULATORS, 1, commit, epilogue, "the tile's sums are in tensor memory"
            ),
            Barrier(
                "accumulator_empty",
                ACCUMULATORS,
                epilogue_warps * self.ctas,
                f"{epilogue}{of_pair}, one lane each",
                mma,
                "the columns shared with the next tile are in registers, and the tile before is all read"
                if self.overlap
                else "the sums are in registers, their columns may be overwritten",
            ),
            Barrier(
                "record_full",
                RECORDS,
                1,
                f"{schedule}, one lane",
                f"{load}, {mma}, {epilogue}",
                "a tile record stands",
            ),
            Barrier(
                "record_empty",
                RECORDS,
                2 + epilogue_warps,
                f"{load}, {mma}, {epilogue}, one lane of each warp",
                schedule,
                "every warp has read the record",
            ),
        )
