"""From figures to culprits. Pure: numbers and names in, findings out; nothing here knows how they were measured.

`conclusions` brings all that the ranks said before the functions above it.

What is usual is a median over ranks, so one bad rank does not move it; what is bad is named by rank and host.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from tools.cluster.settings import CheckSettings

Link = tuple[int, int]  # from, to
IsBad = Callable[[float, float], bool]  # of a figure and the usual one
LATENCY_TIMES, LATENCY_MORE_S = 5.0, 2e-3  # a link is late that takes so many times, and so much more than, the usual


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong, and whose it is."""

    what: str  # silent, failed, wrong, slow link, late link, slow rank, slow disk, clock
    ranks: tuple[int, ...]
    text: str


class Names:
    """How ranks are called in findings."""

    def __init__(self, hosts: Sequence[str]) -> None:
        """`hosts` by rank; "": unknown, since it never said a word."""
        self.hosts = list(hosts)

    def rank(self, rank: int) -> str:
        return f"rank {rank} on {self.hosts[rank]}" if self.hosts[rank] else f"rank {rank}"

    def ranks(self, ranks: Collection[int]) -> str:
        return ", ".join(self.rank(rank) for rank in sorted(ranks))


def silent(names: Names, seen: Mapping[int, str], waited_s: float) -> list[Finding]:
    """Ranks that said nothing any more; `seen`: what each was last seen at."""
    return [
        Finding("silent", (rank,), f"{names.rank(rank)} said nothing for {waited_s:.0f} s; last seen at: {step}")
        for rank, step in sorted(seen.items())
    ]


def failed(names: Names, troubles: Mapping[int, str], silent_ranks: Collection[int]) -> list[Finding]:
    """Ranks that met with an error. Where others were silent, an error is their doing, and is not told again."""
    if silent_ranks:
        return []
    told: dict[str, list[int]] = {}
    for rank, text in troubles.items():
        told.setdefault(text, []).append(rank)
    return [Finding("failed", tuple(sorted(ranks)), f"{names.ranks(ranks)}: {text}") for text, ranks in told.items()]


def wrong(
    names: Names, op: str, seen: Sequence[tuple[int, int, str]], pairs: Mapping[tuple[int, int], bool] | None = None
) -> Finding:
    """Finds the ranks whose results of `op` are wrong. `seen`: (whose block, at which rank, how); whose is -1 where all are in it.

    `pairs`: the same operation between two ranks alone, and whether it was right; asked for where all saw it wrong.
    """
    sources, places, how = {source for source, _, _ in seen}, {at for _, at, _ in seen}, seen[0][2]
    if len(places) == 1 and (len(seen) > 1 or sources == {-1}):
        [at] = places
        return Finding("wrong", (at,), f"{names.rank(at)}: {op} gave it a wrong result: {how}")
    if len(sources) == 1 and sources != {-1} and len(places) > 1:
        [source] = sources
        return Finding("wrong", (source,), f"{names.rank(source)}: in {op} all that it sends arrives wrong: {how}")
    if len(seen) == 1:
        source, at, _ = seen[0]
        where = f"what {names.rank(source)} sends to {names.rank(at)}"
        return Finding("wrong", (source, at), f"{op}: {where} arrives wrong: {how}")
    bad = [set(pair) for pair, right in (pairs or {}).items() if not right]
    common = set.intersection(*bad) if bad else set()
    if len(common) == 1 and len(bad) > 1:
        [culprit] = common
        text = f"{names.rank(culprit)}: {op} is wrong at every rank, and of two ranks alone whenever this one takes part: {how}"
        return Finding("wrong", (culprit,), text)
    tried = "" if pairs is None else ", and right between any two" if not bad else ", also between two"
    return Finding("wrong", tuple(sorted(places)), f"{op} is wrong at {names.ranks(places)}{tried}: {how}")


def needs_pairs(seen: Sequence[tuple[int, int, str]]) -> bool:
    """True when only a second look, two ranks at a time, can tell whose it is."""
    return len({at for _, at, _ in seen}) > 1 and -1 in {source for source, _, _ in seen}


def slow_ranks(
    names: Names,
    rates: Mapping[int, float],
    *,
    what: str,
    unit: str,
    share: float,
    notes: Mapping[int, str] | None = None,
) -> list[Finding]:
    """Ranks whose rate is below `share` of the median; `notes`: what else is known of a rank."""
    if len(rates) < 2:
        return []
    usual = median(rates.values())
    told = {
        rank: f"{rate:.4g} {unit}, where {usual:.4g} is usual" for rank, rate in rates.items() if rate < share * usual
    }
    return [
        Finding(f"slow {what}", (rank,), f"{names.rank(rank)}: slow {what}: {text}{(notes or {}).get(rank, '')}")
        for rank, text in sorted(told.items())
    ]


