"""Picture of a validation: error by head and position, and by head against the tolerance."""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

TOLERANCE_COLOUR = "tab:red"
DOTS_PER_INCH = 130


def draw(results, path: Path, title: str) -> None:
    """Writes one row of panels per layer in `results` (validate_layer.LayerResult) to `path`."""
    figure, rows = plt.subplots(
        len(results),
        2,
        figsize=(12, 3.6 * len(results)),
        width_ratios=(3, 2),
        squeeze=False,
        layout="constrained",
    )
    figure.suptitle(f"Attention against the FP32 reference: {title}")
    for (over_positions, over_heads), result in zip(rows, results, strict=True):
        heads, positions = result.position_errors.shape
        first = result.first_position
        _, _, tolerance = result.checks()[0]
        image = over_positions.imshow(
            1e3 * result.position_errors.numpy(),
            aspect="auto",
            origin="lower",
            interpolation="nearest",
            extent=(first - 0.5, first + positions - 0.5, -0.5, heads - 0.5),
            vmin=0.0,
        )
        figure.colorbar(image, ax=over_positions, label="relative error of the row, 1e-3")
        over_positions.set(title=result.kind, xlabel="query position", ylabel="query head")

        over_heads.bar(range(heads), [1e3 * error for error in result.kernel_heads], width=0.8)
        over_heads.axhline(1e3 * tolerance, color=TOLERANCE_COLOUR, label=f"tolerance {tolerance:g}")
        over_heads.axhline(
            1e3 * result.sdpa_worst, color="black", linestyle=":", label="torch SDPA bf16, worst head"
        )
        over_heads.set(
            title="over all positions",
            xlabel="query head",
            ylabel="relative error of the head, 1e-3",
            xlim=(-1, heads),
            ylim=(0, None),
        )
        over_heads.legend(loc="best")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=DOTS_PER_INCH)
    plt.close(figure)
