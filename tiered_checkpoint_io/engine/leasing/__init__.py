"""Leases on a dirpath and locks on a namespace: only the run that holds them may write there."""
