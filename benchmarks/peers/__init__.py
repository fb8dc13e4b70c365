"""One job, written for dpx and for its peers: a small CNN on scikit-learn's digits. `__main__.py` runs and counts."""
