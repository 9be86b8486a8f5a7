"""What the commands promise beyond their examples: exit codes, streams, questions, constant memory, clean
ends.

Method: the real command against a real server, in a process of its own where signals, pipes and memory
matter.
"""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import streams
from streams.cli import ndjson_files, output
from streams.direct import Shards, Txn, pack
from streams.testing import Server, running_server
from tests.support.commands import Ran, in_process
from tests.support.crashing import eventually

STREAMS = (sys.executable, "-P", "-m", "streams")
STREAMS_SCRIPT = str(Path(sys.executable).parent / "streams")


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with running_server(shards=2) as found:
        yield found


@pytest.fixture
def client(server: Server) -> Iterator[streams.Client]:
    with streams.Client(server.url) as found:
        yield found


def test_a_verb_loads_no_package_that_makes_it_slow_to_start(server: Server) -> None:
    script = (
        f"import sys; from streams.cli import run; assert run(['ls', '--url', {server.url!r}]) == 5;"
        "print(*{name.split('.')[0] for name in sys.modules})"
    )
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    loaded = set(ran.stdout.split())
    assert {"click", "msgspec", "http"} <= loaded
    assert not loaded & {"anyio", "asyncio", "httpx2", "logging", "obstore", "rich", "tempfile", "trio"}


def _heed_ctrl_c() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)


class Shell:
    """Runs `streams` as someone would who has this server."""

    def __init__(self, url: str, folder: Path) -> None:
        kept = {name: value for name, value in os.environ.items() if not name.startswith("STREAMS_")}
        self.environ = {**kept, "STREAMS_URL": url, "XDG_CONFIG_HOME": str(folder)}
        self.folder = folder

    def __call__(self, *words: str, given: bytes = b"") -> Ran:
        return in_process(words, self.environ, self.folder, given)

    def lines(self, *words: str, given: bytes = b"") -> list[Any]:
        ran = self(*words, given=given)
        assert ran.returncode == 0, ran.stderr.decode()
        return [json.loads(line) for line in ran.stdout.splitlines()]

    def start(self, *words: str, **how: Any) -> subprocess.Popen[bytes]:
        """As a terminal starts it: Ctrl-C reaches it, also where these tests run in the background."""
        command = [*STREAMS, *words]
        return subprocess.Popen(command, env=self.environ, cwd=self.folder, preexec_fn=_heed_ctrl_c, **how)


@pytest.fixture
def shell(server: Server, tmp_path: Path) -> Shell:
    return Shell(server.url, tmp_path)


# -- exit codes


def test_refused_is_two_and_says_what_to_do(shell: Shell) -> None:
    ran = shell("read", "no-such-box")
    assert ran.returncode == 2 and ran.stdout == b""
    assert b"no-such-box" in ran.stderr and b"(box_not_found)" in ran.stderr and b"streams ls" in ran.stderr


def test_nobody_there_is_three_and_told_at_once(tmp_path: Path) -> None:
    ran = Shell("http://127.0.0.1:9", tmp_path)("ls")
    assert ran.returncode == 3
    assert b"127.0.0.1:9" in ran.stderr and b"streams serve" in ran.stderr


def test_an_answer_that_is_lost_is_four(tmp_path: Path) -> None:
    """A server that takes every request and answers none."""
    import socket
    import threading

    with socket.create_server(("127.0.0.1", 0)) as listener:

        def take() -> None:
            try:
                while True:
                    sock, _ = listener.accept()
                    sock.recv(65536)
                    sock.close()
            except OSError:
                return

        threading.Thread(target=take, daemon=True).start()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        ran = Shell(url, tmp_path)("queue", "requeue", "jobs", "--from", "dead")
        listener.shutdown(socket.SHUT_RDWR)
    assert ran.returncode == 4 and b"(answer_lost)" in ran.stderr and b"next:" in ran.stderr


def test_a_mistyped_verb_is_answered_with_the_one_that_is_meant(shell: Shell) -> None:
    for words, near in ((("wach",), b"'watch'"), (("queue", "clame"), b"'claim'"), (("rest",), b"'restore'")):
        ran = shell(*words)
        assert ran.returncode == 2 and b"did you mean " + near in ran.stderr, words
    assert b"one of append, backup" in shell("xyzzy").stderr


