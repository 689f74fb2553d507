"""What real runs can afford: how many recordings an offline run gets, how long one may take, and with how many streams to go on.

    plan = OfflinePlan.fitting(spec.offline, {"default": 58.0, "best": 270.7}, rounds=2, budget_s=20.0)
    plan.count, plan.work()["long_tailed"]      # recordings of each set, the same for every configuration

Pure: no clock, no device.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from workbench.measure.offline_run import thinned
from workbench.tuning.run import work_lengths
from workbench.tuning.spec import OfflineWork, StudySpec

# Of its streams, what a configuration that broke a limit goes on with: by how far it missed, within these; and one whose load generator lagged, or
# for which the device had no memory.
STEP_DOWN_LEAST, STEP_DOWN_MOST, STEP_DOWN_LAGGED, STEP_DOWN_REFUSED = 0.9, 0.5, 0.7, 0.5
# Of the budget, what the recordings themselves may take by the twin: recognisers are built and warmed up in the rest.
RECORDINGS_SHARE = 0.8
# A run that takes longer than this many times what the twin says is given up; the least leaves time for a recogniser's first batches.
PATIENCE, PATIENCE_LEAST_S = 2.0, 5.0
_RATE_HZ = 16000
_FEWER = 4


@dataclass(frozen=True)
class OfflinePlan:
    """sets: lengths in samples of all recordings; rtfx: by label, as the twin says; count: recordings of each set that are recognised;
    most_s: by label, after which a run is given up."""

    sets: dict[str, list[int]]
    rtfx: dict[str, float]
    count: int
    most_s: dict[str, float]

    @classmethod
    def fitting(cls, offline: OfflineWork, rtfx: Mapping[str, float], rounds: int, budget_s: float) -> OfflinePlan:
        """As many recordings as let all `rounds` of all configurations fit. Where those do not fill two times what is in the works at once, fewer
        rounds; never less than a quarter of what is in the works at once."""
        full, sets = offline.recordings, work_lengths(offline)
        least = min(full, max(1, offline.concurrency // _FEWER))
        whole = cls(sets, dict(rtfx), full, {})
        round_s = sum(whole.seconds(label) for label in rtfx)
        count = 0
        for wanted in range(rounds, 0, -1):
            count = min(full, int(full * RECORDINGS_SHARE * budget_s / (wanted * round_s)))
            if count >= min(full, 2 * offline.concurrency):
                break
        plan = dataclasses.replace(whole, count=max(count, least))
        most_s = {label: max(PATIENCE_LEAST_S, PATIENCE * plan.seconds(label)) for label in rtfx}
        return dataclasses.replace(plan, most_s=most_s)

    def seconds(self, label: str) -> float:
        """How long a run of this configuration takes by the twin."""
        audio_s = sum(map(sum, self.work().values())) / _RATE_HZ
        return audio_s / self.rtfx[label]

    def work(self) -> dict[str, list[int]]:
        """The lengths that are recognised, by set; distributed as all of them are."""
        return {name: thinned(lengths, self.count) for name, lengths in self.sets.items()}

    def fewer(self) -> OfflinePlan:
        """The plan with a quarter of the recordings and no less patience, where the twin was far too fast."""
        return dataclasses.replace(self, count=max(1, self.count // _FEWER))


def step_down(spec: StudySpec, row: Mapping[str, Any]) -> float:
    """What share of its streams a configuration that broke a limit goes on with: what it missed its upper limits by, if that says anything."""
    shares = [c.limit / row[c.number] for c in spec.constraints if c.at_most and row.get(c.number, 0) > c.limit]
    return min(STEP_DOWN_LEAST, max(STEP_DOWN_MOST, min(shares, default=STEP_DOWN_LEAST)))
