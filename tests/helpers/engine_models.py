"""Tiny seeded models of the classes that engines serve, and how what an engine generated is judged."""

import json
import shutil
from copy import deepcopy

import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    DeepseekV32Config,
    DynamicCache,
    Gemma4TextConfig,
    GlmMoeDsaConfig,
    GptOssConfig,
    LlamaConfig,
    MiMoV2FlashConfig,
    Phi3Config,
    Qwen3Config,
)
from transformers.models.gemma2 import Gemma2Config
from transformers.models.gemma3 import Gemma3TextConfig

from warpspec.cache import quantize

VOCABULARY = 256
SIZES = dict(
    vocab_size=VOCABULARY,
    hidden_size=128,
    intermediate_size=128,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=512,
    initializer_range=0.1,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=None,
    tie_word_embeddings=False,
)
CONFIGS = {
    "llama": lambda: LlamaConfig(**SIZES, num_hidden_layers=2, head_dim=64),
    "qwen3": lambda: Qwen3Config(**SIZES, num_hidden_layers=2, head_dim=64),
    # layers with a window of 16 keys and without one in turns; sinks
    "gpt_oss": lambda: GptOssConfig(
        **SIZES,
        num_hidden_layers=2,
        head_dim=64,
        sliding_window=16,
        num_local_experts=4,
        num_experts_per_tok=2,
        layer_types=["sliding_attention", "full_attention"],
    ),
    # soft caps far below attention's logits, none of the model's (SGLang's kernel for those is not interpreted); layers
    # with a window to ones without; vLLM knows it with tied embeddings only
    "gemma2": lambda: Gemma2Config(
        **SIZES | {"tie_word_embeddings": True},
        num_hidden_layers=2,
        head_dim=64,
        query_pre_attn_scalar=4,
        attn_logit_softcapping=2.0,
        final_logit_softcapping=None,
        sliding_window=16,
    ),
    # head size 256, five layers with a window to one without (here one to one)
    "gemma3": lambda: Gemma3TextConfig(
        **SIZES,
        num_hidden_layers=2,
        head_dim=256,
        query_pre_attn_scalar=256,
        sliding_window=24,
        layer_types=["sliding_attention", "full_attention"],
    ),
}

LOCAL_AND_GLOBAL = ["sliding_attention", "full_attention"]
# Models with head sizes of their own.
SIZES_CONFIGS = {
    # head size 96
    "phi3": lambda: Phi3Config(**SIZES | {"hidden_size": 384}, num_hidden_layers=2),
    # head size 512, two KV heads, and one projection of keys and values in layers without a window; the second half of
    # the layers reads the keys and values of the first half
    "gemma4": lambda: Gemma4TextConfig(
        **SIZES, num_hidden_layers=4, head_dim=64, sliding_window=24, layer_types=2 * LOCAL_AND_GLOBAL,
        attention_k_eq_v=True, num_global_key_value_heads=2, hidden_size_per_layer_input=32,
        vocab_size_per_layer_input=VOCABULARY, num_kv_shared_layers=2,
    ),
    # head sizes 192 and 128; sinks, and twice as many KV heads, in the layer with a window
    "mimo_v2_flash": lambda: MiMoV2FlashConfig(
        **SIZES, num_hidden_layers=2, layer_types=LOCAL_AND_GLOBAL, sliding_window=24, mlp_layer_types=["dense"] * 2
    ),
}  # fmt: skip

# Models whose caches hold latent rows. No experts: another choice of them, by rounding, is no error of attention.
LATENT_SIZES = dict(
    **SIZES | {"num_key_value_heads": 4}, num_hidden_layers=2, first_k_dense_replace=2, q_lora_rank=64,
    kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128,
    rope_parameters={"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "mscale": 1.0, "mscale_all_dim": 1.0,
                     "original_max_position_embeddings": 128, "beta_fast": 32, "beta_slow": 1},
    moe_layer_freq=1, topk_method="noaux_tc",  # (SGLang reads them)
)  # fmt: skip
# (SGLang has no RoPE without a scaling on a CPU)
ROPE = LATENT_SIZES["rope_parameters"] | {"factor": 1.0, "original_max_position_embeddings": 512}
LATENT_CONFIGS = {
    "deepseek_v3": lambda: DeepseekV3Config(**LATENT_SIZES),
    # an indexer selects at most 48 keys of a query
    "deepseek_v32": lambda: DeepseekV32Config(
        **LATENT_SIZES, mlp_layer_types=["dense"] * 2, index_topk=48, index_n_heads=4, index_head_dim=128
    ),
    # keys and values of 256 numbers; the second layer has no indexer and takes what the first one's selects
    "glm_moe_dsa": lambda: GlmMoeDsaConfig(
        **LATENT_SIZES | {"qk_nope_head_dim": 192, "v_head_dim": 256, "rope_parameters": ROPE}, index_topk=48,
        mlp_layer_types=["dense"] * 2, index_n_heads=4, index_head_dim=128, indexer_types=["full", "shared"],
    ),
}  # fmt: skip


