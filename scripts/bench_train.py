"""Training steps of transformers' models with random weights: ours, flash-attn-4 and torch's SDPA, in one run.

    python scripts/bench_train.py [--models NAME ...] [--layers N] [--steps N] [--timed N] [--seconds S] [--json FILE]
    python scripts/bench_train.py --tiny          two layers on the CPU, without flash-attn-4: whether it runs

Shapes are Qwen3-0.6B's and Llama-3.2-1B's, with --layers of them. A step has one row of packed documents, forward,
backward and AdamW, all in bf16. Documents are of the same lengths in every step, so that torch.compile traces once.
SDPA takes one document after another, which is faster than a mask of all. Candidates take turns, a few steps each.

Printed: tokens a second by mode (eager and compiled, with activation checkpointing and without), and for --steps steps
from the same weights on the same tokens the loss curves' largest difference from SDPA's, beside that of SDPA from
itself: a backward pass that adds in any order differs from run to run. --timed 0 and --steps 0 leave one half out; no
mode and no curve begins after --seconds.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from shared import driver, gpu_bench
from shared.attention_peers import FLASH, SDPA, flash_attention, result_of
from shared.sweep_calls import OURS
from torch.nn.functional import scaled_dot_product_attention

from warpspec.fmha import attention_varlen

MODES = ("eager", "checkpointing", "compiled", "compiled, checkpointing")
AGAIN = f"{SDPA} again"
TURN_STEPS, WARM_STEPS = 4, 3  # of a candidate before the next one's turn; before it is timed
LEARNING_RATE = 3e-4
BRANCHES = 4  # tokens that may follow one: what a model can learn of the data


@dataclass(frozen=True)
class Size:
    """A model's shape. layers, hidden, intermediate, heads, KV heads, head size, vocabulary; tokens of a step."""

    kind: str
    layers: int
    hidden: int
    intermediate: int
    heads_q: int
    heads_kv: int
    head_dim: int
    vocabulary: int
    tokens: int = 8192

    def model(self, name: str, device: str) -> torch.nn.Module:
        """The model with random weights, the same each time, whose attention is registered under ``name``."""
        import transformers

        config = {
            "num_hidden_layers": self.layers,
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_attention_heads": self.heads_q,
            "num_key_value_heads": self.heads_kv,
            "head_dim": self.head_dim,
            "vocab_size": self.vocabulary,
            "max_position_embeddings": self.tokens,
            "tie_word_embeddings": True,
            "use_cache": False,
            "attn_implementation": name,
        }
        torch.manual_seed(0)
        config = getattr(transformers, f"{self.kind}Config")(**config)
        with torch.device(device):
            made = getattr(transformers, f"{self.kind}ForCausalLM")(config)
        return made.to(torch.bfloat16).train()


SIZES = {
    "qwen3-0.6b": Size("Qwen3", 28, 1024, 3072, 16, 8, 128, 151936),
    "llama-3.2-1b": Size("Llama", 16, 2048, 8192, 32, 8, 64, 128256),
}
TINY = Size("Qwen3", 2, 64, 128, 2, 1, 64, 97, tokens=48)


# Documents.


def document_lengths(tokens: int, seed: int = 0) -> list[int]:
    """Random lengths that sum to ``tokens``, most of them short, as in a corpus."""
    draw, found = random.Random(seed), []
    while sum(found) < tokens:
        found.append(min(round(tokens * 2 ** -draw.uniform(1, 7)) + 1, tokens - sum(found)))
    return found


def batches(size: Size, steps: int, device: str):
    """Tokens [1, T] of each step: every token is followed by one of BRANCHES."""
    generator = torch.Generator().manual_seed(1)
    follows = torch.randint(size.vocabulary, (size.vocabulary, BRANCHES), generator=generator)
    for _ in range(steps):
        choices = torch.randint(BRANCHES, (size.tokens,), generator=generator).tolist()
        token, tokens = int(torch.randint(size.vocabulary, (), generator=generator)), []
        for choice in choices:
            tokens.append(token)
            token = int(follows[token, choice])
        yield torch.tensor(tokens, device=device)[None]


# Candidates: transformers' attention functions.


