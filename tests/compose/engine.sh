#!/bin/sh
# Prints DOCKER_HOST of an engine that works, with compose and buildx beside it; makes one where there is none and root may.
#   tests/compose/engine.sh FOLDER     FOLDER: the data of an engine that is started here; its pid is FOLDER/pid
# Exit status 77, and why, where none can be had.
set -eu
folder=$1
mkdir -p "$folder"
say() { echo "$*" >&2; }
none() { say "no container engine: $*"; exit 77; }
quiet() { "$@" >"$folder/log" 2>&1 || { tail -5 "$folder/log" >&2; return 1; }; }

# Compose v2 and buildx are not in every Debian release that is in use; later releases' packages need nothing of them but libc.
later_packages() {
    apt=$folder/apt
    mkdir -p "$apt/lists/partial" "$apt/archives/partial" "$apt/parts"
    echo "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] http://deb.debian.org/debian sid main" >"$apt/sources.list"
    cat >"$apt/apt.conf" <<END
Dir::Etc::SourceList "$apt/sources.list";
Dir::Etc::SourceParts "$apt/parts";
Dir::State::Lists "$apt/lists";
Dir::Cache::Archives "$apt/archives";
APT::Sandbox::User "root";
END
    APT_CONFIG=$apt/apt.conf quiet apt-get update -q
    (cd "$apt" && APT_CONFIG=$apt/apt.conf quiet apt-get download "$@")
    quiet dpkg -i --force-depends "$apt"/*.deb
}

if docker info >/dev/null 2>&1 && docker compose version >/dev/null 2>&1; then
    say "using the engine that runs"
    echo "${DOCKER_HOST:-unix:///var/run/docker.sock}"
    exit 0
fi
[ "$(id -u)" = 0 ] || none "none runs, and only root can start one"
command -v apt-get >/dev/null || none "none runs, and there is no apt-get to install one"
export DEBIAN_FRONTEND=noninteractive
if ! command -v dockerd >/dev/null || ! command -v iptables >/dev/null || ! command -v mmdebstrap >/dev/null; then
    say "installing docker.io, containerd, iptables, mmdebstrap"
    quiet apt-get update -q || none "apt-get update fails"
    quiet apt-get install -qy --no-install-recommends docker.io containerd iptables mmdebstrap || none "it cannot be installed"
fi
if ! docker compose version >/dev/null 2>&1 || ! docker buildx version >/dev/null 2>&1; then
    say "installing compose and buildx"
    later_packages docker-compose docker-buildx || none "compose and buildx cannot be installed"
    docker compose version >/dev/null 2>&1 || none "compose does not run here"
fi
export DOCKER_HOST="unix://$folder/socket"
if ! docker info >/dev/null 2>&1; then
    iptables-save >"$folder/iptables" # the engine forbids forwarding, also between bridges of others: put back at the end
    setsid dockerd --data-root "$folder/data" --exec-root "$folder/exec" -H "$DOCKER_HOST" --pidfile "$folder/pid" \
        --bip 172.31.250.1/24 --default-address-pool base=172.31.0.0/17,size=24 >"$folder/dockerd.log" 2>&1 </dev/null &
    tries=0
    until docker info >/dev/null 2>&1; do
        tries=$((tries + 1))
        [ $tries -lt 60 ] || { tail -3 "$folder/dockerd.log" >&2; none "dockerd does not come up"; }
        sleep 0.5
    done
fi
echo "$DOCKER_HOST"
