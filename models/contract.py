"""The interface of a model. A new model is a file models/<name>.py and a TOML file with `model.name = "<name>"`.

models/<name>.py defines
    Config                                        a frozen dataclass that extends ModelConfig: the [model] section
    build(config, *, vocab_size, max_seq_len)     -> Model, which can be built under torch.device("meta")
Tensor parallelism reads the model's `tp_plan`; a module-level TP_PLAN, as in models/llama.py, is only a convention.
models/<name>_hf.py, if there is one, holds the model's `Format` for scripts/hf.py, as models/llama_hf.py does.

Parts of Model, by what needs them; most are checked before any rank is launched (configs/check.py):
    every run               dim, tok_embeddings, layers, norm, output; forward with labels; init_weights, flops_per_token; a parameter
                            that is trained; shared ones only inside a block, except for tied embeddings
    tensor parallelism      tp_plan, with an entry for each module with parameters, except Experts; Config.check_tensor_parallel, since a
                            degree that divides the features may still split a head
    context parallelism     forward with positions; self.attend in each attention, ops.causal_attention until it is replaced
    training.document_mask  forward with document_starts, which it passes to self.attend
    pipeline                no parameter outside of layers, tok_embeddings, norm and output, none tied; forward skips what is None;
                            the hidden state between layers is [B, T, dim] in the compute dtype
    experts                 Router and Experts as base classes, whose parameters have a layout of their own
    text samples            new_cache
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from inspect import signature
from pathlib import Path
from traceback import extract_tb
from types import MappingProxyType
from typing import Annotated, Any, cast

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class ModelConfig:
    """The keys of [model] that every model has; the Config of a model adds its own."""

    name: Annotated[str, "name of the model: models/<name>.py"] = "llama"
    tokenizer_path: Annotated[str, 'a tokenizer.json, or "" for the built-in bytes (256 + BOS, EOS, PAD)'] = ""
    vocab_size: Annotated[
        int,
        "rows of the embedding and the head; 0: as many as the tokenizer has ids; more: unused rows, to make the number divisible by ranks",
        ">= 0",
    ] = 0

    def check(self) -> None:
        """Raises ValueError ("model.key = value: ...") if the sizes are inconsistent."""

    def check_tensor_parallel(self, degree: int) -> None:
        """Raises ValueError ("parallelism.tensor_parallel_degree = ...") if heads and features are not divisible by `degree`."""


class Model(nn.Module):
    """Base class of models. A pipeline stage deletes some of the layers and sets some of the other children to None; forward skips them.
    Persistent buffers are saved, compared between groups and healed as parameters are; with fault_tolerance.semi_sync_method they are each
    group's own, neither compared nor healed. They are not reduced over ranks or groups, so a statistic that a forward updates would differ
    between ranks."""

    dim: int  # C, the width of the hidden state
    tok_embeddings: nn.Module | None
    layers: nn.ModuleDict  # the blocks, "0", "1", ...: a dict, so that deleting some does not rename the others
    norm: nn.Module | None
    output: Head | None  # called "the head" in comments and documents
    tp_plan: Mapping[str, str] = MappingProxyType({})  # module name -> kind: parallelisms/tensor.py
    # Pattern over parameter names -> update, in place of the optimizer's. Called in the optimizer's step as update(parameter, gradient),
    # this rank's shards; it changes the parameter in place. The gradient is what backward gave, summed over all tokens, ranks and groups. A
    # gradient of zeros must change nothing: the update gets it in a fused step that is not applied. The gradients of these parameters are
    # excluded from the gradient norm and from clipping.
    own_updates: Mapping[str, Callable[[Tensor, Tensor], None]] = MappingProxyType({})
    # Persistent buffers that follow from the configuration: never loaded from another run, nor from this one if seq_len has changed.
    COMPUTED_BUFFERS: tuple[str, ...] = ()
    tied: bool = False  # embedding and head share one parameter, tok_embeddings.weight

    def forward(
        self,
        x: Tensor,
        cache: Any = None,
        *,
        labels: Tensor | None = None,
        positions: Tensor | None = None,
        document_starts: Tensor | None = None,
    ) -> Tensor:
        """Takes tokens [B, T] int64, or the hidden state [B, T, C] of the previous stage. Returns logits [B, T, V] in the compute dtype
        (the loss upcasts); with `labels` [B, T] the sum of the losses; in a stage without the head the hidden state.

        `cache`: from `new_cache`; these tokens are appended to it. `positions` [T] int64, without a cache: token positions in the
        sequence; None: consecutive, from 0 or after the cache. Each attention calls `self.attend(q, k, v, document_starts)`, which context
        parallelism replaces. `document_starts` [B, T] int64, without a cache: for each token the position in the sequence of the first
        token of its document, which is the first that it attends to, and from which its own position counts."""
        raise NotImplementedError

    def init_weights(self, seed: int) -> None:
        """Initialises every parameter and buffer; the values depend only on (seed, name, block of rows): models/init.py. Called under
        torch.no_grad()."""
        raise NotImplementedError

    @torch.no_grad()
    def checked_init_weights(self, seed: int) -> None:
        """Calls `init_weights`. Raises ValueError if it leaves values out, which would be those that the memory happens to hold."""
        named = [*self.named_parameters(), *self.named_buffers()]
        own = {name: tensor.to_local() if hasattr(tensor, "to_local") else tensor for name, tensor in named}
        own = {name: tensor for name, tensor in own.items() if tensor.is_floating_point() or tensor.is_complex()}
        for tensor in own.values():
            tensor.fill_(math.nan)
        # the class as built, of which FSDP has made a subclass
        kind = next(each for each in type(self).__mro__ if not each.__module__.startswith("torch."))
        try:
            self.init_weights(seed)
        except ValueError as error:  # train.py reports it without a traceback
            raise call_error(f"{kind.__module__}.{kind.__name__}", "init_weights", error) from error
        missing = [name for name, tensor in own.items() if tensor.sum().isnan()]
        if missing:
            more = f" and {len(missing) - 3} others" if len(missing) > 3 else ""
            raise ValueError(
                f"{kind.__module__}.{kind.__name__}: init_weights leaves {', '.join(missing[:3])}{more} without values, or "
                "gives NaN; it must initialise every parameter and buffer (models/contract.py)"
            )

    def tie_weights(self) -> None:
        """Gives the head the embedding's parameter, if `tied`. Called in __init__, and whenever modules' parameters were replaced."""
        if self.tied and self.output is not None and self.tok_embeddings is not None:
            self.output.weight = cast(nn.Parameter, self.tok_embeddings.weight)

    def to_empty(self, *, device: Any, recurse: bool = True) -> Any:
        super().to_empty(device=device, recurse=recurse)
        self.tie_weights()
        return self

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Returns parameters and persistent buffers, a tied parameter under the embedding's name only."""
        state = super().state_dict(*args, **kwargs)
        if self.tied:
            del state[f"{kwargs.get('prefix', '')}output.weight"]
        return state

    def flops_per_token(self, seq_len: int) -> int:
        """Returns the floating point operations per trained token, forward and backward."""
        raise NotImplementedError

    def new_cache(self, batch: int, length: int) -> Any:
        """Returns an empty cache of keys and values for `batch` sequences of up to `length` tokens. Optional: without it a model
        generates no text."""
        raise NotImplementedError


