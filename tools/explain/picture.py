"""Draws a pipeline schedule and computes its bubble."""

from __future__ import annotations

from parallelisms.pipeline_schedule import LENGTH, Timeline, table, timeline

_MEANING = {"F": "F forward", "B": "B backward, = continues", "I": "I backward for inputs", "W": "W for weights"}


def bubble(schedule: str, pp: int, n_stages: int, n_microbatches: int) -> float:
    """Returns the idle share of all ranks' time from the first action to the last."""
    times = timeline(table(schedule, pp, n_stages, n_microbatches))
    return 1 - sum(LENGTH[action.kind] for row in times for _, action in row) / (len(times) * _slots(times))


def _slots(times: Timeline) -> int:
    return max(start + LENGTH[action.kind] for start, action in (row[-1] for row in times))


def picture(schedule: str, pp: int, n_stages: int, n_microbatches: int, *, columns: int) -> list[str]:
    """Returns lines: the schedule's name, a row per rank, a column per time slot, the bubble. Rows wider than `columns` are shortened."""
    times = timeline(table(schedule, pp, n_stages, n_microbatches))
    n_slots, one_stage_per_rank = _slots(times), n_stages == pp
    cells = [["."] * n_slots for _ in times]
    for row, timed in zip(cells, times, strict=True):
        for start, action in timed:
            row[start : start + LENGTH[action.kind]] = [str(action), *["="] * (LENGTH[action.kind] - 1)]
            if one_stage_per_rank:
                row[start] = row[start].removeprefix(str(action.stage))
    width, room = max(len(cell) for row in cells for cell in row), columns - len(f"rank {pp - 1}  ")
    if (width + 1) * n_slots - 1 > room:
        half = (room - max(width, len("..."))) // (width + 1) // 2
        cells = [[*row[:half], "...", *row[-half:]] for row in cells]
    kinds = {action.kind for row in times for _, action in row}
    legend = ", ".join(meaning for kind, meaning in _MEANING.items() if kind in kinds)
    first = "F0: microbatch 0" if one_stage_per_rank else "1F0: stage 1, microbatch 0"
    return [
        f"{schedule}: {n_microbatches} microbatches through {n_stages} stages on {pp} ranks, {n_slots} time slots",
        *(f"rank {rank}  {' '.join(cell.ljust(width) for cell in row).rstrip()}" for rank, row in enumerate(cells)),
        f"bubble {bubble(schedule, pp, n_stages, n_microbatches):.1%}; {first}; {legend}, . idle",
    ]
