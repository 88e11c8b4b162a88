"""Finds slow and faulty ranks, hosts and links in the measurements of all ranks. Pure functions: no I/O, no torch.

`conclusions` applies the other functions to all reports. The usual value is a median over ranks, so that one bad rank does not change it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from statistics import median
from typing import Any

from tools.cluster.settings import CheckSettings

Link = tuple[int, int]  # from, to
LATENCY_TIMES, LATENCY_MORE_S = 5.0, 2e-3  # a late link exceeds the usual latency by this factor and by this time


@dataclass(frozen=True)
class Finding:
    what: str  # silent, failed, wrong, slow link, late link, slow compute, slow disk (write), slow disk (read), clock
    ranks: tuple[int, ...]  # that it blames
    text: str
    links: tuple[Link, ...] = ()  # that are slow or late


@dataclass(frozen=True)
class Names:
    hosts: Sequence[str]  # by rank; "" if the rank never reported

    def rank(self, rank: int) -> str:
        return f"rank {rank} on {self.hosts[rank]}" if self.hosts[rank] else f"rank {rank}"

    def ranks(self, ranks: Iterable[int]) -> str:
        return ", ".join(self.rank(rank) for rank in sorted(ranks))

    def same_host(self, link: Link) -> bool:
        return self.hosts[link[0]] == self.hosts[link[1]]


def silent(names: Names, seen: Mapping[int, str], waited_s: float) -> list[Finding]:
    """Returns a finding per rank that does not respond. `seen`: rank -> the last step that it reached."""
    return [
        Finding("silent", (rank,), f"{names.rank(rank)} did not respond for {waited_s:.0f} s; last step: {step}")
        for rank, step in sorted(seen.items())
    ]


def failed(names: Names, troubles: Mapping[int, str], silent_ranks: Collection[int]) -> list[Finding]:
    """Returns a finding per error; none if ranks are silent, since these cause errors at other ranks."""
    if silent_ranks:
        return []
    by_text: dict[str, list[int]] = {}
    for rank, text in troubles.items():
        by_text.setdefault(text, []).append(rank)
    return [Finding("failed", tuple(sorted(ranks)), f"{names.ranks(ranks)}: {text}") for text, ranks in by_text.items()]


def wrong(
    names: Names, op: str, seen: Sequence[tuple[int, int, str]], pairs: Mapping[Link, bool] | None = None
) -> Finding:
    """Finds the ranks that cause wrong results of `op`. `seen`: (sender of the wrong block, -1 for a reduction over all ranks; receiver;
    description). `pairs`: whether `op` was right when repeated between two ranks; None if it was not repeated."""
    sources, places = {source for source, _, _ in seen}, {at for _, at, _ in seen}
    bad = [{*pair} for pair, right in (pairs or {}).items() if not right]
    common = set.intersection(*bad) if len(bad) > 1 else set[int]()
    ranks: Iterable[int] = sorted(places)
    if len(places) == 1 and (len(seen) > 1 or sources == {-1}):
        text = f"{names.ranks(places)}: wrong result of {op} at this rank only"
    elif len(sources) == 1 and sources != {-1} and len(places) > 1:
        ranks, text = sources, f"{names.ranks(sources)}: all data that it sends in {op} arrives wrong"
    elif len(seen) == 1:
        ranks = seen[0][:2]
        text = f"{op}: data from {names.ranks(sources)} to {names.ranks(places)} arrives wrong"
    elif len(common) == 1:
        ranks, when = common, "is wrong at every rank; repeated between pairs of ranks, only with this rank"
        text = f"{names.ranks(common)}: {op} {when}"
    else:
        repeated = "" if pairs is None else f", {'also' if bad else 'but right'} between pairs of ranks"
        text = f"{op} is wrong at {names.ranks(places)}{repeated}"
    return Finding("wrong", tuple(ranks), f"{text}: {seen[0][2]}")


def needs_pairs(seen: Sequence[tuple[int, int, str]]) -> bool:
    """Returns True if only repeating the operation between pairs of ranks shows which rank is at fault."""
    return len({at for _, at, _ in seen}) > 1 and -1 in {source for source, _, _ in seen}


def slow_ranks(
    names: Names, rates: Mapping[int, float], *, what: str, unit: str, share: float, notes: Mapping[int, str] = {}
) -> list[Finding]:
    """Returns a finding per rank whose rate is below `share` of the median. `notes`: text to append, by rank."""
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
    """Compares each host's best rank with the median host: for a resource that the ranks of a host share."""
    best = {names.hosts[rank]: rank for rank in sorted(rates, key=lambda rank: rates[rank])}
    return slow_ranks(names, {rank: rates[rank] for rank in best.values()}, what=what, unit=unit, share=share)


