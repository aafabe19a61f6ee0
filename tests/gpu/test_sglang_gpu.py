"""SGLang's backend on a GPU, in CUDA graphs: trees of drafts and branches, with lengths that change between replays.

SGLang itself is not needed: stand-ins take the place of what the backend imports of it.
"""

import importlib.util

import pytest
import torch
from helpers import sglang_batches as batches

pytestmark = pytest.mark.gpu


@pytest.fixture
def setting(monkeypatch):
    if importlib.util.find_spec("sglang") is None:
        batches.stand_in(monkeypatch)
    return batches.Setting(monkeypatch, device="cuda")


@pytest.mark.parametrize("window", [None, 20])
def test_verification_in_a_graph(setting, window):
    from warpspec.engines.sglang.attention import WarpspecBackend

    backend = WarpspecBackend(setting.runner)
    backend.init_cuda_graph_state(2, 16)
    static, graph = {}, torch.cuda.CUDAGraph()

    def run(q, k, v, layer, step):
        new = {
            "q": q,
            "k": k,
            "v": v,
            "slots": step.out_cache_loc,
            "lengths": step.seq_lens,
            "pool": step.req_pool_indices,
        }
        if not static:
            static.update({name: tensor.clone() for name, tensor in new.items()})
            step.out_cache_loc, step.seq_lens, step.req_pool_indices = (
                static[name] for name in ("slots", "lengths", "pool")
            )

            def forward():
                backend.init_forward_metadata_in_graph(step)
                return backend.forward_extend(static["q"], static["k"], static["v"], layer, step)

            backend.init_forward_metadata_out_graph(step, in_capture=True)
            forward()
            with torch.cuda.graph(graph):
                static["o"] = forward()
        for name, tensor in new.items():
            static[name].copy_(tensor)
        backend.init_forward_metadata_out_graph(step)
        graph.replay()
        return static["o"]

    for lengths in ([30, 7], [90, 17], [1, 64]):
        seen = batches.random_tree(setting.drafts, 2)
        batches.check_verification(setting, backend, seen, [1, 3], lengths, window, run)


@pytest.mark.parametrize("topk", [1, 3])
@pytest.mark.parametrize("window", [None, 20])
def test_drafting(setting, topk, window):
    from warpspec.engines.sglang.attention import WarpspecBackend
    from warpspec.engines.sglang.speculative import Drafting

    drafting = Drafting(setting.runner, topk, 4, WarpspecBackend)
    describe = drafting.init_forward_metadata_in_graph
    batches.check_drafting(setting, drafting, topk, 4, [4, 1, 6], [37, 64, 2], window, describe)