class Head(nn.Linear):
    """The output projection [V, C], without a bias, which the loss would leave out (`check_contract` refuses one). Called with labels it
    returns the loss, so that the logits need not be in memory as a whole and FSDP gathers the weight while the loss is computed."""

    loss: Callable[[Tensor, Tensor, Tensor], Tensor] | None = None  # (hidden [B, T, C], weight [V, C], labels [B, T])

    def forward(self, h: Tensor, labels: Tensor | None = None) -> Tensor:  # [B, T, C]
        if labels is None:
            return super().forward(h)  # [B, T, V]
        assert self.loss is not None, "parallelize() sets it"
        return self.loss(h, self.weight, labels)  # loss sum, fp32 scalar


class Router(nn.Module):
    """Base class of what chooses the experts of a token. Its parameters stay fp32 in every layout; it computes on this rank's tokens."""

    # Sums over the ranks that share a sequence; parallelisms/expert.py sets it
    sum_over_sequence: Callable[[Tensor], Tensor] = staticmethod(lambda counts: counts)

    def selection(self, x: Tensor) -> Tensor:
        """Returns the numbers [B, T, E] whose k largest are the experts of each token of x [B, T, C]. Training does not call it;
        bench/parity_worker.py does, to draw tokens whose experts do not depend on rounding."""
        raise NotImplementedError


