"""`streams queue`: jobs under leases, by hand or with a command for each."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any

import click

from streams.cli import output
from streams.cli.records import present_fields
from streams.cli.verbs import MILLIS, Target, connected, example

if TYPE_CHECKING:
    from streams.client._sync.box import Box
    from streams.client.answers import Job


@click.group("queue")
def command() -> None:
    """Take jobs out of a queue, say how they went, and look after those that failed.

    A queue is a box made with `streams box create NAME --type queue`; `streams append` puts jobs in.
    """


_node = click.option(
    "--node", default=lambda: f"cli-{os.getpid()}", help="Who works (default: cli- and the pid)."
)
_leases = click.option("--lease-id", "lease_ids", multiple=True, help="Proof of the lease; one for each SEQ.")
_seqs = click.argument("seqs", nargs=-1, type=int, required=True)


@example("streams queue claim jobs --node w1 --max 2")
@command.command("claim")
@click.argument("queue")
@_node
@click.option("--max", "max_jobs", type=click.IntRange(1, 1000), default=1, show_default=True)
@click.option("--lease", "lease_ms", type=MILLIS, help="For so long (default: as the queue says).")
@click.option("--wait", "wait_ms", type=MILLIS, default=0, help="Wait so long for the first; up to 30s.")
@connected
def claim(target: Target, queue: str, node: str, max_jobs: int, lease_ms: int | None, wait_ms: int) -> None:
    """Take jobs under a lease and print them, with what `ack` needs. Exit code 5 when there is none."""
    with target.client() as client:
        found = client.queue(queue)
        jobs = found.claim(node, max=max_jobs, lease_ms=lease_ms, wait_ms=wait_ms, raw_data=True)
    rows = [{**present_fields(job), "node": node} for job in jobs]
    columns = ("$seq", "node", "lease_id", "deliveries", "data")
    if not output.show_rows(columns, rows, as_json=target.as_json):
        raise output.Nothing(f"{queue} has no job that is ready")


def _settle(
    target: Target,
    queue: str,
    action: str,
    node: str,
    seqs: Sequence[int],
    lease_ids: Sequence[str],
    **more: Any,
) -> None:
    body: dict[str, Any] = {"node": node, "seqs": list(seqs), **more}
    if lease_ids:
        body["lease_ids"] = list(lease_ids)
    with target.client() as client:
        found = client.queue(queue)
        settled = client.call("POST", f"{found.path}/{action}", dict[str, Any], body)
    shown = ({"ack": "acked", "nack": "nacked", "extend": "extended"}[action], "skipped")
    output.show_facts({name: settled[name] for name in shown}, as_json=target.as_json)
    if len(settled["skipped"]) == len(seqs):
        raise output.Refusal(f"none of these jobs is {node}'s; give the --node that claimed them")


@example("streams queue ack jobs 1 --node w1")
@command.command("ack")
@click.argument("queue")
@_seqs
@_node
@_leases
@connected
def ack(target: Target, queue: str, seqs: tuple[int, ...], node: str, lease_ids: tuple[str, ...]) -> None:
    """These jobs are done, and gone."""
    _settle(target, queue, "ack", node, seqs, lease_ids)


@example("streams queue nack jobs 1 --node w1 --delay 1m")
@command.command("nack")
@click.argument("queue")
@_seqs
@_node
@_leases
@click.option("--delay", "delay_ms", type=MILLIS, default=0, help="Not before so long.")
@connected
def nack(
    target: Target, queue: str, seqs: tuple[int, ...], node: str, lease_ids: tuple[str, ...], delay_ms: int
) -> None:
    """Give these jobs back."""
    _settle(target, queue, "nack", node, seqs, lease_ids, delay_ms=delay_ms)


@example("streams queue extend jobs 1 --node w1 --lease 5m")
@command.command("extend")
@click.argument("queue")
@_seqs
@_node
@_leases
@click.option("--lease", "lease_ms", type=MILLIS, required=True, help="From now.")
@connected
def extend(
    target: Target, queue: str, seqs: tuple[int, ...], node: str, lease_ids: tuple[str, ...], lease_ms: int
) -> None:
    """Keep these jobs for longer."""
    _settle(target, queue, "extend", node, seqs, lease_ids, lease_ms=lease_ms)


@example("streams queue work jobs --exec 'jq .n' --drain")
@command.command("work")
@click.argument("queue")
@click.option("--exec", "shell", required=True, metavar="COMMAND", help="Run by sh for each job.")
@click.option("--concurrency", type=click.IntRange(1, 1000), default=1, show_default=True)
@click.option(
    "--lease", "lease_ms", type=MILLIS, help="Extended while the command runs (default: the queue's)."
)
@click.option("--node", help="Who works (default: made up).")
@click.option("--drain", is_flag=True, help="End when no job is ready or at work.")
@connected
def work(
    target: Target,
    queue: str,
    shell: str,
    concurrency: int,
    lease_ms: int | None,
    node: str | None,
    drain: bool,
) -> None:
    """Run COMMAND for each job, with the job's data on its standard input, until Ctrl-C.

    Exit code 0 acks the job, any other gives it back for a time that grows with its deliveries.
    STREAMS_JOB_SEQ, _TAG and _DELIVERIES are in its environment. Ctrl-C lets those at work finish.
    """
    with target.client(is_patient=True) as client:
        found = client.queue(queue)

        def run_one(job: Job) -> None:
            environ = {
                "STREAMS_JOB_SEQ": str(job.seq),
                "STREAMS_JOB_TAG": job.tag or "",
                "STREAMS_JOB_DELIVERIES": str(job.deliveries),
            }
            ran = subprocess.run(
                ["sh", "-c", shell],
                input=output.as_line(job.data) + b"\n",
                env={**os.environ, **environ},
                start_new_session=True,  # Ctrl-C is for us: what is at work may finish
                check=False,
            )
            if ran.returncode != 0:
                from streams.client.working import Nack, delay_ms

                output.warn(f"job {job.seq}: the command ended with {ran.returncode}; it will be tried again")
                raise Nack(delay_ms(job.deliveries))

        worker = found.worker(run_one, node=node, concurrency=concurrency, lease_ms=lease_ms, raw_data=True)
        try:
            worker.run(drain=drain)
        except KeyboardInterrupt:
            output.note("stopped; jobs that were at work are finished")
    statistics = worker.statistics()
    facts = {"done": statistics.done, "given_back": statistics.given_back, "lost": statistics.lost}
    if drain and not any(facts.values()):
        raise output.Nothing(f"{queue} has no job that is ready")
    output.show_facts(facts, as_json=target.as_json)


@example("streams queue dead jobs")
@command.command("dead")
@click.argument("queue")
@click.option(
    "-n", "--limit", type=click.IntRange(1), default=100, show_default=True, help="At most so many."
)
@connected
def dead(target: Target, queue: str, limit: int) -> None:
    """List the dead letters of QUEUE: jobs that were delivered too often. Exit code 5 when there is none."""
    with target.client() as client:
        box = client.queue(queue).config().dead_letter
        if box is None:
            raise output.Refusal(
                f"{queue} keeps no dead letters; `streams box edit {queue} --max-deliveries 5 --dead-letter "
                f"{queue}.dead` makes it keep them"
            )
        letters = client.box(box)
        rows = list(islice(_dead_letters(letters, queue), limit)) if letters.exists() else []
    if not output.show_rows(("box", "seq", "from_seq", "deliveries", "data"), rows, as_json=target.as_json):
        raise output.Nothing(f"{queue} has no dead letters")


def _dead_letters(box: Box, queue: str) -> Iterator[dict[str, Any]]:
    import msgspec

    from streams.client.answers import RawRecord

    asked: dict[str, Any] = {"from_seq": 0, "limit": 1000}
    while True:
        page = box.raw_page(**asked)
        for raw in page.records:
            record = msgspec.json.decode(raw, type=RawRecord)
            facts = {name: msgspec.json.decode(value) for name, value in record.meta.items()}
            if facts.get("$dead_letter_from") == queue:
                yield {
                    "box": box.name,
                    "seq": record.seq,
                    "from_seq": facts.get("$dead_letter_src_seq"),
                    "deliveries": facts.get("$dead_letter_deliveries"),
                    "data": record.data,
                }
        if page.caught_up:
            return
        asked |= {"from_seq": page.next_from_seq, "generation": page.generation}


@example("streams queue redrive jobs")
@command.command("redrive")
@click.argument("queue")
@click.option("--from", "from_box", help="Box with the dead letters (default: the queue's own).")
@click.option("--max", "max_jobs", type=click.IntRange(1, 1000), default=100, show_default=True)
@connected
def redrive(target: Target, queue: str, from_box: str | None, max_jobs: int) -> None:
    """Move dead letters back into QUEUE, to be tried again. Exit code 5 when there is none."""
    with target.client() as client:
        found = client.queue(queue)
        source = from_box or found.config().dead_letter
        if source is None:
            raise output.Refusal(f"{queue} keeps no dead letters; name their box with --from")
        # It is made by the first dead letter.
        is_there = from_box is not None or client.box(source).exists()
        moved = found.requeue(source, max=max_jobs) if is_there else 0
    if not moved:
        raise output.Nothing(f"{source} holds no dead letters of {queue}")
    output.show_facts({"queue": queue, "from": source, "requeued": moved}, as_json=target.as_json)
