"""`make literature`: run each study of studies/literature/, and put what papers published beside what it found.

A study runs in a copy of the project below literature/, so params.yaml, reports/ and the active study stay as they are. A copy
that was stopped goes on. A study whose report is in reports/literature/ runs again only if its settings have changed since.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # this folder's code, whichever project's environment runs it
import pandas as pd
from scipy.stats import spearmanr

from grpo.commands.replicate import copy_project, run_pipeline
from grpo.commands.study import composed_text
from grpo.common.errors import UserError
from grpo.common.files import atomic_folder, read_json, write_text
from grpo.common.yaml_file import read_mapping
from grpo.reporting.labels import bounded, said, table
from grpo.reporting.record import Values
from grpo.reporting.writeup import measured
from grpo.study import paths
from grpo.study.compose import study_path

STUDIES, COPIES, REPORTS = Path("studies/literature"), Path("literature"), paths.REPORTS / "literature"
KEPT = ("index.html", "writeup.md", "record.json", "outcomes.csv", "results.csv", "timing.csv", "tables", "curves", "figures")
HEAD = """# Claims of papers, tried on small models

Claims, margins and settings were written before any run. A verdict is about these models and this task: at another size it may
be another. *Holds*: by at least the margin; *same*: within it; *open*: these runs do not decide. `make literature` writes this.

What these studies cannot say:

- Arms have the learning rate that `mini` (of SmolLM2: `smollm2-numbers`) chose for its reward and all its questions, unless
  their names say otherwise. At rates of their own some may end higher.
- A claim about where a gain comes from says nothing where there is no gain.
- On SmolLM2 the right form is one number, any number: a reward for it alone, or for wrong answers, makes the model answer one
  digit whatever is asked.
- The validation set of `mini` has 16 different answers, so guessing by their frequency finds 0.66 of them in 16 draws
  and 0.98 in 64. At such k pass@k says little about what a model can work out.
- In the study of forgetting each method has its best rate, or a lower one within its error, so rewards differ. Fine-tuning on
  others' answers at the lower rate ends at nearly GRPO's reward: there it has the lower KL, and forgets about as little. On
  own answers it takes twice as many updates as on others'.
"""


def main() -> int:
    """Run the studies that are not finished, one after another, and write the page; return an exit code."""
    code, names = 0, sorted(path.stem for path in STUDIES.glob("*.yaml"))
    for number, name in enumerate(names, 1):
        print(f"[{number}/{len(names)}] {STUDIES / name}.yaml", flush=True)
        try:
            run(name)
        except UserError as error:  # the others still run
            print(f"error: {error}", file=sys.stderr, flush=True)
            code = 2
        done = [each for each in names if (REPORTS / each / "record.json").exists()]
        write_text(REPORTS / "README.md", "\n".join([HEAD, *map(section, done)]))
    print(f"{REPORTS}/README.md: {len(done)} of {len(names)} studies")
    return code


def run(name: str) -> None:
    """Run a study to its report and keep that in reports/literature/; UserError if a stage fails."""
    kept, copy, study = REPORTS / name, COPIES / name, f"literature/{name}"
    text, params = composed_text(study_path(study))[0], kept / paths.PARAMS
    if params.exists() and params.read_text(encoding="utf-8") == text:
        return
    if not copy.exists():
        with atomic_folder(copy) as new:
            copy_project(new)
    shutil.copytree("studies", copy / "studies", dirs_exist_ok=True)  # a copy that goes on may have older ones
    use = [sys.executable, "-m", "grpo", "study", "use", study, "--force"]
    environment = os.environ | {"PYTHONPATH": str(copy.absolute())}
    if subprocess.run(use, cwd=copy, env=environment, stdout=subprocess.DEVNULL, check=False).returncode:
        raise UserError(f"{copy}: `grpo study use {study}` failed; see above.")
    run_pipeline(copy)
    with atomic_folder(kept) as new:
        for path in (copy / paths.REPORTS / file for file in KEPT):
            (shutil.copytree if path.is_dir() else shutil.copy)(path, new / path.name)
        write_text(new / paths.PARAMS, text)


def section(name: str) -> str:
    """What a finished study claims, what was published and what it found, in Markdown."""
    folder = REPORTS / name
    params, record = read_mapping(folder / paths.PARAMS), read_json(folder / "record.json", made_by="tables")
    model, runs = params["models"]["main"], pd.read_csv(folder / "timing.csv").query("same_as.isna()")
    size = f": {model['num_hidden_layers']} layers of width {model['hidden_size']}" if "hidden_size" in model else ""
    bases = f"Base models: {len(record['seeds']) if model.get('one_per_seed') else 1}, {record['model']}{size}"
    cost = f"{len(runs)} runs of {runs['total_s'].sum():,.0f} seconds in all, without pretraining and the starts of stages"
    rows = [
        {
            "claim": bounded(claim["statement"]),
            "published": bounded("; ".join(f"{text} ({source})" for source, text in claim["reported"].items())),
            "ours (95%)": bounded(measured(claim) or claim["reason"]),
            "at this size": claim["verdict"],
        }
        for claim in record["claims"]
        if claim["own"]
    ]
    ahead = {arm: of["base_ahead_from"] for arm, of in record.get("pass_at_k", {}).items()}
    found = [f"{said(arm)} {f'from k = {k}' if k else 'at no k'}" for arm, k in ahead.items()]
    passed = f"\npass@k of the base is above that of the end, with the whole interval: {', '.join(found)}.\n" if found else ""
    passed += forgetting(record)
    head = f"## [{said(params.get('heading', name))}]({name}/index.html)\n\n{record['description']} {bases}; {cost}."
    return f"{head}\n\n{table(rows)}{passed}"


def forgetting(record: Values) -> str:
    """A sentence on how the reward on an old task goes with the forward KL, over the kept checkpoints; empty without them."""
    arms = [arm for entry in record["experiments"].values() for arm in (entry["kl"] or {}).values()]
    kept = [of for arm in arms for of in arm if of["step"] and "old_task_reward" in of]
    if not kept:
        return ""
    correlation = spearmanr(*([of[key]["value"] for of in kept] for key in ("forward_per_token", "old_task_reward"))).statistic
    which = f"Over the means of {len(kept)} kept checkpoints"
    return f"\n{which} the rank correlation of forward KL and old-task reward is {correlation:.2f}.\n"


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
