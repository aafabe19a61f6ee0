"""Models of the families that transformers serves with our attention, tiny and seeded, and what is compared of them."""

import contextlib
import functools
import sys
from functools import partial
from unittest import mock

import torch
import transformers

from helpers.engine_models import SIZES, make_model
from helpers.model_pairs import EAGER_FACTOR, relative_error

IMAGE, IMAGE_TOKENS = 250, 16  # token that stands for a place of an image; places of an image
WINDOW = 12  # less than an image: local layers cut it
LATENT = dict(q_lora_rank=32, kv_lora_rank=32, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128)
WIDE = dict(qk_nope_head_dim=192, v_head_dim=256)
LOCAL_AND_GLOBAL = ["sliding_attention", "full_attention"]
SMALL = SIZES | {"num_hidden_layers": 2}


def dense(**others) -> dict:
    """Sizes of a model with multi-head attention and no experts."""
    return SMALL | {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2} | others


def with_images(family: str, text, **others):
    """A model of Gemma 3 or Gemma 4 with an encoder of images."""
    vision = dict(
        hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2,
        head_dim=16, image_size=32, patch_size=8, pooling_kernel_size=2,
    )  # fmt: skip
    config = getattr(transformers, f"{family}Config")(text_config=text, vision_config=vision, **others)
    return getattr(transformers, f"{family}ForConditionalGeneration")(config)


def gemma3():
    text = transformers.Gemma3TextConfig(
        **SMALL, head_dim=64, query_pre_attn_scalar=4, sliding_window=WINDOW, layer_types=LOCAL_AND_GLOBAL
    )
    ids = dict(image_token_index=IMAGE, boi_token_index=251, eoi_token_index=252)
    return with_images("Gemma3", text, mm_tokens_per_image=IMAGE_TOKENS, **ids)


def gemma4():
    """Global layers with a head size of 512 and one projection of keys and values; images are seen whole in local
    layers only."""
    text = transformers.Gemma4TextConfig(
        **SMALL, head_dim=64, sliding_window=WINDOW, layer_types=LOCAL_AND_GLOBAL, attention_k_eq_v=True,
        num_global_key_value_heads=1, use_bidirectional_attention="vision", hidden_size_per_layer_input=0,
    )  # fmt: skip
    ids = dict(
        image_token_id=IMAGE, boi_token_id=251, eoi_token_id=252, video_token_id=253, audio_token_id=254
    )
    return with_images("Gemma4", text, audio_config=None, **ids)


def causal_lm(config: str, **options):
    """A function: the model of a configuration, named without Config."""
    return lambda: transformers.AutoModelForCausalLM.from_config(
        getattr(transformers, f"{config}Config")(**options), attn_implementation="eager"
    )


@functools.cache
def configurations() -> frozenset[str]:
    """Names of the configurations that the installed transformers has, in lower case."""
    return frozenset(name.lower() for name in dir(transformers) if name.endswith("Config"))


def is_known(kind: str) -> bool:
    """Whether the installed transformers has models of this kind."""
    return f"{kind.replace('_', '')}config" in configurations()


MODELS = {
    "gemma2": lambda: make_model("gemma2", torch.float32),
    "vaultgemma": causal_lm(
        "VaultGemma", **SMALL, head_dim=64, query_pre_attn_scalar=4, attn_logit_softcapping=2.0, sliding_window=WINDOW,
        layer_types=LOCAL_AND_GLOBAL,
    ),
    "gemma3": gemma3,
    "gemma4": gemma4,
    "phi3": causal_lm("Phi3", **dense(hidden_size=192)),  # head size 96
    "deepseek_v3": causal_lm("DeepseekV3", **dense(first_k_dense_replace=2), **LATENT),
    # the indexer leaves 8 of up to 60 keys to a query
    "deepseek_v32": causal_lm(
        "DeepseekV32", **dense(first_k_dense_replace=2, mlp_layer_types=["dense"] * 2), **LATENT, index_topk=8,
        index_n_heads=4, index_head_dim=96,
    ),
    # sinks in layers with a window, twice as many KV heads there, RoPE on a third
    "mimo_v2_flash": causal_lm(
        "MiMoV2Flash", **dense(num_attention_heads=4), layer_types=LOCAL_AND_GLOBAL, sliding_window=WINDOW,
        mlp_layer_types=["dense"] * 2,
    ),
    "kimi_linear": causal_lm(
        "KimiLinear", **dense(mlp_layer_types=["dense"] * 2, layer_types=["linear_attention", "full_attention"]),
        **LATENT, linear_head_dim=32, linear_num_heads=2,
    ),
    "glm_moe_dsa": causal_lm(
        "GlmMoeDsa", **dense(first_k_dense_replace=2, mlp_layer_types=["dense"] * 2), **LATENT | WIDE, index_topk=8,
        index_n_heads=4, index_head_dim=96,
    ),
    # of 60 keys, in blocks of 8, the indexer leaves a query's own block and one more
    "minimax_m3_vl_text": causal_lm(
        "MiniMaxM3VLText", **dense(mlp_layer_types=["dense"] * 2), head_dim=64, dense_intermediate_size=128,
        index_n_heads=2, index_head_dim=32, index_block_size=8, index_topk_blocks=2, index_local_blocks=1,
        layer_types=["full_attention", "minimax_m3_sparse"],
    ),
}  # fmt: skip


