"""`make abuse`: runs each attack alone, then all at once, and measures well-behaved clients beside them.

The well-behaved clients offer a fixed load, a quarter of the machine's capacity. Their throughput is measured
before, during and after each attack; their share is the throughput under attack over the mean of the other
two. The report also has latencies and the CPU time of attackers and server: both use this machine's
processors, and an attack from another machine would not take a core from the server. The exit code is 1 if a
process restarts, a well-behaved client gets anything but 2xx or 429, or memory exceeds its bound.
"""

from __future__ import annotations

import argparse
import sys

from loadtests.abuse.attacks import ATTACKS
from loadtests.abuse.run import AttackResult, ClientResult, attacked_server, run_attacks, run_clients

#: Goal for the well-behaved clients' throughput under attack, as a share of their throughput without one.
SHARE_GOAL = 0.70
#: A gateway: its idle memory, all bodies and responses that it may buffer, and the allocator's overhead.
GATEWAY_BYTES_MAX = 1536 << 20
#: A shard: its cache, the responses that all gateways may request, and the allocator's overhead.
SHARD_BYTES_MAX = 1024 << 20


def row_of(name: str, quiet: tuple[ClientResult, ClientResult], result: AttackResult) -> tuple[str, bool]:
    clients = result.clients
    calm = (quiet[0].rounds_per_s + quiet[1].rounds_per_s) / 2
    share = clients.rounds_per_s / calm if calm else 0.0
    cpu_s = sum(attack["cpu_s"] for attack in result.attacks.values())
    peak = {
        kind: max((v for k, v in result.peak_bytes.items() if k.startswith(kind)), default=0)
        for kind in ("gateway", "shard")
    }
    holds = (
        not result.restarted_processes
        and not clients.failures
        and peak["gateway"] <= GATEWAY_BYTES_MAX
        and peak["shard"] <= SHARD_BYTES_MAX
    )
    marks = "" if share >= SHARE_GOAL else "  below the goal"
    line = (
        f"{name:<18} {share:5.0%} of {calm:5.0f}/s  p50 {clients.percentile_ms(0.5):6.1f}  "
        f"p99 {clients.percentile_ms(0.99):7.1f} ms  429: {clients.statuses.get(429, 0):5}  failed: "
        f"{clients.failures:3}  attacker {cpu_s:5.1f} s  server {result.server_cpu_s:5.1f} s  "
        f"gateway {peak['gateway'] >> 20:4} MiB  shard {peak['shard'] >> 20:4} MiB{marks}"
    )
    if result.restarted_processes:
        line += f"\n    restarted: {', '.join(result.restarted_processes)}"
    for failure in clients.first_failures:
        line += f"\n    {failure}"
    return line, holds


def main() -> int:
    parser = argparse.ArgumentParser(prog="loadtests.abuse", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--seconds", type=float, default=8.0, help="how long each attack runs (default 8)")
    parser.add_argument(
        "--scale", type=float, default=1.0, help="scale the connections of the attacks (default 1)"
    )
    parser.add_argument(
        "--only", action="append", choices=sorted(ATTACKS), help="run this attack (repeatable; default: all)"
    )
    parser.add_argument("--verbose", action="store_true", help="print the counters of each attack")
    arguments = parser.parse_args()
    names = arguments.only or list(ATTACKS)
    runs = [(name, [name]) for name in names] + ([("all at once", names)] if len(names) > 1 else [])
    all_hold = True
    for name, attacks in runs:
        with attacked_server() as server:
            before = run_clients(server, arguments.seconds / 2)
            outcome = run_attacks(server, attacks, arguments.seconds, scale=arguments.scale)
            after = run_clients(server, arguments.seconds / 2)
            line, holds = row_of(name, (before, after), outcome)
        all_hold &= holds
        print(line, flush=True)
        if arguments.verbose:
            for attack, result in outcome.attacks.items():
                print(f"    {attack}: {result['counts']}", flush=True)
    return 0 if all_hold else 1


if __name__ == "__main__":
    sys.exit(main())
