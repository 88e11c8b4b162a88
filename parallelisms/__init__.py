"""How one replica group computes: one file per technique, parallelize.py holds their order."""
