"""Wall clocks of single processes that a run may set."""

from __future__ import annotations

import pathlib
import shutil
import struct
import subprocess

SOURCE = pathlib.Path(__file__).with_name("clock.c")


def build(folder: pathlib.Path) -> pathlib.Path | None:
    """Compile the library that changes the clocks; None without a C compiler."""
    compiler = shutil.which("cc")
    if compiler is None:
        return None
    library = folder / "clock.so"
    command = [compiler, "-O2", "-shared", "-fPIC", "-o", str(library), str(SOURCE), "-ldl"]
    subprocess.run(command, check=True, timeout=60)
    return library


class Clock:
    """The wall clock of the processes that are started with its `environment`."""

    def __init__(self, library: pathlib.Path | None, path: pathlib.Path) -> None:
        self._library = library
        self._path = path
        self._path.write_bytes(struct.pack("q", 0))

    def step(self, seconds: int) -> None:
        """Set the difference to the real time."""
        with open(self._path, "r+b") as file:
            file.write(struct.pack("q", seconds))

    def environment(self) -> dict[str, str]:
        if self._library is None:
            return {}
        return {"LD_PRELOAD": str(self._library), "CLOCK_OFFSET": str(self._path)}