def attention_functions(lengths: list[int], device: str) -> dict[str, Callable]:
    """Name -> function of q [T, Hq, D], k and v [T, Hkv, D] to their causal attention within documents."""
    starts = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=device)
    packed = {"cu_seqlens_q": starts, "cu_seqlens_k": starts, "causal": True}
    packed |= {"max_seqlen_q": max(lengths), "max_seqlen_k": max(lengths)}
    backend = "auto" if device == "cuda" else "reference"

    def by_documents(q, k, v):
        heads_first = [[t[None].transpose(1, 2) for t in tensor.split(lengths)] for tensor in (q, k, v)]
        grouped = {"is_causal": True, "enable_gqa": q.shape[1] != k.shape[1]}
        rows = [
            scaled_dot_product_attention(*document, **grouped) for document in zip(*heads_first, strict=True)
        ]
        return torch.cat([o[0].transpose(0, 1) for o in rows])

    found = {OURS: lambda q, k, v: attention_varlen(q, k, v, backend=backend, **packed), SDPA: by_documents}
    flash = flash_attention() if device == "cuda" else None
    if flash is not None:  # its Python is no operator that torch.compile could trace
        found[FLASH] = torch.compiler.disable(lambda q, k, v: result_of(flash.varlen(q, k, v, **packed)))
    return found


def register(name: str, function: Callable) -> str:
    """Name under which transformers finds a candidate, without a mask."""
    from transformers import AttentionInterface, AttentionMaskInterface

    def forward(module, query, key, value, attention_mask, **_):
        q, k, v = (t[0].transpose(0, 1) for t in (query, key, value))
        return function(q, k, v)[None], None

    name = f"bench-{name}".replace("flash", "fast")  # transformers looks up what is named flash in a hub
    AttentionInterface.register(name, forward)
    AttentionMaskInterface.register(name, lambda *_, **__: None)
    return name


# Steps.


