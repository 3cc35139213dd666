"""A Spark driver in a process of its own: it does the jobs that its input names, line by line.

Lines are JSON: a job with its arguments comes in, and what it returned, or how it failed, goes out.
"""

from __future__ import annotations

import json
import os
import sys
import traceback

from on_cluster import jobs
from on_cluster.trouble import DRIVER
from zarr_manifests.spark import register, session
from zarr_manifests.spark.tasks import java_home

# These processes live for seconds: what the second compiler and the threads of the garbage
# collector take is half of all processor time, and never comes back.
_JAVA = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
_CONFIG = {
    "spark.task.maxFailures": "3",
    "spark.sql.shuffle.partitions": "4",
    "spark.sql.execution.arrow.maxRecordsPerBatch": "16",
    "spark.driver.extraJavaOptions": _JAVA,
    "spark.executor.extraJavaOptions": _JAVA,
    # On a busy machine an answer may take minutes. Who is killed is noticed by what it held open.
    "spark.network.timeout": "900s",
    "spark.executor.heartbeatInterval": "60s",
    "spark.worker.timeout": "900",
    "spark.python.authenticate.socketTimeout": "900s",
    # An executor may be killed as often as tests like, and what it held need not be asked for.
    "spark.deploy.maxExecutorRetries": "-1",
    "spark.shuffle.io.maxRetries": "1",
    "spark.shuffle.io.retryWait": "100ms",
    "spark.locality.wait": "0",
    # A second attempt of a slow task goes to another host, which there is only if a job asks.
    "spark.speculation": "true",
    "spark.speculation.minTaskRuntime": "2s",
    "spark.speculation.quantile": "0.25",
    "spark.speculation.task.duration.threshold": "2s",
}


def main() -> None:
    """Serve until the input ends."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # the JVM writes to it too
    os.environ[DRIVER] = str(os.getpid())
    # Executors start when they like, so the launcher has to stay.
    with java_home(local=False) as home:
        config = _CONFIG | {"spark.executorEnv.JAVA_HOME": str(home)}
        spark = session(master=sys.argv[1], config=config)
        register(spark)
        spark.dataSource.register(jobs.TroubledDataSource)
        for line in sys.stdin:
            arguments = json.loads(line)
            try:
                answer = {"returned": getattr(jobs, arguments.pop("job"))(spark, **arguments)}
            except Exception as error:  # noqa: BLE001 - the test judges it
                traceback.print_exc()
                answer = {"failed": type(error).__name__, "said": str(error)}
            print(json.dumps(answer), file=answers, flush=True)
        spark.stop()


if __name__ == "__main__":
    main()
