"""Engines with our attention and with their own, on this machine's GPU: tokens a second and time to first token.

    python scripts/bench_engine.py [transformers] [nano-vllm] [--model gpt-oss-20b] [--layers 24] [--requests 64]
        [--prompt 1024] [--new 128] [--attention warpspec sdpa flash-attn-4] [--tensor-parallel 2]
        [--profile] [--markdown]

Models have their published shapes and seeded random weights; --layers takes fewer layers. Prompts are random, of
lengths from half of --prompt to --prompt; all requests come at once, and each makes --new tokens. Medians of three
rounds after two that do not count (of attention that is too slow to wait for, the second of two), all in one process.
transformers: continuous batching of the installed version.
nano-vllm has one model class, Qwen3, whose shapes it is given; it samples at a temperature that is as good as greedy.
--tensor-parallel is its own: this many GPUs, a process each.

--profile prints the kernels of decode steps with their share of the GPU's time.
"""

from __future__ import annotations

import atexit
import importlib.util
import json
import os
import statistics
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from shared import driver

MODELS = {
    "llama-3-8b": dict(
        model_type="llama",
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        vocab_size=128256,
    ),
    "gpt-oss-20b": dict(
        model_type="gpt_oss",
        hidden_size=2880,
        intermediate_size=2880,
        num_hidden_layers=24,
        num_attention_heads=64,
        num_key_value_heads=8,
        head_dim=64,
        vocab_size=201088,
        num_local_experts=32,
        num_experts_per_tok=4,
        sliding_window=128,
    ),
}
COMMON = dict(max_position_embeddings=16384, eos_token_id=None, pad_token_id=0, tie_word_embeddings=False)
ATTENTION = {
    "transformers": ("warpspec", "flash-attn-4", "sdpa", "eager"),
    "nano-vllm": ("warpspec", "flash-attn-4"),
}
RANKS_ATTENTION = "BENCH_ENGINE_ATTENTION"  # environment: what nano-vllm's other ranks are to register
NO_SDPA = ("gpt-oss-20b",)  # has sinks
SLOW = ("sdpa", "eager")  # rounds of seconds, without CUDA graphs
ROUNDS, COUNTED = 5, 3  # the first ones capture CUDA graphs, of two sets of buffers that take turns
PROFILED_STEPS = 8
PORT = 23333  # of nano-vllm's ranks


@dataclass(frozen=True)
class Run:
    """What one round of all requests took."""

    seconds: float
    new_tokens: int
    first_token: float  # seconds, median over requests
    generated: list[list[int]]

    @property
    def rate(self) -> float:
        return self.new_tokens / self.seconds


def median_of(runs: list[Run]) -> Run:
    """The run of median rate, with the median time to first token."""
    middle = sorted(runs, key=lambda run: run.rate)[len(runs) // 2]
    return replace(middle, first_token=statistics.median(run.first_token for run in runs))


def main() -> None:
    parser = driver.parser(__doc__, markdown=True)
    parser.add_argument("engines", nargs="*", default=list(ATTENTION), metavar="engine")
    parser.add_argument("--model", choices=MODELS, default="llama-3-8b")
    parser.add_argument("--layers", type=int, help="of the model (default: all)")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--prompt", type=int, default=1024, help="tokens of the longest prompt")
    parser.add_argument("--new", type=int, default=128, help="tokens that each request makes")
    parser.add_argument("--attention", nargs="+", help="default: all that the engine has here")
    parser.add_argument("--tensor-parallel", type=int, default=1, help="GPUs of nano-vllm")
    parser.add_argument("--profile", action="store_true")
    arguments = parser.parse_args()
    driver.begin("transformers", "nano-vllm-fork")
    if not arguments.markdown:
        print(f"{'engine':14s} {'attention':14s} {'tokens/s':>9s} {'first token':>12s}  same tokens")
    else:
        print("| engine, model | attention | tokens/s | time to first token, ms |\n| --- | --- | --- | --- |")
    for engine in arguments.engines:
        serve = {"transformers": transformers_rounds, "nano-vllm": nano_vllm_rounds}[engine]
        reference = None
        for attention in arguments.attention or ATTENTION[engine]:
            if attention not in ATTENTION[engine] or attention == (
                "sdpa" if arguments.model in NO_SDPA else "eager"
            ):
                continue
            run = serve(attention, arguments)
            reference = reference or run.generated
            show(engine, attention, run, reference, arguments)


def show(engine, attention, run, reference, arguments) -> None:
    """One row. Same tokens: of the first attention's, up to where a request first differs."""
    same = sum(
        next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b), len(ours))
        for ours, theirs in zip(run.generated, reference, strict=True)
    )
    if arguments.markdown:
        print(
            f"| {engine}, {arguments.model} | {attention} | {run.rate:.0f} | {run.first_token * 1e3:.0f} |",
            flush=True,
        )
    else:
        share = same / run.new_tokens
        print(
            f"{engine:14s} {attention:14s} {run.rate:9.0f} {run.first_token * 1e3:9.0f} ms  {share:.0%}",
            flush=True,
        )


