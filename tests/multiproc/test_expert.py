"""A mixture of experts gives on every layout what it gives on one process: gradients, the load of the experts, and their choice.

That this can fail is shown by test_mutations.py; all layouts: `make parity`."""

from __future__ import annotations

import pytest

from bench import parity
from models import moe
from tests.multiproc.pool import Pool
from tests.multiproc.test_parity import assert_parity, task

SIZES = moe.Config(
    name="moe", dim=32, n_layers=4, n_heads=4, n_kv_heads=4, head_dim=8, hidden_dim=64, expert_hidden_dim=16, n_experts=4,
    experts_per_token=2, dense_layers=2, balance_rate=0.01, balance_loss=0.01, router_init_std=0.5, router_score="sigmoid",
    shared_hidden_dim=16,
)  # fmt: skip


@pytest.fixture(scope="module")
def proof(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> parity.Proof:
    return parity.Proof(task(tmp_path_factory.mktemp("experts"), SIZES), pool)


@pytest.mark.parametrize(
    ("layout", "optimizer"),
    [
        pytest.param("one rank, AC op", "AdamW", marks=pytest.mark.long),
        ("fsdp 2, ep 2", "AdamW"),
        ("tp 2, ep 2", "SGD"),
        ("cp 2, ep 2", "AdamW"),
        pytest.param("ddp 2", "SGD", marks=pytest.mark.long),
        pytest.param("fsdp 4, ep 2", "SGD", marks=pytest.mark.long),
        pytest.param("fsdp 4, ep 4", "AdamW", marks=pytest.mark.long),
        ("fsdp 2 + tp 2, ep 4", "SGD"),
        pytest.param("fsdp 2 + cp 2, ep 2", "SGD", marks=pytest.mark.long),
        pytest.param("hsdp 2x2, ep 2", "AdamW", marks=pytest.mark.long),
        pytest.param("ddp 2 + tp 2", "SGD", marks=pytest.mark.long),
        ("pp 2 + fsdp 2, ep 2", "SGD"),
        ("hsdp 2x2, ep 2", "Muon"),
        pytest.param("fsdp 4, ep 2", "Muon", marks=pytest.mark.long),
    ],
)
def test_a_layout_computes_what_one_process_computes(proof: parity.Proof, layout: str, optimizer: str):
    assert_parity(proof, layout, optimizer)
