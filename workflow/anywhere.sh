#!/bin/sh
# Run one stage on a machine that shares only a DVC remote with others: `workflow/anywhere.sh STAGE [--force]` in a clone.
#
# Results of other machines are in the remote's run cache: DVC takes earlier stages from there, runs what nobody has run yet, and
# pushes what it made. So dvc.lock is the same everywhere. DVC's run cache leaves out stages with an output that git stores
# (`cache: false`: data, evaluations, selections, the report); each machine runs those itself.
set -e
export SHELL=/bin/sh # DVC runs commands with the login shell; a service user's may be /bin/false
dvc fetch --quiet --run-cache "$1"
dvc --wait-for-lock repro --pull "$@"
dvc push --quiet --run-cache "$1"
