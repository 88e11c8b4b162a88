"""The driver keeps the order of effects, the state file is always whole, and a reader that lags costs a bounded amount of memory."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import stat
import threading
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, replace
from itertools import count
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from ft.protocol import messages as m
from ft.protocol.lighthouse import LighthouseConfig
from ft.rpc import state_file
from ft.rpc.access import Access, Endpoint
from ft.rpc.driver import Driver
from ft.rpc.lighthouse_flags import LighthouseOptions, read_options
from ft.rpc.lighthouse_main import serve
from ft.rpc.serving import OUTBOX, OUTBOX_BYTES, CallRefused, Outbox, Pending, PendingCalls, Server
from tests.rpc.wire import before_each
from tests.unit.fakes import replace_system_call


class Say(m.Effect):
    word: str


class Wait(m.Effect):
    word: str


class Echo:
    """Answers a Leave by two effects, a Beat by one; an Evict is its end."""

    def handle(self, event: m.Event, now_s: float) -> m.Out:
        if isinstance(event, m.Leave):
            return m.Out((Wait(event.reason), Say(f"after {event.reason}")))
        if isinstance(event, m.Evict):
            raise AssertionError("a fault of ours")
        return m.Out((Say(event.replica_id),)) if isinstance(event, m.Beat) else m.Out()


def test_what_comes_after_a_slow_effect_waits_for_it():
    async def story() -> list[str]:
        said: list[str] = []
        disk = asyncio.get_running_loop().create_future()

        def wait(effect: Wait) -> asyncio.Future[None]:
            said.append(effect.word)
            return disk

        driver = Driver(Echo(), {Say: lambda e: said.append(e.word), Wait: wait}, tick_s=1.0)
        driver.feed(m.Leave("a", reason="disk"))
        driver.feed(m.Beat("b"))
        assert said == ["disk"], "the machine goes on, what it wants done waits"
        disk.set_result(None)
        await asyncio.sleep(0)
        return said

    assert asyncio.run(story()) == ["disk", "after disk", "b"]


def test_an_effect_may_feed_and_its_effects_come_last():
    async def story() -> list[str]:
        said: list[str] = []

        def wait(effect: Wait) -> None:
            said.append(effect.word)
            driver.feed(m.Beat("fed"))

        driver = Driver(Echo(), {Say: lambda e: said.append(e.word), Wait: wait}, tick_s=1.0)
        driver.feed(m.Leave("a", reason="first"))
        return said

    assert asyncio.run(story()) == ["first", "after first", "fed"]


@pytest.mark.parametrize("late", [False, True])
def test_a_fault_of_ours_ends_the_run_whoever_fed_it(late: bool):
    """Only a fault of ours ends the run. late: the interpreter is about to end, and no thread can be started."""

    async def story() -> None:
        if late:
            await asyncio.get_running_loop().shutdown_default_executor()
        driver = Driver(Echo(), {}, tick_s=1000.0)
        running = asyncio.ensure_future(driver.run())
        await asyncio.sleep(0)
        assert not running.done()
        with pytest.raises(AssertionError):
            driver.feed(m.Evict("a"))
        await running

    with pytest.raises(AssertionError, match="a fault of ours"):
        asyncio.run(story())


@pytest.mark.parametrize("stopped_s", [0.0, 5.0])
def test_ticks_come_until_it_is_cancelled_and_after_a_stop_what_arrived_meanwhile_goes_first(stopped_s: float):
    async def story() -> list[m.Event]:
        seen: list[m.Event] = []
        enough, times = asyncio.Event(), iter([0.0, stopped_s])

        def clock() -> float:
            return next(times, stopped_s)

        def see(now_s: float, event: m.Event, out: m.Out) -> None:
            seen.append(event)
            if seen.count(m.Tick()) == 3:
                enough.set()

        driver = Driver(Echo(), {Say: lambda e: None}, tick_s=0.001, clock=clock, observer=see)
        running = asyncio.ensure_future(driver.run())
        if stopped_s:
            asyncio.get_running_loop().call_later(0.005, driver.feed, m.Beat("a"))
        await enough.wait()
        running.cancel()
        return seen

    assert asyncio.run(story()) == [m.Beat("a")] * bool(stopped_s) + [m.Tick()] * 3


# ------------------------------------------------------------------------------------------------ the state file

MEMBER = m.Member("a:1", reconfigure_handles=("x",), restored=0)
SAVED = m.PersistentState("epoch", 4, 3, "pharos", m.Quorum(4, (MEMBER,), (3, 2, "c"), "epoch"))


def test_what_was_written_is_read(tmp_path: Path):
    path = tmp_path / "state.json"
    assert state_file.read(path) is None
    state_file.write(path, SAVED)
    state_file.write(path, replace(SAVED, last_id=5))
    assert state_file.read(path) == replace(SAVED, last_id=5)
    assert [file.name for file in tmp_path.iterdir()] == ["state.json"]


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "{}", "[" * 200_000, '{"format": "pharos lighthouse 1"}', '{"format": "other", "epoch": "e"}'],
    ids=range(7),
)
def test_what_is_no_state_file_is_told(tmp_path: Path, text: str):
    path = tmp_path / "state.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"state\.json is not a state file"):
        state_file.read(path)


DAMAGED: list[Callable[[dict[str, Any]], Any]] = [
    lambda data: data.update(last_id="5"),
    lambda data: data.update(last_id=-5),
    lambda data: data.update(settled=None),
    lambda data: data.update(settled=1 << 70),
    lambda data: data.update(epoch=5),
    lambda data: data.update(kind="other"),
    lambda data: data["limits"].update(min_replicas="1"),
    lambda data: data["limits"].update(takeover_s=-1.0),
    lambda data: data["quorum"].update(members=[]),
    lambda data: data["quorum"].update(quorum_id="1"),
    lambda data: data["quorum"].update(reference=[None, None, None]),
    lambda data: data["quorum"]["members"][0].update(replica_id=None),
    lambda data: data["quorum"]["members"][0].update(step="1"),
    lambda data: data["quorum"]["members"].append(data["quorum"]["members"][0]),
]


@pytest.mark.parametrize("damage", DAMAGED)
def test_a_value_of_a_wrong_type_or_range_is_no_state_file(tmp_path: Path, damage: Callable[[dict[str, Any]], Any]):
    """The value is refused at the read: it would end the lighthouse, at its start or at the first call."""
    path = tmp_path / "state.json"
    quorum = m.Quorum(1, (m.Member("a:1", step=2, restored=0),), (2, 1, "c"), "e", (("layout", "x"),))
    saved = m.PersistentState("e", 7, 2, "pharos", quorum, m.JobLimits(takeover_s=None))
    for good in (saved, replace(saved, quorum=None, limits=None)):
        state_file.write(path, good)
        assert state_file.read(path) == good
    data = {"format": state_file.FORMAT, **json.loads(json.dumps(asdict(saved)))}
    earlier = {**data, "terms": data["limits"]}
    del earlier["limits"]
    path.write_text(json.dumps(earlier))
    assert state_file.read(path) == saved, "a former name"
    damage(data)
    path.write_text(json.dumps(data))
    with pytest.raises(ValueError, match=r"state\.json is not a state file"):
        state_file.read(path)


def _keep(path: Path, story: Callable[[state_file.StateFileWriter], Any], **options: Any) -> None:
    async def run() -> None:
        owner = state_file.acquire(path) if path.parent.exists() else ""
        state_writer = state_file.StateFileWriter(path, owner)
        for name, value in options.items():
            assert hasattr(state_writer, name), name
            setattr(state_writer, name, value)
        await story(state_writer)
        await state_writer.close()

    asyncio.run(run())


def test_a_new_id_is_on_disk_before_what_follows(tmp_path: Path):
    path = tmp_path / "state.json"

    async def story(state_writer: state_file.StateFileWriter) -> None:
        five = replace(SAVED, last_id=5)
        others = (replace(five, settled=1), replace(five, epoch="other"), replace(five, epoch="other", kind="torchft"))
        for saved in (SAVED, five, *others):
            written = state_writer.schedule_write(saved)
            assert written is not None
            await written
            assert state_file.read(path) == saved

    _keep(path, story)


def test_the_same_id_is_written_later_and_at_the_latest_at_the_end(tmp_path: Path):
    path = tmp_path / "state.json"

    async def story(state_writer: state_file.StateFileWriter) -> None:
        await (state_writer.schedule_write(SAVED) or asyncio.sleep(0))
        assert state_writer.schedule_write(replace(SAVED, settled=8)) is None
        assert state_writer.schedule_write(replace(SAVED, settled=9)) is None
        assert state_file.read(path) == SAVED

    _keep(path, story)
    assert json.loads(path.read_text())["settled"] == 9


def test_who_starts_on_a_full_disk_takes_over_all_the_same(tmp_path: Path):
    """A full disk does not stop a takeover: commits wait for a lighthouse that answers."""
    path = tmp_path / "state.json"
    state_file.write(path, SAVED, first := state_file.acquire(path))

    def is_full(word: str) -> None:
        if word == "write":
            raise OSError(errno.ENOSPC, "No space left on device")

    with before_each(is_full):
        second = state_file.acquire(path)
    with pytest.raises(state_file.Superseded):
        state_file.write(path, SAVED, first)
    with before_each(is_full):
        third = state_file.acquire(path)
    assert path.with_name("state.json.owner").is_symlink(), "a link that names it needs no room"
    with pytest.raises(state_file.Superseded):
        state_file.write(path, SAVED, second)
    state_file.write(path, replace(SAVED, last_id=9), third)
    assert state_file.read(path) == replace(SAVED, last_id=9)
    fourth = state_file.acquire(path)
    with pytest.raises(state_file.Superseded):
        state_file.write(path, SAVED, third)
    state_file.write(path, SAVED, fourth)
    assert {file.name for file in tmp_path.iterdir()} == {"state.json", "state.json.owner"}


SOON = 0.001
READ_ONLY = OSError(errno.EROFS, "Read-only file system")


def test_who_starts_on_a_read_only_disk_takes_over_when_it_can_write(tmp_path: Path):
    path, writable = tmp_path / "state.json", threading.Event()
    state_file.write(path, SAVED, first := state_file.acquire(path))

    class Writer(state_file.StateFileWriter):
        pace_s = SOON

        @staticmethod
        def acquire_file(path: Path, owner: str = "") -> str:
            if not writable.is_set():
                raise READ_ONLY
            return state_file.acquire(path, owner)

    flags = ["--min_replicas", "1", "--state_file", str(path), "--http", "none", "--bind", "127.0.0.1:0"]
    assert read_options(flags, try_to_write=Writer.acquire_file).state == path

    async def starts() -> None:
        options = LighthouseOptions(LighthouseConfig(), [Endpoint("127.0.0.1", 0)], state=path)
        async with serve(options, writer=Writer) as (service, _):
            assert service.state_writer is not None and "Read-only" in service.state_writer.trouble
            waits = service.state_writer.schedule_write(replace(SAVED, last_id=SAVED.last_id + state_file.RESERVED + 1))
            assert waits is not None
            await asyncio.sleep(0.01)
            assert not waits.done() and state_file.read(path) == SAVED
            writable.set()
            await waits
            assert not service.state_writer.trouble
            with pytest.raises(state_file.Superseded):
                state_file.write(path, SAVED, first)

    asyncio.run(starts())


def test_who_has_taken_over_late_goes_on_after_one_more_disk_error(tmp_path: Path):
    """The disk may fail between the writer's name beside the file and the clean-up that follows it."""
    path, broken = tmp_path / "state.json", [OSError(errno.EIO, "Input/output error")]
    state_file.write(path, SAVED, first := state_file.acquire(path))

    class Writer(state_file.StateFileWriter):
        pace_s = SOON

        @staticmethod
        def acquire_file(path: Path, owner: str = "") -> str:
            owner = state_file.acquire(path, owner)
            if broken:
                raise broken.pop()
            return owner

    async def story() -> None:
        state_writer = Writer(path, "ours", SAVED, trouble=str(READ_ONLY))
        newer = replace(SAVED, last_id=SAVED.last_id + 5000)
        await (state_writer.schedule_write(newer) or asyncio.sleep(0))
        assert not broken and state_file.read(path) == newer
        with pytest.raises(state_file.Superseded):
            state_file.write(path, SAVED, first)
        await state_writer.close()

    asyncio.run(story())


