"""The physics of the simulated world: if these are wrong, a thousand green seeds mean nothing."""

from __future__ import annotations

import pytest

from tests.simulator.collectives import Collectives
from tests.simulator.network import Call, Cut, End, Network, Quality, Service
from tests.simulator.world import Process, World


def until(world: World, seconds: float):
    end_s = world.now_s + seconds
    world.after(seconds, None, lambda: None)
    world.run(lambda: world.now_s >= end_s)


class Echo:
    """A server that answers with what it was asked, and keeps what its streams say."""

    def __init__(self, world: World, network: Network, name: str) -> None:
        self.process = Process(name, name, name)
        self.process.at_death.append(lambda: network.forget(self.process))
        self.heard: list[object] = []
        self.kept: list[Call] = []
        self.cancelled = 0
        self.end: End | None = None
        network.listen(name, Service(self.process, self.called, self.opened))

    def called(self, call: Call) -> None:
        self.heard.append(call.request)
        self.kept.append(call)
        call.at_cancel = self.cancel
        if call.request != "keep":
            call.answer(call.request)

    def cancel(self) -> None:
        self.cancelled += 1

    def opened(self, hello: object, end: End) -> None:
        self.heard.append(hello)
        self.end = end
        end.message = self.heard.append
        end.closed = lambda: self.heard.append("closed")


def pair(quality: Quality | None = None) -> tuple[World, Network, Process, Echo]:
    world = World(7)
    network = Network(world, quality or Quality())
    return world, network, Process("client", "here", "here"), Echo(world, network, "server")


def test_things_happen_in_order_of_time_then_of_asking():
    world, seen = World(1), []
    for delay_s, name in ((2.0, "c"), (1.0, "a"), (1.0, "b")):
        world.after(delay_s, None, seen.append, name)
    until(world, 3.0)
    assert seen == ["a", "b", "c"]


def test_a_stopped_process_gets_everything_later_a_dead_one_nothing():
    world, seen = World(1), []
    stopped, dead = Process("s", "s", "s"), Process("d", "d", "d")
    world.stop(stopped)
    world.after(1.0, stopped, seen.append, "late")
    world.after(1.0, dead, seen.append, "never")
    world.kill(dead)
    until(world, 2.0)
    assert seen == []
    world.resume(stopped)
    until(world, 1.0)
    assert seen == ["late"]


def test_a_call_has_exactly_one_answer_or_none():
    world, network, client, server = pair(Quality(loss=0.3, duplicate=0.3, late=0.3))
    answers: dict[int, list[object]] = {i: [] for i in range(300)}
    for i in answers:
        network.call(client, "server", i, answers[i].append, timeout_s=2.0)
    until(world, 5.0)
    assert all(got in ([i], [None]) for i, got in answers.items())
    lost = sum(got == [None] for got in answers.values())
    assert 60 < lost < 240
    assert len(set(server.heard)) < len(server.heard), "no request was doubled"
    assert server.heard != sorted(server.heard), "none was overtaken"


def test_a_caller_that_gives_up_is_noticed():
    world, network, client, server = pair()
    got: list[object] = []
    network.call(client, "server", "keep", got.append, timeout_s=1.0)
    until(world, 2.0)
    assert got == [None] and server.cancelled == 1
    server.kept[0].answer("too late")
    until(world, 1.0)
    assert got == [None]


def test_the_caller_of_a_server_that_dies_or_is_not_there_hears_at_once():
    world, network, client, server = pair()
    got: list[object] = []
    network.call(client, "nobody", 1, got.append, timeout_s=100.0)
    network.call(client, "server", "keep", got.append, timeout_s=100.0)
    until(world, 1.0)
    world.kill(server.process)
    until(world, 1.0)
    assert got == [None, None]


def test_a_stream_keeps_its_order_and_tells_a_death():
    world, network, client, server = pair(Quality(late=0.5))
    end = network.open(client, "server", "hello")
    assert end is not None
    for i in range(50):
        end.send(i)
    until(world, 5.0)
    assert server.heard == ["hello", *range(50)]
    end.close()
    until(world, 2.0)
    assert server.heard[-1] == "closed"
    end = network.open(client, "server", "again")
    assert end is not None
    told: list[str] = []
    end.closed = lambda: told.append("closed")
    until(world, 2.0)
    world.kill(server.process)
    until(world, 2.0)
    assert told == ["closed"]


