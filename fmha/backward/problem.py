"""The problem of a backward pass: its forward problem, and which gradients are wanted."""

from __future__ import annotations

from dataclasses import dataclass, replace

from warpspec.fmha.heads import HeadSizes, class_of
from warpspec.fmha.problem import AttentionProblem

DIFFERENTIABLE = ("q", "k", "v", "sink", "bias")  # in the order in which gradients are returned


@dataclass(frozen=True)
class BackwardProblem:
    """A problem of gradients, on which a backward kernel may rely.

    forward: the problem whose gradients these are, with ``return_lse`` set. wanted: names of DIFFERENTIABLE, in their
    order; never v where V is K. has_do, has_dlse: which results have gradients, at least one. deterministic: the same
    call gives the same bits every time. rows: the sizes of rows in memory; None: those of the forward problem.
    """

    forward: AttentionProblem
    wanted: tuple[str, ...]
    has_do: bool = True
    has_dlse: bool = False
    deterministic: bool = False
    rows: HeadSizes | None = None

    def __post_init__(self):
        assert self.wanted and set(self.wanted) <= set(DIFFERENTIABLE)
        assert self.has_do or self.has_dlse

    @property
    def padded(self) -> BackwardProblem:
        """The problem that kernels compute: one tuned head size for q, k, v and o, their rows padded with zeros, and in
        ``rows`` the sizes that they have in memory. The problem itself if it needs no padding."""
        sizes = self.forward.heads
        size = class_of(max(sizes.qk, sizes.v))
        if sizes.qk == sizes.v == size:
            return self
        return replace(self, forward=replace(self.forward, head_dim=size, v_dim=0), rows=sizes)

    @classmethod
    def check(cls, forward: AttentionProblem, wanted: tuple[str, ...], **options) -> BackwardProblem:
        """Raise NotImplementedError, naming the argument, for a forward pass without gradients."""
        if not forward.normalize:
            raise NotImplementedError(
                "normalize: gradients are not implemented with normalize=False; a gradient flows through "
                "attention(..., return_lse=True)"
            )
        if forward.format.shared_kv and forward.v_dim:
            raise NotImplementedError(
                f"v_dim: gradients are not implemented where V is a part of K's rows, got v_dim={forward.v_dim}"
            )
        if forward.mask.has_tree:
            raise NotImplementedError("tree: gradients are not implemented with a tree")
        if forward.requests.page_size:
            raise NotImplementedError("page_table: gradients are not implemented for paged keys")
        if forward.mask.has_blocks and forward.requests.ends_in_tile:
            name = "cu_seqlens_k" if forward.requests.packed_k else "kv_lengths"
            raise NotImplementedError(
                f"block_mask: gradients are not implemented with {name}; packed documents can be one batch row of "
                "attention() whose lists keep them apart"
            )
        if forward.mask.has_blocks:  # the forward pass alone looks at the order
            forward = replace(forward, mask=replace(forward.mask, has_order=False))
        return cls(forward, wanted, **options)