class Trainer:
    """A model in training. mode: of MODES."""

    def __init__(self, size: Size, name: str, mode: str, lengths: list[int], device: str):
        self.model = size.model(name, device)
        if "checkpointing" in mode:
            self.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        self.call = torch.compile(self.model) if "compiled" in mode else self.model
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=LEARNING_RATE, fused=True, weight_decay=0.0
        )
        self.positions = torch.cat([torch.arange(n, device=device) for n in lengths])[None]

    def step(self, tokens: torch.Tensor) -> torch.Tensor:
        """The loss, on the device. A document's last token has the next one's first to learn, for all alike."""
        loss = self.call(input_ids=tokens, position_ids=self.positions, labels=tokens).loss
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def rates(trainers: dict[str, Trainer], size: Size, tokens: torch.Tensor, timed: int, device: str) -> dict:
    """Tokens a second of each candidate: medians of turns of TURN_STEPS steps.

    The first turn does not count: torch.compile may compile again in it, after the other candidates' first steps.
    """
    for trainer in trainers.values():
        for _ in range(WARM_STEPS):
            trainer.step(tokens)
    times = {name: [] for name in trainers}
    for _ in range(1 + -(-timed // TURN_STEPS)):
        for name, trainer in trainers.items():
            synchronize(device)
            start = time.perf_counter()
            for _ in range(TURN_STEPS):
                trainer.step(tokens)
            synchronize(device)
            times[name].append((time.perf_counter() - start) / TURN_STEPS)
    return {name: size.tokens / statistics.median(found[1:]) for name, found in times.items()}


def curve(
    size: Size, name: str, mode: str, lengths: list[int], steps: list[torch.Tensor], device: str
) -> torch.Tensor:
    """Losses of steps from the beginning. mode: of MODES."""
    trainer = Trainer(size, name, mode, lengths, device)
    return torch.stack([trainer.step(tokens) for tokens in steps]).float().cpu()


def late_after(seconds: float) -> Callable[[str], bool]:
    """A function of a part's name that says whether this many seconds are over, and then prints that it is left out."""
    end = time.monotonic() + seconds

    def late(name: str) -> bool:
        over = time.monotonic() > end
        if over:
            print(f"{name}: out of time", flush=True)
        return over

    return late


def measure(label: str, size: Size, options: argparse.Namespace, device: str) -> dict:
    """Rates and loss curves of one model; prints both."""
    lengths = document_lengths(size.tokens)
    names = {name: register(name, call) for name, call in attention_functions(lengths, device).items()}
    print(
        f"{label}: {len(lengths)} documents of {min(lengths)} to {max(lengths)} tokens, {size.layers} layers",
        flush=True,
    )
    steps, found = list(batches(size, max(options.steps, 1), device)), {}
    late = late_after(options.seconds)
    for mode in options.only if options.timed else ():
        if late(mode):
            continue
        try:
            trainers = {name: Trainer(size, own, mode, lengths, device) for name, own in names.items()}
            found[mode] = rates(trainers, size, steps[0], options.timed, device)
            print(mode, {name: round(rate) for name, rate in found[mode].items()}, flush=True)
        except Exception as error:  # the other modes still say something
            print(f"{mode}: {type(error).__name__}: {str(error).splitlines()[0][:200]}", flush=True)
        trainers = None
        torch._dynamo.reset()
        if device == "cuda":
            torch.cuda.empty_cache()
    curves = {}
    if options.steps:
        for name, own in ((SDPA, names[SDPA]), *names.items(), (AGAIN, names[SDPA])):
            if name in curves or late(f"loss of {name}"):
                continue
            curves[name] = curve(size, own, MODES[0], lengths, steps, device)
            print(f"loss of {name}: {curves[name][0]:.3f} to {curves[name][-1]:.3f}", flush=True)
    return {"rates": found, "curves": {name: each.tolist() for name, each in curves.items()}}


def curve_rows(label: str, curves: dict) -> list[list]:
    """Rows of a table, one a candidate: first and last loss, largest difference from SDPA's curve, and mean one."""
    exact = torch.tensor(curves[SDPA])
    rows = []
    for name, losses in curves.items():
        apart = (torch.tensor(losses) - exact).abs()
        last = statistics.fmean(losses[-10:])
        rows.append([label, name, losses[0], last, *(f"{float(x):.1e}" for x in (apart.max(), apart.mean()))])
    return rows


def parser() -> argparse.ArgumentParser:
    made = driver.parser(__doc__, only=MODES, markdown=True)
    made.add_argument("--models", nargs="+", choices=SIZES, default=list(SIZES))
    made.add_argument(
        "--steps", type=int, default=200, help="of the loss curves (default %(default)s; 0: none)"
    )
    made.add_argument("--layers", type=int, help="of a model (default: the model's, 28 and 16)")
    made.add_argument(
        "--seconds", type=float, default=math.inf, help="for one model: begin nothing afterwards"
    )
    made.add_argument("--tokens", type=int, help="of a step (default: the model's, 8192)")
    made.add_argument(
        "--timed", type=int, default=20, help="steps that are timed (default %(default)s; 0: none)"
    )
    made.add_argument("--tiny", action="store_true", help="on the CPU, two layers")
    made.add_argument("--json", type=Path, metavar="FILE")
    return made


def main() -> None:
    options = parser().parse_args()
    if options.tiny:
        sizes, device, header = {"tiny": TINY}, "cpu", ""
    else:
        driver.need_gpu("--tiny runs on a CPU")
        sizes, device = {name: SIZES[name] for name in options.models}, "cuda"
        if options.tokens:
            sizes = {name: replace(size, tokens=options.tokens) for name, size in sizes.items()}
        if options.layers:
            sizes = {name: replace(size, layers=options.layers) for name, size in sizes.items()}
        header = driver.begin("flash-attn-4", "transformers")
    results = {label: measure(label, size, options, device) for label, size in sizes.items()}
    rows = [
        [
            label,
            mode,
            *map(rates.get, (OURS, FLASH, SDPA)),
            rates[OURS] / max(v for n, v in rates.items() if n != OURS),
        ]
        for label, result in results.items()
        for mode, rates in result["rates"].items()
    ]
    columns = ["model", "mode", *(f"{name} tokens/s" for name in (OURS, FLASH, SDPA)), "ratio"]
    print(f"\n{gpu_bench.table(columns, rows, markdown=options.markdown)}", flush=True)
    if options.steps and all(SDPA in result["curves"] for result in results.values()):
        rows = [row for label, result in results.items() for row in curve_rows(label, result["curves"])]
        columns = ["model", "loss curve", "first", "last ten", f"most from {SDPA}'s", "mean"]
        print(f"\n{gpu_bench.table(columns, rows, markdown=options.markdown)}", flush=True)
    if options.json:
        options.json.write_text(json.dumps({"header": header, "results": results}, indent=1))


if __name__ == "__main__":
    main()
