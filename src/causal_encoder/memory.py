"""How much memory this process takes, where the system tells (Linux)."""

from pathlib import Path

_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")
_FORGET_PEAK = "5"  # see clear_refs in proc(5)


def resident_mib() -> float | None:
    """What is in main memory now, in MiB; None if the system does not tell."""
    return _status_mib("VmRSS")


def peak_resident_mib() -> float | None:
    """The most that was in main memory since `forget_peak`; None if the system does not tell."""
    return _status_mib("VmHWM")


def forget_peak() -> bool:
    """Start a new peak; False if the system cannot, and the old one stays."""
    try:
        _CLEAR.write_text(_FORGET_PEAK)
    except OSError:
        return False
    return True


def _status_mib(name: str) -> float | None:
    try:
        for line in _STATUS.read_text().splitlines():
            if line.startswith(f"{name}:"):
                return int(line.split()[1]) / 1024  # kB
    except (OSError, IndexError, ValueError):
        return None
    return None
