"""The finding of a study (`results.json`) as a record, so that it can be shown like one.

record = outcome_record("studies/latency_80ms/results.json")      # None if the file is something else
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from workbench.results import Record

_WHERE = {"live": "real runs", "twin": "the twin"}


def outcome_record(path: str | Path) -> Record | None:
    """A row per configuration and way of judging it, with what was judged; the headline is the first note."""
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(data, dict) or not {"study", "headline", "default", "gain"} <= set(data):
        return None
    sections = {
        name: section
        for name, section in data.items()
        if isinstance(section, dict) and {"twin", "live"} <= set(section)
    }
    rows = [
        {"configuration": name.replace("_", " "), "judged by": told, **_numbers(section.get(where))}
        for name, section in sections.items()
        for where, told in _WHERE.items()
        if _numbers(section.get(where))
    ]
    notes = [str(data["headline"]), f"the report beside it has every trial: {Path(path).parent / 'report.html'}"]
    hosts = data.get("environment")
    found = [host for host in hosts.values() if isinstance(host, dict)] if isinstance(hosts, dict) else []
    return Record(
        kind=f"study {data['study']}",
        rows=rows,
        notes=notes,
        environment=found[-1] if found else {},
        command=str(data.get("command", "")),
    )


def _numbers(section: Any) -> dict[str, Any]:
    found = section if isinstance(section, dict) else {}
    return {
        name: value for name, value in found.items() if isinstance(value, int | float) and not isinstance(value, bool)
    }
