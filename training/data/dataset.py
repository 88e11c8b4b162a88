"""Entry point of the data: open_data returns the `TrainingData` of [training], which opens the loaders of training and validation."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from hashlib import sha256
from itertools import pairwise
from pathlib import Path
from typing import Any

from training.config import SkipConfig, SourceConfig, TrainingConfig, ValidationConfig
from training.data.cache import Corpus, open_corpus
from training.data.loader import BatchLoader, SlotPartition, open_loader, separator_of
from training.data.order import (
    SPLITS,
    DocumentOrder,
    Mixture,
    MixtureSource,
    Order,
    SegmentedOrder,
    StoreOrder,
    document_spans,
    needs_token_split,
)
from training.data.sources import find_source
from training.data.store import Store
from training.data.streaming import StreamingLoader, open_stream
from training.log import Log
from training.progress import quantity
from training.tokenizer import Tokenizer

_TOKEN_SPLIT = "cut "  # begins the digest of a corpus whose last tokens are held out


@dataclass(frozen=True)
class DataSegment:
    """The data of a run from position `first` on: until the next segment, all that its sequences depend on."""

    first: int
    digest: str  # of content and tokenizer
    # seed, seq_len, sources and dataset* of TrainingConfig; skip: [number of the store, first, end] of documents
    settings: dict[str, Any]

    @classmethod
    def of(cls, config: TrainingConfig, digest: str) -> DataSegment:
        settings = {
            key: value for key, value in asdict(config).items() if key.startswith(("dataset", "seed", "seq_len"))
        }
        stores = config.store_names
        skip = [[stores.index(span.source), span.first, span.end] for span in config.skip if span.source]
        return cls(0, digest, {**settings, "sources": [asdict(source) for source in config.sources], "skip": skip})

    def continues(self, other: DataSegment) -> bool:
        """Returns True if the order is the same. Paths and names may differ; a setting that only one side has is not compared."""
        mine, theirs = (
            {
                "skip": [],  # for segments of versions that could not leave out documents
                **each.settings,
                "dataset_path": "",
                "sources": [{**source, "path": "", "name": ""} for source in each.settings["sources"]],
            }
            for each in (self, other)
        )
        return self.digest == other.digest and all(mine[key] == theirs[key] for key in mine.keys() & theirs.keys())

    def config(self, config: TrainingConfig) -> TrainingConfig:
        """Returns `config` with the settings of this segment. Raises ValueError for a setting that this version does not have."""
        known = {"": fields(config), "sources.": fields(SourceConfig)}
        found = {"": self.settings.keys(), "sources.": {key for source in self.settings["sources"] for key in source}}
        unknown = {key + name for key in known for name in found[key] - {field.name for field in known[key]}}
        if unknown:
            raise ValueError(f"training.{min(unknown)}: not a setting of this version")
        sources = tuple(SourceConfig(**source) for source in self.settings["sources"])
        config = replace(config, **{**self.settings, "sources": sources, "skip": ()})
        stores = config.store_names
        skip = [SkipConfig(first, end, stores[number]) for number, first, end in self.settings.get("skip", ())]
        return replace(config, skip=tuple(skip))


class _Data:
    """Base of the kinds of data. The checkpoint state is one string: with random access the list of segments as JSON (before there were
    segments, the digest of content and tokenizer), for a stream "", since its loader saves the cursor."""

    digest = ""

    def __init__(
        self, config: TrainingConfig, tokenizer: Tokenizer, validation_stores: Sequence[tuple[str, Store]]
    ) -> None:
        """`validation_stores`: name and store of each of [[validation.sources]]."""
        self._config, self._tokenizer, self._validation_stores = config, tokenizer, validation_stores

    def state_dict(self) -> dict[str, str]:
        return {"digest": self.digest}

    def load_state_dict(self, state: dict[str, str]) -> None:
        """Raises ValueError if the text or its tokenizer changed since the checkpoint."""
        self.check_digest(state["digest"])

    def check_digest(self, saved: str) -> None:
        if saved != self.digest and saved.removeprefix(_TOKEN_SPLIT) == self.digest.removeprefix(_TOKEN_SPLIT):
            now = self.digest.startswith(_TOKEN_SPLIT)
            raise ValueError(
                f"validation.enable = {str(now).lower()}: it was {str(not now).lower()} in this run, whose documents are too few to hold "
                "out whole ones: with validation the last tokens are held out, and without it they are trained on; restore it"
            )
        if saved != self.digest:
            raise ValueError(
                f"training.dataset: the text or its tokenizer changed since the checkpoint (digest {saved[:8]}, now {self.digest[:8]}), so "
                "the position in the data is invalid; restore the text, or start a new run from the weights alone: --job.name NAME "
                "--checkpoint.initial_load_path RUN/checkpoint/step-N --checkpoint.initial_load_model_only true"
            )

    def continue_segments(self, position: int, holes: Sequence[int], changed: Collection[str], sequences: int) -> str:
        """Begins a new segment at `position` if the settings differ from those of the checkpoint that was loaded. Returns a text about it,
        or "". `holes`: earlier positions that are still to be trained on. `changed`: keys that differ from the saved config.toml.
        `sequences`: how many are still needed from `position` on. Raises ValueError if the data cannot be continued."""
        return ""

    def validation_orders(self, *, seq_len: int) -> dict[str, StoreOrder | DocumentOrder]:
        """Returns the orders of all sets of validation by name. Raises ValueError if one is too small."""
        return {name: StoreOrder(store, "all", seed=None, seq_len=seq_len) for name, store in self._validation_stores}

    def validation_loaders(
        self, orders: Mapping[str, Order], partition: SlotPartition, *, pin_memory: bool = False
    ) -> dict[str, BatchLoader]:
        """Opens a loader for each of `validation_orders`, which the caller closes. The name of the only set of the training data is ""."""
        return {name: self._open_loader(order, partition, pin_memory) for name, order in orders.items()}

    def _open_loader(self, order: Order, partition: SlotPartition, pin_memory: bool) -> BatchLoader:
        return open_loader(
            order,
            partition,
            self._config.dataloader,
            document_mask=self._config.document_mask,
            separator=separator_of(self._tokenizer),
            pin_memory=pin_memory,
        )


class _OrderedData(_Data, ABC):
    """Base of the data with random access by position."""

    def __init__(
        self, config: TrainingConfig, tokenizer: Tokenizer, validation_stores: Sequence[tuple[str, Store]]
    ) -> None:
        super().__init__(config, tokenizer, validation_stores)
        # empty, so that `segments` is [_own], until a state is loaded or `continue_segments` begins one
        self._segments = list[DataSegment]()
        self._predates_segments = False  # True: the loaded state is of a version without segments
        self._order: SegmentedOrder | None = None
        self._loader: BatchLoader | None = None

    @abstractmethod
    def order(self, *, seed: int, seq_len: int) -> StoreOrder | DocumentOrder | Mixture:
        """Returns the order of training of one segment. Raises ValueError if there is no sequence."""

    @abstractmethod
    def reopened(self, config: TrainingConfig) -> _OrderedData:
        """Returns the data of an earlier segment, with `config`. Raises OSError, and ValueError."""

    @property
    def end(self) -> int | None:
        """The position at which all budgets have ended; None: never. Of the order that `loader` has opened."""
        return self._order.end if self._order is not None else None

    def loader(self, partition: SlotPartition, *, pin_memory: bool = False) -> BatchLoader:
        """Opens the loader of training, which the caller closes. Raises ValueError as `order` does. `pin_memory`: for copies to CUDA."""
        self._order = SegmentedOrder(self.orders())
        self._loader = self._open_loader(self._order, partition, pin_memory)
        return self._loader

    @property
    def segments(self) -> list[DataSegment]:
        return self._segments or [self._own]

    @cached_property
    def _own(self) -> DataSegment:
        """The segment that this launch's settings describe."""
        return DataSegment.of(self._config, self.digest)

    def state_dict(self) -> dict[str, str]:
        # the key is part of the checkpoint format; before there were segments it held the digest alone
        return {"digest": json.dumps([asdict(segment) for segment in self.segments])}

    def load_state_dict(self, state: dict[str, str]) -> None:
        self._predates_segments = not state["digest"].startswith("[")
        if self._predates_segments:
            segments = [replace(self._own, digest=state["digest"])]
        else:
            segments = [DataSegment(**segment) for segment in json.loads(state["digest"])]
        if segments[-1].settings == self._own.settings:
            self.check_digest(segments[-1].digest)
        self._set(segments)

    def continue_segments(self, position: int, holes: Sequence[int], changed: Collection[str], sequences: int) -> str:
        # `position` is 0 if a checkpoint was loaded without its ledger: the later segments of its data are not of this run
        own, before, text = self._own, [each for each in self.segments if each.first <= position], ""
        if self._predates_segments and (
            keys := [key for key in changed if key.removeprefix("training.") in own.settings]
        ):
            raise ValueError(
                f"{keys[0]}: this run's checkpoint is of a version that did not save it; resume once with the saved settings, until a "
                "checkpoint is written"
            )
        if not before[-1].continues(own):
            self._set([*(each for each in before if each.first < position), replace(own, first=position)])
            earlier = self._open(len(before) - 1, before[-1])
            left = earlier.left_over(position - before[-1].first) if earlier else 0
            text = f"data: a new epoch begins at sequence {position}"
            text += f"; {left} sequences of the one before are left over" if left else ""
            shares = [each.settings.get("dataset_held_out", 0.0) for each in (before[-1], own)]
            if position and (shares[0] == 0 < shares[1] or (shares[0] < shares[1] and self._config.dataset != "store")):
                text += "; documents that were trained on before may be among those held out now, and lower their loss"
        elif before != self.segments:
            self._set(before)
        orders = self.orders()
        for (first, order), (end, _) in pairwise(orders):
            if order is None and (needed := [hole for hole in holes if first <= hole < end]):
                raise ValueError(
                    f"training.sources: {len(needed)} sequences from {needed[0]} on were assigned, but not trained on, before the data "
                    "changed, and that data cannot be opened; restore it for one more step, or resume from an earlier checkpoint"
                )
        present, order = orders[-1]
        if isinstance(order, Mixture) and order.end is not None and position + sequences > present + order.end:
            raise ValueError(
                f"training.steps: {sequences} sequences are needed from {position} on, but the budgets of training.sources end after "
                f"{max(0, present + order.end - position)}; set fewer steps, or larger budgets"
            )
        return text

    def _set(self, segments: list[DataSegment]) -> None:
        same, self._segments = segments == self.segments, segments
        continues = segments[-1].continues(self._own)  # else `continue_segments` adds one
        if continues and not same and self._order is not None and self._loader is not None:
            self._order.set(self.orders())
            self._loader.renew()

    def orders(self) -> list[tuple[int, Order | None]]:
        """Returns the first position and the order of each segment; None: its data is gone."""
        return [(segment.first, self._open(number, segment)) for number, segment in enumerate(self.segments)]

    def _open(self, number: int, segment: DataSegment) -> StoreOrder | DocumentOrder | Mixture | None:
        """Returns the order of segment `number`; None: it is an earlier one, whose data is gone."""
        # each segment has another order, also with the same seed, which is below 2^32
        offset = number << 32
        if segment.continues(self._own):
            return self.order(seed=self._config.seed + offset, seq_len=self._config.seq_len)
        try:
            config = segment.config(self._config)
            data = self.reopened(config)
            if data.digest != segment.digest:
                return None
            return data.order(seed=config.seed + offset, seq_len=config.seq_len)
        except (OSError, ValueError):
            return None