def test_who_could_not_take_over_goes_on_from_no_file_that_was_anothers_since(tmp_path: Path):
    path = tmp_path / "state.json"
    for late in (False, True):
        state_file.write(path, SAVED, first := state_file.acquire(path))

        async def story(late: bool = late, first: str = first) -> None:
            state_writer = state_file.StateFileWriter(path, "ours", SAVED, trouble=str(READ_ONLY))
            other = first if late else state_file.acquire(path)
            state_file.write(path, replace(SAVED, last_id=9), other)
            with pytest.raises(state_file.Superseded):
                await (state_writer.schedule_write(replace(SAVED, last_id=SAVED.last_id + 5000)) or asyncio.sleep(0))
            await state_writer.close()

        asyncio.run(story())


def test_what_may_wait_does_not_pile_up_before_a_disk_that_hangs(tmp_path: Path):
    path, hangs, late = tmp_path / "state.json", threading.Event(), list[m.PersistentState]()

    def writes(path: Path, saved: m.PersistentState, owner: str = "") -> None:
        late.append(saved)
        assert len(late) == 1 or hangs.wait(30)
        state_file.write(path, saved, owner)

    async def story(state_writer: state_file.StateFileWriter) -> None:
        await (state_writer.schedule_write(SAVED) or asyncio.sleep(0))
        for settled in range(4, 40):
            state_writer.schedule_write(replace(SAVED, settled=settled))
            while len(late) < 2:
                await asyncio.sleep(0.001)
            for _ in range(3):
                await asyncio.sleep(0.001)
        hangs.set()

    _keep(path, story, write_file=writes, pace_s=SOON)
    assert json.loads(path.read_text())["settled"] == 39 and len(late) <= 4, "of 37"


