"""Data, loss, optimizer, checkpoints, metrics and watchdog of a training run.

Reading order: train.py (the step), components.py (what it is built of), ../parallelisms/parallelize.py, optimizer.py, checkpoint.py with
saver.py, data/order.py, metrics.py; ft/__init__.py has the map of fault tolerance. The paths below begin at the repository's root.

Where is the loss divided by the number of tokens? In OptimizerStep.step, once, in the factor that also clips: by all valid tokens of the
    step. Backward starts from this rank's sum; Commit.mean_loss is only for the report. Micro-batches, FSDP, PP and CP only add terms,
    and one rank counts a sequence. TP ranks compute the same loss; DTensor's placements make it count once, not once per TP rank.
    -> parallelisms/parallelize.py:NoPipeline.forward_backward, training/optimizer.py:OptimizerStep.step, train.py:Run.compute_step,
    parallelisms/mesh.py:MeshCoordinate.counts_tokens, parallelisms/fsdp.py:apply_fsdp, parallelisms/pipeline.py:Pipeline
In which order are the techniques applied? In that of the lines of parallelize(): pipeline split, loss, float8, TP, EP, CP, activation
    checkpointing, compile, master dtype, FSDP, materialisation, initial values. A change is made there.
    -> parallelisms/parallelize.py:parallelize, training/components.py:Components.build_model
How is an optimizer added? By a name in OptimizerConfig.name and a class in `build_optimizer`, whose docstring has the rules of such a
    class; docs/optimizers.md says how it is compared with one process.
    -> training/optimizer.py:build_optimizer, training/optimizer.py:MuonAdamW, ft/optim_state.py:init_optim_state
How is a learning-rate schedule added? By a name in LRSchedulerConfig.decay_type and a formula in `shapes`; one that is not warm-up,
    plateau and decay replaces the function; the schedule's length is checked before the start. `make docs` writes its help.
    -> training/optimizer.py:learning_rate_factor, training/optimizer.py:LRSchedulerConfig, configs/check.py:_check_schedules
How does a resumed run find its next samples on another number of ranks? A checkpoint has one position, and the holes before it (slots
    that no commit has): the next slots are the holes, then those from the position on; a rank takes its part of each. Only a stream has
    cursors of ranks, and needs as many data-parallel ranks. Another batch needs resume.allow and, if there are holes, must divide the
    saved one; --training.global_batch_size=N keeps the batch where the default, -1, would change it.
    -> ft/protocol/step.py:Ledger.assign, training/data/loader.py:SlotPartition.tasks, configs/saved.py:check_saved
How is a checkpoint whole or absent? All ranks fsync their files in step-N.partial and report to rank 0 (with groups: of the writer
    group), which renames the folder if no rank reports an error; otherwise it removes the folder, and all raise CheckpointFailed. A rank
    that dies ends the others, exit code 1; the last checkpoint stays, and the next launch, with groups the next save, removes
    step-N.partial*.
    -> training/checkpoint.py:Checkpointer._finish_save, training/rank_collectives.py:RankCollectives,
    training/checkpoint_files.py:publish, training/writer_lease.py:WriterLease
How is a metric added? In MetricsProcessor.step: a keyword of `_write_metrics` (the row) and a tag in `scalars` (the chart). It sees
    Update and Commit; a value of LocalStep needs a new argument, and is of this group only. A value that differs between ranks joins
    `sums` of Run.compute_step, before the tokens, which take the rest; a field of the log line is in `_line`. A key that begins with
    "validation" makes another kind of row. docs/operating.md lists keys and tags.
    -> training/metrics.py:MetricsProcessor.step, train.py:Run.train_step, training/metrics_writer.py:Row
How does another model get TP and PP? TP by its tp_plan, module name -> kind; PP by the names of its children, if its forward skips those
    that are None. Its code has no collective; models/contract.py lists all parts, and the checks before the start name most missing ones.
    They do not see a Config without check_tensor_parallel, nor a forward that does not skip None.
    -> models/contract.py:Model, parallelisms/tensor.py:apply_tensor_parallel, parallelisms/pipeline.py:split,
    configs/check.py:_check_contract_and_layout
How does a bad setting become exit code 2? load(), and each pass of check(), raise one ConfigError, a ValueError, with all problems of
    that pass; main() of scripts/launch.py, or with one rank of train.py, prints it and returns 2. What only ranks can see raises
    ValueError as the run is built, later BadInput or ModelFault; the launcher keeps a rank's 2, where torchrun itself exits with 1.
    -> train.py:main, scripts/launch.py:main, scripts/agent.py:report_failure, configs/check.py:check, configs/errors.py:raise_problems
What is the gradient norm across PP, TP, EP and groups? Each rank adds squares of shards that no earlier rank of the parameter's mesh has
    (by its placements); stages have different parameters. One all-reduce over the group's ranks. Between groups sums are equal already;
    in semi-synchronous training each group has its own norm.
    -> training/optimizer.py:gradient_norm, parallelisms/mesh.py:expert_mesh, ft/gradients.py:Gradients.deliver
"""
