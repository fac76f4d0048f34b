"""Give a rank its own directory on the disk that its plan offloads to, and delete it when the rank ends.

DeepSpeed writes below `nvme_path`, with the same file names in every job, and deletes nothing.
"""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from train_entry.contract import delete_abandoned_scratch, lock_scratch, scratch_prefix

OFFLOADS = ("offload_optimizer", "offload_param")


@contextmanager
def own_nvme_path(ds_config: Mapping[str, Any], owner: str) -> Iterator[dict[str, Any]]:
    """Yield the configuration with its `nvme_path` replaced by a new directory, which is deleted at the end.

    Directories that killed ranks left beside it are deleted first. Raise ValueError if no directory can be
    made.
    """
    zero = dict(ds_config.get("zero_optimization", {}))
    with ExitStack() as stack:
        own: dict[str, str] = {}
        for section in OFFLOADS:
            root = zero.get(section, {}).get("nvme_path")
            if root is None:
                continue
            if root not in own:
                own[root] = str(stack.enter_context(_own_directory(Path(root), owner)))
            zero[section] = {**zero[section], "nvme_path": own[root]}
        yield {**ds_config, "zero_optimization": zero} if own else dict(ds_config)


@contextmanager
def _own_directory(root: Path, owner: str) -> Iterator[Path]:
    delete_abandoned_scratch(root)
    with ExitStack() as held:
        try:
            directory = _locked_directory(root, owner, held)
            _open_past_page_cache(directory / "probe")
        except OSError as error:
            raise ValueError(
                f"cluster.nvme_path: {root} on {socket.gethostname()}: {error.strerror}; "
                "give a directory on a local disk"
            ) from error
        yield directory


def _locked_directory(root: Path, owner: str, held: ExitStack) -> Path:
    """Make and lock a new directory; `held` deletes it. Raise OSError if none can be made."""
    while True:
        directory = Path(tempfile.mkdtemp(prefix=f"{scratch_prefix()}{owner}-", dir=root))
        held.callback(shutil.rmtree, directory, ignore_errors=True)
        lock = lock_scratch(directory)
        if lock is not None:
            held.callback(os.close, lock)
        if lock is not None and directory.exists():
            return directory
        # Otherwise another rank, which deletes abandoned directories, found this one before it was locked.


def _open_past_page_cache(file: Path) -> None:
    """Raise OSError if DeepSpeed's aio cannot open a file here: it would end the rank without an error."""
    # deepspeed/ops/csrc/aio/common/deepspeed_aio_common.cpp, open_file
    try:
        os.close(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_DIRECT, 0o600))
    finally:
        file.unlink(missing_ok=True)
