"""Leases on a dirpath and locks on a namespace: they tell which run may write there."""
