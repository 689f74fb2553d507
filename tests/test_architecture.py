"""The picture of the code holds: pure modules load no GPU library, and the one list of dependencies is the one that conda installs."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[1]
PURE = [
    "workbench",
    "workbench.config",
    "workbench.geometry",
    "workbench.clock",
    "workbench.results",
    "workbench.errors",
    "workbench.measure.trace",
    "workbench.measure.twin",
    "workbench.measure.loadgen",
    "workbench.tuning.space",
    "workbench.cli",
    *[
        f"workbench.batching.{p.stem}"
        for p in sorted((ROOT / "workbench" / "batching").glob("*.py"))
        if p.stem != "__init__"
    ],
]


@pytest.mark.parametrize("module", PURE)
def test_pure_modules_load_no_gpu_library(module):
    code = f"import sys, json, {module}; print(json.dumps([m for m in ('torch', 'nemo', 'lightning') if m in sys.modules]))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == []


def _names(requirements):
    return {
        re.split(r"[\s\[<>=;!~]", r, maxsplit=1)[0].lower().replace("_", "-"): r.split(";")[0].replace(" ", "")
        for r in requirements
    }


def test_conda_environment_installs_the_project_list():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = _names(project["dependencies"] + project["optional-dependencies"]["dev"])
    conda = yaml.safe_load((ROOT / "environment.yml").read_text())["dependencies"]
    pip = next(item["pip"] for item in conda if isinstance(item, dict))
    assert _names(pip) == wanted
    assert any(isinstance(item, str) and item.startswith("python>=3.10") for item in conda)


def test_pins_cover_every_dependency_and_satisfy_the_ranges():
    from packaging.requirements import Requirement

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = [
        line for line in (ROOT / "requirements.lock").read_text().splitlines() if line and not line.startswith("#")
    ]
    here = [pin for pin in map(Requirement, lines) if pin.marker is None or pin.marker.evaluate()]
    pins = {pin.name.lower().replace("_", "-"): str(pin.specifier).removeprefix("==") for pin in here}
    for text in project["dependencies"] + project["optional-dependencies"]["dev"]:
        requirement = Requirement(text)
        if requirement.marker is not None and not requirement.marker.evaluate():
            continue
        name = requirement.name.lower().replace("_", "-")
        assert name in pins, name
        assert requirement.specifier.contains(pins[name], prereleases=True), (text, pins[name])
