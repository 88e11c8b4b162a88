"""The driver keeps the order of effects, the state file is always whole, and a reader that lags costs a bounded amount of memory."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import threading
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from ft.protocol import messages as m
from ft.protocol.lighthouse import LighthouseConfig
from ft.rpc import state_file
from ft.rpc.access import Endpoint
from ft.rpc.driver import Driver
from ft.rpc.lighthouse_flags import LighthouseOptions, read_options
from ft.rpc.lighthouse_main import serve
from ft.rpc.serving import OUTBOX, OUTBOX_BYTES, CallRefused, Calls, Outbox, Pending


@dataclass(frozen=True)
class Say(m.Effect):
    word: str


@dataclass(frozen=True)
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


def test_a_fault_of_ours_ends_the_run_whoever_fed_it():
    async def story() -> None:
        driver = Driver(Echo(), {}, tick_s=1000.0)
        running = asyncio.ensure_future(driver.run())
        with pytest.raises(AssertionError):
            driver.feed(m.Evict("a"))
        await running

    with pytest.raises(AssertionError, match="a fault of ours"):
        asyncio.run(story())


def test_ticks_come_until_it_is_cancelled():
    async def story() -> list[m.Event]:
        seen: list[m.Event] = []
        enough = asyncio.Event()

        def see(now_s: float, event: m.Event, out: m.Out) -> None:
            seen.append(event)
            if len(seen) == 3:
                enough.set()

        running = asyncio.ensure_future(Driver(Echo(), {}, tick_s=0.001, seen=see).run())
        await enough.wait()
        running.cancel()
        return seen

    assert asyncio.run(story())[:3] == [m.Tick()] * 3


def test_after_a_stop_what_arrived_meanwhile_goes_before_the_tick():
    async def story() -> list[m.Event]:
        seen: list[m.Event] = []
        ticked = asyncio.Event()

        def see(now_s: float, event: m.Event, out: m.Out) -> None:
            seen.append(event)
            if event == m.Tick():
                ticked.set()

        driver = Driver(Echo(), {Say: lambda e: None}, tick_s=1.0, seen=see)
        driver._tick(late_s=5.0)
        driver.feed(m.Beat("a"))
        await ticked.wait()
        return seen

    assert asyncio.run(story()) == [m.Beat("a"), m.Tick()]


class Times:
    """An Event that nobody sets for as many waits."""

    def __init__(self, waits: int) -> None:
        self.left = waits

    def wait(self, timeout_s: float) -> bool:
        self.left -= 1
        return self.left < 0

    def is_set(self) -> bool:
        return False


def test_a_busy_loop_is_rung_for_once_and_a_closed_metronome_is_not_heard():
    async def story() -> list[float]:
        beats: list[float] = []
        metronome = PeriodicTimer(1000.0, beats.append)
        over, metronome._over = metronome._over, Times(3)  # type: ignore[assignment]
        metronome._run()  # here, so that the loop hears nothing meanwhile
        await asyncio.sleep(0)
        assert len(beats) == 1
        metronome._over = over
        metronome._loop.call_soon(metronome._hear)
        metronome.close()
        await asyncio.sleep(0)
        return beats

    assert len(asyncio.run(story())) == 1


# ------------------------------------------------------------------------------------------------ the state file

MEMBER = m.Member("a:1", reconfigure_handles=("x",), restored=0)
SAVED = m.Saved("epoch", 4, 3, "pharos", m.Quorum(4, (MEMBER,), (3, 2, "c"), "epoch"))


def test_what_was_written_is_read(tmp_path: Path):
    path = tmp_path / "state.json"
    assert state_file.read(path) is None
    state_file.write(path, SAVED)
    state_file.write(path, replace(SAVED, last_id=5))
    assert state_file.read(path) == replace(SAVED, last_id=5)
    assert [file.name for file in tmp_path.iterdir()] == ["state.json"]


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "{}", '{"format": "pharos lighthouse 1"}', '{"format": "other", "epoch": "e"}']
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
    lambda data: data["terms"].update(min_replicas="1"),
    lambda data: data["terms"].update(takeover_s=-1.0),
    lambda data: data["quorum"].update(members=[]),
    lambda data: data["quorum"].update(quorum_id="1"),
    lambda data: data["quorum"].update(reference=[None, None, None]),
    lambda data: data["quorum"]["members"][0].update(replica_id=None),
    lambda data: data["quorum"]["members"][0].update(step="1"),
    lambda data: data["quorum"]["members"].append(data["quorum"]["members"][0]),
]


@pytest.mark.parametrize("damage", DAMAGED)
def test_a_value_of_a_wrong_type_or_range_is_no_state_file(tmp_path: Path, damage: Callable[[dict[str, Any]], Any]):
    """Or it would end the lighthouse, at its start or at the first call."""
    path = tmp_path / "state.json"
    quorum = m.Quorum(1, (m.Member("a:1", step=2, restored=0),), (2, 1, "c"), "e", (("layout", "x"),))
    saved = m.Saved("e", 7, 2, "pharos", quorum, m.Terms(takeover_s=None))
    for good in (saved, replace(saved, quorum=None, terms=None)):
        state_file.write(path, good)
        assert state_file.read(path) == good
    data = {"format": state_file.FORMAT, **json.loads(json.dumps(saved.to_dict()))}
    damage(data)
    path.write_text(json.dumps(data))
    with pytest.raises(ValueError, match=r"state\.json is not a state file"):
        state_file.read(path)


def test_a_state_file_of_brackets_is_told(tmp_path: Path):
    path = tmp_path / "state.json"
    path.write_text("[" * 200_000)
    with pytest.raises(ValueError, match=r"state\.json is not a state file"):
        state_file.read(path)


def _keep(path: Path, story: Callable[[state_file.StateFileWriter], Any]) -> None:
    async def run() -> None:
        keeper = state_file.StateFileWriter(path, state_file.take_over(path) if path.parent.exists() else "")
        await story(keeper)
        await keeper.close()

    asyncio.run(run())


def test_a_new_id_is_on_disk_before_what_follows(tmp_path: Path):
    path = tmp_path / "state.json"

    async def story(keeper: state_file.StateFileWriter) -> None:
        five = replace(SAVED, last_id=5)
        others = (replace(five, settled=1), replace(five, epoch="other"), replace(five, epoch="other", kind="torchft"))
        for saved in (SAVED, five, *others):
            written = keeper.keep(saved)
            assert written is not None
            await written
            assert state_file.read(path) == saved

    _keep(path, story)


def test_the_same_id_is_written_later_and_at_the_latest_at_the_end(tmp_path: Path):
    path = tmp_path / "state.json"

    async def story(keeper: state_file.StateFileWriter) -> None:
        await (keeper.keep(SAVED) or asyncio.sleep(0))
        assert keeper.keep(replace(SAVED, settled=8)) is None
        assert keeper.keep(replace(SAVED, settled=9)) is None
        assert state_file.read(path) == SAVED

    _keep(path, story)
    assert json.loads(path.read_text())["settled"] == 9


def test_who_starts_on_a_full_disk_takes_over_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Else the job would stand for as long as the disk is full: commits wait for a lighthouse that answers."""
    path = tmp_path / "state.json"
    state_file.write(path, SAVED, first := state_file.take_over(path))

    def is_full(self: Path, text: str, **_: Any) -> None:
        self.touch()
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as full:
        full.setattr(Path, "write_text", is_full)
        second = state_file.take_over(path)
        with pytest.raises(state_file.TakenOver):
            state_file.write(path, SAVED, first)
        third = state_file.take_over(path)
    with pytest.raises(state_file.TakenOver):
        state_file.write(path, SAVED, second)
    state_file.write(path, replace(SAVED, last_id=9), third)
    assert state_file.read(path) == replace(SAVED, last_id=9)
    fourth = state_file.take_over(path)
    with pytest.raises(state_file.TakenOver):
        state_file.write(path, SAVED, third)
    state_file.write(path, SAVED, fourth)
    assert {file.name for file in tmp_path.iterdir()} == {"state.json", "state.json.owner"}


