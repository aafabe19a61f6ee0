"""What SGLang hands to an attention backend, for tests without its engine: a runner, its pools, batches of drafts.

Where SGLang is not installed (on machines with a GPU), ``stand_in`` provides what the backend imports of it.
"""

import sys
from collections import Counter
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from types import ModuleType, SimpleNamespace

import torch

# A plug-in of SGLang that has its Triton kernels interpreted.
STUBS = Path(__file__).parents[1] / "engines" / "stubs"
# A plug-in that writes down which attention computes each layer.
OBSERVERS = STUBS.parent / "observers"
ROWS, WIDTH, PAGES = 8, 512, 96  # requests and tokens of the table of slots; pages of the pool


def interpret_triton(monkeypatch) -> None:
    """Let engines that are started from now on interpret SGLang's Triton kernels: it has no others on a CPU."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.syspath_prepend(str(STUBS))  # new processes get the path


def note_calls(monkeypatch, file: Path) -> Path:
    """Let the engine that is started next write the calls of its attention to a file, which is returned."""
    monkeypatch.syspath_prepend(str(OBSERVERS))
    from sglang_calls import FILE

    monkeypatch.setenv(FILE, str(file))
    return file


def calls_of(file: Path) -> Counter:
    """How often each class of attention was called in an engine's processes: its full name -> calls."""
    return Counter(file.read_text().split()) if file.exists() else Counter()


def stand_in(monkeypatch) -> None:
    """Modules named like SGLang's with the few names that the backend imports: base classes without methods, records,
    enumerations."""

    class Kinds(Enum):
        DECODER = "decoder"

    class Modes(Enum):
        QLEN_ONLY = 1

    @dataclass
    class Place:
        loc: torch.Tensor
        swa_loc: torch.Tensor | None = None

    @dataclass
    class Mask:
        buffer: torch.Tensor
        mode: Modes
        max_bs: int

    base = type("AttentionBackend", (), {"__init__": lambda self: None})
    names = {
        "layers.attention.base_attn_backend": {"AttentionBackend": base},
        "layers.attention.verify_mask": {"VerifyMask": Mask},
        "layers.radix_attention": {"AttentionType": Kinds},
        "mem_cache.memory_pool": {"KVWriteLoc": Place},
        "mem_cache.swa_memory_pool": {"SWAKVPool": type("SWAKVPool", (), {})},
        "model_executor.forward_context": {"get_attn_backend": None},
        "model_executor.runner_backend_utils.breakable_cuda_graph": {"is_in_breakable_cuda_graph": bool},
        "model_executor.runner_backend_utils.tc_piecewise_cuda_graph": {
            "is_in_tc_piecewise_cuda_graph": bool
        },
        "models.deepseek_common.attention_forward_methods.forward_methods": {"AttnForwardMethod": Kinds},
        "runtime_context": {"get_spec": None},
        "speculative.eagle_utils": {"TreeMaskMode": Modes},
    }
    for name, members in names.items():
        path = f"sglang.srt.{name}"
        for parent in [path.rsplit(".", n)[0] for n in range(path.count("."), 0, -1)]:
            if parent not in sys.modules:
                package = ModuleType(parent)
                package.__path__ = []
                monkeypatch.setitem(sys.modules, parent, package)
        module = ModuleType(path)
        vars(module).update(members)
        monkeypatch.setitem(sys.modules, path, module)


class Mode:
    """A batch's mode, as SGLang's ``ForwardMode`` says it."""

    def __init__(self, verify: bool = False, decode: bool = False):
        self.is_target_verify = lambda: verify
        self.is_decode_or_idle = lambda: decode