class CachedData(_OrderedData):
    """A tokenised corpus in the cache."""

    def __init__(
        self,
        config: TrainingConfig,
        tokenizer: Tokenizer,
        corpus: Corpus,
        validation_stores: Sequence[tuple[str, Store]],
        *,
        validates: bool,
    ) -> None:
        super().__init__(config, tokenizer, validation_stores)
        self._corpus, self._validates = corpus, validates and config.dataset_held_out > 0
        cut = self._validates and needs_token_split(corpus, config.dataset_held_out)
        self.digest = f"{_TOKEN_SPLIT}{corpus.key}" if cut else corpus.key

    def summary(self) -> str:
        meta, held_out = self._corpus.meta, self._config.dataset_held_out
        train, validation = (
            quantity(int(document_spans(self._corpus, split, held_out, may_split_by_tokens=self._validates)[1].sum()))
            for split in SPLITS
        )
        files = f"{meta.files} file{'s' * (meta.files != 1)}, {quantity(meta.bytes)}B, digest {meta.content[:8]}"
        return f"{self._config.dataset}: {files}, {train} training tokens, {validation} validation tokens"

    def order(self, *, seed: int, seq_len: int) -> DocumentOrder:
        return self._of_split("train", seed, seq_len)

    def validation_orders(self, *, seq_len: int) -> dict[str, StoreOrder | DocumentOrder]:
        own: dict[str, StoreOrder | DocumentOrder] = (
            {"": self._of_split("validation", 0, seq_len)} if self._validates else {}
        )
        return own | super().validation_orders(seq_len=seq_len)

    def reopened(self, config: TrainingConfig) -> _OrderedData:
        return CachedData(config, self._tokenizer, self._corpus, (), validates=self._validates)

    def _of_split(self, split: str, seed: int, seq_len: int) -> DocumentOrder:
        held_out = self._config.dataset_held_out
        return DocumentOrder(
            self._corpus, split, held_out=held_out, seed=seed, seq_len=seq_len, may_split_by_tokens=self._validates
        )


