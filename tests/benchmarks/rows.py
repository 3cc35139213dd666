"""The rows of the comparison, and what each should reach."""

from __future__ import annotations

from functools import partial

from buckets import beginning, committing, making, referring_far, sampling, sharing, storing, taking
from filling import filling
from forking import merging
from histories import aging, collecting, remembering
from ingests import ingesting
from reads import adding_days, following, reading_raw, reading_shards, reading_zstd, visiting
from runner import Growth, Row
from scans import (
    asking,
    scanning,
    scanning_one_of_four,
    scanning_source,
    scanning_tiny_chunks,
    scanning_where,
)
from starting import importing, starting
from summaries import extremes_far, taking_means, weighing
from wheres import choosing
from workloads import (
    appending,
    averaging,
    checking,
    contending,
    creating,
    creating_beside_zarr,
    measuring,
    opening,
    picking,
    reading,
    referring,
    sizing,
    writing,
    writing_durably,
)

_TWO = ("zarr_manifests", "icechunk")
_ALL = (*_TWO, "LocalStore", "MemoryStore", "ObjectStore", "FsspecStore")
_READERS = (*_TWO, "LocalStore", "MemoryStore")
_READERS_OF_ZSTD = (*_READERS, "decode")
_NO_FSYNC = "in memory, where an fsync costs nothing"
_TUNED = "bulk, one thread"
_ENGINE = "bulk, opened as by the engine, one thread"
_SMALL = {"chunks": (5000, 2000, 40), "chunk_bytes": (4096, 4096, 4096)}
_LARGE = {"chunks": (128, 48, 4), "chunk_bytes": (2**20, 2**20, 2**20)}
_FAR = {"delay_ms": (20, 20, 2)}
_FAR_CHUNKS = {"chunks": (1000, 500, 40), "chunk_bytes": (65_536, 65_536, 65_536), **_FAR}
_APPEND_TITLES = {
    "10k": (10_000, 10_000, 100),
    "100k": (100_000, 100_000, 200),
    "1m": (1_000_000, 300_000, 300),
}

