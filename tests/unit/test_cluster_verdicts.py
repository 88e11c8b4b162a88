"""tools/cluster/verdicts.py and measurements.py: made-up figures as input, the culprits' names as output."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tools.cluster import verdicts
from tools.cluster.measurements import ALL_PAIRS, disjoint_rounds, pairs
from tools.cluster.report import as_json, draw, publish
from tools.cluster.settings import CheckSettings
from tools.cluster.verdicts import Names

FOUR = Names(["a", "b", "c", "d"])


def links(names: Names, rate: float = 1e9, **bad: float) -> dict[tuple[int, int], float]:
    """Returns every link at `rate`, except those given as _FROM_TO."""
    rates = dict.fromkeys(itertools.permutations(range(len(names.hosts)), 2), rate)
    return rates | {(int(name.split("_")[1]), int(name.split("_")[2])): value for name, value in bad.items()}


def slow_links(
    names: Names, rates: dict[tuple[int, int], float], *, share: float, least: float = 0.0
) -> list[verdicts.Finding]:
    rows = {link: {"bytes_s": rate, "latency_s": 1e-4} for link, rate in rates.items()}
    return verdicts.bad_links(names, rows, share=share, least=least)


def late_links(names: Names, latencies: dict[tuple[int, int], float]) -> list[verdicts.Finding]:
    rows = {link: {"bytes_s": 1.0, "latency_s": s} for link, s in latencies.items()}
    return verdicts.bad_links(names, rows, share=0.5)


def told(findings: list[verdicts.Finding]) -> list[str]:
    return [finding.text.partition(": slow")[0].partition(": late")[0] for finding in findings]


def test_a_slow_link_between_two_hosts_is_named_and_neither_host():
    assert slow_links(FOUR, links(FOUR), share=0.5) == []
    rates = links(FOUR, _1_2=1e7, _2_1=1.1e7)
    [finding] = slow_links(FOUR, rates, share=0.5)
    assert finding.ranks == (1, 2)
    assert finding.text == "between rank 1 on b and rank 2 on c: slow links: 10.5 MB/s, where 1000 is usual (2 links)"
    assert told(slow_links(FOUR, links(FOUR, _2_1=1e7), share=0.5)) == ["from rank 2 on c to rank 1 on b"]


def test_a_host_behind_a_slow_cable_is_named_once():
    for size in (3, 4, 5):  # of three hosts, it has two of the three links
        names = Names(list("abcde"[:size]))
        bad = {f"_{a}_{b}": 1e6 for a, b in links(names) if 1 in (a, b)}
        [finding] = slow_links(names, links(names, **bad), share=0.5)
        assert finding.ranks == (1,) and finding.text.startswith("rank 1 on b: slow links: 1 MB/s, where 1000 is usual")


def test_a_host_that_only_sends_slowly_is_told_so():
    bad = {f"_3_{to}": 1e6 for to in (0, 1, 2)}
    assert told(slow_links(FOUR, links(FOUR, **bad), share=0.5)) == ["rank 3 on d, sending"]


def test_all_ranks_of_a_host_behind_one_cable_are_one_finding():
    names = Names(["a", "a", "b", "b", "c", "c"])
    bad = {f"_{a}_{b}": 1e6 for a, b in links(names) if (a in (2, 3)) != (b in (2, 3))}
    [finding] = slow_links(names, links(names, **bad), share=0.5)
    assert finding.ranks == (2, 3) and "rank 2 on b, rank 3 on b: slow links" in finding.text
    figures = {
        rank: {"links": {str(peer): {"bytes_s": 1e6} for peer in range(6) if peer != rank}, "values": {}}
        for rank in range(6)
    }
    reports = {rank: {"figures": {**own, "seconds": {}}, "torch": ""} for rank, own in figures.items()}
    report = as_json(cast(Any, SimpleNamespace(backend="", init_method="", slow=1.0)), names.hosts, reports, [finding])
    marked = set(re.findall(r'<rect class="bad".*?<title>(\d) to (\d):', draw(report, "")))
    assert marked == {tuple(link[1:].split("_")) for link in bad}


def test_two_hosts_have_no_third_to_tell_which_but_a_direction_shows():
    names = Names(["a", "a", "b", "b"])
    bad = {f"_{a}_{b}": 1e6 for a in (0, 1) for b in (2, 3)}
    [finding] = slow_links(names, links(names, **bad), share=0.5)
    assert set(finding.ranks) <= {0, 1, 2, 3} and finding.what == "slow link"
    assert "rank 0 on a, rank 1 on a" in finding.text


def test_links_on_a_host_and_between_hosts_are_not_compared():
    names = Names(["a", "a", "b", "b"])
    slower = {f"_{a}_{b}": 1e8 for a, b in links(names) if names.hosts[a] != names.hosts[b]}
    assert slow_links(names, links(names, 1e10, **slower), share=0.5) == []


def test_least_is_asked_of_every_link():
    two = Names(["a", "b"])
    assert slow_links(two, links(two, 1e6), share=0.5) == []
    assert len(slow_links(two, links(two, 1e6), share=0.5, least=1e7)) == 1


def test_late_links():
    late = {f"_2_{to}": 0.04 for to in (0, 1, 3)}
    [finding] = late_links(FOUR, links(FOUR, 1e-4, **late))
    assert finding.text == "rank 2 on c, sending: late links: 40 ms, where 0.1 is usual (3 links)"
    assert late_links(FOUR, links(FOUR, 1e-5, _0_1=1e-4)) == []  # ten times as much, but microseconds


def test_two_late_ranks_of_four_do_not_become_usual():
    prompt = {"_0_1": 1e-3, "_1_0": 1e-3}
    found = late_links(FOUR, links(FOUR, 0.1, **prompt))
    assert {rank for finding in found for rank in finding.ranks} >= {2, 3}
    assert all("late links: 100 ms, where 1.98 is usual" in finding.text for finding in found)


def test_a_slow_rank_is_named():
    rates = {0: 100.0, 1: 98.0, 2: 41.0, 3: 103.0}
    [finding] = verdicts.slow_ranks(FOUR, rates, what="compute", unit="GFLOP/s", share=0.5)
    assert finding.text == "rank 2 on c: slow compute: 41 GFLOP/s, where 99 is usual"
    notes = {rank: f"; its thread ran {rank / 4:.0%} of that time" for rank in rates}
    [finding] = verdicts.slow_ranks(FOUR, rates, what="compute", unit="GFLOP/s", share=0.5, notes=notes)
    assert finding.text.endswith("where 99 is usual; its thread ran 50% of that time")
    assert verdicts.slow_ranks(FOUR, {0: 1.0}, what="compute", unit="", share=0.5) == []


def test_a_slow_disk_is_a_hosts():
    names = Names(["a", "a", "b", "b", "c", "c"])
    rates = {0: 100.0, 1: 5.0, 2: 90.0, 3: 95.0, 4: 8.0, 5: 10.0}  # rank 1 waited for rank 0
    [finding] = verdicts.slow_hosts(names, rates, what="disk", unit="MB/s", share=0.5)
    assert finding.text == "rank 5 on c: slow disk: 10 MB/s, where 95 is usual"


def test_a_report_that_cannot_be_written_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    settings = CheckSettings.parse(["--folder", str(tmp_path / "full")])
    settings.folder.write_text("no folder can be made here")
    figures = {"seconds": {}, "links": {}, "values": {}, "disk": {"failures": {"0": "No space left on device"}}}
    reports = {0: {"torch": "2.0", "figures": figures}}
    with pytest.raises(OSError, match="full"):
        publish(settings, ["a"], reports, [verdicts.Finding("failed", (0,), "rank 0 on a: no space left")])
    assert "FINDINGS (1):\n  rank 0 on a: no space left" in capsys.readouterr().out


def test_a_wrong_clock_is_named_even_rank_0s_by_which_all_were_measured():
    ahead = {0: (0.0, 0.0), 1: (-7.2, 1e-4), 2: (-7.1, 1e-4), 3: (-7.3, 1e-4)}
    [finding] = verdicts.clocks(FOUR, ahead, limit_s=0.5)
    assert finding.text == "rank 0 on a: its clock is +7.150 s off (within 0.000 s)"
    assert verdicts.clocks(FOUR, {0: (0.0, 0.0), 1: (0.9, 0.5), 2: (0.0, 0.0)}, limit_s=0.5) == []  # may be an error


def test_a_result_wrong_at_one_rank_is_its_own():
    finding = verdicts.wrong(FOUR, "all_reduce MAX", [(-1, 2, "element 0 is 1, not 2")])
    assert finding.ranks == (2,)
    assert finding.text == "rank 2 on c: wrong result of all_reduce MAX at this rank only: element 0 is 1, not 2"
    assert verdicts.wrong(FOUR, "all_gather", [(0, 3, "x"), (1, 3, "x"), (2, 3, "x")]).ranks == (3,)


def test_a_block_that_is_wrong_wherever_it_arrives_is_its_senders():
    finding = verdicts.wrong(FOUR, "broadcast", [(1, 0, "x"), (1, 2, "x"), (1, 3, "x")])
    assert finding.ranks == (1,)
    assert finding.text.startswith("rank 1 on b: all data that it sends in broadcast arrives wrong")


def test_one_block_at_one_rank_is_between_the_two():
    finding = verdicts.wrong(FOUR, "send/recv", [(1, 2, "x")])
    assert finding.ranks == (1, 2) and "data from rank 1 on b to rank 2 on c arrives wrong" in finding.text


def test_a_sum_wrong_everywhere_is_looked_for_two_by_two():
    seen = [(-1, rank, "x") for rank in range(4)]
    assert verdicts.needs_pairs(seen) and not verdicts.needs_pairs(seen[:1])
    ring = {(0, 1): True, (1, 2): False, (2, 3): False, (0, 3): True}
    finding = verdicts.wrong(FOUR, "all_reduce SUM", seen, ring)
    assert finding.ranks == (2,) and "rank 2 on c: all_reduce SUM is wrong at every rank" in finding.text
    once = verdicts.wrong(FOUR, "all_reduce SUM", seen, dict.fromkeys(ring, True))
    assert once.ranks == (0, 1, 2, 3) and "but right between pairs of ranks" in once.text


def test_silent_ranks_are_named_and_their_neighbours_errors_are_not():
    assert [finding.text for finding in verdicts.silent(FOUR, {2: "values: reduce MIN"}, 15)] == [
        "rank 2 on c did not respond for 15 s; last step: values: reduce MIN"
    ]
    assert verdicts.failed(FOUR, {0: "timed out", 1: "timed out"}, {2}) == []
    [finding] = verdicts.failed(FOUR, {1: "out of memory"}, ())
    assert finding.text == "rank 1 on b: out of memory"
    assert Names(["a", ""]).rank(1) == "rank 1"  # never said where it is


def test_in_a_round_of_links_no_host_is_in_two_pairs():
    hosts = ["a", "a", "b", "b", "c", "d", "d", "d"]
    made = disjoint_rounds(pairs(hosts), hosts)
    assert sorted(pair for together in made for pair in together) == list(itertools.combinations(range(8), 2))
    for together in made:
        busy = Counter(host for pair in together for host in {hosts[rank] for rank in pair})
        assert set(busy.values()) == {1}
    assert len(disjoint_rounds(pairs(list("abcdefgh")), list("abcdefgh"))) < 14  # at best 7


def test_of_many_ranks_hosts_are_linked_place_by_place():
    hosts = [f"node{rank // 8}" for rank in range(ALL_PAIRS + 8)]
    chosen = pairs(hosts)
    assert (0, 7) in chosen and (0, 8) in chosen and (3, 67) in chosen and (0, 9) not in chosen
    assert len(chosen) == 9 * 28 + 8 * 36
