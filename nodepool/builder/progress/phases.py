"""Read the phase of a running build from diskimage-builder's output (tested with 3.43)."""

from __future__ import annotations

import os
import re

STARTING = "starting"
_PHASE_OF_HOOKS = {
    "root": "root",
    "extra-data": "extra-data",
    "pre-install": "pre-install",
    "install": "install",
    "post-install": "post-install",
    "post-root": "post-install",
    "block-device": "block-device",
    "pre-finalise": "finalise",
    "finalise": "finalise",
    "cleanup": "cleanup",
}
PHASES = (STARTING, *dict.fromkeys(_PHASE_OF_HOOKS.values()), "converting", "checksums")
MAX_LAST_LINE = 200

TIMESTAMP = re.compile(r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d+ \| ")
_HOOKS = re.compile(
    r"(?:Running hooks from|dib-run-parts Running) /\S*?/(?P<hooks>[a-z-]+)\.d(?:/[\w.-]+)?$"
)
# "+ file:function:line   :   command": the trace of disk-image-create -x, which every build uses.
_TRACE = re.compile(r"\++ \S+:(?P<function>\w+):\d+\s+:\s+(?P<command>.*)")
_BUILDING_IN = re.compile(r"Building in (?P<path>/\S+)$")
_DIRECTORY = re.compile(r"(?:TMP_BUILD_DIR|TMP_IMAGE_DIR)=(?P<path>/\S+)$")
_DIB_NAME = re.compile(r"dib_(?:build|image)\.\w+")
_CONTROL = re.compile(r"(?:\x1b\[[0-?]*[ -/]*[@-~]|[\x00-\x1f\x7f-\x9f])+")
_MAX_DIRS = 8


class PhaseTracker:
    """Reads the phase from the lines of the output.

    With other programs the phase remains ``starting``.
    """

    def __init__(self) -> None:
        self.phase = STARTING
        #: Temporary directories of the tool; only its own ``mktemp`` names are accepted.
        self.build_dirs: list[str] = []
        self.last_line = ""

    def feed(self, line: str) -> bool:
        """Process one line; return True if the phase changed."""
        text = TIMESTAMP.sub("", line.rstrip("\r\n"), count=1)
        clean = _CONTROL.sub(" ", text).strip()
        if clean:
            self.last_line = clean[:MAX_LAST_LINE]
        trace = _TRACE.match(text)
        phase = (
            self._of_trace(trace["function"], trace["command"]) if trace else self._of_message(text)
        )
        if phase is None or phase == self.phase:
            return False
        self.phase = phase
        return True

    def _of_message(self, text: str) -> str | None:
        if match := _HOOKS.match(text):
            return _PHASE_OF_HOOKS.get(match["hooks"])
        if match := _BUILDING_IN.match(text):
            self._note(match["path"])
        elif text.startswith("Calculating image size"):
            return "block-device"
        elif text == "Converting image using qemu-img convert":
            return "converting"
        return None

    def _of_trace(self, function: str, command: str) -> str | None:
        if function == "mk_build_dir":
            if match := _DIRECTORY.match(command):
                self._note(match["path"])
        elif function == "compress_and_save_image":
            return "converting"
        elif function == "finish_image" and command.startswith(("md5sum ", "sha256sum ")):
            return "checksums"
        elif function == "main" and self.phase in ("finalise", "cleanup"):
            # The formats that are packed from the mounted tree, before the block device is removed.
            if command.startswith(("sudo tar ", "sudo mksquashfs ")):
                return "converting"
        elif (
            function == "main"
            and self.phase == "post-install"
            and command.startswith("DIB_IMAGE_SIZE=")
        ):
            return "block-device"
        return None

    def _note(self, path: str) -> None:
        if (
            _DIB_NAME.fullmatch(os.path.basename(path))
            and path not in self.build_dirs
            and len(self.build_dirs) < _MAX_DIRS
        ):
            self.build_dirs.append(path)
