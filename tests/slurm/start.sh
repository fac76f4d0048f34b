#!/bin/bash
# Real single-host Slurm test cluster for Debian 12 (slurm-wlm 22.05). Root only, loopback only, no systemd.
# usage: start.sh DIR        then:  . DIR/env.sh     stop: stop.sh DIR
# env: LINK=0 (1: symlink /etc/slurm/slurm.conf) NODES=4 CPUS=8 MEM_MB=16000 GPUS=4 PORT=16817 CGROUP=auto|0|1 (task/cgroup memory limit = true OOM)
#      ACCOUNTING=0 (neither slurmdbd nor mariadb: sacct is disabled)
set -euo pipefail
DIR=$(readlink -m "${1:?usage: $0 DIR}")
NODES=${NODES:-4} CPUS=${CPUS:-8} MEM_MB=${MEM_MB:-16000} GPUS=${GPUS:-4} PORT=${PORT:-16817} CGROUP=${CGROUP:-auto} ACCOUNTING=${ACCOUNTING:-1}
[ "$(id -u)" = 0 ] || { echo "must be root" >&2; exit 1; }
export PATH=$PATH:/usr/sbin:/sbin
log() { echo "[start_slurm +$(( $(date +%s%3N) - T00 ))ms] $*" >&2; }
T00=$(date +%s%3N)
alive() { [ -s "$1" ] && kill -0 "$(cat "$1")" 2>/dev/null; }
retry() { local n=$1; shift; for ((i=0;i<n;i++)); do timeout 5 "$@" >/dev/null 2>&1 && return 0; sleep 0.1; done; echo "TIMEOUT waiting for: $*" >&2; tail -n 5 "$DIR"/log/*.log >&2 || true; return 1; }

# --- idempotent: already up? -------------------------------------------------
if [ -f "$DIR/env.sh" ] && alive "$DIR/run/slurmctld.pid"; then
  . "$DIR/env.sh"
  if timeout 10 sinfo -h >/dev/null 2>&1 && { [ "$ACCOUNTING" = 0 ] || timeout 10 sacct -n >/dev/null 2>&1; }; then echo ready; exit 0; fi
fi
[ -x "$(dirname "$0")/stop.sh" ] && [ -d "$DIR/run" ] && "$(dirname "$0")/stop.sh" "$DIR" >&2 || true

# --- packages (.ci/run installs them) ------------------------------------------
need=(); for b in slurmctld:slurmctld slurmd:slurmd sbatch:slurm-client munged:munge; do
  command -v "${b%%:*}" >/dev/null || need+=("${b##*:}"); done
if [ "$ACCOUNTING" != 0 ]; then
  for b in slurmdbd:slurmdbd mariadbd:mariadb-server-core mariadb-install-db:mariadb-server-core mariadb:mariadb-client-core; do
    command -v "${b%%:*}" >/dev/null || need+=("${b##*:}"); done
  [ -n "$(ls /usr/lib/*/slurm-wlm/accounting_storage_mysql.so 2>/dev/null)" ] || need+=(slurm-wlm-mysql-plugin)
