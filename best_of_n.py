"""`python best_of_n.py`: pass@N, Best@N and majority vote of the base model, by the stage `best_of_n` and what it needs.

`--file validation.jsonl` takes the first rows of a file instead, as zero_shot.py does.
"""

from zero_shot import figures_or_file, shown

if __name__ == "__main__":
    for prompt, values in figures_or_file("best_of_n", __doc__).items():
        for n, kinds in values["n"].items():
            print(f"{prompt}, N = {n}: " + ", ".join(f"{kind} {shown(estimate)}" for kind, estimate in kinds.items()))
