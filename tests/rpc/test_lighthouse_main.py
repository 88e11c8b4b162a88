"""The lighthouse's command line: bad flags are one line and exit code 2; a good start says where it listens, and needs no torch."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import urllib.request
from contextlib import closing, suppress
from functools import partial
from pathlib import Path

import grpc
import pytest

from ft.protocol import messages as m
from ft.rpc import codec, lighthouse_flags, lighthouse_main, state_file, stderr_log
from ft.rpc.generated import pharos_pb2
from tests.rpc.test_abuse import Running
from tests.rpc.wire import ROOT, TOKEN, WAIT_S, Stream, Wire, quorum_of, refused

N = ["--min_replicas", "1"]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ([], "--min_replicas is missing"),
        (["--min_replicas", "0"], "--min_replicas: 0: must be a whole number from 1"),
        (["--min_replicas", "-1"], "--min_replicas: -1: must be a whole number from 1"),
        (["--min_replicas", "x"], "--min_replicas: x: must be a whole number from 1"),
        ([*N, "--quorum_tick_ms", "0"], "--quorum_tick_ms: 0: must be a whole number from 1"),
        ([*N, "--quorum_tick_ms", "5001"], "--quorum_tick_ms: 5001: must be a whole number from 1 to 5000"),
        ([*N, "--takeover_s", "0"], "--takeover_s: 0: must be seconds above 0, up to 86400, or never"),
        ([*N, "--takeover_s", "29"], "--takeover_s 29: must be at least --heal_grace_s, 30, or never"),
        (
            [*N, "--heartbeat_timeout_ms", "30000"],
            "--heartbeat_timeout_ms 30000: must be below --heal_grace_s, 30 s, so that",
        ),
        ([*N, "--stall_s", "never"], "--stall_s: never: must be seconds above 0, up to 86400"),
        ([*N, "--num_replica_groups", "-1"], "--num_replica_groups: -1: must be a whole number from 0"),
        ([*N, "--bind", "here"], "--bind here: must be HOST:PORT"),
        ([*N, "--bind", "127.0.0.1:99999"], "must be HOST:PORT"),
        (
            [*N, "--bind", "0.0.0.0:0"],
            "--bind 0.0.0.0:0: others could reach it, and there is no token; nearest: --bind 127.0.0.1:0",
        ),
        ([*N, "--bind", "127.0.0.1:0", "--http", "0.0.0.0:0"], "--http 0.0.0.0:0: others could reach it"),
        ([*N, "--bind", "127.0.0.1:0", "--tls_cert", "none.pem"], "--tls_cert none.pem: no such file"),
        ([*N, "--bind", "127.0.0.1:0", "--tls_cert", __file__], "--tls_key is missing"),
        ([*N, "--bind", "127.0.0.1:0", "--tls_cert", __file__, "--tls_key", __file__], "TLS with"),
        ([*N, "--bind", "127.0.0.1:0", "--token_file", "none"], "no token in none"),
        ([*N, "--min_replica", "1"], "unrecognized arguments: --min_replica"),
    ],
)
def test_a_bad_flag_is_one_line(flags: list[str], said: str, capsys: pytest.CaptureFixture[str]):
    assert lighthouse_main.main(flags) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("lighthouse: ") and said in line


def test_the_usage_names_every_flag():
    flags = {f"--{name}" for name in vars(lighthouse_flags.parser().parse_args([]))}
    assert set(re.findall(r"--[a-z_]+", lighthouse_flags.parser().format_help())) == flags


def test_a_short_token_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "token").write_text("short\n")
    assert lighthouse_main.main([*N, "--token_file", str(tmp_path / "token")]) == 2
    monkeypatch.setenv("PHAROS_TOKEN", "two words of sixteen")
    assert lighthouse_main.main(N) == 2
    assert capsys.readouterr().err.count("at least 16 printable characters without spaces") == 2


def test_where_it_listens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Asked for, or with a token everywhere, else on loopback alone."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "token").write_text(f"{TOKEN}\n")

    def read(*flags: str) -> lighthouse_flags.LighthouseOptions:
        return lighthouse_flags.read_options([*N, *flags], try_to_listen=lambda *_: None)

    def at(*flags: str) -> list[str]:
        return [str(place) for place in read(*flags).at]

    assert at("--token_file", "token") == at("--insecure") == ["[::]:29510"]
    assert at()[0] == "127.0.0.1:29510" and set(at()[1:]) <= {"[::1]:29510"}
    assert at("--bind", "localhost:0") == ["localhost:0"]
    assert read("--heal_grace_s", "20").config.times == m.Timeouts(heal_grace_s=20.0)
    options = read("--takeover_s", "never", "--http", "none")
    assert options.config.times.takeover_s is None and options.http == [] and not options.lower_limits
    options = read("--stall_s", "90", "--num_replica_groups", "3", "--lower_terms")  # its former name
    assert (
        options.config.times.stall_s == 90 and options.config.limits == m.JobLimits(1, 30.0, 3) and options.lower_limits
    )
    config = read().config
    assert (config.join_timeout_s, config.tick_s, config.times) == (60.0, 0.1, m.Timeouts())


def test_from_start_to_end_with_token_page_and_state(tmp_path: Path):
    (tmp_path / "token").write_text(TOKEN)
    flags = ["--token_file", "token", "--state_file", "state.json", "--http", "127.0.0.1:0"]
    with closing(Running(tmp_path, *flags)) as one:
        wire = Wire(one.address, TOKEN)
        stream = Stream(wire, "a:1")
        stream.beat()
        quorum = quorum_of(wire.pharos(m.Call(m.Member("a:1"))))
        stream.beat(step=m.STEPS_PER_BRANCH + 3, phase="training", mean_loss=1.25)
        assert state_file.read(tmp_path / "state.json") == m.PersistentState(
            quorum.epoch, 1, 0, "pharos", quorum, m.JobLimits()
        )
        token = {"Authorization": f"Bearer {TOKEN}"}
        assert [one.get(path)[0] for path in ("/status.json", "/metrics")] == [401, 401]
        status = json.loads(one.get("/status.json", **token)[1])
        assert [member["replica_id"] for member in status["quorum"]["members"]] == ["a:1"]
        assert status["reports"]["a:1"]["phase"] == "training" and status["streams"] == 1
        metrics = one.get("/metrics", **token)[1]
        assert "pharos_quorum_members 1.0" in metrics and 'pharos_loss{replica="a:1"} 1.25' in metrics
        assert "pharos_live_members 1.0" in metrics
        assert 'pharos_step{replica="a:1"} 3.0' in metrics, "as on the page: the step of the branch"
        assert "pharos_refusals_total 0.0" in metrics
        stranger = Wire(one.address, "another token")
        assert stranger.code("/pharos.Lighthouse/Quorum", b"")[0] == "UNAUTHENTICATED"
        wire.send("/pharos.Lighthouse/Leave", codec.to_message(m.Leave("a:1", reason="gone")).SerializeToString())
        assert refused(lambda: wire.pharos(m.Call(m.Member("a:1"))).result(WAIT_S))[0] == "ABORTED"
        metrics = one.get("/metrics", **token)[1]
        assert "pharos_refusals_total 1.0" in metrics, "who returns after a loss is no stranger"
        assert "pharos_quorum_members 1.0" in metrics and "pharos_live_members 0.0" in metrics
        stranger.close()
        stream.close()
        wire.close()
    assert one.process.stdout and one.process.stdout.read() == f"http://{one.page}\nFalse\n", "its page; no torch"


def test_who_needs_only_the_first_line_may_go(tmp_path: Path):
    """A shell's `read address < pipe` closes the pipe then; the address of the dashboard comes later."""
    command = [sys.executable, str(ROOT / "ft" / "rpc" / "lighthouse_main.py"), *N, "--bind", "127.0.0.1:0"]
    errors = tmp_path / "errors"
    with (
        errors.open("wb") as stderr,
        subprocess.Popen([*command, "--http", "127.0.0.1:0"], stdout=subprocess.PIPE, stderr=stderr) as process,
    ):
        assert process.stdout and process.stdout.readline().startswith(b"http://")
        process.stdout.close()
        while not (found := re.search(r"http://\S+/status\.json", errors.read_text())):
            assert process.poll() is None, errors.read_text()
        with urllib.request.urlopen(found[0], timeout=WAIT_S) as answer:  # given once the address was printed
            assert answer.status == 200
        process.terminate()
    assert process.returncode == 0 and "Traceback" not in errors.read_text()


