"""A job queue with dead letters: resize pictures, retry what fails, and look at what failed for good.

python job_queue.py add a.png b.gif broken.png
python job_queue.py work            # until every job is done or a dead letter
python job_queue.py dead            # what failed for good, and why
python job_queue.py retry           # move it back into the queue
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence

import streams

QUEUE, DEAD = "resize", "resize.dead"


def create(client: streams.Client) -> streams.Queue:
    """Create the queue: three deliveries, the next ones after a tenth of a second and two tenths."""
    queue = client.queue(QUEUE)
    queue.create(
        max_deliveries=3,
        dead_letter=DEAD,
        retry_backoff={"initial_ms": 100, "factor": 2.0, "max_ms": 1000, "jitter": 0.0},
    )
    return queue


def add(client: streams.Client, files: Sequence[str]) -> None:
    """Add a job for each file. A file that is added twice within two minutes is one job."""
    queue = create(client)
    for file in files:
        queue.append({"file": file}, tag=file, idempotency_key=f"resize {file}")


def resize(job: streams.Job) -> None:
    """The work itself. An exception returns the job to the queue."""
    file = job.data["file"]
    if file.startswith("broken"):
        raise ValueError(f"{file} is not a picture")
    print(f"resized {file}\n", end="")  # one write: several threads print


def work(client: streams.Client, *, concurrency: int = 4) -> int:
    """Run jobs until each is done or a dead letter, and return how many were done."""
    queue, done = create(client), 0
    while True:
        worker = queue.worker(resize, concurrency=concurrency)
        worker.run(drain=True)  # without `drain` it waits for new jobs, until `worker.stop()`
        done += worker.statistics().done
        jobs = queue.state().queue
        if jobs is None or jobs.delayed == 0:
            return done
        time.sleep(0.1)  # a failed job waits for its next delivery


def dead(client: streams.Client) -> Iterator[tuple[str, str]]:
    """The files that failed three times, and the last error of each."""
    letters = client.box(DEAD)
    if not letters.exists():
        return
    for letter in letters.read():
        if isinstance(letter, streams.Record):
            yield letter.data["file"], str(letter.meta.get("$dead_letter_error"))


def retry(client: streams.Client) -> int:
    """Move all dead letters back into the queue, and return how many."""
    return create(client).requeue(DEAD, max=1000) if client.box(DEAD).exists() else 0


def main(arguments: Sequence[str]) -> None:
    command, *files = arguments or ["work"]
    with streams.Client() as client:
        if command == "add":
            add(client, files)
        elif command == "work":
            print(f"{work(client)} jobs are done")
        elif command == "dead":
            for file, error in dead(client):
                print(f"{file}: {error}")
        elif command == "retry":
            print(f"{retry(client)} jobs are back in the queue")
        else:
            raise SystemExit(__doc__)


if __name__ == "__main__":
    main(sys.argv[1:])