def test_reading_starts_at_a_time(shell: Shell, client: streams.Client) -> None:
    box = client.box("times")
    box.create(timestamping={"mode": "client-require"})
    box.append_batch([streams.Entry(day, ts=day * 86_400_000, tag=f"day-{day}") for day in (1, 2, 3)])
    since = ("--at", "1970-01-02T12:00+00:00")
    for verb in (("read", "times"), ("tail", "times"), ("watch", "times", "-n", "2"), ("export", "times")):
        assert [record["data"] for record in shell.lines(*verb, *since)] == [2, 3], verb
    assert [each["data"] for each in shell.lines("read", "times", "--at", str(3 * 86_400_000))] == [3]
    assert shell("read", "times", "--since", "1h").returncode == 5
    ran = shell("tail", "times", "--since", "1h", *since)
    assert ran.returncode == 2 and b"--since and --at each set the start" in ran.stderr
    assert b"is neither a time such as" in shell("read", "times", "--at", "noon").stderr
    found = shell.lines("watch", "times", "--from", "0", "--match", "day-3*", "-n", "1")
    assert [record["data"] for record in found] == [3]


def test_a_dry_run_counts_what_a_delete_would_take(shell: Shell, client: streams.Client) -> None:
    box = client.box("counted")
    box.append_batch([streams.Entry(n, tag=f"t{n % 2}") for n in range(2500)])
    (found,) = shell.lines("delete", "counted", "--match", "t1", "--before", "2001", "--dry-run")
    assert (found["deleted"], found["dry_run"]) == (1000, True)
    (none,) = shell.lines("delete", "counted", "--match", "nobody", "--dry-run")
    assert none["deleted"] == 0 and box.state().count == 2500
    (deleted,) = shell.lines("delete", "counted", "--match", "t1", "--before", "2001", "--yes")
    assert deleted["deleted"] == 1000


def test_a_shell_completes_the_names_of_the_server(shell: Shell, client: streams.Client) -> None:
    client.box("complete-a").create()
    client.queue("complete-b").create()
    client.put_router("complete-r", "complete-a", "complete-c")
    client.schedules.put("complete-s", "complete-a", 1, cron="@monthly")

    def completed(line: str) -> list[str]:
        words = {"_STREAMS_COMPLETE": "bash_complete", "COMP_WORDS": line, "COMP_CWORD": str(line.count(" "))}
        found = subprocess.run(
            STREAMS_SCRIPT, env={**shell.environ, **words}, capture_output=True, text=True, check=True
        )
        return [each.partition(",")[2] for each in found.stdout.splitlines() if each]

    assert completed("streams read complete-") == ["complete-a", "complete-b", "complete-c"]
    assert completed("streams queue claim complete-") == ["complete-b"]
    assert completed("streams router show complete-") == ["complete-r"]
    assert completed("streams schedule show complete-") == ["complete-s"]
    shell.environ["STREAMS_URL"] = "http://127.0.0.1:9"
    assert completed("streams read complete-") == []
    client.drop_router("complete-r")


def test_records_of_a_stream_are_shown_as_their_text(server: Server, shell: Shell) -> None:
    import httpx2

    with httpx2.Client(base_url=f"{server.url}/v1", trust_env=False) as http:
        http.post("/basins", json={"basin": "text-basin"}).raise_for_status()
        basin = {"s2-basin": "text-basin"}
        http.post("/streams", json={"stream": "st"}, headers=basin).raise_for_status()
        records = {"records": [{"body": "hello text"}]}
        http.post("/streams/st/records", json=records, headers=basin).raise_for_status()
    pid, terminal = pty.fork()
    if pid == 0:
        os.execve(STREAMS[0], [*STREAMS, "read", "text-basin/st"], shell.environ)
    shown = b""
    try:
        while piece := os.read(terminal, 4096):
            shown += piece
    except OSError:
        pass  # the terminal ends with its program
    os.waitpid(pid, 0)
    assert b"hello text" in shown


def test_nothing_to_show_is_five(shell: Shell, client: streams.Client) -> None:
    client.box("empty").create()
    for words in (("read", "empty"), ("ls", "no-such-prefix"), ("router", "ls"), ("append", "empty", "-")):
        ran = shell(*words)
        assert ran.returncode == 5 and ran.stdout == b"" and ran.stderr, words


def test_what_is_gone_for_ever_is_asked_for_or_needs_yes(shell: Shell, client: streams.Client) -> None:
    client.box("precious").append(1)
    for words in (
        ("box", "rm", "precious"),
        ("delete", "precious", "--before", "2"),
        ("box", "trim", "precious", "--keep", "0"),
    ):
        ran = shell(*words)
        assert ran.returncode == 2 and b"--yes" in ran.stderr, words
        assert client.box("precious").state().count == 1
    assert shell("box", "rm", "precious", "--yes").returncode == 0
    assert not client.box("precious").exists()
    assert shell("box", "rm", "precious", "--yes").returncode == 5