def slow_hosts(names: Names, rates: Mapping[int, float], *, what: str, unit: str, share: float) -> list[Finding]:
    """Hosts whose best rank is below `share` of the median host: for what the ranks of a host share."""
    best = {names.hosts[rank]: rank for rank in sorted(rates, key=lambda rank: rates[rank])}
    return slow_ranks(names, {rank: rates[rank] for rank in best.values()}, what=what, unit=unit, share=share)


def clocks(names: Names, ahead: Mapping[int, tuple[float, float]], *, limit_s: float) -> list[Finding]:
    """Clocks that differ from the median by more than the limit and the error of measuring: (seconds ahead, error)."""
    usual = median(value for value, _ in ahead.values())
    return [
        Finding("clock", (rank,), f"{names.rank(rank)}: its clock is {value - usual:+.3f} s off (within {error:.3f} s)")
        for rank, (value, error) in sorted(ahead.items())
        if abs(value - usual) - error > limit_s
    ]


def slow_links(names: Names, bytes_s: Mapping[Link, float], *, share: float, least: float = 0.0) -> list[Finding]:
    """Links below `share` of what is usual, on one host or between hosts; `least` (bytes/s) is asked of each."""
    told = "{:.4g} MB/s, where {:.4g} is usual"
    return _judged(names, "slow link", bytes_s, 1, lambda rate, usual: rate < max(share * usual, least), told, 1e6)


def late_links(names: Names, latency_s: Mapping[Link, float]) -> list[Finding]:
    """Links whose messages take several times as long as is usual, and milliseconds more."""

    def is_late(s: float, usual: float) -> bool:
        return s > max(LATENCY_TIMES * usual, usual + LATENCY_MORE_S)

    return _judged(names, "late link", latency_s, -1, is_late, "{:.3g} ms, where {:.3g} is usual", 1e-3)


def _judged(
    names: Names, what: str, figures: Mapping[Link, float], power: int, is_bad: IsBad, told: str, unit: float
) -> list[Finding]:
    """Compares links on one host with each other, and those between hosts. `power`: of a figure, which makes it the better the larger."""
    found = []
    for kind in (True, False):
        own = {
            link: figure for link, figure in figures.items() if (names.hosts[link[0]] == names.hosts[link[1]]) is kind
        }
        # The median over ranks of each one's best link. Not over links: of three hosts a bad one has two of the three links.
        best: dict[int, float] = {}
        for link, figure in own.items():
            best |= {rank: max(best.get(rank, 0.0), figure**power) for rank in link}
        usual = median(best.values()) ** power if best else 0.0
        for ranks, links, who in blame(names, own, {link for link, figure in own.items() if is_bad(figure, usual)}):
            text = told.format(median(own[link] for link in links) / unit, usual / unit)
            found.append(Finding(what, ranks, f"{who}: {what}s: {text} ({len(links)} of them)"))
    return found


def blame(
    names: Names, links: Collection[Link], bad: Collection[Link]
) -> list[tuple[tuple[int, ...], list[Link], str]]:
    """The fewest that explain all bad links: (ranks, their bad links, their name).

    A host or rank most of whose links are bad, all or those one way, is what is bad; the worst first, since a neighbour's
    links to it say nothing of the neighbour. What is then left are single links.
    """
    left, still_bad = set(links), set(bad)
    blamed: list[tuple[tuple[int, ...], list[Link], str]] = []
    while still_bad and (worst := _worst(names, left, still_bad)):
        party, way = worst
        its = _links_of(party, way, left)
        which = {"out": ", what it sends", "in": ", what it receives"}.get(way, "")
        blamed.append((tuple(sorted(party)), sorted(its & still_bad), names.ranks(party) + which))
        left -= its
        still_bad -= its
    rest: dict[tuple[Any, ...], list[Link]] = {}
    for a, b in sorted(still_bad):
        hosts = (names.hosts[a], names.hosts[b])
        rest.setdefault(tuple(sorted((a, b) if hosts[0] == hosts[1] else hosts)), []).append((a, b))
    for its_links in rest.values():
        ranks = tuple(sorted({rank for link in its_links for rank in link}))
        sides = [{link[side] for link in its_links} for side in (0, 1)]
        how = "between {} and {}" if sides[0] & sides[1] else "from {} to {}"
        first = {rank for rank in ranks if names.hosts[rank] == names.hosts[its_links[0][0]]}
        one, other = (first, set(ranks) - first) if first != set(ranks) else ({its_links[0][0]}, {its_links[0][1]})
        blamed.append((ranks, its_links, how.format(names.ranks(one), names.ranks(other))))
    return blamed


