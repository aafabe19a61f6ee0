"""transformers' experts and routers of gpt-oss and DeepSeek-V4, run on the dequantised weights, against ours.

Activations are quantised in theirs where ours quantises them, by hooks: before the experts and, through `_apply_gate`,
between the two matrices. Everything else is their code.
"""

import pytest
import torch
from helpers.moe_cases import GEMM_TOLERANCE, quantized, randn, relative_error
from helpers.moe_oracle import dequantize_experts, quantised_activations
from transformers import DeepseekV4Config, GptOssConfig
from transformers.models.deepseek_v4 import modeling_deepseek_v4 as deepseek
from transformers.models.gpt_oss import modeling_gpt_oss as gpt_oss

from warpspec.common.errors import UnsupportedProblem
from warpspec.common.nvfp4 import dequantize, quantize
from warpspec.engines.transformers import experts as adapter
from warpspec.moe import NVFP4Experts, moe_ffn, route

HIDDEN, WIDTH, EXPERTS, TOP = 96, 72, 6, 3


def gpt_oss_config(**changes):
    sizes = dict(
        hidden_size=HIDDEN, intermediate_size=WIDTH, num_local_experts=EXPERTS, num_experts_per_tok=TOP
    )
    return GptOssConfig(**(sizes | changes))


def deepseek_config(**changes):
    sizes = dict(
        hidden_size=HIDDEN, moe_intermediate_size=WIDTH, n_routed_experts=EXPERTS, num_experts_per_tok=TOP
    )
    sizes |= dict(num_hidden_layers=1, layer_types=["sliding_attention"], mlp_layer_types=["moe"])
    return DeepseekV4Config(**(sizes | changes))


def seeded(module, seed=0, gain=1.0):
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            scale = 0.3 if "bias" in name else gain * HIDDEN**-0.5
            parameter.normal_(0.0, scale, generator=generator)
    return module.eval()


EXPERT_MODULES = {
    "gpt-oss": lambda: gpt_oss.GptOssExperts(gpt_oss_config(swiglu_limit=1.5)),
    "deepseek-v4": lambda: deepseek.DeepseekV4Experts(deepseek_config(swiglu_limit=1.5)),
}


@pytest.fixture(params=EXPERT_MODULES)
def experts(request):
    module = seeded(EXPERT_MODULES[request.param](), gain=2.0)
    module.config._experts_implementation = "eager"
    return module


@pytest.mark.parametrize("backend", ["reference", "sim"])
def test_experts(experts, backend):
    x = randn(21, HIDDEN, seed=5).bfloat16()
    ids, weights = route(randn(21, EXPERTS, seed=6), TOP)
    ours = adapter.experts_forward(experts, x.float(), ids.long(), weights, backend=backend)
    assert ours.dtype == torch.float32
    attached = adapter.attached(experts)
    dequantize_experts(experts, attached.experts)
    with torch.no_grad(), quantised_activations(experts, attached.experts):
        theirs = experts(x.float(), ids.long(), weights)
    assert relative_error(ours, theirs) < GEMM_TOLERANCE
    # The limits matter here, and so do the quantised activations.
    assert attached.limit == 1.5
    other = moe_ffn(
        x, attached.experts, ids, weights, activation=attached.activation, limit=3.0, backend="reference"
    )
    assert relative_error(other, theirs) > 10 * GEMM_TOLERANCE
    with torch.no_grad():
        exact = experts(x.float(), ids.long(), weights)
    assert 0.02 < relative_error(ours, exact) < 0.2


def test_changed_weights_are_quantised_anew(experts):
    x = randn(4, HIDDEN, seed=5).bfloat16()
    ids, weights = route(randn(4, EXPERTS, seed=6), TOP)
    before = adapter.experts_forward(experts, x, ids, weights, backend="reference")
    assert adapter.attached(experts) is adapter.attached(experts)
    with torch.no_grad():
        experts.down_proj.mul_(2)
    after = adapter.experts_forward(experts, x, ids, weights, backend="reference")
    assert after.dtype == torch.bfloat16 and not torch.equal(before, after)