# -- records


def test_lines_go_in_and_come_out_as_they_are(shell: Shell) -> None:
    given = b'{"a": 1.0}\n\n1e400\n"text"\n[12345678901234567890123]\n'
    (said,) = shell.lines("append", "exact", "-", given=given)
    assert (said["count"], said["first_seq"], said["last_seq"]) == (4, 1, 4)
    ran = shell("read", "exact", "--data")
    assert ran.stdout == b'{"a": 1.0}\n1e400\n"text"\n[12345678901234567890123]\n'
    assert [line["$seq"] for line in shell.lines("tail", "exact", "-n", "2")] == [3, 4]


def test_a_line_that_is_not_json_is_named(shell: Shell) -> None:
    ran = shell("append", "bad-lines", "-", given=b"1\n2\nthree\n")
    assert ran.returncode == 2 and b"line 3" in ran.stderr and b"three" in ran.stderr
    ran = shell("append", "bad-lines", "three")
    assert ran.returncode == 2 and b"DATA" in ran.stderr and b"quotes" in ran.stderr


def test_whoever_must_go_on_is_told_where(shell: Shell, client: streams.Client) -> None:
    ran = shell("append", "broken-off", "-", given=b"1\n\n2\nthree\n4\n")
    assert ran.returncode == 2 and b"line 4" in ran.stderr and b"first 2 records were appended" in ran.stderr
    assert shell.lines("read", "broken-off", "--data") == [1, 2]
    client.box("filled").create(cap_records=2, discard="reject")
    words = ("append", "filled", "-", "--batch-records", "1")
    ran = shell(*words, given=b"".join(b"%d\n" % n for n in range(5000)))
    assert ran.returncode == 2 and b"(box_full)" in ran.stderr
    assert b"first 2 records were appended, and none after them" in ran.stderr
    ran = shell("append", "filled", "-", given=b"1\n")
    assert ran.returncode == 2 and b"no record was appended" in ran.stderr


def test_what_is_not_utf_8_is_named_and_not_guessed(shell: Shell, client: streams.Client) -> None:
    for words, given in (
        (("append", "latin", "-", "--text"), b"good\ncaf\xe9\n"),
        (("append", "latin", "-"), b'"good"\n"caf\xe9"\n'),
        (("import", "latin", "-", "--data"), b'"good"\n"caf\xe9"\n'),
    ):
        ran = shell(*words, given=given)
        assert ran.returncode == 2 and b"line 2" in ran.stderr and b"UTF-8" in ran.stderr, words
    for words in (("append", "latin", "caf\udce9", "--text"), ("append", "latin", '"caf\udce9"')):
        ran = shell(*words)
        assert ran.returncode == 2 and b"UTF-8" in ran.stderr
    assert all(item.data == "good" for item in client.box("latin").read())  # type: ignore[union-attr]


def test_digits_stay_as_they_were_given_wherever_they_are_shown(shell: Shell, client: streams.Client) -> None:
    digits = b"[4.50,1e400,12345678901234567890123]"
    client.box("digits.dead").create()
    client.queue("digits").create(max_deliveries=1, dead_letter="digits.dead")
    shell.lines("append", "digits", "-", given=(digits + b"\n") * 2)
    assert digits in shell("watch", "digits", "--from", "0", "-n", "1").stdout
    assert digits in shell("queue", "claim", "digits", "--node", "w").stdout
    shell.lines("queue", "nack", "digits", "1", "--node", "w")
    shell.lines("queue", "work", "digits", "--exec", "cat > seen", "--drain")
    assert (shell.folder / "seen").read_bytes() == digits + b"\n"
    assert next(client.box("digits.dead").follow())
    assert digits in shell("queue", "dead", "digits").stdout


def test_what_is_after_the_end_is_nothing(shell: Shell, client: streams.Client) -> None:
    client.box("short").append(1)
    ran = shell("read", "short", "--from", "99")
    assert ran.returncode == 5 and ran.stdout == b"" and b"short ends at seq 1" in ran.stderr


def test_a_file_or_a_disk_that_is_in_the_way_is_no_bug(shell: Shell, client: streams.Client) -> None:
    client.box("homeless").append_batch(["x" * 1000] * 100)
    ran = shell("export", "homeless", "-o", "no-such-folder/out.ndjson")
    assert ran.returncode == 2
    assert ran.stderr == b"streams: no-such-folder/out.ndjson: No such file or directory\n"
    with open("/dev/full", "wb") as full:
        reading = shell.start("read", "homeless", stdout=full, stderr=subprocess.PIPE)
    _, talk = reading.communicate(timeout=120)
    assert (reading.returncode, talk) == (2, b"streams: No space left on device\n")


