"""Well-behaved clients in a separate process: `python -m loadtests.abuse.clients < plan > result`.

Each of `connections` threads has one connection and repeats one round: append ten records, read them back,
add a job, claim it, acknowledge it. Every ten rounds it probes `/v0/health` and reconnects, as clients of a
real service do. Together the threads start `rate` rounds a second, or as many as possible with a rate of 0;
late rounds are not made up for. After a 429 a client waits as long as the response says and retries. Anything
but 2xx and 429 is a failure, and so is a connection that ends early.
"""

from __future__ import annotations

import http.client
import json
import sys
import threading
from collections import Counter
from time import monotonic, sleep
from typing import Any

_ROUNDS_A_CONNECTION = 10
_TIMEOUT_S = 60.0
#: The longest wait after one 429, so that a run ends in time.
_PAUSE_S_MAX = 2.0
_FAILURES_MAX = 5


class Client:
    def __init__(self, plan: dict[str, Any], number: int) -> None:
        self._port = int(plan["port"])
        self._headers = {"Authorization": f"Bearer {plan['key']}", "Content-Type": "application/json"}
        self._ends_s = monotonic() + float(plan["seconds"])
        rate = float(plan["rate"])
        self._every_s = plan["connections"] / rate if rate else 0.0
        self._log, self._queue = f"{plan['prefix']}log-{number}", f"{plan['prefix']}jobs-{number}"
        self._connection: http.client.HTTPConnection | None = None
        self.statuses: Counter[int] = Counter()
        self.failures: list[str] = []
        self.latencies_ms: list[float] = []
        self.rounds = 0

    def run(self) -> None:
        self._ask("PUT", f"/v0/boxes/{self._queue}", {"type": "queue"})
        at = 0
        due_s = monotonic()
        while monotonic() < self._ends_s:
            sleep(max(0.0, due_s - monotonic()))
            due_s = max(due_s, monotonic() - self._every_s) + self._every_s
            records = [{"data": {"n": at + each, "pad": "x" * 80}} for each in range(10)]
            reply = self._ask("POST", f"/v0/boxes/{self._log}", {"records": records})
            if reply is not None:
                at = reply["last_seq"]
                self._ask("POST", f"/v0/boxes/{self._log}/diff", {"from_seq": at - 10, "limit": 10})
            self._ask("POST", f"/v0/boxes/{self._queue}", {"records": [{"data": at}]})
            claim = self._ask("POST", f"/v0/boxes/{self._queue}/claim", {"node": "n", "max": 1})
            for job in claim["claimed"] if claim else ():
                ack = {"node": "n", "seqs": [job["$seq"]]}
                self._ask("POST", f"/v0/boxes/{self._queue}/ack", ack)
            self.rounds += 1
            if self.rounds % _ROUNDS_A_CONNECTION == 0:
                self._ask("GET", "/v0/health", None)
                self._close()
        self._close()

    def _ask(self, method: str, path: str, body: Any) -> dict[str, Any] | None:
        """Return the reply; None if the request failed, or got 429 until the end of the run."""
        text = None if body is None else json.dumps(body)
        while True:
            began_s = monotonic()
            try:
                if self._connection is None:
                    self._connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=_TIMEOUT_S)
                self._connection.request(method, path, text, self._headers)
                answer = self._connection.getresponse()
                content = answer.read()
            except (OSError, http.client.HTTPException) as error:
                self._fail(f"{method} {path}: {error!r} after {monotonic() - began_s:.1f} s")
                self._close()
                return None
            if answer.will_close:
                self._close()
            self.statuses[answer.status] += 1
            if answer.status == 429:
                wait_s = json.loads(content)["error"].get("detail", {}).get("retry_after_ms", 100) / 1000
                if monotonic() + wait_s >= self._ends_s:
                    return None
                sleep(min(wait_s, _PAUSE_S_MAX))
                continue
            if not 200 <= answer.status < 300:
                self._fail(f"{method} {path}: {answer.status} {content[:300]!r}")
                return None
            self.latencies_ms.append(1000 * (monotonic() - began_s))
            reply: dict[str, Any] = json.loads(content)
            return reply

    def _fail(self, text: str) -> None:
        self.statuses[0] += 1
        self.failures.append(text)

    def _close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None


def main() -> None:
    plan = json.loads(sys.stdin.read())
    clients = [Client(plan, number) for number in range(plan["connections"])]
    threads = [threading.Thread(target=client.run) for client in clients]
    began_s = monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    statuses: Counter[int] = sum((client.statuses for client in clients), Counter())
    failures = [failure for client in clients for failure in client.failures]
    result = {
        "seconds": monotonic() - began_s,
        "rounds": sum(client.rounds for client in clients),
        "statuses": {str(status): count for status, count in statuses.items()},
        "failures": len(failures),
        "first_failures": failures[:_FAILURES_MAX],
        "latencies_ms": sorted(round(each, 2) for client in clients for each in client.latencies_ms),
    }
    json.dump(result, sys.stdout)


if __name__ == "__main__":
    main()
