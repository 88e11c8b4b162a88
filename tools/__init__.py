"""Looks at a run, a cluster or this repository: nothing here is part of a run."""
