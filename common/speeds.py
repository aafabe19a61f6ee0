"""The speeds of a GPU that plans use: measured ones kept on disk, or its model's, or those of its data sheet.

``python -m warpspec tune`` measures the speeds and keeps them. A process reads them once for each device.
"""

from __future__ import annotations

import json

from warpspec.common.disk_cache import DiskCache
from warpspec.common.hardware import COPY_REACHED, Gpu, Speeds

MEASURED = DiskCache("gpus", limit=1 << 20)  # under file_name's names


def file_name(name: str, sm_count: int) -> str:
    """The file that has the speeds of a device, by the name that CUDA reports and its number of SMs."""
    words = "".join(letter if letter.isalnum() else "-" for letter in name)
    return f"{words}-{sm_count}.json"


def keep_speeds(name: str, sm_count: int, speeds: Speeds) -> None:
    """Keep measured speeds on disk; processes that start from now on plan with them."""
    MEASURED.write(file_name(name, sm_count), json.dumps(speeds._asdict()).encode())


def kept_speeds(name: str, sm_count: int) -> Speeds | None:
    """The speeds that were measured on such a device; None if nothing was measured, or by a version that measured other
    things."""
    content = MEASURED.read(file_name(name, sm_count))
    found = {} if content is None else json.loads(content)
    return Speeds(**found) if found.keys() == set(Speeds._fields) else None


def speeds_of(properties, model: Gpu | None, like: Gpu) -> Speeds:
    """The speeds of a device.

    properties: what torch reports of it. model: its model, None if that is not listed. like: a model of the same
    architecture, which stands for one that is not listed.
    """
    kept = kept_speeds(properties.name, properties.multi_processor_count)
    if kept is not None:
        return kept
    if model is not None:
        return model.speeds
    matmul = like.speeds.matmul * properties.multi_processor_count / like.sm_count
    return Speeds(data_sheet_copy(properties) or like.speeds.copy, matmul)


def data_sheet_copy(properties) -> float | None:
    """TB/s of a copy by the memory's clock and width; None where torch does not report them."""
    kilohertz, bits = (getattr(properties, name, 0) for name in ("memory_clock_rate", "memory_bus_width"))
    return 2 * kilohertz * 1e3 * bits / 8 * COPY_REACHED * 1e-12 or None