@pytest.mark.parametrize("failing", ["full", "slow"])
def test_a_disk_that_fails_holds_back_no_quorum_whose_id_is_reserved(tmp_path: Path, failing: str):
    """A lighthouse that starts from the file on the disk assigns none of the reserved ids."""
    path, goes_on = tmp_path / "state.json", threading.Event()
    goes_on.set()

    def fails(path: Path, saved: m.PersistentState, owner: str = "") -> None:
        if not goes_on.is_set() and failing == "full":
            raise OSError(28, "No space left on device")
        assert goes_on.wait(50)
        state_file.write(path, saved, owner)

    async def story(state_writer: state_file.StateFileWriter) -> None:
        await (state_writer.schedule_write(SAVED) or asyncio.sleep(0))
        goes_on.clear()
        for number in (1, 2, state_file.RESERVED):
            await asyncio.wait_for(state_writer.schedule_write(replace(SAVED, last_id=SAVED.last_id + number)), 50)
        found = state_file.read(path)
        assert found == SAVED and state_file.reserved(found).last_id == SAVED.last_id + state_file.RESERVED
        one_more = replace(SAVED, last_id=SAVED.last_id + state_file.RESERVED + 1)
        waits = state_writer.schedule_write(one_more)
        assert waits is not None
        await asyncio.sleep(0.05)
        assert not waits.done(), "an id that nothing reserves is on disk before it is answered"
        goes_on.set()
        await asyncio.wait_for(waits, 50)
        assert state_file.read(path) == one_more and not state_writer.trouble

    _keep(path, story, write_file=fails, pace_s=SOON)


