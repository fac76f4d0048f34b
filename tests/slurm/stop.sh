#!/bin/bash
# stop.sh DIR: stops only the processes that start.sh DIR started (found by pid file; steps by open log file)
set -u
DIR=$(readlink -m "${1:?usage: $0 DIR}"); export SLURM_CONF=$DIR/etc/slurm.conf PATH=$PATH:/usr/sbin
pid() { [ -s "$DIR/run/$1.pid" ] && cat "$DIR/run/$1.pid"; }
if p=$(pid slurmctld) && kill -0 "$p" 2>/dev/null; then
  timeout 10 scancel -u root >/dev/null 2>&1
  for i in $(seq 100); do [ -z "$(timeout 5 squeue -h 2>/dev/null)" ] && break; sleep 0.1; done
fi
# The next start throws the state away, so 1 s of grace before SIGKILL is enough.
end() { for p in "$@"; do kill "$p" 2>/dev/null; done
  for i in $(seq 10); do a=0; for p in "$@"; do kill -0 "$p" 2>/dev/null && a=1; done; [ $a = 0 ] && return; sleep 0.1; done
  for p in "$@"; do kill -9 "$p" 2>/dev/null; done; }
end $(pid slurmctld)
end $(for f in "$DIR"/run/slurmd.*.pid; do [ -s "$f" ] && cat "$f"; done)
for e in /proc/[0-9]*/exe; do case $(readlink "$e") in */slurmstepd*) p=${e#/proc/}; p=${p%/exe}
  ls -l /proc/$p/fd 2>/dev/null | grep -q " $DIR/" && kill -9 "$p" 2>/dev/null;; esac; done
end $(pid slurmdbd); end $(pid mariadbd); end $(pid munged)
rm -f "$DIR"/run/*.pid "$DIR"/run/*.sock "$DIR"/run/*.lock
[ "$(readlink /etc/slurm/slurm.conf 2>/dev/null)" = "$DIR/etc/slurm.conf" ] && rm -f /etc/slurm/slurm.conf
echo stopped