def inputs_of(kind: str) -> dict:
    """A prompt of two rows; of models with images, two images in each row at different places."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, 200, (2, 60), generator=generator)
    if kind not in ("gemma3", "gemma4"):
        return {"input_ids": ids}
    for row in range(2):
        for begin in (4 + row, 30 + 3 * row):
            ids[row, begin : begin + IMAGE_TOKENS] = IMAGE
    types = (ids == IMAGE).long()
    if kind == "gemma3":
        pixels = torch.randn(4, 3, 32, 32, generator=generator)
        return {"input_ids": ids, "pixel_values": pixels, "token_type_ids": types}
    # Patches, of which 2 x 2 are one.
    places = torch.cartesian_prod(torch.arange(8), torch.arange(8)).expand(4, -1, -1)
    pixels = torch.rand(4, len(places[0]), 3 * 8 * 8, generator=generator)
    return {
        "input_ids": ids,
        "pixel_values": pixels,
        "image_position_ids": places,
        "mm_token_type_ids": types,
    }


def results(model, inputs: dict, implementation: str) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """(logits of the prompt and of tokens after it from a cache, the prompt's gradients)."""
    of_text = {"text_config": implementation, "vision_config": "eager"}
    model.set_attn_implementation(of_text if "pixel_values" in inputs else implementation)
    inputs = {name: t.to(model.dtype) if t.is_floating_point() else t for name, t in inputs.items()}
    more = torch.randint(3, 200, (2, 5), generator=torch.Generator().manual_seed(2)).to(model.device)
    model.eval()
    with torch.no_grad():
        first = model(**inputs, use_cache=True)
        rest = model(input_ids=more, past_key_values=first.past_key_values)
    model.train()
    model.zero_grad()
    labels = torch.where(inputs["input_ids"] == IMAGE, -100, inputs["input_ids"])
    model(**inputs, labels=labels, use_cache=False).loss.backward()
    gradients = {name: p.grad.float() for name, p in model.named_parameters() if p.grad is not None}
    return torch.cat([first.logits, rest.logits], dim=1).float(), gradients


class Selections:
    """What a model's indexers select, recorded in a first run and repeated in later ones: rounding changes it, though
    not much."""

    def __init__(self, model):
        self.recorded, self.next = [], 0
        for layer in model.modules():
            if getattr(layer, "indexer", None) is not None:
                layer.indexer.forward = partial(self.select, layer.indexer.forward)

    def repeat(self) -> None:
        """Go back to the first selection."""
        self.next = 0

    def select(self, forward, *arguments, **named):
        given = forward(*arguments, **named)
        found = given.flatten(0, -3)  # [B, S, n], or of groups of heads [B, groups, S, n]
        if self.next == len(self.recorded):
            self.recorded.append(found)
        self.next += 1
        recorded = self.recorded[self.next - 1]
        rows, count = recorded.shape[1:]
        # Of a prompt, rows that see more keys than are selected.
        late = slice(count if rows > count else 0, None)
        same = (found[:, late, :, None] == recorded[:, late, None, :]).any(dim=-1)
        assert same.float().mean() > 0.8
        return recorded.view(given.shape)


def seeded(kind: str):
    """The model of a kind, in fp32, with sinks that matter."""
    torch.manual_seed(3)
    model = MODELS[kind]()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("sinks"):
                parameter.normal_(2.0, 1.0)
    return model


@contextlib.contextmanager
def counting_calls():
    """A list that gets an entry for each call of ``warpspec.fmha.attention`` or ``attention_varlen`` by transformers'
    layers: were another attention used, what is compared would be that one with itself."""
    modules = [
        sys.modules[f"warpspec.engines.transformers.{n}"] for n in ("attention", "continuous_batching")
    ]
    calls = []
    with contextlib.ExitStack() as patches:
        for module in modules:
            for name in {"attention", "attention_varlen"} & vars(module).keys():
                function = getattr(module, name)

                def counted(*arguments, function=function, **named):
                    calls.append(function.__name__)
                    return function(*arguments, **named)

                patches.enter_context(mock.patch.object(module, name, counted))
        yield calls


def check_logits_and_gradients(kind: str, implementation: str, device="cpu") -> None:
    """Ours in bf16 is at most 1.25 times as far from fp32 as transformers' own attention."""
    model, inputs = seeded(kind).to(device), {name: t.to(device) for name, t in inputs_of(kind).items()}
    selections = Selections(model)
    logits, gradients = results(model, inputs, "eager")
    model.bfloat16()
    selections.repeat()
    own_logits, own_gradients = results(model, inputs, "eager")
    selections.repeat()
    with counting_calls() as calls:
        our_logits, our_gradients = results(model, inputs, implementation)
    layers = 1 if kind == "kimi_linear" else SMALL["num_hidden_layers"]
    assert len(calls) == 3 * layers, calls  # a prompt, tokens after it, a prompt with gradients
    bar = relative_error(own_logits, logits)
    assert 0 < bar < 0.1
    assert relative_error(our_logits, logits) <= EAGER_FACTOR * bar
    assert our_gradients.keys() == own_gradients.keys() == gradients.keys()
    whole = [
        torch.cat([g[name].flatten() for name in gradients])
        for g in (our_gradients, own_gradients, gradients)
    ]
    assert relative_error(whole[0], whole[2]) <= EAGER_FACTOR * relative_error(whole[1], whole[2])
    for name, exact in gradients.items():
        if "self_attn" in name and exact.norm() > 0:
            error, own = (relative_error(g[name], exact) for g in (our_gradients, own_gradients))
            assert error <= 2 * EAGER_FACTOR * own, name
