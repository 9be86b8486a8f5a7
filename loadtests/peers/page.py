"""Writes the page of `make compare`, and its plots.

Everything on the page comes from one run, except the explanations in `LOSS_REASONS` and `LIMITS`, which
appear only beside figures that need them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from loadtests import report
from loadtests.peers.measuring import CONTENDERS, OURS, WORKLOADS, Contender, Workload

#: Why streams is slower in a workload, when it is.
LOSS_REASONS: Final = {
    "append-1000": "The records of a batch are checked and rendered by Python, about 0.5 µs each in one "
    "shard.",
    "append-1": "A request costs about 150 µs of Python in two processes, HTTP head and answer included, "
    "however "
    "small it is. Peers in C and Go spend 10 to 40 µs. Send batches: 100 records in a request cost little "
    "more "
    "than one.",
    "append-p50": "A record goes through two Python processes and back: HTTP is parsed in the gateway, the "
    "shard "
    "appends. Each hop between processes costs a wake-up on both sides.",
    "append-p99": "As for the p50; the slowest hundredth meets the garbage collector and the log's own "
    "thread.",
    "read-1000": "A page is spliced from stored bytes, and goes through the gateway once more on its way.",
    "deliver-p50": "An event takes three hops: gateway, shard, gateway. Redis and NATS wake the reader from "
    "the "
    "thread that took the write.",
    "deliver-p99": "As for the p50.",
    "jobs-1": "A job takes two requests through two Python processes, about 40 µs of the one shard each.",
    "jobs-16": "As for one job at a time; a larger claim costs about 3 µs a job.",
    "append-1000-server-cpu": "The shards check each record as JSON, render it and keep its tag.",
    "append-1000-client-cpu": "A JSON body is longer than the peer's protocol.",
    "append-1-server-cpu": "HTTP and two processes for each record, in Python.",
    "append-1-client-cpu": "An HTTP head in each request, and in each answer.",
}

#: The limit of each row that misses its aim. Shares are of the time that a process holds its interpreter lock
#: (`make profile ARGS=--gil`), on two cores that it shares with the load.
LIMITS: Final = {
    "append-1000-disk": "The shards. Checking the records as JSON takes a fifth of their interpreter's time, "
    "rendering "
    "them a fifth, and sealing what came before, beside the appends, a quarter to a third, most of it the "
    "index of tags: "
    "with sealing put off, a request costs a shard 39 % less.",
    "append-1000-fsync": "As for disk; and every group waits for the disk.",
    "append-100-disk": "The shards, as for batches of 1000; with sealing put off, a request costs them 28 % "
    "less. The "
    "gateway takes a quarter of the time, all of it per request: head, hop, answer. Of a shard's own time a "
    "tenth is copying into the log's pages, and a fourteenth is the system finding memory for new records.",
    "single-64-disk": "The gateway, at its limit: no function of it takes more than 8 %. Tasks of trio and "
    "their waits are "
    "a quarter, the answer's head and body a fifth, the hop to the shard a fifth.",
    "single-64-fsync": "As for disk; and every group waits for the disk.",
    "single-1-disk-p50": "Four wake-ups of sleeping processes for one record, each 30 to 60 µs here, and "
    "some 70 µs of "
    "Python in each of two processes.",
    "single-1-disk-p99": "Whoever else wants a core: with one connection, every process sleeps between two "
    "records and "
    "must be given a core again.",
    "single-1-fsync-p50": "As for disk, and one sync of the disk.",
    "diff-1000": "Copies: a page of 120 kB is read from the shard's socket and written to the client's by "
    "the gateway, "
    "which is busier than the shards.",
    "watch-1-p50": "Three hops between processes, each with a wake-up.",
    "watch-1-p99": "As for the p50: whoever else wants a core.",
    "watch-100-p50": "A hundred sockets are written one after the other: half of the gateway's time is "
    "handing one page to "
    "a hundred streams, an eighth the writes themselves. They are read one after the other, too.",
    "direct-1000": "Checking the records as JSON takes a quarter of the shard's time, rendering them a "
    "quarter, sealing "
    "a sixth.",
    "direct-columns-5000": "Rendering the records takes a third of the shard's time, indexing their tags for "
    "segments a quarter, and checking them as JSON an eighth; the prototype's columns were not checked and "
    "had no tags.",
    "ram-per-record": "The batch's own columns: an offset for each record, tags, and the objects around "
    "them.",
    "router-local-hop-disk-p50": "Two requests of clients, the append and the long poll: the copy itself is "
    "made with the append.",
    "router-hop-disk-p50": "Two requests of clients, and two messages between the shards through a gateway.",
    "work-1-disk": "The shard of the queue: about 40 µs of Python for a claim, and as much for its ack.",
    "work-16-disk": "The shard of the queue: a text, a lease and an entry of the log for each job.",
    "sealed-read-cold-cache": "The disk, while the page before is decoded and sent.",
    "sealed-read-warm": "Copies: file, shard, gateway, client, one page after the other.",
    "replay": "Frames are decoded and applied one by one by one interpreter for each shard.",
    "redis": "The same as for batches of 1000: the shards' work for each record. Redis' tool sends one "
    "record again and "
    "again, and Redis stores it as it is; we check each as JSON and index its tag.",
}

#: Floor and aim of the ratio to Redis Streams with its own tool: batches of 1000, same promise.
REDIS_FLOOR, REDIS_AIM = 3.0, 4.0
#: The page has a warning if other processes use more than this share of the cores.
BUSY_SHARE = 0.15

_COLOURS: Final = {"disk": "#3b6ea5", "fsync": "#a55d3b"}


def number(value: float) -> str:
    if value < 1:
        return f"{value:.3f}"
    return report.number(value)


def _ratio(value: float) -> str:
    return f"{value:.0f}×" if value >= 10 else f"{value:.1f}×" if value >= 0.95 else f"{value:.2f}×"


def _rows_of(result: dict[str, Any], workload: Workload) -> list[tuple[Contender, dict[str, Any]]]:
    rows = result["summary"][workload.key]
    return [(each, rows[each.key]) for each in CONTENDERS if each.key in rows]


def text(result: dict[str, Any]) -> str:
    facts = result["machine"]
    lines = [
        "# Benchmarks",
        "",
        "Written by `make compare`; do not edit. How fast streams is beside what you would use instead, "
        "measured on "
        "one machine in one run: "
        f"{facts['cores']} cores ({facts['cpu']}), {facts['memory_gib']} GiB, Linux {facts['kernel']}, "
        f"Python "
        f"{facts['python']}, data on {facts['filesystem']}, {result['at']}. Run it on yours: `make peers "
        f"compare`, "
        "half an hour.",
        "",
        f"Everything shares the machine: server, peers that wait, and the process that loads. "
        f"{result['rounds']} rounds "
        f"of {result['seconds']:g} s for each measurement, all contenders in turns; a figure is the median "
        f"of the "
        "rounds. All servers are new in each round. A spread says where another run is expected: "
        f"so many times more or less than the median as the farthest round is, to the power of "
        f"{result['stretch']:g}, and {result['factor_min']:g} times at the least. {_agreement(result)}"
        f"Others used {facts['cores_used_by_others']} cores when it began, and the processor ran at "
        f"{facts['speed']:.2f} of the best speed seen on one of its kind.",
        *_caveats(result),
        "",
        "## Ratios",
        "",
        "Streams over the peer of the same promise; for times the other way round. **Above 1 streams is "
        "better.**",
        "",
        *_ratios(result),
        "",
        "![ratios](benchmarks/ratios.png)",
        "",
        "## Where we lose",
        "",
        *_losses(result),
        "",
        "## Figures",
        *_figures(result),
        "",
        "## What an answer promises",
        "",
        "| | version | when a write is answered |",
        "|---|---|---|",
        *(
            f"| {each.title} | {result['versions'].get(each.peer, '')} | {each.durability} |"
            for each in CONTENDERS
            if not each.tool and (each.peer == OURS or each.peer in result["versions"])
        ),
        "",
        *_skip_lines(result),
        "All are set up as they come, but for where their data is, how durable they are, and 1 GB of shared "
        "buffers and "
        "8 GB of log for PostgreSQL. The same process loads all of them with the same loop, with bytes that "
        "were made "
        "before the clock started; `redis-benchmark` is Redis' own, with its pipeline as large as our batch.",
        "",
        "## Our own aims",
        "",
        *_aims(result),
        "",
    ]
    return "\n".join(lines)


def _agreement(result: dict[str, Any]) -> str:
    comparison = result["agreement"]
    if comparison is None:
        return ""
    inside = comparison["compared"] - len(comparison["outside"])
    outside = "; ".join(
        f"{each['contender']}, {each['workload'].split(' (')[0]}: {_ratio(each['ratio'])}, not "
        f"{_ratio(each['expected'][0])}–{_ratio(each['expected'][1])}"
        for each in comparison["outside"]
    )
    return (
        f"Of the ratios of this run, {inside} of {comparison['compared']} are where the run before it "
        f"expected them{f' ({outside})' if outside else ''}. "
    )


def _caveats(result: dict[str, Any]) -> list[str]:
    facts = result["machine"]
    lines = []
    if result["quick"]:
        lines += ["", "**A quick run: sizes are tiny and figures mean nothing.**"]
    if facts["cores_used_by_others"] > BUSY_SHARE * facts["cores"]:
        lines += [
            "",
            f"**The machine was busy with other work: {facts['cores_used_by_others']} of its "
            f"{facts['cores']} cores "
            "when this began. Figures are a fraction of what it can do, and the more processes and threads a "
            "contender "
            "has, the more of what was left it got. Run it again on a quiet machine before you believe a "
            "ratio.**",
        ]
    return lines


def _peers(result: dict[str, Any]) -> list[Contender]:
    present = {key for rows in result["summary"].values() for key in rows}
    return [each for each in CONTENDERS if each.peer != OURS and each.key in present]


def _ratios(result: dict[str, Any]) -> list[str]:
    lines = []
    for promise in ("disk", "fsync"):
        peers = [each for each in _peers(result) if each.promise == promise]
        if not peers:
            continue
        lines += [
            f"| against {promise} | " + " | ".join(each.title for each in peers) + " |",
            "|---|" + "---|" * len(peers),
        ]
        for workload in WORKLOADS:
            rows = result["summary"][workload.key]
            cells = []
            for each in peers:
                row = rows.get(each.key)
                if row and row["ratio"] is not None:
                    least, most = row["ratio_spread"] or [row["ratio"]] * 2
                    cells.append(f"**{_ratio(row['ratio'])}** ({_ratio(least)}–{_ratio(most)})")
                else:
                    cells.append("–")
            if any(cell != "–" for cell in cells):
                lines.append(f"| {workload.title} | " + " | ".join(cells) + " |")
        lines.append("")
    return lines[:-1] if lines else ["No peer is installed here."]


def _losses(result: dict[str, Any]) -> list[str]:
    lines = []
    for workload in WORKLOADS:
        winners = [
            f"{each.title} ({_ratio(row['ratio'])})"
            for each, row in _rows_of(result, workload)
            if row["ratio"] is not None and row["ratio"] < 0.95
        ]
        if winners:
            lines.append(f"- **{workload.title}**, to {', '.join(winners)}. {LOSS_REASONS[workload.key]}")
    return lines or ["Nowhere, in this run."]


def _figures(result: dict[str, Any]) -> list[str]:
    lines = []
    for workload in WORKLOADS:
        rows = _rows_of(result, workload)
        if not rows:
            continue
        lines += ["", f"### {workload.title}", ""]
        if workload.note:
            lines += [workload.note, ""]
        lines += ["| | promise | figure | spread | streams is |", "|---|---|---|---|---|"]
        for each, row in rows:
            ratio = "" if row["ratio"] is None else f"{_ratio(row['ratio'])}"
            spread = "–".join(map(number, row["spread"]))
            if row["rounds"] < result["rounds"]:
                spread += f", {row['rounds']} of {result['rounds']} rounds"
            lines.append(f"| {each.title} | {each.promise} | {number(row['median'])} | {spread} | {ratio} |")
        lines += ["", f"![{workload.title}](benchmarks/{workload.key}.png)"]
    return lines


def _skip_lines(result: dict[str, Any]) -> list[str]:
    lines = [f"- {name} was left out: {why}" for name, why in result["skipped"].items()]
    return [*lines, ""] if lines else []


def _aims(result: dict[str, Any]) -> list[str]:
    lines = [
        "The same run, by the rows of `make bench`: server and load generator share the cores. *Speed* is "
        "that of the "
        "processor meanwhile, as a share of the best seen on one of its kind.",
        "",
        "| | figure | spread | floor | aim | speed | |",
        "|---|---|---|---|---|---|---|",
    ]
    reasons = []
    for row in result["aims"]:
        title, figure, unit, spread, floor, aim, speed, verdict = report.cells(row)
        lines.append(f"| {title} | {figure} {unit} | {spread} | {floor} | {aim} | {speed} | {verdict} |")
        if row["figure"] is not None and not row["meets_aim"]:
            reasons.append(f"- **{title}**: {LIMITS[row['key']]}")
    for key, promise in (("redis-everysec-c", "disk"), ("redis-always-c", "fsync")):
        redis_row = result["summary"]["append-1000"].get(key)
        if redis_row and redis_row["ratio"] is not None:
            ratio = redis_row["ratio"]
            verdict = "aim" if ratio >= REDIS_AIM else "floor" if ratio >= REDIS_FLOOR else "BELOW FLOOR"
            title = f"batches of 1000 against Redis Streams by its C tool, {promise}"
            spread = "–".join(map(_ratio, redis_row["ratio_spread"]))
            lines.append(
                f"| {title} | {_ratio(ratio)} | {spread} | {REDIS_FLOOR:g}× | {REDIS_AIM:g}× | | {verdict} |"
            )
            if ratio < REDIS_AIM:
                reasons.append(f"- **{title}**: {LIMITS['redis']}")
    if reasons:
        lines += ["", "What stands between us and the aims that this run did not meet:", "", *reasons]
    return lines


def plots(result: dict[str, Any], folder: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    folder.mkdir(parents=True, exist_ok=True)
    for workload in WORKLOADS:
        if rows := _rows_of(result, workload):
            _plot(pyplot, workload, rows, folder / f"{workload.key}.png")
    _plot_ratios(pyplot, result, folder / "ratios.png")


def _save(pyplot: Any, figure: Any, path: Path) -> None:
    """Save a plot without date and program name, so that equal results give equal bytes."""
    figure.tight_layout()
    figure.savefig(path, dpi=100, metadata={"Software": None})
    pyplot.close(figure)


def _plot(pyplot: Any, workload: Workload, rows: list[tuple[Contender, dict[str, Any]]], path: Path) -> None:
    figure, axes = pyplot.subplots(figsize=(8, 0.5 + 0.36 * len(rows)))
    rows = rows[::-1]
    medians = [row["median"] for _, row in rows]
    spreads = [row["spread"] or [row["median"]] * 2 for _, row in rows]
    errors = [
        [middle - least for middle, (least, _) in zip(medians, spreads, strict=True)],
        [most - middle for middle, (_, most) in zip(medians, spreads, strict=True)],
    ]
    bars = axes.barh(
        [each.title for each, _ in rows],
        medians,
        xerr=errors,
        color=[_COLOURS[each.promise] for each, _ in rows],
        error_kw={"ecolor": "#555", "capsize": 2},
        height=0.7,
    )
    for (each, _), label in zip(rows, axes.get_yticklabels(), strict=True):
        label.set_fontweight("bold" if each.peer == OURS else "normal")
    axes.bar_label(bars, labels=[f" {number(value)}" for value in medians], padding=4, fontsize=8)
    axes.set_title(workload.title + ("; less is better" if workload.is_time else ""), fontsize=10)
    axes.margins(x=0.18)
    axes.spines[["top", "right"]].set_visible(False)
    axes.xaxis.set_major_formatter(lambda value, _: number(value) if value else "0")
    _save(pyplot, figure, path)


def _plot_ratios(pyplot: Any, result: dict[str, Any], path: Path) -> None:
    points = [
        (workload, each, row)
        for workload in WORKLOADS
        for each, row in _rows_of(result, workload)
        if row["ratio"] is not None
    ][::-1]
    if not points:
        return
    figure, axes = pyplot.subplots(figsize=(8, 0.8 + 0.24 * len(points)))
    for at, (_, each, row) in enumerate(points):
        axes.plot(
            row["ratio_spread"] or [row["ratio"]] * 2,
            [at, at],
            color=_COLOURS[each.promise],
            alpha=0.4,
            linewidth=5,
        )
        axes.plot(row["ratio"], at, "o", color=_COLOURS[each.promise])
    axes.axvline(1, color="#888", linewidth=1)
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(lambda value, _: _ratio(value))
    axes.set_yticks(range(len(points)))
    axes.set_yticklabels(
        [f"{workload.title.split(' (')[0]}: {each.title}" for workload, each, _ in points], fontsize=7
    )
    axes.set_title("streams is so many times better; left of 1: worse", fontsize=9)
    axes.margins(y=0.02)
    axes.grid(axis="x", alpha=0.3)
    _save(pyplot, figure, path)
