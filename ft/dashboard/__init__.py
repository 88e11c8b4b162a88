"""The lighthouse's dashboard: state of the job, reason of a wait, and timeline of events. Passes on an operator's orders."""
