"""Tiny seeded models of the classes that engines serve, and how what an engine generated is judged."""

from copy import deepcopy

import torch
from transformers import AutoModelForCausalLM, GptOssConfig, LlamaConfig, Qwen3Config
from transformers.models.gemma3 import Gemma3TextConfig

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


def make_model(kind: str, dtype: torch.dtype = torch.bfloat16):
    """The seeded model of a kind, in evaluation mode."""
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(CONFIGS[kind](), attn_implementation="eager")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("sinks"):  # so large that a model without them says other things
                parameter.normal_(2.0, 1.0)
            elif name.endswith(("q_proj.weight", "k_proj.weight")):
                parameter.mul_(2.0)
            elif "experts" in name:  # another choice of experts, by rounding, is no error of attention
                parameter.mul_(0.3)
    return model.to(dtype).eval()


def prompts(lengths, common: int = 0) -> list[list[int]]:
    """Random prompts whose first `common` tokens are the same."""
    generator = torch.Generator().manual_seed(3)
    start = torch.randint(2, VOCABULARY, (common,), generator=generator).tolist()
    return [
        (start + torch.randint(2, VOCABULARY, (length,), generator=generator).tolist())[:length]
        for length in lengths
    ]


def log_probabilities(model, prompt: list[int], generated: list[int]) -> torch.Tensor:
    """[generated tokens, vocabulary]: what the model says after each prefix, in one forward without a cache."""
    with torch.no_grad():
        logits = model(torch.tensor([prompt + generated[:-1]]), use_cache=False).logits[0]
    return logits[len(prompt) - 1 :].float().log_softmax(-1)


class Judge:
    """Compares an engine's log-probabilities of what it generated with the same model in FP32, with eager attention.

    The measure is the model's own error in bf16: the root mean square of the differences.
    """

    FACTOR = 1.6  # ours over the model's own in bf16; some dozens of tokens scatter
    NEAR_TIE = 4.0  # in own errors: a token that greedy decoding may take instead of the best one

    def __init__(self, model):
        self.exact = deepcopy(model).float()
        self.exact.set_attn_implementation("eager")
        self.rounded = deepcopy(model)
        self.rounded.set_attn_implementation("eager")

    def check(self, requests) -> None:
        """requests: (prompt, generated tokens, log-probability of each or None)."""
        own, ours, behind = [], [], []
        for prompt, generated, said in requests:
            chosen = torch.tensor(generated)[:, None]
            exact = log_probabilities(self.exact, prompt, generated)
            of_chosen = exact.gather(1, chosen)[:, 0]
            rounded = log_probabilities(self.rounded, prompt, generated).gather(1, chosen)[:, 0]
            own.append(rounded - of_chosen)
            behind.append(exact.amax(1) - of_chosen)
            if said is not None:
                ours.append(torch.tensor(said) - of_chosen)
        own_error = torch.cat(own).square().mean().sqrt()
        worst = torch.cat(behind).amax()
        assert worst <= self.NEAR_TIE * own_error * 2**0.5, (
            f"a generated token is {worst:.3f} behind the best one"
        )
        if ours:
            error = torch.cat(ours).square().mean().sqrt()
            assert error <= self.FACTOR * own_error, f"{error:.4f}, the model's own {own_error:.4f}"
