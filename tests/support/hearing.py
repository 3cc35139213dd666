"""A `progress` callable that notes what it is told."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Hearing:
    """What long work has told: in order, and by stage the last count and the last total."""

    told: list[tuple[str, int]] = field(default_factory=list)
    done: dict[str, int] = field(default_factory=dict)
    totals: dict[str, int] = field(default_factory=dict)
    runs: dict[str, list[int]] = field(default_factory=dict)
    """By stage, the last count of each run: a stage runs again where its count falls."""

    def __call__(self, stage: str, done: int) -> None:
        self.told.append((stage, done))
        runs = self.runs.setdefault(stage, [])
        if not runs or done < runs[-1]:
            runs.append(done)
        runs[-1] = self.done[stage] = done
        assert done <= self.totals.get(stage, done), f"{stage}: {done} of {self.totals[stage]}"

    def expect(self, stage: str, total: int) -> None:
        self.totals[stage] = total