def prompts_of(arguments, vocabulary: int, turn: int) -> list[list[int]]:
    """The prompts of a round: each round's begin with another token, or they would be found in the cache."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(
        arguments.prompt // 2, arguments.prompt + 1, (arguments.requests,), generator=generator
    )
    return [torch.randint(10, vocabulary, (int(length),), generator=generator).tolist() for length in lengths]


def sizes_of(arguments) -> dict:
    sizes = MODELS[arguments.model] | COMMON
    return sizes | {"num_hidden_layers": arguments.layers or sizes["num_hidden_layers"]}


# transformers


def transformers_rounds(attention: str, arguments) -> Run:
    """ROUNDS rounds by continuous batching, of which the last ones count."""
    from transformers import ContinuousBatchingConfig, GenerationConfig

    model = transformers_model(arguments)
    choose_attention(model, attention)
    config = GenerationConfig(
        max_new_tokens=arguments.new, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    page = 256  # the engine's default
    blocks = arguments.requests * (-(-(arguments.prompt + arguments.new) // page) + 1)
    groups = 2 if "sliding_window" in MODELS[arguments.model] else 1
    batching = ContinuousBatchingConfig(
        num_blocks=blocks * groups,
        max_batch_tokens=4096,
        max_requests_per_batch=arguments.requests,
        max_blocks_per_request=-(-(arguments.prompt + arguments.new) // page) + 1,
    )
    options = dict(generation_config=config, continuous_batching_config=batching)
    runs = []
    with model.continuous_batching_context_manager(**options) as manager:
        for turn in range(2 if attention in SLOW else ROUNDS):
            prompts = prompts_of(arguments, model.config.vocab_size, turn)
            torch.cuda.synchronize()
            start = time.perf_counter()
            manager.add_requests(prompts, max_new_tokens=arguments.new, record_timestamps=True)
            results = {}
            while len(results) < len(prompts):
                result = manager.get_result(timeout=120)
                if result is None or result.error:
                    raise RuntimeError(f"{attention}: {result and result.error}")
                if result.is_finished():
                    results[result.request_id] = result
            seconds = time.perf_counter() - start
            ordered = sorted(results.values(), key=lambda result: int(result.request_id.rsplit("_", 1)[-1]))
            first = statistics.median(result.timestamps[0] - start for result in ordered)
            generated = [list(result.generated_tokens) for result in ordered]
            runs.append(Run(seconds, sum(map(len, generated)), first, generated))
        if arguments.profile:
            with profile(attention):
                prompts = prompts_of(arguments, model.config.vocab_size, ROUNDS)
                manager.add_requests(prompts, max_new_tokens=PROFILED_STEPS)
                for _ in prompts:
                    manager.get_result(timeout=120)
    return median_of(runs[-1:] if attention in SLOW else runs[-COUNTED:])


_models: dict = {}


def transformers_model(arguments):
    """The model, made once a process."""
    from transformers import AutoConfig, AutoModelForCausalLM

    if not _models:
        sizes = sizes_of(arguments)
        config = AutoConfig.for_model(sizes.pop("model_type"), **sizes)
        torch.manual_seed(0)
        with torch.device("cuda"):
            _models[0] = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    return _models[0]


def choose_attention(model, attention: str) -> None:
    if attention == "warpspec":
        from warpspec.engines.transformers import prepare_continuous_batching

        prepare_continuous_batching(model)
    elif attention == "flash-attn-4":
        from shared import flash_attn4_names
        from transformers import modeling_flash_attention_utils

        def functions(implementation, *args, **kwargs):
            return (None, flash_attn4_names.flash_attn_varlen_func, None, None, None)

        before = modeling_flash_attention_utils._lazy_imports
        model._compatible_flash_implementations = ["flash_attention_4"]
        modeling_flash_attention_utils._lazy_imports = functions
        model.set_attn_implementation("flash_attention_4")
        modeling_flash_attention_utils.lazy_import_flash_attention("paged|flash_attention_4")
        modeling_flash_attention_utils._lazy_imports = before
    else:
        model.set_attn_implementation("paged|eager" if attention == "eager" else attention)


# nano-vllm


class NoTokenizer:
    """Prompts are numbers, and so is what comes back."""

    eos_token_id = -1

    def decode(self, tokens) -> str:
        return ""


def prepare_nano_vllm(attention: str) -> None:
    """What every rank's process needs before it makes its model."""
    if importlib.util.find_spec("flash_attn") is not None:
        # before torch.package, which nano-vllm imports: it could not be
        importlib.import_module("flash_attn.cute")
    import warpspec.engines.nano_vllm as engine

    if attention == "warpspec":
        engine.register()
    else:
        from shared import flash_attn4_names

        engine.register(flash_attn4_names)
    from nanovllm.engine import model_runner, sequence
    from nanovllm.layers.rotary_embedding import get_rope
    from nanovllm.models import qwen3

    model_runner.load_model = seeded_weights
    # Each rank looks for a free port by itself, and finds another one once rank 0 listens.
    model_runner.find_available_port = lambda: PORT
    # What rank 0 sends to the others lacks these fields, which all of them read.
    for name, value in (("cfg_scale", 1.0), ("paired_seq", None), ("logits_processor", None)):
        setattr(sequence.Sequence, name, value)
    # transformers 5 gives plain rotary embeddings a dictionary as well, which nano-vllm takes for scaled ones.
    qwen3.get_rope = lambda *sizes, rope_scaling, **named: get_rope(*sizes, **named)


