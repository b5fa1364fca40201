#!/usr/bin/env bash
# A Slurm cluster of one node with two GPUs on this machine, for the tests. Debian or Ubuntu, as root; systemd is not needed.
# Everything it writes (keys, configuration, state, logs) is in FOLDER, everything it listens on is on loopback.
# usage: tests/slurm/cluster.sh install        install slurm-wlm and munge by apt-get
#        tests/slurm/cluster.sh start FOLDER   start the cluster, wait until its node is idle, print what to export
#        tests/slurm/cluster.sh stop FOLDER    end its jobs and its daemons; jobcomp.log has a line for each ended job
set -euo pipefail
PATH=$PATH:/usr/sbin:/sbin # where Debian has the daemons; not every root's PATH has it

fail() {
  echo "cluster.sh: $*" >&2
  exit 1
}

alive() { # PID; one that has ended and that nobody waited for is not
  grep -qs '^State:.[^ZX]' "/proc/$1/status"
}

install_packages() {
  if command -v slurmctld slurmd munged > /dev/null; then return; fi
  command -v apt-get > /dev/null || fail "installing needs apt-get (Debian, Ubuntu). Install Slurm and MUNGE by other means."
  [ "$(id -u)" = 0 ] || fail "installing needs root. Run 'sudo tests/slurm/cluster.sh install'."
  local log
  log=$(mktemp)
  export DEBIAN_FRONTEND=noninteractive
  if ! { apt-get update -qq && apt-get install -qq --no-install-recommends slurm-wlm munge; } > "$log" 2>&1; then
    tail -n 20 "$log" >&2
    fail "apt-get could not install slurm-wlm and munge, see above and $log. Is there a network, and a mirror that has them?"
  fi
  rm "$log"
}

write_configuration() { # FOLDER
  local folder=$1 host ports
  host=$(hostname -s)
  ports=$(python3 -c '
import socket
sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
print(*(s.getsockname()[1] for s in sockets))')
  # Null devices, or else plain files, stand for the GPUs. With plain ones Slurm does all but set CUDA_VISIBLE_DEVICES.
  for device in "$folder/nvidia0" "$folder/nvidia1"; do
    mknod "$device" c 1 3 2> /dev/null || touch "$device"
  done
  echo "NodeName=$host Name=gpu File=$folder/nvidia[0-1] Flags=nvidia_gpu_env" > "$folder/gres.conf"
  touch "$folder/jobcomp.log"
  # - CPUs and memory are more than small machines have, so that it is the GPUs that run out.
  # - cred_expire is also how long a job that was put back into the queue waits.
  # - There is no accounting: jobcomp.log is the record.
  cat > "$folder/slurm.conf" <<TEXT
ClusterName=local
SlurmctldHost=$host(127.0.0.1)
SlurmctldPort=${ports% *}
SlurmdPort=${ports#* }
AuthType=auth/munge
AuthInfo=socket=$folder/munge.socket,cred_expire=10
SlurmUser=root
SlurmdUser=root
StateSaveLocation=$folder/state
SlurmdSpoolDir=$folder/spool
SlurmctldPidFile=$folder/slurmctld.pid
SlurmdPidFile=$folder/slurmd.pid
SlurmctldLogFile=$folder/slurmctld.log
SlurmdLogFile=$folder/slurmd.log
JobCompType=jobcomp/filetxt
JobCompLoc=$folder/jobcomp.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
SchedulerParameters=sched_interval=5,sched_min_interval=100000
MpiDefault=none
GresTypes=gpu
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MinJobAge=300
KillWait=30
ReturnToService=2
SlurmdParameters=config_overrides
NodeName=$host NodeAddr=127.0.0.1 CPUs=4 RealMemory=32000 Gres=gpu:2
PartitionName=debug Nodes=$host Default=YES MaxTime=INFINITE State=UP
TEXT
}

start() { # FOLDER
  local folder
  mkdir -p "$1"
  folder=$(realpath "$1")
  [ "$(id -u)" = 0 ] || fail "starting needs root."
  command -v slurmctld slurmd munged > /dev/null || fail "Slurm is not installed. Run 'tests/slurm/cluster.sh install'."
  [ ! -e "$folder/slurm.conf" ] || fail "$folder holds a cluster. Run 'tests/slurm/cluster.sh stop $1' and remove the folder."
  mkdir "$folder/state" "$folder/spool"
  write_configuration "$folder"
  trap "stop '$folder'" EXIT
  export SLURM_CONF=$folder/slurm.conf
  (umask 077 && head -c 128 /dev/urandom > "$folder/munge.key")
  # --force: MUNGE would rather not run as root, nor below a folder that others may write to, as /tmp is.
  munged --force --key-file="$folder/munge.key" --socket="$folder/munge.socket" --pid-file="$folder/munged.pid" \
    --log-file="$folder/munged.log" --seed-file="$folder/munge.seed" > "$folder/munged.out" 2>&1 ||
    fail "munged did not start: $(cat "$folder/munged.out")"
  slurmctld > "$folder/slurmctld.out" 2>&1 || fail "slurmctld did not start, see slurmctld.out and slurmctld.log in $folder"
  slurmd > "$folder/slurmd.out" 2>&1 || fail "slurmd did not start, see slurmd.out and slurmd.log in $folder"
  for _ in $(seq 100); do
    if [ "$(timeout 5 sinfo --noheader --format=%T 2> /dev/null)" = idle ]; then
      trap - EXIT
      echo "export SLURM_CONF=$SLURM_CONF"
      return
    fi
    sleep 0.2
  done
  fail "the node was not idle after 30 s, see slurmctld.log and slurmd.log in $folder"
}

stop() { # FOLDER
  local folder pid
  folder=$(realpath "$1")
  [ -e "$folder/slurm.conf" ] || fail "there is no cluster in $1 (no slurm.conf)."
  export SLURM_CONF=$folder/slurm.conf
  # Daemons that end leave their jobs running. What was cancelled before is killed by Slurm after KillWait.
  timeout 10 scancel --signal=KILL --full --user="$(id -un)" 2> /dev/null || true
  timeout 10 scancel --user="$(id -un)" 2> /dev/null || true
  for _ in $(seq 90); do
    [ -n "$(timeout 10 squeue --noheader 2> /dev/null)" ] || break
    sleep 1
  done
  for name in slurmd slurmctld munged; do
    [ -s "$folder/$name.pid" ] || continue
    pid=$(cat "$folder/$name.pid")
    kill "$pid" 2> /dev/null || continue
    for _ in $(seq 100); do
      alive "$pid" || break
      sleep 0.1
    done
    ! alive "$pid" || kill -KILL "$pid"
  done
  mv "$folder/slurm.conf" "$folder/slurm.conf.stopped"
}

case "$#:${1:-}" in
  1:install) install_packages ;;
  2:start) start "$2" ;;
  2:stop) stop "$2" ;;
  *) fail "$(grep -A 2 '^# usage' "$0")" ;;
esac