def test_one_that_was_stopped_in_a_write_takes_no_id_back(tmp_path: Path):
    """Another lighthouse acquires the file, and increments the id, before each operation of the first one's write. It has read every id
    that the first had on disk, and may have answered; later the first writes no more."""
    outcomes = []
    for stopped_at in count():
        path = tmp_path / str(stopped_at) / "state.json"
        path.parent.mkdir()
        first, went_on = state_file.acquire(path), list[m.PersistentState]()
        state_file.write(path, replace(SAVED, last_id=4), first)

        def other(path: Path = path, went_on: list[m.PersistentState] = went_on) -> None:
            name = state_file.acquire(path)
            found = state_file.read(path)
            assert found
            went_on.append(replace(found, last_id=found.last_id + 1))
            state_file.write(path, went_on[0], name)

        words = count()

        def stopped(word: str, other: Any = other, words: Any = words, at: int = stopped_at) -> None:
            if word in FILE_WORDS and next(words) == at:
                other()

        try:
            with before_each(stopped):
                state_file.write(path, replace(SAVED, last_id=5), first)
            outcomes.append("wrote")
        except state_file.Superseded:
            outcomes.append("did not")
        if not went_on:
            break
        assert went_on[0].last_id == (6 if outcomes[-1] == "wrote" else 5)
        with pytest.raises(state_file.Superseded, match="started after this one"):
            state_file.write(path, replace(SAVED, last_id=5), first)
        assert state_file.read(path) == went_on[0]
        assert sorted(file.name for file in path.parent.iterdir()) == ["state.json", "state.json.owner"]
    assert outcomes.count("did not") >= 4 and outcomes.count("wrote") >= 3 and outcomes == sorted(outcomes)