def test_a_stderr_that_nobody_reads_holds_up_no_call_and_no_end(tmp_path: Path):
    """Messages that do not fit are dropped, and their number is written once the pipe is read again."""
    os.mkfifo(path := tmp_path / "stderr")
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # does not wait for a writer
    filler, writer = os.open(path, os.O_WRONLY | os.O_NONBLOCK), os.open(path, os.O_WRONLY)
    os.set_blocking(reader, True)

    def fill() -> None:
        with suppress(BlockingIOError):
            while True:
                os.write(filler, bytes(4096))

    fill()
    flags = [*N, "--bind", "127.0.0.1:0", "--http", "none"]
    command = [sys.executable, "-m", "ft.rpc.lighthouse_main", *flags]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=writer, text=True, cwd=ROOT)
    assert process.stdout
    wire = Wire(process.stdout.readline().strip())
    evict = partial(wire.send, "/pharos.Lighthouse/Evict", pharos_pb2.Evict(replica_id="a:1").SerializeToString())
    for _ in range(stderr_log.MAX_MESSAGES + 3):
        evict()
    text = b""
    while b" messages before the next are missing" not in text:
        evict()
        text += os.read(reader, 1 << 16)
    fill()
    evict()
    wire.close()
    process.terminate()
    assert process.wait(WAIT_S) == 0
    process.communicate()
    for end in (reader, filler, writer):
        os.close(end)