def test_whole_records_and_text_can_be_given(shell: Shell) -> None:
    shell.lines("append", "whole", "-", "--records", given=b'{"data": 1, "tag": "t"}\n')
    shell.lines("append", "whole", "-", "--text", "--tag", "x", given=b"one line\n")
    found = shell.lines("read", "whole")
    assert [(line["data"], line["$tag"]) for line in found] == [(1, "t"), ("one line", "x")]
    assert [line["data"] for line in shell.lines("read", "whole", "--match", "x*")] == ["one line"]


def test_loss_is_told_on_standard_error(shell: Shell, client: streams.Client) -> None:
    client.box("capped").create(cap_records=2)
    for n in range(5):
        client.box("capped").append(n)
    ran = shell("read", "capped", "--data")
    assert ran.stdout == b"3\n4\n" and b"records 1 to 3 are gone (cap)" in ran.stderr
    client.box("capped").delete(before_seq=5)
    gaps = shell.lines("box", "gaps", "capped")
    assert gaps == [{"from": 1, "to": 4, "reason": "cap"}]


def test_an_operator_sees_and_drops_what_is_held_for_a_transaction(
    shell: Shell, client: streams.Client
) -> None:
    boxes = [f"held-{number}" for number in range(8)]
    txn = Txn("stuck", 3, "q")
    with Shards(client.url) as shards:
        for shard in range(shards.count):
            own = [box for box in boxes if shards.shard_of(box) == shard]
            shards.txn_put(shard, txn, "p", 0, pack(own, [1] * len(own), [b"1"] * len(own)))
            shards.txn_commit(shard, Txn("done", 5), [])
        assert shards.count == 2
    held, done = sorted(shell.lines("txn", "ls"), key=lambda row: row["state"], reverse=True)
    assert (held["writer"], held["epoch"], held["state"], held["records"]) == ("stuck", 3, "open", 8)
    assert (done["writer"], done["epoch"], done["state"]) == ("done", 5, "committed")
    assert shell("txn", "abort", "stuck", "4", "--yes").returncode == 5
    (aborted,) = shell.lines("txn", "abort", "stuck", "3", "--yes")
    assert aborted["bytes"] == held["bytes"]
    assert shell("txn", "abort", "stuck", "3", "--yes").returncode == 5
    assert shell("txn", "ls", "stuck").returncode == 5
    assert shell.lines("txn", "forget", "done", "--yes") == [{"writer": "done", "forgotten": True}]
    assert shell("txn", "forget", "done", "--yes").returncode == 5


def test_a_group_moves_with_commit(shell: Shell, client: streams.Client) -> None:
    client.box("grouped").append_batch([1, 2, 3])
    client.box("grouped").group("g").commit(0)
    words = ("read", "grouped", "--group", "g", "--data")
    assert shell.lines(*words, "-n", "2", "--commit") == [1, 2]
    assert shell.lines(*words, "--commit") == [3]
    assert shell(*words).returncode == 5


def test_follow_prints_what_comes_and_ends_cleanly_on_ctrl_c(shell: Shell, client: streams.Client) -> None:
    client.box("live").append(1)
    following = shell.start("tail", "live", "-f", "--data", stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert following.stdout is not None and following.stderr is not None
    assert following.stdout.readline() == b"1\n"
    client.box("live").append(2)
    assert following.stdout.readline() == b"2\n"
    following.send_signal(signal.SIGINT)
    assert following.wait(60) == 130
    assert following.stderr.read() == b""
    following.stdout.close()
    following.stderr.close()


def test_a_reader_that_has_enough_is_no_error(shell: Shell, client: streams.Client) -> None:
    client.box("long").append_batch(list(range(10_000)))
    line = f"{' '.join(STREAMS)} read long --data | head -1"
    ran = subprocess.run(
        ["bash", "-o", "pipefail", "-c", line], env=shell.environ, capture_output=True, timeout=120
    )
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, b"0\n", b"")


