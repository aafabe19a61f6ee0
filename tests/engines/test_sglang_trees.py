"""Speculative decoding in SGLang with our attention, trees of drafts: `make test-engines`."""

from types import SimpleNamespace

import pytest
import torch

sglang = pytest.importorskip("sglang", reason="needs SGLang: make test-engines")

from helpers.eagle_head import accepted_drafts, fit_eagle_head, save_eagle_head  # noqa: E402
from helpers.engine_models import Judge, prompts  # noqa: E402
from helpers.sglang_batches import (  # noqa: E402
    Mode,
    Setting,
    check_drafting,
    check_verification,
    interpret_triton,
    random_tree,
)
from helpers.sglang_engine import generate  # noqa: E402

from warpspec.common.errors import UnsupportedProblem  # noqa: E402
from warpspec.engines.sglang import speculative  # noqa: E402
from warpspec.engines.sglang.attention import WarpspecBackend  # noqa: E402


@pytest.fixture(autouse=True)
def _reference(monkeypatch):
    monkeypatch.setenv("WARPSPEC_BACKEND", "reference")


@pytest.mark.parametrize("kind", ["llama", "gpt_oss"])
@pytest.mark.parametrize("topk", [1, 4])
def test_engine(kind, topk, checkpoints, start_sglang, monkeypatch):
    """A stand-alone draft model, the model itself, drafts trees or chains; gpt-oss: sinks, and layers with windows in a
    pool of their own. Were a draft's ancestors not those of its path, what is said after it would be wrong.

    (SGLang gives a draft model all tokens but the first, so that even this one is not always right.)
    """
    interpret_triton(monkeypatch)
    model, folder = checkpoints(kind)
    drafting = dict(
        speculative_algorithm="STANDALONE", speculative_draft_model_path=str(folder), speculative_num_steps=3,
        speculative_eagle_topk=topk, speculative_num_draft_tokens=8, max_total_tokens=8192,
    )  # fmt: skip
    inputs = prompts((70, 5, 40))
    results, outputs = generate(start_sglang(folder, **drafting), inputs, tokens=16, drafts=True)
    Judge(model).check(results)
    longest = [len(out["meta_info"]["spec_correct_drafts_histogram"]) - 1 for out in outputs]
    assert max(longest) >= 2  # a path of two drafts was accepted at once


@pytest.mark.parametrize("topk", [1, 4])
def test_eagle_head(topk, checkpoints, start_sglang, monkeypatch, tmp_path):
    """A head that has learnt what the model says drafts chains or trees. A chain's drafts are accepted as often as
    calculated (a token more or less where two are as likely); a tree's, among which the chain's are, more often."""
    interpret_triton(monkeypatch)
    model, folder = checkpoints("llama")
    inputs, steps = prompts((70, 5, 40)), 3
    head = fit_eagle_head(model, inputs, tokens=20)
    save_eagle_head(head, model, tmp_path)
    drafting = dict(
        speculative_algorithm="EAGLE", speculative_draft_model_path=str(tmp_path), speculative_num_steps=steps,
        speculative_eagle_topk=topk, speculative_num_draft_tokens=steps + 1 if topk == 1 else 16,
        max_total_tokens=8192,
    )  # fmt: skip
    results, outputs = generate(start_sglang(folder, **drafting), inputs, tokens=16, drafts=True)
    Judge(model).check(results)
    accepted = sum(out["meta_info"]["spec_num_correct_drafts"] for out in outputs)
    calculated = sum(
        sum(accepted_drafts(model, head, ids, out["output_ids"], steps))
        for ids, out in zip(inputs, outputs, strict=True)
    )
    assert calculated >= 12
    assert accepted >= calculated - 2 and (topk > 1 or accepted <= calculated + 2), (accepted, calculated)


@pytest.mark.parametrize("window", [None, 20, 3])
@pytest.mark.parametrize("sizes", [(64, 64), (192, 128)])
def test_verification(window, sizes, monkeypatch):
    """Random trees after prefixes of any length, in one launch. SGLang writes who sees whom into our memory. Values
    have the head size of keys or another one (MiMo-V2-Flash)."""
    setting = Setting(monkeypatch, dim=sizes[0], v_dim=sizes[1])
    backend = WarpspecBackend(setting.runner)

    def run(q, k, v, layer, step):
        backend.init_forward_metadata(step)
        return backend.forward_extend(q, k, v, layer, step)

    check_verification(setting, backend, random_tree(8, 3), [5, 0, 2], [37, 64, 1], window, run)


def test_a_graph_of_verification(monkeypatch):
    """The hooks around a CUDA graph: what was described at its capture serves other trees and lengths. (No graph here:
    the hook that is part of it is called again.)"""
    setting = Setting(monkeypatch)
    backend = WarpspecBackend(setting.runner)
    backend.init_cuda_graph_state(4, 32)

    def run(q, k, v, layer, step):
        backend.init_forward_metadata_out_graph(step, in_capture=True)
        backend.init_forward_metadata_out_graph(step)
        backend.init_forward_metadata_in_graph(step)
        return backend.forward_extend(q, k, v, layer, step)

    for lengths in ([1, 1], [90, 17]):
        check_verification(setting, backend, random_tree(8, 2), [1, 3], lengths, None, run)


@pytest.mark.parametrize("topk", [1, 3])
@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("captured", [False, True])
def test_drafting(topk, window, captured, monkeypatch):
    """Each branch sees the prefix and its own drafts; prefixes end within pages, at their ends, and are short."""
    setting = Setting(monkeypatch)
    drafting = speculative.Drafting(setting.runner, topk, 4, WarpspecBackend)
    assert len(drafting.attn_backends) == 3
    describe = drafting.init_forward_metadata
    if captured:
        drafting.init_cuda_graph_state(4, 32)
        describe = drafting.init_forward_metadata_in_graph
    check_drafting(setting, drafting, topk, 4, [4, 1, 6], [37, 64, 2], window, describe)


def test_a_mask_that_includes_prefixes(monkeypatch):
    """SGLang's drafts from n-grams come with a mask over the prefix, too."""
    setting = Setting(monkeypatch)
    memory = speculative.new_mask(setting.runner)
    seen, lengths = random_tree(8, 3), torch.tensor([5, 0, 12])
    rows = [
        torch.cat([torch.ones(8, n, dtype=torch.bool), tree], dim=1).flatten()
        for n, tree in zip(lengths.tolist(), seen, strict=True)
    ]
    spec = SimpleNamespace(custom_mask=torch.cat([*rows, torch.ones(9, dtype=torch.bool)]), draft_token_num=8)
    speculative.take_mask(spec, lengths, memory)
    bits = speculative.tree_of(memory, 3, 8).view(3, 8)
    assert torch.equal(bits, (seen.long() << torch.arange(8)).sum(-1))


def test_chains_are_causal(monkeypatch):
    setting = Setting(monkeypatch)
    backend = WarpspecBackend(setting.runner)
    spec = SimpleNamespace(draft_token_num=8, topk=1, custom_mask=torch.ones(3))
    backend.init_forward_metadata(setting.step([2], [9], Mode(verify=True), spec_info=spec))
    batch = backend.forward_metadata
    assert batch.tree is None and batch.kv_lengths.tolist() == [17] and batch.cu_seqlens_q.tolist() == [0, 8]


def test_too_many_drafts_are_refused(monkeypatch):
    setting = Setting(monkeypatch, drafts=65)
    with pytest.raises(UnsupportedProblem, match=r"--speculative-num-draft-tokens.*64.*got 65"):
        WarpspecBackend(setting.runner)
