"""Weights and state of a Swap-FFN block.

Weights have the orientation of nn.Linear unless noted. Sizes: D d_model, F d_ff, C cores, E width of a core's
embedding, Z d_router, K slots of the collapse, R rank of the collapse.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import torch

from warpspec.common.autocast import without_autocast
from warpspec.common.checks import check_floating, check_int, check_kind, check_number

BANKS = 4  # a stream map has four lanes of two bits
LANE_BITS = 2
IDENTITY_MAP = 0b11_10_01_00  # lane i holds bank i

# name -> dimensions
SHAPES = {
    "core_embed": "CE",
    "core_scale.weight": "DE",
    "core_scale.bias": "D",
    "core_shift.weight": "DE",
    "core_shift.bias": "D",
    "core_alpha.weight": "KE",
    "core_alpha.bias": "K",
    "router_norm": "D",
    "router_w": "ZD",
    "swap_w": "Z",
    "swap_b": "1",
    "bank_w": "Z4",  # z . bank_w
    "bank_b": "4",
    "ffn_norm": "D",
    "w1": "FD",
    "w3": "FD",
    "w2": "DF",
    "basis": "KRD",
    "decoder": "DR",
}

INTERLEAVE = 8  # 8 rows of w1, then 8 of w3: gate and up of a feature come to the same thread
MOST_ROWS = 1 << 20  # requests times cores; keeps row number * d_model in 32 bits
FEATURE_TILE = 256  # d_ff is padded to a multiple of this


@dataclass(frozen=True, eq=False)
class SwapFFNWeights:
    """The weights of one block, and what is derived from them once. Made by ``from_tensors``.

    tensors: bf16 and contiguous, by the names in ``SHAPES``. eps: added to the mean square in both RMS norms.
    """

    tensors: dict[str, torch.Tensor]
    eps: float = 1e-6

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, torch.Tensor], *, eps: float = 1e-6) -> SwapFFNWeights:
        """Take a block's weights by name; floating tensors of any dtype are converted to bf16. Shapes: ``SHAPES``.

        Raises KeyError for a missing or unknown name, TypeError for anything but a mapping of floating tensors, and
        ValueError for a wrong shape, a device other than core_embed's, or an eps that is not positive.
        """
        check_kind("tensors", tensors, Mapping)
        missing, unknown = SHAPES.keys() - tensors.keys(), tensors.keys() - SHAPES.keys()
        if missing or unknown:
            raise KeyError(f"tensors: missing {sorted(missing)}, unknown {sorted(unknown)}")
        check_number("eps", eps, positive=True)
        sizes, found = {"1": 1, "4": BANKS}, {}
        for name, dimensions in SHAPES.items():
            tensor = tensors[name]
            check_floating(name, tensor)
            wanted = [sizes.get(d, d) for d in dimensions]
            fits = tensor.dim() == len(wanted) and all(
                size > 0 and (isinstance(want, str) or want == size)
                for want, size in zip(wanted, tensor.shape, strict=True)
            )
            if not fits:
                raise ValueError(f"{name}: shape must be {wanted}, got {list(tensor.shape)}")
            device = tensors["core_embed"].device
            if tensor.device != device:
                raise ValueError(f"{name}: must be on core_embed's device, {device}, got {tensor.device}")
            sizes |= zip(dimensions, tensor.shape, strict=True)
            found[name] = tensor.detach().to(torch.bfloat16).contiguous()
        return cls(found, float(eps))

    def __getitem__(self, name: str) -> torch.Tensor:
        return self.tensors[name]

    @property
    def device(self) -> torch.device:
        return self["core_embed"].device

    @property
    def cores(self) -> int:
        return self["core_embed"].shape[0]

    @property
    def d_model(self) -> int:
        return self["w1"].shape[1]

    @property
    def d_ff(self) -> int:
        return self["w1"].shape[0]

    @property
    def d_router(self) -> int:
        return self["router_w"].shape[0]

    @property
    def collapse_k(self) -> int:
        return self["basis"].shape[0]

    @property
    def collapse_r(self) -> int:
        return self["basis"].shape[1]

    # Derived on first use, constant afterwards.

    @cached_property
    def core_scale(self) -> torch.Tensor:
        """fp32 [C, D]: 1 + Linear(core_embed)."""
        return 1.0 + self._linear("core_scale")

    @cached_property
    def core_shift(self) -> torch.Tensor:
        """fp32 [C, D]: Linear(core_embed)."""
        return self._linear("core_shift")

    @cached_property
    def core_alpha(self) -> torch.Tensor:
        """fp32 [C, K]: softmax of Linear(core_embed) over the K slots of the collapse, separately for each core."""
        return torch.softmax(self._linear("core_alpha"), dim=-1)

    @without_autocast
    def _linear(self, name: str) -> torch.Tensor:
        weight, bias = self[f"{name}.weight"].float(), self[f"{name}.bias"].float()
        return self["core_embed"].float() @ weight.T + bias

    @property
    def d_ff_padded(self) -> int:
        """d_ff rounded up to a multiple of FEATURE_TILE; the added features have zero weights."""
        return -(-self.d_ff // FEATURE_TILE) * FEATURE_TILE

    @cached_property
    def w13(self) -> torch.Tensor:
        """bf16 [2 d_ff_padded, D]: w1 and w3 times ffn_norm, rounded once; 8 rows of w1 and 8 of w3 alternate."""
        gate, up = (self._padded(self[name].float() * self["ffn_norm"].float()) for name in ("w1", "w3"))
        blocks = torch.stack([t.view(-1, INTERLEAVE, self.d_model) for t in (gate, up)], dim=1)
        return blocks.reshape(-1, self.d_model).to(torch.bfloat16).contiguous()

    @cached_property
    def w2(self) -> torch.Tensor:
        """bf16 [D, d_ff_padded]."""
        return self._padded(self["w2"].T).T.contiguous()

    def _padded(self, rows: torch.Tensor) -> torch.Tensor:
        """rows [F, ...], padded with rows of zeros to d_ff_padded."""
        return torch.cat([rows, rows.new_zeros(self.d_ff_padded - self.d_ff, rows.shape[1])])

    def prepare(self) -> SwapFFNWeights:
        """Derive everything now instead of in the first call, which torch.compile cannot trace. Returns the weights
        themselves."""
        for name in PREPARED:
            getattr(self, name)
        return self

    def flatten(self) -> list[torch.Tensor]:
        """All tensors as the operator takes them: those of SHAPES, then what is derived."""
        return [*(self[name] for name in SHAPES), *(getattr(self, name) for name in PREPARED)]


PREPARED = ("core_scale", "core_shift", "core_alpha", "w13", "w2")


def unflatten(tensors: list[torch.Tensor], eps: float) -> SwapFFNWeights:
    """Rebuild the weights from ``flatten``'s list."""
    weights = SwapFFNWeights(dict(zip(SHAPES, tensors[: len(SHAPES)], strict=True)), eps)
    weights.__dict__.update(zip(PREPARED, tensors[len(SHAPES) :], strict=True))
    return weights


@dataclass(frozen=True, eq=False)
class SwapState:
    """The state that a block keeps from token to token.

    ram: bf16 [B, C, 4, D], four banks, each a vector, for each core. map: uint8 [B, C], four lanes of two bits: bits 2
    i and 2 i + 1 hold the physical bank of logical bank i. A map always is a permutation.
    """

    ram: torch.Tensor
    map: torch.Tensor

    @classmethod
    def initial(cls, batch: int, weights: SwapFFNWeights) -> SwapState:
        """Banks of zeros, with the identity map, for ``batch`` requests. Raises TypeError or ValueError naming the
        argument."""
        check_kind("weights", weights, SwapFFNWeights)
        check_int("batch", batch, 0, MOST_ROWS // weights.cores)
        shape, device = (batch, weights.cores), weights.device
        ram = torch.zeros(*shape, BANKS, weights.d_model, dtype=torch.bfloat16, device=device)
        return cls(ram, torch.full(shape, IDENTITY_MAP, dtype=torch.uint8, device=device))

    def clone(self) -> SwapState:
        """A copy of the state in new memory."""
        return SwapState(self.ram.clone(), self.map.clone())
