"""Tables of pipeline schedules: complete and free of deadlock for every legal size, their bubbles, their pictures, CSV files."""

# ruff: noqa: E501 (pictures and messages are compared as they are)

from __future__ import annotations

from pathlib import Path

import pytest

from parallelisms.pipeline_schedule import (
    ONE_STAGE,
    SCHEDULES,
    V_SHAPED,
    Action,
    cell_text,
    check_complete,
    parse,
    read_csv,
    stages_by_rank,
    table,
    timeline,
)
from tools.explain.picture import bubble, picture

GOOD = "0F0,0F1,0B0,0B1\n,1F0,1B0,1F1,1B1\n"


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("pp", "n_microbatches"), [(2, 4), (2, 8), (3, 6), (4, 8), (4, 12)])
def test_every_microbatch_goes_through_every_stage(schedule: str, pp: int, n_microbatches: int) -> None:
    n_stages = pp if schedule in ONE_STAGE else 2 * pp
    rows = table(schedule, pp, n_stages, n_microbatches)
    check_complete(rows, pp=pp, n_microbatches=n_microbatches)
    timeline(rows)
    rounds = [list(range(rank, n_stages, pp)) for rank in range(pp)]
    v = [[rank, n_stages - 1 - rank] for rank in range(pp)]
    assert stages_by_rank(rows) == (v if schedule in V_SHAPED else rounds)


@pytest.mark.parametrize("pp", [2, 4])
@pytest.mark.parametrize("n_microbatches", [4, 8, 32])
def test_bubbles_are_those_of_the_papers(pp: int, n_microbatches: int) -> None:
    plain = (pp - 1) / (n_microbatches + pp - 1)  # GPipe; 1F1B saves memory, not time
    looped = (pp - 1) / (2 * n_microbatches + pp - 1)  # two stages a rank halve it
    zero = (pp - 1) / (6 * n_microbatches + pp - 1)  # of F + B = 3 slots on two stages, one is left to wait
    assert bubble("GPipe", pp, pp, n_microbatches) == pytest.approx(plain)
    assert bubble("1F1B", pp, pp, n_microbatches) == pytest.approx(plain)
    assert bubble("LoopedBFS", pp, 2 * pp, n_microbatches) == pytest.approx(looped)
    assert bubble("Interleaved1F1B", pp, 2 * pp, n_microbatches) == pytest.approx(looped)
    for schedule in ("InterleavedZeroBubble", "ZBVZeroBubble"):
        if n_microbatches >= 2 * pp - 1:
            assert bubble(schedule, pp, 2 * pp, n_microbatches) == pytest.approx(zero), schedule


def test_1f1b_keeps_few_microbatches_alive() -> None:
    for rank, row in enumerate(table("1F1B", 4, 4, 12)):
        alive = peak = 0
        for (action,) in row:
            alive += 1 if action.kind == "F" else -1
            peak = max(peak, alive)
        assert peak == 4 - rank


def test_pictures() -> None:
    assert picture("1F1B", 2, 2, 3, columns=108) == [
        "1F1B: 3 microbatches through 2 stages on 2 ranks, 12 time slots",
        "rank 0  F0 F1 .  .  B0 =  F2 B1 =  .  B2 =",
        "rank 1  .  F0 B0 =  F1 B1 =  F2 B2 =  .  .",
        "bubble 25.0%; F0: microbatch 0; F forward, B backward, = continues, . idle",
    ]
    assert picture("ZBVZeroBubble", 2, 4, 2, columns=108) == [
        "ZBVZeroBubble: 2 microbatches through 4 stages on 2 ranks, 14 time slots",
        "rank 0  0F0 0F1 .   3F0 3I0 3W0 3F1 3I1 3W1 0I0 0W0 .   0I1 0W1",
        "rank 1  .   1F0 2F0 1F1 2F1 2I0 2W0 1I0 1W0 2I1 2W1 1I1 1W1 .",
        "bubble 14.3%; 1F0: stage 1, microbatch 0; F forward, I backward for inputs, W for weights, . idle",
    ]