def clocks(names: Names, ahead: Mapping[int, tuple[float, float]], *, limit_s: float) -> list[Finding]:
    """Finds clocks that differ from the median by more than `limit_s` plus the measurement error. `ahead`: rank -> (seconds, error)."""
    usual = median(value for value, _ in ahead.values()) if ahead else 0.0
    return [
        Finding("clock", (rank,), f"{names.rank(rank)}: its clock is {value - usual:+.3f} s off (within {error:.3f} s)")
        for rank, (value, error) in sorted(ahead.items())
        if abs(value - usual) - error > limit_s
    ]


def bad_links(
    names: Names, rows: Mapping[Link, Mapping[str, float]], *, share: float, least: float = 0.0
) -> list[Finding]:
    """Finds slow links (below `share` of the usual rate, or below `least` bytes/s) and late links (above LATENCY_TIMES the usual latency
    and LATENCY_MORE_S more). Links within hosts and links between hosts are compared separately. `rows`: from `measurements.measure`."""

    def is_slow(rate: float, usual: float) -> bool:
        return rate < max(share * usual, least)

    def is_late(s: float, usual: float) -> bool:
        return s > max(LATENCY_TIMES * usual, usual + LATENCY_MORE_S)

    found = []
    # value**power is larger for a better link. The median of inverse latencies stays good if two of four ranks are late.
    slow = ("slow link", "bytes_s", 1, is_slow, "{:.4g} MB/s, where {:.4g} is usual", 1e6)
    late = ("late link", "latency_s", -1, is_late, "{:.3g} ms, where {:.3g} is usual", 1e-3)
    for (what, key, power, is_bad, format_, unit), on_host in product((slow, late), (True, False)):
        own = {link: row[key] for link, row in rows.items() if names.same_host(link) is on_host}
        # Usual: the median over ranks of each rank's best link. A median over links fails: one bad host of three has 2 of 3 links.
        best: dict[int, float] = {}
        for link, value in own.items():
            best |= {rank: max(best.get(rank, 0.0), value**power) for rank in link}
        usual = median(best.values()) ** power if best else 0.0
        for ranks, links, name in culprits(names, own, {link for link, value in own.items() if is_bad(value, usual)}):
            text = format_.format(median(own[link] for link in links) / unit, usual / unit)
            count = f"{len(links)} link{'s' * (len(links) > 1)}"
            found.append(Finding(what, ranks, f"{name}: {what}s: {text} ({count})", tuple(links)))
    return found


def culprits(names: Names, links: Iterable[Link], bad: Iterable[Link]) -> list[tuple[tuple[int, ...], list[Link], str]]:
    """Returns a small set of culprits that explains all bad links: (ranks, their bad links, name).

    Greedy: a host or rank is a culprit if most of its links are bad, in both directions or in one. The worst is taken first; its links are
    removed, as they say nothing about their other ends. The remaining bad links are reported by pair of hosts, or of ranks of one host.
    """
    everyone, left, still_bad = range(len(names.hosts)), set(links), set(bad)
    groups = [{rank} for rank in everyone]
    groups += [{rank for rank in everyone if names.hosts[rank] == host} for host in sorted({*names.hosts})]
    directions = {"both": "", "out": ", sending", "in": ", receiving"}

    def links_of(group: set[int], direction: str) -> set[Link]:
        sent = {(a, b) for a, b in left if a in group and b not in group} if direction != "in" else set()
        return sent | ({(a, b) for a, b in left if b in group and a not in group} if direction != "out" else set())

    def share(suspect: tuple[set[int], str]) -> tuple[float, int]:
        """Returns share and number of bad links; 0 if all links lead to one other host or rank, which is equally suspect."""
        own = links_of(*suspect)
        others = {rank for link in own for rank in link} - suspect[0]
        hosts = {names.hosts[rank] for rank in others}
        # the ranks of one host count as one
        partners = hosts if hosts - {names.hosts[rank] for rank in suspect[0]} else others
        return (len(own & still_bad) / len(own), len(own & still_bad)) if len(partners) > 1 else (0.0, 0)

    found: list[tuple[tuple[int, ...], list[Link], str]] = []
    while still_bad:
        group, direction = worst = max(product(groups, directions), key=share)
        if share(worst)[0] <= 0.5:
            break
        own = links_of(group, direction)
        found.append((tuple(sorted(group)), sorted(own & still_bad), names.ranks(group) + directions[direction]))
        left -= own
        still_bad -= own
    rest: dict[tuple[Any, ...], list[Link]] = {}
    for a, b in sorted(still_bad):
        ends = (a, b) if names.same_host((a, b)) else (names.hosts[a], names.hosts[b])
        rest.setdefault(tuple(sorted(ends)), []).append((a, b))
    for links_between in rest.values():
        ranks = tuple(sorted({rank for link in links_between for rank in link}))
        a, b = links_between[0]
        sides = [{link[side] for link in links_between} for side in (0, 1)]
        how = "between {} and {}" if sides[0] & sides[1] else "from {} to {}"
        first = {rank for rank in ranks if names.same_host((rank, a))}
        one, other = (first, set(ranks) - first) if first != set(ranks) else ({a}, {b})
        found.append((ranks, links_between, how.format(names.ranks(one), names.ranks(other))))
    return found


