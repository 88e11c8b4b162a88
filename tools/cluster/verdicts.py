"""From figures to culprits. Pure: figures and names in, findings out, independent of how the figures were measured.

`conclusions` applies the functions above it to all reports. What is usual is a median over ranks, so one bad rank does not move it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from statistics import median
from typing import Any

from tools.cluster.settings import CheckSettings

Link = tuple[int, int]  # from, to
LATENCY_TIMES, LATENCY_MORE_S = 5.0, 2e-3  # a link is late that takes so many times, and so much more than, the usual


@dataclass(frozen=True)
class Finding:
    what: str  # silent, failed, wrong, slow link, late link, slow rank, slow disk, clock
    ranks: tuple[int, ...]
    text: str


@dataclass(frozen=True)
class Names:
    hosts: Sequence[str]  # by rank; "": unknown, since it never reported

    def rank(self, rank: int) -> str:
        return f"rank {rank} on {self.hosts[rank]}" if self.hosts[rank] else f"rank {rank}"

    def ranks(self, ranks: Iterable[int]) -> str:
        return ", ".join(self.rank(rank) for rank in sorted(ranks))

    def same_host(self, link: Link) -> bool:
        return self.hosts[link[0]] == self.hosts[link[1]]


def silent(names: Names, seen: Mapping[int, str], waited_s: float) -> list[Finding]:
    """Ranks that no longer report; `seen`: the step at which each was last seen."""
    return [
        Finding("silent", (rank,), f"{names.rank(rank)} said nothing for {waited_s:.0f} s; last seen at: {step}")
        for rank, step in sorted(seen.items())
    ]


def failed(names: Names, troubles: Mapping[int, str], silent_ranks: Collection[int]) -> list[Finding]:
    """Ranks that met with an error. Silent ranks cause errors of others, so where there are any, errors are not reported."""
    if silent_ranks:
        return []
    told: dict[str, list[int]] = {}
    for rank, text in troubles.items():
        told.setdefault(text, []).append(rank)
    return [Finding("failed", tuple(sorted(ranks)), f"{names.ranks(ranks)}: {text}") for text, ranks in told.items()]


def wrong(
    names: Names, op: str, seen: Sequence[tuple[int, int, str]], pairs: Mapping[Link, bool] | None = None
) -> Finding:
    """Finds the ranks whose results of `op` are wrong. `seen`: (rank of the wrong block, -1 where the numbers of all are in it; rank that
    sees it; description). `pairs`: whether the operation was right between two ranks alone; measured where all ranks see it wrong."""
    sources, places = {source for source, _, _ in seen}, {at for _, at, _ in seen}
    bad = [{*pair} for pair, right in (pairs or {}).items() if not right]
    common = set.intersection(*bad) if len(bad) > 1 else set[int]()
    ranks: Iterable[int] = sorted(places)
    if len(places) == 1 and (len(seen) > 1 or sources == {-1}):
        text = f"{names.ranks(places)}: {op} gave it a wrong result"
    elif len(sources) == 1 and sources != {-1} and len(places) > 1:
        ranks, text = sources, f"{names.ranks(sources)}: in {op} all that it sends arrives wrong"
    elif len(seen) == 1:
        ranks = seen[0][:2]
        text = f"{op}: what {names.ranks(sources)} sends to {names.ranks(places)} arrives wrong"
    elif len(common) == 1:
        ranks, when = common, "wrong at every rank, and of two ranks alone whenever this one takes part"
        text = f"{names.ranks(common)}: {op} is {when}"
    else:
        tried = "" if pairs is None else ", and right between any two" if not bad else ", also between two"
        text = f"{op} is wrong at {names.ranks(places)}{tried}"
    return Finding("wrong", tuple(ranks), f"{text}: {seen[0][2]}")


def needs_pairs(seen: Sequence[tuple[int, int, str]]) -> bool:
    """True where only a repetition, two ranks at a time, shows whose fault it is."""
    return len({at for _, at, _ in seen}) > 1 and -1 in {source for source, _, _ in seen}


def slow_ranks(
    names: Names, rates: Mapping[int, float], *, what: str, unit: str, share: float, notes: Mapping[int, str] = {}
) -> list[Finding]:
    """Ranks whose rate is below `share` of the median; `notes`: further facts about a rank."""
    usual = median(rates.values()) if len(rates) > 1 else 0.0
    return [
        Finding(
            f"slow {what}",
            (rank,),
            f"{names.rank(rank)}: slow {what}: {rate:.4g} {unit}, where {usual:.4g} is usual{notes.get(rank, '')}",
        )
        for rank, rate in sorted(rates.items())
        if rate < share * usual
    ]


def slow_hosts(names: Names, rates: Mapping[int, float], *, what: str, unit: str, share: float) -> list[Finding]:
    """Hosts whose best rank is below `share` of the median host: for a resource that the ranks of a host share."""
    best = {names.hosts[rank]: rank for rank in sorted(rates, key=lambda rank: rates[rank])}
    return slow_ranks(names, {rank: rates[rank] for rank in best.values()}, what=what, unit=unit, share=share)


def clocks(names: Names, ahead: Mapping[int, tuple[float, float]], *, limit_s: float) -> list[Finding]:
    """Clocks that differ from the median by more than the limit and the error of measuring: (seconds ahead, error)."""
    usual = median(value for value, _ in ahead.values()) if ahead else 0.0
    return [
        Finding("clock", (rank,), f"{names.rank(rank)}: its clock is {value - usual:+.3f} s off (within {error:.3f} s)")
        for rank, (value, error) in sorted(ahead.items())
        if abs(value - usual) - error > limit_s
    ]


def bad_links(
    names: Names, rows: Mapping[Link, Mapping[str, float]], *, share: float, least: float = 0.0
) -> list[Finding]:
    """Slow links: below `share` of the usual rate, or below `least` bytes/s. Late links: messages take several times as long as is usual,
    and milliseconds more. Links on one host are compared with each other, and those between hosts. `rows`: of `measurements.measure`."""

    def is_slow(rate: float, usual: float) -> bool:
        return rate < max(share * usual, least)

    def is_late(s: float, usual: float) -> bool:
        return s > max(LATENCY_TIMES * usual, usual + LATENCY_MORE_S)

    found = []
    # The power of a figure that is the better the larger: of four ranks two late ones must not become usual.
    slow = ("slow link", "bytes_s", 1, is_slow, "{:.4g} MB/s, where {:.4g} is usual", 1e6)
    late = ("late link", "latency_s", -1, is_late, "{:.3g} ms, where {:.3g} is usual", 1e-3)
    for (what, key, power, is_bad, told, unit), on_host in product((slow, late), (True, False)):
        own = {link: row[key] for link, row in rows.items() if names.same_host(link) is on_host}
        # The median over ranks of each one's best link. Not over links: of three hosts a bad one has two of the three links.
        best: dict[int, float] = {}
        for link, figure in own.items():
            best |= {rank: max(best.get(rank, 0.0), figure**power) for rank in link}
        usual = median(best.values()) ** power if best else 0.0
        for ranks, links, who in blame(names, own, {link for link, figure in own.items() if is_bad(figure, usual)}):
            text = told.format(median(own[link] for link in links) / unit, usual / unit)
            found.append(Finding(what, ranks, f"{who}: {what}s: {text} ({len(links)} of them)"))
    return found


def blame(names: Names, links: Iterable[Link], bad: Iterable[Link]) -> list[tuple[tuple[int, ...], list[Link], str]]:
    """The fewest culprits that explain all bad links: (ranks, their bad links, their name).

    A host or rank is a culprit if most of its links are bad, both ways or one way; the worst first, since a neighbour's links to it say
    nothing about the neighbour. The links that are then left are named one by one.
    """
    everyone, left, still_bad = range(len(names.hosts)), set(links), set(bad)
    parties = [{rank} for rank in everyone]
    parties += [{rank for rank in everyone if names.hosts[rank] == host} for host in sorted({*names.hosts})]
    ways = {"both": "", "out": ", what it sends", "in": ", what it receives"}

    def links_of(party: set[int], way: str) -> set[Link]:
        sent = {(a, b) for a, b in left if a in party and b not in party} if way != "in" else set()
        return sent | ({(a, b) for a, b in left if b in party and a not in party} if way != "out" else set())

    def share(suspect: tuple[set[int], str]) -> tuple[float, int]:
        """Share and number of bad links; 0 where all of them lead to one other host or rank, which is as suspect."""
        its = links_of(*suspect)
        others = {rank for link in its for rank in link} - suspect[0]
        hosts = {names.hosts[rank] for rank in others}
        # the ranks of one host count as one
        partners = hosts if hosts - {names.hosts[rank] for rank in suspect[0]} else others
        return (len(its & still_bad) / len(its), len(its & still_bad)) if len(partners) > 1 else (0.0, 0)

    blamed: list[tuple[tuple[int, ...], list[Link], str]] = []
    while still_bad:
        party, way = worst = max(product(parties, ways), key=share)
        if share(worst)[0] <= 0.5:
            break
        its = links_of(party, way)
        blamed.append((tuple(sorted(party)), sorted(its & still_bad), names.ranks(party) + ways[way]))
        left -= its
        still_bad -= its
    rest: dict[tuple[Any, ...], list[Link]] = {}
    for a, b in sorted(still_bad):
        ends = (a, b) if names.same_host((a, b)) else (names.hosts[a], names.hosts[b])
        rest.setdefault(tuple(sorted(ends)), []).append((a, b))
    for its_links in rest.values():
        ranks = tuple(sorted({rank for link in its_links for rank in link}))
        sides = [{link[side] for link in its_links} for side in (0, 1)]
        how = "between {} and {}" if sides[0] & sides[1] else "from {} to {}"
        first = {rank for rank in ranks if names.same_host((rank, its_links[0][0]))}
        one, other = (first, set(ranks) - first) if first != set(ranks) else ({its_links[0][0]}, {its_links[0][1]})
        blamed.append((ranks, its_links, how.format(names.ranks(one), names.ranks(other))))
    return blamed


def conclusions(
    settings: CheckSettings, names: Names, reports: dict[int, dict[str, Any]], waited_s: float
) -> list[Finding]:
    """All findings in the ranks' reports; a rank that is not in it reported nothing."""
    size = len(names.hosts)
    seen = dict.fromkeys((rank for rank in range(size) if rank not in reports), next(iter(reports.values()))["step"])
    for report in reports.values():
        seen |= {int(rank): step for rank, step in report["silent"].items() if int(rank) in seen}
    troubles = {rank: report["trouble"] for rank, report in reports.items() if report["trouble"]}
    found = silent(names, seen, waited_s) + failed(names, troubles, seen)
    figures = {rank: report["figures"] for rank, report in reports.items()}

    def of_each(key: str, rows: Mapping[int, Mapping[str, Any]] = figures) -> dict[int, Any]:
        return {rank: row[key] for rank, row in rows.items() if key in row}

    by_op: dict[str, list[tuple[int, int, str]]] = {}
    for own in figures.values():
        for op, source, at, how in own["wrong"]:
            by_op.setdefault(op, []).append((source, at, how))
    pairs = of_each("pairs")
    ring = [(min(link), max(link)) for link in ((first, (first + 1) % size) for first in range(size))]
    for op, rows in by_op.items():
        bad = {tuple(pair) for own in pairs.values() for pair in own.get(op, ())}
        found.append(wrong(names, op, rows, {pair: pair not in bad for pair in ring} if pairs else None))
    if not found or not troubles:
        links = {(rank, int(peer)): row for rank, own in figures.items() for peer, row in own["links"].items()}
        found += bad_links(names, links, share=settings.slow, least=settings.least_mb_s * 1e6)
    ahead = {rank: (row["ahead_s"], row["error_s"]) for rank, row in of_each("clock").items()}
    found += clocks(names, ahead, limit_s=settings.skew_ms / 1000)
    flops = {rank: flops / 1e9 for rank, flops in of_each("matmul_flops").items()}
    notes = {rank: f"; it had a core {share:.0%} of that time" for rank, share in of_each("core_share").items()}
    found += slow_ranks(names, flops, what="compute", unit="GFLOP/s", share=settings.slow, notes=notes)
    disks, where = of_each("disk"), f"checkpoint in {settings.folder}"
    for rank, text in next((row["failures"].items() for row in disks.values() if "failures" in row), ()):
        hint = f" ({settings.folder} must be one folder, seen by all)" if "FileNotFound" in text else ""
        found.append(Finding("failed", (int(rank),), f"{names.rank(int(rank))}: {where}: {text}{hint}"))
    for rank, text in of_each("wrong", disks).items():
        found += [Finding("wrong", (rank,), f"{names.rank(rank)}: {where}: {text}")] if text else []
    for way in ("write", "read"):
        rates = {rank: rate / 1e6 for rank, rate in of_each(f"{way}_bytes_s", disks).items()}
        found += slow_hosts(names, rates, what=f"disk ({way})", unit="MB/s", share=settings.slow)
    return found
