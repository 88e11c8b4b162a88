"""A dry run on a device that computes nothing."""