class StoredData(_OrderedData):
    """One token store, or a mixture of several."""

    def __init__(
        self,
        config: TrainingConfig,
        tokenizer: Tokenizer,
        stores: Sequence[Store],
        validation_stores: Sequence[tuple[str, Store]],
    ) -> None:
        super().__init__(config, tokenizer, validation_stores)
        self._stores, self._holds_out = stores, config.dataset_held_out > 0
        # also those that only earlier segments have: segments share a store, whose manifest lists all of its shards
        self._opened = {store.folder: store for store in stores}
        keys = [store.key for store in stores]
        self.digest = keys[0] if len(keys) == 1 else sha256("".join(keys).encode()).hexdigest()[:32]
        documents = dict(zip(config.store_names, (store.manifest.documents for store in stores), strict=True))
        for index, span in enumerate(config.skip):
            if span.source and span.end > documents[span.source]:
                raise ValueError(
                    f"training.skip[{index}].end = {span.end}: the store {span.source} has {documents[span.source]} documents; "
                    f"nearest: {documents[span.source]}"
                )

    def summary(self) -> str:
        total = sum(store.manifest.tokens for store in self._stores)
        train = sum(shard.train_tokens for store in self._stores for shard in store.manifest.shards)
        train = train if self._holds_out else total
        return (
            f"store: {', '.join(self._config.store_names)}, digest {self.digest[:8]}, {quantity(train)} training tokens, "
            f"{quantity(total - train)} validation tokens"
        )

    def reopened(self, config: TrainingConfig) -> _OrderedData:
        paths = [source.path for source in config.sources] or [config.dataset_path]
        folders = [Path(path).expanduser() for path in paths]
        for folder in folders:
            if folder not in self._opened:
                self._opened[folder] = Store(folder, "training.dataset")
        return StoredData(config, self._tokenizer, [self._opened[folder] for folder in folders], ())

    def order(self, *, seed: int, seq_len: int) -> StoreOrder | Mixture:
        split = "train" if self._holds_out else "all"
        orders = [
            StoreOrder(
                store,
                split,
                seed=seed,
                seq_len=seq_len,
                skip=[(span.first, span.end) for span in self._config.skip if span.source == name],
            )
            for name, store in zip(self._config.store_names, self._stores, strict=True)
        ]
        if not self._config.sources:
            return orders[0]
        ingredients = []
        for number, (source, order) in enumerate(zip(self._config.sources, orders, strict=True)):
            limit = source.tokens // seq_len if source.tokens else round(source.epochs * order.sequences_per_epoch)
            if (source.tokens or source.epochs) and not limit:
                key, value = ("tokens", source.tokens) if source.tokens else ("epochs", source.epochs)
                least = seq_len if source.tokens else 1 / order.sequences_per_epoch
                raise ValueError(
                    f"training.sources[{number}].{key} = {value:g}: less than one sequence of {seq_len} tokens; nearest: {least:g}"
                )
            ingredients.append(MixtureSource(order, source.weight, limit or None))
        return Mixture(ingredients)

    def validation_orders(self, *, seq_len: int) -> dict[str, StoreOrder | DocumentOrder]:
        names = [source.label for source in self._config.sources] or [""]
        own: dict[str, StoreOrder | DocumentOrder] = {
            name: StoreOrder(store, "validation", seed=None, seq_len=seq_len)
            for name, store in zip(names, self._stores, strict=True)
            if self._holds_out and store.manifest.settings.held_out
        }
        return own | super().validation_orders(seq_len=seq_len)


