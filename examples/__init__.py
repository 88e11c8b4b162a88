"""Programs to copy from: each stands on its own. train_ddp.py uses ft as any program would; distributed_basics.py needs only torch."""
