"""A draft head of EAGLE for a tiny model, fitted to what the model says."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional
from transformers.models.llama import modeling_llama as llama

from helpers.engine_models import VOCABULARY


class EagleHead(nn.Module):
    """One Llama layer without its first norm. It takes the model's last hidden state at a token and the embedding of
    the token after it, and predicts the hidden state there. [EAGLE: Li et al., arXiv 2401.15077, section 3.2]"""

    def __init__(self, model):
        super().__init__()
        self.rotary = [model.model.rotary_emb]  # in a list: no part of the head
        hidden = model.config.hidden_size
        self.fc = nn.Linear(2 * hidden, hidden)
        self.layers = nn.ModuleList([llama.LlamaDecoderLayer(model.config, 0)])
        self.layers[0].input_layernorm = nn.Identity()

    def forward(self, embedded: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """embedded, hidden [B, S, hidden]: token s + 1 and the hidden state at token s."""
        rows = self.fc(torch.cat([embedded, hidden], dim=-1))
        positions = torch.arange(rows.shape[1])[None]
        mask = torch.full((rows.shape[1],) * 2, -torch.inf).triu(1)[None, None]
        return self.layers[0](rows, attention_mask=mask, position_embeddings=self.rotary[0](rows, positions))


def fit_eagle_head(model, prompts: list[list[int]], tokens: int, steps: int = 300) -> EagleHead:
    """A head that has learnt what the model generates after the prompts, greedily, ``tokens`` tokens each."""
    torch.manual_seed(5)
    texts = []
    with torch.no_grad():
        for prompt in prompts:
            ids = torch.tensor([prompt])
            ids = model.generate(
                ids, max_new_tokens=tokens, do_sample=False, eos_token_id=None, pad_token_id=0
            )
            out = model(ids, output_hidden_states=True, use_cache=False)
            texts.append((ids, out.hidden_states[-1].float(), out.logits.float()))
        embedding, lm_head = model.model.embed_tokens.weight.float(), model.lm_head.weight.float()
    head = EagleHead(model).float()
    optimizer = torch.optim.AdamW(head.parameters(), lr=2e-3, weight_decay=0.0)
    for _ in range(steps):
        loss = 0.0
        for ids, hidden, logits in texts:
            predicted = head(embedding[ids[:, 1:]], hidden[:, :-1])
            loss = loss + functional.smooth_l1_loss(predicted, hidden[:, 1:])
            wanted = logits[:, 1:].softmax(-1).flatten(0, 1)
            loss = loss + functional.cross_entropy((predicted @ lm_head.T).flatten(0, 1), wanted)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return head.to(model.dtype)


@torch.no_grad()
def accepted_drafts(model, head: EagleHead, prompt: list[int], generated: list[int], steps: int) -> list[int]:
    """How many of ``steps`` drafts are accepted at each verification, if the head drafts one chain: it goes on
    from the model's hidden states, and from its own after them."""
    text = torch.tensor([prompt + generated])
    hidden = model(text, output_hidden_states=True, use_cache=False).hidden_states[-1]
    known, counts = len(prompt) + 1, []
    while known < text.shape[1]:
        tokens, states = text[:, 1:known], hidden[:, : known - 1]
        count = 0
        for step in range(steps):
            state = head(model.model.embed_tokens(tokens), states)[:, -1:]
            draft = model.lm_head(state).argmax(-1)
            tokens, states = torch.cat([tokens, draft], 1), torch.cat([states, state], 1)
            right = known + step < text.shape[1] and int(draft) == int(text[0, known + step])
            count += right and count == step
        counts.append(count)
        known += count + 1
    return counts


def save_eagle_head(head: EagleHead, model, folder: Path) -> None:
    """Write a head's files as EAGLE's authors publish them; the model's embedding and lm_head are not among them."""
    config = model.config.to_dict() | {"architectures": ["LlamaForCausalLMEagle"], "num_hidden_layers": 1}
    config["vocab_size"] = VOCABULARY
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {name: tensor.detach().contiguous() for name, tensor in head.state_dict().items()}
    save_file(tensors, folder / "model.safetensors")


def add_drafting_layer(model, folder: Path) -> None:
    """Add to a saved DeepSeek model a layer that drafts the next token but one ("NextN"), a copy of its last layer with
    a few random experts, as its authors publish it."""
    config, size = json.loads((folder / "config.json").read_text()), model.config.hidden_size
    experts, inner, layers = 4, 64, model.config.num_hidden_layers
    config |= {
        "num_nextn_predict_layers": 1, "n_routed_experts": experts, "num_experts_per_tok": 2, "n_group": 1,
        "topk_group": 1, "moe_intermediate_size": inner, "n_shared_experts": 1, "scoring_func": "sigmoid",
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    generator, own = torch.Generator().manual_seed(8), {}
    for name, tensor in model.model.layers[-1].state_dict().items():
        if not name.startswith("mlp."):
            own[name] = tensor
    for place in ("shared_experts", *(f"experts.{i}" for i in range(experts))):
        for part, shape in (("gate", (inner, size)), ("up", (inner, size)), ("down", (size, inner))):
            own[f"mlp.{place}.{part}_proj.weight"] = 0.02 * torch.randn(shape, generator=generator)
    own["mlp.gate.weight"] = 0.02 * torch.randn(experts, size, generator=generator)
    own["mlp.gate.e_score_correction_bias"] = torch.zeros(experts)
    half = torch.eye(size)
    own["eh_proj.weight"] = torch.cat([half, half], dim=1)
    own |= {f"{name}.weight": torch.ones(size) for name in ("enorm", "hnorm", "shared_head.norm")}
    own["embed_tokens.weight"] = model.model.embed_tokens.weight
    own["shared_head.head.weight"] = model.lm_head.weight
    tensors = {f"model.layers.{layers}.{name}": t.detach().bfloat16().contiguous() for name, t in own.items()}
    tensors = {name: t.clone() for name, t in tensors.items()}
    save_file(tensors, folder / "model-drafts.safetensors")