def test_of_a_long_picture_the_middle_is_left_out() -> None:
    lines = picture("GPipe", 2, 2, 64, columns=108)
    assert "195 time slots" in lines[0] and all(len(line) <= 108 for line in lines)
    assert lines[1].split()[2] == "F0" and lines[1].split()[14] == "..." and lines[1].split()[-2:] == ["B63", "="]


def test_a_file_reads_as_it_is_written(tmp_path: Path) -> None:
    file = tmp_path / "schedule.csv"
    for schedule in ("Interleaved1F1B", "DualPipeV"):
        rows = table(schedule, 2, 4, 6)
        file.write_text("\n".join(",".join(map(cell_text, row)) for row in rows))
        assert read_csv(str(file)) == rows
        assert bubble(str(file), 2, 4, 6) == bubble(schedule, 2, 4, 6)
        assert picture(str(file), 2, 4, 6, columns=108)[1:] == picture(schedule, 2, 4, 6, columns=108)[1:]


def test_cells() -> None:
    assert parse(" 12F3 ") == (Action(12, "F", 3),)
    assert parse("(0F1;3B0)OVERLAP_F_B") == (Action(0, "F", 1), Action(3, "B", 0))
    for text in ("0X0", "F0", "0F", "0SEND_F0", "(0F1;)OVERLAP_F_B", "0F0 0F1"):
        with pytest.raises(ValueError, match="is not an action; legal"):
            parse(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0F0,0F1,0B0,0B1\n", "has lines for 1 ranks; legal: one line for each of the 2 ranks"),
        (GOOD.replace("1B0", "1Q0"), 'line 2: "1Q0" is not an action; legal: stage, one of F B I W, microbatch, such as 0F0, or two as (0F1;3B0)OVERLAP_F_B'),
        (GOOD.replace("1F0", "0F0"), "stage 0 is on ranks 0 and 1; legal: one rank"),
        (GOOD.replace("0B1", "0B2"), "rank 0 has 0B2, but there are 2 microbatches (training.local_batch_size / parallelism.pipeline_parallel_microbatch_size); legal: 0 to 1"),
        ("0F0,0F1,0B0,0B1\n,,\n0F0", "has lines for 3 ranks; legal: one line for each of the 2 ranks"),
        ("\n0F0,0F1,0B0,0B1", "rank 0 has no stage; legal: at least one"),
        (GOOD.replace("1F", "2F").replace("1B", "2B"), "stage 1 computes microbatch 0 with F 0, B 0, I 0, W 0 times; legal: F once, and B once or both I and W once"),
        (GOOD.replace("0B1", "0I1"), "stage 0 computes microbatch 1 with F 1, B 0, I 1, W 0 times; legal: F once, and B once or both I and W once"),
        (GOOD.replace("0F1", "0F0"), "stage 0 computes microbatch 0 with F 2, B 1, I 0, W 0 times; legal: F once, and B once or both I and W once"),
        (GOOD.replace("0F1,0B0", "0B0,0B1").replace("0B1\n", "0F1\n"), "deadlock: rank 0 cannot compute 0B1 before 0F1"),
        (GOOD.replace("1B0,1F1,1B1", "1F1,1W0,1I0,1B1"), "deadlock: rank 0 cannot compute 0B0 before 1B0"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_file(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "schedule.csv"
    file.write_text(text)
    with pytest.raises(ValueError) as error:
        rows = read_csv(str(file))
        check_complete(rows, pp=2, n_microbatches=2)
        timeline(rows)
    assert str(error.value) == message


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="cannot be read: No such file"):
        read_csv(str(tmp_path / "none.csv"))
    (tmp_path / "bytes.csv").write_bytes(b"\xff0F0")
    with pytest.raises(ValueError, match="cannot be read: it is not UTF-8 text"):
        read_csv(str(tmp_path / "bytes.csv"))
