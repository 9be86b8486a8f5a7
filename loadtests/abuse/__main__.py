"""`make abuse`: each attack by itself, then all at once, and what well-behaved clients notice of them.

The well-behaved clients offer a fixed load, a quarter of what the machine takes. Their throughput is measured
without an attack before and after each attack; their share is what they get under attack over the mean of the
two. Latencies and the CPU time of attackers and server stand beside it: both use this machine's processors,
and an attack that takes a core from the server in this way would not do so from another machine. The exit
code is 1 when a process restarts, a well-behaved client is answered anything but 2xx or 429, or memory passes
its bound.
"""

from __future__ import annotations

import argparse
import sys

from loadtests.abuse.attacks import ATTACKS
from loadtests.abuse.run import Attacked, Clients, attacked_server, run_attacks, run_clients

#: Goal for the well-behaved clients' share of what they get without an attack.
SHARE_GOAL = 0.70
#: A gateway: what it needs idle, all bodies and all answers it may hold, and the allocator's share of that.
GATEWAY_BYTES_MAX = 1536 << 20
#: A shard: its cache, the answers that all gateways may ask of it, and the allocator's share.
SHARD_BYTES_MAX = 1024 << 20


def row_of(name: str, quiet: tuple[Clients, Clients], found: Attacked) -> tuple[str, bool]:
    clients = found.clients
    calm = (quiet[0].rounds_per_s + quiet[1].rounds_per_s) / 2
    share = clients.rounds_per_s / calm if calm else 0.0
    cpu_s = sum(attack["cpu_s"] for attack in found.attacks.values())
    peak = {
        kind: max((v for k, v in found.peak_bytes.items() if k.startswith(kind)), default=0)
        for kind in ("gateway", "shard")
    }
    holds = (
        not found.restarted
        and not clients.failures
        and peak["gateway"] <= GATEWAY_BYTES_MAX
        and peak["shard"] <= SHARD_BYTES_MAX
    )
    marks = "" if share >= SHARE_GOAL else "  below the goal"
    line = (
        f"{name:<18} {share:5.0%} of {calm:5.0f}/s  p50 {clients.percentile_ms(0.5):6.1f}  "
        f"p99 {clients.percentile_ms(0.99):7.1f} ms  429: {clients.statuses.get(429, 0):5}  failed: "
        f"{clients.failures:3}  attacker {cpu_s:5.1f} s  server {found.server_cpu_s:5.1f} s  "
        f"gateway {peak['gateway'] >> 20:4} MiB  shard {peak['shard'] >> 20:4} MiB{marks}"
    )
    if found.restarted:
        line += f"\n    restarted: {', '.join(found.restarted)}"
    for failure in clients.first_failures:
        line += f"\n    {failure}"
    return line, holds


def main() -> int:
    parser = argparse.ArgumentParser(prog="loadtests.abuse", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--seconds", type=float, default=8.0, help="how long each attack runs (default 8)")
    parser.add_argument(
        "--scale", type=float, default=1.0, help="connections of the attacks, 1 = as reviewed"
    )
    parser.add_argument("--only", action="append", choices=sorted(ATTACKS), help="an attack; all by default")
    parser.add_argument("--verbose", action="store_true", help="what each attack counted")
    asked = parser.parse_args()
    names = asked.only or list(ATTACKS)
    runs = [(name, [name]) for name in names] + ([("all at once", names)] if len(names) > 1 else [])
    all_hold = True
    for name, attacks in runs:
        with attacked_server() as server:
            before = run_clients(server, asked.seconds / 2)
            found = run_attacks(server, attacks, asked.seconds, scale=asked.scale)
            after = run_clients(server, asked.seconds / 2)
            line, holds = row_of(name, (before, after), found)
        all_hold &= holds
        print(line, flush=True)
        if asked.verbose:
            for attack, result in found.attacks.items():
                print(f"    {attack}: {result['counts']}", flush=True)
    return 0 if all_hold else 1


if __name__ == "__main__":
    sys.exit(main())
