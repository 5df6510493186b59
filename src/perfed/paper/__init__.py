"""The tables, figures and theorems of the paper, as things one can run."""
