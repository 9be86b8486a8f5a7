"""Goal: the official SDKs work as they are installed, pointed at this server (s2 §2, §20).

Method: the Python package in this process; the npm package in Node, installed by the test. `make suites` runs
all tests of both SDKs.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
from pathlib import Path

import pytest
from s2_sdk import (
    S2,
    AppendInput,
    Batching,
    CommandRecord,
    Compression,
    Endpoints,
    FencingTokenMismatchError,
    Record,
    Retry,
    SeqNum,
)

from streams.testing import Server, running_server
from tests.s2.conftest import Client
from tests.support.s2_typescript import installed


@pytest.mark.parametrize("compression", ["none", "gzip", "zstd"])
def test_the_python_sdk_appends_reads_follows_and_fences(
    server: Server, client: Client, compression: str
) -> None:
    async def main() -> list[bytes]:
        endpoints = Endpoints(account=server.url, basin=server.url)
        async with S2("ignored", endpoints=endpoints, compression=Compression(compression)) as s2:
            basin = await s2.create_basin(client.basin)
            await s2.basin(basin.name).create_stream("s")
            stream = s2.basin(basin.name).stream("s")
            ack = await stream.append(AppendInput(records=[CommandRecord.fence("mine")]))
            assert (ack.start.seq_num, ack.end.seq_num) == (0, 1)
            with pytest.raises(FencingTokenMismatchError):
                await stream.append(AppendInput(records=[Record(body=b"no")], fencing_token="other"))
            async with stream.producer(fencing_token="mine", batching=Batching(max_records=7)) as producer:
                tickets = [await producer.submit(Record(body=b"%d" % number * 500)) for number in range(50)]
                assert [(await ticket).seq_num for ticket in tickets] == list(range(1, 51))
            found: list[bytes] = []
            async for batch in stream.read_session(start=SeqNum(1)):
                found += [record.body for record in batch.records]
                if len(found) == 50:
                    await stream.append(AppendInput(records=[Record(body=b"last")]))
                if found[-1:] == [b"last"]:
                    break
            assert (await stream.check_tail()).seq_num == 52
            return found

    assert asyncio.run(main()) == [b"%d" % number * 500 for number in range(50)] + [b"last"]


SCRIPT = """
import { S2, AppendInput, AppendRecord } from "@s2-dev/streamstore";
const [url, name] = process.argv.slice(2);
const s2 = new S2({ accessToken: "ignored", endpoints: { account: url, basin: url } });
await s2.basins.create({ basin: name });
const basin = s2.basin(name);
await basin.streams.create({ stream: "s" });
const out = [];
for (const forceTransport of ["s2s", "fetch"]) {
  const stream = basin.stream("s", { forceTransport });
  const session = await stream.appendSession();
  const tickets = [];
  for (let i = 0; i < 20; i++) {
    const record = AppendRecord.string({ body: `${forceTransport}-${i}` });
    tickets.push(await session.submit(AppendInput.create([record])));
  }
  for (const ticket of tickets) await ticket.ack();
  await session.close();
  const reading = await stream.readSession(
    { start: { from: { seqNum: 0 } }, stop: { limits: { count: 20 + out.length } } });
  const found = [];
  for await (const record of reading) found.push(record.body);
  out.splice(0, out.length, ...found);
}
console.log(JSON.stringify(out));
process.exit(0);
"""


@pytest.mark.skipif(shutil.which("npm") is None, reason="there is no npm here")
def test_the_typescript_sdk_appends_and_reads_over_both_of_its_transports(
    server: Server, client: Client
) -> None:
    folder = installed()
    script = folder / "session.mjs"
    script.write_text(SCRIPT)
    ran = subprocess.run(
        ["node", str(script), server.url, client.basin], capture_output=True, text=True, timeout=120
    )
    assert ran.returncode == 0, ran.stderr
    expected = [f"{transport}-{number}" for transport in ("s2s", "fetch") for number in range(20)]
    assert json.loads(ran.stdout.splitlines()[-1]) == expected


def test_a_session_goes_on_through_the_death_of_its_shard(tmp_path: Path) -> None:
    """What the SDK sends again may be there twice, for it sets no condition; nothing acked is missing,
    and what it was told stands where it was told. It has got everything before the shard dies: 0.13 forgets
    what it takes in the moment in which its attempt ends, and waits for the ack of it for ever."""

    async def main(server: Server) -> None:
        endpoints = Endpoints(account=server.url, basin=server.url)
        patient = Retry(max_attempts=100)
        async with S2("ignored", endpoints=endpoints, retry=patient) as s2:
            await s2.create_basin("mortal-basin")
            await s2.basin("mortal-basin").create_stream("s")
            stream = s2.basin("mortal-basin").stream("s")
            told: dict[int, bytes] = {}
            async with stream.append_session() as session:
                tickets = []
                for number in range(200):
                    body = b"%d %s" % (number, bytes(20_000))
                    given = AppendInput(records=[Record(body=body)])
                    tickets.append((body, await session.submit(given)))
                await tickets[50][1]
                os.kill(server.shard_pids()[0], signal.SIGKILL)
                for body, ticket in tickets:
                    told[(await ticket).start.seq_num] = body
            assert len(told) == 200
            found: dict[int, bytes] = {}
            async for batch in stream.read_session(start=SeqNum(0), wait=0):
                found.update((record.seq_num, record.body) for record in batch.records)
            assert list(found) == list(range(len(found)))
            assert {seq_num: found[seq_num] for seq_num in told} == told

    with running_server(tmp_path, shards=1) as server:
        asyncio.run(main(server))