class StreamedData(_Data):
    """A Hugging Face data set, in its own order."""

    end = None

    def summary(self) -> str:
        config = self._config
        subset = f" ({config.dataset_subset})" if config.dataset_subset else ""
        return f"huggingface: {config.dataset_path}{subset}, split {config.dataset_split}, streamed in its own order"

    def loader(self, partition: SlotPartition, *, pin_memory: bool = False) -> BatchLoader:
        return self._open("train", partition, pin_memory)

    def validation_loaders(
        self, orders: Mapping[str, Order], partition: SlotPartition, *, pin_memory: bool = False
    ) -> dict[str, BatchLoader]:
        own = {"": self._open("validation", partition, pin_memory)} if self._config.dataset_held_out else {}
        return own | super().validation_loaders(orders, partition, pin_memory=pin_memory)

    def _open(self, split: str, partition: SlotPartition, pin_memory: bool) -> StreamingLoader:
        stream = open_stream(self._config, dp_rank=partition.dp_rank, dp_size=partition.dp_size)
        return StreamingLoader(stream, self._tokenizer, self._config, partition, split=split, pin_memory=pin_memory)


TrainingData = CachedData | StoredData | StreamedData


def open_data(
    config: TrainingConfig,
    validation: ValidationConfig,
    tokenizer: Tokenizer,
    cache_folder: str | Path,
    *,
    log: Log,
    vocab_size: int = 0,
) -> TrainingData:
    """Opens the data of [training] and [validation], tokenised or mapped; every rank calls it. `vocab_size`, errors: see `open_corpus`."""

    def store_at(path: str, setting: str) -> Store:
        store = Store(Path(path).expanduser(), setting)
        store.check_tokenizer(tokenizer.fingerprint(), max(vocab_size, tokenizer.vocab_size))
        return store

    validation_stores = [
        (source.label, store_at(source.path, f'validation.sources[{index}].path = "{source.path}"'))
        for index, source in enumerate(validation.sources)
    ]
    if config.dataset == "store":
        places = [(f"training.sources[{index}].path", source.path) for index, source in enumerate(config.sources)]
        places = places or [("training.dataset_path", config.dataset_path)]
        stores = [store_at(path, f'{key} = "{path}"') for key, path in places]
        if (
            validation.enable
            and not validation_stores
            and not any(store.manifest.settings.held_out for store in stores)
        ):
            raise ValueError(
                "validation.enable = true: no store has documents that are held out; prepare one with --held-out, or name "
                "[[validation.sources]]"
            )
        return StoredData(config, tokenizer, stores, validation_stores)
    if config.dataset == "huggingface":
        return StreamedData(config, tokenizer, validation_stores)
    corpus = open_corpus(find_source(config), tokenizer, Path(cache_folder), log=log, vocab_size=vocab_size)
    if config.document_mask and config.dataset == "tokens" and (path := corpus.unmarked(tokenizer)):
        raise ValueError(
            f"training.document_mask = true: neither BOS, {tokenizer.bos_id}, nor EOS, {tokenizer.eos_id}, marks documents in {path}; "
            "set it to false, or prepare the text with scripts/prepare_data.py"
        )
    return CachedData(config, tokenizer, corpus, validation_stores, validates=validation.enable)