def conclusions(
    settings: CheckSettings, names: Names, reports: dict[int, dict[str, Any]], waited_s: float
) -> list[Finding]:
    """Returns all findings. `reports`: by rank; a rank without a report did not respond for `waited_s`."""
    size = len(names.hosts)
    seen = dict.fromkeys((rank for rank in range(size) if rank not in reports), next(iter(reports.values()))["step"])
    for report in reports.values():
        seen |= {int(rank): step for rank, step in report["silent"].items() if int(rank) in seen}
    troubles = {rank: report["trouble"] for rank, report in reports.items() if report["trouble"]}
    found = silent(names, seen, waited_s) + failed(names, troubles, seen)
    measured = {rank: report["figures"] for rank, report in reports.items()}

    def of_each(key: str, rows: Mapping[int, Mapping[str, Any]] = measured) -> dict[int, Any]:
        return {rank: row[key] for rank, row in rows.items() if key in row}

    by_op: dict[str, list[tuple[int, int, str]]] = {}
    for own in measured.values():
        for op, source, at, how in own["wrong"]:
            by_op.setdefault(op, []).append((source, at, how))
    pairs = of_each("pairs")
    ring = [(min(link), max(link)) for link in ((first, (first + 1) % size) for first in range(size))]
    for op, rows in by_op.items():
        bad = {tuple(pair) for own in pairs.values() for pair in own.get(op, ())}
        found.append(wrong(names, op, rows, {pair: pair not in bad for pair in ring} if pairs else None))
    if not found or not troubles:
        links = {(rank, int(peer)): row for rank, own in measured.items() for peer, row in own["links"].items()}
        found += bad_links(names, links, share=settings.slow, least=settings.least_mb_s * 1e6)
    ahead = {rank: (row["ahead_s"], row["error_s"]) for rank, row in of_each("clock").items()}
    found += clocks(names, ahead, limit_s=settings.skew_ms / 1000)
    flops = {rank: flops / 1e9 for rank, flops in of_each("matmul_flops").items()}
    notes = {rank: f"; its thread ran {share:.0%} of that time" for rank, share in of_each("core_share").items()}
    found += slow_ranks(names, flops, what="compute", unit="GFLOP/s", share=settings.slow, notes=notes)
    disks, where = of_each("disk"), f"checkpoint in {settings.folder}"
    for rank, text in next((row["failures"].items() for row in disks.values() if "failures" in row), ()):
        hint = f" ({settings.folder} must be one folder that all hosts share)" if "FileNotFound" in text else ""
        found.append(Finding("failed", (int(rank),), f"{names.rank(int(rank))}: {where}: {text}{hint}"))
    for rank, text in of_each("wrong", disks).items():
        found += [Finding("wrong", (rank,), f"{names.rank(rank)}: {where}: {text}")] if text else []
    for direction in ("write", "read"):
        rates = {rank: rate / 1e6 for rank, rate in of_each(f"{direction}_bytes_s", disks).items()}
        found += slow_hosts(names, rates, what=f"disk ({direction})", unit="MB/s", share=settings.slow)
    return found
