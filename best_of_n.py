"""`python best_of_n.py`: pass@N, Best@N and majority vote of the base model, by the stage `best_of_n` and what it needs."""

from zero_shot import figures_of, shown

if __name__ == "__main__":
    for prompt, values in figures_of("best_of_n").items():
        for n, kinds in values["n"].items():
            print(f"{prompt}, N = {n}: " + ", ".join(f"{kind} {shown(estimate)}" for kind, estimate in kinds.items()))
