"""bench/parity.py on a few layouts of each kind, which layouts it would run, and how it reads bad input.

That it can fail is shown by test_mutations.py.
"""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from bench import parity
from bench.parity import OPTIONS, RECOMPUTATION, VOCABULARIES, cases
from bench.parity_worker import ParityCase, Task
from models import llama, qwen3
from tests.multiproc.pool import Pool
from training.optimizer import OptimizerConfig

SIZES = llama.Config(dim=32, n_layers=4, n_heads=4, n_kv_heads=4, hidden_dim=64)


@pytest.fixture(scope="module")
def proof(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> parity.Proof:
    return parity.Proof(task(tmp_path_factory.mktemp("parity")), pool)


def task(folder: Path, sizes: llama.Config = SIZES) -> Task:
    return Task(sizes, OptimizerConfig(), seq_len=16, global_batch_size=16, seed=0, folder=folder)


@pytest.mark.parametrize(
    ("layout", "optimizer"),
    [
        ("one rank", "AdamW"),
        ("fsdp 2, prefetch 2", "SGD"),
        ("ddp 2", "SGD"),
        ("tp 2", "SGD"),
        ("tp 2, whole logits", "AdamW"),
        ("cp 2", "AdamW"),
        ("cp 2, cp unbalanced", "SGD"),
        ("pp 2", "AdamW"),
        ("pp 2, ZBVZeroBubble", "SGD"),
        ("pp 2, CSV file", "SGD"),
        ("hsdp 2x2", "AdamW"),
        ("fsdp 2 + tp 2", "SGD"),
        ("cp 2 + tp 2, cp unbalanced, whole logits, AC full", "SGD"),
        ("pp 2 + tp 2", "SGD"),
        ("fsdp 2 + tp 2", "Muon"),
        ("pp 2", "Muon"),
    ],
)
def test_a_layout_computes_what_one_process_computes(proof: parity.Proof, layout: str, optimizer: str):
    assert_parity(proof, layout, optimizer)


@pytest.mark.parametrize(
    ("layout", "optimizer"),
    [
        ("one rank, AC op", "SGD"),
        ("cp 2", "AdamW"),
        ("cp 2, cp unbalanced", "SGD"),
        ("cp 2, cp ring", "SGD"),
        ("pp 2, ZBVZeroBubble", "SGD"),
        ("cp 4, cp ring", "SGD"),
        ("fsdp 2 + cp 2, reshard always, cp ring, AC op", "SGD"),
        ("fsdp 2 + tp 2", "SGD"),
        ("pp 2 + cp 2", "SGD"),
    ],
)
def test_a_layout_masks_documents_as_one_process_does(proof: parity.Proof, layout: str, optimizer: str):
    assert_parity(proof, layout, optimizer, document_mask=True)


def assert_parity(proof: parity.Proof, layout: str, optimizer: str, **change: bool) -> None:
    verdict = proof.verdict(replace(case(proof.task, layout, optimizer), **change))
    assert not verdict.problems, "\n".join(verdict.problems)
    assert 0 < verdict.worst.share < 1  # something was compared, and another order of sums leaves a trace


QWEN3 = qwen3.Config(name="qwen3", dim=32, n_layers=4, n_heads=4, n_kv_heads=2, hidden_dim=64, head_dim=12)


@pytest.fixture(scope="module")
def qwen3_proofs(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> dict[str, parity.Proof]:
    kinds = {"untied": QWEN3, "tied": replace(QWEN3, enable_weight_tying=True)}
    return {kind: parity.Proof(task(tmp_path_factory.mktemp(kind), sizes), pool) for kind, sizes in kinds.items()}


@pytest.mark.parametrize(
    ("weights", "layout", "optimizer"),
    [  # every pair of axes; with a pipeline, only untied
        ("untied", "pp 2 + ddp 2", "SGD"),
        ("untied", "pp 2 + fsdp 2", "AdamW"),
        ("untied", "pp 2 + cp 2", "SGD"),
        ("untied", "pp 2 + tp 2", "AdamW"),
        ("untied", "fsdp 2 + cp 2", "SGD"),
        ("untied", "ddp 2 + tp 2", "SGD"),
        ("tied", "one rank", "AdamW"),
        ("tied", "hsdp 2x2", "SGD"),
        ("tied", "fsdp 2 + tp 2", "AdamW"),
        ("tied", "ddp 2 + cp 2", "AdamW"),
        ("tied", "cp 2 + tp 2", "SGD"),
        ("tied", "fsdp 2, prefetch 2", "SGD"),
        ("tied", "fsdp 2, reshard always", "SGD"),
    ],
)
def test_qwen3(qwen3_proofs: dict[str, parity.Proof], weights: str, layout: str, optimizer: str):
    assert_parity(qwen3_proofs[weights], layout, optimizer)


def case(task: Task, layout: str, optimizer: str) -> ParityCase:
    [found] = [
        case
        for ranks in (1, 2, 4)
        for case in _cases(task, ranks)
        if (case.title, case.optimizer) == (layout, optimizer)
    ]
    return found


_cases = cache(cases)


def test_every_way_to_share_the_ranks_is_there(tmp_path: Path):
    for ranks, ways in ((1, 1), (2, 5), (4, 15)):
        found = cases(task(tmp_path), ranks)
        assert len({case.degrees for case in found}) == ways  # so many products of five factors
        assert all(case.world_size == ranks for case in found)
        assert len({(case.title, case.optimizer) for case in found}) == len(found)


def test_what_the_model_cannot_share_is_left_out(tmp_path: Path):
    found = {case.degrees for case in cases(task(tmp_path), 8)}
    assert max(degrees.tp for degrees in found) == 4  # heads
    assert max(degrees.pp for degrees in found) == 4  # blocks
    assert max(degrees.cp for degrees in found) == 8


def test_each_option_comes_alone_and_in_company(tmp_path: Path):
    titles = [case.title for ranks in (2, 4) for case in cases(task(tmp_path), ranks)]
    for axis, options in OPTIONS.items():
        for option in options:
            assert any(re.fullmatch(rf"\w+ \d, {option.title}", title) for title in titles), (axis, option.title)
    several = [title for title in titles if "+" in title]
    for kind in ("LoopedBFS", "reshard", "cp unbalanced", "whole logits", *(option.title for option in RECOMPUTATION)):
        assert any(kind in title for title in several), kind


def test_the_two_cases_of_a_layout_differ_in_everything(tmp_path: Path):
    found = cases(task(tmp_path), 4)
    first, second = ([case for case in found if case.optimizer == name] for name in ("SGD", "AdamW"))
    for one, other in zip(first, second, strict=True):
        assert one.title == other.title
        assert (one.optimizer, other.optimizer) == ("SGD", "AdamW")
        assert {one.microsteps, other.microsteps} == {1, 2}
        assert {one.vocab_size, other.vocab_size} == set(VOCABULARIES)
        assert (one.execution.loss_chunk_tokens == 0) != (other.execution.loss_chunk_tokens == 0)
        assert (one.document_mask != other.document_mask) or (one.document_mask and "ring" in one.title)
    choices = {
        (case.microsteps, case.vocab_size, case.execution.loss_chunk_tokens, case.document_mask) for case in first
    }
    assert len(choices) == 16


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--ranks", "3"], "3: must be among [1, 2, 4, 8, 16], which divide a step of 32 sequences; nearest: 2"),
        (["--ranks", "two"], '"two": must be numbers of ranks, such as 1,2,4'),
        (["--ranks", "2", "--only", "tq"], '--only "tq": matches no case of [2] ranks'),
        (["--only", "tp ("], '"tp (": '),
        (["no.toml"], "no.toml"),
        (["--", "--model.dims", "64"], "model.dim"),
        (["--", "--model.n_heads", "7"], "model.n_heads = 7"),
    ],
)
def test_bad_input(capsys: pytest.CaptureFixture[str], words: list[str], said: str):
    try:
        code = parity.main(words)
    except SystemExit as leaving:  # argparse
        code = leaving.code
    assert code == 2
    assert said in capsys.readouterr().err


def test_a_case_that_raises_fails_and_says_why_once(proof: parity.Proof):
    chosen = case(proof.task, "fsdp 2", "SGD")
    verdict = proof.verdict(replace(chosen, execution=replace(chosen.execution, loss_chunk_tokens="eleven")))
    assert verdict.worst.share > 1
    assert len(verdict.problems) == 1
    assert "TypeError" in verdict.problems[0]
