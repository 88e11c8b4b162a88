"""--explain: the memory, messages and computation of a run, before anything is started."""
