"""Data, loss, optimizer, checkpoints, metrics and watchdog of a training run.

Reading order: train.py (the step), components.py (what it is built of), ../parallelisms/parallelize.py, optimizer.py, checkpoint.py with
saver.py, data/order.py, metrics.py; ft/__init__.py has the map of fault tolerance. The paths below begin at the repository's root.

Where is the loss divided by the number of tokens? Only for the report, in Commit.mean_loss: what backward starts from is a sum. Summed
    gradients are divided once, in the optimizer step, by all valid tokens: micro-batches, FSDP, PP and CP only add terms, one rank counts
    a sequence, and TP ranks have the same loss, which one of them reports.
    -> training/optimizer.py:OptimizerStep.step, train.py:Run.compute_step, parallelisms/mesh.py:MeshCoordinate.counts_tokens,
    parallelisms/fsdp.py:apply_fsdp, parallelisms/pipeline.py:Pipeline
In which order are the techniques applied? In that of the lines of parallelize(): pipeline split, loss, float8, TP, EP,
    CP, activation checkpointing, compile, master dtype, FSDP, materialisation, initial values. A change is made there.
    -> parallelisms/parallelize.py:parallelize, training/components.py:Components.build_model
How is an optimizer added? By a name in OptimizerConfig.name and a class in `build_optimizer`, whose docstring has the
    rules of such a class; docs/optimizers.md says how it is compared with one process.
    -> training/optimizer.py:build_optimizer, training/optimizer.py:MuonAdamW, ft/optim_state.py:init_optim_state
How is a learning-rate schedule added? By a name in LRSchedulerConfig.decay_type and a formula in `shapes`; one that is
    not warm-up, plateau and decay replaces the function; its length and settings are checked before the start. `make docs` writes its help.
    -> training/optimizer.py:learning_rate_factor, training/optimizer.py:LRSchedulerConfig, configs/check.py:_check_schedules
How does a resumed run find its next samples on another number of ranks? A checkpoint has one position and holes, from
    which slots follow; a rank takes its part of each. Only a stream has cursors of ranks, and needs as many data-parallel ranks. Another
    batch needs resume.allow; --training.global_batch_size=N keeps the batch where the default, -1, would change it.
    -> ft/protocol/step.py:Ledger.assign, training/data/loader.py:SlotPartition.tasks, configs/saved.py:check_saved
How is a checkpoint whole or absent? All ranks fsync files in step-N.partial; rank 0, with groups rank 0 of the writer group,
    renames it if none failed. A rank that dies ends the others; the last checkpoint stays, leftovers are removed.
    -> training/checkpoint.py:Checkpointer._finish_save, training/checkpoint.py:RankCollectives, training/checkpoint_files.py:publish,
    training/writer_lease.py:WriterLease
How is a metric added? As a keyword of `_write_metrics` (the row) and a tag in `scalars` (the chart), in `step`, from Update, Commit or a
    new argument: LocalStep is not passed, and is this group's own. A key that begins with "validation" makes another kind of row.
    -> training/metrics.py:MetricsProcessor.step, train.py:Run.train_step, training/metrics_writer.py:Row
How does another model get TP and PP? TP by its tp_plan, module name -> kind; PP by the names of its children, if its
    forward skips those that are None. Its code has no collective; the contract lists all parts, and checks name them.
    -> models/contract.py:Model, parallelisms/tensor.py:apply_tensor_parallel, parallelisms/pipeline.py:split,
    configs/check.py:_check_contract_and_layout
How does a bad setting become exit code 2? Reading, and each pass of the checks, gathers problems in a ConfigError, a ValueError, which main
    prints, that of scripts/launch.py or of train.py. What only ranks can see raises ValueError as the run is built, later BadInput or
    ModelFault.
    -> train.py:main, scripts/launch.py:main, scripts/agent.py:report_failure, configs/check.py:check, configs/errors.py:raise_problems
What is the gradient norm across PP, TP, EP and groups? Each rank adds squares of shards that no earlier rank has, by
    the placements of each parameter's mesh; one all-reduce over the group's ranks. Between groups sums are equal already;
    in semi-synchronous training each group has its own norm.
    -> training/optimizer.py:gradient_norm, parallelisms/mesh.py:expert_mesh, ft/gradients.py:Gradients.deliver
"""