def test_ctrl_c_in_the_middle_of_an_append_keeps_what_was_taken(shell: Shell, client: streams.Client) -> None:
    appending = shell.start(
        "append", "cut", "-", stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert appending.stdin is not None and appending.stderr is not None and appending.stdout is not None
    appending.stdin.write(b"1\n2\n3\n")
    appending.stdin.flush()
    eventually(lambda: client.box("cut").exists() and client.box("cut").state().count == 3)
    appending.send_signal(signal.SIGINT)
    assert appending.wait(60) == 130
    assert b"Traceback" not in appending.stderr.read()
    for pipe in (appending.stdin, appending.stdout, appending.stderr):
        pipe.close()
    assert [item.data for item in client.box("cut").read()] == [1, 2, 3]  # type: ignore[union-attr]


def _peak_kib(command: list[str], environ: dict[str, str], **how: Any) -> int:
    """The most memory that the command ever had, as the kernel counted it."""
    with subprocess.Popen(command, env=environ, **how) as process:
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0
    return int(usage.ru_maxrss)


def test_memory_does_not_grow_with_the_input_or_the_box(
    shell: Shell, client: streams.Client, tmp_path: Path
) -> None:
    peaks: dict[str, list[int]] = {"append": [], "read": []}
    for count in (20_000, 200_000):
        source = tmp_path / f"{count}.ndjson"
        with open(source, "wb") as file:
            file.writelines(b'{"n": %d, "pad": "%b"}\n' % (n, b"x" * 200) for n in range(count))
        with open(source, "rb") as file, open(os.devnull, "wb") as nowhere:
            command = [*STREAMS, "append", f"flood.{count}", "-"]
            peaks["append"].append(_peak_kib(command, shell.environ, stdin=file, stdout=nowhere))
        assert client.box(f"flood.{count}").state().count == count
        with open(os.devnull, "wb") as nowhere:
            command = [*STREAMS, "read", f"flood.{count}"]
            peaks["read"].append(_peak_kib(command, shell.environ, stdout=nowhere))
        client.box(f"flood.{count}").drop()
    # 180,000 more records of 230 bytes are 40 MB more; what is held on the way is bounded by 16 MiB.
    for verb, (small, large) in peaks.items():
        assert large - small < 20 * 1024, f"{verb}: {small} KiB for a tenth, {large} KiB for all"


# -- archives


def test_an_export_goes_on_where_it_was_cut(shell: Shell, client: streams.Client) -> None:
    client.box("source").append_batch([streams.Entry(n, tag=f"t{n}", meta={"m": n}) for n in range(10)])
    assert shell.lines("export", "source", "-o", "out.ndjson")[0]["records"] == 10
    path = shell.folder / "out.ndjson"
    whole = path.read_bytes()
    lines = whole.splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:4]) + lines[4][:7])
    assert shell("export", "source", "-o", "out.ndjson").returncode == 2
    assert shell.lines("export", "source", "-o", "out.ndjson", "--resume")[0]["records"] == 6
    assert path.read_bytes() == whole
    assert shell.lines("import", "restored", "out.ndjson")[0]["records"] == 10
    found = shell.lines("read", "restored")
    assert [(line["data"], line["$tag"], line["meta"]) for line in found] == [
        (n, f"t{n}", {"m": n}) for n in range(10)
    ]


def test_an_import_that_was_killed_goes_on_and_doubles_nothing(
    shell: Shell, client: streams.Client, tmp_path: Path
) -> None:
    """Killed between the write and its note: the note says that a write is pending, with its key."""
    source = tmp_path / "in.ndjson"
    source.write_bytes(b"".join(b'{"data": %d}\n' % n for n in range(12_000)))
    importing = shell.start("import", "imported", "in.ndjson", stdout=subprocess.DEVNULL)
    eventually(lambda: client.box("imported").exists() and client.box("imported").state().count >= 5000)
    importing.kill()
    importing.wait(60)
    note = list(tmp_path.glob("in.ndjson.import-*"))
    if note:  # else it was done before it was killed
        assert shell("import", "imported", "in.ndjson").returncode == 2
        assert shell.lines("import", "imported", "in.ndjson", "--resume")[0]["records"] == 12_000
    assert [item.data for item in client.box("imported").read()] == list(range(12_000))  # type: ignore[union-attr]
    assert not list(tmp_path.glob("in.ndjson.import-*"))


def test_an_import_stops_at_a_bad_line_and_goes_on_when_it_is_mended(
    shell: Shell, client: streams.Client
) -> None:
    lines = [b'{"data": %d}\n' % n for n in range(6000)]
    source = shell.folder / "mended.ndjson"
    source.write_bytes(b"".join([*lines[:5500], b"\n", b"{bad\n", *lines[5501:]]))
    ran = shell("import", "mended", "mended.ndjson")
    assert ran.returncode == 2 and b"line 5502: '{bad'" in ran.stderr
    assert b"5000 records were imported, up to line 5000" in ran.stderr and b"--resume" in ran.stderr
    source.write_bytes(b"".join(lines))
    assert shell.lines("import", "mended", "mended.ndjson", "--resume")[0]["records"] == 6000
    ran = shell("import", "mended", "mended.ndjson", "--resume")
    assert ran.returncode == 2 and b"no interrupted import of mended.ndjson" in ran.stderr, (
        "it would be doubled"
    )
    assert [item.data for item in client.box("mended").read()] == list(range(6000))  # type: ignore[union-attr]


