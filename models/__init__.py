"""Models: architecture, initialisation and cost. Depends only on torch."""