class Pool:
    """Keys and values of one layer, [slots, Hkv, D] and [slots, Hkv, Dv]."""

    def __init__(self, page: int, heads: int, sizes: tuple[int, int], device):
        shapes = [(PAGES * page, heads, size) for size in sizes]
        self.k, self.v = (torch.randn(shape, device=device).bfloat16() for shape in shapes)

    def get_key_buffer(self, layer: int) -> torch.Tensor:
        return self.k

    def get_value_buffer(self, layer: int) -> torch.Tensor:
        return self.v

    def set_kv_buffer(self, layer, place, k, v) -> None:
        for stored, new in ((self.k, k), (self.v, v)):
            stored[place.loc] = new.view(-1, *stored.shape[1:])


class Setting:
    """A runner with a pool whose requests have random pages, and what tests make of it."""

    def __init__(self, monkeypatch, page=16, heads=4, kv_heads=2, dim=64, v_dim=64, drafts=8, device="cpu"):
        self.page, self.heads, self.kv_heads, self.dim, self.v_dim = page, heads, kv_heads, dim, v_dim
        self.device, self.drafts = device, drafts
        torch.manual_seed(3)
        pages = torch.randperm(PAGES, device=device)[: ROWS * (PAGES // ROWS)].view(ROWS, -1)
        table = torch.zeros(ROWS, WIDTH, dtype=torch.int32, device=device)
        slots = (pages[:, :, None] * page + torch.arange(page, device=device)).flatten(1)
        table[:, : slots.shape[1]] = slots[:, :WIDTH]
        self.table = table
        self.pool = Pool(page, kv_heads, (dim, v_dim), device)
        self.runner = SimpleNamespace(
            server_args=SimpleNamespace(page_size=page),
            kv_cache_dtype=torch.bfloat16,
            kv_cache_dtype_str=None,
            model_config=SimpleNamespace(head_dim=dim, context_len=160),
            req_to_token_pool=SimpleNamespace(req_to_token=table, size=ROWS),
            token_to_kv_pool=self.pool,
            is_draft_worker=False,
            device=device,
        )
        from warpspec.engines.sglang import speculative

        monkeypatch.setattr(
            speculative, "get_spec", lambda: SimpleNamespace(speculative_num_draft_tokens=drafts)
        )

    def layer(self, window: int = -1) -> SimpleNamespace:
        """A layer; window: keys before the own one."""
        from warpspec.engines.sglang.attention import AttentionType

        return SimpleNamespace(
            is_cross_attention=False, attn_type=AttentionType.DECODER, logit_cap=0.0, qk_head_dim=self.dim,
            v_head_dim=self.v_dim, tp_q_head_num=self.heads, tp_k_head_num=self.kv_heads, layer_id=0,
            sliding_window_size=window, scaling=0.125, k_scale=None, v_scale=None,
        )  # fmt: skip

    def step(self, requests, lengths, mode, **others) -> SimpleNamespace:
        """A batch of requests, by number, with lengths as SGLang gives them in that mode."""
        values = dict(
            forward_mode=mode, batch_size=len(requests), seq_lens_cpu=None, extend_seq_lens_cpu=None,
            req_pool_indices=torch.tensor(requests, device=self.device),
            seq_lens=torch.tensor(lengths, device=self.device), out_cache_loc=None,
        )  # fmt: skip
        return SimpleNamespace(**values | others)

    def slots(self, request: int, positions: torch.Tensor) -> torch.Tensor:
        """The slots of a request's tokens, by their places in the table."""
        return self.table[request, positions].long()

    def rows(self, tokens: int) -> list[torch.Tensor]:
        """New q, k, v of this many tokens."""
        sizes = (self.heads * self.dim, self.kv_heads * self.dim, self.kv_heads * self.v_dim)
        return [torch.randn(tokens, size, device=self.device).bfloat16() for size in sizes]

    def attend(self, q: torch.Tensor, slots: torch.Tensor, seen: torch.Tensor | None = None) -> torch.Tensor:
        """In fp32: attention of one query [Hq D] to the keys at slots, in order; seen: bool, of each key."""
        if seen is not None:
            slots = slots[seen]
        group = self.heads // self.kv_heads
        k, v = (t[slots].float().repeat_interleave(group, dim=1) for t in (self.pool.k, self.pool.v))
        scores = torch.einsum("hd,khd->hk", q.view(self.heads, self.dim).float(), k) * 0.125
        return torch.einsum("hk,khd->hd", scores.softmax(-1), v).flatten()


def random_tree(drafts: int, requests: int) -> torch.Tensor:
    """bool [requests, drafts, drafts]: who sees whom in random trees; parents come before their children."""
    seen = torch.eye(drafts, dtype=torch.bool).repeat(requests, 1, 1)
    for tree in seen:
        for draft in range(1, drafts):
            tree[draft] |= tree[int(torch.randint(0, draft, ()))]
    return seen


def check_verification(setting, backend, seen, requests, lengths, window, run) -> None:
    """Verify trees of drafts: run(q, k, v, layer, step) computes them after the batch was described."""
    drafts = setting.drafts
    places = [torch.arange(n, n + drafts, device=setting.device) for n in lengths]
    slots = torch.cat([setting.slots(r, p) for r, p in zip(requests, places, strict=True)])
    step = setting.step(
        requests, lengths, Mode(verify=True), out_cache_loc=slots,
        spec_info=SimpleNamespace(draft_token_num=drafts, topk=4, custom_mask=backend.verify_mask.buffer),
    )  # fmt: skip
    backend.verify_mask.buffer[: seen.numel()] = seen.flatten().to(setting.device)
    q, k, v = setting.rows(len(slots))
    got = run(q, k, v, setting.layer(-1 if window is None else window), step)
    for b, (request, length) in enumerate(zip(requests, lengths, strict=True)):
        keys = setting.slots(request, torch.arange(length + drafts, device=setting.device))
        for draft in range(drafts):
            path = seen[b, draft].to(setting.device)
            visible = torch.cat([torch.ones(length, dtype=torch.bool, device=setting.device), path])
            if window is not None:  # the path's drafts stand one after another after the prefix
                position = visible.cumsum(0) - 1
                visible &= position >= position[length + draft] - window
            row = b * drafts + draft
            wanted = setting.attend(q[row], keys, visible)
            assert (got[row].float() - wanted).norm() <= 4e-3 * wanted.norm()


def check_drafting(setting, drafting, topk, steps, requests, lengths, window, describe) -> None:
    """Draft steps - 1 times on every branch. describe(step): as SGLang does it once before the first forward."""
    device, page = setting.device, setting.page
    starts = []  # places in the table of a branch's first draft, [B, topk]
    for request, length in zip(requests, lengths, strict=True):
        tail = length % page
        own = -(-(tail + steps) // page) * page  # room of a branch
        starts.append([length + branch * own for branch in range(topk)])
        for branch in range(1, topk):  # SGLang repeats the prefix's last page
            into = torch.arange(length - tail + branch * own, length + branch * own, device=device)
            source = torch.arange(length - tail, length, device=device)
            for stored in (setting.pool.k, setting.pool.v):
                stored[setting.slots(request, into)] = stored[setting.slots(request, source)]
    step = setting.step(requests, lengths, Mode(decode=True), spec_info=SimpleNamespace(topk=topk))
    describe(step)
    for number, backend in enumerate(drafting.attn_backends):
        slots = torch.stack(
            [
                setting.slots(request, torch.tensor([start + number], device=device))[0]
                for request, of_request in zip(requests, starts, strict=True)
                for start in of_request
            ]
        )
        step.out_cache_loc = slots
        q, k, v = setting.rows(len(slots))
        layer = setting.layer(-1 if window is None else window)
        got = backend.forward_decode(q, k, v, layer, step)
        row = 0
        for request, length, of_request in zip(requests, lengths, starts, strict=True):
            for start in of_request:
                own = torch.arange(start, start + number + 1, device=device)
                keys = torch.cat([torch.arange(length, device=device), own])
                keys = setting.slots(request, keys[None if window is None else -(window + 1) :])
                wanted = setting.attend(q[row], keys.flatten())
                assert (got[row].float() - wanted).norm() <= 4e-3 * wanted.norm()
                row += 1