def test_a_pipe_is_imported_as_standard_input(shell: Shell) -> None:
    os.mkfifo(shell.folder / "pipe")
    ran = shell("import", "piped", "pipe")
    assert ran.returncode == 2 and b"use - as SOURCE" in ran.stderr
    assert shell.lines("import", "piped", "-", given=b'{"data": 1}\n') == [{"box": "piped", "records": 1}]


def test_an_import_that_was_refused_is_not_uncertain_later(shell: Shell, client: streams.Client) -> None:
    client.box("crowded").create(cap_records=3, discard="reject")
    client.box("crowded").append_batch([-1, 0])
    (shell.folder / "two.ndjson").write_bytes(b'{"data": 1}\n{"data": 2}\n')
    ran = shell("import", "crowded", "two.ndjson")
    assert ran.returncode == 2 and b"(box_full)" in ran.stderr and b"--resume" in ran.stderr
    (note,) = shell.folder.glob("two.ndjson.import-*")
    assert json.loads(note.read_bytes())["pending_since_ms"] is None
    client.box("crowded").configure(cap_records=4)
    assert shell.lines("import", "crowded", "two.ndjson", "--resume")[0]["records"] == 2


def test_an_export_of_another_box_is_not_gone_on_with(shell: Shell, client: streams.Client) -> None:
    client.box("reborn").append_batch([1, 2, 3])
    shell.lines("export", "reborn", "-o", "reborn.ndjson")
    client.box("reborn").drop()
    client.box("reborn").append(1)
    ran = shell("export", "reborn", "-o", "reborn.ndjson", "--resume")
    assert ran.returncode == 2 and b"another box" in ran.stderr


def test_an_import_whose_outcome_nobody_can_know_any_more_is_uncertain(
    shell: Shell, client: streams.Client, tmp_path: Path
) -> None:
    import hashlib

    client.box("unknown").create()
    (tmp_path / "in.ndjson").write_bytes(b'{"data": 1}\n')
    note = tmp_path / f"in.ndjson.import-{hashlib.sha256(b'unknown').hexdigest()[:8]}"
    note.write_text('{"offset": 0, "count": 0, "key": "k", "pending_since_ms": 1}')
    ran = shell("import", "unknown", "in.ndjson", "--resume")
    assert ran.returncode == 4 and b"streams tail unknown" in ran.stderr
    assert client.box("unknown").state().count == 0


@pytest.mark.parametrize(
    "text",
    [
        "[]",
        "{}",
        '{"offset": "x", "count": 0, "key": "k", "pending_since_ms": null}',
        '{"offset": -1, "count": 0, "key": "k", "pending_since_ms": null}',
        '{"offset": 0, "count": 0, "key": "../k", "pending_since_ms": null}',
        '{"offset": 0, "count": 0, "key": 5, "pending_since_ms": null}',
        '{"offset": 0, "count": 0, "key": "k", "pending_since_ms": true}',
        '{"offset": 0, "count": 0, "key": "k", "pending_since_ms": null, "more": 1}',
    ],
)
def test_a_note_that_no_import_wrote_is_refused(tmp_path: Path, text: str) -> None:
    place = ndjson_files._Checkpoint(tmp_path / "in.ndjson", "box")
    place.path.write_text(text)
    with pytest.raises(output.Refusal, match="is not a valid import checkpoint"):
        place.load()


def test_a_note_is_not_written_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "victim").write_text("as it was")
    place = ndjson_files._Checkpoint(tmp_path / "in.ndjson", "box")
    place.path.with_name(place.path.name + ".new").symlink_to(tmp_path / "victim")
    with pytest.raises(OSError):
        place.save(ndjson_files._new_progress())
    assert (tmp_path / "victim").read_text() == "as it was"


# -- queues and the rest


