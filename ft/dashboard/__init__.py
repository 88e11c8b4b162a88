"""The lighthouse's dashboard: state of the job, reason of a wait, and timeline of events. It reads the lighthouse's state only."""