def _worst(names: Names, links: set[Link], bad: set[Link]) -> tuple[frozenset[int], str] | None:
    """The host or rank, and the way ("both", "out", "in"), with the largest share of bad links; None: nobody has most of them bad."""
    everyone = range(len(names.hosts))
    parties = [frozenset({rank}) for rank in everyone]
    parties += [frozenset(rank for rank in everyone if names.hosts[rank] == host) for host in sorted(set(names.hosts))]
    worst, most = None, (0.5, 0)
    for party in parties:
        for way in ("both", "out", "in"):
            its = _links_of(party, way, links)
            others = {rank for link in its for rank in link if rank not in party}
            hosts = {names.hosts[rank] for rank in others}
            # ranks of one host are one voice
            partners = hosts if hosts - {names.hosts[rank] for rank in party} else others
            share = (len(its & bad) / len(its), len(its & bad)) if its else (0.0, 0)
            if len(partners) > 1 and share[0] > 0.5 and share > most:
                worst, most = (party, way), share
    return worst


def _links_of(party: Collection[int], way: str, links: Collection[Link]) -> set[Link]:
    """Links between it and others: those on which it sends ("out"), receives ("in"), or both."""
    return {
        (a, b)
        for a, b in links
        if (way != "in" and a in party and b not in party) or (way != "out" and b in party and a not in party)
    }


def bad_links(settings: CheckSettings, names: Names, rows: Mapping[Link, Mapping[str, float]]) -> list[Finding]:
    """Slow and late ones, by what `probes.measure` gives of each."""
    bytes_s = {link: row["bytes_s"] for link, row in rows.items()}
    slow = slow_links(names, bytes_s, share=settings.slow, least=settings.least_mb_s * 1e6)
    return slow + late_links(names, {link: row["latency_s"] for link, row in rows.items()})


def conclusions(
    settings: CheckSettings, names: Names, said: dict[int, dict[str, Any]], waited_s: float
) -> list[Finding]:
    """All findings in what the ranks said, by rank; who is not in it said nothing."""
    seen: dict[int, str] = {}
    for words in said.values():
        seen |= {int(rank): step for rank, step in words["silent"].items() if int(rank) not in said}
    last_step = next(iter(said.values()))["step"]
    for rank in range(len(names.hosts)):
        if rank not in said:
            seen.setdefault(rank, last_step)
    found = silent(names, seen, waited_s)
    troubles = {rank: words["trouble"] for rank, words in said.items() if words["trouble"]}
    found += failed(names, troubles, seen)
    figures = {rank: words["figures"] for rank, words in said.items()}
    by_op: dict[str, list[tuple[int, int, str]]] = {}
    for own in figures.values():
        for op, source, at, how in own["wrong"]:
            by_op.setdefault(op, []).append((source, at, how))
    size, tried = len(names.hosts), any("pairs" in own for own in figures.values())
    ring = {tuple(sorted((first, (first + 1) % size))) for first in range(size)}
    for op, rows in by_op.items():
        bad = {tuple(pair) for own in figures.values() for pair in own.get("pairs", {}).get(op, ())}
        found.append(wrong(names, op, rows, {(a, b): (a, b) not in bad for a, b in ring} if tried else None))
    if not found or not troubles:
        links = {(rank, int(peer)): row for rank, own in figures.items() for peer, row in own["links"].items()}
        found += bad_links(settings, names, links)
    ahead = {rank: (row["ahead_s"], row["error_s"]) for rank, row in _each(figures, "clock").items()}
    found += clocks(names, ahead, limit_s=settings.skew_s) if ahead else []
    flops = {rank: flops / 1e9 for rank, flops in _each(figures, "matmul_flops").items()}
    shares = _each(figures, "core_share")
    notes = {rank: f"; it had a core {share:.0%} of that time" for rank, share in shares.items()}
    found += slow_ranks(names, flops, what="compute", unit="GFLOP/s", share=settings.slow, notes=notes)
    disks, where = _each(figures, "disk"), f"checkpoint in {settings.folder}"
    for rank, text in next((row["failures"].items() for row in disks.values() if "failures" in row), ()):
        hint = f" ({settings.folder} must be one folder, seen by all)" if "FileNotFound" in text else ""
        found.append(Finding("failed", (int(rank),), f"{names.rank(int(rank))}: {where}: {text}{hint}"))
    for rank, row in disks.items():
        if row.get("wrong"):
            found.append(Finding("wrong", (rank,), f"{names.rank(rank)}: {where}: {row['wrong']}"))
    for way in ("write", "read"):
        rates = {rank: rate / 1e6 for rank, rate in _each(disks, f"{way}_bytes_s").items()}
        found += slow_hosts(names, rates, what=f"disk ({way})", unit="MB/s", share=settings.slow)
    return found


def _each(rows: Mapping[int, Mapping[str, Any]], key: str) -> dict[int, Any]:
    """By rank, of those that have it."""
    return {rank: row[key] for rank, row in rows.items() if key in row}