def test_attached_experts_are_used(experts):
    made = adapter.attached(experts)
    zero = NVFP4Experts.quantize(
        *(torch.zeros(EXPERTS, *shape) for shape in ((WIDTH, HIDDEN), (WIDTH, HIDDEN), (HIDDEN, WIDTH)))
    )
    adapter.attach(experts, zero)
    x = randn(4, HIDDEN, seed=5).bfloat16()
    ids, weights = route(randn(4, EXPERTS, seed=6), TOP)
    assert not adapter.experts_forward(experts, x, ids, weights, backend="reference").any()
    assert adapter.attached(experts).limit == made.limit
    with pytest.raises(ValueError, match=r"^experts: must be 6"):
        adapter.attach(experts, NVFP4Experts.quantize(*(torch.zeros(2, 16, 16) for _ in range(3))))


def test_other_activations_are_refused(experts):
    experts._apply_gate = lambda gate_up: torch.nn.functional.gelu(gate_up[:, :1]) * gate_up[:, 1:]
    with pytest.raises(UnsupportedProblem, match="activation"):
        adapter.attached(experts)


def test_shared_expert_of_deepseek():
    """transformers' block, router and shared MLP included, as one call of ours."""
    config = deepseek_config(swiglu_limit=2.0)
    block = seeded(deepseek.DeepseekV4SparseMoeBlock(config, 0), gain=2.0)
    block.experts.config._experts_implementation = "eager"
    routed, shared = block.experts, block.shared_experts
    with torch.no_grad():
        gate, up = routed.gate_up_proj.chunk(2, dim=1)
        both = [
            torch.cat([of_all, of_shared.weight[None]])
            for of_all, of_shared in (
                (gate, shared.gate_proj),
                (up, shared.up_proj),
                (routed.down_proj, shared.down_proj),
            )
        ]
        layer = NVFP4Experts.quantize(*both, shared=1)
        x = randn(9, HIDDEN, seed=5).bfloat16()
        _, weights, ids = block.gate(x.float())
        ours = moe_ffn(x, layer, ids.int(), weights, limit=2.0, backend="reference")

        dequantize_experts(routed, layer)
        for linear, matrix in zip((shared.gate_proj, shared.up_proj, shared.down_proj), both, strict=True):
            linear.weight.copy_(quantized(matrix[-1], 0))
        hidden = quantized(x, 1)
        shared.down_proj.register_forward_pre_hook(
            lambda _, inputs: (
                dequantize(quantize(torch.nn.functional.pad(inputs[0], (0, 8)), 2.0**-4))[..., :WIDTH],
            )
        )
        with quantised_activations(routed, layer):
            theirs = routed(x.float(), ids, weights) + shared(hidden)
    assert relative_error(ours, theirs) < GEMM_TOLERANCE


class TestRouters:
    def ordered(self, ids, weights):
        order = weights.argsort(dim=1, descending=True)
        return ids.gather(1, order), weights.gather(1, order)

    def test_gpt_oss(self):
        router = seeded(gpt_oss.GptOssTopKRouter(gpt_oss_config()), gain=3.0)
        with torch.no_grad():
            logits, weights, ids = router(randn(50, HIDDEN))
        got_ids, got = route(logits, TOP)
        assert torch.equal(got_ids.long(), ids)
        torch.testing.assert_close(got, weights, rtol=1e-6, atol=1e-7)

    def test_deepseek(self):
        router = seeded(deepseek.DeepseekV4TopKRouter(deepseek_config(routed_scaling_factor=1.5)), gain=3.0)
        router.e_score_correction_bias.copy_(randn(EXPERTS, seed=3))
        with torch.no_grad():
            logits, weights, ids = router(randn(50, HIDDEN))
        arguments = dict(scoring="sqrtsoftplus", bias=router.e_score_correction_bias, scale=1.5)
        got_ids, got = route(logits, TOP, **arguments)
        (ids, weights), (got_ids, got) = self.ordered(ids, weights), self.ordered(got_ids.long(), got)
        assert torch.equal(got_ids, ids)
        torch.testing.assert_close(got, weights, rtol=1e-6, atol=1e-7)
        without = route(logits, TOP, scoring="sqrtsoftplus", scale=1.5)[0]
        assert not torch.equal(without.sort(dim=1).values.long(), ids.sort(dim=1).values)