def test_work_runs_a_command_for_each_job(shell: Shell, client: streams.Client) -> None:
    queue = client.queue("chores")
    queue.create(max_deliveries=1, dead_letter="chores.dead")
    queue.append_batch(["a", "b"])
    ran = shell("queue", "work", "chores", "--exec", "cat >> seen; echo $STREAMS_JOB_SEQ >> seqs", "--drain")
    assert ran.returncode == 0, ran.stderr
    assert (shell.folder / "seen").read_text() == '"a"\n"b"\n'
    assert (shell.folder / "seqs").read_text() == "1\n2\n"
    assert shell("queue", "work", "chores", "--exec", "true", "--drain").returncode == 5


def test_work_ends_when_all_that_is_left_has_failed(shell: Shell, client: streams.Client) -> None:
    client.queue("hopeless").create(max_deliveries=1, dead_letter="hopeless.dead")
    assert shell("queue", "requeue", "hopeless").returncode == 5, "a box that no letter has made yet"
    assert shell("queue", "redrive", "hopeless").returncode == 5, "the alias of requeue"
    client.queue("hopeless").append_batch([1, 2])
    ran = shell("queue", "work", "hopeless", "--exec", "false", "--drain", "--concurrency", "2")
    assert ran.returncode == 0 and json.loads(ran.stdout) == {"done": 0, "given_back": 2, "lost": 0}


