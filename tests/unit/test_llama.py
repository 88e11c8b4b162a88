"""The model: shapes, the pipeline-friendly contract, values that no layout changes, the cache."""

from __future__ import annotations

from itertools import pairwise
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch

from configs.schema import RunConfig
from models import llama, moe, qwen3
from models.contract import set_dtype
from models.init import BLOCK_ROWS, draw, normal_
from training.components import Components

SMALL = llama.Config(dim=32, n_layers=3, n_heads=4, n_kv_heads=2, hidden_dim=48)
V, T = 61, 24


def built(seed: int = 0, config: llama.Config = SMALL) -> llama.Llama:
    with torch.device("meta"):
        model = llama.build(config, vocab_size=V, max_seq_len=T)
    model.to_empty(device="cpu")
    model.init_weights(seed)
    return model


def test_what_is_not_initialised_is_named():
    class Fork(llama.Llama):
        def __init__(self, *sizes: Any) -> None:
            super().__init__(*sizes)
            self.extra = torch.nn.Parameter(torch.empty(5))
            self.register_buffer("table", torch.empty(3), persistent=False)
            self.register_buffer("turns", torch.empty(3, dtype=torch.complex64), persistent=False)

    with torch.device("meta"):
        model = Fork(SMALL, V, T)
    model.to_empty(device="cpu")
    with pytest.raises(ValueError, match=r"Fork: init_weights leaves table, turns without values"):
        model.checked_init_weights(0)  # Llama's draws each parameter by its name
    part = Fork.init_weights
    model.init_weights = lambda seed: part(model, seed) or model.layers["1"].ffn_norm.weight.fill_(torch.nan)  # type: ignore[assignment]
    with pytest.raises(
        ValueError, match=r"leaves layers\.1\.ffn_norm\.weight, table, turns without values, or gives NaN; it must"
    ):
        model.checked_init_weights(0)


def test_an_error_of_init_weights_names_the_class():
    class Fork(llama.Llama):
        def init_weights(self, seed: int) -> None:
            raise ValueError("two lengths")

    Fork.__module__ = "models.fork"
    model = Fork(SMALL, V, T)
    for kind in (Fork, type("FSDPFork", (Fork,), {"__module__": "torch.distributed.fsdp"})):  # as fully_shard does
        model.__class__ = kind
        with pytest.raises(ValueError, match=r"^models\.fork\..*Fork: init_weights raised ValueError: two lengths$"):
            model.checked_init_weights(0)


class Ones(llama.Llama):
    def init_weights(self, seed: int) -> None:
        super().init_weights(seed)
        for block in self.layers.values():
            block.ffn_norm.weight.fill_(1.0)


def test_a_model_initialises_without_gradients():
    with torch.device("meta"):
        model = Ones(SMALL, V, T)
    assert draw(model, model.layers["1"].ffn_norm.weight, 0).tolist() == [1.0] * SMALL.dim
    model.to_empty(device="cpu")
    run = MagicMock(config=RunConfig(), ema=None, spikes=None)
    run.model.parts, run.optimizer.state = [model], {}
    Components.reset(run)  # a run that goes back to step 0
    state = built(RunConfig().training.seed).state_dict()
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


def tokens(batch: int = 2, length: int = T) -> torch.Tensor:
    return torch.randint(0, V, (batch, length), generator=torch.Generator().manual_seed(1))


def test_forward_gives_logits_of_every_token():
    assert built()(tokens()).shape == (2, T, V)


def test_a_token_sees_nothing_behind_it():
    model, x = built(), tokens(1)
    changed = x.clone()
    changed[0, -1] = (changed[0, -1] + 1) % V
    torch.testing.assert_close(model(x)[:, :-1], model(changed)[:, :-1])


@pytest.mark.parametrize("kind", [llama, qwen3, moe])
def test_documents_of_a_sequence_are_computed_as_by_themselves(kind: Any):
    sizes = {"dim": 32, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "hidden_dim": 48}
    model = kind.build(kind.Config(**sizes), vocab_size=V, max_seq_len=T)
    model.init_weights(0)
    ends = [[0, 1, 9, T], [0, 13, 14, T]]
    starts = torch.tensor([[max(end for end in row if end <= token) for token in range(T)] for row in ends])
    together = model(tokens(), document_starts=starts)
    for row, logits, x in zip(ends, together, tokens(), strict=True):
        alone = [model(x[None, first:last])[0] for first, last in pairwise(row)]
        torch.testing.assert_close(logits, torch.cat(alone))
    assert not torch.allclose(together, model(tokens()), atol=1e-3)


def test_initial_values_depend_on_seed_and_name_alone():
    state = built().state_dict()
    again, other = built().state_dict(), built(seed=1).state_dict()
    assert all(torch.equal(state[name], again[name]) for name in state)
    assert not torch.equal(state["layers.0.attention.wq.weight"], other["layers.0.attention.wq.weight"])
    assert not torch.equal(state["layers.0.attention.wq.weight"], state["layers.1.attention.wq.weight"])
    deeper = built(config=llama.Config(**{**vars(SMALL), "n_layers": 5})).state_dict()
    assert all(torch.equal(state[name], deeper[name]) for name in state)


