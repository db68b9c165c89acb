#!/usr/bin/env bash
# Runs a Python program as one process on each of several emulated hosts, as `examples/cluster/launch.py` does without
# a network: network namespaces on a bridge, every host with a link of a rate, and a latency from host to host.
#
#   sudo papers/tree_attention/hosts.sh HOSTS DEVICES MBIT MILLISECONDS -m papers.tree_attention.latency ...
#
# Linux only. A latency needs the kernel's sch_netem. All namespaces go with the processes in them.
set -euo pipefail
if [[ -z ${INSIDE:-} ]]; then
  (($# > 4)) || { sed -n '2,6s/^# \?//p' "$0" >&2; exit 2; }
  # the first process of a namespace of processes: the others are killed when it ends
  INSIDE=1 exec unshare --net --mount --pid --fork --kill-child --mount-proc "$0" "$@"
fi
hosts=$1 devices=$2 mbit=$3 latency=$4
shift 4
mkdir -p /run/netns
mount -t tmpfs tmpfs /run/netns # names that this program alone sees
ip link add name switch type bridge
ip link set switch up

# Shapes what an interface sends. Segments of half a millisecond at most, or small messages wait for large ones.
piece=$((mbit * 125 / 2 > 65536 ? 65536 : mbit * 125 / 2 < 3000 ? 3000 : mbit * 125 / 2))
rate() { tc "$@" root handle 1: tbf rate "${mbit}mbit" burst $((piece + 4096)) limit 32m; }

for ((i = 1; i <= hosts; i++)); do
  ip netns add "host$i"
  ip link add "link$i" type veth peer name eth0 netns "host$i"
  ip link set "link$i" master switch up
  ip -n "host$i" link set lo mtu 1500 up # by default a window is one segment, acknowledged after 40 ms
  ip -n "host$i" link set eth0 gso_max_size "$piece" up
  ip -n "host$i" addr add "10.99.0.$i/24" dev eth0
  rate -n "host$i" qdisc add dev eth0
  rate qdisc add dev "link$i"
  if [[ $latency != 0 ]]; then
    tc -n "host$i" qdisc add dev eth0 parent 1:1 handle 10: netem delay "${latency}ms" limit 100000
  fi
done
export JAX_PLATFORMS=cpu JAX_COORDINATOR_ADDRESS=10.99.0.1:7000 JAX_NUM_PROCESSES=$hosts
export XLA_FLAGS="${XLA_FLAGS:-} --xla_force_host_platform_device_count=$devices"
for ((i = 1; i <= hosts; i++)); do
  # gloo listens on the address that the host's name stands for
  JAX_PROCESS_ID=$((i - 1)) ip netns exec "host$i" unshare --uts \
    sh -c 'hostname "$0"; exec "$@"' "10.99.0.$i" "${PYTHON:-python}" "$@" &
done
for ((i = 1; i <= hosts; i++)); do wait -n; done
