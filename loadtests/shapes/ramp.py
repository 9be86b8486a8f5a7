"""`locust -f loadtests/locustfile.py,loadtests/shapes/ramp.py --users 40 --run-time 60s`"""

from __future__ import annotations

from locust import LoadTestShape

from loadtests.shapes import ramp


class Ramp(LoadTestShape):
    use_common_options = True

    def tick(self) -> tuple[int, float] | None:
        options = self.runner.environment.parsed_options
        return ramp(self.get_run_time(), users=options.num_users or 20, seconds=options.run_time or 60)
