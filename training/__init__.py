"""Data, loss, optimizer, checkpoints, metrics and watchdog of a training run.

Reading order: train.py (the step), components.py (what it is built of), ../parallelisms/parallelize.py, optimizer.py, checkpoint.py with
saver.py, data/order.py, metrics.py; ft/__init__.py has the map of fault tolerance. The paths below begin at the repository's root.

Where is the loss divided by the number of tokens? In OptimizerStep.step, once, in the factor that also clips: by all valid tokens of the
    step, Commit.divisor. Backward starts from the sum over this rank's valid tokens (label other than -100). Micro-batches, FSDP, PP, CP
    and replica groups only add terms; one rank (pp = cp = tp = 0) counts the tokens of a sequence, and the counts are summed over ranks and
    groups. TP ranks compute the same loss; DTensor's placements make it count once. Commit.mean_loss is only for the report.
    -> parallelisms/parallelize.py:NoPipeline.forward_backward, training/optimizer.py:OptimizerStep.step, train.py:Run.compute_step,
    parallelisms/mesh.py:MeshCoordinate.counts_tokens, parallelisms/fsdp.py:apply_fsdp, parallelisms/pipeline.py:Pipeline
In which order are the techniques applied? In that of the lines of parallelize(): pipeline split, loss, float8, TP, EP, CP, activation
    checkpointing, compile, master dtype, FSDP, to_empty, init_weights. A change is made there.
    -> parallelisms/parallelize.py:parallelize, training/components.py:Components.build_model
How is an optimizer added? By a name in OptimizerConfig.name and a class in `build_optimizer`, whose docstring has the rules of such a
    class; docs/optimizers.md says how it is compared with one process.
    -> training/optimizer.py:build_optimizer, training/optimizer.py:MuonAdamW, ft/optim_state.py:init_optim_state
How is a learning-rate schedule added? By a name in LRSchedulerConfig.decay_type and a formula in `shapes`; one that is not warm-up,
    plateau and decay replaces the function; the schedule's length is checked before the start. `make docs` writes its help.
    -> training/optimizer.py:learning_rate_factor, training/optimizer.py:LRSchedulerConfig, configs/check.py:_check_schedules
How does a resumed run find its next samples on another number of ranks? A checkpoint has one position: all sequences before it are trained
    on, except `holes`, the batches (slots) that were assigned but not committed. The next slots are the holes, then those from the position
    on; a rank takes its part of each. Only a stream has a cursor for each rank, and needs the same number of data-parallel ranks. Another
    batch size needs resume.allow and, if there are holes, must divide the saved one; --training.global_batch_size=N keeps the batch size
    where the default, -1, would change it.
    -> ft/protocol/step.py:Ledger.assign, training/data/loader.py:SlotPartition.tasks, configs/saved.py:check_saved
How is a checkpoint whole or absent? All ranks fsync their files in step-N.partial and report to rank 0 (with groups: of the writer
    group), which renames the folder if no rank reports an error; otherwise it removes the folder, and all raise CheckpointFailed, which
    Saver logs; it tries again after 30 s. A rank that dies ends the others, exit code 1; the last checkpoint stays, and the next launch,
    with groups the next save, removes step-N.partial*.
    -> training/saver.py:Saver.save_due, training/checkpoint.py:Checkpointer.overdue, training/checkpoint_load.py:CheckpointLoader,
    training/checkpoint.py:Checkpointer._finish_save, training/rank_collectives.py:RankCollectives,
    training/checkpoint_files.py:publish, training/writer_lease.py:WriterLease
How is a metric added? In MetricsProcessor.step: a keyword of `_write_metrics` (the row), a tag in `scalars` (the chart), a field of the
    log line in `_line`. It has the optimizer's Update and the Commit, which are equal in all groups. A value that differs between ranks
    is added to the tensor `sums` of Run.compute_step, which is all-reduced over the group's ranks (the token counts stay last), returned
    in LocalStep, and passed on as a new argument. No key begins with "validation": that is another kind of row. docs/operating.md lists
    keys and tags.
    -> training/metrics.py:MetricsProcessor.step, train.py:Run.train_step, training/metrics_writer.py:Row
How is the loss changed? In both methods of CrossEntropySum; or by a subclass with __call__ alone, for which tensor parallelism gathers the
    logits. build_model, tools/explain/rank.py and bench/parity_worker.py pass it to `parallelize`: unless the last is changed, too, `make
    parity` compares the old loss. Validation uses it, too: a term for training alone, such as label smoothing, is added where
    torch.is_grad_enabled(), and is then part of the training loss that is reported.
    -> training/loss.py:CrossEntropySum, training/components.py:Components.build_model, parallelisms/loss.py:head_loss
How are parameters frozen, adapters added, a model fine-tuned? By requires_grad_(False) in the model's `build`; frozen parameters stay in
    checkpoints, heals and digests, and have no gradient and no optimizer state. checkpoint.initial_load_path begins a run at step 0 with
    the weights of another, checkpoint.exclude_from_loading names adapters that these lack; scripts/hf.py imports from Hugging Face.
    -> parallelisms/parallelize.py:parallelize, training/checkpoint_config.py:CheckpointConfig, training/states.py:OptimizerState
How is a state of the run added? By a name in `checkpoint_states`: it is saved, loaded, and sent to a joining group; its state_dict returns
    the same tensors at each call. A rewind to step 0 needs a line in `reset`. A checkpoint without it is refused, unless _OPTIONAL lists
    it. What groups compare bit by bit is attached in `build_manager`.
    -> training/components.py:Components.checkpoint_states, training/components.py:Components.reset, training/checkpoint_dcp.py:fit
How does another model get TP, PP, CP and EP? TP by its tp_plan, module name -> kind; PP by the names of its children, if its forward skips
    those that are None; CP by `positions` in forward and self.attend in each attention; EP by Router and Experts. Its code has no
    collective; models/contract.py lists all parts, and the checks before the start name most missing ones. Not checked: a Config that
    does not override check_tensor_parallel, and a forward that calls a child that is None.
    -> models/contract.py:Model, parallelisms/tensor.py:apply_tensor_parallel, parallelisms/pipeline.py:split,
    configs/check.py:_check_contract_and_layout
How does a bad setting become exit code 2? load(), and each pass of check(), raise one ConfigError, a ValueError, with all problems of
    that pass; main() of scripts/launch.py, or with one rank of train.py, prints it and returns 2. What only ranks can see raises
    ValueError as the run is built, later BadInput or ModelFault; the launcher keeps a rank's 2, where torchrun itself exits with 1.
    -> train.py:main, scripts/launch.py:main, scripts/agent.py:report_failure, configs/check.py:check, configs/errors.py:raise_problems
What is the gradient norm across PP, TP, EP and groups? Each rank adds the squares of its shards; a shard that an axis replicates is counted
    only by the rank with coordinate 0 on that axis; pipeline stages have different parameters. One all-reduce over the group's ranks.
    Between groups the gradients are equal sums already; in semi-synchronous training each group has its own norm.
    -> training/optimizer.py:gradient_norm, parallelisms/mesh.py:expert_mesh, ft/gradients.py:Gradients.deliver
How is a source of data added? Files of text or tokens: a name in TrainingConfig.dataset and in its checks, and a source in find_source. A
    store or a stream: a subclass of _OrderedData or _Data, and a branch of open_data. Keys that change the order of the data begin with
    "dataset", "seed" or "seq_len": DataSegment records these. Packing is an Order: position -> T + 1 tokens, with no state.
    -> training/data/sources.py:find_source, training/data/dataset.py:open_data, training/data/dataset.py:DataSegment,
    training/data/order.py:Order, training/data/loader.py:make_batch, training/config.py:TrainingConfig
How does a validation run? Every validation.freq steps and at the last one, on the first validation.steps batches of each held-out set, with
    loaders of its own. Every replica group computes it, all ranks of the group share it, and one group writes the row; no collective
    between groups, and its time is not a step's.
    -> train.py:Run.validate, training/components.py:Components.build_data, training/metrics.py:MetricsProcessor.validation
What does a checkpoint contain? The states of Components.checkpoint_states, in one torch.distributed.checkpoint folder with a manifest; no
    random state (each step seeds itself) and no schedule (a function of the step). docs/interchange.md loads the weights elsewhere.
    -> training/components.py:Components.checkpoint_states, training/states.py:ModelState, training/checkpoint_files.py:Manifest
How is a key or a section of the configuration added? A key: an annotated field of the section's dataclass, whose type and bounds load()
    checks; a section: a frozen dataclass beside its code and an attribute of RunConfig. Checks of one section in its check(), others in
    configs/check.py. Groups must share its value, and a later launch changes it only with resume.allow, unless configs/saved.py lists it.
    `make docs` writes docs/config.md.
    -> configs/schema.py:RunConfig, configs/keys.py:convert, configs/check.py:check_settings, configs/saved.py:check_saved
"""