fi
[ -n "$(ls /usr/lib/*/slurm-wlm/select_cons_tres.so 2>/dev/null)" ] || need+=(slurm-wlm-basic-plugins)
if ((${#need[@]})); then echo "packages are missing: ${need[*]}" >&2; exit 3; fi

# --- the host's own name must resolve to a loopback address (srun/slurmd bind to it) ---
H=$(hostname -s)
ADDR=$(getent ahostsv4 "$H" | awk 'NR==1{print $1}') || true
[ -n "$ADDR" ] || { echo "127.0.0.1 $H" >> /etc/hosts; ADDR=127.0.0.1; }
case $ADDR in 127.*) ;; *) echo "$H resolves to $ADDR: put '127.0.0.1 $H' in /etc/hosts first" >&2; exit 1;; esac

# --- fresh state -------------------------------------------------------------
rm -rf "$DIR"/{etc,log,state,run,mysql} "$DIR"/spool.*
mkdir -p "$DIR"/{etc,log,state,run,mysql}; chmod 755 "$DIR" "$DIR"/*
for ((i=1;i<=NODES;i++)); do mkdir -p "$DIR/spool.n$i"; done
for ((i=0;i<GPUS;i++)); do mknod "$DIR/run/gpu$i" c 1 3; done     # copies of /dev/null: fake GPUs
head -c 1024 /dev/urandom > "$DIR/etc/munge.key"; chmod 400 "$DIR/etc/munge.key"

# constrain memory by cgroup (real OOM kills) if there is a writable v1 memory controller
CG=0
if [ "$CGROUP" != 0 ] && [ -d /sys/fs/cgroup/memory ] && [ -w /sys/fs/cgroup/memory ] && [ -d /sys/fs/cgroup/freezer ] ; then CG=1; fi
[ "$CGROUP" = 1 ] && CG=1
TASK=task/none PROC=proctrack/linuxproc; [ $CG = 1 ] && { TASK=task/cgroup; PROC=proctrack/cgroup; }   # linuxproc loses processes whose parent died
cat > "$DIR/etc/cgroup.conf" <<E
CgroupAutomount=no
ConstrainCores=no
ConstrainDevices=no
ConstrainRAMSpace=$([ $CG = 1 ] && echo yes || echo no)
ConstrainSwapSpace=no
E
GRES=""; GT="#"; if ((GPUS>0)); then GRES="Gres=gpu:$GPUS"; GT="GresTypes=gpu"; fi
{ cat <<E
ClusterName=t
SlurmctldHost=$H($ADDR)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
# cred_expire is also the delay before a requeued job may start again (default 120 s); below ~10 s the old step may still run, and "Duplicate jobid" drains the node
AuthInfo=socket=$DIR/run/munge.sock,cred_expire=10
SlurmctldPort=$PORT
SlurmctldPidFile=$DIR/run/slurmctld.pid
SlurmdPidFile=$DIR/run/slurmd.%n.pid
SlurmctldLogFile=$DIR/log/slurmctld.log
SlurmdLogFile=$DIR/log/slurmd.%n.log
StateSaveLocation=$DIR/state
SlurmdSpoolDir=$DIR/spool.%n
CommunicationParameters=NoCtldInAddrAny,NoInAddrAny
ProctrackType=$PROC
TaskPlugin=$TASK
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
SlurmdParameters=config_overrides
ReturnToService=2
MpiDefault=none
$GT
JobAcctGatherType=jobacct_gather/linux
JobAcctGatherFrequency=1
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=1,batch_sched_delay=0,sched_interval=2
# submitit requeues on the user signal (--signal=USR2@..), so preemption sends it too
SlurmctldParameters=preempt_send_user_signal
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
JobRequeue=1
KillWait=3
CompleteWait=0
MinJobAge=300
SlurmdTimeout=30
MaxJobCount=20000
MaxArraySize=10001
DefMemPerCPU=64
E
if [ "$ACCOUNTING" = 0 ]; then echo AccountingStorageType=accounting_storage/none; else cat <<E
AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost=$ADDR
AccountingStoragePort=$((PORT+1))
# the munged socket for talking to slurmdbd (AuthInfo does not apply there)
AccountingStoragePass=$DIR/run/munge.sock
AccountingStorageTRES=gres/gpu
E
fi
for ((i=1;i<=NODES;i++)); do echo "NodeName=n$i NodeHostname=$H NodeAddr=$ADDR Port=$((PORT+10+i)) CPUs=$CPUS RealMemory=$MEM_MB $GRES"; done
cat <<E
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP PriorityTier=1 PreemptMode=REQUEUE GraceTime=5
PartitionName=high Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=10 PreemptMode=OFF
E
} > "$DIR/etc/slurm.conf"
((GPUS>0)) && echo "NodeName=n[1-$NODES] Name=gpu File=$DIR/run/gpu[0-$((GPUS-1))]" > "$DIR/etc/gres.conf"
cat > "$DIR/etc/slurmdbd.conf" <<E
AuthType=auth/munge
AuthInfo=socket=$DIR/run/munge.sock
DbdHost=localhost
DbdAddr=$ADDR
DbdPort=$((PORT+1))
SlurmUser=root
PidFile=$DIR/run/slurmdbd.pid
LogFile=$DIR/log/slurmdbd.log
CommitDelay=0
CommunicationParameters=NoInAddrAny
StorageType=accounting_storage/mysql
StorageHost=localhost
StorageUser=slurm
StoragePass=slurm
StorageLoc=slurm_acct_db
E
chmod 600 "$DIR/etc/slurmdbd.conf"
cat > "$DIR/etc/my.cnf" <<E
[mariadbd]
datadir=$DIR/mysql
socket=$DIR/run/mysqld.sock
pid-file=$DIR/run/mariadbd.pid
log-error=$DIR/log/mariadbd.log
skip-networking
user=root
innodb_buffer_pool_size=64M
innodb_log_file_size=16M
innodb_flush_log_at_trx_commit=0
innodb_lock_wait_timeout=900
performance_schema=OFF
E
cat > "$DIR/env.sh" <<E
export SLURM_CONF=$DIR/etc/slurm.conf
E
. "$DIR/env.sh"
# LINK=1: clients that lost SLURM_CONF find the cluster by the default path
if [ "${LINK:-0}" = 1 ] && { [ -L /etc/slurm/slurm.conf ] || [ ! -e /etc/slurm/slurm.conf ]; }; then
  mkdir -p /etc/slurm; ln -sfn "$DIR/etc/slurm.conf" /etc/slurm/slurm.conf; fi
# The daemons must not inherit a surrounding job's variables.
for v in $(compgen -e | grep -E '^(SLURM|SLURMD|SBATCH|SRUN|SUBMITIT)_' | grep -v '^SLURM_CONF$' || true); do unset "$v"; done

# --- start -------------------------------------------------------------------
munged --key-file="$DIR/etc/munge.key" --socket="$DIR/run/munge.sock" --pid-file="$DIR/run/munged.pid" \
       --log-file="$DIR/log/munged.log" --seed-file="$DIR/run/munge.seed" --num-threads=10 --force 2>>"$DIR/log/munged.err"
log "munged up"
if [ "$ACCOUNTING" != 0 ]; then
mariadb-install-db --no-defaults --datadir="$DIR/mysql" --user=root --auth-root-authentication-method=normal \
       --skip-test-db --skip-name-resolve --innodb-log-file-size=16M >"$DIR/log/mariadb-install.log" 2>&1
log "database initialised"
setsid mariadbd --defaults-file="$DIR/etc/my.cnf" </dev/null >>"$DIR/log/mariadbd.out" 2>&1 &
SQL=(mariadb --no-defaults -uroot -S "$DIR/run/mysqld.sock")
retry 150 "${SQL[@]}" -e 'select 1'
"${SQL[@]}" -e "create database slurm_acct_db; create user slurm@localhost identified by 'slurm'; grant all on slurm_acct_db.* to slurm@localhost"
log "mariadb up"
MYSQL_UNIX_PORT="$DIR/run/mysqld.sock" slurmdbd </dev/null >>"$DIR/log/slurmdbd.out" 2>&1
retry 150 sacctmgr -n list cluster
log "slurmdbd up"
fi
slurmctld -c </dev/null >>"$DIR/log/slurmctld.out" 2>&1
for ((i=1;i<=NODES;i++)); do slurmd -N "n$i" </dev/null >>"$DIR/log/slurmd.out" 2>&1; done
log "slurmctld, slurmd started"
up() { [ "$(sinfo -h -p main -t idle -o %D)" = "$NODES" ] && { [ "$ACCOUNTING" = 0 ] || [ -n "$(sacctmgr -n -P list cluster format=ControlHost)" ]; }; }; export -f up; export NODES ACCOUNTING
retry 300 bash -c up
timeout 20 srun -n1 -t1 true                              # a job really runs...
[ "$ACCOUNTING" = 0 ] || retry 100 bash -c '[ "$(sacct -n -X -P -j 1 -o State)" = COMPLETED ]'   # ...and reaches accounting
bad=$(ss -Hltnp | grep -E '"(slurm|mariadb)' | awk '$4 !~ /^127\./{print $4}'); [ -z "$bad" ] || { echo "not loopback: $bad" >&2; exit 1; }
log "cgroup OOM limits: $CG"
echo ready