READ_ONLY = OSError(errno.EROFS, "Read-only file system")


def test_who_starts_on_a_read_only_disk_takes_over_when_it_can_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path, writable, real = tmp_path / "state.json", threading.Event(), state_file.take_over
    state_file.write(path, SAVED, first := state_file.take_over(path))
    monkeypatch.setattr(state_file, "RETRY_S", 0.001)

    def take_over(path: Path) -> str:
        if not writable.is_set():
            raise READ_ONLY
        return real(path)

    monkeypatch.setattr(state_file, "take_over", take_over)
    monkeypatch.setattr(state_file, "try_to_write", lambda path: take_over(path))
    monkeypatch.chdir(tmp_path)
    flags = ["--min_replicas", "1", "--state_file", "state.json", "--http", "none", "--bind", "127.0.0.1:0"]
    assert read_options(flags).state == Path("state.json")

    async def starts() -> None:
        options = LighthouseOptions(LighthouseConfig(), [Endpoint("127.0.0.1", 0)], state=path)
        async with serve(options) as (service, _):
            assert service.keeper is not None and "Read-only" in service.keeper.trouble
            waits = service.keeper.keep(replace(SAVED, last_id=SAVED.last_id + state_file.RESERVED + 1))
            assert waits is not None
            await asyncio.sleep(0.01)
            assert not waits.done() and state_file.read(path) == SAVED
            writable.set()
            await waits
            assert not service.keeper.trouble
            with pytest.raises(state_file.TakenOver):
                state_file.write(path, SAVED, first)

    asyncio.run(starts())


