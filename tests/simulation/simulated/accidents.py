"""Accidents: the root is lost, and made anew while all others go on as if nothing were."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import zarr_manifests as zm
from simulated.process import Process
from zarr_manifests.errors import (
    ConflictError,
    CorruptObjectError,
    InvalidArgumentError,
    ManifestsError,
)
from zarr_manifests.format.root import ROOT_KEY
from zarr_manifests.ids import snapshot_key

_LOOKS: Final = 20
_BEGUN: Final = 4
"""From this version on there is an archive of what the world began with."""


@dataclass(frozen=True, slots=True)
class Recoverer:
    """Loses the root, now and then with the newest snapshot, and makes it anew.

    Best of all while a deletion is on its way.
    """

    name: str

    def act(self, process: Process) -> None:
        judge, rng = process.judge, process.rng
        if not judge.shelf.lost:
            for _ in range(_LOOKS):
                process.wait(0.03)
                if judge.shelf.deleting:
                    break
            root = judge.root
            if root is None or not process.world.open or rng.random() < 0.1:
                return
            if root.version < _BEGUN:
                return
            keys = [ROOT_KEY]
            if rng.random() < 0.6:
                # All but what the world began with: whoever takes part counts on its arrays.
                history = [*judge.history(root.branches["main"])]
                newest = [k for k in history if k.parent and judge.known[k.parent].state.nodes]
                keys += [snapshot_key(k.snapshot_id) for k in newest[: rng.randrange(1, 3)]]
            judge.shelf.lose(keys)
            process.world.note(f"lost {keys}")
            judge.count("accidents")
        recover(process)


def recover(process: Process) -> None:
    """Make the root anew, or have everything put back where that is refused."""
    judge = process.judge
    while judge.shelf.lost:
        try:
            report = zm.recover(process.wire, runtime=process.runtime)
            judge.recovery_done(report.version)
        except InvalidArgumentError:
            return  # an earlier try has taken effect
        except (ConflictError, CorruptObjectError) as error:
            if not judge.shelf.lost:
                return
            process.world.note(f"put back: {type(error).__name__}")
            judge.count(f"recoveries refused: {type(error).__name__}")
            judge.shelf.put_back()
        except ManifestsError:
            process.world.sleep(0.05)  # the storage fails
            process.wire.check_alive()
