#!/usr/bin/env bash
# Starts a Slurm of two nodes on this machine: tests/slurm/start.sh FOLDER [DAEMON]
# Afterwards SLURM_CONF=FOLDER/etc/slurm.conf reaches it. All that it writes lies in FOLDER, it listens on 127.0.0.1
# alone, and stop.sh ends it. With the name of one daemon, such as slurmctld: starts that one again.
# Needs root and Debian's munge, slurm-wlm, slurmdbd, mariadb-server-core and mariadb-client-core; no systemd.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
mkdir -p "$1"/{etc,run,log,state,spool,mysql}
folder=$(cd "$1" && pwd)
export SLURM_CONF=$folder/etc/slurm.conf MYSQL_UNIX_PORT=$folder/run/mysql.sock PATH=$PATH:/usr/sbin:/sbin
umask 022 # munged refuses a socket that others could not reach

configure() {
    local port=$((10000 + RANDOM % 2400 * 4)) name # each start its own, so that two do not meet
    for name in slurm slurmdbd; do
        sed -e "s|@DIR@|$folder|g" -e "s|@HOST@|$(hostname -s)|g" -e "s|@PORT@|$port|g" -e "s|@PORT1@|$((port + 1))|g" \
            -e "s|@PORT2@|$((port + 2))|g" -e "s|@PORT3@|$((port + 3))|g" "$here/$name.conf" >"$folder/etc/$name.conf"
    done
    chmod 600 "$folder/etc/slurmdbd.conf"
    echo "127.0.0.1 localhost $(hostname -s) node1 node2" >"$folder/etc/hosts"
    (umask 077 && head -c 64 /dev/urandom >"$folder/etc/munge.key")
    # a server that starts removes the temporary tables of others from a folder that they share
    TMPDIR=$folder/run mariadb-install-db --no-defaults --user=root --datadir="$folder/mysql" --skip-test-db \
        >"$folder/log/install" 2>&1 || {
        echo "start.sh: no database can be made:" >&2
        head -n 5 "$folder/log/install" >&2
        exit 1
    }
}

run() { # run NAME COMMAND...: in the background, in a session of its own, with its number in run/NAME.pid
    setsid "${@:2}" </dev/null >>"$folder/log/$1" 2>&1 &
    echo $! >"$folder/run/$1.pid"
}

on() { # on NODE COMMAND...: as if on that node: its host name, and /etc/hosts where the nodes are known
    # shellcheck disable=SC2016
    exec unshare --mount --uts bash -c 'mount --bind "$0" /etc/hosts && hostname "$1" && exec "${@:2}"' \
        "$folder/etc/hosts" "$@"
}
export -f on
export folder

daemon() {
    case $1 in
    munged) run munged munged --foreground --key-file="$folder/etc/munge.key" --socket="$folder/run/munge.sock" \
        --pid-file="$folder/run/own-munged.pid" --seed-file="$folder/run/munge.seed" --log-file="$folder/log/munge" ;;
    mariadbd) run mariadbd mariadbd --no-defaults --user=root --datadir="$folder/mysql" --tmpdir="$folder/run" \
        --socket="$MYSQL_UNIX_PORT" --skip-networking --pid-file="$folder/run/own-mariadbd.pid" --innodb-flush-log-at-trx-commit=0 ;;
    slurmdbd | slurmctld) run "$1" "$1" -D ;;
    node?) run "$1" bash -c "on $1 slurmd -D -N $1" ;;
    *) echo "start.sh: no daemon $1" >&2 && exit 2 ;;
    esac
}

await() { # await WHAT COMMAND...: until the command succeeds
    local end=$((SECONDS + 60))
    until "${@:2}" >/dev/null 2>&1; do
        if ((SECONDS > end)); then
            echo "start.sh: $1 did not come up; $folder/log says why:" >&2
            tail -n 5 "$folder"/log/* >&2
            exit 1
        fi
        sleep 0.1
    done
}
answers() { timeout 5 scontrol ping | grep -q UP; }
idle() { [ "$(timeout 5 sinfo --noheader --Node --partition main --format %t | grep -cx idle)" = 2 ]; }

if [ $# -gt 1 ]; then
    daemon "$2"
    await "$2" answers
    exit
fi
configure
daemon munged
daemon mariadbd
await munged test -S "$folder/run/munge.sock"
await mariadbd test -S "$MYSQL_UNIX_PORT"
daemon slurmdbd
await slurmdbd timeout 5 sacctmgr --noheader list cluster
daemon slurmctld
await slurmctld answers
daemon node1
daemon node2
await "the nodes" idle