def test_who_could_not_take_over_goes_on_from_no_file_that_was_anothers_since(tmp_path: Path):
    path = tmp_path / "state.json"
    for late in (False, True):
        state_file.write(path, SAVED, first := state_file.take_over(path))

        async def story(late: bool = late, first: str = first) -> None:
            keeper = state_file.StateFileWriter(path, "", SAVED, trouble=str(READ_ONLY))
            other = first if late else state_file.take_over(path)
            state_file.write(path, replace(SAVED, last_id=9), other)
            with pytest.raises(state_file.TakenOver):
                await (keeper.keep(replace(SAVED, last_id=SAVED.last_id + 5000)) or asyncio.sleep(0))
            await keeper.close()

        asyncio.run(story())


def test_what_may_wait_does_not_pile_up_before_a_disk_that_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path, hangs, write, late = tmp_path / "state.json", threading.Event(), state_file.write, list[m.Saved]()
    monkeypatch.setattr(state_file, "LAZY_S", 0.001)

    def writes(path: Path, saved: m.Saved, owner: str = "") -> None:
        late.append(saved)
        assert len(late) == 1 or hangs.wait(30)
        write(path, saved, owner)

    monkeypatch.setattr(state_file, "write", writes)

    async def story(keeper: state_file.StateFileWriter) -> None:
        await (keeper.keep(SAVED) or asyncio.sleep(0))
        for settled in range(4, 40):
            keeper.keep(replace(SAVED, settled=settled))
            while len(late) < 2:
                await asyncio.sleep(0.001)
            for _ in range(3):
                await asyncio.sleep(0.001)
        assert keeper._thread._work_queue.qsize() == 0
        hangs.set()

    _keep(path, story)
    assert json.loads(path.read_text())["settled"] == 39 and len(late) <= 4


def test_a_disk_that_refuses_holds_back_what_follows_until_it_does_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = tmp_path / "gone"
    monkeypatch.setattr(state_file, "RETRY_S", 0.001)

    async def story(keeper: state_file.StateFileWriter) -> None:
        written = keeper.keep(SAVED)
        assert written is not None
        while not keeper.trouble:
            await asyncio.sleep(0.001)
        assert not written.done() and "No such file" in keeper.trouble
        folder.mkdir()
        await written
        assert not keeper.trouble and state_file.read(folder / "state.json") == SAVED

    _keep(folder / "state.json", story)


@pytest.mark.parametrize("failing", ["full", "slow"])
def test_a_disk_that_fails_holds_back_no_quorum_whose_id_is_reserved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str
):
    """And whoever starts from what is on it gives out none of those ids."""
    monkeypatch.setattr(state_file, "RETRY_S", 0.001)
    monkeypatch.setattr(state_file, "PATIENCE_S", 0.01)
    path, real, goes_on = tmp_path / "state.json", state_file.write, threading.Event()

    def fails(path: Path, saved: m.Saved, owner: str = "") -> None:
        if goes_on.is_set():
            return real(path, saved, owner)
        if failing == "slow":
            assert goes_on.wait(50)
            return real(path, saved, owner)
        raise OSError(28, "No space left on device")

    async def story(keeper: state_file.StateFileWriter) -> None:
        await (keeper.keep(SAVED) or asyncio.sleep(0))
        monkeypatch.setattr(state_file, "write", fails)
        for number in (1, 2, state_file.RESERVED):
            await asyncio.wait_for(keeper.keep(replace(SAVED, last_id=SAVED.last_id + number)), 50)
        found = state_file.read(path)
        assert found == SAVED and state_file.reserved(found).last_id == SAVED.last_id + state_file.RESERVED
        one_more = replace(SAVED, last_id=SAVED.last_id + state_file.RESERVED + 1)
        waits = keeper.keep(one_more)
        assert waits is not None
        await asyncio.sleep(0.05)
        assert not waits.done(), "an id that nothing reserves is on disk before it is answered"
        goes_on.set()
        await asyncio.wait_for(waits, 50)
        assert state_file.read(path) == one_more and not keeper.trouble

    _keep(path, story)