def make_model(kind: str, dtype: torch.dtype = torch.bfloat16):
    """The seeded model of a kind, in evaluation mode."""
    torch.manual_seed(7)
    config = (CONFIGS | SIZES_CONFIGS | LATENT_CONFIGS)[kind]()
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("sinks"):  # so large that a model without them says other things
                parameter.normal_(2.0, 1.0)
            elif name.endswith(("q_proj.weight", "k_proj.weight", "q_b_proj.weight")):
                parameter.mul_(2.0)
            elif "experts" in name:  # another choice of experts, by rounding, is no error of attention
                parameter.mul_(0.3)
    return model.to(dtype).eval()


def save_model(model, folder) -> None:
    """Save a model's files as engines read them, with what the authors' configurations say besides transformers'."""
    model.save_pretrained(folder)
    kind, file = model.config.model_type, folder / "config.json"
    if kind == "mimo_v2_flash":
        tensors = load_file(folder / "model.safetensors")
        names = {name: name.replace("self_attn.sinks", "self_attn.attention_sink_bias") for name in tensors}
        tensors = {names[name]: tensor for name, tensor in tensors.items()}
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    others = {
        "gemma2": lambda _: {"hidden_act": "gelu_pytorch_tanh"},
        # (SGLang asks for a head size of all layers, which transformers refuses to name otherwise)
        "gemma4_text": lambda _: {"allow_global_per_layer_attribute_access": True},
        "mimo_v2_flash": mimo_fields,
        # (vLLM's name of which layers have an indexer)
        "glm_moe_dsa": lambda m: {
            "index_topk_pattern": "".join(t[0].upper() for t in m.config.indexer_types)
        },
    }
    if kind in others:
        file.write_text(json.dumps(json.loads(file.read_text()) | others[kind](model)))


def rename_kimi_k2(folder, copy) -> None:
    """Save the files of a DeepSeek V3 in another folder under Kimi K2's name, as its authors publish it: engines know
    the name, or take a configuration class from the folder."""
    shutil.copytree(folder, copy, dirs_exist_ok=True)
    config = json.loads((copy / "config.json").read_text())
    config |= {
        "model_type": "kimi_k2",
        "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"},
    }
    (copy / "config.json").write_text(json.dumps(config))
    (copy / "configuration_deepseek.py").write_text(
        "from transformers.models.deepseek_v3.configuration_deepseek_v3 import DeepseekV3Config as Base\n\n\n"
        'class DeepseekV3Config(Base):\n    model_type = "kimi_k2"\n'
    )


def mimo_fields(model) -> dict:
    """What MiMo-V2-Flash's authors call the fields of its configuration."""
    config = model.config
    rope = {name: config.rope_parameters[f"{name}_attention"] for name in ("full", "sliding")}
    window = model.model.layers[0].self_attn
    return {
        "hybrid_layer_pattern": [int(kind == "sliding_attention") for kind in config.layer_types],
        "moe_layer_freq": [0] * config.num_hidden_layers, "scoring_func": "sigmoid", "topk_method": "noaux_tc",
        "swa_num_attention_heads": config.num_attention_heads, "swa_head_dim": config.head_dim,
        "swa_num_key_value_heads": window.k_proj.out_features // config.head_dim, "swa_v_head_dim": config.v_head_dim,
        "sliding_window_size": config.sliding_window, "add_swa_attention_sink_bias": True,
        "rope_parameters": rope["full"], "rope_theta": rope["full"]["rope_theta"],
        "swa_rope_theta": rope["sliding"]["rope_theta"],
        "partial_rotary_factor": rope["full"]["partial_rotary_factor"], "layernorm_epsilon": config.rms_norm_eps,
    }  # fmt: skip


def prompts(lengths, common: int = 0) -> list[list[int]]:
    """Random prompts whose first `common` tokens are the same."""
    generator = torch.Generator().manual_seed(3)
    start = torch.randint(2, VOCABULARY, (common,), generator=generator).tolist()
    return [
        (start + torch.randint(2, VOCABULARY, (length,), generator=generator).tolist())[:length]
        for length in lengths
    ]