def test_row_blocks_are_drawn_apart():
    """A rank that holds only the second block draws what the whole tensor holds there."""
    whole = torch.empty(BLOCK_ROWS + 5, 3)
    normal_(whole, "w", 0, std=1.0)
    longer = torch.empty(3 * BLOCK_ROWS, 3)
    normal_(longer, "w", 0, std=1.0)
    assert torch.equal(whole[:BLOCK_ROWS], longer[:BLOCK_ROWS])
    assert not torch.equal(longer[:BLOCK_ROWS], longer[BLOCK_ROWS : 2 * BLOCK_ROWS])


def test_published_spread_of_initial_values():
    model = built(config=llama.Config(dim=256, n_layers=2, n_heads=4, n_kv_heads=4, hidden_dim=512))
    std = {name: p.std().item() for name, p in model.named_parameters()}
    assert std["tok_embeddings.weight"] == pytest.approx(1.0, rel=0.02)
    assert std["layers.0.attention.wq.weight"] == pytest.approx(0.02, rel=0.02)
    assert std["layers.1.attention.wo.weight"] == pytest.approx(0.02 / 2, rel=0.02)
    assert std["layers.0.feed_forward.w2.weight"] == pytest.approx(0.02 / 2**0.5, rel=0.02)
    head = dict(model.named_parameters())["output.weight"]
    assert head.abs().max() <= 3 * 256**-0.5 and head.std().item() == pytest.approx(256**-0.5 * 0.9866, rel=0.02)
    assert (model.norm.weight == 1).all()


def test_the_gradient_of_a_frequent_token_is_summed_in_fp32():
    """A thousand ones: in bf16 the sum would stop at 256."""
    model = built()
    set_dtype(model, torch.bfloat16)
    rows = model.tok_embeddings(torch.zeros(1000, dtype=torch.int64))
    rows.backward(torch.ones_like(rows))
    gradient = model.tok_embeddings.weight.grad
    assert rows.dtype == gradient.dtype == torch.bfloat16
    assert gradient[0].tolist() == [1000.0] * SMALL.dim and not gradient[1:].any()


def test_cached_logits_equal_uncached():
    model, x = built(), tokens(2)
    whole = model(x)
    cache = model.new_cache(2, T)
    pieces = [model(x[:, a:b], cache=cache) for a, b in ((0, 7), (7, 8), (8, 9), (9, 20), (20, T))]
    torch.testing.assert_close(torch.cat(pieces, dim=1), whole, rtol=1e-5, atol=1e-5)


def test_rotary_angles_of_llama_3_1():
    """Short wavelengths are kept, long ones slowed by the factor, those between interpolated."""
    sizes = dict(dim=128, n_heads=1, n_kv_heads=1)
    plain = llama.rotary_table(llama.Config(**sizes), 2)[1]  # [D/2, 2]: the angles of position 1
    scaled = llama.rotary_table(llama.Config(**sizes, rope_scaling=8.0), 2)[1]
    angles, slowed = torch.atan2(plain[:, 1], plain[:, 0]), torch.atan2(scaled[:, 1], scaled[:, 0])
    wavelengths = 2 * torch.pi / angles
    short, long = wavelengths < 8192 / 4.0, wavelengths > 8192 / 1.0
    assert short.any() and long.any() and not (short | long).all()
    torch.testing.assert_close(slowed[short], angles[short])
    torch.testing.assert_close(slowed[long], angles[long] / 8, rtol=1e-4, atol=1e-9)
    between = ~(short | long)
    assert (slowed[between] < angles[between]).all() and (slowed[between] > angles[between] / 8).all()


def test_flops_follow_the_published_formula():
    model = built()
    weights = sum(p.numel() for p in model.parameters()) - V * SMALL.dim
    assert model.flops_per_token(T) == 6 * weights + 12 * 3 * 32 * T
    frozen = model.layers["0"].attention.wq.weight.requires_grad_(False)
    assert model.flops_per_token(T) == 6 * weights - 2 * frozen.numel() + 12 * 3 * 32 * T, "it has no gradient"


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        (dict(dim=33), "model.dim = 33: must be even; nearest: 32 or 34"),
        (
            dict(n_heads=5),
            "model.n_heads = 5: must divide model.dim = 32 into heads of an even width .*; nearest: 4 or 8",
        ),
        (dict(n_heads=32), "model.n_heads = 32: .* nearest: 16"),
        (dict(n_kv_heads=3), "model.n_kv_heads = 3: must divide model.n_heads = 4; nearest: 2 or 4"),
        (dict(rope_high_freq=1.0), "model.rope_high_freq = 1.0: must be above"),
    ],
)
def test_contradicting_sizes_are_refused(sizes: dict, message: str):
    with pytest.raises(ValueError, match=message):
        llama.Config(**{**vars(SMALL), **sizes}).check()