def test_one_that_was_stopped_in_a_write_takes_no_id_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Before each of its words another lighthouse takes over, and counts on. What the first had on disk, and may have answered, the other
    has read; later the first writes no more."""
    outcomes = []
    for stopped_at in count():
        path = tmp_path / str(stopped_at) / "state.json"
        path.parent.mkdir()
        first, went_on = state_file.take_over(path), list[m.Saved]()
        state_file.write(path, replace(SAVED, last_id=4), first)

        def other(path: Path = path, went_on: list[m.Saved] = went_on) -> None:
            name = state_file.take_over(path)
            found = state_file.read(path)
            assert found
            went_on.append(replace(found, last_id=found.last_id + 1))
            state_file.write(path, went_on[0], name)

        stop_before(stopped_at, other, monkeypatch)
        try:
            state_file.write(path, replace(SAVED, last_id=5), first)
            outcomes.append("wrote")
        except state_file.TakenOver:
            outcomes.append("did not")
        monkeypatch.undo()
        if not went_on:
            break
        assert went_on[0].last_id == (6 if outcomes[-1] == "wrote" else 5)
        with pytest.raises(state_file.TakenOver, match="started after this one"):
            state_file.write(path, replace(SAVED, last_id=5), first)
        assert state_file.read(path) == went_on[0]
        assert sorted(file.name for file in path.parent.iterdir()) == ["state.json", "state.json.owner"]
    assert outcomes.count("did not") >= 4 and outcomes.count("wrote") >= 3 and outcomes == sorted(outcomes)


def stop_before(number: int, meanwhile: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """The process is stopped before what it says next but so many to the file system."""
    words = count()

    def stopping(word: Any) -> Any:
        def say(*args: Any, **more: Any) -> Any:
            if next(words) == number:
                monkeypatch.undo()
                meanwhile()
            return word(*args, **more)

        return say

    for owner, name in ((Path, "open"), (os, "fsync"), (Path, "read_text"), (Path, "replace"), (os, "open")):
        monkeypatch.setattr(owner, name, stopping(getattr(owner, name)))


def test_who_was_replaced_ends_with_what_it_would_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """At once, or with the next, where nobody waits for the disk."""
    monkeypatch.setattr(state_file, "LAZY_S", 0.0)
    path = tmp_path / "state.json"

    async def story(keeper: state_file.StateFileWriter) -> None:
        await (keeper.keep(SAVED) or asyncio.sleep(0))
        state_file.take_over(path)
        with pytest.raises(state_file.TakenOver):
            await (keeper.keep(replace(SAVED, last_id=5)) or asyncio.sleep(0))
        with pytest.raises(state_file.TakenOver):
            keeper.keep(SAVED)

    _keep(path, story)


def test_who_was_replaced_ends_though_it_has_nothing_to_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Too few of its groups call for a quorum, say, for the others are the new one's."""
    monkeypatch.setattr(state_file, "LOOK_S", 0.0)
    path = tmp_path / "state.json"

    async def story() -> None:
        options = LighthouseOptions(LighthouseConfig(tick_s=0.01), [Endpoint("127.0.0.1", 0)], state=path)
        async with serve(options) as (service, _):
            state_file.take_over(path)
            with pytest.raises(state_file.TakenOver, match="started after this one"):
                await service.driver.run()

    asyncio.run(story())


@pytest.mark.parametrize("fails_at", [None, 0, 1, 2])
def test_a_state_file_is_on_disk_before_it_takes_the_place_of_the_old(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails_at: int | None
):
    """fails_at: the disk refuses at that word. What can be read is the old state or the new one, whole."""
    path = tmp_path / "state.json"
    state_file.write(path, SAVED)
    done: list[tuple[str, str]] = []

    def note(word: str, name: str) -> None:
        done.append((word, name))
        if len(done) - 1 == fails_at:
            raise OSError("the disk refuses")

    rename = Path.replace
    monkeypatch.setattr(os, "fsync", lambda fd: note("fsync", Path(f"/proc/self/fd/{fd}").readlink().name))
    monkeypatch.setattr(Path, "replace", lambda x, to: (note("rename", x.name), rename(x, to)))
    newer = replace(SAVED, last_id=SAVED.last_id + 1)
    words = [("fsync", "state.json.partial"), ("rename", "state.json.partial"), ("fsync", tmp_path.name)]
    if fails_at is None:
        state_file.write(path, newer)
        assert done == words
    else:
        with pytest.raises(OSError, match="refuses"):
            state_file.write(path, newer)
        assert done == words[: fails_at + 1]
    assert state_file.read(path) == (newer if fails_at in (None, 2) else SAVED)


