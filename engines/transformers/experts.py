"""`warpspec.moe.moe_ffn` as an experts implementation of Hugging Face transformers.

    from warpspec.engines.transformers import experts
    experts.register()
    model = AutoModelForCausalLM.from_pretrained(..., experts_implementation="warpspec")

Experts are converted to NVFP4 at a module's first use, from its own weights. `attach` gives it others, such as a
checkpoint's own NVFP4 (`NVFP4Experts.from_checkpoint`). The router remains transformers'. Refused with
`UnsupportedProblem`, never computed differently: experts without a gate, with a norm after them, or with an activation
that is not one of ours (which is found out by trying it). There is no backward pass. With expert parallelism, ids of
other ranks' experts (num_experts and above) are ignored, as in transformers.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers.integrations.moe import ExpertsInterface

from warpspec.common.errors import UnsupportedProblem
from warpspec.moe import NVFP4Experts, intermediate_scale_of, moe_ffn
from warpspec.moe.activations import ACTIVATIONS, activate

ATTACHED = "_warpspec_experts"  # attribute of an experts module
PROBE_RANGE = 30.0  # gate and up up to this identify an activation; it exceeds all clamps in use
PROBE_POINTS = 61
PROBE_TOLERANCE = 1e-5


@dataclass(frozen=True)
class Attached:
    """A module's experts in NVFP4. state: state of the parameters that they were made from; None if attached."""

    experts: NVFP4Experts
    activation: str
    limit: float | None
    state: tuple | None


def register(name: str = "warpspec", backend: str = "auto") -> None:
    """Make `experts_implementation=name` compute experts with `moe_ffn(backend=backend)`."""

    def forward(module, hidden_states, top_k_index, top_k_weights):
        return experts_forward(module, hidden_states, top_k_index, top_k_weights, backend=backend)

    ExpertsInterface.register(name, forward)


def attach(module: torch.nn.Module, experts: NVFP4Experts) -> None:
    """Make an experts module use these experts, whatever its own weights are (they may be freed).

    Raises ValueError if the number of experts is not the module's, or if some experts are shared.
    """
    wanted = (module.num_experts, 0)
    if (experts.experts, experts.shared) != wanted:
        raise ValueError(
            f"experts: must be {wanted[0]}, none shared, got {experts.experts}, {experts.shared} shared"
        )
    setattr(module, ATTACHED, Attached(experts, *activation_of(module), None))


def experts_forward(
    module: torch.nn.Module,
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
    *,
    backend: str = "auto",
) -> torch.Tensor:
    """transformers' experts function: hidden_states [T, H], top_k_index and top_k_weights [T, k] -> [T, H].

    hidden_states of another dtype than bf16 are rounded to bf16 first, and the result is converted back.
    """
    own = attached(module)
    result = moe_ffn(
        hidden_states.to(torch.bfloat16).contiguous(),
        own.experts,
        top_k_index.to(torch.int32),
        top_k_weights.to(torch.float32),
        limit=own.limit,
        activation=own.activation,
        backend=backend,
    )
    return result.to(hidden_states.dtype)


def attached(module: torch.nn.Module) -> Attached:
    """The experts attached to the module, or made from its weights; they are made again if the weights have changed."""
    own = getattr(module, ATTACHED, None)
    if own is not None and own.state is None:
        return own
    state = tuple((p.data_ptr(), p._version, p.device) for p in module.parameters())
    if own is None or own.state != state:
        activation, limit = activation_of(module)
        own = Attached(experts_of(module, activation, limit).for_backend(), activation, limit, state)
        setattr(module, ATTACHED, own)
    return own


def experts_of(module: torch.nn.Module, activation: str, limit: float | None) -> NVFP4Experts:
    """Quantise the module's weights to NVFP4.

    Parameters are as transformers' `use_experts_implementation` describes them.
    """
    if not module.has_gate or module.has_post_expert_norm:
        raise UnsupportedProblem(f"experts: {type(module).__name__} has no gate, or a norm after its experts")
    down = module.down_proj.detach()
    down = down.transpose(1, 2) if module.is_transposed else down
    both = module.gate_up_proj.detach()
    gate, up = split_gate_up(module, both.transpose(1, 2) if module.is_transposed else both, dim=1)
    biases = {}
    if module.has_bias:
        gate_bias, up_bias = split_gate_up(module, module.gate_up_proj_bias.detach(), dim=1)
        biases = dict(gate_bias=gate_bias, up_bias=up_bias, down_bias=module.down_proj_bias.detach())
    wide = (weight if weight.dtype == torch.bfloat16 else weight.float() for weight in (gate, up, down))
    return NVFP4Experts.quantize(*wide, **biases, intermediate_scale=intermediate_scale_of(activation, limit))


def split_gate_up(module: torch.nn.Module, both: torch.Tensor, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Split gate and up along a dimension; they are concatenated or alternate."""
    if module.is_concatenated:
        return both.chunk(2, dim=dim)
    return both.unflatten(dim, (-1, 2)).unbind(dim + 1)


def activation_of(module: torch.nn.Module) -> tuple[str, float | None]:
    """(activation, limit) that match the module's `_apply_gate`, found by trying it on a grid."""
    points = torch.linspace(-PROBE_RANGE, PROBE_RANGE, PROBE_POINTS, dtype=torch.float32)
    gate, up = (axis.flatten() for axis in torch.meshgrid(points, points, indexing="ij"))
    # With one gate and one up a row, concatenated and alternating are the same.
    pair = torch.stack([gate, up], dim=1)
    with torch.no_grad():
        expected = module._apply_gate(pair)[:, 0].float()
    limit = getattr(module, "limit", None)
    for activation in ACTIVATIONS:
        for candidate in dict.fromkeys((limit, None)):
            candidate = None if candidate is None else float(candidate)
            if torch.allclose(
                activate(gate, up, activation, candidate), expected, PROBE_TOLERANCE, PROBE_TOLERANCE
            ):
                return activation, candidate
    raise UnsupportedProblem(
        f"experts: the activation of {type(module).__name__} is none of {', '.join(ACTIVATIONS)} with limit {limit}"
    )