ROWS = [
    *(
        Row(
            name,
            "4 KB chunks, write and commit",
            writing,
            _ALL,
            _SMALL,
            "s/chunk",
            pipeline,
            due={"icechunk": 4.0, "LocalStore": 3.0},
        )
        for name, pipeline in (
            ("small-write-fused", "fused"),
            ("small-write-fused-1", "fused, one thread"),
        )
    ),
    Row(
        "small-write-default",
        "4 KB chunks, write and commit",
        writing,
        _ALL,
        _SMALL,
        "s/chunk",
        "default",
    ),
    *(
        Row(
            name,
            "4 KB chunks, read",
            reading,
            _ALL,
            _SMALL,
            "s/chunk",
            pipeline,
            due={"icechunk": 3.5, "LocalStore": 1.0},
            durability="-",
        )
        for name, pipeline in (
            ("small-read-fused", "fused"),
            ("small-read-fused-1", "fused, one thread"),
        )
    ),
    *(
        Row(
            name,
            "4 KB chunks, read",
            reading_raw,
            (*_ALL, "memcpy"),
            _SMALL,
            "s/chunk",
            pipeline,
            due={"icechunk": 12.0, "MemoryStore": 1.8},
            durability="-",
        )
        for name, pipeline in (("small-read-bulk", _TUNED), ("small-read-engine", _ENGINE))
    ),
    Row(
        "small-read-default",
        "4 KB chunks, read",
        reading,
        _ALL,
        _SMALL,
        "s/chunk",
        "default",
        due={"icechunk": 1.8, "MemoryStore": 1 / 1.3},
        durability="-",
    ),
    *(
        Row(
            name,
            "4 KB chunks, write and commit",
            writing,
            _ALL,
            _SMALL,
            "s/chunk",
            pipeline,
            due={"icechunk": 12.0, "MemoryStore": 2.0},
        )
        for name, pipeline in (("small-write-bulk", _TUNED), ("small-write-engine", _ENGINE))
    ),
    Row(
        "large-write",
        "1 MB chunks, write and commit",
        writing,
        _ALL,
        _LARGE,
        "s/chunk",
        "fused",
    ),
    Row(
        "large-write-durable",
        "1 MB chunks, write, commit and have them on the disk",
        writing_durably,
        tuple(name for name in _ALL if name != "MemoryStore"),
        _LARGE,
        "s/chunk",
        "fused",
        durability="on the disk at the end, theirs by a sync of the filesystem",
        due={"icechunk": 1.0},
    ),
    Row(
        "large-read",
        "1 MB chunks, read",
        reading,
        _ALL,
        _LARGE,
        "s/chunk",
        "fused",
        due={"icechunk": 1.0},
        durability="-",
    ),
    Row(
        "large-read-bulk",
        "1 MB chunks, read",
        reading_raw,
        (*_ALL, "memcpy"),
        _LARGE,
        "s/chunk",
        "bulk",
        due={"icechunk": 1.0, "LocalStore": 1.0},
        durability="-",
    ),
    Row(
        "small-read-zstd",
        "4 KB chunks of zstd, read",
        reading_zstd,
        _READERS_OF_ZSTD,
        _SMALL,
        "s/chunk",
        _ENGINE,
        due={"LocalStore": 4.0},
        durability="-",
    ),
    Row(
        "large-read-zstd",
        "1 MB chunks of zstd, read",
        reading_zstd,
        _READERS_OF_ZSTD,
        _LARGE,
        "s/chunk",
        "bulk",
        due={"LocalStore": 0.95},
        durability="-",
    ),
    *(
        Row(
            f"shard-read-{codec}",
            f"4 KB chunks in shards of 1 MB, {codec}, read",
            partial(reading_shards, codec=codec),
            _READERS,
            {"chunks": (5120, 2048, 32), "a shard": (256, 256, 8)},
            "s/chunk",
            "bulk, one thread",
            due={"icechunk": due},
            durability="-",
        )
        for codec, due in (("raw", 10.0), ("zstd", 4.0))
    ),
    Row(
        "series-of-a-pixel",
        "one pixel at all times, a chunk of 16 KB each",
        following,
        _READERS,
        {"chunks": (10_000, 2000, 40)},
        "s/chunk",
        "bulk, one thread",
        due={"LocalStore": 1.4},
        durability="-",
    ),
    Row(
        "one-day",
        "one day, of four chunks of 100 KB",
        visiting,
        _READERS,
        {"days": (200, 100, 4)},
        "s",
        "bulk",
        due={"LocalStore": 1.0},
        durability="-",
    ),
    Row(
        "append-day",
        "xarray: append a day of three variables, commit and have it on the disk",
        adding_days,
        _TWO,
        {"days": (10, 5, 1)},
        "s",
        "bulk",
        durability="on the disk after each day, theirs by a sync of the filesystem",
        due={"icechunk": 1.5},
    ),
    Row(
        "mean-of-days",
        "xarray: open and mean over time, stored chunks of 100 KB",
        averaging,
        ("zarr_manifests", "icechunk", "LocalStore"),
        {"days": (5000, 200, 4)},
        "s/chunk",
        "fused",
        due={"LocalStore": 5.0},
        durability="-",
        most_rounds=3,
    ),
    Row(
        "random-read",
        "one 4 KB chunk anywhere",
        picking,
        _ALL,
        {**_SMALL, "reads": (1000, 500, 20)},
        "s/chunk",
        "fused",
        durability="-",
    ),
    *(
        Row(
            f"append-{name}",
            f"append 10 chunks to {name} refs, commit",
            appending,
            _TWO,
            {"refs": refs},
            "s",
            "fused",
            due={"icechunk": 50.0} if name == "1m" else {},
        )
        for name, refs in _APPEND_TITLES.items()
    ),
    Row(
        "append-10m",
        "append 10 chunks to 10m refs, commit",
        appending,
        ("zarr_manifests",),
        {"refs": (10_000_000, 1_000_000, 400)},
        "s",
        "fused",
    ),
    Row(
        "virtual-1m",
        "1 M virtual refs, set and commit",
        referring,
        _TWO,
        {"refs": (1_000_000, 100_000, 100)},
        "s",
        due={"icechunk": 10.0},
        peak_due_bytes=250_000_000,
        most_rounds=3,
    ),
    Row(
        "fork-merge",
        "merge forks of 1,000 chunks each with their statistics, and commit",
        merging,
        ("zarr_manifests",),
        {"chunks": (1_000_000, 100_000, 40), "a fork": (1000, 1000, 20)},
        "s",
        "fused",
        peak_due_bytes=300_000_000,
        limits={"value": 5.0},
        most_rounds=2,
        warmed=False,
    ),
    Row(
        "create-arrays",
        "make arrays in one session, and commit",
        creating,
        (*_TWO, "MemoryStore"),
        {"arrays": (8000, 2000, 5)},
        "s/array",
    ),
    Row(
        "create-arrays-50k",
        "make arrays in one session, and commit: processor time beside Zarr's own",
        creating_beside_zarr,
        _TWO[:1],
        {"arrays": (50_000, 5000, 5)},
        "s/array",
        most_rounds=1,
        warmed=False,
        limits={"value": 1e-4, "seconds, last tenth": 1e-4},
    ),
    Row(
        "size-native-ref",
        "bytes a native ref takes",
        sizing,
        _TWO,
        {"chunks": (20_000, 10_000, 50)},
        "B/ref",
        "fused",
        due={"icechunk": 2.5},
        most_rounds=1,
        warmed=False,
        durability="-",
    ),
    *(
        Row(
            f"open-{delay_ms}ms-{arrays}",
            f"cold open and coordinates, {arrays} arrays, {delay_ms} ms away",
            opening,
            _TWO,
            {"arrays": (arrays, arrays, 3), "delay_ms": (delay_ms, delay_ms, min(delay_ms, 1))},
            "s",
            durability="-",
            cache="nothing known",
            due={"icechunk": 2.0} if delay_ms else {},
        )
        for delay_ms in (0, 20)
        for arrays in (10, 200)
    ),
    Row(
        "history-20ms",
        "list 1,000 commits, 20 ms away",
        remembering,
        _TWO,
        {"commits": (1000, 300, 20), "delay_ms": (20, 20, 1)},
        "s",
        durability="-",
        cache="nothing known",
    ),
    *(
        Row(
            f"{row}-{kind}",
            f"{title}, compressed, written {what}: processor time as a part of that without",
            partial(workload, kind=kind),
            ("zarr_manifests",),
            {"side": (1000, 700, 20), "pairs": (11, 7, 1)},
            "x",
            durability="in memory",
            limits={"value": 1.05},
        )
        for row, what, workload in (
            ("statistics", "with statistics", measuring),
            ("check", "with a check of its values", checking),
        )
        for kind, title in (
            ("float32", "float32"),
            ("rounded", "float32 from float64"),
            ("int32", "int32"),
            ("packed", "packed int16"),
            ("dask", "float32 from float64 by dask's threads, constant and NaN"),
        )
    ),
    *(
        Row(
            name,
            f"a new process: {title}: processor time as a part of Zarr's",
            workload,
            ("zarr_manifests",),
            {"pairs": (11, 7, 1)},
            "x",
            durability="-",
            limits={"value": most},
        )
        for name, title, workload, most in (
            ("import", "import", importing, 1.15),
            ("import-open-read", "import, open and read a chunk of a local array", starting, 1.35),
        )
    ),
    Row(
        "zone-map-plan",
        "choose half of the chunks by their zone map, read from files",
        choosing,
        ("zarr_manifests",),
        {"chunks": (1_000_000, 100_000, 1000)},
        "s",
        durability="-",
        cache="nothing known",
        limits={
            "value": 0.3,
            "seconds, few match": 0.3,
            "seconds, leaves are cut": 0.3,
            "bytes of the zone map": 9e6,
        },
    ),
    Row(
        "summary-weighted",
        "global mean of each day, weighted by area, of 20 years from statistics",
        weighing,
        ("zarr_manifests",),
        {"days": (7305, 7305, 40), "rows": (721, 181, 10)},
        "s",
        durability="-",
        limits={"value": 0.3},
    ),
    Row(
        "summary-days",
        "global mean of each of 60 days, weighted by area, against xarray and dask",
        partial(taking_means, weights={"lat": "cos"}),
        ("zarr_manifests", "icechunk", "LocalStore"),
        {"days": (60, 20, 2), "side": (721, 181, 10), "chunk": (1, 1, 1)},
        "s",
        durability="-",
        due={"icechunk": 100.0, "LocalStore": 100.0},
    ),
    Row(
        "summary-box",
        "mean of a box whose edges cut chunks",
        partial(taking_means, cut=True),
        ("zarr_manifests", "icechunk", "LocalStore"),
        {"days": (420, 224, 8), "side": (840, 448, 16), "chunk": (14, 14, 2)},
        "s",
        durability="-",
        due={"icechunk": 5.0, "LocalStore": 5.0},
    ),
    Row(
        "summary-far",
        "least and greatest value of an array of a million chunks, 20 ms away",
        extremes_far,
        ("zarr_manifests",),
        {"chunks": (1_000_000, 100_000, 1000), **_FAR},
        "s",
        durability="-",
        cache="nothing known",
        limits={"requests": 4, "bytes read": 100e3},
    ),
    Row(
        "spark-scan",
        "Spark reads a row for each cell",
        scanning,
        ("zarr_manifests", "generated"),
        {"times": (200, 50, 2)},
        "s/row",
        durability="-",
        due={"generated": 0.75},
    ),
    Row(
        "spark-one-of-four",
        "Spark reads one of four variables, against a repository that has only it",
        scanning_one_of_four,
        ("zarr_manifests", "alone"),
        {"times": (200, 50, 2)},
        "s",
        durability="-",
        due={"alone": 0.91},
    ),
    Row(
        "spark-where",
        "Spark reads where statistics leave out 90 % of the chunks, against a full scan",
        scanning_where,
        ("zarr_manifests", "everything"),
        {"times": (800, 100, 10)},
        "s",
        durability="-",
        due={"everything": 4.0},
    ),
    Row(
        "spark-source",
        "Spark reads a row for each cell through the data source",
        scanning_source,
        ("zarr_manifests", "generated", "read"),
        {"times": (200, 50, 2)},
        "s/row",
        durability="-",
        due={"generated": 0.85},
    ),
    *(
        Row(
            f"spark-parquet-{of}",
            f"Spark reads a row for each cell, against Parquet: {asked}",
            partial(asking, of=of),
            ("zarr_manifests", "parquet"),
            {"times": (200, 50, 2)},
            "s/row",
            durability="-",
        )
        for of, asked in (
            ("rows", "all rows"),
            ("mean", "the mean at each time"),
            ("column", "one column"),
        )
    ),
    Row(
        "spark-aggregate",
        "Spark aggregates chunks to the mean at each time, against rows and Parquet",
        partial(asking, of="aggregate"),
        ("zarr_manifests", "rows", "parquet"),
        {"times": (200, 50, 2)},
        "s/cell",
        durability="-",
        due={"rows": 5.0, "parquet": 2.0},
    ),
    Row(
        "spark-fill",
        "Spark writes shuffled rows to chunks, those of a task at once",
        filling,
        ("zarr_manifests", "noop", "parquet"),
        {"times": (200, 50, 2)},
        "s/row",
        durability="-",
        due={"noop": 0.4, "parquet": 0.5},
    ),
    Row(
        "spark-fill-sorted",
        "Spark writes shuffled rows to chunks, one after the other",
        partial(filling, one_chunk=True),
        ("zarr_manifests", "noop"),
        {"times": (200, 50, 2)},
        "s/row",
        durability="-",
        due={"noop": 0.33},
    ),
    Row(
        "spark-tiny-chunks",
        "rows of chunks of 16 bytes, processor time",
        scanning_tiny_chunks,
        ("zarr_manifests", "Zarr"),
        {"chunks": (1_000_000, 100_000, 500), "chunks by Zarr": (20_000, 10_000, 100)},
        "s/chunk",
        durability="-",
        due={"Zarr": 10.0},
        peak_due_bytes=400_000_000,
        most_rounds=5,
    ),
    Row(
        "spark-ingest",
        "a year of netCDF-3 files copied in one commit, against dask's threads",
        ingesting,
        ("zarr_manifests", "dask"),
        {"files": (365, 100, 4), "side": (512, 512, 8)},
        "s/file",
        due={"dask": 1.0},
        most_rounds=5,
    ),
    *(
        Row(
            f"contending-{total}",
            f"eight processes commit disjoint chunks, {int(total):,} commits in all",
            contending,
            _TWO,
            {"processes": (8, 8, 2), "commits": (int(total) // 8, int(total) // 16, 2)},
            "s/commit",
            "fused",
            durability=_NO_FSYNC,
            due={"icechunk": due},
            in_memory=True,
            most_rounds=rounds,
        )
        for total, rounds, due in (("200", 5, 2.0), ("2000", 3, 5.0))
    ),
    Row(
        "commits-10k",
        "the last tenth of 10,000 commits of 10 chunks",
        aging,
        _TWO,
        {"commits": (10_000, 1000, 20), "icechunk_commits": (3000, 1000, 20)},
        "s/commit",
        "fused",
        durability=_NO_FSYNC,
        in_memory=True,
        most_rounds=1,
        warmed=False,
    ),
    Row(
        "collect-1000",
        "expire and collect after 1,000 commits of 10 chunks",
        collecting,
        _TWO,
        {"commits": (1000, 200, 5), "chunks": (1000, 1000, 20)},
        "s",
        "fused",
        durability=_NO_FSYNC,
        in_memory=True,
        most_rounds=3,
    ),
    *(
        Row(
            f"bucket-{name}",
            f"in a bucket 20 ms away: {title}",
            workload,
            _TWO,
            sizes,
            unit,
            "bulk" if name.endswith("bulk") else "default",
            durability="as the server promises",
            cache="nothing known",
            due={"icechunk": due},
            limits=limits,
            most_rounds=3,
        )
        for name, title, workload, sizes, unit, due, limits in (
            ("create", "create", making, _FAR, "s", 1.0, {"requests": 10}),
            (
                "open",
                "cold open and coordinates",
                beginning,
                {"arrays": (20, 20, 2), **_FAR},
                "s",
                1 / 0.6,
                {},
            ),
            ("commit", "commit of 10 chunks", committing, _FAR_CHUNKS, "s", 1 / 0.55, {}),
            ("write", "64 KB chunks, write", storing, _FAR_CHUNKS, "s/chunk", 1 / 0.45, {}),
            ("read", "64 KB chunks, read", taking, _FAR_CHUNKS, "s/chunk", 1 / 0.45, {}),
            (
                "random",
                "a tenth of the chunks, at random",
                sampling,
                _FAR_CHUNKS,
                "s/chunk",
                1 / 0.8,
                {"times the bytes": 1.15},
            ),
            (
                "random-bulk",
                "a tenth of the chunks, at random",
                sampling,
                _FAR_CHUNKS,
                "s/chunk",
                1 / 0.8,
                {"times the bytes": 1.15},
            ),
            *(
                (
                    name,
                    "eight readers of the same array",
                    sharing,
                    {**_FAR_CHUNKS, "chunks": (250, 100, 10)},
                    "s/chunk",
                    1 / 0.4,
                    {},
                )
                for name in ("readers", "readers-bulk")
            ),
        )
    ),
    Row(
        "bucket-virtual",
        "in a bucket 20 ms away: cold read of a virtual chunk, against a native one",
        referring_far,
        ("zarr_manifests", "native"),
        {"chunks": (100, 100, 10), "chunk_bytes": (65_536, 65_536, 65_536), **_FAR},
        "s",
        "default",
        durability="-",
        cache="nothing known",
        due={"native": 0.8},
        limits={"requests more than of a native one": 0},
        most_rounds=3,
    ),
]

GROWTHS = [
    Growth(
        "appends to 10 M refs against those to 10,000",
        ("append-10k", None),
        ("append-10m", None),
        2.0,
    ),
    Growth(
        "the last 1,000 of 10,000 commits against the first",
        ("commits-10k", "seconds, first tenth"),
        ("commits-10k", "seconds, last tenth"),
        2.0,
    ),
]
