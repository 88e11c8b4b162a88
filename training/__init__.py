"""Data, loss, optimizer, checkpoints, metrics and watchdog of a training run.

Reading order: train.py (the step), components.py (what it is built of), ../parallelisms/parallelize.py, optimizer.py, checkpoint.py with
saver.py, data/order.py, metrics.py; ft/__init__.py has the map of fault tolerance. The paths below begin at the repository's root.

Where is the loss divided by the number of tokens? Nowhere before backward, which starts from this rank's sum; Commit.mean_loss is only
    for the report. Summed gradients are divided once, in the optimizer step, by all valid tokens: micro-batches, FSDP, PP and CP only add
    terms, and one rank counts a sequence. TP ranks start from the same loss; the placements of tp_plan keep gradients from adding up.
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
    cursors of ranks, and needs as many data-parallel ranks. Another batch needs resume.allow; --training.global_batch_size=N keeps the
    batch where the default, -1, would change it.
    -> ft/protocol/step.py:Ledger.assign, training/data/loader.py:SlotPartition.tasks, configs/saved.py:check_saved
How is a checkpoint whole or absent? All ranks fsync files in step-N.partial; rank 0, with groups rank 0 of the writer group, renames it
    if none failed. A rank that dies ends the others, exit code 1; the last checkpoint stays, and the next launch, with groups the next
    save, removes step-N.partial*.
    -> training/checkpoint.py:Checkpointer._write, training/checkpoint.py:Checkpointer._finish_save,
    training/checkpoint.py:RankCollectives, training/checkpoint_files.py:publish, training/writer_lease.py:WriterLease
How is a metric added? As a keyword of `_write_metrics` (the row) and a tag in `scalars` (the chart), in `step`, from Update, Commit or a
    new argument: LocalStep is not passed, and is this group's own. A value that differs between ranks joins `sums` of Run.compute_step; a
    field of the log line is in `_line`. A key that begins with "validation" makes another kind of row.
    -> training/metrics.py:MetricsProcessor.step, train.py:Run.train_step, training/metrics_writer.py:Row
How does another model get TP and PP? TP by its tp_plan, module name -> kind; PP by the names of its children, if its forward skips those
    that are None. Its code has no collective; the contract lists all parts (also Config.check_tensor_parallel), and the checks before the
    start name a missing one.
    -> models/contract.py:Model, parallelisms/tensor.py:apply_tensor_parallel, parallelisms/pipeline.py:split,
    configs/check.py:_check_contract_and_layout
How does a bad setting become exit code 2? load(), and each pass of check(), raise one ConfigError, a ValueError, with all their problems;
    main() of scripts/launch.py, or of train.py for one rank or under torchrun (which exits with 1), prints it and returns 2. What only
    ranks can see raises ValueError as the run is built, later BadInput or ModelFault; the launcher keeps a rank's 2.
    -> train.py:main, scripts/launch.py:main, scripts/agent.py:report_failure, configs/check.py:check, configs/errors.py:raise_problems
What is the gradient norm across PP, TP, EP and groups? Each rank adds squares of shards that no earlier rank has, by the placements of
    each parameter's mesh; one all-reduce over the group's ranks. Between groups sums are equal already; in semi-synchronous training each
    group has its own norm.
    -> training/optimizer.py:gradient_norm, parallelisms/mesh.py:expert_mesh, ft/gradients.py:Gradients.deliver
"""