FILE_WORDS = ("open", "fsync", "replace", "rename", "unlink")


def test_who_was_replaced_ends_with_what_it_would_write(tmp_path: Path):
    """A replaced lighthouse ends with its next write, or with the one after it where nobody waits for the disk."""
    path = tmp_path / "state.json"

    async def story(state_writer: state_file.StateFileWriter) -> None:
        await (state_writer.schedule_write(SAVED) or asyncio.sleep(0))
        state_file.acquire(path)
        with pytest.raises(state_file.Superseded):
            await (state_writer.schedule_write(replace(SAVED, last_id=5)) or asyncio.sleep(0))
        with pytest.raises(state_file.Superseded):
            state_writer.schedule_write(SAVED)

    _keep(path, story)


def test_who_was_replaced_ends_though_it_has_nothing_to_write(tmp_path: Path):
    """Too few of its groups call for a quorum, say, for the others are the new one's."""
    path = tmp_path / "state.json"

    class Writer(state_file.StateFileWriter):
        pace_s = SOON

    async def story() -> None:
        options = LighthouseOptions(LighthouseConfig(tick_s=0.01), [Endpoint("127.0.0.1", 0)], state=path)
        async with serve(options, writer=Writer) as (service, _):
            state_file.acquire(path)
            with pytest.raises(state_file.Superseded, match="started after this one"):
                await service.driver.run()

    asyncio.run(story())


@pytest.mark.parametrize("fails_at", [None, 0, 1, 2])
def test_a_state_file_is_on_disk_before_it_takes_the_place_of_the_old(tmp_path: Path, fails_at: int | None):
    """fails_at: the disk refuses at that word. What can be read is the old state or the new one, whole."""
    path, newer, done = tmp_path / "state.json", replace(SAVED, last_id=SAVED.last_id + 1), list[str]()
    state_file.write(path, SAVED)

    def note(word: str) -> None:
        if word in ("fsync", "replace", "rename"):
            done.append(word)
            if len(done) == 2:
                assert state_file.read(path.with_name("state.json.partial")) == newer
            assert state_file.read(path) == (newer if len(done) == 3 else SAVED)
            if len(done) - 1 == fails_at:
                raise OSError("the disk refuses")

    with before_each(note), nullcontext() if fails_at is None else pytest.raises(OSError, match="refuses"):
        state_file.write(path, newer)
    assert len(done) == (3 if fails_at is None else fails_at + 1) and done[::2] == ["fsync", "fsync"][: len(done[::2])]
    assert state_file.read(path) == (newer if fails_at in (None, 2) else SAVED)


