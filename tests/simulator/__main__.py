"""`python -m tests.simulator --seed 7 --groups 50 --steps 200 --trace` shows one run; `--seeds 1000` runs many on all cores.

Prints a table of events and their counts. Exit code 1: an invariant was violated, an expected event did not occur in 1,000 seeds, or one of
many seeds had almost no events.
"""

from __future__ import annotations

import argparse
import sys
import time

from tests.simulator import faults, runs

EVENTS = 500  # that a run of 200 steps has at least, unless the job stopped by rule


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulator", description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="the run, or the first of many")
    parser.add_argument("--seeds", type=int, default=1, help="how many runs, one seed each")
    parser.add_argument(
        "--groups", type=int, help="default: 2 to 5 in 70 %% of the seeds, 6 to 15 in 29 %%, 50 in 1 %%"
    )
    parser.add_argument("--steps", type=int, default=200, help="committed steps that every live group must reach")
    parser.add_argument("--fault", choices=["", *faults.CLASSES], help="class of faults; default: as the seed has it")
    parser.add_argument("--trace", action="store_true", help="tell every event (one seed)")
    parser.add_argument("--workers", type=int, help="processes; default: the cores")
    args = parser.parse_args()
    if args.trace and args.seeds > 1:
        parser.error("--trace is for one seed")
    started_s = time.monotonic()
    if args.seeds == 1:
        found = [runs.run(args.seed, args.groups, args.steps, args.fault, trace=print if args.trace else None)]
    else:
        seeds = range(args.seed, args.seed + args.seeds)
        found = runs.run_many(seeds, args.groups, args.steps, args.fault, workers=args.workers, bar=sys.stderr.isatty())
    failed = [one for one in found if one.failure]
    print(runs.table(found))
    print(runs.classes(found))
    for one in failed[:5]:
        print(runs.tell(one))
    if len(failed) > 5:
        print(f"failed, too: seeds {', '.join(str(one.setting.seed) for one in failed[5:])}")
    never = runs.never_seen(found) if args.seeds >= runs.ENOUGH else []
    if never:
        print(f"never seen in {args.seeds} seeds: " + "; ".join(never))
    short = [one.setting.seed for one in found if one.events < EVENTS and not one.seen["the job stopped by rule"]]
    if short := short if args.seeds > 1 and args.steps >= 200 and not failed else []:
        print(f"fewer than {EVENTS} events: seeds {', '.join(map(str, short))}")
    good = not (failed or never or short)
    events, spent_s = sum(one.events for one in found), time.monotonic() - started_s
    print(f"{'good' if good else 'bad'}: {len(found)} seeds, {len(failed)} failed, {events:,} events, {spent_s:.0f} s")
    return int(not good)


if __name__ == "__main__":
    sys.exit(main())