def nano_vllm_rounds(attention: str, arguments) -> Run:
    """ROUNDS rounds, of which the last ones count."""
    os.environ[RANKS_ATTENTION] = attention
    prepare_nano_vllm(attention)
    from nanovllm import LLM, SamplingParams

    folder = Path(tempfile.mkdtemp())
    sizes = sizes_of(arguments) | dict(
        model_type="qwen3", attention_bias=False, dtype="bfloat16", architectures=["Qwen3ForCausalLM"]
    )
    (folder / "config.json").write_text(json.dumps(sizes))
    llm = LLM(
        str(folder),
        tokenizer=NoTokenizer(),
        max_num_seqs=arguments.requests,
        max_model_len=arguments.prompt + arguments.new,
        gpu_memory_utilization=0.6,
        tensor_parallel_size=arguments.tensor_parallel,
    )
    params = SamplingParams(temperature=1e-5, max_tokens=arguments.new, ignore_eos=True)
    rounds = [prompts_of(arguments, sizes["vocab_size"], turn) for turn in range(ROUNDS + 1)]
    runs = [nano_vllm_round(llm, prompts, params) for prompts in rounds[:-1]]
    if arguments.profile:
        for prompt in rounds[-1]:
            llm.add_request(prompt, params)
        while llm.scheduler.waiting:
            llm.step()
        with profile(attention):
            for _ in range(PROFILED_STEPS):
                llm.step()
        llm.reset()
    atexit.unregister(llm.exit)
    llm.exit()
    return median_of(runs[-COUNTED:])


def nano_vllm_round(llm, prompts, params) -> Run:
    torch.manual_seed(0)
    torch.cuda.synchronize()
    start = time.perf_counter()
    for prompt in prompts:
        llm.add_request(prompt, params)
    first, generated = {}, {}
    waiting = {sequence.seq_id: sequence for sequence in llm.scheduler.waiting}
    while not llm.is_finished():
        outputs, _ = llm.step()
        now = time.perf_counter() - start
        for name, sequence in waiting.items():
            if name not in first and sequence.num_completion_tokens:
                first[name] = now
        generated |= dict(outputs)
    seconds = time.perf_counter() - start
    tokens = [generated[name] for name in sorted(generated)]
    return Run(seconds, sum(map(len, tokens)), statistics.median(first.values()), tokens)


def seeded_weights(model, path) -> None:
    """Stand in for nano-vllm's reader of files."""
    rank = torch.distributed.get_rank()
    torch.manual_seed(rank)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" not in name:
                parameter.normal_(0.0, 0.02)


class profile:
    """Prints the kernels that run inside, most expensive first."""

    def __init__(self, title: str):
        self.title = title
        self.profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])

    def __enter__(self):
        torch.cuda.synchronize()
        self.profiler.__enter__()

    def __exit__(self, *error):
        torch.cuda.synchronize()
        self.profiler.__exit__(*error)
        rows = sorted(self.profiler.key_averages(), key=lambda row: -row.self_device_time_total)
        total = sum(row.self_device_time_total for row in rows)
        print(f"  {self.title}: {total / 1e3:.1f} ms of kernels")
        for row in rows[:12]:
            share = row.self_device_time_total / total
            mean = row.self_device_time_total / row.count
            print(f"    {share:6.1%} {row.count:6d} x {mean:8.1f} us  {row.key[:110]}", flush=True)


if __name__ == "__main__":
    main()
elif __name__ == "__mp_main__" and RANKS_ATTENTION in os.environ:
    prepare_nano_vllm(os.environ[RANKS_ATTENTION])