class RoundingCache(DynamicCache):
    """A cache whose keys and values have been rounded. to: a dtype, with a scale of 1, or a function; or functions of
    some layers, by number."""

    def __init__(self, to):
        super().__init__()
        self.to = to

    def update(self, key_states, value_states, layer_idx, *rest, **named):
        to = self.to.get(layer_idx, lambda t: t) if isinstance(self.to, dict) else self.to
        if isinstance(to, torch.dtype):
            return super().update(
                *(t.to(to).to(t.dtype) for t in (key_states, value_states)), layer_idx, *rest, **named
            )
        return super().update(to(key_states), to(value_states), layer_idx, *rest, **named)


def rounding(name: str, scale: torch.Tensor | float = 1.0):
    """A function: what a cache of a format ("e4m3", "e5m2", "nvfp4") makes of keys or values."""
    scale = torch.as_tensor(scale)
    if name == "nvfp4":
        return lambda t: quantize.dequantize_nvfp4(*quantize.quantize_nvfp4(t, scale), scale).to(t.dtype)

    def rounded(t):
        codes = quantize.quantize_float8(t, scale, name)
        return quantize.dequantize_float8(codes, scale, name).to(t.dtype)

    return rounded


def log_probabilities(model, prompt: list[int], generated: list[int], cached=None, **others) -> torch.Tensor:
    """[generated tokens, vocabulary]: what the model says after each prefix, in one forward. cached: to what keys and
    values are rounded (``RoundingCache``); None: they are not. others: further inputs of the model, or functions of the
    tokens to them."""
    cache = None if cached is None else RoundingCache(cached)
    inputs = torch.tensor([prompt + generated[:-1]])
    others = {name: value(inputs) if callable(value) else value for name, value in others.items()}
    others = {name: t.to(model.dtype) if t.is_floating_point() else t for name, t in others.items()}
    with torch.no_grad():
        logits = model(inputs, use_cache=cache is not None, past_key_values=cache, **others).logits[0]
    return logits[len(prompt) - 1 :].float().log_softmax(-1)


def root_mean_square(differences: list[torch.Tensor]) -> torch.Tensor:
    """The root mean square of all elements of tensors."""
    return torch.cat(differences).square().mean().sqrt()


def error_of(model, results, cached=None) -> float:
    """Root mean square of what an engine's log-probabilities of the tokens that it generated differ from a model's in
    FP32. results: (prompt, generated tokens, their log-probabilities). cached: as in ``Judge``."""
    exact, differences = deepcopy(model).float(), []
    for ids, tokens, said in results:
        chosen = torch.tensor(tokens)[:, None]
        wanted = log_probabilities(exact, ids, tokens, cached).gather(1, chosen)[:, 0]
        differences.append(torch.tensor(said) - wanted)
    return root_mean_square(differences).item()


def check_as_own(model, own, ours, cached=None) -> None:
    """Ours must generate most of the tokens that an engine's own attention generates (a near tie flips one and those
    after it), and be about as near to the model in FP32. own, ours, cached: as in ``error_of``."""
    pairs = zip(own, ours, strict=True)
    same = [a == b for (_, one, _), (_, other, _) in pairs for a, b in zip(one, other, strict=True)]
    assert sum(same) >= 0.75 * len(same), f"{sum(same)} of {len(same)} tokens are the same"
    errors = [error_of(model, results, cached) for results in (own, ours)]
    assert errors[1] <= Judge.FACTOR * errors[0], f"own attention {errors[0]:.4f}, ours {errors[1]:.4f}"


