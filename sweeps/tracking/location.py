"""The location of MLflow's runs: the URI, the lock of an SQLite file, the version of a server."""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shlex
import shutil
import stat
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.parse import unquote, urlsplit, urlunsplit

from sweeps.errors import TrackingError

# Filesystems on which SQLite's locks are unreliable or absent, as /proc/mounts names them.
NETWORK_FILESYSTEMS = frozenset(
    "nfs nfs4 lustre gpfs beegfs ceph cifs smb3 smbfs afs panfs wekafs orangefs pvfs2 glusterfs ocfs2 gfs2 "
    "fuse.sshfs fuse.glusterfs fuse.ceph-fuse fuse.juicefs fuse.s3fs fuse.gcsfuse fuse.rclone".split()
)
VAR_TMP = Path("/var/tmp")  # unlike /tmp it outlives a reboot
PROBE_S = 3.0  # a server that has not answered by then is down


def default_uri(studies_dir: Path, mounts: str | None = None, var_tmp: Path = VAR_TMP) -> str:
    """Return the URI of an SQLite file beside the studies.

    If the studies are on a network filesystem, the file is in a local state directory of this host instead,
    which is created if missing. It is in the user's home, or in `var_tmp` if the home is on a network too.
    Raises TrackingError if another user made the one in `var_tmp`. `mounts` is the text of /proc/mounts.
    """
    if mounts is None:
        mounts = Path("/proc/mounts").read_text() if Path("/proc/mounts").exists() else ""
    studies = studies_dir.resolve()
    if not _is_on_network(studies, mounts):
        return f"sqlite:///{studies / 'mlflow.db'}"
    state = Path(os.environ.get("XDG_STATE_HOME") or "~/.local/state").expanduser().resolve() / "shardsweep"
    if _is_on_network(state, mounts):
        state = _own_directory(var_tmp / f"shardsweep-{os.getuid()}")
    else:
        state.mkdir(parents=True, exist_ok=True)
    name = hashlib.sha256(str(studies).encode()).hexdigest()[:12]
    return f"sqlite:///{state / f'mlflow-{name}.db'}"


def _own_directory(path: Path) -> Path:
    """Create a directory of ours if missing, and return it. Another user may have created it before."""
    try:
        with suppress(FileExistsError):
            path.mkdir(mode=0o700)
        found = path.lstat()
    except OSError as error:
        raise _not_ours(path, f"cannot be created: {error.strerror}") from error
    if not stat.S_ISDIR(found.st_mode):
        raise _not_ours(path, "is a symbolic link" if path.is_symlink() else "is no directory")
    if found.st_uid != os.getuid():
        raise _not_ours(path, "belongs to another user")
    return path


def _not_ours(path: Path, reason: str) -> TrackingError:
    way_out = "set tracking.uri=sqlite:////absolute/path/mlflow.db (--uri of a replay), or tracking=none"
    return TrackingError(f"{path} {reason}; {way_out}")


def artifact_root(studies_dir: Path) -> Path:
    return studies_dir.resolve() / "mlartifacts"


def _is_on_network(path: Path, mounts: str) -> bool:
    best, kind = Path("/"), ""
    for line in mounts.splitlines():
        _device, point, filesystem, *_rest = line.split(" ")
        # Spaces in a mount point are octal escapes. Of two mounts on one point the later hides the other.
        mount = Path(re.sub(r"\\(\d{3})", lambda code: chr(int(code[1], 8)), point))
        if path.is_relative_to(mount) and len(mount.parts) >= len(best.parts):
            best, kind = mount, filesystem
    return kind in NETWORK_FILESYSTEMS


def mask_password(uri: str, text: str | None = None) -> str:
    """Return `text` (default: the URI itself) with the URI's passwords replaced by ***."""
    credentials, _at, _host = uri.partition("//")[2].partition("/")[0].rpartition("@")
    secrets = [credentials.partition(":")[2], *re.findall(r"[?&](?:password|token)=([^&]+)", uri)]
    shown = uri if text is None else text
    for secret in filter(None, secrets):
        shown = shown.replace(secret, "***").replace(unquote(secret), "***")
    return shown


def is_server(uri: str) -> bool:
    return uri.startswith(("http://", "https://"))


def server_url(uri: str, port: int = 5000) -> str:
    """Return the address of the pages: the server without credentials, or the one `ui_command` starts."""
    if not is_server(uri):
        return f"http://127.0.0.1:{port}"
    parts = urlsplit(uri)
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path.rstrip("/"), "", ""))


def ui_command(uri: str, port: int = 5000) -> str:
    """Return the command that serves the results, on loopback only; for a server, its address."""
    if is_server(uri):
        return server_url(uri)
    beside = Path(sys.executable).with_name("mlflow")  # for an environment that is not activated
    program = "mlflow" if shutil.which("mlflow") or not beside.exists() else str(beside)
    command = shlex.join([program, "ui", "--backend-store-uri", mask_password(uri)])
    return command if port == 5000 else f"{command} --port {port}"


def sqlite_path(uri: str) -> Path | None:
    return Path(uri.removeprefix("sqlite:///")) if uri.startswith("sqlite:///") else None


@contextmanager
def sole_process(uri: str) -> Iterator[None]:
    """Lock an SQLite URI against other processes of this host.

    MLflow crashes if two processes create the tables of one SQLite file at the same time.
    """
    path = sqlite_path(uri)
    if path is None:
        yield
        return
    if not path.parent.is_dir():
        raise FileNotFoundError(f"there is no directory {path.parent}")
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a directory, not a file")
    with path.with_name(f"{path.name}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def server_version(uri: str) -> str:
    """Return the server's version; empty if it refuses to tell. Raises OSError if it does not answer."""
    try:
        with urllib.request.urlopen(f"{server_url(uri)}/version", timeout=PROBE_S) as answer:
            return str(answer.read(100).decode(errors="replace")).strip()
    except urllib.error.HTTPError as refusal:  # it may ask for a password even for its version
        refusal.close()
        return ""