# ------------------------------------------------------------------------------------------------ the end


class Aborted(Exception):
    pass


class Caller:
    async def abort(self, code: Any, reason: str) -> None:
        raise Aborted(code.name, reason)


def test_calls_end_with_their_server_those_on_their_way_too():
    handled: list[str] = []

    async def handle(name: str, context: Caller) -> None:
        handled.append(name)
        await asyncio.Event().wait()

    async def story() -> None:
        calls = Calls()
        early = asyncio.ensure_future(calls.serving(handle)("early", Caller()))
        await asyncio.sleep(0)
        calls.end()
        for call in (early, calls.serving(handle)("late", Caller())):
            with pytest.raises(Aborted) as caught:
                await call
            assert caught.value.args == ("UNAVAILABLE", "this server stops")

    asyncio.run(story())
    assert handled == ["early"]


def test_a_caller_that_goes_away_is_told_nothing():
    async def story() -> None:
        calls = Calls()
        sleep = calls.serving(lambda seconds, context: asyncio.sleep(seconds))
        call = asyncio.ensure_future(sleep(60, Caller()))
        await asyncio.sleep(0)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call

    asyncio.run(story())


def test_what_a_handler_raises_before_there_is_anything_to_await_is_the_calls_status_too():
    def handle(data: bytes, context: Caller) -> Awaitable[bytes]:
        raise ValueError("no such step")

    async def story() -> None:
        with pytest.raises(Aborted) as caught:
            await Calls().serving(handle)(b"", Caller())
        assert caught.value.args == ("INVALID_ARGUMENT", "no such step")

    asyncio.run(story())


# ------------------------------------------------------------------------------------------------ deadlines


class Ahead(asyncio.SelectorEventLoop):
    """Its clock can be put forward."""

    by_s = 0.0

    def time(self) -> float:
        return super().time() + self.by_s


class Patient(Caller):
    def time_remaining(self) -> float:
        return 60.0


def test_a_far_deadline_is_told_a_little_before_it_comes_and_not_earlier():
    async def story(loop: Ahead) -> None:
        pending, never_waited_for = Pending(), Pending()
        waiting = asyncio.ensure_future(pending.wait(Patient(), looked_at=True))
        await asyncio.sleep(0)
        loop.by_s = 59.0
        pending.expire_if_due(loop.time())
        await asyncio.sleep(0)
        assert not waiting.done()
        loop.by_s = 60.0
        for one in (pending, never_waited_for):
            one.expire_if_due(loop.time())
        with pytest.raises(CallRefused, match="Timeout expired") as caught:
            await asyncio.wait_for(waiting, 10)
        assert caught.value.code is grpc.StatusCode.CANCELLED

    loop = Ahead()
    loop.run_until_complete(story(loop))
    loop.close()


# ------------------------------------------------------------------------------------------------ slow readers


class Deaf:
    """A stream whose reader takes nothing and says nothing."""

    async def write(self, message: bytes) -> None:
        await asyncio.Event().wait()

    async def read(self) -> bytes:
        await asyncio.Event().wait()
        return b""


@pytest.mark.parametrize(("message", "most"), [(b"x", OUTBOX), (bytes(OUTBOX_BYTES // 4), 4)])
def test_a_reader_that_lags_too_far_behind_loses_its_stream(message: bytes, most: int):
    """By the number of messages, or by their bytes."""

    async def story() -> None:
        outbox = Outbox(Deaf())
        reading = asyncio.ensure_future(_handler(outbox))
        await asyncio.sleep(0)
        for _ in range(most):
            outbox.send(message)
        assert not outbox.over
        outbox.send(message)
        said = f"the reader is too slow: {most + 1} messages of {(most + 1) * len(message)} bytes"
        with pytest.raises(CallRefused, match=said):
            await reading
        outbox.send(b"x")
        assert not outbox._messages
        outbox.close()

    async def _handler(outbox: Outbox) -> bytes | None:
        outbox._reader = asyncio.current_task()
        return await outbox.read()

    asyncio.run(story())


def test_the_end_of_a_stream_is_no_message():
    class Ended(Deaf):
        async def read(self) -> Any:
            return grpc.aio.EOF

    async def story() -> None:
        outbox = Outbox(Ended())
        assert await outbox.read() is None
        outbox.close()

    asyncio.run(story())
