"""Load on a cluster of real processes while its parts are killed; `python -m bench.chaos` prints what it cost."""
