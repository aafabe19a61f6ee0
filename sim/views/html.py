"""A run as one HTML page without scripts from elsewhere: what warps did, who waited for whom, memory, findings."""

from __future__ import annotations

import html
import linecache
from collections.abc import Iterable, Sequence
from pathlib import Path

from warpspec.sim.errors import SimError
from warpspec.sim.order.findings import Finding, OrderError, grouped
from warpspec.sim.report import LaunchReport, SimReport, Span

WIDTH, ROW = 1100, 16  # pixels of a timeline and of a warp's row
LABEL = 130  # pixels left of a timeline
MOST_SPANS = 6000  # drawn for a CTA: longest first
UNNAMED = "padding"
TMEM_COLUMNS = 512
COLOURS = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#997700", "#555555")
STYLE = """
body{font:14px system-ui,sans-serif;margin:24px;max-width:1280px;color:#222}
table{border-collapse:collapse;margin:8px 0}td,th{border:1px solid #ccc;padding:2px 8px;text-align:left}
pre{background:#f6f6f6;padding:8px;overflow-x:auto}h2{border-top:2px solid #888;padding-top:12px}
.worst{border-left:4px solid #c00;padding-left:8px}.text{border-left:4px solid #bbb;padding-left:8px}
.scroll{overflow-x:auto;border:1px solid #ddd}svg text{font:11px system-ui,sans-serif}
"""
ZOOM = """
document.querySelectorAll('input.zoom').forEach(function(z){z.addEventListener('input',function(){
var s=z.parentNode.querySelector('svg');s.setAttribute('width',s.dataset.width*z.value)})})
"""


def page(
    report: SimReport,
    findings: Sequence[Finding] = (),
    error: SimError | None = None,
    title: str = "warpspec.sim",
) -> str:
    """The page. findings: of the order checker. error: what stopped the run."""
    parts = [f"<h1>{_text(title)}</h1>", _overview(report)]
    if error is not None and not (findings and isinstance(error, OrderError)):
        parts.append(
            f'<h2 id="error">{_text(type(error).__name__)}</h2><pre class="worst">{_text(error)}</pre>'
        )
    if findings:
        parts.append(_findings(findings))
    for number, launch in enumerate(report.launches):
        parts.append(_launch(number, launch, report.roles))
    body = "\n".join(parts)
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{_text(title)}</title>'
        f"<style>{STYLE}</style></head><body>{body}<script>{ZOOM}</script></body></html>"
    )


def write(
    path: Path, report: SimReport, findings: Sequence[Finding] = (), error: SimError | None = None
) -> None:
    """Write the page to a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page(report, findings, error, path.stem))


def _text(value: object) -> str:
    return html.escape(str(value))


def _table(heads: Iterable[str], rows: Iterable[Iterable[object]], name: str) -> str:
    head = "".join(f"<th>{_text(cell)}</th>" for cell in heads)
    body = "".join("<tr>" + "".join(f"<td>{_text(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<table class="{name}"><tr>{head}</tr>{body}</table>'


def _overview(report: SimReport) -> str:
    rows = [
        (n, launch.function or launch.kernel, launch.grid, launch.cluster, launch.block, launch.warp_instructions,
         f"{launch.tma_bytes_loaded:,} / {launch.tma_bytes_stored:,}", f"{launch.mma_flops:,}", len(launch.warnings))
        for n, launch in enumerate(report.launches)
    ]  # fmt: skip
    heads = ("launch", "kernel", "grid", "cluster", "block", "warp instructions", "TMA bytes in / out", "MMA FLOP",
             "warnings")  # fmt: skip
    return _table(heads, rows, "launches")


def _findings(findings: Sequence[Finding]) -> str:
    parts = [f'<h2 id="findings">Memory order: {len(findings)} findings</h2>']
    for group in grouped(list(findings)):
        kind = "text" if group.textual else "worst"
        parts.append(f'<div class="finding {kind}"><h3>{_text(group.kind)}</h3><pre>{_text(group)}</pre>')
        lines = "\n".join(line for place in dict.fromkeys(group.where) if (line := _source(place)))
        parts.append(f"<pre>{_text(lines)}</pre></div>" if lines else "</div>")
    return "".join(parts)


def _source(place: str) -> str:
    """A line of source with its place in front; "" where the file is not there."""
    path, _, line = place.rpartition(":")
    text = linecache.getline(path, int(line)).rstrip() if path and line.isdigit() else ""
    return f"{Path(path).name}:{line}  {text.strip()}" if text else ""


def _launch(number: int, launch: LaunchReport, roles: dict[int, str]) -> str:
    parts = [f'<h2 id="launch{number}">Launch {number}: {_text(launch.function or launch.kernel)}</h2>']
    parts += [f"<pre>{_text(text)}</pre>" for text in launch.warnings]
    ctas = sorted({span.cta for span in launch.events})
    names = _wait_names(launch.events)
    for cta in ctas:
        parts.append(_timeline(cta, [span for span in launch.events if span.cta == cta], roles, names))
    parts.append(_waits(launch.events, roles))
    parts.append(_memory(launch))
    return "".join(parts)


def _wait_names(spans: Sequence[Span]) -> dict[str, str]:
    """The colour of each thing that is waited for."""
    found = sorted({span.name for span in spans if span.name.startswith("wait ")})
    return {name: COLOURS[i % len(COLOURS)] for i, name in enumerate(found)}


def _warp(warp: int | None, roles: dict[int, str]) -> str:
    if warp is None:
        return "asynchronous"
    return f"warp {warp} {roles[warp]}" if warp in roles else f"warp {warp}"


def _timeline(cta: int, spans: Sequence[Span], roles: dict[int, str], colours: dict[str, str]) -> str:
    """Warps of a CTA as rows, the scheduler's steps from left to right."""
    end = max(span.end for span in spans) or 1
    warps = sorted({span.warp for span in spans if span.warp is not None})
    rows: list[int | None] = [*warps, None]
    at = {warp: i for i, warp in enumerate(rows)}
    drawn = sorted(spans, key=lambda span: span.start - span.end)[:MOST_SPANS]
    shapes = [
        f'<text x="2" y="{i * ROW + 12}">{_text(_warp(warp, roles))}</text>' for i, warp in enumerate(rows)
    ]
    scale = (WIDTH - LABEL) / end
    for span in sorted(drawn, key=lambda span: span.name != "run"):
        colour = "#dddddd" if span.name == "run" else colours.get(span.name, "#222222")
        by = f", ended by CTA {span.by[0]} {_warp(span.by[1], roles)} {span.by[2]}" if span.by else ""
        hint = _text(f"{span.name}, steps {span.start} to {span.end} {span.source}{by}")
        shapes.append(
            f'<rect x="{LABEL + span.start * scale:.2f}" y="{at[span.warp] * ROW + 2}" height="{ROW - 4}" '
            f'width="{max((span.end - span.start) * scale, 0.5):.2f}" fill="{colour}"><title>{hint}</title></rect>'
        )
    height = len(rows) * ROW
    legend = "".join(
        f'<span style="color:{colour}">&#9632;</span> {_text(name.removeprefix("wait "))} '
        for name, colour in colours.items()
        if any(span.name == name for span in spans)
    )
    return (
        f'<h3>CTA {cta}</h3><div>zoom <input class="zoom" type="range" min="1" max="20" value="1">'
        f'<div class="scroll"><svg class="timeline" data-width="{WIDTH}" width="{WIDTH}" height="{height}" '
        f'viewBox="0 0 {WIDTH} {height}" preserveAspectRatio="none">{"".join(shapes)}</svg></div>'
        f"<div>waits for: {legend or 'nothing'}; grey: alive</div></div>"
    )


