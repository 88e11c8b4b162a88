"""The lighthouse's live page: what the job does, why it waits, what has happened. It reads the lighthouse and decides nothing."""
