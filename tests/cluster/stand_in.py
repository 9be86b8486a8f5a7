"""A shard or gateway that only keeps the supervisor's contract, and a server made of them.

    python stand_in.py serve              a real supervisor over stand-ins
    python stand_in.py shard --index 0 …  one of them

`STAND_IN_PLAN` says what each does in its first, second, ... life (the last one repeats):

    serve      ready, then end well on SIGTERM or when the supervisor is gone
    mute       like serve, but it is never ready
    crash      end with code 1 before it was ready
    corrupt    say why, and end with code 3
    stubborn   like serve, but SIGTERM is ignored
    lingering  like serve, but when the supervisor is gone it waits until it is allowed to end

Each tells what happens to it by lines in the fifo `STAND_IN_EVENTS`, which a test reads instead of sleeping.
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
from pathlib import Path

from streams.config import ChildArgs, load


class StandIn:
    def __init__(self, kind: str, args: ChildArgs) -> None:
        self.args = args
        self.name = f"shard-{args.index:02d}" if kind == "shard" else f"gateway-{args.index}"
        self._events = os.open(os.environ["STAND_IN_EVENTS"], os.O_WRONLY)

    def tell(self, event: str) -> None:
        os.write(self._events, f"{self.name} {event}\n".encode())

    def report(self, line: str) -> None:
        os.write(self.args.ready_fd, f"{line}\n".encode())

    def behaviour(self) -> str:
        """What the plan says for this life; lives are counted in a file beside the fifo."""
        lives = Path(os.environ["STAND_IN_EVENTS"]).with_name(f"{self.name}.lives")
        count = len(lives.read_text()) if lives.exists() else 0
        lives.write_text("x" * (count + 1))
        plan = json.loads(os.environ.get("STAND_IN_PLAN", "{}")).get(self.name, ["serve"])
        return str(plan[min(count, len(plan) - 1)])

    def live(self) -> int:
        behaviour = self.behaviour()
        woken, waker = os.pipe()
        os.set_blocking(waker, False)
        signal.set_wakeup_fd(waker)
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, lambda *_: None)
        self.tell("started")
        if behaviour == "crash":
            return 1
        if behaviour == "corrupt":
            self.report("error the log is torn at byte 17")
            return 3
        self.report("progress 0.5")
        if behaviour != "mute":
            self.report("ready")
        return self.wait(woken, behaviour)

    def wait(self, woken: int, behaviour: str) -> int:
        while True:
            readable, _, _ = select.select([woken, self.args.parent_fd], [], [])
            if self.args.parent_fd in readable:
                self.tell("orphaned")
                if behaviour == "lingering":
                    os.read(os.open(os.environ["STAND_IN_RELEASE"], os.O_RDONLY), 1)
                return 0
            for number in os.read(woken, 64):
                self.tell(signal.Signals(number).name)
                if number == signal.SIGTERM and behaviour != "stubborn":
                    return 0


def serve() -> None:
    import trio

    from gateway.supervise.supervisor import Commands, Supervisor
    from streams import logs

    config = load(os.environ)
    logs.setup(config.log, config.log_format, process="supervisor")
    this = (sys.executable, __file__)
    trio.run(Supervisor(config, commands=Commands(shard=(*this, "shard"), gateway=(*this, "gateway"))).run)


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve()
    else:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        sys.exit(StandIn(sys.argv[1], ChildArgs.parse(sys.argv[2:], os.environ)).live())