class Judge:
    """Compares an engine's log-probabilities of what it generated with the same model in FP32, with eager attention.

    The measure is the model's own error in bf16: the root mean square of the differences. cached: what the engine's
    cache rounds to (``RoundingCache``), and both models' keys and values, too.

    An engine may take another token than the best one where two are nearly as likely. How far all tokens are behind the
    best ones, squared and added, is at most as if each was ``factor`` own errors behind, and one NEAR_TIE times that.
    One token alone may be further behind only where the model in bf16 is as much less exact.
    """

    FACTOR = 1.6  # ours over the model's own in bf16; some dozens of tokens scatter
    NEAR_TIE = 4.0

    def __init__(self, model, cached=None, factor: float = FACTOR):
        self.cached, self.factor = cached, factor
        self.exact = deepcopy(model).float()
        self.exact.set_attn_implementation("eager")
        self.rounded = deepcopy(model)
        self.rounded.set_attn_implementation("eager")

    def check(self, requests) -> None:
        """requests: (prompt, generated tokens, log-probability of each or None), and further inputs of the model, if it
        has any (``log_probabilities``)."""
        own, ours, behind, around = [], [], [], []
        for prompt, generated, said, *more in requests:
            others, chosen = more[0] if more else {}, torch.tensor(generated)[:, None]
            exact = log_probabilities(self.exact, prompt, generated, self.cached, **others)
            of_chosen = exact.gather(1, chosen)[:, 0]
            rounded = log_probabilities(self.rounded, prompt, generated, self.cached, **others)
            around.append((rounded - exact).square().mean(1))  # of all tokens in each one's place
            own.append(rounded.gather(1, chosen)[:, 0] - of_chosen)
            behind.append(exact.amax(1) - of_chosen)
            if said is not None:
                ours.append(torch.tensor(said) - of_chosen)
        own_error, behind = root_mean_square(own), torch.cat(behind)
        all_behind = (behind.square().sum() / (len(behind) + self.NEAR_TIE**2)).sqrt()
        assert all_behind <= self.factor * own_error, (
            f"tokens are {all_behind:.4f} behind, the model's own {own_error:.4f}"
        )
        place_error = (own_error.square() + torch.cat(around)).sqrt()
        worst = (behind / place_error).amax()
        assert worst <= 2**0.5 * self.NEAR_TIE, f"a token is {worst:.1f} times its place's error behind"
        if ours:
            error = root_mean_square(ours)
            assert error <= self.factor * own_error, f"{error:.4f}, the model's own {own_error:.4f}"


def write_nvfp4_experts(folder) -> object:
    """A checkpoint of a tiny Qwen3-MoE as ModelOpt writes it, experts in NVFP4; returns the model that it is, with the
    experts' weights as they are after rounding."""
    from transformers import Qwen3MoeConfig

    from warpspec.common.nvfp4 import dequantize, quantize

    sizes = SIZES | {"num_hidden_layers": 2, "head_dim": 64, "moe_intermediate_size": 64, "num_experts": 4}
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(
        Qwen3MoeConfig(**sizes, num_experts_per_tok=2, norm_topk_prob=True), attn_implementation="eager"
    )
    model = model.to(torch.bfloat16).eval()
    tensors = {}
    with torch.no_grad():
        for name, weight in model.state_dict().items():
            if "experts" not in name:
                tensors[name] = weight.contiguous()
        for index, layer in enumerate(model.model.layers):
            experts = layer.mlp.experts
            width = experts.down_proj.shape[-1]
            for expert in range(len(experts.down_proj)):
                rows = experts.gate_up_proj[expert]
                matrices = {
                    "gate_proj": rows[:width],
                    "up_proj": rows[width:],
                    "down_proj": experts.down_proj[expert],
                }
                for matrix, weight in matrices.items():
                    code = quantize(weight.float())
                    name = f"model.layers.{index}.mlp.experts.{expert}.{matrix}"
                    tensors[f"{name}.weight"] = code.data
                    tensors[f"{name}.weight_scale"] = code.scale
                    tensors[f"{name}.weight_scale_2"] = code.global_scale
                    tensors[f"{name}.input_scale"] = torch.tensor(2.0**-6)
                    weight.copy_(dequantize(code))
    model.config.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    config["architectures"] = ["Qwen3MoeForCausalLM"]
    excluded = ["lm_head", "*self_attn*", "*mlp.gate"]
    quantization = {
        "quant_algo": "NVFP4",
        "group_size": 16,
        "kv_cache_quant_algo": None,
        "exclude_modules": excluded,
    }
    config["quantization_config"] = {"quant_method": "modelopt", "ignore": excluded, **quantization}
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return model


def write_scaled_llama(folder, strategy: str, scales: list[torch.Tensor]) -> object:
    """A checkpoint of the tiny Llama with scales of an FP8 cache, as compressed-tensors writes them; returns the model.
    strategy: "tensor" or "attn_head". scales: fp32 [1] or [Hkv] of each layer, of keys and of values."""
    model = make_model("llama")
    model.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    for layer, scale in enumerate(scales):
        for name in ("k_scale", "v_scale"):
            tensors[f"model.layers.{layer}.self_attn.{name}"] = scale.clone()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    scheme = {"num_bits": 8, "type": "float", "strategy": strategy, "dynamic": False, "symmetric": True}
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "dense",
        "config_groups": {},
        "ignore": ["lm_head"],
        "quantization_status": "frozen",
        "kv_cache_scheme": scheme,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return model
