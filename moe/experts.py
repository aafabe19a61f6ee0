"""The weights of a layer's experts, quantised and laid out for the kernels."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch

from warpspec.common.architecture import architecture_of
from warpspec.common.checks import (
    check_choice,
    check_device,
    check_floating,
    check_int,
    check_kind,
    check_number,
)
from warpspec.common.nvfp4 import NVFP4_BLOCK, NVFP4Tensor
from warpspec.moe.activations import DEFAULT_INTERMEDIATE_SCALE
from warpspec.moe.operands import PreparedWeights, prepare_w2, prepare_w13
from warpspec.moe.streamed import StreamedWeights, stream

LAYOUTS = (PreparedWeights.layout, StreamedWeights.layout)  # backends that have their own layout


@dataclass(frozen=True)
class NVFP4Experts:
    """Gate, up and down matrices of E experts in NVFP4, as `moe_ffn` takes them.

    w13: gate and up, interleaved. w2: down; in ``PreparedWeights`` its global scale includes intermediate_scale.
    intermediate_scale: fp32 [E], global scale of each expert's activations between the GEMMs, for NVFP4 activations.
    shared: how many of the experts, counted from the last, every token takes with weight 1; ids do not name them. Both
    matrices are laid out for one backend (`layout`); `for_backend` lays them out for another.
    """

    w13: PreparedWeights | StreamedWeights
    w2: PreparedWeights | StreamedWeights
    intermediate_scale: torch.Tensor
    shared: int = 0

    @property
    def experts(self) -> int:
        """Number of experts that ids name: all but the shared ones."""
        return self.w13.experts - self.shared

    @property
    def hidden(self) -> int:
        """H: width of a token."""
        return self.w13.k

    @property
    def width(self) -> int:
        """I: width between the GEMMs."""
        return self.w13.width

    @property
    def device(self) -> torch.device:
        return self.w13.data.device

    @property
    def layout(self) -> str:
        """The backend that the weights are laid out for: "sm100" or "sm90"."""
        return self.w13.layout

    def to(self, device) -> NVFP4Experts:
        """The experts on another device. Raises TypeError or ValueError for what names none."""
        device = check_device("device", device)
        return replace(
            self,
            w13=self.w13.to(device),
            w2=self.w2.to(device),
            intermediate_scale=self.intermediate_scale.to(device),
        )

    def for_backend(self, backend: str = "auto") -> NVFP4Experts:
        """The experts laid out for "sm100" or "sm90". "auto" takes "sm90" for experts on a Hopper GPU, else "sm100".

        Nothing is rounded. For "sm90", weights whose scales are powers of two that are equal in pairs of blocks (those
        of MXFP4) keep one scale for 32 values. Raises ValueError for any other backend, and for "sm100" if these
        experts are laid out for "sm90": that cannot be undone.
        """
        check_choice("backend", backend, ("auto", *LAYOUTS))
        if backend == "auto":
            found = None
            if self.device.type == "cuda":
                found = architecture_of(torch.cuda.get_device_capability(self.device))
            backend = PreparedWeights.layout if found is None else found.backend
        if backend == self.layout:
            return self
        if backend == "sm100":
            raise ValueError(
                "backend: experts laid out for 'sm90' cannot be laid out for 'sm100' again; keep those that "
                "they were made of"
            )
        return replace(self, w13=stream(self.w13), w2=stream(self.w2, unscale=self.intermediate_scale))

    def shard(self, rank: int, ranks: int) -> NVFP4Experts:
        """A rank's experts for `moe_ffn` with a group: the rank-th of ``ranks`` equal parts, and all shared experts.

        Raises TypeError or ValueError for numbers that are no ints or out of range, or if the experts cannot be divided
        equally.
        """
        check_int("ranks", ranks, 1)
        if self.experts % ranks:
            raise ValueError(f"ranks: must divide the {self.experts} experts, got {ranks}")
        check_int("rank", rank, 0, ranks - 1)
        each = self.experts // ranks
        shared = range(self.experts, self.experts + self.shared)
        own = torch.tensor([*range(rank * each, (rank + 1) * each), *shared], device=self.device)
        scale = self.intermediate_scale[own]
        return replace(self, w13=self.w13.pick(own), w2=self.w2.pick(own), intermediate_scale=scale)

    @classmethod
    def quantize(
        cls,
        gate: torch.Tensor | NVFP4Tensor,
        up: torch.Tensor | NVFP4Tensor,
        down: torch.Tensor | NVFP4Tensor,
        *,
        gate_bias: torch.Tensor | None = None,
        up_bias: torch.Tensor | None = None,
        down_bias: torch.Tensor | None = None,
        intermediate_scale: torch.Tensor | float | None = None,
        shared: int = 0,
    ) -> NVFP4Experts:
        """Experts from bf16 or fp32 weights, which it quantises with one global scale a matrix, or from NVFP4Tensors.

        Args:
            gate, up: [E, I, H]; down: [E, H, I]. H is a multiple of 16, I of 8.
            gate_bias, up_bias: [E, I] floating, both or neither; down_bias: [E, H].
            intermediate_scale: positive, a float or [E]: global scale of the activations between the GEMMs. If their
                largest magnitude is known, use ``intermediate_scale_of(activation, limit)``. The default 2**-4 cuts
                values above 168 and keeps full precision down to 6e-3.
            shared: this many experts, counted from the last, are taken by every token.

        Raises:
            TypeError, ValueError: naming the argument.
        """
        w13 = prepare_w13(gate, up, gate_bias=gate_bias, up_bias=up_bias)
        experts, hidden, width = w13.experts, w13.k, w13.width
        if gate.shape[2] != hidden:
            raise ValueError(f"gate: H must be a multiple of 16, got {gate.shape[2]}")
        check_kind("down", down, (torch.Tensor, NVFP4Tensor))
        padded = -(-width // NVFP4_BLOCK) * NVFP4_BLOCK
        if tuple(down.shape) not in ((experts, hidden, width), (experts, hidden, padded)):
            raise ValueError(f"down: must be [{experts}, {hidden}, {width}], got {list(down.shape)}")
        if down.device != w13.data.device:
            raise ValueError(f"down: must be on {w13.data.device} as gate is, got {down.device}")
        check_int("shared", shared, 0, experts)
        scale = _intermediate_scale(intermediate_scale, experts, w13.data.device)
        if down_bias is not None:
            check_floating("down_bias", down_bias, (experts, hidden), w13.data.device)
        return cls(w13, prepare_w2(down, input_scale=scale, bias=down_bias), scale, shared)

    @classmethod
    def from_checkpoint(cls, path: str | Path, layer: str, **options) -> NVFP4Experts:
        """Load the experts of a layer from a safetensors file or folder, on the CPU.

        path: the file or folder. layer: the experts' name, such as "model.layers.0.mlp.experts". options, and what is
        raised: as in `warpspec.moe.checkpoint.load_experts`, which also describes the forms.
        """
        from warpspec.moe.checkpoint import load_experts

        return load_experts(path, layer, **options)


def _intermediate_scale(scale, experts: int, device) -> torch.Tensor:
    """The scale as fp32 [E], from a number or a tensor; raises what ``NVFP4Experts.quantize`` does."""
    if scale is None:
        scale = DEFAULT_INTERMEDIATE_SCALE
    if isinstance(scale, torch.Tensor):
        check_floating("intermediate_scale", scale)
        if scale.shape not in ((), (experts,)):
            raise ValueError(f"intermediate_scale: must be () or [E={experts}], got {list(scale.shape)}")
        if scale.is_meta:
            raise ValueError("intermediate_scale: must have values, got a tensor on meta")
    else:
        check_number("intermediate_scale", scale, positive=True)
    scale = torch.as_tensor(scale, dtype=torch.float32)
    if not bool((scale > 0).all() & scale.isfinite().all()):
        raise ValueError(f"intermediate_scale: must be positive and finite, got {scale.tolist()}")
    return scale.to(device).expand(experts).contiguous()
