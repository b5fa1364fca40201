"""`python best_of_n.py`: pass@N, Best@N and majority vote of the base model, by the stage `best_of_n` and what it needs."""

import os

if __name__ == "__main__":
    os.execvp("dvc", ["dvc", "repro", "best_of_n"])
