#!/bin/sh
# Dockerfile, compose files and Kubernetes manifests, offline.
#   scripts/check_deploy.sh BIN     BIN: where hadolint, check-jsonschema, kubectl and kubernetes-validate are
set -eu
bin=$1
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"$bin/hadolint" Dockerfile
# rdma.yaml takes parts away with a tag that only compose itself knows: tests/compose/check.py reads it.
"$bin/check-jsonschema" -q --builtin-schema vendor.compose-spec compose/compose.yaml compose/gpu.yaml
for overlay in k8s/overlays/*; do
    made="$folder/$(basename "$overlay").yaml"
    "$bin/kubectl" kustomize "$overlay" >"$made"
    "$bin/kubernetes-validate" --strict -k 1.36 --quiet "$made" || { "$bin/kubernetes-validate" --strict -k 1.36 "$made"; exit 1; }
done