def test_a_file_system_that_cannot_sync_a_folder_keeps_the_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    fsync = os.fsync

    def refuse(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        fsync(descriptor)

    replace_system_call(monkeypatch, "fsync", refuse)
    state_file.write(tmp_path / "state.json", SAVED)
    assert state_file.read(tmp_path / "state.json") == SAVED


# ------------------------------------------------------------------------------------------------ the end


class Aborted(Exception):
    pass


class Caller:
    def __init__(self, left_s: float | None = None) -> None:
        self.left_s = left_s

    def time_remaining(self) -> float | None:
        return self.left_s

    async def abort(self, code: Any, reason: str) -> None:
        raise Aborted(code.name, reason)


def server() -> Server:
    return Server(Access(), {}, [Endpoint("127.0.0.1", 0)])


def test_calls_end_with_their_server_those_on_their_way_too():
    handled: list[str] = []

    async def handle(name: str, context: Caller) -> None:
        handled.append(name)
        await asyncio.Event().wait()

    async def story() -> None:
        await (one := server()).start()
        early = asyncio.ensure_future(one.serving(handle)("early", Caller()))
        await asyncio.sleep(0)
        await one.stop()
        for call in (early, one.serving(handle)("late", Caller())):
            with pytest.raises(Aborted) as caught:
                await call
            assert caught.value.args == ("UNAVAILABLE", "this server stops")

    asyncio.run(story())
    assert handled == ["early"]


# ------------------------------------------------------------------------------------------------ deadlines


class Ahead(asyncio.SelectorEventLoop):
    """An event loop whose clock can be put forward."""

    by_s = 0.0

    def time(self) -> float:
        return super().time() + self.by_s


@pytest.mark.parametrize("swept", [False, True])
def test_a_deadline_is_told_a_little_before_it_comes_and_not_earlier(swept: bool):
    async def story(loop: Ahead) -> None:
        cancelled = list[str]()
        calls = PendingCalls(cancelled.append, swept=swept)
        waiting = asyncio.ensure_future(calls.wait("a", "a", Pending(), lambda: None, Caller(60.0)))
        for by_s, done in ((0.0, False), (59.0, False), (59.9, True)):
            loop.by_s = by_s
            await asyncio.sleep(0.001)
            if swept:
                assert not waiting.done(), "no timer of its own"
                calls.expire()
                await asyncio.sleep(0.001)
            assert waiting.done() is done
        with pytest.raises(CallRefused, match="Timeout expired") as caught:
            await waiting
        assert caught.value.code is grpc.StatusCode.CANCELLED
        assert cancelled == ["a"] and not calls

    loop = Ahead()
    loop.run_until_complete(story(loop))
    loop.close()


# ------------------------------------------------------------------------------------------------ slow readers


class Deaf:
    """A stream whose reader receives nothing and sends nothing."""

    async def write(self, message: bytes) -> None:
        await asyncio.Event().wait()

    async def read(self) -> bytes:
        await asyncio.Event().wait()
        return b""


@pytest.mark.parametrize(("message", "most"), [(b"x", OUTBOX), (bytes(OUTBOX_BYTES // 4), 4)])
def test_a_reader_that_lags_too_far_behind_loses_its_stream(message: bytes, most: int):
    """The limit is a number of messages or of bytes."""

    async def story() -> None:
        made: asyncio.Future[Outbox] = asyncio.get_running_loop().create_future()

        async def handle() -> bytes | None:
            made.set_result(Outbox(Deaf()))
            return await made.result().read()

        reading = asyncio.ensure_future(handle())
        outbox = await made
        for _ in range(most):
            outbox.send(message)
        assert not outbox.over
        outbox.send(message)
        said = f"the reader is too slow: {most + 1} messages of {(most + 1) * len(message)} bytes"
        with pytest.raises(CallRefused, match=said):
            await reading
        outbox.close()

    asyncio.run(story())
