"""`make schedulers`: runs the Airflow and Dagster blocks of docs/howto/pipelines.md against a server.

Both packages have a hundred dependencies, and some disagree with ours, so they get an environment of their
own in build/. `make test` only compiles the blocks.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

import streams
from streams.client.answers import Record
from streams.testing import running_server

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "howto" / "pipelines.md"
HOME = ROOT / "build" / "schedulers"
PACKAGES = ["apache-airflow>=3.1,<4", "dagster>=1.12,<2"]


def blocks() -> dict[str, str]:
    """Return the Python blocks of the page by the file name in their first line."""
    texts = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    return {text.partition("\n")[0].removeprefix("# "): text for text in texts}


def main() -> int:
    python = HOME / "bin" / "python"
    if not python.exists():
        venv.create(HOME, with_pip=True)
    subprocess.run([python, "-m", "pip", "install", "--quiet", *PACKAGES], check=True)
    with tempfile.TemporaryDirectory(prefix="schedulers-") as text, running_server(shards=1) as server:
        folder = Path(text)
        for name, block in blocks().items():
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_text(block)
        (folder / "pipeline.toml").write_text('name = "hourly"\n[[job]]\njob = "audit"\nboxes = ["orders"]\n')
        with streams.Client(server.url) as client:
            client.box("orders").append_batch([{"n": n} for n in range(3)])
            environ = {
                **os.environ,
                "PATH": f"{HOME / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}",
                "STREAMS_URL": server.url,
                "PIPELINE": str(folder / "pipeline.toml"),
                "AIRFLOW_HOME": str(folder),
                "AIRFLOW__CORE__LOAD_EXAMPLES": "false",
                "DAGSTER_HOME": str(folder),
            }
            commands = {
                "airflow": ["airflow db migrate", "airflow dags test streams_hourly"],
                "dagster": ["dagster asset materialize -f streams_hourly.py --select streams_hourly"],
            }
            for number, (title, lines) in enumerate(commands.items(), 1):
                for line in lines:
                    subprocess.run(line.split(), env=environ, cwd=folder, check=True, timeout=600)
                runs = [each.data for each in client.box("pipeline.runs").read() if isinstance(each, Record)]
                assert [each["state"] for each in runs] == ["done"] * number, (title, runs)
                print(f"{title}: the pipeline has run, {runs[-1]['duration_ms']} ms", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
