"""`streams queue`: claim and settle jobs by hand, run a command per job, and handle dead letters."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any, Literal
from uuid import uuid4

import click

from streams.cli import output
from streams.cli.records import present_fields
from streams.cli.suggestions import QUEUE_NAME, VerbGroup
from streams.cli.verbs import MILLIS, ServerTarget, example, server_options

if TYPE_CHECKING:
    from streams.client._sync.box import Box
    from streams.client.answers import Job


@click.group("queue", cls=VerbGroup)
def command() -> None:
    """Claim jobs, ack or nack them, run a worker, and requeue dead letters.

    A queue is a box of type queue: `streams box create NAME --type queue`. `streams append` adds jobs.
    """


_node = click.option(
    "--node", default=lambda: f"cli-{os.getpid()}", help="Name of the worker (default: cli- and the pid)."
)
_leases = click.option("--lease-id", "lease_ids", multiple=True, help="Lease id of the claim; one per SEQ.")
_seqs = click.argument("seqs", nargs=-1, type=int, required=True)


@example("streams queue claim jobs --node w1 --max 2")
@command.command("claim")
@click.argument("queue", type=QUEUE_NAME)
@_node
@click.option("--max", "max_jobs", type=click.IntRange(1, 1000), default=1, show_default=True)
@click.option("--lease", "lease_ms", type=MILLIS, help="Length of the lease (default: the queue's).")
@click.option(
    "--wait", "wait_ms", type=MILLIS, default=0, help="Wait up to this long for a job; at most 30s."
)
@server_options
def claim(
    target: ServerTarget, queue: str, node: str, max_jobs: int, lease_ms: int | None, wait_ms: int
) -> None:
    """Claim jobs and print them with the fields that `ack` needs. Exit code 5 if no job is ready."""
    with target.client() as client:
        handle = client.queue(queue)
        jobs = handle.claim(node, max=max_jobs, lease_ms=lease_ms, wait_ms=wait_ms, raw_data=True)
    rows = [{**present_fields(job), "node": node} for job in jobs]
    columns = ("$seq", "node", "lease_id", "deliveries", "data")
    if not output.show_rows(columns, rows, as_json=target.as_json):
        raise output.Nothing(f"{queue} has no ready job; --wait waits for one")


def _settle(
    target: ServerTarget,
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
        handle = client.queue(queue)
        reply = client.call("POST", f"{handle.path}/{action}", dict[str, Any], body)
    fields = ({"ack": "acked", "nack": "nacked", "extend": "extended"}[action], "skipped")
    output.show_facts({name: reply[name] for name in fields}, as_json=target.as_json)
    if len(reply["skipped"]) == len(seqs):
        raise output.Refusal(
            f"node {node!r} holds no lease on any of these jobs; pass the --node that claimed them, or "
            "claim again"
        )


@example("streams queue ack jobs 1 --node w1")
@command.command("ack")
@click.argument("queue", type=QUEUE_NAME)
@_seqs
@_node
@_leases
@click.option(
    "--output",
    "outputs",
    multiple=True,
    metavar="BOX=JSON",
    help="Append this record to BOX, exactly once; acks all jobs or none. May be repeated.",
)
@click.option(
    "--idempotency-key", metavar="KEY", help="Idempotency key of an ack with outputs (default: random)."
)
@server_options
def ack(
    target: ServerTarget,
    queue: str,
    seqs: tuple[int, ...],
    node: str,
    lease_ids: tuple[str, ...],
    outputs: tuple[str, ...],
    idempotency_key: str | None,
) -> None:
    """Acknowledge jobs: they are done, and leave the queue."""
    more: dict[str, Any] = {}
    if outputs:
        more = {"outputs": _outputs(outputs), "idempotency_key": idempotency_key or uuid4().hex}
    _settle(target, queue, "ack", node, seqs, lease_ids, **more)


def _outputs(texts: Sequence[str]) -> dict[str, dict[str, list[Any]]]:
    """Parse the outputs of an ack, each BOX=JSON."""
    import msgspec

    outputs: dict[str, dict[str, list[Any]]] = {}
    for text in texts:
        box, equals, data = text.partition("=")
        try:
            record = {"data": msgspec.json.decode(data, type=msgspec.Raw)}
        except msgspec.DecodeError:
            equals = ""
        if not (box and equals):
            raise output.Refusal(f"--output {text!r}: write BOX=JSON, such as invoices='{{\"order\":7}}'")
        outputs.setdefault(box, {"records": []})["records"].append(record)
    return outputs


@example("streams queue nack jobs 1 --node w1 --delay 1m")
@command.command("nack")
@click.argument("queue", type=QUEUE_NAME)
@_seqs
@_node
@_leases
@click.option(
    "--delay",
    "delay_ms",
    type=MILLIS,
    help="Deliver them again after this long (default: the queue's backoff).",
)
@click.option("--error", help="What went wrong; the next worker and the dead letter show it.")
@server_options
def nack(
    target: ServerTarget,
    queue: str,
    seqs: tuple[int, ...],
    node: str,
    lease_ids: tuple[str, ...],
    delay_ms: int | None,
    error: str | None,
) -> None:
    """Return jobs to the queue, to be delivered again."""
    fields = {"delay_ms": delay_ms, "error": error}
    more = {name: value for name, value in fields.items() if value is not None}
    _settle(target, queue, "nack", node, seqs, lease_ids, **more)


@example("streams queue extend jobs 1 --node w1 --lease 5m")
@command.command("extend")
@click.argument("queue", type=QUEUE_NAME)
@_seqs
@_node
@_leases
@click.option("--lease", "lease_ms", type=MILLIS, required=True, help="New length, from now.")
@server_options
def extend(
    target: ServerTarget,
    queue: str,
    seqs: tuple[int, ...],
    node: str,
    lease_ids: tuple[str, ...],
    lease_ms: int,
) -> None:
    """Extend the leases of jobs."""
    _settle(target, queue, "extend", node, seqs, lease_ids, lease_ms=lease_ms)


@example("streams queue work jobs --exec 'jq .n' --drain")
@command.command("work")
@click.argument("queue", type=QUEUE_NAME)
@click.option("--exec", "shell", required=True, metavar="COMMAND", help="Shell command to run for each job.")
@click.option("--concurrency", type=click.IntRange(1, 1000), default=1, show_default=True)
@click.option("--lease", "lease_ms", type=MILLIS, help="Length of a lease, renewed while the command runs.")
@click.option("--node", help="Name of the worker (default: random).")
@click.option("--drain", is_flag=True, help="Exit when no job is ready or running.")
@server_options
def work(
    target: ServerTarget,
    queue: str,
    shell: str,
    concurrency: int,
    lease_ms: int | None,
    node: str | None,
    drain: bool,
) -> None:
    """Run COMMAND for each job, with the job's data on its standard input, until Ctrl-C.

    Exit code 0 of COMMAND acks the job. Any other code returns it to the queue, with a delay that grows with
    its deliveries. COMMAND gets STREAMS_JOB_SEQ, STREAMS_JOB_TAG and STREAMS_JOB_DELIVERIES in its
    environment. After Ctrl-C, running jobs finish.
    """
    with target.client(is_patient=True) as client:
        handle = client.queue(queue)

        def run_one(job: Job) -> None:
            environ = {
                "STREAMS_JOB_SEQ": str(job.seq),
                "STREAMS_JOB_TAG": job.tag or "",
                "STREAMS_JOB_DELIVERIES": str(job.deliveries),
            }
            process = subprocess.run(
                ["sh", "-c", shell],
                input=output.as_line(job.data) + b"\n",
                env={**os.environ, **environ},
                start_new_session=True,  # Ctrl-C stops the worker; running commands finish
                check=False,
            )
            if process.returncode != 0:
                from streams.client.working import Nack, delay_ms

                output.warn(
                    f"job {job.seq}: the command ended with {process.returncode}; it will be tried again"
                )
                raise Nack(delay_ms(job.deliveries))

        worker = handle.worker(run_one, node=node, concurrency=concurrency, lease_ms=lease_ms, raw_data=True)
        try:
            worker.run(drain=drain)
        except KeyboardInterrupt:
            output.note("stopped; all running jobs have finished")
    statistics = worker.statistics()
    facts = {"done": statistics.done, "given_back": statistics.given_back, "lost": statistics.lost}
    if drain and not any(facts.values()):
        raise output.Nothing(f"{queue} has no ready job")
    output.show_facts(facts, as_json=target.as_json)


_some_seqs = click.argument("seqs", nargs=-1, type=int)
_match = click.option("--match", help="All jobs with this tag; `user-*` for all tags that begin so.")


def _select(seqs: Sequence[int], match: str | None) -> dict[str, Any]:
    if bool(seqs) == (match is not None):
        raise output.Refusal("select the jobs either by SEQ or with --match")
    if match is None:
        return {"seqs": list(seqs)}
    return {"match": ["tag", "Glob", match] if match.endswith("*") else match}


@example("streams queue reschedule jobs 3 --delay 1h")
@command.command("reschedule")
@click.argument("queue", type=QUEUE_NAME)
@_some_seqs
@_match
@click.option("--delay", "delay_ms", type=MILLIS, default=0, help="Deliver them after this long; 0 = now.")
@server_options
def reschedule(
    target: ServerTarget, queue: str, seqs: tuple[int, ...], match: str | None, delay_ms: int
) -> None:
    """Change when waiting and delayed jobs are delivered."""
    with target.client() as client:
        reply = client.queue(queue).reschedule(**_select(seqs, match), delay=delay_ms / 1000)
    facts = {"rescheduled": reply.rescheduled, "skipped": reply.skipped, "more": reply.more}
    output.show_facts(facts, as_json=target.as_json)


@example("streams queue reprioritize jobs 3 --priority 9")
@command.command("reprioritize")
@click.argument("queue", type=QUEUE_NAME)
@_some_seqs
@_match
@click.option("--priority", type=click.IntRange(0, 9), required=True, help="9 is delivered first.")
@server_options
def reprioritize(
    target: ServerTarget, queue: str, seqs: tuple[int, ...], match: str | None, priority: int
) -> None:
    """Change the priority of waiting and delayed jobs."""
    with target.client() as client:
        reply = client.queue(queue).reprioritize(**_select(seqs, match), job_priority=priority)
    facts = {"reprioritized": reply.reprioritized, "skipped": reply.skipped, "more": reply.more}
    output.show_facts(facts, as_json=target.as_json)


@example("streams queue pause jobs")
@command.command("pause")
@click.argument("queue", type=QUEUE_NAME)
@server_options
def pause(target: ServerTarget, queue: str) -> None:
    """Stop deliveries: claims get no jobs until `resume`. Leased jobs can be finished."""
    with target.client() as client:
        client.queue(queue).pause()
    output.show_facts({"queue": queue, "paused": True}, as_json=target.as_json)


@example("streams queue resume jobs")
@command.command("resume")
@click.argument("queue", type=QUEUE_NAME)
@server_options
def resume(target: ServerTarget, queue: str) -> None:
    """Deliver jobs again after a pause."""
    with target.client() as client:
        client.queue(queue).resume()
    output.show_facts({"queue": queue, "paused": False}, as_json=target.as_json)


@example("streams queue dead jobs")
@command.command("dead")
@click.argument("queue", type=QUEUE_NAME)
@click.option(
    "-n",
    "--limit",
    type=click.IntRange(1),
    default=100,
    show_default=True,
    help="Maximum number of dead letters.",
)
@server_options
def dead(target: ServerTarget, queue: str, limit: int) -> None:
    """List the dead letters of QUEUE: jobs that reached `max_deliveries`. Exit code 5 if there are none."""
    with target.client() as client:
        box = client.queue(queue).config().dead_letter
        if box is None:
            raise output.Refusal(
                f"{queue} has no dead letter box; set one with `streams box edit {queue} --max-deliveries 5 "
                f"--dead-letter {queue}.dead`"
            )
        letters = client.box(box)
        rows = list(islice(_dead_letters(letters, queue), limit)) if letters.exists() else []
    if not output.show_rows(("box", "seq", "from_seq", "deliveries", "data"), rows, as_json=target.as_json):
        raise output.Nothing(f"{queue} has no dead letters")


def _dead_letters(box: Box, queue: str) -> Iterator[dict[str, Any]]:
    import msgspec

    from streams.client.answers import RawRecord

    query: dict[str, Any] = {"from_seq": 0, "limit": 1000}
    while True:
        page = box.raw_page(**query)
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
        query |= {"from_seq": page.next_from_seq, "generation": page.generation}


@example("streams queue jobs jobs --state delayed")
@command.command("jobs")
@click.argument("queue", type=QUEUE_NAME)
@click.option(
    "--state", type=click.Choice(["leased", "delayed", "ready"]), default="leased", show_default=True
)
@click.option("-n", "--limit", type=click.IntRange(1), default=100, show_default=True, help="Maximum number.")
@server_options
def jobs(target: ServerTarget, queue: str, state: Literal["leased", "delayed", "ready"], limit: int) -> None:
    """List the jobs of QUEUE in one state. Exit code 5 if there are none."""
    import msgspec

    with target.client() as client:
        rows = [msgspec.structs.asdict(job) for job in islice(client.queue(queue).jobs(state), limit)]
    columns = ("seq", "deliveries", "node", "deadline", "due_ts", "last_node", "last_error")
    if not output.show_rows(columns, rows, as_json=target.as_json):
        raise output.Nothing(f"{queue} has no {state} jobs")


@example("streams queue requeue jobs")
@command.command("requeue")
@click.argument("queue", type=QUEUE_NAME)
@_some_seqs
@click.option("--match", help="Dead letters with this tag; `user-*` for all tags that begin so.")
@click.option("--dry-run", is_flag=True, help="Count the dead letters; move none.")
@click.option("--from", "from_box", help="Box with the dead letters (default: the queue's dead letter box).")
@click.option("--max", "max_jobs", type=click.IntRange(1, 1000), default=100, show_default=True)
@server_options
def requeue(
    target: ServerTarget,
    queue: str,
    seqs: tuple[int, ...],
    match: str | None,
    dry_run: bool,
    from_box: str | None,
    max_jobs: int,
) -> None:
    """Move dead letters back into QUEUE, to be delivered again: those with these SEQs of their box, with a
    tag, or the oldest. Exit code 5 if there are none.

    `streams queue redrive` is an alias.
    """
    with target.client() as client:
        handle = client.queue(queue)
        source = from_box or handle.config().dead_letter
        if source is None:
            raise output.Refusal(
                f"{queue} has no dead letter box; name the box to take them from with --from"
            )
        # The first dead letter creates the box.
        exists = from_box is not None or client.box(source).exists()
        selection = _select(seqs, match) if seqs or match is not None else {}
        count = handle.requeue(source, max=max_jobs, dry_run=dry_run, **selection) if exists else 0
    if not count:
        raise output.Nothing(f"{source} has no dead letters of {queue}")
    facts = {"queue": queue, "from": source, "requeued": count}
    output.show_facts(facts | ({"dry_run": True} if dry_run else {}), as_json=target.as_json)


#: Earlier name of `requeue`: still works, but `--help` does not list it.
command.add_command(
    click.Command(
        "redrive", params=requeue.params, callback=requeue.callback, help="Alias of requeue.", hidden=True
    )
)
