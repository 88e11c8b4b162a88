"""--explain: what a run would take and do, told before anything is started."""