def test_ctrl_c_lets_the_job_at_work_finish(shell: Shell, client: streams.Client) -> None:
    queue = client.queue("slow-chores")
    queue.create(lease_ms=300)
    queue.append_batch(["a", "b"])
    # The command ends when the test lets it: it waits for somebody to write into the pipe.
    os.mkfifo(shell.folder / "gate")
    command = "echo begun > begun; cat gate; echo done > done"
    working = shell.start(
        "queue", "work", "slow-chores", "--exec", command, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    eventually((shell.folder / "begun").exists)
    working.send_signal(signal.SIGINT)
    (other,) = queue.claim("rival", max=2, lease_ms=60_000)
    assert other.data == "b", "no other job is begun"
    assert queue.claim("rival", wait_ms=1200) == [], "four leases long the job stays with its worker"
    (shell.folder / "gate").write_text("go\n")
    out, talk = working.communicate(timeout=60)
    assert working.returncode == 0 and b"Traceback" not in talk
    assert json.loads(out.splitlines()[-1]) == {"done": 1, "given_back": 0, "lost": 0}
    assert (shell.folder / "done").exists()


def test_acking_what_is_not_yours_is_refused(shell: Shell, client: streams.Client) -> None:
    queue = client.queue("owned")
    queue.create()
    queue.append(1)
    (job,) = shell.lines("queue", "claim", "owned", "--node", "w1")
    assert shell("queue", "ack", "owned", str(job["$seq"]), "--node", "w2").returncode == 2
    words = ("queue", "ack", "owned", str(job["$seq"]), "--node", "w1", "--lease-id", job["lease_id"])
    assert shell.lines(*words) == [{"acked": 1, "skipped": []}]


def test_box_settings_have_units_and_edit_needs_a_box(shell: Shell, client: streams.Client) -> None:
    words = ("--ttl", "7d", "--cap-bytes", "1.5MiB", "--no-auto-create", "--timestamping", "client-prefer")
    (made,) = shell.lines("box", "create", "tuned", *words)
    config = made["config"]
    assert (config["ttl_ms"], config["cap_bytes"], config["auto_create"]) == (604_800_000, 1_572_864, False)
    assert config["timestamping"] == {"mode": "client-prefer", "uncapped": False}
    assert shell("box", "edit", "never-made", "--ttl", "1s").returncode == 2
    assert not client.box("never-made").exists()
    assert shell("box", "edit", "tuned").returncode == 2
    assert b"7y" in shell("box", "edit", "tuned", "--ttl", "7y").stderr


def test_settings_that_take_records_away_are_asked_for(shell: Shell, client: streams.Client) -> None:
    client.box("roomy").append_batch([1, 2, 3])
    for words in (("--cap-records", "2"), ("--cap-bytes", "9"), ("--ttl", "1d"), ("--compact", "tag")):
        for verb in ("edit", "create"):
            ran = shell("box", verb, "roomy", *words)
            assert ran.returncode == 2 and b"3 records" in ran.stderr and b"--yes" in ran.stderr, words
    assert client.box("roomy").state().count == 3
    shell.lines("box", "edit", "roomy", "--cap-records", "3", "--cap-bytes", "1MiB", "--priority", "1")
    shell.lines("box", "edit", "roomy", "--ttl", "1d", "--yes")
    shell.lines("box", "edit", "roomy", "--ttl", "2d")
    shell.lines("box", "edit", "roomy", "--cap-records", "2", "--yes")
    assert client.box("roomy").state().count == 2


def test_doctor_says_what_is_wrong_and_what_to_do(tmp_path: Path) -> None:
    with running_server(tmp_path / "data", shards=2) as server:
        shell = Shell(server.url, tmp_path)
        rows = [json.loads(line) for line in shell("doctor").stdout.splitlines()]
        # How long a round trip takes is the machine's to say.
        assert {row["result"] for row in rows if "round trip" not in row["found"]} == {"ok"}
    ran = shell("doctor")
    assert ran.returncode == 1
    (row,) = [json.loads(line) for line in ran.stdout.splitlines()]
    assert (row["check"], row["result"]) == ("address", "wrong") and "streams serve" in row["next"]


def test_status_shows_the_server_and_each_of_its_processes(shell: Shell, server: Server) -> None:
    (found,) = shell.lines("status")
    assert (found["status"], found["url"]) == ("ready", server.url)
    pids = {str(pid) for pid in (*server.shard_pids().values(), *server.gateway_pids().values())}
    assert {each["pid"] for each in found["processes"]} == pids


def test_contexts_say_which_server(shell: Shell, server: Server) -> None:
    del shell.environ["STREAMS_URL"]
    (made,) = shell.lines("context", "add", "here", server.url, "--key", "s3cret", "--use")
    assert made == {"name": "here", "url": server.url, "key": "(set)", "in_use": True}
    assert shell.lines("status")[0]["url"] == server.url
    assert oct((shell.folder / "streams" / "contexts.json").stat().st_mode)[-3:] == "600"
    assert shell("status", "--context", "nowhere").returncode == 2
    assert shell("context", "add", "bad", "localhost:4000").returncode == 2
    assert shell.lines("context", "use", "local")[0]["name"] == "local"
    assert shell.lines("context", "rm", "here", "--yes") == [{"name": "here", "deleted": True}]
    assert [row["name"] for row in shell.lines("context", "ls")] == ["local"]


# -- a terminal


def on_a_terminal(shell: Shell, *words: str, typed: bytes = b"") -> tuple[int, str]:
    """Exit code, and what a person sees who types this when something is asked."""
    ours, theirs = pty.openpty()
    running = shell.start(*words, stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    text = b""
    try:
        while piece := os.read(ours, 65536):
            text += piece
            if typed and b"[y/N]" in text:
                os.write(ours, typed)
                typed = b""
    except OSError:  # the other end is closed
        pass
    os.close(ours)
    return running.wait(60), text.decode()


def test_a_terminal_gets_a_table_and_json_when_it_asks(shell: Shell, client: streams.Client) -> None:
    client.box("seen-by-people").append(1)
    for words, wanted in (
        (("ls", "seen-by"), "durability"),
        (("ls", "seen-by", "--json"), '"durability":"disk"'),
    ):
        code, text = on_a_terminal(shell, *words)
        assert code == 0 and wanted in text
        assert ("{" in text) == ("--json" in words)


def test_people_can_read_records_times_and_sizes(shell: Shell, client: streams.Client) -> None:
    box = client.box("for-people")
    box.append({"a": "\u009b31m"}, tag="kitchen", meta={"why": 1})
    box.append("x" * 3000)
    code, text = on_a_terminal(shell, "read", "for-people")
    year = time.strftime("%Y-", time.localtime(box.record(1).ts / 1000))
    assert code == 0 and "seq" in text and "kitchen" in text and year in text and '{"why":1}' in text
    assert "\\u009b31m" in text and "\u009b" not in text, "what is stored does not steer the terminal"
    assert "$seq" not in text and "$seq" in on_a_terminal(shell, "read", "for-people", "--json")[1]
    assert on_a_terminal(shell, "read", "for-people", "--data", "-n", "1")[1].startswith('{"a"')
    shown = on_a_terminal(shell, "box", "show", "for-people")[1]
    assert "3.0 KiB" in shown and year in shown and str(box.state().generation) in shown


def test_a_question_is_answered_at_a_terminal(shell: Shell, client: streams.Client) -> None:
    client.box("asked-for").append(1)
    code, text = on_a_terminal(shell, "box", "rm", "asked-for", typed=b"n\n")
    assert code == 2 and "1 records" in text and "nothing was changed" in text
    assert on_a_terminal(shell, "box", "rm", "asked-for", typed=b"\x04")[0] == 130, "Ctrl-D is no answer"
    assert client.box("asked-for").exists()
    assert on_a_terminal(shell, "box", "rm", "asked-for", typed=b"y\n")[0] == 0
    assert not client.box("asked-for").exists()