HANGS = """
import sys, threading
from ft.rpc import lighthouse_main
from ft.rpc.state_file import StateFileWriter
StateFileWriter.write_file = staticmethod(lambda *_: print("writes", flush=True) or threading.Event().wait())
lighthouse_main.AGAIN_S = 0.0
sys.exit(lighthouse_main.main(sys.argv[1:]))
"""


def test_a_second_signal_ends_one_whose_disk_hangs(tmp_path: Path):
    flags = [*N, "--bind", "127.0.0.1:0", "--state_file", str(tmp_path / "state.json")]
    with subprocess.Popen(
        [sys.executable, "-c", HANGS, *flags], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        assert process.stdout
        with closing(Wire(process.stdout.readline().strip())) as wire:
            asked = wire.pharos(m.Call(m.Member("a:1")))
            while process.stdout.readline() != "writes\n":  # the dashboard's address may come before
                assert process.poll() is None
            process.send_signal(signal.SIGTERM)
            assert asked.exception(WAIT_S), "the server stops"
        process.send_signal(signal.SIGINT)
        try:
            assert process.wait(20) == 128 + signal.SIGINT
        finally:
            process.kill()


def test_its_state_is_where_runs_live(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    flags = [*N, "--bind", "127.0.0.1:29510", "--http", "none"]
    read = partial(lighthouse_flags.read_options, flags, try_to_listen=lambda *_: None)
    assert read().state == Path("outputs/lighthouse-29510.json")
    assert [path.name for path in tmp_path.iterdir()] == ["outputs"], "the working folder stays as it was"
    of_before = Path("lighthouse-29510.json")
    state_file.write(of_before, m.PersistentState("epoch", last_id=7))
    assert read().state == of_before, "what it says is not forgotten"


def test_one_that_was_stopped_wakes_and_ends(tmp_path: Path):
    """Another one has acquired its state file, at another port: of what it writes and answers nothing counts any more."""
    flags = ("--state_file", "state.json")
    first = Running(tmp_path, *flags)
    wires = [Wire(first.address)]
    ids = [quorum_of(wires[0].pharos(m.Call(m.Member("a:1")))).quorum_id]
    first.process.send_signal(signal.SIGSTOP)
    second = Running(tmp_path, *flags, errors="other errors")
    wires.append(Wire(second.address))
    for number in (1, 2):
        call = m.Call(m.Member("a:1"), known=ids[-1], failed=True, number=number)
        ids.append(quorum_of(wires[1].pharos(call)).quorum_id)
    second.kill()
    first.process.send_signal(signal.SIGCONT)
    with pytest.raises(grpc.RpcError):
        wires[0].pharos(m.Call(m.Member("a:1"), known=1, failed=True, number=1)).result()
    said = "state.json belongs to a lighthouse that was started after this one: this one ends"
    assert first.process.wait(60) == 1 and said in first.errors.read_text()
    with closing(Running(tmp_path, *flags)) as third:
        wires.append(Wire(third.address))
        ids.append(quorum_of(wires[2].pharos(m.Call(m.Member("a:1"), known=ids[-1], failed=True, number=3))).quorum_id)
        for wire in wires:
            wire.close()
    leap = state_file.RESERVED
    assert ids == [1, 2 + leap, 3 + leap, 4 + 2 * leap], "beyond all ids that may have been given out without a disk"


def test_a_start_that_cannot_listen_takes_nothing_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """The same command runs twice: the first process continues."""
    state = tmp_path / "state.json"
    owner = state_file.acquire(state)
    with closing(socket.create_server(("127.0.0.1", 0))) as first:
        at = f"127.0.0.1:{first.getsockname()[1]}"
        assert lighthouse_main.main([*N, "--bind", at, "--state_file", str(state), "--http", "none"]) == 2
    assert "the port is in use" in capsys.readouterr().err
    state_file.write(state, m.PersistentState("epoch"), owner)


def test_a_damaged_state_file_stops_the_start_unless_the_groups_are_to_be_asked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "state.json").write_text("{")
    assert lighthouse_main.main([*N, "--bind", "127.0.0.1:0", "--state_file", str(tmp_path / "state.json")]) == 2
    assert "--recover learns from the groups" in capsys.readouterr().err
    flags = ["--state_file", "state.json", "--recover", "--heartbeat_timeout_ms", "200"]
    with closing(Running(tmp_path, *flags)) as one:
        wire = Wire(one.address)
        stream = Stream(wire, "a:1", m.Quorum(9, (m.Member("a:1"),), (0, 0, ""), "e"))
        assert stream.next("send_quorum")
        wire.close()
