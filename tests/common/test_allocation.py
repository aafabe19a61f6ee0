"""``allocation.empty`` and ``allocate`` make what ``torch.empty`` makes."""

import torch

from warpspec.common.allocation import allocate, block, empty

CPU = torch.device("cpu")


def test_as_torch_empty():
    for shape in ((3, 5, 64), (2, 0, 4), (), (1,)):
        for dtype in (torch.bfloat16, torch.float32, torch.int32):
            found, expected = empty(shape, dtype, CPU), torch.empty(shape, dtype=dtype)
            assert found.shape == expected.shape and found.stride() == expected.stride()
            assert found.dtype == dtype and not found.requires_grad and found.is_contiguous()
            (same, none) = allocate((block(torch.Size(shape), dtype), None), CPU)
            assert none is None and same.shape == found.shape and same.stride() == found.stride()
            assert same.dtype == dtype
    assert empty((2,), torch.int32, torch.device("meta")).is_meta
    assert allocate([block((2,), torch.int32)], torch.device("meta"))[0].is_meta
    with torch.inference_mode():
        assert empty((2,), torch.int32, CPU).is_inference()


def test_deterministic_algorithms_fill_it():
    torch.use_deterministic_algorithms(True)
    try:
        assert empty((64,), torch.float32, CPU).isnan().all()
        assert allocate([block((64,), torch.float32)], CPU)[0].isnan().all()
    finally:
        torch.use_deterministic_algorithms(False)
