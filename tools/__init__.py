"""Tools that inspect a configuration, a cluster or this repository; no run uses them."""
