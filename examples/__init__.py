"""Programs to copy from: each stands on its own, and uses ft as any program would."""
