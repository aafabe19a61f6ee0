"""The boxes that TMA asks for in the simulator."""

from collections import Counter

from warpspec.sim import tma


def count_boxes(monkeypatch) -> Counter:
    """Count the boxes that TMA asks for from now on, loads and prefetches, by (tensor map's address, coordinates)."""
    monkeypatch.setenv("WARPSPEC_SIM_PROCESSES", "1")  # the patch is not in other processes
    asked, load_box = Counter(), tma.load_box

    def load(tensor_map, coords, gmem):
        asked[tensor_map.address, coords] += 1
        return load_box(tensor_map, coords, gmem)

    monkeypatch.setattr(tma, "load_box", load)
    return asked
