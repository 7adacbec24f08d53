#!/usr/bin/env bash
# Ends the Slurm that start.sh has started in FOLDER, its jobs first: tests/slurm/stop.sh FOLDER
set -uo pipefail
folder=$(cd "$1" && pwd) || exit 1
export SLURM_CONF=$folder/etc/slurm.conf

ours() { # whether the process of this number was started by start.sh, and has not been replaced by another
    tr '\0' '\n' 2>/dev/null <"/proc/$1/environ" | grep -qx "SLURM_CONF=$SLURM_CONF"
}

# a job outlives the daemon of its node
if timeout 5 scontrol ping 2>/dev/null | grep -q UP; then
    timeout 10 scancel --user root
    for _ in $(seq 150); do
        [ -z "$(timeout 5 squeue --noheader)" ] && break
        sleep 0.1
    done
fi
for name in node1 node2 slurmctld slurmdbd mariadbd munged; do
    pid=$(cat "$folder/run/$name.pid" 2>/dev/null) || continue
    for signal in TERM KILL; do
        ours "$pid" && kill -s $signal "$pid"
        for _ in $(seq 100); do
            ours "$pid" || break 2
            sleep 0.1
        done
    done
done
