"""Processes of a session, and where they listen, by Linux' /proc."""

from __future__ import annotations

import ipaddress
import os
from contextlib import suppress
from pathlib import Path

LISTEN = "0A"


def of_session(session: int) -> list[int]:
    """Those that run: one that has ended, and waits to be collected, is not among them."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with suppress(OSError):
                fields = (folder / "stat").read_text().rpartition(")")[2].split()
                if int(fields[3]) == session and fields[0] != "Z":
                    found.append(int(folder.name))
    return found


def listening(pids: list[int]) -> set[str]:
    """Addresses, without ports, at which one of the processes accepts connections."""
    inodes: set[str] = set()
    for pid in pids:
        with suppress(OSError):
            for link in Path(f"/proc/{pid}/fd").iterdir():
                with suppress(OSError):
                    inodes.add(os.readlink(link))
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == LISTEN and f"socket:[{fields[9]}]" in inodes:
                found.add(_address(fields[1].partition(":")[0]))
    return found


def _address(text: str) -> str:
    """The kernel writes words of four bytes in this machine's order."""
    words = [bytes.fromhex(text[i : i + 8]) for i in range(0, len(text), 8)]
    address = ipaddress.ip_address(b"".join(word[::-1] for word in words))
    return str(getattr(address, "ipv4_mapped", None) or address)
