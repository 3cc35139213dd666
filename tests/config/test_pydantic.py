"""Pydantic is imported to read options, and not before."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

PROGRAM = """
    import sys
    import zarr_manifests as zm
    from zarr_manifests.config import CacheOptions, ChunkManifests, Compaction, ManifestSet

    place, config = sys.argv[1], zm.Config(compaction=Compaction("manual"))
    zm.create(place)
    created = zm.open(place)
    created.save_config(config)
    created.save_config(zm.Config(chunk_manifests=ChunkManifests((ManifestSet("a"),))))
    opened = zm.open(place, cache=CacheOptions(chunk_bytes=5))
    assert opened.config.chunk_manifests.sets[0].name == "a"
    print("pydantic" in sys.modules)
    opened.config.overlaid({})
    print("pydantic" in sys.modules)
"""


def test_a_saved_configuration_is_read_without_pydantic(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(PROGRAM), tmp_path / "repository"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.stdout, done.stderr, done.returncode) == ("False\nTrue\n", "", 0)
