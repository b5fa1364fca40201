"""`python zero_shot.py`: the base model's zero-shot accuracy, by the stage `math_baseline` and what it needs."""

import os

if __name__ == "__main__":
    os.execvp("dvc", ["dvc", "repro", "math_baseline"])
