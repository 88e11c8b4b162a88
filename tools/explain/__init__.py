"""--explain: the memory, communication and computation of a run, before anything is started."""
