#!/bin/sh
# diskimage-builder 3.43.0 (PyPI), its elements pkg-map and svc-map: the two tools that translate names for a family of
# distributions do not have the same families. For pkg-map, Rocky Linux, AlmaLinux and openEuler belong to `redhat`; for
# svc-map they belong to no family, so that the entry `default` applies to them. An element that maps packages and
# services with the keys `redhat` and `default` installs the package of one and enables the service of the other.
# Seen: "centos: redhat-package redhat-service; rocky: redhat-package default-service; almalinux: redhat-package
# default-service; openeuler: redhat-package default-service" (on one line).
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet --disable-pip-version-check diskimage-builder==3.43.0 PyYAML==6.0.3
PATH="$work/venv/bin:$PATH"
elements=$(python3 -c 'import diskimage_builder.paths as p; print(p.get_path("elements"))')
mkdir -p "$work/element" "$work/tree/tmp"
cat >"$work/element/pkg-map" <<'END'
{"family": {"redhat": {"tool": "redhat-package"}}, "default": {"tool": "default-package"}}
END
cat >"$work/element/svc-map" <<'END'
tool:
  redhat: redhat-service
  default: default-service
END
export IMAGE_ELEMENT_YAML="{tool: $work/element}" TMP_MOUNT_PATH="$work/tree"
seen=
for distro in centos rocky almalinux openeuler; do
    package=$(python3 "$elements/pkg-map/bin/pkg-map" --pkg-map "$work/element/pkg-map" --distro "$distro" tool 2>/dev/null)
    DISTRO_NAME=$distro python3 "$elements/svc-map/extra-data.d/10-merge-svc-map-files"
    service=$(sed -n 's/^tool: //p' "$work/tree/tmp/svc-map-services")
    seen="$seen; $distro: $package $service"
done
echo "${seen#; }"
other='redhat-package default-service'
[ "${seen#; }" = "centos: redhat-package redhat-service; rocky: $other; almalinux: $other; openeuler: $other" ]
