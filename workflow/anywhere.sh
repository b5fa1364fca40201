#!/bin/sh
# One stage on a machine that shares no disk with the others, only a DVC remote: `workflow/anywhere.sh STAGE [--force]` in a clone.
#
# What other machines have run is in the remote's run cache: DVC takes the stages before this one over from there, runs what
# nobody has run yet, and hands on what it made. So dvc.lock says the same everywhere. DVC's run cache leaves out stages with an
# output that git keeps (`cache: false`: data, evaluations, selections, the report); each machine runs those for itself.
set -e
dvc fetch --quiet --run-cache "$1"
dvc --wait-for-lock repro --pull "$@"
dvc push --quiet --run-cache "$1"