class Experts(nn.Module):
    """Base class of experts: every parameter is [E, ...], one slice per expert. Expert parallelism shards dim 0."""

    def forward(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Takes rows [M, C], in the order of the experts, and the number of each expert's rows, int64 [E] of this rank's experts. Returns
        [M, C]."""
        raise NotImplementedError

    def dispatch_and_combine(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Calls forward. Expert parallelism replaces it by an all-to-all before and after forward. `counts` [E]: of all experts."""
        return cast(Tensor, self(rows, counts))


class ModelFault(ValueError):
    """A model that breaks this contract in a way that only its forward shows."""


def no_loss_error(result: Tensor) -> ModelFault:
    """Returns the error for a forward with labels whose result is not the loss sum."""
    return ModelFault(
        f"forward with labels must return the loss sum (models/contract.py), not {list(result.shape)} values"
    )


def check_contract(model: nn.Module, name: str) -> None:
    """Raises ValueError if `model`, that of models/`name`.py, lacks a part that every run uses."""
    if not isinstance(model, Model):
        returned = f"build returns {type(model).__name__}, which does not extend Model"
        raise ValueError(f'model.name = "{name}": {returned} (models/contract.py)')
    layers, output, takes = getattr(model, "layers", None), getattr(model, "output", None), signature(model.forward)
    names = list(layers) if isinstance(layers, nn.ModuleDict) else []
    found: list[tuple[bool, str]] = [
        (isinstance(layers, nn.ModuleDict), f"layers is {type(layers).__name__}, not nn.ModuleDict"),
        (
            names == [str(number) for number in range(len(names))],
            f'layers is named {", ".join(names)}, not "0", "1", ...',
        ),
        *(
            (isinstance(getattr(model, key, None), nn.Module), f"it has no module {key}")
            for key in ("tok_embeddings", "norm")
        ),
        (isinstance(output, Head), f"output is {type(output).__name__}, not Head"),
        (getattr(output, "bias", None) is None, "output has a bias, which the loss leaves out"),
        (isinstance(getattr(model, "dim", None), int), "it has no dim, the width of the hidden state"),
        ("labels" in takes.parameters, "its forward takes no labels"),
        *(
            (getattr(type(model), key, None) is not getattr(Model, key), f"it has no {key}")
            for key in ("init_weights", "flops_per_token")
        ),
        *((value.ndim > 0, f"{key} has no dim to shard; make it [1]") for key, value in model.named_parameters()),
        (any(p.requires_grad for p in model.parameters()), "no parameter requires a gradient"),
        *(
            (
                any(fnmatchcase(key, pattern) for key, _ in model.named_parameters()),
                f"own_updates: no parameter is {pattern}",
            )
            for pattern in model.own_updates
        ),
        *(
            (
                _unit(one) == _unit(other),
                f"{one} is {other}, which FSDP gathers apart; only modules of a block may share",
            )
            for one, other in shared_parameters(model)
        ),
    ]
    for holds, problem in found:
        if not holds:
            raise ValueError(f'model.name = "{name}": {problem} (models/contract.py)')


def shared_parameters(model: Model) -> list[tuple[str, str]]:
    """Returns (name, first name) for each further name of a parameter, except for a tied embedding and head."""
    named, first = model.named_parameters(remove_duplicate=False), dict[int, str]()
    pairs = [(name, first.setdefault(id(parameter), name)) for name, parameter in named]
    tied = {"output.weight", "tok_embeddings.weight"} if model.tied else {""}
    return [pair for pair in pairs if pair[0] != pair[1] and {*pair} != tied]


def _unit(name: str) -> str:
    """Names the FSDP group of a parameter, with one block per group (fsdp_param_groups in parallelisms/fsdp.py)."""
    first = name.split(".")[0]
    return ".".join(name.split(".")[:2]) if first == "layers" else "ends" if first in ("norm", "output") else first


def model_line(error: Exception) -> str:
    """Returns the line of a model's code that an error came through last: "models/llama.py, line 9"; "": none."""
    at = [(Path(frame.filename), frame.lineno) for frame in extract_tb(error.__traceback__)]
    lines = [
        f"{path.name}, line {line}" for path, line in at if path.parent.name == "models" and path.name != "contract.py"
    ]
    return f"models/{lines[-1]}" if lines else ""


def model_error(error: Exception, name: str, call: str) -> ValueError:
    """Returns the message for an error that `call` of models/`name`.py raised, with the line of the model's code."""
    return call_error(f'model.name = "{name}"', call, error)


def call_error(place: str, call: str, error: Exception) -> ValueError:
    """Returns the message for an error that `call` raised, with the line of the model's code. `place`: setting or class."""
    line = model_line(error)
    return ValueError(f"{place}: {call} raised {type(error).__name__}: {error}{line and f' ({line})'}")


def set_dtype(model: nn.Module, dtype: torch.dtype) -> None:
    """Converts the parameters, except those of routers and of modules in them, which stay fp32. Buffers, such as the rotary table, keep
    their dtype."""
    of_routers = {id(p) for module in model.modules() if isinstance(module, Router) for p in module.parameters()}
    for parameter in model.parameters():
        if id(parameter) not in of_routers:
            parameter.data = parameter.data.to(dtype)


def has_experts(module: nn.Module) -> bool:
    """Returns True if `module` is or contains Experts."""
    return any(isinstance(inner, Experts) for inner in module.modules())


def nearest(wanted: int, legal: Iterable[int]) -> str:
    """Returns the nearest smaller and larger of the `legal` numbers (ascending), for an error message: "4 or 8"."""
    numbers = list(legal)
    return " or ".join(map(str, [n for n in numbers if n < wanted][-1:] + [n for n in numbers if n > wanted][:1]))


def nearest_divisors(total: int, wanted: int) -> str:
    """Returns the divisors of `total` nearest to `wanted`, which does not divide it."""
    return nearest(wanted, (d for d in range(1, total + 1) if total % d == 0))