def test_a_cut_is_silence_and_its_end_brings_what_was_held():
    world, network, client, server = pair()
    end = network.open(client, "server", "hello")
    assert end is not None
    until(world, 1.0)
    cut = Cut(frozenset({"here"}))
    network.cut(cut)
    got: list[object] = []
    network.call(client, "server", 1, got.append, timeout_s=3.0)
    end.send("held")
    until(world, 2.0)
    assert server.heard == ["hello"] and got == []
    until(world, 2.0)
    assert got == [None]
    network.mend(cut)
    until(world, 1.0)
    assert server.heard == ["hello", "held"]
    network.cut(Cut(frozenset({"here"})))
    world.kill(server.process)
    told: list[str] = []
    end.closed = lambda: told.append("closed")
    until(world, 1.0)
    assert told == []
    network.mend(network.cuts[0])
    until(world, 1.0)
    assert told == ["closed"]


def test_a_cut_may_be_one_way_or_between_two_alone():
    def process(name: str) -> Process:
        return Process(name, name, name)

    network = Network(World(1), Quality())
    network.cut(Cut(frozenset({"a"}), frozenset({"b"}), one_way=True))
    assert network.is_cut(process("a"), process("b")) and not network.is_cut(process("b"), process("a"))
    assert not network.is_cut(process("a"), process("c"))


def collective(seed: int) -> tuple[World, Collectives, list[Process], dict[str, object]]:
    world = World(seed)
    network = Network(world, Quality())
    work = Collectives(world, network, seconds=(0.1, 0.1))
    processes = [Process(name, name, name) for name in "abc"]
    for process in processes:
        process.at_death.append(lambda process=process: work.dies(process))
    return world, work, processes, {}


def test_a_collective_needs_everybody():
    world, work, processes, got = collective(1)
    for rank, process in enumerate(processes[:2]):
        work.join(process, (1,), ("sum",), rank, 3, rank, lambda all_, rank=rank: got.update({rank: all_}))
    until(world, 10.0)
    assert got == {}
    work.join(processes[2], (1,), ("sum",), 2, 3, 2, lambda all_: got.update({2: all_}))
    until(world, 1.0)
    assert got == {0: [0, 1, 2], 1: [0, 1, 2], 2: [0, 1, 2]}


def meet(work: Collectives, processes: list[Process], got: dict[str, object], store: str):
    for rank, process in enumerate(processes):
        name = process.name
        work.join(process, (1,), ("meet",), rank, 3, 0, lambda all_, name=name: got.update({name: all_}), store=store)


@pytest.mark.parametrize(("store", "one_way", "through"), [("c", True, {"c": [0, 0, 0]}), ("b", False, {})])
def test_a_pair_that_is_cut_hinders_itself_and_all_where_one_cannot_reach_the_store(
    store: str, one_way: bool, through: dict[str, object]
):
    world, work, processes, got = collective(1)
    cut = Cut(frozenset("a"), frozenset("b"), one_way=one_way)
    work.network.cut(cut)
    meet(work, processes, got, store=store)
    until(world, 10.0)
    assert got == through
    work.network.mend(cut)
    until(world, 1.0)
    assert sorted(got) == ["a", "b", "c"]


def test_after_a_death_each_survivor_completes_fails_or_hangs():
    """Survivors may differ: in some seeds one holds the sums and the other does not."""
    fates: set[tuple[str, str]] = set()
    for seed in range(200):
        world, work, processes, got = collective(seed)
        for rank, process in enumerate(processes):
            work.join(process, (1,), ("sum",), rank, 3, rank, lambda all_, rank=rank, got=got: got.update({rank: all_}))
        until(world, 0.05)
        world.kill(processes[2])
        until(world, 10.0)
        names = {True: "sums", False: "error"}
        fates.add(tuple(names[got[r] is not None] if r in got else "hangs" for r in (0, 1)))
    assert len(fates) == 9


def test_a_generation_that_is_abandoned_holds_nobody():
    world, work, processes, got = collective(1)
    work.join(processes[0], (1,), ("sum",), 0, 3, 0, lambda all_: got.update({0: all_}))
    work.abandon(processes[0], (1,))
    until(world, 10.0)
    assert got == {}
