#!/bin/sh
# Builds the images of packaging/Containerfile from the files of a release. Where no builder is, it says so and makes none.
# Usage: packaging/build_images.sh DIST [TARGET...]   (targets: cpu cuda; else both)
# From the environment: IMAGE, what they are called (localhost/outrider); BUILDER, with its own options, for "podman",
# "buildah" or "docker"; BUILD_OPTIONS, as in "--build-arg BASE=registry.example/debian:trixie-slim --network host".
set -eu
dist=${1:?the directory that make release made}
shift
version=$(basename "$(ls "$dist"/outrider-*-py3-none-any.whl)" | cut -d- -f2)
if [ -z "${BUILDER:-}" ]; then
    for name in podman buildah docker; do
        if command -v "$name" > /dev/null && "$name" info > /dev/null 2>&1; then BUILDER=$name; break; fi
    done
fi
if [ -z "${BUILDER:-}" ]; then
    echo "no image was built: there is no podman, buildah or docker here that works (Debian has packages of the first two)"
    exit 0
fi
# Health checks are no part of OCI's own format, and docker knows no other.
case "$BUILDER" in *docker*) format="" ;; *) format="--format docker" ;; esac
for target in ${@:-cpu cuda}; do
    name=${IMAGE:-localhost/outrider}:$version-$target
    # shellcheck disable=SC2086
    $BUILDER build $format ${BUILD_OPTIONS:-} --file "$(dirname "$0")/Containerfile" --target "$target" --tag "$name" "$dist"
    echo "built $name"
done
