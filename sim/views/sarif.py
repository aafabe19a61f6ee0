"""Findings and errors as SARIF 2.1.0, which code hosts show at the lines of a pull request."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from warpspec.sim.errors import SimError
from warpspec.sim.order.findings import Finding, OrderError

SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"
ANY_SOURCE = re.compile(r"(\S+?\.\w+):(\d+)\b")  # "file:line" in a message


@dataclass(frozen=True)
class Result:
    """One line of a SARIF file. rule: the kind of defect. places: "file:line", the first one is where it is shown."""

    rule: str
    text: str
    places: tuple[str, ...]

    @property
    def fingerprint(self) -> str:
        """A text that the same defect also has in another run: its kind and its lines, without folders."""
        return " ".join([slug(self.rule), *sorted(Path(place).name for place in self.places)])


def slug(kind: str) -> str:
    """A rule's identifier: "no proxy fence ..." -> "no-proxy-fence-..."."""
    return re.sub(r"[^a-z0-9]+", "-", kind.lower()).strip("-")


def of_finding(finding: Finding) -> Result:
    """A finding of the order checker, shown where the second access is."""
    places = tuple(dict.fromkeys(s for s in reversed(finding.sources) if not s.startswith("PTX line")))
    return Result(finding.kind, str(finding), places)


def of_error(error: SimError) -> list[Result]:
    """An error of the simulator: a result for each finding of an OrderError, one for any other."""
    if isinstance(error, OrderError):
        return [of_finding(finding) for finding in error.findings]
    source = error.where.source if error.where is not None else None
    places = [source] if source else [":".join(m) for m in ANY_SOURCE.findall(str(error))]
    return [Result(type(error).__name__, str(error), tuple(dict.fromkeys(places)))]


def document(results: Iterable[Result], root: Path | None = None) -> dict:
    """A SARIF log of results, each once. root: folder to which paths are relative, as code hosts want them."""
    unique = {result.fingerprint: result for result in results}
    rules = sorted({result.rule for result in unique.values()})
    return {
        "$schema": SCHEMA,
        "version": "2.1.0",
        "runs": [
            {
                "tool": {
                    "driver": {
                        "name": "warpspec.sim",
                        "rules": [{"id": slug(rule), "shortDescription": {"text": rule}} for rule in rules],
                    }
                },
                "results": [_result(result, root) for result in unique.values()],
            }
        ],
    }


def _result(result: Result, root: Path | None) -> dict:
    locations = [_location(place, root) for place in result.places]
    found = {
        "ruleId": slug(result.rule),
        "level": "error",
        "message": {"text": result.text},
        "locations": locations[:1],
        "partialFingerprints": {"warpspec/v1": result.fingerprint},
    }
    if len(locations) > 1:
        found["relatedLocations"] = locations[1:]
    return found


def _location(place: str, root: Path | None) -> dict:
    path, _, line = place.rpartition(":")
    if root is not None and Path(path).is_absolute() and Path(path).is_relative_to(root):
        path = str(Path(path).relative_to(root))
    artifact = {"uri": Path(path).as_uri() if Path(path).is_absolute() else path}
    return {"physicalLocation": {"artifactLocation": artifact, "region": {"startLine": int(line)}}}


def write(path: Path, results: Iterable[Result], root: Path | None = None) -> None:
    """Write a SARIF file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document(results, root), indent=1))


def fingerprints(path: Path) -> set[str]:
    """The fingerprints in a SARIF file: a baseline of findings that are accepted."""
    log = json.loads(path.read_text())
    return {r["partialFingerprints"]["warpspec/v1"] for run in log["runs"] for r in run["results"]}
