"""One result record for everything measured: what was run, where, and the numbers with units in their names.

    record = Record(kind="paced", config=to_dict(config), numbers={"latency_p95_ms": 31.2, "streams": 8})
    record.save("studies/run.json");  Record.load("studies/run.json").numbers["latency_p95_ms"]

Charts, reports and notebooks read records and nothing else, so that a figure can always be traced to its configuration,
environment and command. Percentiles are numpy's (linear interpolation); a mean is never reported alone.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

from workbench.errors import RecordError

SCHEMA = 1
PACKAGES = ("torch", "nemo_toolkit", "numpy", "optuna", "triton")


@dataclass(frozen=True)
class Record:
    """One measurement.

    kind: what it is (`profile`, `paced`, `bench`, `costs`, `study`, …); config: the resolved configuration as plain data; numbers: named
    scalars with units; rows: a table as a list of equal-keyed dicts; counters: integer counts by name; notes: sentences that must be
    read with the numbers (`untrained weights`).
    """

    kind: str
    config: dict[str, Any] = field(default_factory=dict)
    numbers: dict[str, Any] = field(default_factory=dict)
    rows: list[dict[str, Any]] = field(default_factory=list)
    counters: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    environment: dict[str, Any] = field(default_factory=lambda: environment())
    command: str = field(default_factory=lambda: command_line())
    created_utc: str = field(default_factory=lambda: datetime.now(timezone.utc).isoformat(timespec="seconds"))
    schema: int = SCHEMA

    def save(self, path: str | Path) -> Path:
        """Write as JSON, atomically, and return the path. NaN and infinity are refused: they are not JSON."""
        target = Path(path)
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            text = json.dumps(dataclasses.asdict(self), indent=1, allow_nan=False, default=_plain_number)
        except ValueError as error:
            raise RecordError(f"{target}: a number is not finite ({error})") from None
        except OSError as error:
            raise RecordError(f"{target}: cannot be written ({error.strerror})") from None
        part = target.with_name(f".{target.name}.{os.getpid()}")
        try:
            part.write_text(text + "\n", encoding="utf-8")
            part.replace(target)
        except OSError as error:
            part.unlink(missing_ok=True)
            raise RecordError(f"{target}: cannot be written ({error.strerror})") from None
        return target

    @classmethod
    def load(cls, path: str | Path) -> Record:
        """Read a record. Raises RecordError naming the file if it is not one."""
        try:
            data = json.loads(Path(path).read_text(encoding="utf-8"))
        except OSError as error:
            raise RecordError(f"{path}: cannot be read ({error.strerror})") from None
        except (ValueError, RecursionError) as error:
            raise RecordError(f"{path}: not JSON ({str(error)[:200]})") from None
        names = {f.name for f in dataclasses.fields(cls)}
        if not isinstance(data, dict) or "kind" not in data or not set(data) <= names:
            raise RecordError(f"{path}: not a result record; a record has the keys {', '.join(sorted(names))}")
        if data.get("schema") != SCHEMA:
            raise RecordError(f"{path}: record schema {data.get('schema')}; this version reads {SCHEMA}")
        shapes = {
            "kind": str,
            "config": dict,
            "numbers": dict,
            "counters": dict,
            "environment": dict,
            "rows": list,
            "notes": list,
        }
        wrong = [name for name, kind in shapes.items() if not isinstance(data.get(name, kind()), kind)]
        if wrong or not all(isinstance(row, dict) for row in data.get("rows", [])):
            raise RecordError(
                f"{path}: damaged record; {', '.join(wrong or ['rows'])} is not of the kind that a record has"
            )
        return cls(**data)


def check_writable(path: str | Path) -> Path:
    """The path, if a file could be written there now; its folder is made. Raises RecordError: better before a measurement than after it."""
    target = Path(path)
    if target.is_dir():
        raise RecordError(f"{target}: cannot be written (it is a folder)")
    part = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        part.touch()
        part.unlink()
    except OSError as error:
        raise RecordError(f"{target}: cannot be written ({error.strerror})") from None
    return target


def percentiles_ms(seconds: Sequence[float], prefix: str, points: Sequence[float] = (50, 95, 99)) -> dict[str, float]:
    """`{prefix}_p50_ms` … and `{prefix}_n` of durations in seconds; raises RecordError for an empty or non-finite list."""
    values = np.asarray(seconds, dtype=np.float64) * 1e3
    if values.size == 0 or not np.isfinite(values).all():
        raise RecordError(
            f"{prefix}: percentiles of {values.size} values, of which {int(np.isfinite(values).sum())} finite"
        )
    out = {f"{prefix}_p{point:g}_ms": float(v) for point, v in zip(points, np.percentile(values, points), strict=True)}
    return {**out, f"{prefix}_n": int(values.size)}


def environment() -> dict[str, Any]:
    """Host, versions and, where torch is already loaded, the GPU. Never imports torch: a pure tool must stay light."""
    found: dict[str, Any] = {
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "cpu": _cpu_name(),
        "cpu_cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "packages": {name: version for name in PACKAGES if (version := _version(name))},
        "commit": _commit(),
    }
    torch: Any = sys.modules.get("torch")
    if torch is None or not hasattr(torch, "cuda"):
        return found
    found["torch_threads"] = torch.get_num_threads()
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        found["gpu"] = {
            "name": properties.name,
            "uuid": str(getattr(properties, "uuid", "")),
            "memory_bytes": properties.total_memory,
            "compute_capability": f"{properties.major}.{properties.minor}",
            "cuda": torch.version.cuda,
            "matmul_tf32": torch.backends.cuda.matmul.allow_tf32,
            **_nvidia_smi(),
        }
    return found


def command_line() -> str:
    """The command that made a record, without the machine's paths."""
    program = Path(sys.argv[0]).name if sys.argv and sys.argv[0] else "python"
    program = "python -m workbench" if program == "__main__.py" else shlex.quote(program)
    return " ".join([program, *map(shlex.quote, sys.argv[1:])])


def _cpu_name() -> str:
    """The processor's name as Linux gives it, else what Python knows."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    named = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.processor())


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _commit() -> str | None:
    try:
        done = subprocess.run(
            ["git", "rev-parse", "--short=12", "HEAD"],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            timeout=5,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None


def _nvidia_smi() -> dict[str, str]:
    query = "driver_version,clocks.sm,clocks.mem,power.limit"
    try:
        done = subprocess.run(
            ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=10,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return {}
    line = done.stdout.strip().splitlines()[:1]
    values = [part.strip() for part in line[0].split(",")] if line else []
    return dict(zip(("driver", "clock_sm", "clock_memory", "power_limit"), values, strict=False))


def _plain_number(value: Any) -> Any:
    if isinstance(value, np.generic):
        number = value.item()
        if isinstance(number, float) and not math.isfinite(number):
            raise ValueError(f"got {number}")
        return number
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, Path):
        return value.name
    raise RecordError(f"a {type(value).__name__} does not belong in a record")