def _waits(spans: Sequence[Span], roles: dict[int, str]) -> str:
    """Who waited for what, how long, and who ended the wait."""
    sums: dict[tuple, list[int]] = {}
    for span in spans:
        if span.name.startswith("wait "):
            by = _warp(span.by[1], roles) if span.by else ""
            key = (
                span.name.removeprefix("wait "),
                _warp(span.warp, roles),
                span.source,
                by,
                span.by[2] if span.by else "",
            )
            total = sums.setdefault(key, [0, 0])
            total[0] += 1
            total[1] += span.end - span.start
    rows = [(*key[:3], *total, *key[3:]) for key, total in sorted(sums.items(), key=lambda pair: -pair[1][1])]
    heads = ("waited for", "by", "at", "times", "steps", "ended by", "at")
    return "<h3>Who waited for whom</h3>" + _table(heads, rows, "waits") if rows else ""


def _memory(launch: LaunchReport) -> str:
    """Shared memory by field and tensor memory by columns."""
    parts = [f"<h3>Memory of a CTA</h3><p>shared: {launch.static_smem} bytes static, {launch.dynamic_smem} dynamic; "
             f"tensor memory: {launch.tmem_columns} of {TMEM_COLUMNS} columns</p>"]  # fmt: skip
    total = max([launch.dynamic_smem, *(offset + size for _, size, offset in launch.storage)], default=0)
    if launch.storage and total:
        shapes = []
        for i, (name, size, offset) in enumerate(sorted(launch.storage, key=lambda field: field[2])):
            hint = _text(f"{name or UNNAMED}: {size} bytes at {offset:#x}")
            shapes.append(
                f'<rect x="{offset / total * WIDTH:.1f}" y="0" height="24" width="{max(size / total * WIDTH, 1):.1f}" '
                f'fill="{COLOURS[i % len(COLOURS)]}"><title>{hint}</title></rect>'
            )
        parts.append(f'<svg class="shared" width="{WIDTH}" height="24">{"".join(shapes)}</svg>')
        rows = [
            (name or UNNAMED, f"{offset:#x}", size)
            for name, size, offset in sorted(launch.storage, key=lambda f: f[2])
        ]
        parts.append(_table(("field", "offset", "bytes"), rows, "fields"))
    if launch.tmem_columns:
        used = launch.tmem_columns / TMEM_COLUMNS * WIDTH
        parts.append(
            f'<svg class="tensor" width="{WIDTH}" height="24"><rect width="{WIDTH}" height="24" fill="#eeeeee"/>'
            f'<rect width="{used:.1f}" height="24" fill="{COLOURS[0]}"/></svg>'
        )
    return "".join(parts)
